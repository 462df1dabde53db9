"""Samplers with rounded or noisy weights, with and without a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.recipes import PPO, grouped, without_baseline
from windage.analysis.learning.study import QUICK, Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get
from windage.toy.ascent import Sampler
from windage.toy.training import Rule

SOURCE = "arXiv:2609.20807"
said = partial(over, source=SOURCE)
NOISY, THREE, TWO = "noise 0.4, no baseline", "3 bits, no baseline", "2 bits, no baseline"
MILD, ROUNDED = "noise 0.2, group mean", "3 bits, group mean"
SAMPLERS = {
    NOISY: Sampler(sigma=0.4),
    THREE: Sampler(bits=3),
    TWO: Sampler(bits=2),
    MILD: Sampler(sigma=0.2),
    ROUNDED: Sampler(bits=3),
}
LENGTHS = {NOISY: 160, THREE: 120, TWO: 120, MILD: 160, ROUNDED: 120}
RATES = {NOISY: 0.03, THREE: 0.03, TWO: 0.03, MILD: 0.1, ROUNDED: 0.1}
ENTRIES = {
    "no correction": "group_mean",
    "token TIS": "token_tis",
    "centered": "centered",
    "centered + TIS": "centered_tis",
}
WITH_MEAN = (MILD, ROUNDED)
NOTES = {
    NOISY: "Severe noise and rewards with a mean: the setting of the paper's collapse.",
    THREE: "Moderate rounding.",
    TWO: "Rounding that leaves the sampler almost no right answers.",
    MILD: "With the group mean most of the drift is gone before any correction.",
    ROUNDED: "The same with rounding; compare PPO, whose clip looks at the sampler.",
}


def arms(size: Size) -> Sequence[Arm]:
    """The four ways to weigh under each sampler; with the group mean PPO as well."""

    def arm(panel: str, name: str, rule: Rule) -> Arm:
        plan = Drawn(steps=size.of(LENGTHS[panel]), rate=RATES[panel], sampler=SAMPLERS[panel])
        walk = partial(plan.walk, rule)
        return Arm(name=name, panel=panel, base="mid", walk=walk, marks=plan.quarters())

    found = []
    for panel in SAMPLERS:
        based = get if panel in WITH_MEAN else without_baseline
        found += [arm(panel, name, based(entry)) for name, entry in ENTRIES.items()]
    return [*found, *(arm(panel, "PPO", grouped(PPO)) for panel in WITH_MEAN)]


def orderings(size: Size) -> Sequence[Ordering]:
    """What survives severe rounding, and what does not even with a baseline."""

    def ends(panel: str, high: str, low: str, says: str, *, robust: bool = True) -> Ordering:
        return said(
            f"{says} ({panel}).",
            Point(panel=panel, arm=high),
            Point(panel=panel, arm=low),
            robust=robust,
        )

    stays = "Without a baseline centered and truncated weights end above truncated ones alone"
    return [
        *(ends(panel, "centered + TIS", "token TIS", stays) for panel in (NOISY, THREE, TWO)),
        ends(NOISY, "centered", "token TIS", "Without a baseline centering ends above token TIS"),
        ends(TWO, "centered", "token TIS", "Without a baseline centering ends above token TIS"),
        *(
            ends(panel, "no correction", "PPO", "PPO against the sampler collapses")
            for panel in WITH_MEAN
        ),
        *(
            ends(panel, "centered", "token TIS", "Centering ends above token TIS", robust=False)
            for panel in WITH_MEAN
        ),
        *(
            said(
                f"No correction collapses even with the group mean ({panel}).",
                Point(panel=panel, arm="no correction", step=0),
                Point(panel=panel, arm="no correction"),
                robust=False,
            )
            for panel in WITH_MEAN
        ),
    ]


STUDY = Study(
    name="quantised",
    title="Who survives a rounded or noisy sampler?",
    intro=(
        "The sampler's matrices are rounded to a few bits a column, or carry a fixed Gaussian "
        "direction; the policy that is trained is exact. Rewards are 1 and -1, with no baseline or "
        "minus the group's mean.",
    ),
    panels=tuple(Panel(name=name, note=note) for name, note in NOTES.items()),
    arms=arms,
    orderings=orderings,
    quick=replace(QUICK, length=0.3),
)
