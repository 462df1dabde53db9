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
from windage.analysis.learning.study import QUICK, Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import World
from windage.estimators.catalogue import get
from windage.toy.learning import State
from windage.toy.training import Rule

TOPR = "Le Roux et al., 2025, arXiv:2503.14286"
said = partial(over, source=TOPR)
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
    return [*_ample(), *_scarce(size)]


def _ample() -> Iterator[Ordering]:
    def at(name: str, figure: str = "pass_at_1") -> Point:
        return Point(panel=AMPLE, arm=name, figure=figure)

    yield said(
        "Off-policy REINFORCE with negatives ends with malformed answers only.",
        at("naive", "invalid"),
        0.9,
    )
    yield said(
        "TOPR keeps rising and passes positives-only training late.",
        at("TOPR"),
        at("positives only"),
    )
    yield said("PPO stalls: TOPR ends far above it.", at("TOPR"), at("PPO"), margin=0.1)
    yield said("DPO on the same data ends far below TOPR.", at("TOPR"), at(PAIRS), margin=0.3)
    yield said(
        "With so many positives truncated weights on both signs end above TOPR.",
        at("TIS"),
        at("TOPR"),
        source="this task",
    )
    more = "More prompts are answered with confidence by TOPR than by positives only."
    yield said(more, at("TOPR", "confident"), at("positives only", "confident"))
    for says, high, low in (
        ("TOPR ends above truncated weights on both signs.", at("TOPR"), at("TIS")),
        (
            "TOPR gives fewer invalid answers than positives-only training.",
            at("positives only", "invalid"),
            at("TOPR", "invalid"),
        ),
        (
            "TOPR leaves fewer prompts without a right answer than positives-only training.",
            at("positives only", "never"),
            at("TOPR", "never"),
        ),
    ):
        yield said(says, high, low, robust=False)


def _scarce(size: Size) -> Iterator[Ordering]:
    plan = recorded(SCARCE, size)
    early = plan.updates * min(4, plan.epochs)
    for name, words in (("naive", "off-policy REINFORCE"), (PAIRS, "DPO")):
        first, best, last = (Point(panel=SCARCE, arm=name, step=n) for n in (0, early, None))
        yield said(f"On scarce data {words} rises first.", best, first, margin=0.02)
        yield said(f"... and then {words} falls below where it began.", first, last, margin=0.02)


STUDY = Study(
    name="offline",
    title="Who learns from recorded responses?",
    intro=(
        "The base policy answered each training prompt 16 times; everyone trains on these "
        "responses only, 256 a batch, reward 1 or -1 and no baseline, with the recorded "
        "log-probabilities.",
    ),
    panels=(
        Panel(
            name=AMPLE,
            spread=("positives only", "TOPR"),
            note="As in the paper's figures: which curve keeps rising as the policy leaves its "
            "data, which stalls, and which ends in answers without a valid form.",
        ),
        Panel(
            name=SCARCE,
            note="Few data and small steps: a rule that will fall can rise first.",
        ),
    ),
    arms=arms,
    orderings=orderings,
    quick=replace(QUICK, length=0.25),
)
