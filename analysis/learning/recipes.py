"""The rules that the arms train with: entries of the catalogue, or compositions of its members."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from windage.estimators.advantage import constant, group_mean
from windage.estimators.aggregation import token_sum
from windage.estimators.batch import Batch, log_ratio
from windage.estimators.catalogue import get
from windage.estimators.correction import (
    Correction,
    clip,
    geometric,
    taper,
    token,
    trajectory,
    truncate,
)
from windage.estimators.estimator import Coefficients, Estimator, batch_terms
from windage.estimators.member import use

FAR = math.exp(20)


def without_baseline(name: str, *, baseline: float = 0.0) -> Estimator:
    """An entry with the reward minus a constant as its advantage."""
    return replace(get(name), advantage=use(constant, baseline=baseline))


def grouped(rule: Estimator) -> Estimator:
    """The same rule with the reward minus the group's mean as its advantage."""
    return replace(rule, advantage=use(group_mean))


def leveled(reach: object) -> Estimator:
    """TOPR's taper of another ratio than the product over the response."""
    correction = Correction(reach=use(reach), map=use(taper))  # type: ignore[arg-type]
    return replace(get("topr"), corrections=(correction,))


def summed(name: str, reach: object, map_: object, **settings: float) -> Estimator:
    """Reward minus a constant, one correction, sum over tokens."""
    return Estimator(
        name=name,
        advantage=use(constant),
        corrections=(Correction(reach=use(reach), map=use(map_, **settings)),),  # type: ignore[arg-type]
        aggregation=use(token_sum),
    )


TOKEN_TOPR, GEOMETRIC_TOPR = leveled(token), leveled(geometric)
PPO = summed("ppo", token, clip)
TRAJECTORY = summed("trajectory_is", trajectory, truncate, cap=FAR)


def preference(batch: Batch, *, beta: float = 0.1) -> Coefficients:
    """Direct preference optimization on pairs, for comparison: a right response, then another.

        C = +- 2 beta sigmoid(-beta (x[0] - x[1])) / N,   x = log pi - log mu of the response

    It is a loss on pairs, not an estimator of the policy gradient.

    References:
        Rafailov et al., 2023, arXiv:2305.18290.
    """
    terms = batch_terms(get("reinforce"), batch)
    ratio = log_ratio(batch.get("logp"), batch.get("behavior_logp"), batch.mask).sum(-1)
    pull = 2 * beta * torch.sigmoid(-beta * (ratio[..., :1] - ratio[..., 1:]))
    signed = torch.cat([pull, -pull], -1).unsqueeze(-1) * batch.mask
    own = signed * terms.scale.unsqueeze(-1)
    return Coefficients(own=own, head=None, terms=terms, weights=batch.mask.to(own.dtype))
