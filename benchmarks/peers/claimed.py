"""What published losses claim, as coefficients: those that the catalogue does not hold.

    C[n, t] = A[n] * weight * share         share: 1 / tokens of the batch, 1 / (N T), 1 / N

Everything that is a reach, a map and an aggregation is composed from the library's members; what is
not (a draw at random, a pool that decides for a response) is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.likeness import given
from windage.analysis.audit.samples import Sample
from windage.estimators.advantage import constant
from windage.estimators.aggregation import sequence_mean, token_mean
from windage.estimators.batchwide import covariance
from windage.estimators.correction import Correction, clip, geometric, none, ratio, token
from windage.estimators.estimator import Estimator
from windage.estimators.maps import mask_negative, one_sided, unclipped
from windage.estimators.member import use
from windage.estimators.penalty import loss_k3, loss_k3_weighted

Expected = Callable[[Sample], Tensor]


def composed(
    reach: Any = token, map_: Any = none, aggregation: Any = token_mean, **settings: Any
) -> Expected:
    """Coefficients of a reach, a map with settings, and an aggregation (a member or a function)."""
    return combined(
        Correction(reach=use(reach), map=use(map_, **settings)), aggregation=aggregation
    )


def combined(*corrections: Correction, aggregation: Any = token_mean) -> Expected:
    """Coefficients of a product of corrections, and an aggregation (a member or a function)."""
    share = use(aggregation) if callable(aggregation) and hasattr(aggregation, "traits") else None
    estimator = Estimator(
        name="claimed",
        advantage=use(constant),
        corrections=corrections,
        aggregation=share or aggregation,
    )
    return lambda s: given(estimator, [s])[0]


def _spread(coefficient: Tensor, s: Sample) -> Tensor:
    """A coefficient times A over the tokens of the batch, 0 where the mask is False."""
    whole = coefficient * s.advantages.unsqueeze(1) / s.mask.sum()
    return torch.where(s.mask, whole, 0.0)


def geometric_mean(*, clip_low: float, clip_high: float) -> Expected:
    """GMPO: geometric mean over the tokens of ratios clipped in the log, one side by the sign of A.

    References:
        arXiv:2507.20673.
    """
    limits = {"log_low": clip_low, "log_high": clip_high}
    return combined(
        Correction(before=use(one_sided, **limits), reach=use(geometric), map=use(ratio)),
        Correction(map=use(unclipped, **limits)),
        aggregation=sequence_mean,
    )


def quadratic(*, beta: float) -> Expected:
    """DRO: (A - beta x) over the tokens of the batch."""

    def expected(s: Sample) -> Tensor:
        whole = (s.advantages.unsqueeze(1) - beta * s.log_ratio) / s.mask.sum()
        return torch.where(s.mask, whole, 0.0)

    return expected


def rejected(divergence: Callable[[Tensor], Tensor], limit: float, pool: str) -> Expected:
    """No weight, and tokens dropped whose divergence exceeds a limit, denominators unchanged.

    Args:
        divergence: of log-ratios, such as k3.
        limit: the largest.
        pool: "token", or the "sum", "mean" or "max" over a response that decides for all of it.
    """

    def expected(s: Sample) -> Tensor:
        d = torch.where(s.mask, divergence(s.log_ratio), 0.0)
        pooled = {
            "token": d,
            "sum": d.sum(1, keepdim=True),
            "mean": d.sum(1, keepdim=True) / s.mask.sum(1, keepdim=True),
            "max": d.amax(1, keepdim=True),
        }[pool]
        return _spread((pooled <= limit).to(d.dtype).expand_as(d), s)

    return expected


def without_far_rows(delta: float) -> Expected:
    """PPO without the responses with A < 0 whose mean log(mu / pi) exceeds delta."""
    return combined(
        Correction(reach=use(geometric), map=use(mask_negative, delta=delta)),
        Correction(map=use(clip)),
    )


def pulled(penalty: Any, beta: float, inner: Expected) -> Expected:
    """A loss with a penalty against a reference that equals the sampler, averaged by tokens."""

    def expected(s: Sample) -> Tensor:
        fields = {loss_k3: (s.log_ratio,), loss_k3_weighted: (s.log_ratio, s.log_ratio)}[penalty]
        term = penalty(*fields, coefficient=beta) / s.mask.sum()
        return inner(s) + torch.where(s.mask, term, 0.0)

    return expected


def largest_covariances(*, share: float, coefficient: float) -> Expected:
    """KL-Cov: a penalty |x| on the tokens with the largest (A - mean) (log pi - mean).

    Of equal covariances the first counts, as a sort leaves them; the library takes all.
    """
    inner = composed(token, ratio)

    def expected(s: Sample) -> Tensor:
        found = covariance(s.advantages.view(1, -1, 1), s.logp[None], s.mask[None])[0][s.mask]
        top = found.topk(max(1, int(len(found) * share))).indices
        pull = torch.zeros_like(found).index_fill(0, top, coefficient)
        pull = pull * s.log_ratio[s.mask].sign() / len(found)
        return inner(s) - torch.zeros_like(s.logp).masked_scatter(s.mask, pull)

    return expected


def random_covariances(
    *, share: float, low: float, high: float, clip_low: float, clip_high: float
) -> Expected:
    """Clip-Cov: PPO's clip, and no gradient on a few tokens with covariance between two bounds.

    The tokens are drawn by torch's global generator, seeded with 0 here and by the caller.
    """
    inner = composed(token, clip, clip_low=clip_low, clip_high=clip_high)

    def expected(s: Sample) -> Tensor:
        whole = inner(s)
        a = s.advantages.unsqueeze(1)
        found = covariance(a[None], s.logp[None], s.mask[None])[0]
        open_ = s.mask & ((whole != 0) | (a == 0))
        places = torch.nonzero(open_ & (found > low) & (found < high))
        torch.manual_seed(0)
        chosen = torch.randperm(len(places))[: max(int(share * int(s.mask.sum())), 1)]
        whole[places[chosen, 0], places[chosen, 1]] = 0.0
        return whole

    return expected


PPO = composed(token, clip)
