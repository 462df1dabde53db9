"""Constant reward under a noisy sampler: nothing is to be learned, so what moves is drift."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.recipes import without_baseline
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.toy.ascent import Sampler

PANEL = "reward 1 for every response"
STEPS, NOISE = 120, 0.2
SOURCE = "arXiv:2609.20807"
said = partial(over, source=SOURCE)
ARMS: dict[str, tuple[str, Sampler]] = {
    "no correction": ("reinforce", Sampler(sigma=NOISE)),
    "token TIS": ("token_tis", Sampler(sigma=NOISE)),
    "centered": ("centered", Sampler(sigma=NOISE)),
    "centered + TIS": ("centered_tis", Sampler(sigma=NOISE)),
    "no correction, frozen sampler": ("reinforce", Sampler(sigma=NOISE, frozen=True)),
    "no correction, no mismatch": ("reinforce", Sampler()),
}


def arms(size: Size) -> Sequence[Arm]:
    """The four ways to weigh, and two other samplers."""

    def arm(name: str, entry: str, sampler: Sampler) -> Arm:
        plan = Drawn(steps=size.of(STEPS), sampler=sampler, reward="constant")
        walk = partial(plan.walk, without_baseline(entry))
        return Arm(name=name, panel=PANEL, base="mid", walk=walk, marks=plan.quarters())

    return [arm(name, *given) for name, given in ARMS.items()]


def orderings(size: Size) -> Sequence[Ordering]:
    """Drift without centering, none with it."""
    says = "With constant reward a policy without score centering drifts away; centered it stays."

    def point(arm: str) -> Point:
        return Point(panel=PANEL, arm=arm)

    return [
        said(says, point("centered"), point("no correction")),
        said(
            "Truncated importance weights slow the drift down and do not stop it.",
            point("centered + TIS"),
            point("token TIS"),
        ),
        said(
            "Synced back, the drift compounds; a frozen sampler is approached and no more.",
            point("no correction, frozen sampler"),
            point("no correction"),
        ),
    ]


STUDY = Study(
    name="placebo",
    title="What moves when every response earns the same?",
    intro=(
        "Every response has reward 1, so the gradient of the objective is 0 and a policy that "
        "moves drifts. The sampler's weights carry a fixed Gaussian direction, 0.2 of each "
        "matrix's root mean square; 32 prompts with 8 responses a batch, one plain step each.",
    ),
    panels=(
        Panel(
            name=PANEL,
            note="Whatever leaves its start drifts; without mismatch only chance moves the policy.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
