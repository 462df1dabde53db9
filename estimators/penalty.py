"""Penalties and shaping: terms that the reward or the loss gets besides the reward itself.

With x = log pi - log ref of a token:  k1 = x,  k2 = x^2 / 2,  k3 = exp(-x) - 1 + x.

A penalty in the loss adds `coefficient of grad log pi` for each token, aggregated as the estimator
does; a penalty in the reward adds to the token's reward and is collected by the return-to-go.

Differences:
    1. Values and gradients of an estimator of the divergence are different things; names say which
       place is meant.  k3 in the loss follows the forward KL (TRL, verl, open-instruct default).
    2. `loss_k3_weighted` is the ratio-weighted k3 with the gradient through the ratio: the reverse
       KL's gradient (DeepSeek-V3.2; TRL `use_bias_correction_kl`, slime `--use-unbiased-kl`, NeMo).
    3. No clamp on k3 (verl clamps at 10, which adds a bias); a token whose x is below -`LIMIT` is
       treated as if x were -`LIMIT`, in value and in gradient: its pull is kept and stays finite.
    4. `timeout_failure` scores a late response as a failure, which is a change of the objective;
       dropping it (`admission.time_out`) is a selection.
    5. `positive_nll` is aggregated as the estimator is; VAPO and NeMo-RL average over the tokens of
       correct responses alone.
    6. `adapted` gives the next coefficient whatever the last entropy was; Skywork-OR1 and TRL also
       switch the bonus off while the entropy is above its target: pass 0 then.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import promote
from windage.estimators.errors import ordered, positive, within
from windage.estimators.member import declare

LIMIT = 20.0


@runtime_checkable
class Penalty(Protocol):
    """Log-ratios to the reference (and to the sampler) to a term for each token."""

    def __call__(self, *fields: Tensor) -> Float[Tensor, "*batch T"]: ...


def k1(reference_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x: unbiased for KL(pi, ref) under pi, either sign.

    Example:
        >>> k1(torch.tensor([0.5]))
        tensor([0.5000])
    """
    return reference_ratio


def k2(reference_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x^2 / 2: biased in value, right in gradient.

    Example:
        >>> k2(torch.tensor([1.0]))
        tensor([0.5000])
    """
    return reference_ratio.square() / 2


def k3(reference_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(-x) - 1 + x: unbiased for KL(pi, ref) under pi and never negative; x at least -LIMIT.

    Example:
        >>> k3(torch.tensor([1.0]))
        tensor([0.3679])
    """
    capped = reference_ratio.clamp(min=-LIMIT)
    return torch.expm1(-capped) + capped


@declare("token", "reference_ratio", place="token_reward")
def reward_k1(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k1 subtracted from the reward of each token.

        r[t] = -coefficient * x[t]

    Claims:
        With the return-to-go: the full gradient of KL(pi, ref).

    Example:
        >>> reward_k1(torch.tensor([0.5]), coefficient=0.1)
        tensor([-0.0500])
    """
    return -coefficient * k1(reference_ratio)


@declare("token", "reference_ratio", place="token_reward")
def reward_k2(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k2 subtracted from the reward of each token.

    Example:
        >>> reward_k2(torch.tensor([1.0]), coefficient=0.1)
        tensor([-0.0500])
    """
    return -coefficient * k2(reference_ratio)


@declare("token", "reference_ratio", place="token_reward")
def reward_k3(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k3 subtracted from the reward of each token.

    Claims:
        One step: the gradient of KL(pi, ref) minus that of KL(ref, pi).

    Example:
        >>> reward_k3(torch.tensor([1.0]), coefficient=0.1)
        tensor([-0.0368])
    """
    return -coefficient * k3(reference_ratio)


@declare("token", "reference_ratio")
def loss_k1(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k1 in the loss: a gradient of mean zero on-policy, noise without a pull.

    Example:
        >>> loss_k1(torch.tensor([0.5]), coefficient=0.1)
        tensor([-0.1000])
    """
    return -coefficient * torch.ones_like(reference_ratio)


@declare("token", "reference_ratio")
def loss_k2(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k2 in the loss: the gradient of KL(pi, ref) at each prefix, prefixes frozen.

        c[t] = -coefficient * x[t]

    Example:
        >>> loss_k2(torch.tensor([0.5]), coefficient=0.1)
        tensor([-0.0500])

    References:
        arXiv:2506.09477.
    """
    return -coefficient * reference_ratio


@declare("token", "reference_ratio")
def loss_k3(
    reference_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """k3 in the loss: the gradient of the forward KL(ref, pi) at each prefix.

        c[t] = -coefficient * (1 - exp(-x[t]))

    Example:
        >>> loss_k3(torch.tensor([1.0]), coefficient=0.1)
        tensor([-0.0632])
    """
    return coefficient * torch.expm1(-reference_ratio.clamp(min=-LIMIT))


@declare("token", "reference_ratio", "log_ratio")
def loss_k3_weighted(
    reference_ratio: Float[Tensor, "*shape"],
    log_ratio: Float[Tensor, "*shape"],
    *,
    coefficient: float = 0.001,
) -> Float[Tensor, "*shape"]:
    """Ratio-weighted k3 with the gradient through the ratio pi/mu.

        d(rho k3) = rho x grad log pi,  so  c[t] = -coefficient * rho[t] * x[t]

    Claims:
        The gradient of KL(pi, ref) at each prefix, on- and off-policy.

    Example:
        >>> loss_k3_weighted(torch.tensor([0.5]), torch.tensor([0.0]), coefficient=0.1)
        tensor([-0.0500])

    References:
        DeepSeek-AI, 2025, arXiv:2512.02556.
    """
    return -coefficient * log_ratio.exp() * reference_ratio


@declare("token", "log_ratio")
def loss_square(
    log_ratio: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """Half of the squared log-ratio to the sampler of each token, in the loss.

        c[t] = -coefficient * x[t],   x = log pi - log mu

    Claims:
        0 on-policy, where the sampler is the policy.

    Args:
        coefficient: in units of reward; public code that has no half uses twice as much.

    Example:
        >>> loss_square(torch.tensor([0.5]), coefficient=0.1)
        tensor([-0.0500])
    """
    return -coefficient * log_ratio


@declare("response", "log_ratio")
def loss_square_response(
    log_ratio: Float[Tensor, "*batch T"], *, coefficient: float = 0.1
) -> Float[Tensor, "*batch T"]:
    """Half of the squared log-ratio to the sampler of the whole response, in the loss.

        c[t] = -coefficient * sum(x[u] for all u),   x = log pi - log mu

    Claims:
        0 on-policy, where the sampler is the policy.

    Args:
        coefficient: in units of reward.

    Example:
        >>> loss_square_response(torch.tensor([0.5, 1.0]))
        tensor([-0.1500, -0.1500])

    References:
        Kimi team, 2025, arXiv:2501.12599.
    """
    return -coefficient * log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)


@declare("token", "logp")
def entropy(
    logp: Float[Tensor, "*shape"], *, coefficient: float = 0.001
) -> Float[Tensor, "*shape"]:
    """Entropy bonus from the sampled token.

        c[t] = -coefficient * log pi(y[t])

    Claims:
        On-policy the gradient of the mean token entropy with prefixes frozen, which is not that of
        the entropy of the whole response.

    Example:
        >>> entropy(torch.tensor([-0.5]), coefficient=0.1)
        tensor([0.0500])
    """
    return -coefficient * logp


def adapted(
    coefficient: float,
    entropy: float,
    *,
    target: float = 0.2,
    step: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> float:
    """The entropy bonus's next coefficient: a step up at or below the target, else one down.

        next = min(max(last + step if entropy <= target else last - step, low), high)

    Args:
        coefficient: the last one; the first is a setting, 0.01 say.
        entropy: measured mean entropy of a token, in nats.
        target: entropy to keep, in nats.
        step: of the coefficient, an update.
        low, high: bounds of the coefficient.

    Raises:
        ValueError: a step or a bound below 0, or low above high.

    Example:
        >>> round(adapted(0.01, 0.15), 6), round(adapted(0.01, 0.25), 6), adapted(0.002, 0.25)
        (0.015, 0.005, 0.0)

    References:
        He et al., 2025, arXiv:2505.22312.
    """
    ordered(low=low, high=high)
    within(0, math.inf, step=step)
    moved = coefficient + (step if entropy <= target else -step)
    return min(max(moved, low), high)


@declare("token", "outcomes")
def positive_nll(
    outcomes: Float[Tensor, "*batch P G"], *, coefficient: float = 0.1
) -> Float[Tensor, "*batch P G 1"]:
    """Likelihood of the correct responses, added to the objective.

        c[t] = coefficient on every token of a response with outcome above 0, else 0

    Claims:
        One step, on-policy: `coefficient` times the gradient of P(outcome > 0).

    Args:
        outcomes: before shaping.

    Example:
        >>> positive_nll(torch.tensor([[1.0, 0.0]]))
        tensor([[[0.1000],
                 [0.0000]]])

    References:
        Yue et al., 2025, arXiv:2504.05118.
    """
    return coefficient * (outcomes > 0).to(promote(outcomes).dtype).unsqueeze(-1)


@declare("response", "lengths", place="reward")
def overlong_shaping(
    lengths: Int[Tensor, "*batch P G"], *, length: float | None = None, margin: float = 4096.0
) -> Float[Tensor, "*batch P G"]:
    """A penalty on the reward that grows over the last `margin` tokens before the limit.

        0 up to length - margin, then linear down to -1 at length and beyond

    Claims:
        Unbiased for the shaped objective.  Without a length it is inert.

    Args:
        length: the longest response allowed, in tokens; None: no shaping.
        margin: tokens over which the penalty grows.

    Raises:
        ValueError: a length or a margin not above 0.

    Example:
        >>> overlong_shaping(torch.tensor([[10, 15, 30]]), length=20, margin=10)
        tensor([[-0.0000, -0.5000, -1.0000]], dtype=torch.float64)

    References:
        Yu et al., 2025, arXiv:2503.14476.
    """
    if length is None:
        return torch.zeros_like(lengths, dtype=torch.float64)
    positive(length=length, margin=margin)
    return -((lengths.to(torch.float64) - (length - margin)) / margin).clamp(min=0.0, max=1.0)


@declare("response", "rewards", "elapsed", place="reward")
def timeout_failure(
    rewards: Float[Tensor, "*batch P G"],
    elapsed: Float[Tensor, "*batch P G"],
    *,
    limit: float = 600.0,
    failure: float = 0.0,
) -> Float[Tensor, "*batch P G"]:
    """Score a response that took longer than a limit in seconds as a failure.

        failure - r[p, g] if elapsed > limit, else 0

    Claims:
        Exactly the gradient of the time-limited objective, which is another objective.

    Args:
        rewards: before shaping.
        limit: seconds; as in `admission.time_out`, a response that takes just that long is in time.
        failure: the reward of a response that is late.

    Example:
        >>> timeout_failure(torch.tensor([[1.0, 1.0]]), torch.tensor([[10.0, 900.0]]))
        tensor([[ 0., -1.]])
    """
    return torch.where(elapsed > limit, failure - rewards, torch.zeros_like(rewards))


def ema(
    reference: Float[Tensor, "*shape"], policy: Float[Tensor, "*shape"], *, coefficient: float = 0.6
) -> Float[Tensor, "*shape"]:
    """Move a reference parameter towards the policy.

        ref <- coefficient * policy + (1 - coefficient) * ref

    Args:
        coefficient: 1 is a hard copy (refresh every N steps or once an epoch), 0 never moves.

    Raises:
        ValueError: a coefficient outside 0 to 1.

    Example:
        >>> ema(torch.tensor([0.0]), torch.tensor([1.0]), coefficient=0.6)
        tensor([0.6000])

    References:
        Gorbatovski et al., 2024, arXiv:2404.09656.
    """
    within(0, 1, coefficient=coefficient)
    return torch.lerp(reference, policy, coefficient)
