"""Samplers that lag: centered alone, and with truncation or masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.recipes import PPO, grouped
from windage.analysis.learning.study import QUICK, Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get
from windage.toy.ascent import Sampler
from windage.toy.training import Rule

SOURCE = "arXiv:2609.20807"
said = partial(over, source=SOURCE)
LATE, DOSE = "32 updates late", "by lag"
STEPS, RATE = 120, 0.1
LAGS = (0, 1, 3, 7, 15, 31, 63)
RULES: dict[str, Rule] = {
    "no correction": get("group_mean"),
    "centered": get("centered"),
    "token TIS": get("token_tis"),
    "centered + TIS": get("centered_tis"),
    "centered + mask": get("centered_mask"),
    "PPO": grouped(PPO),
    "trajectory IS": get("trajectory_is"),
}
DOSED = ("no correction", "centered", "token TIS", "centered + TIS")


def arms(size: Size) -> Sequence[Arm]:
    """Every rule 32 updates late, and four of them at each lag."""

    def plan(lag: int) -> Drawn:
        return Drawn(steps=size.of(STEPS), rate=RATE, sampler=Sampler(lag=lag))

    late = [
        Arm(
            name=name,
            panel=LATE,
            base="mid",
            walk=partial(plan(32).walk, rule),
            marks=plan(32).quarters(),
        )
        for name, rule in RULES.items()
    ]
    dosed = [
        Arm(
            name=name,
            panel=DOSE,
            base="mid",
            walk=partial(plan(lag).walk, RULES[name]),
            marks=[size.of(STEPS)],
            x=float(lag),
        )
        for lag in LAGS
        for name in DOSED
    ]
    return [*late, *dosed]


def orderings(size: Size) -> Sequence[Ordering]:
    """Staleness needs weights; centering alone does not cure it."""

    def ends(high: str, low: str, says: str, *, robust: bool = True) -> Ordering:
        return said(says, Point(panel=LATE, arm=high), Point(panel=LATE, arm=low), robust=robust)

    return [
        ends("token TIS", "no correction", "Late data without weights ends below token TIS."),
        ends("token TIS", "centered", "Centering alone does not cure staleness."),
        ends("centered + TIS", "centered", "Centered with truncated weights it is cured."),
        ends("PPO", "no correction", "PPO survives staleness."),
        ends("token TIS", "PPO", "Token TIS ends above PPO."),
        ends("centered + TIS", "token TIS", "Centering adds to token TIS.", robust=False),
    ]


STUDY = Study(
    name="staleness",
    title="How late may the sampler be?",
    intro=(
        "The sampler holds the weights of some updates ago. Rewards are 1 and -1 minus the group's "
        "mean; plain steps of rate 0.1.",
    ),
    panels=(
        Panel(name=LATE, note="One lag, every rule: who needs weights, and which."),
        Panel(
            name=DOSE,
            x="lag in updates",
            log=True,
            note="The end of training by lag: how fast each rule loses what it learns on-policy.",
        ),
    ),
    arms=arms,
    orderings=orderings,
    quick=replace(QUICK, length=0.25),
)
