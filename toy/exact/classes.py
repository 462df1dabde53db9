"""Moments by counting classes of responses (E2).

Responses fall into classes of equal reward (and equal length, where a denominator counts tokens of
the group).  Given the counts n of the classes in a group, the advantage of each class and the
denominator are known, and the contributions of the members are independent draws from their class:

    E|g|^2 = sum over n of P(n) [ B' (M M') B + sum over c of n_c A_c^2 (S_c - |M_c|^2) ]
    B_c = n_c A_c,   M_c = E[x | c],   S_c = E[|x|^2 | c]

with M and S kept for each sign of the advantage where a map reads it.  Admissions that refill
condition P(n) on the groups kept.  A denominator over the whole batch is averaged over the law of
the other prompts' tokens, a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import conv1d

from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.exact.kept import kept, weighing
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.penalties import in_rewards, shaped
from windage.toy.exact.prefix_tree import (
    penalty_moments,
    reads_sign,
    response_moments,
    response_scale,
    tree_weights,
)
from windage.toy.exact.tuples import compositions, spread, ways
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem

# Tables of fewer numbers are kept between calls, 64 small ones and 8 large ones: they depend on
# reward values only.
SMALL = 400_000
LARGE = 4_000_000


def class_values(
    problem: Problem, walk: Walk, *, by_length: bool
) -> tuple[Float[Tensor, "R 2"], Float[Tensor, "R 1 M"], Float[Tensor, " R"]]:
    """Reward and length of each class that one prompt's sampler draws, its members, its mass."""
    kinds = problem.kinds[0]
    if not by_length and len(problem.sizes) > 1:
        rewards = kinds[:, 0].unique()
        kinds = torch.stack([rewards, torch.zeros_like(rewards)], 1)
    mine = problem.rewards == kinds[:, :1]
    if by_length and len(problem.sizes) > 1:
        mine &= problem.lengths == kinds[:, 1:]
    members = mine.to(walk.leaf_flow.dtype)
    mass = members @ walk.leaf_flow[0]
    drawn = mass > 0
    if not bool(drawn.all()):  # a class of mass 0 would be divided by
        kinds, members, mass = kinds[drawn], members[drawn], mass[drawn]
    return kinds, members.unsqueeze(1), mass


def refills(estimator: Estimator) -> bool:
    """Whether groups that admission rejects are drawn again."""
    return any(m.traits.refill for m in estimator.admission)


def shaped_classes(
    estimator: Estimator, kinds: Float[Tensor, "R 2"]
) -> tuple[Float[Tensor, "S 3"], Int[Tensor, " R"]]:
    """Classes by shaped reward, and where they matter length and outcome, and each kind's class."""
    outcomes, lengths = kinds.T
    rewards = shaped(estimator, outcomes[None], lengths[None].long())[0]
    columns = [
        rewards,
        lengths if counts_tokens(estimator) else torch.zeros_like(lengths),
        outcomes if refills(estimator) else rewards,
    ]
    values, place = torch.stack(columns, 1).unique(dim=0, return_inverse=True)
    return values, place


def paid_classes(
    estimator: Estimator, problem: Problem, walk: Walk
) -> tuple[Float[Tensor, "R C"], Float[Tensor, "R 1 M"], Float[Tensor, " R"]]:
    """`class_values` by what advantage, admission and denominators see: reward, length, outcome."""
    if not in_rewards(estimator):
        return class_values(problem, walk, by_length=counts_tokens(estimator))
    kinds, members, mass = class_values(problem, walk, by_length=True)
    values, place = shaped_classes(estimator, kinds)
    merged = members.new_zeros((len(values), *members.shape[1:])).index_add(0, place, members)
    return values, merged, mass.new_zeros(len(values)).index_add(0, place, mass)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """What the counts of the classes decide, whatever the probabilities.

    Args:
        counts: of the classes, a row a group.
        log_ways: logarithm of the orders in which a group can be drawn.
        advantages: of each class in each group, 0 where it has no member.
        keep: the groups that admission does not draw again; None: all.
    """

    counts: Float[Tensor, "C R"]
    log_ways: Float[Tensor, " C"]
    advantages: Float[Tensor, "C R"]
    keep: Float[Tensor, " C"] | None


def tabulate(
    advantage: Member,
    admission: tuple[Member, ...],
    rewards: tuple[float, ...],
    group_size: int,
    outcomes: tuple[float, ...] | None = None,
) -> Table:
    """Call advantage and admission on every group of members of the classes.

    Args:
        advantage: called on rewards.
        admission: called on outcomes.
        rewards: of each class.
        group_size: responses of a group.
        outcomes: of each class, where shaping makes them differ from rewards.
    """
    counts = compositions(len(rewards), group_size)
    who = spread(counts, group_size)
    drawn = torch.tensor(rewards, dtype=torch.float64)[who].unsqueeze(1)
    present = torch.ones_like(drawn, dtype=torch.bool)
    before = drawn
    if outcomes is not None:
        before = torch.tensor(outcomes, dtype=torch.float64)[who].unsqueeze(1)
    fields = {"rewards": drawn, "outcomes": before, "present": present}
    found = advantage(*(fields[name] for name in advantage.traits.needs)).squeeze(1)
    n = counts.double()
    keep: Tensor | None = None
    for member in admission:
        if member.traits.refill:
            kept = member(*(fields[name] for name in member.traits.needs)).any(-1).squeeze(-1)
            keep = kept.double() if keep is None else keep * kept
    return Table(
        counts=n,
        log_ways=math.lgamma(group_size + 1) - torch.lgamma(n + 1).sum(1),
        advantages=torch.zeros_like(n).scatter(1, who, found),
        keep=keep,
    )


small_table = lru_cache(maxsize=64)(tabulate)
large_table = lru_cache(maxsize=8)(tabulate)


@final
class Groups:
    """The groups of one prompt by the counts of its classes: probabilities, advantages, tokens.

    Args:
        estimator: its advantage and admission are called on every group.
        values: reward, length and maybe outcome of each class.
        mass: probability of each class under the sampler.
        group_size: responses of a group.
    """

    def __init__(
        self,
        estimator: Estimator,
        values: Float[Tensor, "R C"],
        mass: Float[Tensor, " R"],
        group_size: int,
    ) -> None:
        self.mass = mass
        self.group_size = group_size
        rewards, self.lengths = tuple(values[:, 0].tolist()), values[:, 1]
        numbers = ways(len(rewards), group_size) * group_size
        find = small_table if numbers < SMALL else large_table if numbers < LARGE else tabulate
        outcomes = tuple(values[:, 2].tolist()) if values.shape[1] > 2 else None
        table = find(estimator.advantage, estimator.admission, rewards, group_size, outcomes)
        self.counts, self.advantages = table.counts, table.advantages
        self.share = self.counts / self.mass
        self.chance = (table.log_ways + self.counts @ self.mass.log()).exp()
        self.probability = self.chance
        if table.keep is not None:
            kept = self.chance * table.keep
            total = kept.sum()
            if total <= 0:
                raise Undefined("every group is degenerate: no reward varies")
            self.probability = kept / total

    @cached_property
    def tokens(self) -> Int[Tensor, " C"]:
        """Tokens of each group."""
        return (self.counts @ self.lengths).long()


def counts_tokens(estimator: Estimator) -> bool:
    """Whether the denominator counts the tokens of the group or of the batch."""
    return estimator.aggregation.traits.scope in ("group", "batch")


def _scales(
    aggregation: Member, groups: list[Groups], p: int, *, conditioned: bool
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """First two moments of the coefficient for each group, over the other prompts' tokens.

    The aggregation is called on lengths that carry the totals in one response of each prompt; it
    may look at nothing else.  `conditioned`: the other groups are those that admission keeps.
    """
    law = torch.ones(1, dtype=torch.float64)
    for other in groups[:p] + groups[p + 1 :]:
        tokens = torch.bincount(other.tokens, other.probability if conditioned else other.chance)
        pad = len(tokens) - 1
        law = conv1d(law[None, None], tokens.flip(0)[None, None], padding=pad)[0, 0]
    own = torch.bincount(groups[p].tokens).nonzero().squeeze(1)
    rest = law.nonzero().squeeze(1)
    size = groups[p].group_size
    lengths = torch.zeros((len(own), len(rest), len(groups), size), dtype=torch.long)
    lengths[:, :, 0, 0] = own.unsqueeze(1)
    if len(groups) > 1:
        lengths[:, :, 1, 0] = rest
    table = aggregation(lengths, torch.ones_like(lengths, dtype=torch.bool))[:, :, 0, 0]
    moments = torch.stack([table @ law[rest], table.square() @ law[rest]])
    by_tokens = moments.new_zeros((2, int(own[-1]) + 1)).index_copy(1, own, moments)
    first, second = by_tokens[:, groups[p].tokens]
    return first, second


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Extra:
    """What penalties add to one response of each class, a vector y.

    Args:
        mean: E[y 1{c}].
        cross: E[x . y 1{c}], one sign of the advantage after the other.
        square: E[|y|^2 1{c}].
    """

    mean: Float[Tensor, "R NV"]
    cross: Float[Tensor, " SR"]
    square: Float[Tensor, " R"]


@final
class Contributions:
    """What one response of each class contributes, the signs of the advantage one after the other.

        mean[c] = E[x 1{c}],   spread[c] = E[|x|^2 1{c}] - |mean[c]|^2 / mass[c]

    What penalties add follows as if its advantage were 1.

    Args:
        group: classes of one prompt.
        mean: E[x 1{c}] of each class, one sign after the other.
        square: E[|x|^2 1{c}], likewise.
        extra: what penalties add, with the cross moments of one sign after the other; or None.
    """

    def __init__(
        self,
        group: Groups,
        mean: Float[Tensor, "SR NV"],
        square: Float[Tensor, " SR"],
        extra: Extra | None = None,
    ) -> None:
        self.group, self.signs, self.extra = group, len(mean) // len(group.mass), extra
        if extra is not None:
            mean, square = torch.cat([mean, extra.mean]), torch.cat([square, extra.square])
        self.mean = mean
        self.gram = mean @ mean.T
        mass = group.mass.repeat(len(mean) // len(group.mass))
        self.spread = square - self.gram.diagonal() / mass

    @cached_property
    def columns(self) -> tuple[Float[Tensor, "C K"], Float[Tensor, "C K"]]:
        """Share of the class times advantage, and advantage, of each row of `mean` by group."""
        share, advantages = self.group.share, self.group.advantages
        if self.signs > 1:
            share = torch.cat([share, share], 1)
            advantages = torch.cat([advantages.clamp(min=0), advantages.clamp(max=0)], 1)
        if self.extra is not None:
            share = torch.cat([share, self.group.share], 1)
            advantages = torch.cat([advantages, torch.ones_like(self.group.share)], 1)
        return share * advantages, advantages

    @cached_property
    def crossed(self) -> Float[Tensor, " SR"]:
        """E[x . y 1{c}] - mean x . mean y / mass[c] of each class, y what penalties add."""
        assert self.extra is not None
        r = len(self.group.mass)
        between = self.gram[: self.signs * r, self.signs * r :].unflatten(0, (self.signs, r))
        own = between.diagonal(dim1=1, dim2=2).flatten()
        return self.extra.cross - own / self.group.mass.repeat(self.signs)

    def moments(
        self, first: Float[Tensor, " C"], second: Float[Tensor, " C"]
    ) -> tuple[Float[Tensor, " NV"], Float[Tensor, ""]]:
        """Mean and mean square of the prompt's part, from the denominators' moments by group."""
        total, advantages = self.columns
        square = (total * advantages) @ self.spread + ((total @ self.gram) * total).sum(1)
        if self.extra is not None:
            square = square + 2 * (total[:, : len(self.crossed)] @ self.crossed)
        mean = ((self.group.probability * first) @ total) @ self.mean
        return mean, (self.group.probability * second) @ square

    def drift(self, first: Float[Tensor, " C"]) -> Float[Tensor, " NV"]:
        """Mean with advantage 1 and nothing refused: that of the counts."""
        share = self.group.share
        return ((self.group.chance * first) @ share) @ self.mean[: share.shape[1]]


def signs(estimator: Estimator) -> tuple[float, ...]:
    """The signs of the advantage for which contributions differ."""
    return (1.0, -1.0) if reads_sign(estimator) else (1.0,)


def _on_tree(
    estimator: Estimator, walk: Walk, members: list[Tensor], leaf: Tensor | None
) -> tuple[Float[Tensor, "SR NV"], Float[Tensor, " SR"], Extra | None]:
    """What one response of each class contributes, by recursion over the tree of one prompt."""
    chosen = signs(estimator)
    x = walk.probability.new_empty((len(chosen) * len(members), *walk.probability.shape))
    squares, extras = [], []
    for sign, out in zip(chosen, x.split(len(members)), strict=True):
        weights = tree_weights(estimator, walk, sign, leaf)
        squares += [response_moments(walk, weights, sign, members, members, out=out)[1]]
        if weights.penalized:
            extras.append(penalty_moments(walk, weights, sign, members))
    extra = None
    if extras:
        cross = torch.cat([e.cross for e in extras]).squeeze(1)
        y = extras[0]
        extra = Extra(mean=y.mean.flatten(1), cross=cross, square=y.square.squeeze(1))
    return x.flatten(1), torch.cat(squares).squeeze(1), extra


def _classed(estimator: Estimator, part: Problem) -> tuple[Walk, Tensor, list[Tensor], Tensor]:
    """The sampler's measure on one prompt, and its classes."""
    walk = Walk(part)
    values, members, mass = paid_classes(estimator, part, walk)
    return walk, values, list(members), mass


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt's classes: the tree under them, who is in each, and what they contribute.

    Args:
        walk: the sampler's measure.
        members: 1 for each response of each class.
        leaf: coefficient of each response, where the aggregation looks at nothing else; or None.
        part: what the classes contribute.
    """

    walk: Walk
    members: list[Tensor]
    leaf: Float[Tensor, "1 M"] | None
    part: Contributions


def classes(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance from counts of classes, prompt by prompt."""
    scale, prompts = by_prompt(estimator, problem, group_size)
    return combine(estimator, [p.part for p in prompts], scale).shaped(problem.logits.shape)


def by_prompt(
    estimator: Estimator, problem: Problem, group_size: int
) -> tuple[float, list[Prompt]]:
    """The classes of every prompt, and a coefficient of all responses."""
    coupled = counts_tokens(estimator)
    scale, leaf = 1.0, None
    if not coupled:
        scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    shared = weighing(estimator), None if leaf is None else (estimator.aggregation, group_size)
    shaping = (*in_rewards(estimator), refills(estimator))
    found = []
    for p in range(problem.prompts):
        part = kept(problem, ("prompt", p), problem.select, p)
        key: tuple[Hashable, ...] = ("classed", coupled, shaping)
        walk, values, members, mass = kept(part, key, _classed, estimator, part)
        group = Groups(estimator, values, mass, group_size)
        own = None if leaf is None else leaf[p : p + 1]
        key = "classes", coupled, shaping, *shared
        rest = kept(part, key, _on_tree, estimator, walk, members, own)
        mine = Contributions(group, *rest)
        found.append(Prompt(walk=walk, members=members, leaf=own, part=mine))
    return scale, found


def denominators(
    estimator: Estimator, groups: list[Groups], p: int
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """First two moments of what divides each group of a prompt, given that group."""
    if counts_tokens(estimator):
        return _scales(estimator.aggregation, groups, p, conditioned=True)
    one = torch.ones_like(groups[p].chance)
    return one, one


def combine(estimator: Estimator, parts: list[Contributions], scale: float) -> Moments:
    """Moments of the batch from what the classes of each prompt contribute.

    The drift needs no second pass: with advantage 1 and nothing refused the mean is that of the
    counts, with the contributions of a positive advantage.
    """
    groups = [part.group for part in parts]
    means, drifts, variance = [], [], parts[0].mean.new_zeros(())
    for p, part in enumerate(parts):
        first, second = denominators(estimator, groups, p)
        plain = first
        if counts_tokens(estimator):
            plain, _ = _scales(estimator.aggregation, groups, p, conditioned=False)
        mean, square = part.moments(first, second)
        means.append(mean)
        drifts.append(part.drift(plain))
        variance = variance + square - mean @ mean
    return Moments(
        mean=scale * torch.stack(means).unsqueeze(1),
        variance=scale**2 * variance,
        drift=scale * torch.stack(drifts).unsqueeze(1),
    )


def count_classes(estimator: Estimator, problem: Problem, group_size: int) -> float:
    """Compositions that `classes` would list, over all prompts."""
    total = 0.0
    if in_rewards(estimator):
        found = [shaped_classes(estimator, kinds)[0] for kinds in problem.kinds]
        return sum(ways(len(values), group_size) for values in found)
    for kinds in problem.kinds:
        apart = counts_tokens(estimator) or len(problem.sizes) == 1
        total += ways(len(kinds if apart else kinds[:, 0].unique()), group_size)
    return total
