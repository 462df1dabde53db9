"""What published losses claim, as coefficients: those that the catalogue does not hold.

    C[n, t] = A[n] * weight * share         share: 1 / tokens of the batch, 1 / (N T), 1 / N

Everything that is a reach, a map and an aggregation is composed from the library's members; the few
that are not (a map that reads probabilities, a ratio over clipped tokens) are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.likeness import given
from windage.analysis.audit.samples import Sample
from windage.estimators.advantage import constant
from windage.estimators.aggregation import token_mean
from windage.estimators.correction import Correction, clip, none, token
from windage.estimators.estimator import Estimator
from windage.estimators.member import declare, use
from windage.estimators.penalty import loss_k3, loss_k3_weighted

Expected = Callable[[Sample], Tensor]


def composed(
    reach: Any = token, map_: Any = none, aggregation: Any = token_mean, **settings: Any
) -> Expected:
    """Coefficients of a reach, a map with settings, and an aggregation (a member or a function)."""
    share = use(aggregation) if callable(aggregation) and hasattr(aggregation, "traits") else None
    estimator = Estimator(
        name="claimed",
        advantage=use(constant),
        corrections=(Correction(reach=use(reach), map=use(map_, **settings)),),
        aggregation=share or aggregation,
    )
    return lambda s: given(estimator, [s])[0]


def _choose(first: Tensor, a: float, b: float) -> Tensor:
    """One of two numbers, in float64."""
    return torch.where(first, *torch.tensor([a, b], dtype=torch.float64))


@declare("token", reads="sign")
def soft_gate(
    effective: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    """SAPO: the derivative by the log-ratio of 4 sigma(tau (r - 1)) / tau.

        w = 4 r p (1 - p),   p = sigma(tau (r - 1)),   tau by the sign of A

    References:
        arXiv:2511.20347.
    """
    ratio = effective.exp()
    tau = _choose(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1))
    return 4 * ratio * gate * (1 - gate)


@declare("token", reads="sign")
def gamma_weight(
    effective: Tensor,
    advantages: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO: a gamma-shaped weight of the ratio, 1 at ratio 1.

        w = r^k exp(lambda (1 - r)),   k and lambda by the sign of A

    References:
        arXiv:2602.10693.
    """
    k = _choose(advantages >= 0, k_pos, k_neg)
    rate = _choose(advantages >= 0, lambda_pos, lambda_neg)
    return (k * effective + rate * (1 - effective.exp())).exp()


def _spread(coefficient: Tensor, s: Sample) -> Tensor:
    """A coefficient times A over the tokens of the batch, 0 where the mask is False."""
    whole = coefficient * s.advantages.unsqueeze(1) / s.mask.sum()
    return torch.where(s.mask, whole, 0.0)


def divergence_mask(
    beyond: Callable[[Tensor, Tensor], Tensor], *, limit: float, cap: float
) -> Expected:
    """DPPO: the ratio, at most cap, 0 where A pushes a token on whose divergence exceeds the limit.

    Args:
        beyond: divergence of probabilities under policy and sampler.
        limit: largest divergence.
        cap: largest ratio.

    References:
        arXiv:2602.04879.
    """

    def expected(s: Sample) -> Tensor:
        p, q = s.logp.exp(), s.behavior_logp.exp()
        away = torch.where(s.advantages.unsqueeze(1) > 0, p > q, p < q)
        weight = s.log_ratio.exp().clamp(max=cap)
        return _spread(torch.where(away & (beyond(p, q) > limit), 0.0, weight), s)

    return expected


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Of the token against all others."""
    return (p - q).abs()


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q, p) of the token against all others."""
    return q * (q.log() - p.log()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()


def geometric_mean(*, clip_low: float, clip_high: float) -> Expected:
    """GMPO: geometric mean over the tokens of ratios clipped in the log.

        C = A exp(mean of x clipped) / (N T) where x is not clipped, else 0

    References:
        arXiv:2507.20673.
    """

    def expected(s: Sample) -> Tensor:
        x, up = s.log_ratio, s.advantages.unsqueeze(1) > 0
        clipped = s.mask & torch.where(up, x > clip_high, x < -clip_low)
        bounded = torch.where(clipped, x.clamp(-clip_low, clip_high), x)
        lengths = s.mask.sum(1, keepdim=True)
        ratio = (bounded.sum(1, keepdim=True) / lengths).exp()
        whole = s.advantages.unsqueeze(1) * ratio / (lengths * len(s.mask))
        return torch.where(s.mask & ~clipped, whole, 0.0)

    return expected


def quadratic(*, beta: float) -> Expected:
    """DRO: (A - beta x) over the tokens of the batch."""

    def expected(s: Sample) -> Tensor:
        whole = (s.advantages.unsqueeze(1) - beta * s.log_ratio) / s.mask.sum()
        return torch.where(s.mask, whole, 0.0)

    return expected


def kept_rows(keep: Callable[[Sample], Tensor], inner: Expected) -> Expected:
    """Coefficients of a loss whose rejected responses `[N]` get 0, denominators unchanged."""
    return lambda s: inner(s) * keep(s).unsqueeze(1)


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


def off_policy_rows(threshold: float) -> Callable[[Sample], Tensor]:
    """DeepSeek-V3.2: drop a response with A < 0 whose mean log(mu / pi) exceeds a threshold."""

    def keep(s: Sample) -> Tensor:
        drift = -s.log_ratio.sum(1) / s.mask.sum(1)
        return (s.advantages >= 0) | (drift <= threshold)

    return keep


def pulled(penalty: Any, beta: float, inner: Expected) -> Expected:
    """A loss with a penalty against a reference that equals the sampler, averaged by tokens."""

    def expected(s: Sample) -> Tensor:
        fields = {loss_k3: (s.log_ratio,), loss_k3_weighted: (s.log_ratio, s.log_ratio)}[penalty]
        term = penalty(*fields, coefficient=beta) / s.mask.sum()
        return inner(s) + torch.where(s.mask, term, 0.0)

    return expected


def largest_covariances(*, share: float, coefficient: float) -> Expected:
    """KL-Cov: a penalty |x| on the tokens with the largest (A - mean) (log pi - mean)."""

    def expected(s: Sample) -> Tensor:
        wide = s.advantages.unsqueeze(1).expand_as(s.logp)
        a, logp = wide[s.mask], s.logp[s.mask]
        top = ((a - a.mean()) * (logp - logp.mean())).topk(max(1, int(len(a) * share))).indices
        pull = torch.zeros_like(a).index_fill(0, top, coefficient) * s.log_ratio[s.mask].sign()
        whole = (a * s.log_ratio[s.mask].exp() - pull) / len(a)
        return torch.zeros_like(s.logp).masked_scatter(s.mask, whole)

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
        a = s.advantages.unsqueeze(1).expand_as(s.logp)
        covariance = (a - a[s.mask].mean()) * (s.logp - s.logp[s.mask].mean())
        open_ = s.mask & ((whole != 0) | (a == 0))
        places = torch.nonzero(open_ & (covariance > low) & (covariance < high))
        torch.manual_seed(0)
        chosen = torch.randperm(len(places))[: max(int(share * int(s.mask.sum())), 1)]
        whole[places[chosen, 0], places[chosen, 1]] = 0.0
        return whole

    return expected


PPO = composed(token, clip)
