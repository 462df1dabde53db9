"""What to look at beside the estimate: averages, losses and shares, kept apart from the update.

The update needs none of these.  Averages take the mask that the update takes; ratios are averaged
before any cap, since an average of capped ratios looks healthy whatever the mismatch.

Differences:
    1. `clip_objective` and `dual_clip_objective` are the values that frameworks log as policy loss
       (with the opposite sign); the surrogate that trains has their gradient and another value.
    2. An average over no token is 0, never NaN.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.batch import Batch, log_ratio
from windage.estimators.errors import positive, within
from windage.estimators.estimator import Estimator


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of the values where the mask is True, 0 where it is True nowhere.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def aggregate(
    values: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    scale: Float[Tensor, "*batch P G"],
) -> Float[Tensor, "*batch"]:
    """Combine a value a token, such as a loss or a divergence, exactly as the update does.

        sum(scale[p, g] * values[p, g, t] where the mask is True)

    Args:
        values: one a token.
        mask: trainable tokens.
        scale: of the whole batch, from a member of `aggregation`; a slice gives its own part.

    Example:
        >>> from windage.estimators.aggregation import token_mean
        >>> mask = torch.tensor([[[True, False], [True, True]]])
        >>> scale = token_mean(mask.sum(-1), mask.any(-1))
        >>> aggregate(torch.tensor([[[3.0, 9.0], [1.0, 2.0]]]), mask, scale)
        tensor(2., dtype=torch.float64)
    """
    kept = torch.where(mask, values, 0.0).sum(-1)
    return (kept * scale).sum((-2, -1))


def clip_objective(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "*shape"]:
    """The value of PPO's surrogate, to be maximized.

        min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A),   r = exp(e)

    Claims:
        Its derivative by log pi is `correction.clip` times A, off the kinks.

    Raises:
        ValueError: a margin below 0.

    Example:
        >>> e = torch.log(torch.tensor([0.5, 1.5, 0.5, 1.5]))
        >>> clip_objective(e, torch.tensor([1.0, 1.0, -1.0, -1.0]))
        tensor([ 0.5000,  1.2000, -0.8000, -1.5000])

    References:
        Schulman et al., 2017, arXiv:1707.06347.
    """
    within(0, math.inf, clip_low=clip_low, clip_high=clip_high)
    ratio = effective.exp()
    return torch.minimum(
        ratio * advantages, ratio.clamp(min=1 - clip_low, max=1 + clip_high) * advantages
    )


def dual_clip_objective(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "*shape"]:
    """The value of PPO's surrogate with a second bound for negative advantages.

        max(clip_objective, cap A) if A < 0, else clip_objective

    Claims:
        Its derivative by log pi is `correction.dual_clip` times A, off the kinks.

    Raises:
        ValueError: the cap is not above 0, a margin below 0.

    Example:
        >>> dual_clip_objective(torch.log(torch.tensor([1.5, 10.0])), torch.tensor([1.0, -1.0]))
        tensor([ 1.2000, -3.0000])

    References:
        Ye et al., 2019, arXiv:1912.09729.
    """
    positive(cap=cap)
    value = clip_objective(effective, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantages < 0, torch.maximum(value, cap * advantages), value)


def changed_share(
    weights: Float[Tensor, "*batch T"],
    log_ratio: Float[Tensor, "*batch T"],
    mask: Bool[Tensor, "*batch T"],
) -> Float[Tensor, ""]:
    """Share of the trainable tokens whose weight is not their own ratio: capped, clipped, masked.

    Example:
        >>> e = torch.log(torch.tensor([1.0, 9.0]))
        >>> changed_share(torch.tensor([1.0, 2.0]), e, torch.tensor([True, True]))
        tensor(0.5000)
    """
    ratio = log_ratio.exp()
    tolerance = 8 * torch.finfo(ratio.dtype).eps
    changed = (weights - ratio).abs() > tolerance * torch.minimum(weights, ratio)
    return masked_mean(changed.to(ratio.dtype), mask)


def effective_sample_size(
    weights: Float[Tensor, "*batch N"], mask: Bool[Tensor, "*batch N"]
) -> Float[Tensor, "*batch"]:
    """How many equal weights would have the variance of these.

        sum(w)^2 / sum(w^2)

    Claims:
        N for equal weights, 1 for a single one that dominates; per weight it tends to
        1 / (1 + chi-square divergence).

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 7.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    kept = torch.where(mask, weights, 0.0)
    kept = kept / kept.amax(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
    total = kept.square().sum(-1)
    return torch.where(total > 0, kept.sum(-1).square() / total.clamp(min=1.0), 0.0)


def effective_log_ratio(
    estimator: Estimator, batch: Batch, advantages: Float[Tensor, "*batch P G T_or_1"]
) -> Float[Tensor, "*batch P G T"]:
    """Log of the ratio that each weight stands for, before any bound: 0 without a correction.

        sum over the corrections of reach(numerator - denominator)

    Args:
        estimator: whose corrections are read.
        batch: with the policies that they compare.
        advantages: of responses or tokens.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1]],
        ...                         logp=[[-1.0], [-2.0]], behavior_logp=[[-2.0], [-2.0]])
        >>> effective_log_ratio(get("token_tis"), batch, batch.rewards.unsqueeze(-1)).tolist()
        [[[1.0], [0.0]]]
    """
    total = torch.zeros_like(batch.mask, dtype=torch.float64)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        policies = batch.get(correction.numerator), batch.get(correction.denominator)
        x = log_ratio(*policies, batch.mask)
        if correction.before is not None:
            x = torch.where(batch.mask, correction.before(x, advantages), torch.zeros_like(x))
        total = total + correction.reach(x, batch.mask)
    return torch.where(batch.mask, total, 0.0)
