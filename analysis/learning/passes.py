"""Several passes over one batch, with and without a clip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.recipes import PPO, grouped
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get
from windage.toy.training import Rule

SOURCE = "this task"
said = partial(over, source=SOURCE)
BATCHES, UPDATES = "same batches", "same updates"
PASSES = (1, 2, 4, 8)
STEPS, MOST = 24, 96
RULES: dict[str, Rule] = {
    "no correction": get("group_mean"),
    "PPO": grouped(PPO),
    "token TIS": get("token_tis"),
}


def arms(size: Size) -> Sequence[Arm]:
    """Every rule with each number of passes, at equal batches and at equal updates."""
    found = []
    for passes in PASSES:
        steps = {BATCHES: size.of(STEPS), UPDATES: max(1, size.of(MOST) // passes)}
        for panel, batches in steps.items():
            plan = Drawn(steps=batches, rate=0.1, passes=passes)
            found += [
                Arm(
                    name=name,
                    panel=panel,
                    base="mid",
                    walk=partial(plan.walk, rule),
                    marks=[batches],
                    x=float(passes),
                )
                for name, rule in RULES.items()
            ]
    return found


def orderings(size: Size) -> Sequence[Ordering]:
    """More passes use a batch better, until the policy has left it."""

    def point(panel: str, arm: str, passes: int) -> Point:
        return Point(panel=panel, arm=arm, x=float(passes))

    return [
        *(
            said(
                f"With eight passes {name} ends above no correction.",
                point(BATCHES, name, 8),
                point(BATCHES, "no correction", 8),
            )
            for name in ("PPO", "token TIS")
        ),
        *(
            said(
                f"At equal updates fresh batches beat eight passes ({name}).",
                point(UPDATES, name, 1),
                point(UPDATES, name, 8),
            )
            for name in RULES
        ),
    ]


STUDY = Study(
    name="passes",
    title="How often may one batch be used?",
    intro=(
        "The sampler is in step with the policy when a batch is drawn; each further pass over the "
        "batch is off-policy by one more update. Reward minus group mean, plain steps of rate 0.1.",
    ),
    panels=(
        Panel(
            name=BATCHES,
            x="passes",
            log=True,
            note="As many batches for everyone: more passes are more updates.",
        ),
        Panel(
            name=UPDATES,
            x="passes",
            log=True,
            note="As many updates for everyone: more passes are fewer fresh batches.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
