"""Recorded responses: which rules rise, stall, or lose the form of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.recipes import (
    GEOMETRIC_TOPR,
    PPO,
    TOKEN_TOPR,
    TRAJECTORY,
    preference,
)
from windage.analysis.learning.recorded import Recorded
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study
from windage.analysis.learning.world import World
from windage.estimators.catalogue import get
from windage.toy.learning import State
from windage.toy.training import Rule

TOPR = "Le Roux et al., 2025, arXiv:2503.14286"
AMPLE, SCARCE = "512 prompts, Adam 1e-3", "128 prompts, Adam 3e-4"
EPOCHS = (1, 2, 4, 8, 16)
RULES: dict[str, Rule] = {
    "naive": get("naive"),
    "positives only": get("positives_only"),
    "TOPR": get("topr"),
    "TIS": get("tis_both_signs"),
    "PPO": PPO,
    "trajectory IS": TRAJECTORY,
    "TOPR, token ratio": TOKEN_TOPR,
    "TOPR, geometric": GEOMETRIC_TOPR,
}
PAIRS = "DPO"


def recorded(panel: str, size: Size) -> Recorded:
    """The run of a panel."""
    epochs = size.of(EPOCHS[-1])
    if panel == SCARCE:
        return Recorded(prompts=min(128, size.train), epochs=epochs, rate=3e-4)
    return Recorded(prompts=size.train, epochs=epochs)


def arm(panel: str, name: str, size: Size) -> Arm:
    """A rule by name on the data of a panel."""
    plan = recorded(panel, size)
    walk: Callable[[World], Iterator[State]] = (
        partial(plan.walk_pairs, preference) if name == PAIRS else partial(plan.walk, RULES[name])
    )
    marks = plan.epochs_at(*EPOCHS)
    return Arm(name=name, panel=panel, base="mid", walk=walk, marks=marks)


def arms(size: Size) -> Sequence[Arm]:
    """Every rule on ample data; on scarce data those that rise and fall, and three to compare."""
    scarce = ("naive", PAIRS, "PPO", "positives only", "TOPR")
    return [
        *(arm(AMPLE, name, size) for name in (*RULES, PAIRS)),
        *(
            replace(
                arm(SCARCE, name, size), marks=recorded(SCARCE, size).epochs_at(*range(1, 9), 12)
            )
            for name in scarce
        ),
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """What the paper says of these rules, and what this task shows."""

    def at(name: str, figure: str = "pass_at_1", step: int | None = None) -> Point:
        return Point(panel=AMPLE, arm=name, figure=figure, step=step)

    def scarce(name: str, step: int | None) -> Point:
        return Point(panel=SCARCE, arm=name, step=step)

    early = recorded(SCARCE, size).updates * min(4, recorded(SCARCE, size).epochs)
    return [
        Ordering(
            says="Off-policy REINFORCE with negatives ends with malformed answers only.",
            source=TOPR,
            high=at("naive", "invalid"),
            low=0.9,
        ),
        Ordering(
            says="TOPR keeps rising and passes positives-only training late.",
            source=TOPR,
            high=at("TOPR"),
            low=at("positives only"),
        ),
        Ordering(
            says="PPO stalls: TOPR ends far above it.",
            source=TOPR,
            high=at("TOPR"),
            low=at("PPO"),
            margin=0.1,
        ),
        Ordering(
            says="DPO on the same data ends far below TOPR.",
            source=TOPR,
            high=at("TOPR"),
            low=at(PAIRS),
            margin=0.3,
        ),
        Ordering(
            says="With so many positives truncated weights on both signs end above TOPR.",
            source="this task",
            high=at("TIS"),
            low=at("TOPR"),
        ),
        Ordering(
            says="TOPR ends above truncated weights on both signs.",
            source=TOPR,
            high=at("TOPR"),
            low=at("TIS"),
            robust=False,
        ),
        Ordering(
            says="TOPR gives fewer invalid answers than positives-only training.",
            source=TOPR,
            high=at("positives only", "invalid"),
            low=at("TOPR", "invalid"),
            robust=False,
        ),
        Ordering(
            says="TOPR leaves fewer prompts without a right answer than positives-only training.",
            source=TOPR,
            high=at("positives only", "never"),
            low=at("TOPR", "never"),
            robust=False,
        ),
        Ordering(
            says="More prompts are answered with confidence by TOPR than by positives only.",
            source=TOPR,
            high=at("TOPR", "confident"),
            low=at("positives only", "confident"),
        ),
        Ordering(
            says="On scarce data off-policy REINFORCE rises first.",
            source=TOPR,
            high=scarce("naive", early),
            low=scarce("naive", 0),
            margin=0.02,
        ),
        Ordering(
            says="... and then falls below where it began.",
            source=TOPR,
            high=scarce("naive", 0),
            low=scarce("naive", None),
            margin=0.02,
        ),
        Ordering(
            says="On scarce data DPO rises first.",
            source=TOPR,
            high=scarce(PAIRS, early),
            low=scarce(PAIRS, 0),
            margin=0.02,
        ),
        Ordering(
            says="... and then falls below where it began.",
            source=TOPR,
            high=scarce(PAIRS, 0),
            low=scarce(PAIRS, None),
            margin=0.02,
        ),
    ]


STUDY = Study(
    name="offline",
    title="Who learns from recorded responses?",
    intro=(
        "The base policy answered each training prompt 16 times; everyone trains on these "
        "responses only, 256 a batch, reward 1 or -1 and no baseline, with the recorded "
        "log-probabilities.",
    ),
    panels=(Panel(name=AMPLE), Panel(name=SCARCE)),
    arms=arms,
    orderings=orderings,
)
