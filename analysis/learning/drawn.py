"""Training on fresh responses of a mismatched sampler: what the online studies share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from windage.analysis.learning.world import TRAIN, World
from windage.toy.ascent import Ascent, Reference, Sampler
from windage.toy.learning import State
from windage.toy.training import Record, Rule, online

Reward = Literal["plus or minus", "zero or one", "constant"]


@final
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A training run on batches that a sampler draws.

    Args:
        steps: batches.
        rate: of the steps.
        sampler: who draws.
        reward: 1 and -1 for right and other answers, 1 and 0, or 1 for all.
        optimizer: sgd, adam or adafactor.
        passes: updates with each batch.
        reference: of a penalty.
        batch: prompts drawn; an admission may take fewer.
    """

    steps: int = 120
    rate: float = 0.01
    sampler: Sampler = field(default_factory=Sampler)
    reward: Reward = "plus or minus"
    optimizer: str = "sgd"
    passes: int = 1
    reference: Reference | None = None
    batch: int = 32

    def quarters(self) -> list[int]:
        """The start, and every quarter of the run."""
        return sorted({0, *(self.steps * i // 4 for i in range(1, 5))})

    def walk(
        self, rule: Rule, place: World, *, admit: Callable[[Record], Record] = lambda record: record
    ) -> Iterator[State]:
        """8 responses to each prompt of a batch; `admit` says what of it is trained on."""
        grade = {"plus or minus": place.grade, "zero or one": place.right, "constant": constant}
        return online(
            place.network,
            place.start,
            place.train,
            rule,
            Ascent(optimizer=self.optimizer, rate=self.rate),
            self.sampler,
            grade[self.reward],
            place.generators(TRAIN),
            steps=self.steps,
            passes=self.passes,
            reference=self.reference,
            batch=self.batch,
            admit=admit,
        )


def constant(prompts: Tensor, tokens: Tensor) -> Tensor:
    """The same reward for every response."""
    return torch.ones(prompts.shape[:2])
