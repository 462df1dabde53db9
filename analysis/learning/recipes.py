"""The rules that the arms train with: entries of the catalogue, or compositions of its members."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from windage.estimators.estimator import Coefficients, Estimator, batch_terms, coefficients
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


def scaled(rule: Estimator, factor: float) -> Callable[[Batch], Coefficients]:
    """A rule whose coefficients are multiplied by one number."""

    def found(batch: Batch) -> Coefficients:
        plain = coefficients(rule, batch)
        return replace(plain, own=factor * plain.own)

    return found


def effective(share: float, p: float) -> tuple[float, float]:
    """Baseline that gives positives an effective share, and what undoes the change of scale.

        share = p (1 - c) / D,   D = 1 + (1 - 2 p) c   for rewards 1 and -1

    Args:
        share: of the positives in the weight of the data.
        p: share of the positives among the responses.

    Returns:
        c and 1 / D.

    Example:
        >>> effective(0.5, 0.5)
        (0.0, 1.0)

    References:
        Le Roux et al., 2025, arXiv:2503.14286.
    """
    c = (p - share) / (p + share - 2 * p * share)
    return c, 1 / (1 + (1 - 2 * p) * c)


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
