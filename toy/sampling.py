"""Moments by sampling, with a standard error beside every number, where no engine is exact.

Batches are drawn from the sampler in blocks; every figure is a function of block averages, and its
standard error is the jackknife over the blocks.  Squared norms of means are taken without the bias
that noise adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Undefined
from windage.toy.exact.tuples import CELLS, Responses, accepted, unit
from windage.toy.problems import Problem

BLOCKS = 32


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Averages of batch estimates over blocks, for one estimator on one problem.

    Args:
        mean: block averages of the estimate.
        square: block averages of its squared norm.
        drift: block averages with advantage 1 and no admission.
        size: batches a block.
    """

    mean: Float[Tensor, "B P N V"]
    square: Float[Tensor, " B"]
    drift: Float[Tensor, "B P N V"]
    size: int

    def select(self, blocks: Tensor) -> Sample:
        """The sample of some blocks only."""
        return replace(
            self, mean=self.mean[blocks], square=self.square[blocks], drift=self.drift[blocks]
        )


Figures = dict[str, float | None]


def jackknife(
    sample: Sample, figures: Callable[[Sample], Figures]
) -> tuple[Figures, dict[str, float]]:
    """Figures of a sample, and the standard error of each from leaving out one block at a time."""
    blocks = len(sample.mean)
    everyone = torch.arange(blocks)
    whole = figures(sample)
    left = [figures(sample.select(everyone[everyone != b])) for b in range(blocks)]
    errors = {}
    for name, value in whole.items():
        values = [part[name] for part in left]
        if value is not None and all(v is not None for v in values):
            v = torch.tensor(values, dtype=torch.float64)
            errors[name] = float(((v - v.mean()).square().sum() * (blocks - 1) / blocks).sqrt())
    return whole, errors


def draw(
    table: Responses, batches: int, group_size: int, generator: torch.Generator
) -> Int[Tensor, "M P G"]:
    """Numbers of responses drawn independently from the sampler."""
    cumulative = table.walk.leaf_flow.cumsum(-1)
    shape = (table.problem.prompts, batches * group_size)
    u = torch.rand(shape, dtype=torch.float64, generator=generator) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, u, right=True).clamp(max=cumulative.shape[1] - 1)
    return index.view(shape[0], batches, group_size).transpose(0, 1)


def sample(
    estimator: Estimator,
    problem: Problem,
    group_size: int,
    *,
    batches: int,
    generator: torch.Generator,
) -> Sample:
    """Draw batches and keep block averages.

    A batch of which some group is refused by an admission that refills is drawn again, group by
    group in law: it is left out, and the rest are averaged.

    Raises:
        Undefined: not one batch in a block was accepted.
    """
    table = Responses(problem)
    head = estimator.centering is not None
    plain = unit(estimator)
    size = max(1, batches // BLOCKS)
    n, v = problem.logits.shape[1:]
    width = int(problem.lengths.max())
    cells = problem.prompts * (n * v + group_size * width * (1 + v * head))
    step = max(1, min(size, CELLS // cells))
    sums = []
    for _ in range(BLOCKS):
        done, kept = 0, 0.0
        mean = drift = torch.zeros_like(problem.logits)
        square = mean.new_zeros(())
        while done < size:
            count = min(step, size - done)
            index = draw(table, count, group_size, generator)
            batch = table.batch(index, head=head)
            keep = accepted(estimator, batch)
            weight = mean.new_ones(count) if keep is None else keep.double()
            gradient = table.gradients(index, estimator, batch)
            mean = mean + torch.einsum("m,mpnv->pnv", weight, gradient)
            square = square + (weight * gradient.square().sum((1, 2, 3))).sum()
            ones = replace(batch, rewards=torch.ones_like(batch.rewards))
            drift = drift + table.gradients(index, plain, ones).sum(0)
            done, kept = done + count, kept + float(weight.sum())
        if kept == 0:
            raise Undefined("no group drawn had rewards that vary")
        sums.append((mean / kept, square / kept, drift / done))
    columns = [torch.stack(column) for column in zip(*sums, strict=True)]
    mean, square, drift = columns
    return Sample(mean=mean, square=square, drift=drift, size=size)
