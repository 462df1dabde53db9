"""Moments by listing groups: every tuple of responses (E0) or every multiset of them (E1).

Nothing is assumed of the estimator: each listed group becomes a batch, and the batch goes through
`estimators.estimator.coefficients`, the function that trains.  Multisets need an estimator to treat
the members of a group alike, which every estimator of the catalogue does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from windage.estimators.advantage import constant
from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator, coefficients
from windage.estimators.member import use
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.walk import Walk, pull_back
from windage.toy.problems import Problem

CELLS = 4_000_000


def compositions(parts: int, total: int) -> Int[Tensor, "M parts"]:
    """All ways to write `total` as an ordered sum of `parts` counts.

    Example:
        >>> compositions(2, 2).tolist()
        [[0, 2], [1, 1], [2, 0]]
    """
    counts = torch.zeros((1, 0), dtype=torch.long)
    left = torch.tensor([total])
    for _ in range(parts - 1):
        choices = left + 1
        row = torch.repeat_interleave(choices)
        first = choices.cumsum(0) - choices
        taken = torch.arange(len(row)) - first[row]
        counts = torch.cat([counts[row], taken.unsqueeze(1)], 1)
        left = left[row] - taken
    return torch.cat([counts, left.unsqueeze(1)], 1)


def multinomial(
    counts: Shaped[Tensor, "M R"], probability: Float[Tensor, " R"]
) -> Float[Tensor, " M"]:
    """Probability of each row of counts.

    Example:
        >>> multinomial(compositions(2, 2), torch.tensor([0.5, 0.5]))
        tensor([0.2500, 0.5000, 0.2500])
    """
    n = counts.to(probability.dtype)
    ways = torch.lgamma(n.sum(1) + 1) - torch.lgamma(n + 1).sum(1)
    return (ways + torch.xlogy(n, probability).sum(1)).exp()


def spread(counts: Int[Tensor, "M R"], total: int) -> Int[Tensor, "M total"]:
    """One sorted group for each row of counts: the class of each member.

    Example:
        >>> spread(torch.tensor([[1, 2]]), 3).tolist()
        [[0, 1, 1]]
    """
    classes = torch.arange(counts.shape[1]).expand_as(counts)
    return classes.reshape(-1).repeat_interleave(counts.reshape(-1)).view(-1, total)


@final
class Responses:
    """The responses of a problem as rows of a batch, and the parameter behind each token."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.walk = Walk(problem)
        prefixes, tokens = problem.tree.paths
        width = int(problem.lengths.max())
        pad = (0, max(0, width - problem.tree.horizon))
        self.prefix = torch.nn.functional.pad(prefixes, pad, value=-1)
        tokens = torch.nn.functional.pad(tokens, pad, value=-1)
        self.real = self.prefix >= 0
        flat = self.prefix.clamp(min=0) * problem.tree.vocab + tokens.clamp(min=0)
        self.parameter = torch.where(self.real, flat, 0)
        self.logp = torch.where(self.real, problem.logp.flatten(1)[:, self.parameter], 0.0)
        self.behavior_logp = self.logp - self._ratio("logp", "behavior_logp")
        self.proximal_logp = self.logp
        if problem.proximal_logp is not None:
            self.proximal_logp = self.logp - self._ratio("logp", "proximal_logp")
        self.reference_logp: Tensor | None = None
        if problem.reference_logp is not None:
            self.reference_logp = self.logp - self._ratio("logp", "reference_logp")
        squares = problem.logp.exp().square().sum(-1)[:, self.prefix.clamp(min=0)]
        self.probability_square = torch.where(self.real, squares, 1.0)
        self.mask = torch.arange(self.prefix.shape[1]) < problem.lengths.unsqueeze(-1)

    def _ratio(self, numerator: str, denominator: str) -> Float[Tensor, "P M T"]:
        """Log-ratios along the responses, 0 after the end and where a token is never drawn."""
        ratio = self.walk.log_ratio_of(numerator, denominator)
        return torch.where(self.real, ratio.flatten(1)[:, self.parameter], 0.0)

    def batch(self, index: Int[Tensor, "M P G"], *, head: bool) -> Batch:
        """The batch that holds the responses of the given numbers."""
        p = torch.arange(self.problem.prompts)[:, None]
        heads: dict[str, Any] = {}
        if head:
            at = self.prefix.clamp(min=0)[index]
            heads = {
                "head_logp": self.problem.logp[p.unsqueeze(-1), at],
                "head_behavior_logp": self.problem.behavior_logp[p.unsqueeze(-1), at],
            }
        return Batch(
            rewards=self.problem.rewards[p, index],
            mask=self.mask[p, index],
            logp=self.logp[p, index],
            behavior_logp=self.behavior_logp[p, index],
            proximal_logp=self.proximal_logp[p, index],
            reference_logp=None if self.reference_logp is None else self.reference_logp[p, index],
            probability_square=self.probability_square[p, index],
            **heads,
        )

    def gradients(
        self, index: Int[Tensor, "M P G"], estimator: Estimator, batch: Batch
    ) -> Float[Tensor, "M P N V"]:
        """The estimate of each batch: the coefficients, summed by parameter and pulled back."""
        found = coefficients(estimator, batch)
        return self.pulled_back(index, found.own, found.head)

    def pulled_back(
        self,
        index: Int[Tensor, "M P G"],
        own: Float[Tensor, "M P G T"],
        head: Float[Tensor, "M P G T V"] | None,
    ) -> Float[Tensor, "M P N V"]:
        """Coefficients of the responses of the given numbers, times scores, by the logits."""
        m, p, _ = index.shape
        n, v = self.problem.logits.shape[1:]
        real = self.real[index]
        own = torch.where(real, own, 0.0).reshape(m, p, -1)
        visits = own.new_zeros((m, p, n * v))
        visits.scatter_add_(2, self.parameter[index].reshape(m, p, -1), own)
        if head is not None:
            head = torch.where(real.unsqueeze(-1), head, 0.0).reshape(m, p, -1)
            place = self.prefix.clamp(min=0)[index].unsqueeze(-1) * v + torch.arange(v)
            visits.scatter_add_(2, place.reshape(m, p, -1), head)
        return pull_back(visits.view(m, p, n, v), self.walk.probability)


def unit(estimator: Estimator) -> Estimator:
    """The same weights with the reward itself as advantage and no admission, for the drift."""
    return replace(estimator, advantage=use(constant), admission=(), penalties=())


def accepted(estimator: Estimator, batch: Batch) -> Tensor | None:
    """Whether each batch would be used as it is, or some group of it drawn again; None: always."""
    keep: Tensor | None = None
    for member in estimator.admission:
        if member.traits.refill:
            kept = member(*(batch.get(n) for n in member.traits.needs)).any(-1).all(-1)
            keep = kept if keep is None else keep & kept
    return keep


Draw = tuple[Int[Tensor, "M P G"], Float[Tensor, " M"]]


Edit = Callable[[Batch, Int[Tensor, "M P G"]], Batch]


def listed(
    estimator: Estimator, problem: Problem, draws: Iterable[Draw], *, edit: Edit | None = None
) -> Moments:
    """Moments over groups listed with their probabilities, in pieces that fit in memory.

    Args:
        estimator: called on every batch.
        problem: gives rewards, lengths and log-probabilities.
        draws: numbers of the responses of each batch, and its probability.
        edit: changes each batch before the estimator sees it (a critic's values, a masked token, a
            shaped reward); it is given the numbers of the responses as well.
    """
    table = Responses(problem)
    total = mean = square = drift = torch.zeros((), dtype=torch.float64)
    head = estimator.centering is not None
    plain = unit(estimator)
    for index, probability in draws:
        batch = table.batch(index, head=head)
        batch = batch if edit is None else edit(batch, index)
        gradient = table.gradients(
            index, plain, replace(batch, rewards=torch.ones_like(batch.rewards))
        )
        drift = drift + torch.einsum("m,mpnv->pnv", probability, gradient)
        keep = accepted(estimator, batch)
        weight = probability if keep is None else probability * keep
        gradient = table.gradients(index, estimator, batch)
        total = total + weight.sum()
        mean = mean + torch.einsum("m,mpnv->pnv", weight, gradient)
        square = square + (weight * gradient.square().sum((1, 2, 3))).sum()
    if total <= 0:
        raise Undefined("every group is degenerate: no reward varies")
    mean = mean / total
    return Moments(mean=mean, variance=square / total - mean.square().sum(), drift=drift)


def _pieces(problem: Problem, group_size: int, rows: int) -> Iterator[slice]:
    table = group_size * max(problem.tree.horizon, int(problem.lengths.max()))
    cells = problem.prompts * (problem.tree.prefixes * problem.tree.vocab + table)
    step = max(1, CELLS // cells)
    return (slice(start, start + step) for start in range(0, rows, step))


def every_tuple(problem: Problem, group_size: int) -> Iterator[Draw]:
    """All tuples of G responses for all prompts together, K^(P G) of them."""
    flow = Walk(problem).leaf_flow
    k = problem.tree.leaves
    slots = problem.prompts * group_size
    place = k ** torch.arange(slots)
    for piece in _pieces(problem, group_size, k**slots):
        rows = torch.arange(piece.start, min(piece.stop, k**slots))
        index = (rows.unsqueeze(1) // place % k).view(-1, problem.prompts, group_size)
        yield index, flow[torch.arange(problem.prompts)[:, None], index].prod(-1).prod(-1)


def every_multiset(problem: Problem, group_size: int) -> Iterator[Draw]:
    """All multisets of G responses for each prompt, with their multinomial probabilities."""
    flow = Walk(problem).leaf_flow
    counts = compositions(problem.tree.leaves, group_size)
    groups = spread(counts, group_size)
    probability = torch.stack([multinomial(counts, f) for f in flow])
    m = len(groups)
    rows_in_all = m**problem.prompts
    place = m ** torch.arange(problem.prompts)
    p = torch.arange(problem.prompts)
    for piece in _pieces(problem, group_size, rows_in_all):
        rows = torch.arange(piece.start, min(piece.stop, rows_in_all))
        which = rows.unsqueeze(1) // place % m
        yield groups[which], probability[p, which].prod(-1)


def by_prompt(problem: Problem, run: Callable[[Problem], Moments]) -> Moments:
    """Moments of a mean over prompts from those of each prompt alone."""
    parts = [run(problem.select(p)) for p in range(problem.prompts)]
    n = problem.prompts
    return Moments(
        mean=torch.cat([part.mean for part in parts]) / n,
        variance=torch.stack([part.variance for part in parts]).sum() / n**2,
        drift=torch.cat([part.drift for part in parts]) / n,
    )


def tuples(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Moments over all tuples; valid for any estimator."""
    return _separately(estimator, problem, group_size, every_tuple)


def multisets(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Moments over all multisets; valid where group members are treated alike."""
    return _separately(estimator, problem, group_size, every_multiset)


def _separately(
    estimator: Estimator,
    problem: Problem,
    group_size: int,
    draw: Callable[[Problem, int], Iterable[Draw]],
) -> Moments:
    def run(part: Problem) -> Moments:
        return listed(estimator, part, draw(part, group_size))

    return run(problem) if estimator.scope == "batch" else by_prompt(problem, run)


def power(base: float, exponent: float) -> float:
    """base^exponent for a base of at least 1, infinite where float64 overflows.

    Example:
        >>> power(3, 2), power(10, 400)
        (9.0, inf)
    """
    return float(base) ** exponent if exponent * math.log2(base) < 1000 else math.inf


def ways(parts: int, total: int) -> float:
    """Multisets of `total` members of `parts` kinds, infinite where float64 overflows.

    Example:
        >>> ways(3, 2), ways(1000, 1000)
        (6.0, inf)
    """
    n, k = parts + total - 1, min(total, parts - 1)
    if math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) > 690:
        return math.inf
    return float(math.comb(n, k))


def count_tuples(problem: Problem, group_size: int, *, joint: bool) -> float:
    """Tuples that `tuples` would list."""
    prompts = problem.prompts
    one = power(problem.tree.leaves, group_size * (prompts if joint else 1))
    return one if joint else one * prompts


def count_multisets(problem: Problem, group_size: int, *, joint: bool) -> float:
    """Multisets that `multisets` would list."""
    one = ways(problem.tree.leaves, group_size)
    return power(one, problem.prompts) if joint else one * problem.prompts
