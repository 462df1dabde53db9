"""Moments of one response by recursion over the prefix tree (E4).

For a response with token coefficients w the contribution is x = sum over its tokens of w z, with
z the (centered) score of the token by the logits of its prefix.  Blocks of different prefixes are
orthogonal and a path meets each prefix once, so for any function f of the response

    E[f x]       has at prefix h the pull-back of      d(h) mu(v|h) E[f w | h, v]
    E[f |x|^2] = sum over h, v of                       d(h) mu(v|h) E[f w^2 | h, v] |z(h, v)|^2

with d the probability under the sampler to reach h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import (
    Correction,
    geometric,
    prefix,
    ratio,
    suffix,
    token,
    trajectory,
)
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import Member
from windage.toy.exact.penalties import token_terms
from windage.toy.exact.walk import Walk, dot, pull_back, zero_unless
from windage.toy.problems import Problem

# Logarithms of products up to here stay far from the ends of float64.
MODERATE = 300.0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Tail:
    """A weight by the log-ratio from a token to the end of its response.

    Args:
        steps: log-ratio of each token.
        map: of their sum.
    """

    steps: Float[Tensor, "P N V"]
    map: Member


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """An estimator's weight on a tree, for one sign of the advantage.

    A token of a response has the weight w = node * leaf * map(suffix log-ratio), and with penalties
    the coefficient (A + what it earns from there on) w + share * added, A the advantage.

    Args:
        node: by token; None is 1.
        leaf: by response; None is 1.
        suffix: by what follows; None is 1.
        centered: coefficient subtracted from each head token at a prefix; None is 0.
        added: of each token by penalties in the loss; None is 0.
        earned: by each token from penalties in its reward; None is 0.
        after: earned by forced tokens behind a response.
        share: of each response by the aggregation; None is 1.
    """

    node: Float[Tensor, "P N V"] | None = None
    leaf: Float[Tensor, "P M"] | None = None
    suffix: Tail | None = None
    centered: Float[Tensor, "P N V"] | None = None
    added: Float[Tensor, "P N V"] | None = None
    earned: Float[Tensor, "P N V"] | None = None
    after: Float[Tensor, "P M"] | float = 0.0
    share: Float[Tensor, "P M"] | None = None

    @property
    def penalized(self) -> bool:
        """Whether something does not multiply the advantage."""
        return self.added is not None or self.earned is not None


def tree_weights(estimator: Estimator, walk: Walk, sign: float, leaf: Tensor | None) -> Weights:
    """Call the corrections' own maps on the log-ratios that the tree supplies.

    Ratios of whole responses, products and geometric means, are taken response by response: exact
    however many values they have.  A chain has too many responses for that, and needs their law.

    Args:
        estimator: read for its corrections and centering.
        walk: the sampler's measure.
        sign: of the advantage.
        leaf: a factor of each response, such as the aggregation's; None is 1.

    Raises:
        NotImplementedError: a correction that trees do not know.
    """
    node: Tensor | None = None
    tail: Tail | None = None
    share = leaf
    advantage = walk.behavior.new_tensor(sign)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        reach = correction.reach.function
        if reach in (token, prefix):
            steps = _steps(correction, walk, advantage)
            effective = steps if reach is token else _paths(correction, walk, advantage)
            weight = correction.weigh(effective, advantage, lambda name: walk.fields[name])
            node = weight if node is None else node * weight
        elif reach in (trajectory, geometric) and not correction.map.traits.needs:
            effective = walk.at_leaves(_paths(correction, walk, advantage))
            if reach is geometric:
                effective = effective / walk.problem.lengths
            weight = correction.map(effective, advantage)
            leaf = weight if leaf is None else leaf * weight
        elif reach is suffix and not correction.map.traits.needs and tail is None:
            tail = Tail(steps=_steps(correction, walk, advantage), map=correction.map)
        else:
            raise NotImplementedError(f"{estimator.name}: no recursion for {correction.describe()}")
    centered = None
    if estimator.centering is not None:
        problem = walk.problem
        centered = center(estimator, problem.logp, problem.behavior_logp, advantage.view(1))
    return Weights(
        node=node,
        leaf=leaf,
        suffix=tail,
        centered=centered,
        **token_terms(estimator, walk, share),
    )


def _steps(correction: Correction, walk: Walk, advantage: Tensor) -> Tensor:
    """The log-ratio of each token as the reach receives it."""
    steps = walk.log_ratio_of(correction.numerator, correction.denominator)
    return steps if correction.before is None else correction.before(steps, advantage)


def _paths(correction: Correction, walk: Walk, advantage: Tensor) -> Tensor:
    """Those log-ratios summed up to and including each token."""
    if correction.before is None:
        return walk.path_ratio_of(correction.numerator, correction.denominator)
    return walk.summed(_steps(correction, walk, advantage))


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

    x is what multiplies the advantage; `penalty_moments` has the rest.

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`.
        sign: of the advantage, for maps that read it.
        mean_features: functions of the response; None stands for 1.
        norm_features: likewise.
        out: where to put the means.
    """
    flows = flow(walk, weights, sign, mean_features, (1, 0))[0]
    shape = (len(mean_features), *walk.probability.shape)
    means = walk.probability.new_empty(shape) if out is None else out
    for visits, mean in zip(flows, means, strict=True):
        _weighed(weights, visits, out=mean)
        pull_back(mean, walk.probability, out=mean)
    if not norm_features:
        return means, walk.probability.new_empty((0, means.shape[1]))
    return means, torch.stack(_norms(walk, weights, sign, norm_features))


def _norms(
    walk: Walk, weights: Weights, sign: float, features: Sequence[Feature]
) -> list[Float[Tensor, " P"]]:
    """E[f |x|^2]: by tokens where visits are kept, else by responses, one sum for all features."""
    squared = _square_norm(walk, weights)
    tail = weights.suffix
    kernel = None if tail is None else _kernel(walk, tail, 2)
    if (weights.leaf is None and tail is None) or (tail is not None and kernel is None):
        flows = flow(walk, weights, sign, features, (2, 0))[0]
        return [dot(visits, squared) for visits in flows]
    leaves = walk.leaf_flow * walk.ending(squared, kernel)
    if weights.leaf is not None:
        leaves = leaves * weights.leaf * weights.leaf  # the square alone may overflow
    return [leaves.sum(-1) if f is None else dot(leaves, f) for f in features]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Penalized:
    """What penalties add to a response: a vector y besides advantage times x, by features f.

    Args:
        mean: E[f y].
        cross: E[f x . y].
        square: E[f |y|^2].
    """

    mean: Float[Tensor, "F P N V"]
    cross: Float[Tensor, "F P"]
    square: Float[Tensor, "F P"]


def penalty_moments(
    walk: Walk, weights: Weights, sign: float, features: Sequence[Feature]
) -> Penalized:
    """Moments of what does not multiply the advantage, of one response.

        y = sum over tokens of (earned from there on) w z + share * added * score

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`, with penalties.
        sign: of the advantage, for maps that read it.
        features: functions of the response; None stands for 1.
    """
    p = walk.probability
    mean = p.new_zeros((len(features), *p.shape))
    cross, square = p.new_zeros((2, len(features), len(p)))
    order = 2 if weights.earned is not None else 0
    if weights.earned is not None:
        squared = _square_norm(walk, weights)
        once = flow(walk, weights, sign, features, (1, 0), 1)[1]
        _, first, second = flow(walk, weights, sign, features, (2, 0), 2)
        for f in range(len(features)):
            mean[f] = _weighed(weights, once[f])
            cross[f], square[f] = dot(first[f], squared), dot(second[f], squared)
    if weights.added is not None:
        both, own = _added_norms(walk, weights)
        mixed = flow(walk, weights, sign, features, (1, 1), order // 2)
        alone = flow(walk, weights, sign, features, (0, 2))[0]
        once = flow(walk, weights, sign, features, (0, 1))[0]
        for f in range(len(features)):
            mean[f] += once[f] * weights.added
            cross[f] += dot(mixed[0][f], both)
            square[f] += dot(alone[f], own)
            if weights.earned is not None:
                square[f] += 2 * dot(mixed[1][f], both)
    for f in range(len(features)):
        pull_back(mean[f], p, out=mean[f])
    return Penalized(mean=mean, cross=cross, square=square)


def flow(
    walk: Walk,
    weights: Weights,
    sign: float,
    features: Sequence[Feature],
    powers: tuple[int, int],
    order: int = 0,
) -> Sequence[Sequence[Tensor]]:
    """Flow times E[f (leaf map(suffix))^i share^j e^k | token], by k = 0, .. order and f.

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`.
        sign: of the advantage, for maps that read it.
        features: functions f of the response; None stands for 1.
        powers: i and j.
        order: of the rewards e that penalties give from the token on.
    """
    factor: Tensor | None = None
    for value, power in ((weights.leaf, powers[0]), (weights.share, powers[1])):
        for _ in range(power):
            if value is not None:
                factor = value if factor is None else factor * value
    tail = weights.suffix if powers[0] else None
    if factor is None and tail is None and order == 0:
        return [[walk.visits(f) for f in features]]
    leaves = walk.leaf_flow if factor is None else walk.leaf_flow * factor
    chosen = [leaves if f is None else leaves * f for f in features]
    kernel: Tensor | None = None
    if tail is not None:
        kernel = _kernel(walk, tail, powers[0])
        if kernel is None:
            stacked = torch.stack(chosen)
            found = _pairs(walk, weights, tail, sign, stacked, powers[0], order)
            return [list(part) for part in found]
    if order == 0:
        return [[walk.gather(c, kernel) for c in chosen]]
    earned = weights.earned
    assert earned is not None
    collected = [walk.collect(c, earned, weights.after, order, kernel) for c in chosen]
    return list(zip(*collected, strict=True))


def _kernel(walk: Walk, tail: Tail, power: int) -> Tensor | None:
    """A factor of each token whose product along the suffix is its weight to a power, if any."""
    if tail.map.function is not ratio:
        return None
    steps = zero_unless(walk.flow, tail.steps)
    lowest, highest = steps.aminmax()
    if max(-float(lowest), float(highest)) * walk.tree.horizon * power > MODERATE:
        return None
    return (steps * power).exp()


def _pairs(
    walk: Walk,
    weights: Weights,
    tail: Tail,
    sign: float,
    leaves: Float[Tensor, "F P M"],
    power: int,
    order: int,
) -> Float[Tensor, "K F P N V"]:
    """`flow` from pairs of a token and a response below it."""
    tree, advantage = walk.tree, leaves.new_tensor(sign)
    paths = [walk.summed(tail.steps)]
    if order:
        assert weights.earned is not None
        paths.append(walk.summed(weights.earned))
    totals = [walk.at_leaves(path) for path in paths]
    if order:
        totals[1] = totals[1] + weights.after

    def weighed(before: list[Tensor], d: int, fold: tuple[int, ...]) -> Tensor:
        starts = [b.view(*b.shape, *[1] * (len(fold) - 1)) for b in before]
        ends = [walk.leaf_level(x, d).reshape(len(x), *fold) for x in totals]
        behind = [end - start for end, start in zip(ends, starts, strict=True)]
        weight = tail.map(behind[0], advantage).pow(power)
        found = [weight * walk.leaf_level(leaves, d).reshape(*leaves.shape[:-1], *fold)]
        for _ in range(order):
            found.append(found[-1] * behind[1])
        return torch.stack(found)

    before = [torch.zeros_like(path[:, :1, 0]) for path in paths]
    levels = []
    for t in range(tree.horizon - 1):
        n = tree.going**t
        shape = (order + 1, *leaves.shape[:-1], n, tree.going)
        going = torch.zeros(shape, dtype=leaves.dtype)
        for d in range(t + 1, tree.horizon):
            if tree.leaf_bounds[d] < tree.leaf_bounds[d + 1]:
                below = (tree.leaf_bounds[d + 1] - tree.leaf_bounds[d]) // (n * tree.going)
                going = going + weighed(before, d, (n, tree.going, below)).sum(-1)
        stopping = None if tree.stop is None else weighed(before, t, (n,))
        levels.append(tree.join(going, stopping))
        before = [tree.descend(path[:, tree.level(t)]) for path in paths]
    last = tree.horizon - 1
    levels.append(weighed(before, last, (tree.going**last, tree.vocab)))
    return torch.cat(levels, -2)


def _weighed(weights: Weights, visits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Visits times the weights by token, less what centering subtracts at the prefix."""
    found = visits
    if weights.node is not None:
        found = torch.mul(visits, weights.node, out=out)
    if weights.centered is not None:
        reached = visits.sum(-1, keepdim=True)
        found = torch.addcmul(found, reached, weights.centered, value=-1.0, out=out)
    return found if out is None or found is out else out.copy_(found)


def _square_norm(walk: Walk, weights: Weights) -> Float[Tensor, "P N V"]:
    """Squared norm of each token's weighted, or centered, score."""
    if weights.centered is not None:
        return _centered_norm(walk, weights)
    if weights.node is None:
        return walk.score_norm
    return weights.node.square().mul_(walk.score_norm)


def _added_norms(walk: Walk, weights: Weights) -> tuple[Tensor, Tensor]:
    """Inner product of the weighted score with what a loss penalty adds, and the latter's square.

    z . l s = l (w |s|^2 - c . s),   |l s|^2 = l^2 |s|^2,   c what centering subtracts
    """
    assert weights.added is not None
    both = walk.score_norm if weights.node is None else weights.node * walk.score_norm
    if weights.centered is not None:
        p, k = walk.probability, weights.centered
        total = k.sum(-1, keepdim=True)
        constant = total * p.square().sum(-1, keepdim=True) - (k * p).sum(-1, keepdim=True)
        both = both - (k - total * p + constant)
    return weights.added * both, weights.added.square() * walk.score_norm


def _centered_norm(walk: Walk, weights: Weights) -> Tensor:
    """|w (e_y - pi) - sum over v of k_v (e_v - pi)|^2 for each token y.

    = w (w - 2 k_y - 2 r pi_y) + r (r |pi|^2 + 2 k . pi) + |k|^2,   r = w - sum of k
    """
    assert weights.centered is not None
    p, k = walk.probability, weights.centered
    w = torch.ones_like(p) if weights.node is None else weights.node
    rest = w - k.sum(-1, keepdim=True)
    own = torch.addcmul(k, rest, p)
    own = torch.sub(w, own, alpha=2, out=own).mul_(w)
    across = 2 * (k * p).sum(-1, keepdim=True)
    own.addcmul_(torch.addcmul(across, rest, p.square().sum(-1, keepdim=True)), rest)
    return own.add_(k.square().sum(-1, keepdim=True))


def response_scale(
    aggregation: Member, problem: Problem, group_size: int
) -> tuple[float, Float[Tensor, "P M"] | None]:
    """Coefficient of each response under an aggregation that looks at its own length only.

    One number for all, and each response's share of it, whatever the group size; None where all
    have the same.
    """
    sizes = tuple(problem.sizes.tolist())
    shares = _by_size(aggregation, sizes, problem.prompts, 1)
    most = shares.index(max(shares))
    (scale,) = _by_size(aggregation, sizes[most : most + 1], problem.prompts, group_size)
    if min(shares) == shares[most]:
        return scale, None
    by_length = torch.zeros(sizes[-1] + 1, dtype=torch.float64)
    by_length[list(sizes)] = torch.tensor(shares, dtype=torch.float64) / shares[most]
    return scale, by_length[problem.lengths]


@lru_cache(maxsize=4096)
def _by_size(
    aggregation: Member, sizes: tuple[int, ...], prompts: int, group_size: int
) -> tuple[float, ...]:
    """What an aggregation gives to a response of each length."""
    shape = (len(sizes), prompts, group_size)
    lengths = torch.tensor(sizes)[:, None, None].expand(shape)
    return tuple(aggregation(lengths, torch.ones(shape, dtype=torch.bool))[:, 0, 0].tolist())


def reads_sign(estimator: Estimator) -> bool:
    """Whether some map looks at the sign of the advantage."""
    return any(c.reads == "sign" for c in estimator.corrections)
