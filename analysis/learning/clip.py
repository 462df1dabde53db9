"""A loose clip of the gradient's norm where right responses are scarce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from windage.analysis.learning.composition import composed
from windage.analysis.learning.recipes import TRAJECTORY
from windage.analysis.learning.recorded import Recorded
from windage.analysis.learning.study import FULL, Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import World
from windage.estimators.catalogue import get
from windage.toy.learning import State
from windage.toy.training import Rule

SOURCE = "Le Roux et al., 2025, arXiv:2503.14286"
said = partial(over, source=SOURCE)
TIGHT, LOOSE = "gradient norm at most 1", "gradient norm at most 100"
LIMITS = {TIGHT: 1.0, LOOSE: 100.0}
PARTS = (0.1, 0.2, 0.3, 0.5)
PROMPTS, GROUP_SIZE, RESPONSES, MINIBATCH, EPOCHS = 256, 16, 2_048, 32, 6
RULES: dict[str, Rule] = {
    "trajectory IS": TRAJECTORY,
    "TIS": get("tis_both_signs"),
    "TOPR": get("topr"),
    "positives only": get("positives_only"),
}


def walk(rule: Rule, p: float, limit: float, size: Size, place: World) -> Iterator[State]:
    """Plain steps on few responses at a time, of which a share p is right."""
    plan = Recorded(epochs=size.of(EPOCHS), rate=0.1, limit=limit, optimizer="sgd", batch=MINIBATCH)
    record = place.record(min(PROMPTS, size.train), GROUP_SIZE)
    return plan.along(composed(record, p, responses(size), place), rule, place)


def responses(size: Size) -> int:
    """How many are trained on."""
    return RESPONSES * size.train // FULL.train


def arms(size: Size) -> Sequence[Arm]:
    """Four rules at each composition of the data, with a tight clip and a loose one."""
    updates = responses(size) // MINIBATCH * size.of(EPOCHS)
    return [
        Arm(
            name=name,
            panel=panel,
            base="mid",
            walk=partial(walk, rule, p, limit, size),
            marks=[updates],
            x=p,
        )
        for panel, limit in LIMITS.items()
        for p in PARTS
        for name, rule in RULES.items()
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """Who needs the tight clip, and who does not."""

    def at(panel: str, arm: str, p: float) -> Point:
        return Point(panel=panel, arm=arm, x=p)

    return [
        *(
            said(
                f"One in ten is right, the clip is loose: TOPR ends above {name}.",
                at(LOOSE, "TOPR", 0.1),
                at(LOOSE, name, 0.1),
            )
            for name in ("trajectory IS", "TIS")
        ),
        *(
            said(
                f"A loose clip costs TOPR nothing ({p:.0%} right): it ends within 0.05.",
                at(LOOSE, "TOPR", p),
                at(TIGHT, "TOPR", p),
                margin=-0.05,
            )
            for p in (0.1, 0.3)
        ),
        said(
            "A loose clip harms importance weights without truncation (30% right).",
            at(TIGHT, "trajectory IS", 0.3),
            at(LOOSE, "trajectory IS", 0.3),
            margin=0.05,
        ),
        said(
            "One in ten is right, the clip is loose: TOPR ends above positives-only training.",
            at(LOOSE, "TOPR", 0.1),
            at(LOOSE, "positives only", 0.1),
            robust=False,
        ),
    ]


AXIS = "share of responses that are right"
STUDY = Study(
    name="clip",
    title="Who needs a tight clip of the gradient?",
    intro=(
        f"{RESPONSES:,} recorded responses of which a given share is right, {MINIBATCH} a step, "
        f"plain steps of rate 0.1, {EPOCHS} epochs. Only the greatest norm of a gradient differs "
        "between the panels.",
    ),
    panels=(
        Panel(name=TIGHT, x=AXIS, note="The usual clip."),
        Panel(name=LOOSE, x=AXIS, note="A hundred times looser: rare large ratios come through."),
    ),
    arms=arms,
    orderings=orderings,
)
