"""Moments by sampling, with a standard error beside every number, where no engine is exact.

Batches are drawn from the sampler in blocks; every figure is a function of block averages, and its
standard error is the jackknife over the blocks.  Squared norms of means are taken without the bias
that noise adds.  Equal seeds draw equal batches whatever the estimator, and the first batches of a
block are the same however many follow, so differences between estimators are paired (`minus`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact.moments import Undefined
from windage.toy.exact.tuples import Responses, accepted, unit
from windage.toy.paths import Paths
from windage.toy.problems import Problem

BLOCKS = 32
Figures = dict[str, float | None]


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


@final
@dataclass(frozen=True, kw_only=True)
class Jackknife:
    """Figures of a sample, and again with each block left out.

    Args:
        whole: of all blocks.
        left: of all but one.
    """

    whole: Figures
    left: Sequence[Figures]

    @property
    def errors(self) -> dict[str, float]:
        """The standard error of each figure that no block leaves without a value.

        error^2 = (B - 1) / B * sum over b of (left[b] - mean of left)^2
        """
        out, blocks = {}, len(self.left)
        for name, value in self.whole.items():
            values = [part[name] for part in self.left]
            if value is not None and all(v is not None for v in values):
                v = torch.tensor(values, dtype=torch.float64)
                out[name] = math.sqrt(float((v - v.mean()).square().sum()) * (blocks - 1) / blocks)
        return out

    def minus(self, other: Jackknife) -> Jackknife:
        """Differences of the figures of two samples with the same draws.

        What their noise has in common cancels in the difference and in its standard error.

        Example:
            >>> one = Jackknife(whole={"x": 3.0}, left=[{"x": 2.0}, {"x": 4.0}])
            >>> two = Jackknife(whole={"x": 1.0}, left=[{"x": 0.0}, {"x": 2.0}])
            >>> one.minus(two).whole, one.minus(two).errors
            ({'x': 2.0}, {'x': 0.0})
        """
        pairs = zip(self.left, other.left, strict=True)
        left = [_difference(mine, theirs) for mine, theirs in pairs]
        return Jackknife(whole=_difference(self.whole, other.whole), left=left)


def _difference(mine: Figures, theirs: Figures) -> Figures:
    """Figure by figure; None where either has none."""
    out: Figures = {}
    for name, value in mine.items():
        other = theirs[name]
        out[name] = None if value is None or other is None else value - other
    return out


def jackknife(blocks: int, figures: Callable[[Tensor], Figures]) -> Jackknife:
    """Figures of all blocks, and with one left out at a time.

    Args:
        blocks: how many there are.
        figures: of the blocks of the given numbers.
    """
    everyone = torch.arange(blocks)
    left = [figures(everyone[everyone != b]) for b in range(blocks)]
    return Jackknife(whole=figures(everyone), left=left)


@runtime_checkable
class Source(Protocol):
    """How batches of a problem are drawn, and an estimate is made of them.

    Args:
        at_once: numbers to touch at a time: few enough for the cache, enough to be fast.
    """

    at_once: int

    def draw(self, batches: int, group_size: int, generator: torch.Generator) -> Any:
        """The responses of so many batches, independent; a batch has the same numbers always."""
        ...

    def join(self, drawn: Sequence[Any]) -> Any:
        """Batches drawn one after another, as one."""
        ...

    def batch(self, drawn: Any, *, head: bool) -> Batch:
        """What an estimator sees of them."""
        ...

    def gradients(self, drawn: Any, estimator: Estimator, batch: Batch) -> Float[Tensor, "M P N V"]:
        """The estimate of each batch."""
        ...


def draw(
    table: Responses, batches: int, group_size: int, generator: torch.Generator
) -> Int[Tensor, "M P G"]:
    """Numbers of responses drawn independently from the sampler, batch by batch."""
    prompts = table.problem.prompts
    u = torch.rand((batches, prompts, group_size), dtype=torch.float64, generator=generator)
    u = u.transpose(0, 1).reshape(prompts, -1)
    return chosen(table.walk.leaf_flow, u).view(prompts, batches, group_size).transpose(0, 1)


def chosen(flow: Float[Tensor, "P M"], u: Float[Tensor, "P n"]) -> Int[Tensor, "P n"]:
    """Numbers of the responses that numbers from 0 to 1 fall on, each as wide as its probability.

    Example:
        >>> chosen(torch.tensor([[0.2, 0.0, 0.8]]), torch.tensor([[0.1, 0.2, 0.9]]))
        tensor([[0, 2, 2]])
    """
    cumulative = flow.cumsum(-1)
    index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    return index.clamp(max=cumulative.shape[1] - 1)


@final
class Leaves:
    """Batches of a problem whose responses are listed."""

    at_once = 1_000_000

    def __init__(self, problem: Problem) -> None:
        self.table = Responses(problem)
        self.batch, self.gradients = self.table.batch, self.table.gradients

    def draw(
        self, batches: int, group_size: int, generator: torch.Generator
    ) -> Int[Tensor, "M P G"]:
        """Numbers of responses."""
        return draw(self.table, batches, group_size, generator)

    def join(self, drawn: Sequence[Tensor]) -> Int[Tensor, "M P G"]:
        """One after another."""
        return torch.cat(list(drawn))


def cells(problem: Problem | Chain, group_size: int, *, head: bool) -> int:
    """Numbers that an estimate of one batch touches: its parameters and its tokens."""
    vocab = problem.logits.shape[-1] if head else 0
    tokens = group_size * problem.longest * (1 + vocab)
    return problem.prompts * (problem.logits[0].numel() + tokens)


@final
class Sums:
    """Sums over the batches of each block, for one estimator."""

    def __init__(self, problem: Problem | Chain, estimator: Estimator) -> None:
        self.estimator, self.plain = estimator, unit(estimator)
        self.head = estimator.centering is not None
        self.mean = problem.logits.new_zeros((BLOCKS, *problem.logits.shape))
        self.drift = torch.zeros_like(self.mean)
        self.square = self.mean.new_zeros(BLOCKS)
        self.kept = self.mean.new_zeros(BLOCKS)

    def add(self, source: Source, drawn: Any, blocks: range) -> None:
        """Count as many batches of each of some blocks, one block after the other."""
        batch = source.batch(drawn, head=self.head)
        gradient = source.gradients(drawn, self.estimator, batch)
        keep = accepted(self.estimator, batch)
        weight = gradient.new_ones(len(gradient)) if keep is None else keep.double()
        b, shape = len(blocks), (len(blocks), -1)
        here = slice(blocks.start, blocks.stop)
        mean = torch.bmm(weight.view(b, 1, -1), gradient.view(b, len(gradient) // b, -1))
        self.mean[here] += mean.view(b, *gradient.shape[1:])
        self.square[here] += (weight * gradient.square().sum((1, 2, 3))).view(shape).sum(1)
        self.kept[here] += weight.view(shape).sum(1)
        ones = replace(batch, rewards=torch.ones_like(batch.rewards))
        drift = source.gradients(drawn, self.plain, ones)
        self.drift[here] += drift.view(*shape, *drift.shape[1:]).sum(1)

    def averages(self, size: int) -> Sample:
        """Block averages, of blocks of so many batches.

        Raises:
            Undefined: not one batch of a block was accepted.
        """
        if bool((self.kept == 0).any()):
            raise Undefined("no group drawn had rewards that vary")
        kept = self.kept.view(-1, 1, 1, 1)
        return Sample(
            mean=self.mean / kept,
            square=self.square / self.kept,
            drift=self.drift / size,
            size=size,
        )


@final
class Draws:
    """Batches of one problem for any number of estimators, more of them whenever asked.

    A batch of which some group is refused by an admission that refills is drawn again, group by
    group in law: it is left out, and the rest are averaged.

    Args:
        problem: with its sampler.
        group_size: responses of a prompt.
        generator: of one seed a block.
        estimators: see the same batches.
    """

    def __init__(
        self,
        problem: Problem | Chain,
        group_size: int,
        generator: torch.Generator,
        estimators: Sequence[Estimator],
    ) -> None:
        self.source: Source = Paths(problem) if isinstance(problem, Chain) else Leaves(problem)
        self.group_size, self.size = group_size, 0
        seeds = torch.randint(2**62, (BLOCKS,), generator=generator).tolist()
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.sums = [Sums(problem, estimator) for estimator in estimators]
        self.cells = [cells(problem, group_size, head=head) for head in (False, True)]

    def beside(self, sums: Sequence[Sums]) -> None:
        """Go on with more estimators, which have seen the same batches so far."""
        self.sums += sums

    def upto(self, batches: int) -> list[Sample]:
        """A sample for each estimator, once so many batches have been drawn in all.

        Raises:
            Undefined: not one batch of a block was accepted.
        """
        size = max(1, batches // BLOCKS)
        step = max(1, self.source.at_once // self.cells[any(each.head for each in self.sums)])
        while self.size < size:
            count = min(step, size - self.size)
            together = max(1, step // count)
            for first in range(0, BLOCKS, together):
                blocks = range(first, min(BLOCKS, first + together))
                drawn = self.source.join(
                    [self.source.draw(count, self.group_size, self.generators[b]) for b in blocks]
                )
                for each in self.sums:
                    each.add(self.source, drawn, blocks)
            self.size += count
        return [each.averages(self.size) for each in self.sums]


def sample(
    estimator: Estimator,
    problem: Problem | Chain,
    group_size: int,
    *,
    batches: int,
    generator: torch.Generator,
) -> Sample:
    """Draw batches and keep block averages.

    Raises:
        Undefined: not one batch in a block was accepted.
    """
    return Draws(problem, group_size, generator, [estimator]).upto(batches)[0]
