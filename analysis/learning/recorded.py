"""Training on responses that were recorded once: what the offline studies share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from windage.analysis.learning.world import DATA, TRAIN, World
from windage.toy.ascent import Ascent
from windage.toy.learning import State
from windage.toy.training import Record, Rule, offline

BATCH = 256


@final
@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A training run on the base's own responses.

    Args:
        prompts: of the record.
        group_size: responses of a prompt.
        epochs: over the record.
        rate: of Adam.
        limit: greatest norm of a gradient.
        optimizer: sgd, adam or adafactor.
        batch: responses of a step.
    """

    prompts: int = 512
    group_size: int = 16
    epochs: int = 16
    rate: float = 1e-3
    limit: float = 1.0
    optimizer: str = "adam"
    batch: int = BATCH

    @property
    def updates(self) -> int:
        """Updates an epoch."""
        return self.prompts * self.group_size // self.batch

    def epochs_at(self, *epochs: int) -> list[int]:
        """Updates after so many epochs, those within the run, the last among them."""
        return [self.updates * e for e in sorted({0, *epochs, self.epochs}) if e <= self.epochs]

    def walk(self, rule: Rule, place: World) -> Iterator[State]:
        """Each response by itself: advantages look at its own reward."""
        record = place.record(self.prompts, self.group_size)
        return self.along(replace(record, group_size=1), rule, place)

    def walk_pairs(self, rule: Rule, place: World) -> Iterator[State]:
        """A right response and another of its prompt, side by side."""
        return self.along(pairs(place.record(self.prompts, self.group_size), place), rule, place)

    def along(self, record: Record, rule: Rule, place: World) -> Iterator[State]:
        """Epochs over a record of any make."""
        return offline(
            place.network,
            place.start,
            record,
            rule,
            Ascent(optimizer=self.optimizer, rate=self.rate, limit=self.limit),
            place.generators(TRAIN),
            epochs=self.epochs,
            batch=self.batch // record.group_size,
        )


def pairs(record: Record, place: World) -> Record:
    """Other responses of a record, each with a right one of its prompt, half as many as responses.

    Drawn with replacement, so that seeds with more right answers have no more pairs.
    """
    number = record.tokens.shape[1]
    rows = []
    for s, generator in enumerate(place.generators(DATA)):
        right = (record.rewards[s] > 0).view(-1, record.group_size)
        usable = (~right & right.any(1, keepdim=True)).flatten().nonzero().squeeze(1)
        pick = torch.randint(len(usable), (number // 2,), generator=generator)
        other = usable[pick]
        chance = right[other // record.group_size].float()
        best = torch.multinomial(chance, 1, generator=generator).squeeze(1)
        start = other // record.group_size * record.group_size
        rows.append(torch.stack([start + best, other], 1).flatten())
    return replace(replace(record, group_size=1).take(torch.stack(rows)), group_size=2)
