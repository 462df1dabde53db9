"""Where the learning studies take place: a task, a base policy a seed, prompts of two kinds.

Every stream of random numbers has a generator of its own a seed, so that two arms of a study differ
in nothing but what they are compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.errors import unknown
from windage.toy.ascent import Sampler
from windage.toy.network import Network
from windage.toy.scores import evaluate
from windage.toy.sums import Demonstrator, Sums, generators, whole
from windage.toy.training import Record, Source, fit

BASES: dict[str, tuple[Sums, Demonstrator]] = {
    "hard": (Sums(), Demonstrator(easy=0.32, hard=0.75, malformed=0.40)),
    "mid": (Sums(), Demonstrator(easy=0.10, hard=0.45, malformed=0.25)),
    "easy": (Sums(), Demonstrator(easy=0.04, hard=0.25, malformed=0.15)),
}
FIT, SPLIT, DATA, TRAIN, TEST, TIME = range(6)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A base policy a seed, on a task.

    Args:
        network: the policy's sizes, with its task.
        seeds: one a replicate.
        start: parameters of the base.
        train, held: disjoint prompts.
        records: recorded responses, by what they were drawn for.
    """

    network: Network
    seeds: tuple[int, ...]
    start: Float[Tensor, "S D"]
    train: Int[Tensor, "S N K"]
    held: Int[Tensor, "S M K"]
    records: dict[tuple[int, int], Record] = field(default_factory=dict)

    def generators(self, stream: int) -> list[torch.Generator]:
        """A generator a seed for one purpose; the same one gives the same numbers."""
        return generators(streamed(self.seeds, stream))

    def grade(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Reward 1 for a right answer, -1 for any other."""
        return 2.0 * self.network.task.grade(prompts, tokens).correct - 1.0

    def right(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Reward 1 for a right answer, 0 for any other."""
        return self.network.task.grade(prompts, tokens).correct.float()

    def record(self, prompts: int, group_size: int) -> Record:
        """Responses of the base to its first training prompts, drawn once."""
        key = prompts, group_size
        if key not in self.records:
            source = Source(self.network, self.start, Sampler(), self.generators(DATA))
            self.records[key] = source.draw(self.train[:, :prompts], group_size, self.grade)
        return self.records[key]

    def evaluate(
        self, parameters: Float[Tensor, "S D"], samples: int
    ) -> dict[str, Float[Tensor, " S"]]:
        """Figures on the held-out prompts, the same draws every time."""
        seeds = streamed(self.seeds, TEST)
        return evaluate(self.network, parameters, self.start, self.held, seeds, samples=samples)


def streamed(seeds: Sequence[int], stream: int) -> list[int]:
    """Seeds of the generators of one purpose."""
    states = [np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64) for seed in seeds]
    return [int(state[0] >> np.uint64(1)) for state in states]


@lru_cache(maxsize=8)
def world(base: str, seeds: tuple[int, ...], *, steps: int, train: int, held: int) -> World:
    """Fit a base for every seed and split its prompts; kept between the studies of one run.

    Args:
        base: name of a demonstrator.
        seeds: one a replicate.
        steps: of the fit.
        train, held: prompts of each kind.

    Raises:
        BadInput: no such base.
    """
    if base not in BASES:
        raise unknown("base", base, BASES)
    task, demonstrator = BASES[base]
    network = Network(task=task)
    among = generators(streamed(seeds, FIT))

    def draw(number: int) -> tuple[Tensor, Tensor]:
        prompts = task.prompts(whole(among, task.number, number))
        return prompts, demonstrator.write(task, prompts, among)

    start = fit(network, among, draw, steps=steps)
    parts = task.split([train, held], generators(streamed(seeds, SPLIT)))
    return World(network=network, seeds=seeds, start=start, train=parts[0], held=parts[1])
