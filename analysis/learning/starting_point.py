"""The recommended starting point against each of its parts removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.advantage import constant
from windage.estimators.aggregation import sequence_mean
from windage.estimators.catalogue import get
from windage.estimators.correction import Correction, none, token
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.toy.ascent import Sampler
from windage.toy.sums import Sums

SOURCE = "document 002"
said = partial(over, source=SOURCE)
PANEL = "16 updates late, noise 0.1"
WHOLE = "starting point"
HORIZON = Sums().horizon
STEPS, RATE, LAG, UNBOUNDED, NOISE = 120, 0.1, 16, 64, 0.1


def parts() -> dict[str, Estimator]:
    """The recipe, and without one part each; the staleness bound is the sampler's."""
    recipe = replace(get("starting_point", length=HORIZON), admission=())
    return {
        WHOLE: recipe,
        "without centering": replace(recipe, centering=None),
        "without weights": replace(
            recipe, corrections=(Correction(reach=use(token), map=use(none)),)
        ),
        "without group mean": replace(recipe, advantage=use(constant)),
        "mean over tokens instead of a constant": replace(recipe, aggregation=use(sequence_mean)),
        "without staleness bound": recipe,
    }


def arms(size: Size) -> Sequence[Arm]:
    """Steps are scaled by the horizon, so that they are those of a sum over tokens."""
    found = []
    for name, rule in parts().items():
        lag = UNBOUNDED if name == "without staleness bound" else LAG
        sampler = Sampler(lag=lag, sigma=NOISE)
        plan = Drawn(steps=size.of(STEPS), rate=RATE * HORIZON, sampler=sampler)
        walk = partial(plan.walk, rule)
        found.append(Arm(name=name, panel=PANEL, base="mid", walk=walk, marks=plan.quarters()))
    return found


def orderings(size: Size) -> Sequence[Ordering]:
    """Which part is missed."""

    def ends(low: str, *, robust: bool) -> Ordering:
        return said(
            f"The starting point ends above itself {low}.",
            Point(panel=PANEL, arm=WHOLE),
            Point(panel=PANEL, arm=low),
            robust=robust,
        )

    return [
        ends("without weights", robust=True),
        ends("without staleness bound", robust=False),
        ends("without centering", robust=False),
        ends("without group mean", robust=False),
    ]


STUDY = Study(
    name="starting_point",
    title="Which part of the starting point matters?",
    intro=(
        "Group mean, weights truncated at 5, score centering, a constant for the length, a bound "
        f"on staleness. The sampler is {LAG} updates late ({UNBOUNDED} without the bound) and its "
        "weights carry a fixed Gaussian direction, 0.1 of each matrix's root mean square.",
    ),
    panels=(Panel(name=PANEL, note="The recipe, and the recipe without one part each."),),
    arms=arms,
    orderings=orderings,
)
