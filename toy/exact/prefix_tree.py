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
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import (
    Correction,
    geometric,
    prefix,
    suffix,
    token,
    trajectory,
)
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import Member, use
from windage.toy.exact.walk import Walk, dot, pull_back
from windage.toy.problems import Problem


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
        elif correction == Correction(reach=use(suffix), map=correction.map) and tail is None:
            tail = correction.map
        else:
            raise NotImplementedError(f"{estimator.name}: no recursion for {correction.describe()}")
    centered = None
    if estimator.centering is not None:
        problem = walk.problem
        centered = center(estimator, problem.logp, problem.behavior_logp, advantage.view(1))
    return Weights(node=node, leaf=leaf, suffix=tail, centered=centered)


def _steps(correction: Correction, walk: Walk, advantage: Tensor) -> Tensor:
    """The log-ratio of each token as the reach receives it."""
    steps = walk.log_ratio_of(correction.numerator, correction.denominator)
    return steps if correction.before is None else correction.before(steps, advantage)


def _paths(correction: Correction, walk: Walk, advantage: Tensor) -> Tensor:
    """Those log-ratios summed up to and including each token."""
    if correction.before is None:
        return walk.path_ratio_of(correction.numerator, correction.denominator)
    return walk.summed(_steps(correction, walk, advantage))


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
        return means, p.new_empty((0, means.shape[1]))
    squared = _square_norm(walk, weights)
    flows = _flows(walk, weights, sign, norm_features, 2)
    return means, torch.stack([dot(flow, squared) for flow in flows])


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


def reads_sign(estimator: Estimator) -> bool:
    """Whether some map looks at the sign of the advantage."""
    return any(c.reads == "sign" for c in estimator.corrections)
