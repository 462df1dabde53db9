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

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.correction import geometric, prefix, suffix, token, trajectory
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.exact.moments import Moments
from windage.toy.problems import Problem, Tree


def pull_back(
    visits: Float[Tensor, "*batch N V"], probability: Float[Tensor, "*#batch N V"]
) -> Float[Tensor, "*batch N V"]:
    """Sum of coefficient times score by the logits of each prefix: c - pi * sum(c).

    Example:
        >>> pull_back(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]]))
        tensor([[ 0.7500, -0.7500]])
    """
    return visits - probability * visits.sum(-1, keepdim=True)


@final
class Walk:
    """The sampler's measure on a problem's tree and the log-ratios along it.

    A token, prefix or response counts as never drawn where its behavior probability is 0 in
    float64; its log-ratio is set to 0 there, so that nothing non-finite meets a zero.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tree: Tree = problem.tree
        self.probability = problem.logp.exp()
        self.behavior = problem.behavior_logp.exp()
        seen = self.behavior > 0
        ratio = problem.logp - problem.behavior_logp.masked_fill(~seen, 0.0)
        self.log_ratio = ratio.masked_fill(~seen, 0.0)

    def _descend(self, root: Tensor, step: Tensor, *, product: bool) -> Tensor:
        """Sums (products) along paths, at each token: `[P N V]`."""
        levels = []
        for t in range(self.tree.horizon):
            here = step[:, self.tree.level(t)]
            value = root.unsqueeze(-1) * here if product else root.unsqueeze(-1) + here
            levels.append(value)
            if t + 1 < self.tree.horizon:
                root = self.tree.descend(value)
        return torch.cat(levels, -2) if len(levels) > 1 else levels[0]

    @cached_property
    def flow(self) -> Float[Tensor, "P N V"]:
        """Probability under the sampler to reach each token."""
        one = self.behavior.new_ones((self.problem.prompts, 1))
        return self._descend(one, self.behavior, product=True)

    @cached_property
    def path_ratio(self) -> Float[Tensor, "P N V"]:
        """Log-ratio summed up to and including each token; 0 where the path is never drawn."""
        zero = self.behavior.new_zeros((self.problem.prompts, 1))
        total = self._descend(zero, self.log_ratio, product=False)
        return total.masked_fill(self.flow <= 0, 0.0)

    def at_leaves(self, tokens: Float[Tensor, "P N V"]) -> Float[Tensor, "P M"]:
        """Values at the last token of each response."""
        if self.tree.horizon == 1:
            return tokens[:, 0]
        parts = []
        for t in range(self.tree.horizon):
            here = tokens[:, self.tree.level(t)]
            if t == self.tree.horizon - 1:
                parts.append(here.flatten(1))
            elif self.tree.stop is not None:
                parts.append(here[..., self.tree.stop])
        return torch.cat(parts, 1)

    def leaf_level(self, leaves: Tensor, t: int) -> Tensor:
        """Responses that end at level t, `[... n V]` at the horizon, else `[... n]`."""
        here = leaves[..., self.tree.leaf_level(t)]
        return here.unflatten(-1, (-1, self.tree.vocab)) if t == self.tree.horizon - 1 else here

    @cached_property
    def leaf_flow(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the sampler."""
        return self.at_leaves(self.flow)

    @cached_property
    def leaf_probability(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the policy."""
        one = self.behavior.new_ones((self.problem.prompts, 1))
        return self.at_leaves(self._descend(one, self.probability, product=True))

    @cached_property
    def score_norm(self) -> Float[Tensor, "P N V"]:
        """Squared norm of each token's score: 1 - 2 pi + sum of pi^2."""
        p = self.probability
        return 1 - 2 * p + p.square().sum(-1, keepdim=True)


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


def tree_weights(estimator: Estimator, walk: Walk, sign: float) -> Weights:
    """Call the corrections' own maps on the log-ratios that the tree supplies.

    Raises:
        NotImplementedError: a reach or a pair of policies that trees do not know.
    """
    node: Tensor | None = None
    leaf: Tensor | None = None
    tail: Member | None = None
    advantage = walk.behavior.new_tensor(sign)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        if (correction.numerator, correction.denominator) != ("logp", "behavior_logp"):
            raise NotImplementedError(f"{estimator.name}: a problem has no proximal policy")
        reach = correction.reach.function
        if reach in (token, prefix):
            effective = walk.log_ratio if reach is token else walk.path_ratio
            weight = correction.map(effective, advantage)
            node = weight if node is None else node * weight
        elif reach in (trajectory, geometric):
            effective = walk.at_leaves(walk.path_ratio)
            if reach is geometric:
                effective = effective / walk.problem.lengths
            weight = correction.map(effective, advantage)
            leaf = weight if leaf is None else leaf * weight
        elif reach is suffix and tail is None:
            tail = correction.map
        else:
            raise NotImplementedError(f"{estimator.name}: no recursion for {correction.describe()}")
    centered = None
    if estimator.centering is not None:

        def weigh(ratio: Tensor) -> Tensor:
            weight = torch.ones_like(ratio)
            for correction in estimator.corrections:
                weight = weight * correction.map(ratio, advantage)
            return weight

        centered = estimator.centering(walk.problem.logp, walk.problem.behavior_logp, weigh)
    return Weights(node=node, leaf=leaf, suffix=tail, centered=centered)


def _suffix_flow(walk: Walk, map_: Member, sign: float, features: Tensor, power: int) -> Tensor:
    """Flow times E[f map(suffix)^power | token], from pairs of a token and a response below it."""
    tree = walk.tree
    leaves = features * walk.leaf_flow
    total = walk.at_leaves(walk.path_ratio)
    advantage = features.new_tensor(sign)
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
            going = prefixes[-1].unflatten(-1, (-1, tree.going))
            here = tree.join(going, here)
        assert here is not None
        tokens.append(here)
        prefixes.append((here * walk.behavior[:, tree.level(t)]).sum(-1))
    if len(tokens) == 1:
        return tokens[0], prefixes[0]
    return torch.cat(tokens[::-1], -2), torch.cat(prefixes[::-1], -1)


def response_moments(
    walk: Walk,
    weights: Weights,
    sign: float,
    mean_features: Float[Tensor, "F P M"],
    norm_features: Float[Tensor, "H P M"],
) -> tuple[Float[Tensor, "F P N V"], Float[Tensor, "H P"]]:
    """E[f x] for each mean feature and E[h |x|^2] for each norm feature, of one response.

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`; its leaf factor is applied here.
        sign: of the advantage, for maps that read it.
        mean_features: functions of the response.
        norm_features: functions of the response.
    """
    if weights.leaf is not None:
        mean_features = mean_features * weights.leaf
        norm_features = norm_features * weights.leaf.square()
    z = walk.score_norm
    if weights.suffix is not None:
        mean_flow = _suffix_flow(walk, weights.suffix, sign, mean_features, 1)
        norm_flow = _suffix_flow(walk, weights.suffix, sign, norm_features, 2)
        if weights.node is not None:
            mean_flow = mean_flow * weights.node
            norm_flow = norm_flow * weights.node.square()
        mean = pull_back(mean_flow, walk.probability)
        return mean, (norm_flow * z).sum((-2, -1))
    shared = norm_features is mean_features
    at_token, at_prefix = conditional(walk, mean_features)
    node = walk.flow if weights.node is None else walk.flow * weights.node
    visits = at_token * node
    if weights.centered is not None:
        reach = _reach(walk)
        visits = visits - (at_prefix * reach).unsqueeze(-1) * weights.centered
    mean = pull_back(visits, walk.probability)
    at_token = at_token if shared else conditional(walk, norm_features)[0]
    if weights.centered is not None:
        squared = _centered_norm(walk, weights) * walk.flow
    else:
        squared = z * node if weights.node is None else z * node * weights.node
    return mean, torch.einsum("fpnv,pnv->fp", at_token, squared)


def _reach(walk: Walk) -> Tensor:
    """Probability under the sampler to reach each prefix."""
    tree = walk.tree
    levels = [walk.flow.new_ones((walk.problem.prompts, 1))]
    levels += [tree.descend(walk.flow[:, tree.level(t)]) for t in range(tree.horizon - 1)]
    return torch.cat(levels, -1)


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
    aggregation: Member, lengths: Int[Tensor, "P M"], group_size: int
) -> Float[Tensor, "P M"]:
    """Coefficient of each response under an aggregation that looks at its own length only."""
    sizes, index = lengths.unique(return_inverse=True)
    shape = (len(sizes), lengths.shape[0], group_size)
    table = aggregation(sizes[:, None, None].expand(shape), torch.ones(shape, dtype=torch.bool))
    return table[:, 0, 0][index]


def affine_coefficients(advantage: Member, group_size: int, center: float) -> tuple[float, ...]:
    """Read alpha, beta, gamma of A_i = alpha (r_i - c) + beta sum of others' (r_j - c) + gamma."""
    rewards = torch.full((2, 1, group_size), center, dtype=torch.float64)
    rewards[1, 0, 0] += 1
    present = torch.ones_like(rewards, dtype=torch.bool)
    base, probe = advantage(rewards, present).squeeze(1).tolist()
    beta = probe[1] - base[1] if group_size > 1 else 0.0
    return probe[0] - base[0], beta, base[0]


def affine(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage is affine in the rewards and no map reads its sign."""
    walk = Walk(problem)
    weights = tree_weights(estimator, walk, 1.0)
    scale = response_scale(estimator.aggregation, problem.lengths, group_size)
    center = float(problem.rewards.mean())
    r = problem.rewards - center
    powers = torch.stack([torch.ones_like(r), r, r.square()])
    flow = walk.leaf_flow
    first, second = (flow * r).sum(-1), (flow * r.square()).sum(-1)
    x, q = response_moments(walk, weights, 1.0, powers * scale, powers * scale.square())

    alpha, beta, gamma = affine_coefficients(estimator.advantage, group_size, center)
    g = float(group_size)

    def siblings(count: float) -> tuple[Tensor, Tensor]:
        """First two moments of beta * (sum of `count` siblings' rewards) + gamma."""
        mean = beta * count * first + gamma
        spread = beta**2 * count * (second - first.square())
        return mean, mean.square() + spread

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1))

    u1, u2 = siblings(g - 1)
    mean = g * (alpha * x[1] + u1[:, None, None] * x[0])
    own = alpha**2 * q[2] + 2 * alpha * u1 * q[1] + u2 * q[0]
    total = g * own
    if group_size > 1:
        v1, v2 = siblings(g - 2)
        cross = (
            (alpha**2 + beta**2) * dot(x[1], x[1])
            + 2 * alpha * beta * dot(x[2], x[0])
            + 2 * (alpha + beta) * v1 * dot(x[1], x[0])
            + v2 * dot(x[0], x[0])
        )
        total = total + g * (g - 1) * cross
    return Moments(mean=mean, variance=(total - dot(mean, mean)).sum(), drift=g * x[0])


def by_response(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage looks at its own response only."""
    walk = Walk(problem)
    scale = response_scale(estimator.aggregation, problem.lengths, group_size)
    advantages = estimator.advantage(problem.rewards, torch.ones_like(problem.rewards).bool())
    reads = any(c.map.traits.reads == "sign" for c in estimator.corrections)
    mean = torch.zeros_like(problem.logits)
    norm = problem.rewards.new_zeros(problem.prompts)
    drift = torch.zeros_like(mean)
    for sign in (1.0, -1.0) if reads else (1.0,):
        mine = advantages if not reads else advantages * (advantages * sign >= 0)
        factor = mine * scale
        weights = tree_weights(estimator, walk, sign)
        features = torch.stack([factor, scale]) if sign > 0 else factor.unsqueeze(0)
        x, q = response_moments(walk, weights, sign, features, factor.square().unsqueeze(0))
        mean, norm = mean + x[0], norm + q[0]
        drift = x[1] if sign > 0 else drift
    g = float(group_size)
    variance = g * (norm - mean.square().sum((-2, -1)))
    return Moments(mean=g * mean, variance=variance.sum(), drift=g * drift)
