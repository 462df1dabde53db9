"""Moments of one response by recursion over the prefix tree (E4), and what follows from them.

For a response with token coefficients w the contribution is x = sum over its tokens of w z, with
z the (centered) score of the token by the logits of its prefix.  Blocks of different prefixes are
orthogonal and a path meets each prefix once, so for any function f of the response

    E[f x]       has at prefix h the pull-back of      d(h) mu(v|h) E[f w | h, v]
    E[f |x|^2] = sum over h, v of                       d(h) mu(v|h) E[f w^2 | h, v] |z(h, v)|^2

with d the probability under the sampler to reach h.  Advantages that are affine in the rewards need
the features r^0, r^1, r^2 only (`affine`), whatever the group size and the number of rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import geometric, prefix, suffix, token, trajectory
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import Member
from windage.toy.exact.moments import Moments
from windage.toy.problems import Problem, Tree


def pull_back(
    visits: Float[Tensor, "*batch N V"],
    probability: Float[Tensor, "*#batch N V"],
    *,
    out: Tensor | None = None,
) -> Float[Tensor, "*batch N V"]:
    """Sum of coefficient times score by the logits of each prefix: c - pi * sum(c).

    Example:
        >>> pull_back(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]]))
        tensor([[ 0.7500, -0.7500]])
    """
    return torch.addcmul(visits, probability, visits.sum(-1, keepdim=True), value=-1.0, out=out)


@final
class Walk:
    """The sampler's measure on a problem's tree and the log-ratios along it, each made when asked.

    A token, prefix or response counts as never drawn where its behavior probability is 0 in
    float64; its log-ratio is set to 0 there, so that nothing non-finite meets a zero.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tree: Tree = problem.tree
        self._ratios: dict[tuple[str, str], Tensor] = {}
        self._paths: dict[tuple[str, str], Tensor] = {}
        self._visits: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def probability(self) -> Float[Tensor, "P N V"]:
        """Probability of each token under the policy."""
        return self.problem.logp.exp()

    @cached_property
    def behavior(self) -> Float[Tensor, "P N V"]:
        """Probability of each token under the sampler."""
        if self.problem.behavior_logp is self.problem.logp:
            return self.probability
        return self.problem.behavior_logp.exp()

    @cached_property
    def log_ratio(self) -> Float[Tensor, "P N V"]:
        """Log-ratio of policy to sampler at each token, 0 where it is never drawn."""
        return _zero_unless(self.behavior, self.problem.logp - self.problem.behavior_logp)

    def log_ratio_of(self, numerator: str, denominator: str) -> Float[Tensor, "P N V"]:
        """Log-ratio of two of the problem's policies, by their fields, 0 where never drawn.

        Without a proximal policy the policy itself stands in: the first pass over a batch.
        """
        pair = numerator, denominator
        if pair == ("logp", "behavior_logp"):
            return self.log_ratio
        if pair not in self._ratios:
            first, second = (getattr(self.problem, name) for name in pair)
            first, second = (self.problem.logp if x is None else x for x in (first, second))
            self._ratios[pair] = _zero_unless(self.behavior, first - second)
        return self._ratios[pair]

    def _descend(self, root: Tensor, step: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        """Sums or products along paths, at each token: `[P N V]`."""
        if self.tree.horizon == 1:
            return step
        out = torch.empty_like(step)
        for t in range(self.tree.horizon):
            level = self.tree.level(t)
            value = combine(root.unsqueeze(-1), step[:, level], out=out[:, level])
            if t + 1 < self.tree.horizon:
                root = self.tree.descend(value)
        return out

    @cached_property
    def flow(self) -> Float[Tensor, "P N V"]:
        """Probability under the sampler to reach each token."""
        one = self.behavior.new_ones((self.problem.prompts, 1))
        return self._descend(one, self.behavior, torch.mul)

    @property
    def path_ratio(self) -> Float[Tensor, "P N V"]:
        """Log-ratio of policy to sampler, summed up to and including each token."""
        return self.path_ratio_of("logp", "behavior_logp")

    def path_ratio_of(self, numerator: str, denominator: str) -> Float[Tensor, "P N V"]:
        """Log-ratio summed up to and including each token; 0 where the path is never drawn."""
        pair = numerator, denominator
        if pair not in self._paths:
            zero = self.behavior.new_zeros((self.problem.prompts, 1))
            summed = self._descend(zero, self.log_ratio_of(*pair), torch.add)
            self._paths[pair] = _zero_unless(self.flow, summed)
        return self._paths[pair]

    @cached_property
    def leaf_flow(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the sampler."""
        return self.at_leaves(self.flow)

    @cached_property
    def leaf_probability(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the policy."""
        one = self.probability.new_ones((self.problem.prompts, 1))
        return self.at_leaves(self._descend(one, self.probability, torch.mul))

    @cached_property
    def score_norm(self) -> Float[Tensor, "P N V"]:
        """Squared norm of each token's score: 1 - 2 pi + sum of pi^2."""
        z = self.probability.square()
        rest = 1 + z.sum(-1, keepdim=True)
        return torch.mul(self.probability, -2, out=z).add_(rest)

    def at_leaves(self, tokens: Float[Tensor, "P N V"]) -> Float[Tensor, "P M"]:
        """Values at the last token of each response."""
        tree = self.tree
        last = tokens[:, tree.level(tree.horizon - 1)].flatten(1)
        if tree.stop is None or tree.horizon == 1:
            return last
        early = [tokens[:, tree.level(t), tree.stop] for t in range(tree.horizon - 1)]
        return torch.cat([*early, last], 1)

    def leaf_level(self, leaves: Tensor, t: int) -> Tensor:
        """Responses that end at level t, `[... n V]` at the horizon, else `[... n]`."""
        here = leaves[..., self.tree.leaf_level(t)]
        if t < self.tree.horizon - 1:
            return here
        return here.reshape(*here.shape[:-1], self.tree.going**t, self.tree.vocab)

    def gather(self, leaves: Float[Tensor, "P M"]) -> Float[Tensor, "P N V"]:
        """For each token the sum over the responses that pass it."""
        tree = self.tree
        here = self.leaf_level(leaves, tree.horizon - 1)
        if tree.horizon == 1:
            return here
        out = leaves.new_empty((len(leaves), tree.prefixes, tree.vocab))
        out[:, tree.level(tree.horizon - 1)] = here
        for t in reversed(range(tree.horizon - 1)):
            going = here.sum(-1).reshape(len(leaves), tree.going**t, tree.going)
            here = tree.join(going, None if tree.stop is None else self.leaf_level(leaves, t))
            out[:, tree.level(t)] = here
        return out

    def visits(self, feature: Float[Tensor, "P M"] | None) -> Float[Tensor, "P N V"]:
        """Flow times E[f | token] for a function of the response, kept; None stands for 1."""
        if feature is None:
            return self.flow
        if id(feature) not in self._visits:
            self._visits[id(feature)] = feature, self.gather(self.leaf_flow * feature)
        return self._visits[id(feature)][1]


def _zero_unless(probability: Tensor, value: Tensor) -> Tensor:
    """The value, 0 where the probability is 0."""
    if probability.numel() == 0 or probability.amin() > 0:
        return value
    return value.masked_fill(probability <= 0, 0.0)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """An estimator's weight on a tree, for one sign of the advantage.

    node * leaf * map(suffix log-ratio) is the weight of a token of a response.

    Args:
        node: by token; None is 1.
        leaf: by response; None is 1.
        suffix: map of the log-ratio from the token to the end; None is 1.
        centered: coefficient subtracted from each head token at a prefix; None is 0.
    """

    node: Float[Tensor, "P N V"] | None
    leaf: Float[Tensor, "P M"] | None
    suffix: Member | None
    centered: Float[Tensor, "P N V"] | None


def tree_weights(estimator: Estimator, walk: Walk, sign: float, leaf: Tensor | None) -> Weights:
    """Call the corrections' own maps on the log-ratios that the tree supplies.

    Args:
        estimator: read for its corrections and centering.
        walk: the sampler's measure.
        sign: of the advantage.
        leaf: a factor of each response, such as the aggregation's; None is 1.

    Raises:
        NotImplementedError: a reach that trees do not know, or a suffix of the proximal policy.
    """
    node: Tensor | None = None
    tail: Member | None = None
    advantage = walk.behavior.new_tensor(sign)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        pair = correction.numerator, correction.denominator
        reach = correction.reach.function
        if reach in (token, prefix):
            effective = walk.log_ratio_of(*pair) if reach is token else walk.path_ratio_of(*pair)
            weight = correction.map(effective, advantage)
            node = weight if node is None else node * weight
        elif reach in (trajectory, geometric):
            effective = walk.at_leaves(walk.path_ratio_of(*pair))
            if reach is geometric:
                effective = effective / walk.problem.lengths
            weight = correction.map(effective, advantage)
            leaf = weight if leaf is None else leaf * weight
        elif reach is suffix and tail is None and pair == ("logp", "behavior_logp"):
            tail = correction.map
        else:
            raise NotImplementedError(f"{estimator.name}: no recursion for {correction.describe()}")
    centered = None
    if estimator.centering is not None:
        problem = walk.problem
        centered = center(estimator, problem.logp, problem.behavior_logp, advantage.view(1))
    return Weights(node=node, leaf=leaf, suffix=tail, centered=centered)


def _suffix_flow(walk: Walk, map_: Member, sign: float, leaves: Tensor, power: int) -> Tensor:
    """Sum of leaves times map(suffix)^power, from pairs of a token and a response below it."""
    tree = walk.tree
    total = walk.at_leaves(walk.path_ratio)
    advantage = leaves.new_tensor(sign)
    before = torch.zeros_like(walk.path_ratio[:, :1, 0])
    levels = []
    for t in range(tree.horizon):
        here = walk.path_ratio[:, tree.level(t)]

        def weighed(d: int, start: Tensor, fold: tuple[int, ...]) -> Tensor:
            tail = walk.leaf_level(total, d).reshape(len(total), *fold)
            weight = map_(tail - start, advantage).pow(power)
            return weight * walk.leaf_level(leaves, d).reshape(*leaves.shape[:-1], *fold)

        n = tree.going**t
        if t == tree.horizon - 1:
            levels.append(weighed(t, before.unsqueeze(-1), (n, tree.vocab)))
            break
        going = torch.zeros((*leaves.shape[:-1], n, tree.going), dtype=leaves.dtype)
        for d in range(t + 1, tree.horizon):
            if tree.leaf_bounds[d] < tree.leaf_bounds[d + 1]:
                below = (tree.leaf_bounds[d + 1] - tree.leaf_bounds[d]) // (n * tree.going)
                going = going + weighed(d, before[..., None, None], (n, tree.going, below)).sum(-1)
        stopping = None if tree.stop is None else weighed(t, before, (n,))
        levels.append(tree.join(going, stopping))
        before = tree.descend(here)
    return torch.cat(levels, -2)


def conditional(walk: Walk, features: Tensor) -> tuple[Tensor, Tensor]:
    """E[f | token] and E[f | prefix] under the sampler, by recursion from the responses."""
    tree = walk.tree
    tokens: list[Tensor] = []
    prefixes: list[Tensor] = []
    for t in reversed(range(tree.horizon)):
        here = (
            walk.leaf_level(features, t) if t == tree.horizon - 1 or tree.stop is not None else None
        )
        if t < tree.horizon - 1:
            shape = (*features.shape[:-1], tree.going**t, tree.going)
            here = tree.join(prefixes[-1].reshape(shape), here)
        assert here is not None
        tokens.append(here)
        prefixes.append((here * walk.behavior[:, tree.level(t)]).sum(-1))
    if len(tokens) == 1:
        return tokens[0], prefixes[0]
    return torch.cat(tokens[::-1], -2), torch.cat(prefixes[::-1], -1)


Feature = Float[Tensor, "P M"] | None


def response_moments(
    walk: Walk,
    weights: Weights,
    sign: float,
    mean_features: Sequence[Feature],
    norm_features: Sequence[Feature],
    *,
    out: Float[Tensor, "F P N V"] | None = None,
) -> tuple[Float[Tensor, "F P N V"], Float[Tensor, "H P"]]:
    """E[f x] for each mean feature and E[h |x|^2] for each norm feature, of one response.

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`.
        sign: of the advantage, for maps that read it.
        mean_features: functions of the response; None stands for 1.
        norm_features: likewise.
        out: where to put the means.
    """
    p = walk.probability
    means = p.new_empty((len(mean_features), *p.shape)) if out is None else out
    for flow, mean in zip(_flows(walk, weights, sign, mean_features, 1), means, strict=True):
        visits = flow if weights.node is None else torch.mul(flow, weights.node, out=mean)
        if weights.centered is not None:
            reached = flow.sum(-1, keepdim=True)
            visits = torch.addcmul(visits, reached, weights.centered, value=-1.0, out=mean)
        pull_back(visits, p, out=mean)
    if not norm_features:
        return means, p.new_empty((0, len(p)))
    squared = _square_norm(walk, weights)
    flows = _flows(walk, weights, sign, norm_features, 2)
    return means, torch.stack([dot(flow, squared) for flow in flows])


def dot(a: Float[Tensor, "P ..."], b: Float[Tensor, "P ..."]) -> Float[Tensor, " P"]:
    """Inner product, prompt by prompt."""
    return torch.bmm(a.flatten(1).unsqueeze(1), b.flatten(1).unsqueeze(2)).view(-1)


def _flows(
    walk: Walk, weights: Weights, sign: float, features: Sequence[Feature], power: int
) -> Sequence[Tensor]:
    """Flow times E[f (leaf map(suffix))^power | token] for each feature f."""
    if weights.leaf is None and weights.suffix is None:
        return [walk.visits(f) for f in features]
    leaves = walk.leaf_flow
    if weights.leaf is not None:
        leaves = leaves * weights.leaf if power == 1 else leaves * weights.leaf * weights.leaf
    chosen = [leaves if f is None else leaves * f for f in features]
    if weights.suffix is not None:
        return list(_suffix_flow(walk, weights.suffix, sign, torch.stack(chosen), power))
    return [walk.gather(c) for c in chosen]


def _square_norm(walk: Walk, weights: Weights) -> Float[Tensor, "P N V"]:
    """Squared norm of each token's weighted, or centered, score."""
    if weights.centered is not None:
        return _centered_norm(walk, weights)
    if weights.node is None:
        return walk.score_norm
    return weights.node.square().mul_(walk.score_norm)


def _centered_norm(walk: Walk, weights: Weights) -> Tensor:
    """|w (e_y - pi) - sum over v of k_v (e_v - pi)|^2 for each token y."""
    assert weights.centered is not None
    p, k = walk.probability, weights.centered
    w = torch.ones_like(p) if weights.node is None else weights.node
    rest = w - k.sum(-1, keepdim=True)
    return (
        w.square()
        + k.square().sum(-1, keepdim=True)
        + rest.square() * p.square().sum(-1, keepdim=True)
        - 2 * w * k
        - 2 * w * rest * p
        + 2 * rest * (k * p).sum(-1, keepdim=True)
    )


def response_scale(
    aggregation: Member, problem: Problem, group_size: int
) -> tuple[float, Float[Tensor, "P M"] | None]:
    """Coefficient of each response under an aggregation that looks at its own length only.

    One number and None where all have the same, else 1 and a number for each response.
    """
    sizes = problem.sizes
    shape = (len(sizes), problem.prompts, group_size)
    lengths = sizes[:, None, None].expand(shape)
    scale = aggregation(lengths, torch.ones(shape, dtype=torch.bool))[:, 0, 0]
    if len(sizes) == 1 or bool((scale == scale[0]).all()):
        return float(scale[0]), None
    by_length = scale.new_zeros(int(sizes[-1]) + 1).index_put((sizes,), scale)
    return 1.0, by_length[problem.lengths]


def affine_coefficients(advantage: Member, group_size: int, center: float) -> tuple[float, ...]:
    """Read alpha, beta, gamma of A_i = alpha (r_i - c) + beta sum of others' (r_j - c) + gamma."""
    rewards = torch.zeros((3, 1, group_size), dtype=torch.float64)
    rewards[1, 0, 0] = 1.0
    rewards[2] = center
    present = torch.ones_like(rewards, dtype=torch.bool)
    base, probe, middle = advantage(rewards, present).squeeze(1).tolist()
    beta = probe[1] - base[1] if group_size > 1 else 0.0
    return probe[0] - base[0], beta, middle[0]


def affine(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage is affine in the rewards and no map reads its sign."""
    walk = Walk(problem)
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    weights = tree_weights(estimator, walk, 1.0, leaf)
    center = dot(walk.leaf_flow, problem.rewards).mean()
    r = problem.rewards - center
    powers = (None, r, r.square())
    x, q = response_moments(walk, weights, 1.0, powers, powers)
    first, second = (dot(walk.leaf_flow, f) for f in powers[1:])
    law = (float(center), first, second)
    return affine_moments(estimator.advantage, group_size, scale, law, x, q)


def affine_moments(
    advantage: Member,
    group_size: int,
    scale: float,
    law: tuple[float, Float[Tensor, " P"], Float[Tensor, " P"]],
    x: Float[Tensor, "3 P N V"],
    q: Float[Tensor, "3 P"],
) -> Moments:
    """Moments of a batch from those of one response with the features 1, r - c and (r - c)^2.

    Args:
        advantage: affine in the rewards of the group.
        group_size: responses of a group.
        scale: coefficient of every response.
        law: the number c, and the first two moments of r - c under the sampler.
        x: E[f x] of one response for each feature f.
        q: E[f |x|^2], likewise.
    """
    center, first, second = law
    alpha, beta, gamma = affine_coefficients(advantage, group_size, center)
    g = float(group_size)

    def siblings(count: float) -> tuple[Tensor, Tensor]:
        """First two moments of beta * (sum of `count` siblings' rewards) + gamma."""
        mean = beta * count * first + gamma
        spread = beta**2 * count * (second - first.square())
        return mean, mean.square() + spread

    flat = x.flatten(2)
    gram = torch.bmm(flat.transpose(0, 1), flat.permute(1, 2, 0)).permute(1, 2, 0)
    u1, u2 = siblings(g - 1)
    mean = alpha * x[1] + u1[:, None, None] * x[0]
    square = g * (alpha**2 * q[2] + 2 * alpha * u1 * q[1] + u2 * q[0])
    if group_size > 1:
        v1, v2 = siblings(g - 2)
        square = square + g * (g - 1) * (
            (alpha**2 + beta**2) * gram[1, 1]
            + 2 * alpha * beta * gram[2, 0]
            + 2 * (alpha + beta) * v1 * gram[1, 0]
            + v2 * gram[0, 0]
        )
    variance = scale**2 * (square - g**2 * dot(mean, mean)).sum()
    return Moments(mean=scale * g * mean, variance=variance, drift=scale * g * x[0])


def reads_sign(estimator: Estimator) -> bool:
    """Whether some map looks at the sign of the advantage."""
    return any(c.map.traits.reads == "sign" for c in estimator.corrections)


def by_response(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage looks at its own response only."""
    walk = Walk(problem)
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    advantages = estimator.advantage(problem.rewards, torch.ones_like(problem.rewards).bool())
    split = [(1.0, advantages)]
    if reads_sign(estimator):
        split = [(1.0, advantages.clamp(min=0)), (-1.0, advantages.clamp(max=0))]
    parts = []
    for sign, mine in split:
        weights = tree_weights(estimator, walk, sign, leaf)
        wanted = (mine, None) if sign > 0 else (mine,)
        parts.append(response_moments(walk, weights, sign, wanted, (mine.square(),)))
    (mean, drift), (norm,) = parts[0]
    for (more,), (again,) in parts[1:]:
        mean, norm = mean + more, norm + again
    g = float(group_size)
    variance = scale**2 * g * (norm - dot(mean, mean)).sum()
    return Moments(mean=scale * g * mean, variance=variance, drift=scale * g * drift)
