"""Denominators that sum importance weights: over a group, or over a batch.

A weight over the mean of the weights, w_i N / (sum of w_j), is the response's own factor w_i, a
constant N and the shared denominator.  Tokens over the mean of all tokens of the batch have as many
tokens as numerator, which a token mean takes away again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.aggregation import token_mean, token_sum
from windage.estimators.correction import Correction, ratio, token, trajectory, truncate
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.reaches import over_batch, over_group, token_over_batch
from windage.toy.exact.coupled.ratios import Shared
from windage.toy.exact.coupled.shared import Powers
from windage.toy.exact.prefix_tree import response_scale, tree_weights
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem

POWERS: dict[Callable[..., Any], Powers] = {
    over_group: Powers(group=1),
    over_batch: Powers(batch=1),
    token_over_batch: Powers(batch=1),
}


def normalized(estimator: Estimator) -> Correction | None:
    """The correction that divides by the other responses' weights, if there is one."""
    found = [c for c in estimator.corrections if c.reach.function in POWERS and not c.idle]
    return found[0] if found else None


def refusal(estimator: Estimator, problem: Problem) -> str | None:
    """Why a self-normalized weight has no shared denominator here, or None."""
    found = normalized(estimator)
    if found is None:
        return None
    if found.map.function is not ratio:
        return f"{found.map.name} looks at a self-normalized ratio"
    if sum(c.reach.function in POWERS for c in estimator.corrections if not c.idle) > 1:
        return "two self-normalized ratios"
    aggregation = estimator.aggregation
    if found.reach.function is token_over_batch:
        if aggregation.function is not token_mean:
            return f"{found.reach.name} has a random numerator except under token_mean"
    elif aggregation.traits.scope != "response":
        return f"{aggregation.name} has another denominator than {found.reach.name}"
    walk = Walk(problem)
    ratios = walk.at_leaves(walk.path_ratio)[walk.leaf_flow > 0].exp()
    if not bool(((ratios > 0) & ratios.isfinite()).all()):
        return "a ratio of policy to sampler underflows or overflows float64"
    return None


def own_weight(correction: Correction) -> Correction:
    """The weight before it is divided by the mean."""
    by_token = correction.reach.function is token_over_batch
    cap = dict(correction.reach.settings)["cap"]
    bounded = use(truncate, cap=cap) if cap < torch.inf else use(ratio)
    return replace(correction, reach=use(token if by_token else trajectory), map=bounded)


def weights(estimator: Estimator, problem: Problem, group_size: int) -> Shared:
    """The denominator that a self-normalized correction makes."""
    found = normalized(estimator)
    assert found is not None
    rest = tuple(c for c in estimator.corrections if c is not found)
    own = own_weight(found)
    alone = replace(estimator, corrections=(own,), aggregation=use(token_sum), penalties=())
    leaf, scale = torch.ones_like(problem.rewards), 1.0
    powers = POWERS[found.reach.function]
    if found.reach.function is token_over_batch:
        s = _summed(alone, problem)
        return Shared(
            estimator=replace(estimator, corrections=(*rest, own)),
            powers=powers,
            s=s,
            leaf=leaf,
            scale=scale,
        )
    by_response = tree_weights(alone, Walk(problem), 1.0, None).leaf
    assert by_response is not None
    scale, by_length = response_scale(estimator.aggregation, problem, group_size)
    return Shared(
        estimator=replace(estimator, corrections=rest),
        powers=powers,
        s=by_response,
        leaf=by_response if by_length is None else by_response * by_length,
        scale=scale * group_size * (problem.prompts if powers.batch else 1),
    )


def _summed(estimator: Estimator, problem: Problem) -> Float[Tensor, "P K"]:
    """Sum of the weights of the tokens of each response; forced tokens have weight 1."""
    walk = Walk(problem)
    node = tree_weights(estimator, walk, 1.0, None).node
    assert node is not None
    depth = torch.arange(1, problem.tree.horizon + 1).repeat_interleave(
        torch.tensor(problem.tree.leaf_bounds).diff()
    )
    return walk.at_leaves(walk.summed(node)) + (problem.lengths - depth)
