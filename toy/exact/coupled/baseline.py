"""Baselines that are weighted means of the group's rewards: quotients of sums over siblings.

With its own response held, the baseline of a group is sum(T r) / sum(T), so that

    A_i = (r_i sum over j of T_j - sum over j of T_j r_j) / S,      S = sum over all j of T_j

whose numerator is a sum over siblings (the response's own part cancels).  Without its own response
the denominators of two responses differ, and a pair needs two tilts.
"""

from __future__ import annotations

import torch

from windage.estimators.baselines import length_weighted
from windage.estimators.estimator import Estimator
from windage.toy.exact.coupled.siblings import Sums
from windage.toy.problems import Problem


def over_lengths(estimator: Estimator) -> bool:
    """Whether the advantage is divided by the tokens of the group, its own response included."""
    return estimator.advantage.function is length_weighted


def by_length(estimator: Estimator, problem: Problem, group_size: int) -> Sums:
    """The numerator of reward minus the mean reward weighted by length, of one prompt."""
    r, t = problem.rewards[0], problem.lengths[0].double()
    r = r - r.mean()
    return Sums(
        own=torch.stack([r, -torch.ones_like(r)]),
        sibling=torch.stack([t, t * r]),
        fixed=r.new_zeros(2),
        sign=torch.zeros(2, dtype=torch.long),
    )
