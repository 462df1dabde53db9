"""Sample, train, sample again: with all of the data, a chosen share of positives, or curated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from windage.analysis.learning.recipes import effective
from windage.analysis.learning.recorded import BATCH
from windage.analysis.learning.study import QUICK, Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import TRAIN, World
from windage.estimators.catalogue import get
from windage.toy.ascent import Ascent, Sampler
from windage.toy.learning import State
from windage.toy.training import Record, Source, offline

SOURCE = "Le Roux et al., 2025, arXiv:2503.14286"
said = partial(over, source=SOURCE)
ROUNDS, EPOCHS, GROUP_SIZE = 5, 2, 16
BASES = {"base right in 31 %": "mid", "base right in 11 %": "hard"}
Curate = Callable[[Record], Record]


def everything(record: Record) -> Record:
    """The data as they were drawn."""
    return record


def half(record: Record) -> Record:
    """Rewards minus the baseline that gives positives half of the weight, seed by seed."""
    shares = (record.rewards > 0).double().mean(1).clamp(0.01, 0.99).tolist()
    found = torch.tensor([effective(0.5, p) for p in shares]).unsqueeze(-1)
    return replace(record, rewards=(record.rewards - found[:, 0]) * found[:, 1])


def first_right(record: Record) -> Record:
    """Of each prompt the first right response and all others (the Anna Karenina principle)."""
    right = (record.rewards > 0).unflatten(1, (-1, record.group_size))
    later = right & (right.cumsum(-1) > 1)
    return replace(record, present=~later.flatten(1))


ARMS: dict[str, tuple[str, Curate]] = {
    "naive": ("naive", everything),
    "positives only": ("positives_only", everything),
    "TOPR": ("topr", everything),
    "TOPR, half positives": ("topr", half),
    "TOPR, first right only": ("topr", first_right),
}


def walk(entry: str, curate: Curate, prompts: int, rounds: int, place: World) -> Iterator[State]:
    """Rounds of drawing from the current policy and training on what it said."""
    among = place.generators(TRAIN)
    here = place.start
    yield State(step=0, parameters=here, norm=here.new_zeros(len(here)))
    for number in range(1, rounds + 1):
        source = Source(place.network, here, Sampler(), among)
        drawn = source.draw(place.train[:, :prompts], GROUP_SIZE, place.grade)
        record = replace(curate(drawn), group_size=1)
        last = offline(
            place.network,
            here,
            record,
            get(entry),
            Ascent(rate=1e-3),
            among,
            epochs=EPOCHS,
            batch=min(BATCH, record.tokens.shape[1]),
        )
        for state in last:
            here = state.parameters
        yield State(step=number, parameters=here, norm=state.norm)


def arms(size: Size) -> Sequence[Arm]:
    """Five ways to use the data, from two bases."""
    return [
        Arm(
            name=name,
            panel=panel,
            base=base,
            walk=partial(walk, entry, curate, min(256, size.train), size.of(ROUNDS)),
            marks=range(size.of(ROUNDS) + 1),
        )
        for panel, base in BASES.items()
        for name, (entry, curate) in ARMS.items()
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """Who improves over rounds, and what curation does here."""
    found = []
    for panel in BASES:

        def point(arm: str, step: int | None = None, panel: str = panel) -> Point:
            return Point(panel=panel, arm=arm, step=step)

        for name in ("TOPR", "positives only"):
            found.append(
                said(f"{name} ends above its base ({panel}).", point(name), point(name, 0))
            )
        found += [
            said(
                f"Off-policy REINFORCE with negatives never recovers ({panel}).",
                point("naive", 0),
                point("naive"),
            ),
            said(
                f"TOPR ends above positives-only training ({panel}).",
                point("TOPR"),
                point("positives only"),
                robust=False,
            ),
            said(
                f"Keeping one right response a prompt helps TOPR ({panel}).",
                point("TOPR, first right only"),
                point("TOPR"),
                robust=False,
            ),
        ]
    return found


STUDY = Study(
    name="iterated",
    title="Who improves round after round?",
    intro=(
        f"{ROUNDS} rounds: 16 responses of the current policy to each of 256 prompts, {EPOCHS} "
        "epochs over them with a fresh Adam. The log-probabilities recorded in a round are the "
        "sampler's of that round.",
    ),
    panels=tuple(
        Panel(
            name=name,
            x="round",
            note="Fresh data every round, with and without curation of what is kept.",
        )
        for name in BASES
    ),
    arms=arms,
    orderings=orderings,
    quick=replace(QUICK, length=0.4),
)
