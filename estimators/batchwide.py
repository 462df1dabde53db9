"""Masks and penalties that pick tokens of the whole batch by what all its tokens hold.

    cov[p, g, t] = (log pi - mean of log pi) (A - mean of A)      means over all tokens of the batch

Differences:
    1. Estimators hold no randomness: where public code draws tokens at random among those with a
       covariance inside a band, `covariance_clip` takes the largest.
    2. Tokens of equal covariance at the last place are all taken, so that no order decides.
    3. The number of tokens is a share of those of the batch, at least one; public code counts a
       micro-batch.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.errors import ordered, positive, within
from windage.estimators.member import declare

TIE = 1e-9


@declare("batch", "logp", "mask", reads="value")
def covariance_clip(
    effective: Float[Tensor, "*batch P G T"],
    advantages: Float[Tensor, "*#batch P G T_or_1"],
    logp: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Float[Tensor, "*batch P G T"]:
    """0 on the few tokens of largest covariance inside a band, 1 elsewhere.

        w = 0 where low < cov < high and cov is among the largest max(1, floor(share * tokens))

    Args:
        share: of the tokens of the batch.
        low, high: band of covariances, in units of reward times nats.

    Raises:
        ValueError: low above high, or a share outside [0, 1].

    Example:
        >>> logp = torch.tensor([-4.0, -1.0]).view(1, 2, 1)
        >>> a, mask = torch.tensor([-1.0, 1.0]).view(1, 2, 1), torch.ones(1, 2, 1).bool()
        >>> covariance_clip(torch.zeros(1, 2, 1), a, logp, mask).flatten()
        tensor([0., 0.])

    References:
        Cui et al., 2025, arXiv:2505.22617.
    """
    ordered(low=low, high=high)
    found = covariance(advantages, logp, mask)
    inside = mask & (found > low) & (found < high)
    return (~_largest(found, inside, mask, share)).to(effective.dtype)


@declare("batch", "advantages", "log_ratio", "logp", "mask")
def loss_kl_cov(
    advantages: Float[Tensor, "*#batch P G T_or_1"],
    log_ratio: Float[Tensor, "*batch P G T"],
    logp: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    share: float = 2e-4,
    coefficient: float = 1.0,
) -> Float[Tensor, "*batch P G T"]:
    """A pull back to the sampler on the few tokens of largest covariance.

        c = -coefficient sign(log pi - log mu) where cov is among the largest, else 0

    the gradient of |log pi - log mu|, which public code uses for the divergence.

    Claims:
        0 on-policy.

    Args:
        share: of the tokens of the batch; at least one token is taken.
        coefficient: in units of reward.

    Raises:
        ValueError: a share outside [0, 1].

    Example:
        >>> logp = torch.tensor([-4.0, -1.0]).view(1, 2, 1)
        >>> a, mask = torch.tensor([-1.0, 2.0]).view(1, 2, 1), torch.ones(1, 2, 1).bool()
        >>> loss_kl_cov(a, torch.tensor([0.5, -0.5]).view(1, 2, 1), logp, mask).flatten()
        tensor([-1.,  1.])

    References:
        Cui et al., 2025, arXiv:2505.22617.
    """
    chosen = _largest(covariance(advantages, logp, mask), mask, mask, share)
    return torch.where(chosen, -coefficient * log_ratio.sign(), 0.0)


@declare("batch", "mask")
def second_moment(
    effective: Float[Tensor, "*batch P G T"],
    advantages: Float[Tensor, "*#batch P G T_or_1"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    tau: float = 0.04,
) -> Float[Tensor, "*batch P G T"]:
    """The ratio on the nearest tokens of the batch, as many as keep the mean square in a limit.

        w = exp(e) on the largest set of smallest e^2 whose mean of e^2 is below tau, else 0

    Args:
        tau: limit of the mean of the squared log-ratio.

    Raises:
        ValueError: tau is not above 0.

    Example:
        >>> e, mask = torch.tensor([0.1, 2.0]).view(1, 2, 1), torch.ones(1, 2, 1).bool()
        >>> second_moment(e, torch.ones(1, 2, 1), mask).flatten()
        tensor([1.1052, 0.0000])

    References:
        Zheng et al., 2025, arXiv:2510.01161.
    """
    positive(tau=tau)
    square = torch.where(mask, effective.square(), math.inf).flatten(-3)
    ranked = square.sort(-1).values
    count = torch.arange(1, ranked.shape[-1] + 1, device=ranked.device)
    over = torch.where(ranked.cumsum(-1) / count < tau, math.inf, ranked)
    first_over = over.amin(-1, keepdim=True) if over.shape[-1] else over
    kept = (square < first_over).view(effective.shape)
    return torch.where(kept, effective.exp(), 0.0)


def covariance(
    advantages: Float[Tensor, "*#batch P G T_or_1"],
    logp: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
) -> Float[Tensor, "*batch P G T"]:
    """Product of the two deviations from their means over the tokens of the batch.

    Example:
        >>> logp = torch.tensor([-4.0, -1.0]).view(1, 2, 1)
        >>> covariance(torch.tensor([-1.0, 1.0]).view(1, 2, 1), logp, logp < 0).flatten()
        tensor([1.5000, 1.5000])
    """
    count = mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)

    def centered(x: Tensor) -> Tensor:
        kept = torch.where(mask, x, 0.0)
        return kept - kept.sum((-3, -2, -1), keepdim=True) / count

    return centered(advantages.to(logp.dtype)) * centered(logp)


def _largest(found: Tensor, candidates: Tensor, mask: Tensor, share: float) -> Tensor:
    """The candidates of largest value, a share of all tokens and at least one."""
    within(0, 1, share=share)
    values = torch.where(candidates, found, -math.inf).flatten(-3)
    if not values.shape[-1]:
        return candidates
    tokens = mask.flatten(-3).sum(-1, keepdim=True)
    place = ((tokens * share).long().clamp(min=1) - 1).clamp(max=values.shape[-1] - 1)
    last = values.sort(-1, descending=True).values.gather(-1, place)
    size = torch.where(mask, found.abs(), 0.0).flatten(-3).amax(-1, keepdim=True)
    chosen = (values >= last - TIE * size).view(candidates.shape)
    return chosen & candidates
