"""Denominators that count tokens: of the batch, of the group, or in a baseline."""

from __future__ import annotations

import torch

from windage.estimators.aggregation import prompt_mean, token_mean
from windage.estimators.estimator import Estimator
from windage.toy.exact.coupled.ratios import Shared
from windage.toy.exact.coupled.shared import Powers
from windage.toy.exact.prefix_tree import response_scale
from windage.toy.problems import Problem

POWERS = {token_mean: Powers(batch=1), prompt_mean: Powers(group=1)}


def tokens(estimator: Estimator, problem: Problem, group_size: int) -> Shared:
    """The denominator that the aggregation makes of lengths, if any."""
    s = problem.lengths.double()
    leaf, scale = torch.ones_like(s), 1.0
    powers = POWERS.get(estimator.aggregation.function)
    if powers is None:
        powers = Powers()
        scale, by_length = response_scale(estimator.aggregation, problem, group_size)
        leaf = leaf if by_length is None else by_length
    elif powers.group:
        scale = 1 / problem.prompts
    return Shared(estimator=estimator, powers=powers, s=s, leaf=leaf, scale=scale)
