"""The objective and its exact gradient by the logits.

J = mean over prompts of E_pi[R],   grad J = mean over prompts of E_pi[R sum of scores]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import final

from jaxtyping import Float
from torch import Tensor

from windage.toy.chains import Chain
from windage.toy.exact.prefix_tree import Weights, response_moments
from windage.toy.exact.walk import Walk, dot
from windage.toy.problems import Problem

PLAIN = Weights(node=None, leaf=None, suffix=None, centered=None)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """J, its gradient, and the policy's mass on responses that the sampler never draws."""

    value: Float[Tensor, ""]
    gradient: Float[Tensor, "P N V"]
    unsupported_mass: Float[Tensor, ""]


@singledispatch
def objective(problem: Problem | Chain) -> Objective:
    """J and its gradient under the policy, whatever the sampler.

    Chains have their own recursion, which `windage.toy.exact.transfer` registers here.

    Example:
        >>> import torch
        >>> from windage.toy.problems import Tree, make
        >>> coin = make("coin", Tree(2, None, 1), torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]]))
        >>> objective(coin).gradient
        tensor([[[-0.2500,  0.2500]]], dtype=torch.float64)
    """
    assert isinstance(problem, Problem)
    walk = Walk(problem.on_policy())
    value = dot(walk.leaf_flow, problem.rewards)
    centered = problem.rewards - value.unsqueeze(-1)
    (gradient,), _ = response_moments(walk, PLAIN, 1.0, (centered,), ())
    sampled = Walk(problem).leaf_flow
    return Objective(
        value=value.mean(),
        gradient=gradient / problem.prompts,
        unsupported_mass=(walk.leaf_flow * (sampled <= 0)).sum(-1).mean(),
    )
