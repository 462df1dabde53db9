"""Maps of the second tier: trust regions by probability, soft weights, masks that read the sign.

Each is elementwise in (effective log-ratio, advantage) as `correction` says; what else it reads
follows by name.

Differences:
    1. Log-ratios are to the sampler unless a `Correction` names other policies; the published rules
       compare with the policy before the first pass.
    2. A limit counts as inside: a token is dropped where it is exceeded.
    3. `tv_mask` and `kl_mask` look at the sampled token against all others, as public code does,
       not at the divergence of whole distributions.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.correction import EDGE, above, below, dual_clip
from windage.estimators.errors import positive, within
from windage.estimators.member import declare

LOG_FOUR = math.log(4.0)


@declare("token", reads="sign")
def mask_negative(
    effective: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"], *, delta: float = 0.5
) -> Float[Tensor, "*shape"]:
    """0 for a negative advantage whose log-ratio is below -delta, else 1.

        w = 0 if A < 0 and -e > delta, else 1

    Claims:
        Bias is minus the dropped mass.

    Args:
        delta: in nats; with the geometric reach the mean of log(mu / pi) over the tokens.

    Raises:
        ValueError: delta below 0.

    Example:
        >>> mask_negative(torch.tensor([-1.0, -1.0, 1.0]), torch.tensor([1.0, -1.0, -1.0]))
        tensor([1., 0., 1.])

    References:
        DeepSeek, 2025, arXiv:2512.02556.
    """
    within(0, math.inf, delta=delta)
    far = (advantages < 0) & (effective < -delta - EDGE * torch.finfo(effective.dtype).eps)
    return (~far).to(effective.dtype).expand_as(effective)


@declare("token", reads="sign")
def soft_gate(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Float[Tensor, "*shape"]:
    """The derivative by the log-ratio of a sigmoid gate of the ratio: no edge, 1 at ratio 1.

        w = r sech^2(tau (r - 1) / 2),   r = exp(e),   tau by the sign of A

    Claims:
        Bounded, and never 0.
        1 at ratio 1, whatever tau.

    Args:
        tau_pos, tau_neg: how fast the gate closes.

    Raises:
        ValueError: tau is not above 0.

    Example:
        >>> soft_gate(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
        tensor([1.0000, 1.4022])

    References:
        Gao et al., 2025, arXiv:2511.20347.
    """
    positive(tau_pos=tau_pos, tau_neg=tau_neg)
    tau = _by_sign(advantages > 0, tau_pos, tau_neg, effective)
    z = tau * torch.expm1(effective)
    return (LOG_FOUR + effective - z.abs() - 2 * torch.log1p((-z.abs()).exp())).exp()


@declare("token", reads="sign")
def gamma_weight(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Float[Tensor, "*shape"]:
    """A gamma-shaped weight of the ratio: both tails go to 0, 1 at ratio 1.

        w = r^k exp(lambda (1 - r)),   r = exp(e),   k and lambda by the sign of A

    Args:
        k_pos, k_neg: how fast the weight vanishes at small ratios.
        lambda_pos, lambda_neg: how fast it vanishes at large ones.

    Raises:
        ValueError: one is not above 0.

    Example:
        >>> gamma_weight(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, -1.0, 1.0]))
        tensor([1.0000, 1.0000, 0.0426])

    References:
        Shen et al., 2026, arXiv:2602.10693.
    """
    positive(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    k = _by_sign(advantages >= 0, k_pos, k_neg, effective)
    rate = _by_sign(advantages >= 0, lambda_pos, lambda_neg, effective)
    return (k * effective - rate * torch.expm1(effective)).exp()


@declare("token", reads="sign")
def inverse_positive(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "*shape"]:
    """The inverse ratio for positive advantages, PPO's dual clip for negative ones.

        w = 0 if exp(e) > 1 + clip_high, else min(exp(-e), cap)    where A > 0
            as `dual_clip`                                         elsewhere

    Args:
        clip_low, clip_high: margins of the ratio.
        cap: an absolute ratio, of the inverse for A > 0 and of the ratio for A < 0.

    Raises:
        ValueError: a margin below 0, or the cap is not above 0.

    Example:
        >>> e = torch.log(torch.tensor([0.5, 0.1, 2.0, 2.0]))
        >>> inverse_positive(e, torch.tensor([1.0, 1.0, 1.0, -1.0]))
        tensor([2., 3., 0., 2.])

    References:
        Wang et al., 2025, arXiv:2510.06062.
    """
    plain = dual_clip(effective, advantages, clip_low=clip_low, clip_high=clip_high, cap=cap)
    inverse = (-effective).clamp(max=math.log(cap)).exp()
    inverse = torch.where(above(effective, 1 + clip_high), 0.0, inverse)
    return torch.where(advantages > 0, inverse, plain)


@declare("token", "logp", "behavior_logp", reads="sign")
def tv_mask(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    limit: float = 0.15,
    cap: float = 20.0,
) -> Float[Tensor, "*shape"]:
    """The ratio, 0 where A pushes a probability on that has already moved by more than a limit.

        w = 0 if A > 0 and p - q > limit, or A < 0 and q - p > limit, else min(exp(e), cap)

    with p and q the token's probabilities under policy and sampler.

    Claims:
        A token that both policies find unlikely is never dropped.

    Args:
        limit: total variation of the token against all others.
        cap: an absolute ratio; infinite for none.

    Raises:
        ValueError: the limit is below 0, or the cap is not above 0.

    Example:
        >>> p, q = torch.tensor([0.5, 0.02]).log(), torch.tensor([0.25, 0.01]).log()
        >>> tv_mask(p - q, torch.ones(2), p, q)
        tensor([0., 2.])

    References:
        Qi et al., 2026, arXiv:2602.04879.
    """
    within(0, math.inf, limit=limit)
    moved = _toward(advantages, logp.exp() - behavior_logp.exp())
    return _unless(moved > limit + EDGE * torch.finfo(moved.dtype).eps, effective, cap)


@declare("token", "logp", "behavior_logp", reads="sign")
def kl_mask(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    limit: float = 0.05,
    cap: float = 20.0,
) -> Float[Tensor, "*shape"]:
    """The ratio, 0 where A pushes a token on whose binary divergence exceeds a limit.

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        w = 0 if D > limit and (A > 0 and p > q, or A < 0 and p < q), else min(exp(e), cap)

    with p and q the token's probabilities under policy and sampler.

    Args:
        limit: of the divergence, in nats.
        cap: an absolute ratio; infinite for none.

    Raises:
        ValueError: the limit is below 0, or the cap is not above 0.

    Example:
        >>> p, q = torch.tensor([0.5, 0.02]).log(), torch.tensor([0.25, 0.01]).log()
        >>> kl_mask(p - q, torch.ones(2), p, q)
        tensor([0., 2.])

    References:
        Qi et al., 2026, arXiv:2602.04879.
    """
    within(0, math.inf, limit=limit)
    p, q = logp.exp().clamp(max=1.0), behavior_logp.exp().clamp(max=1.0)
    own = torch.where(q > 0, q * (behavior_logp - logp), 0.0)
    rest = torch.xlogy(1 - q, 1 - q) - torch.xlogy(1 - q, 1 - p)
    far = own + rest > limit + EDGE * torch.finfo(p.dtype).eps
    return _unless(far & (_toward(advantages, p - q) > 0), effective, cap)


def _toward(advantages: Tensor, step: Tensor) -> Tensor:
    """A step in the direction of the advantage's sign, 0 where the advantage is 0."""
    return advantages.sign().to(step.dtype) * step


def _unless(dropped: Bool[Tensor, "*shape"], effective: Tensor, cap: float) -> Tensor:
    """The ratio, at most the cap, and 0 where dropped."""
    positive(cap=cap)
    return torch.where(dropped, 0.0, effective.clamp(max=math.log(cap)).exp())


def _by_sign(first: Bool[Tensor, "*shape"], a: float, b: float, like: Tensor) -> Tensor:
    """One of two numbers, in the dtype of `like`."""
    return torch.where(first, torch.full_like(like, a), torch.full_like(like, b))


@declare("token", reads="sign")
def one_sided(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    log_low: float = 0.4,
    log_high: float = 0.4,
) -> Float[Tensor, "*shape"]:
    """Log-ratios bounded on the side to which the advantage pushes; goes before a reach.

        x = min(x, log_high) where A > 0,   max(x, -log_low) where A < 0

    Args:
        log_low, log_high: in nats.

    Raises:
        ValueError: a bound below 0.

    Example:
        >>> one_sided(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, 1.0, -1.0]))
        tensor([ 0.4000, -1.0000,  1.0000])

    References:
        Zhao et al., 2025, arXiv:2507.20673.
    """
    within(0, math.inf, log_low=log_low, log_high=log_high)
    up = torch.where(advantages > 0, log_ratio.clamp(max=log_high), log_ratio)
    return torch.where(advantages < 0, up.clamp(min=-log_low), up)


@declare("token", reads="sign")
def unclipped(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    log_low: float = 0.4,
    log_high: float = 0.4,
) -> Float[Tensor, "*shape"]:
    """1 where `one_sided` leaves a log-ratio as it is, else 0.

        w = 0 if A > 0 and e > log_high, or A < 0 and e < -log_low, else 1

    Raises:
        ValueError: a bound below 0.

    Example:
        >>> unclipped(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, 1.0, -1.0]))
        tensor([0., 1., 1.])

    References:
        Zhao et al., 2025, arXiv:2507.20673.
    """
    within(0, math.inf, log_low=log_low, log_high=log_high)
    up = (advantages > 0) & above(effective, math.exp(log_high))
    down = (advantages < 0) & below(effective, math.exp(-log_low))
    return (~(up | down)).to(effective.dtype)
