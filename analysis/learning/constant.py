"""A constant added to the reward: an uncorrected policy is moved by it, a centered one is not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from windage.analysis.learning.drawn import Drawn, Reward
from windage.analysis.learning.recipes import without_baseline
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get
from windage.toy.ascent import Sampler

SOURCE = "arXiv:2609.20807"
said = partial(over, source=SOURCE)
ZERO_ONE, PLUS_MINUS, GROUP = "reward 0 or 1", "reward -1 or 1", "reward minus group mean"
REWARDS: dict[str, Reward] = {
    ZERO_ONE: "zero or one",
    PLUS_MINUS: "plus or minus",
    GROUP: "plus or minus",
}
ENTRIES = {
    "no correction": "group_mean",
    "centered": "centered",
    "token TIS": "token_tis",
    "centered + TIS": "centered_tis",
}
STEPS, NOISE = 120, 0.2


def arms(size: Size) -> Sequence[Arm]:
    """Two offsets of the reward without a baseline for all, and the group mean for two."""

    def arm(panel: str, name: str) -> Arm:
        plan = Drawn(
            steps=size.of(STEPS), rate=0.03, sampler=Sampler(sigma=NOISE), reward=REWARDS[panel]
        )
        entry = ENTRIES[name]
        rule = get(entry) if panel == GROUP else without_baseline(entry)
        walk = partial(plan.walk, rule)
        return Arm(name=name, panel=panel, base="mid", walk=walk, marks=plan.quarters())

    offsets = [arm(panel, name) for panel in (ZERO_ONE, PLUS_MINUS) for name in ENTRIES]
    return [*offsets, arm(GROUP, "no correction"), arm(GROUP, "centered")]


def orderings(size: Size) -> Sequence[Ordering]:
    """Centering makes the offset immaterial."""

    def point(panel: str, arm: str) -> Point:
        return Point(panel=panel, arm=arm)

    return [
        *(
            said(
                f"Without a baseline centering ends above no correction ({panel}).",
                point(panel, "centered"),
                point(panel, "no correction"),
                margin=margin,
            )
            for panel, margin in ((ZERO_ONE, 0.1), (PLUS_MINUS, 0.0))
        ),
        said(
            "Centered, reward -1 or 1 does as well as with the group mean, within 0.05.",
            point(PLUS_MINUS, "centered"),
            point(GROUP, "centered"),
            margin=-0.05,
        ),
        said(
            "Centering ends above token TIS (reward 0 or 1).",
            point(ZERO_ONE, "centered"),
            point(ZERO_ONE, "token TIS"),
            robust=False,
        ),
    ]


STUDY = Study(
    name="constant",
    title="Does a constant added to the reward matter?",
    intro=(
        "Off-policy an update contains the reward's mean times the drift. The sampler's weights "
        "carry a fixed Gaussian direction, 0.2 of each matrix's root mean square.",
    ),
    panels=(
        Panel(name=ZERO_ONE, note="The reward's mean is positive: drift towards the sampler."),
        Panel(name=PLUS_MINUS, note="The same task with the reward's mean below 0."),
        Panel(name=GROUP, note="The baseline takes the mean away, prompt by prompt."),
    ),
    arms=arms,
    orderings=orderings,
)
