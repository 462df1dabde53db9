"""The baseline as the composition of the data: how many positives training should see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from windage.analysis.learning.recipes import effective, scaled, without_baseline
from windage.analysis.learning.recorded import BATCH, Recorded
from windage.analysis.learning.study import FULL, Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import DATA, World
from windage.toy.learning import State
from windage.toy.training import Record

SOURCE = "Le Roux et al., 2025, arXiv:2503.14286"
said = partial(over, source=SOURCE)
PANEL = "accuracy by effective share of positives"
SHARES = (0.02, 0.1, 0.2, 0.35, 0.5, 0.75, 0.95)
FEW = (0.1, 0.5)
PARTS = (0.1, 0.5)
GROUP_SIZE, EPOCHS, RESPONSES = 32, 6, 5_000


def composed(record: Record, p: float, number: int, place: World) -> Record:
    """So many responses of a record of which a share p is right."""
    rows = []
    for s, generator in enumerate(place.generators(DATA)):
        right = record.rewards[s] > 0
        positives = round(p * number)
        rows.append(
            torch.cat(
                [
                    drawn(right.nonzero().squeeze(1), positives, generator),
                    drawn((~right).nonzero().squeeze(1), number - positives, generator),
                ]
            )
        )
    return replace(record, group_size=1).take(torch.stack(rows))


def drawn(rows: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """So many of the rows; all of them before any comes twice."""
    rounds = [
        rows[torch.randperm(len(rows), generator=generator)]
        for _ in range(1 + number // max(1, len(rows)))
    ]
    return torch.cat(rounds)[:number]


def responses(size: Size) -> int:
    """How many are recorded."""
    return RESPONSES * size.train // FULL.train


def walk(entry: str, p: float, share: float, size: Size, place: World) -> Iterator[State]:
    """Train on data of a composition, with the baseline that gives positives a share."""
    plan = Recorded(prompts=size.train, group_size=GROUP_SIZE, epochs=size.of(EPOCHS))
    number = responses(size)
    record = composed(place.record(size.train, GROUP_SIZE), p, number, place)
    c, factor = effective(share, p)
    return plan.along(record, scaled(without_baseline(entry, baseline=c), factor), place)


def name(entry: str, p: float) -> str:
    """A line of the panel."""
    label = {"topr": "TOPR", "tis_both_signs": "TIS"}[entry]
    return f"{label}, {p:.0%} of responses right"


def arms(size: Size) -> Sequence[Arm]:
    """TOPR over all shares, truncated weights on both signs at two of them."""
    updates = responses(size) // BATCH * size.of(EPOCHS)
    cells = [("topr", p, share) for p in PARTS for share in SHARES]
    cells += [("tis_both_signs", p, share) for p in PARTS for share in FEW]
    return [
        Arm(
            name=name(entry, p),
            panel=PANEL,
            base="mid",
            walk=partial(walk, entry, p, share, size),
            marks=[updates],
            x=share,
        )
        for entry, p, share in cells
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """An interior optimum, and the two rules where positives are scarce."""

    def point(entry: str, p: float, share: float) -> Point:
        return Point(panel=PANEL, arm=name(entry, p), x=share)

    found = []
    for p in PARTS:
        found += [
            said(
                f"A share of 0.5 beats 0.1 ({p:.0%} right): too few positives cost much.",
                point("topr", p, 0.5),
                point("topr", p, 0.1),
                margin=0.1,
            ),
            said(
                f"At a share of 0.1 TOPR beats truncation on both signs ({p:.0%} right).",
                point("topr", p, 0.1),
                point("tis_both_signs", p, 0.1),
            ),
            said(
                f"The best share is 0.1 to 0.2 ({p:.0%} right): 0.2 beats 0.5.",
                point("topr", p, 0.2),
                point("topr", p, 0.5),
                robust=False,
            ),
        ]
    return found


STUDY = Study(
    name="composition",
    title="How many positives should training see?",
    intro=(
        "5,000 recorded responses of which 10 % or 50 % are right. A baseline c changes what share "
        "of the weight the positives have, p (1 - c) / (1 + (1 - 2 p) c); the step is divided by "
        "the denominator, so that only the composition changes.",
    ),
    panels=(
        Panel(
            name=PANEL,
            x="effective share of positives",
            note="The paper's curve of accuracy by composition: where its maximum lies, and "
            "whether data of 10 % and of 50 % right answers give the same curve.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
