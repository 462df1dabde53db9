"""Advantages: how much better a response did than expected.

Members take `(rewards, present)`, or `(token_rewards, values, mask)` where a critic is used, and
return one number a response or a token.  Rows that are not present count nowhere and get 0.

Differences:
    1. A group of equal rewards gives exactly 0 in every group member, at any `eps`; frameworks
       that divide the rounding residue by a small eps give O(1) noise.  Where a spread is divided
       by, one that rounding alone could have made (`ROUNDING` units in the last place) counts as 0.
    2. `group_std` divides by (std + eps) with ddof 1 (verl, TRL); several others use ddof 0.
    3. A single survivor of a larger group gets 0; one path of TRL returned its raw reward.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import promote
from windage.estimators.errors import positive, within
from windage.estimators.member import declare

ROUNDING = 8


@runtime_checkable
class Advantage(Protocol):
    """Rewards of P groups to one advantage a response."""

    def __call__(
        self, rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
    ) -> Float[Tensor, "*batch P G"]: ...


def everyone(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None
) -> Bool[Tensor, "*batch P G"]:
    """Who is present; all, where nothing was said.

    Example:
        >>> everyone(torch.zeros(1, 2), None)
        tensor([[True, True]])
    """
    return torch.ones_like(rewards, dtype=torch.bool) if present is None else present


def from_mean(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> tuple[Float[Tensor, "*batch P G"], Int[Tensor, "*batch P 1"]]:
    """Reward minus group mean, exactly 0 in groups of equal rewards; and the group's count.

    Example:
        >>> from_mean(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]))
        (tensor([[ 0.5000, -0.5000]]), tensor([[2]]))
    """
    if rewards.shape[-1] < 2:
        raise ValueError("a group estimator needs groups of at least 2 responses, got size 1")
    rewards = promote(rewards)
    count = present.sum(-1, keepdim=True)
    zero = rewards.new_zeros(())
    total = torch.where(present, rewards, zero).sum(-1, keepdim=True)
    low = torch.where(present, rewards, rewards.new_full((), torch.inf)).amin(-1, keepdim=True)
    high = torch.where(present, rewards, rewards.new_full((), -torch.inf)).amax(-1, keepdim=True)
    centered = rewards - total / count.clamp(min=1)
    return torch.where(present & (low < high), centered, zero), count


def over_spread(
    centered: Tensor, freedom: Tensor, largest: Tensor, dims: tuple[int, ...], eps: float
) -> Tensor:
    """Centered values over (their root mean square + eps); 0 where rounding made the spread.

    Args:
        centered: values with mean 0 over `dims`.
        freedom: what the sum of squares is divided by.
        largest: of the values before they were centered, which sets the size of rounding.

    Example:
        >>> one = torch.ones(1)
        >>> over_spread(torch.tensor([2.0, -2.0]), 2 * one, one, (-1,), 0.0)
        tensor([ 1., -1.])
    """
    within(0, math.inf, eps=eps)
    total = centered.square().sum(dims, keepdim=True)
    spread = (total / freedom.clamp(min=1)).sqrt()
    rounding = ROUNDING * torch.finfo(centered.dtype).eps * largest
    return torch.where(spread > rounding, centered / (spread + eps), torch.zeros_like(centered))


@declare("response", "rewards", "present", linear=True)
def constant(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    baseline: float = 0.0,
) -> Float[Tensor, "*batch P G"]:
    """Subtract one number from every reward.

        A[p, g] = r[p, g] - baseline

    Claims:
        Unbiased on-policy for any baseline.

    Args:
        rewards: one scalar a response.
        baseline: in units of reward.

    Example:
        >>> constant(torch.tensor([[1.0, 0.0]]), baseline=0.25)
        tensor([[ 0.7500, -0.2500]])

    References:
        Williams, 1992.
    """
    rewards, present = promote(rewards), everyone(rewards, present)
    return torch.where(present, rewards - baseline, rewards.new_zeros(()))


@declare("group", "rewards", "present", linear=True)
def group_mean(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None = None
) -> Float[Tensor, "*batch P G"]:
    """Subtract from each reward the mean reward of its group, its own included.

        A[p, g] = r[p, g] - sum(r[p, h] for h) / G

    Claims:
        Expectation on-policy is (G - 1) / G of the gradient.
        Equals `leave_one_out` times (G - 1) / G; each row sums to zero.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> group_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])

    References:
        Shao et al., 2024, arXiv:2402.03300; Liu et al., 2025, arXiv:2503.20783.
    """
    centered, _ = from_mean(rewards, everyone(rewards, present))
    return centered


@declare("group", "rewards", "present", linear=True)
def leave_one_out(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None = None
) -> Float[Tensor, "*batch P G"]:
    """Subtract from each reward the mean reward of the other responses of its prompt.

        A[p, g] = r[p, g] - sum(r[p, h] for h != g) / (G - 1)

    Claims:
        Unbiased on-policy for every G >= 2: the baseline of a response does not depend on it.
        Equals `group_mean` times G / (G - 1).

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.

    Returns:
        Advantages; each row sums to zero.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.5000, -0.5000]])

    References:
        Ahmadian et al., 2024, arXiv:2402.14740.
    """
    centered, count = from_mean(rewards, everyone(rewards, present))
    return centered * count / (count - 1).clamp(min=1)


@declare("group", "rewards", "present")
def group_std(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "*batch P G"]:
    """Subtract the group's mean and divide by its standard deviation.

        A[p, g] = (r[p, g] - mean) / (std + eps),   std^2 = sum((r - mean)^2) / (G - ddof)

    Claims:
        Binary rewards: expectation on-policy is E[std] / (p (1 - p)) times the gradient of p.
        Real rewards: the direction differs from the gradient's inside one prompt.
        A group of equal rewards gives exactly 0.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        ddof: 1 as in verl and TRL, 0 for the population formula.
        eps: in units of reward.

    Raises:
        ValueError: groups of one response, ddof not 0 or 1, eps below 0.

    Example:
        >>> group_std(torch.tensor([[1.0, 0.0]]), ddof=0, eps=0.0)
        tensor([[ 1., -1.]])

    References:
        Shao et al., 2024, arXiv:2402.03300.
    """
    within(0, 1, ddof=ddof)
    present = everyone(rewards, present)
    centered, count = from_mean(rewards, present)
    largest = torch.where(present, rewards.abs(), 0.0).amax(-1, keepdim=True)
    return over_spread(centered, count - ddof, largest, (-1,), eps)


@declare("batch", "rewards", "present")
def batch_std(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "*batch P G"]:
    """Subtract the group's mean, divide by the standard deviation of that over the batch.

        A[p, g] = c[p, g] / (std(c over all p, g) + eps),   c = r - group mean

    Claims:
        One shared factor: the direction of the batch's update is that of `group_mean`.

    Raises:
        ValueError: groups of one response, ddof not 0 or 1, eps below 0.

    Example:
        >>> batch_std(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ddof=0, eps=0.0)
        tensor([[ 1.4142, -1.4142],
                [ 0.0000,  0.0000]])

    References:
        Liu et al., 2025, arXiv:2508.08221.
    """
    within(0, 1, ddof=ddof)
    present = everyone(rewards, present)
    centered, _ = from_mean(rewards, present)
    largest = torch.where(present, rewards.abs(), 0.0).amax((-2, -1), keepdim=True)
    count = present.sum((-2, -1), keepdim=True)
    return over_spread(centered, count - ddof, largest, (-2, -1), eps)


def whiten(
    advantages: Float[Tensor, "*batch P G"],
    mask: Bool[Tensor, "*batch P G"],
    *,
    ddof: int = 0,
    eps: float = 1e-8,
) -> Float[Tensor, "*batch P G"]:
    """Give the masked entries mean 0 and standard deviation 1 over the last two axes.

        out = (x - mean) / (std + eps) where the mask is True, else 0

    Claims:
        What stands under a False mask does not matter; equal entries give exactly 0.

    Raises:
        ValueError: ddof not 0 or 1, eps below 0.

    Example:
        >>> whiten(torch.tensor([[2.0, 4.0], [6.0, 99.0]]),
        ...        torch.tensor([[True, True], [True, False]]), eps=0.0)
        tensor([[-1.2247,  0.0000],
                [ 1.2247,  0.0000]])

    References:
        Hu et al., 2025, arXiv:2501.03262.
    """
    within(0, 1, ddof=ddof)
    advantages = torch.where(mask, promote(advantages), 0.0)
    count = mask.sum((-2, -1), keepdim=True)
    mean = advantages.sum((-2, -1), keepdim=True) / count.clamp(min=1)
    centered = torch.where(mask, advantages - mean, 0.0)
    largest = advantages.abs().amax((-2, -1), keepdim=True)
    return over_spread(centered, count - ddof, largest, (-2, -1), eps)


def returns_to_go(
    token_rewards: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"], *, gamma: float = 1.0
) -> Float[Tensor, "*batch T"]:
    """Discounted sum of the rewards from each trainable token on, one discount a trainable token.

        U[t] = r[t] + gamma * U[next trainable t];   0 where the mask is False

    Claims:
        Masked (tool) tokens neither contribute nor discount.

    Example:
        >>> returns_to_go(torch.tensor([1.0, 5.0, 1.0]), torch.tensor([True, False, True]),
        ...               gamma=0.5)
        tensor([1.5000, 0.0000, 1.0000])
    """
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)


@declare("response", "token_rewards", "values", "mask")
def gae(
    token_rewards: Float[Tensor, "*batch T"],
    values: Float[Tensor, "*batch T"],
    mask: Bool[Tensor, "*batch T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Float[Tensor, "*batch T"]:
    """Generalized advantage estimation over the trainable tokens.

        delta[t] = r[t] + gamma * V[t+1] - V[t],   A[t] = delta[t] + gamma * lam * A[t+1]

    with t+1 the next trainable token and V = 0 after the last.

    Claims:
        gamma = lam = 1: return minus value, unbiased on-policy for any value that looks at the
        prefix only.
        lam < 1: unbiased if the values are exact.
        Masked tokens neither enter the recursion nor decay it.

    Args:
        token_rewards: reward that arrives with each token; terminal rewards on the last one.
        values: critic's value of the prefix before each token.
        mask: trainable tokens.
        gamma: discount a trainable token.
        lam: trust in the sampled return against the critic.

    Raises:
        ValueError: gamma or lam outside 0 to 1.

    Example:
        >>> gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 9.0, 0.5]),
        ...     torch.tensor([True, False, True]), lam=0.9)
        tensor([0.7500, 0.0000, 0.5000])

    References:
        Schulman et al., 2016, arXiv:1506.02438.
    """
    within(0, 1, gamma=gamma, lam=lam)
    return _decayed(token_rewards, values, mask, gamma, promote(values).new_full((), lam))


def _decayed(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor
) -> Tensor:
    """The recursion of `gae`, with one lambda for all responses or one for each."""
    token_rewards, values = promote(token_rewards), promote(values)
    following = torch.zeros_like(values.sum(-1))
    carry = torch.zeros_like(following)
    columns = []
    for t in reversed(range(values.shape[-1])):
        here = mask[..., t]
        delta = token_rewards[..., t] + gamma * following - values[..., t]
        carry = torch.where(here, delta + gamma * lam * carry, carry)
        following = torch.where(here, values[..., t], following)
        columns.append(torch.where(here, carry, torch.zeros_like(carry)))
    return torch.stack(columns[::-1], -1) if columns else torch.zeros_like(values)


@declare("response", "token_rewards", "values", "mask")
def gae_by_length(
    token_rewards: Float[Tensor, "*batch T"],
    values: Float[Tensor, "*batch T"],
    mask: Bool[Tensor, "*batch T"],
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
) -> Float[Tensor, "*batch T"]:
    """Generalized advantage estimation whose lambda grows with the response's length.

        lam = max(0, 1 - 1 / (alpha T)) for a response of T trainable tokens, then as `gae`

    Claims:
        The horizon 1 / (1 - lam) is alpha T tokens, but at least 1.
        Biased on-policy where lengths vary, with exact values too: lambda looks at the length, and
        so at what follows the token.

    Args:
        token_rewards: reward that arrives with each token.
        values: critic's value of the prefix before each token.
        mask: trainable tokens.
        gamma: discount a trainable token.
        alpha: 1 / (alpha T) is how much a token forgets.

    Raises:
        ValueError: gamma outside 0 to 1, alpha not above 0.

    Example:
        >>> gae_by_length(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]),
        ...               torch.tensor([True, True]), alpha=2.0)
        tensor([0.7500, 1.0000])

    References:
        Yue et al., 2025, arXiv:2504.05118.
    """
    within(0, 1, gamma=gamma)
    positive(alpha=alpha)
    length = mask.sum(-1).clamp(min=1)
    lam = (1 - 1 / (alpha * length.to(promote(values).dtype))).clamp(min=0.0)
    return _decayed(token_rewards, values, mask, gamma, lam)


def value_targets(
    token_rewards: Float[Tensor, "*batch T"],
    values: Float[Tensor, "*batch T"],
    mask: Bool[Tensor, "*batch T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Float[Tensor, "*batch T"]:
    """What a critic is fitted to, with a lambda of its own.

        target[t] = V[t] + A[t] of `gae`

    Claims:
        lam = 1: the return-to-go, whatever the values; so the policy's lambda may be below 1 while
        the critic learns from whole returns.

    Example:
        >>> value_targets(torch.tensor([0.0, 1.0]), torch.tensor([0.3, 0.6]),
        ...               torch.tensor([True, True]))
        tensor([1., 1.])

    References:
        Yuan et al., 2025, arXiv:2503.01491.
    """
    found = gae(token_rewards, values, mask, gamma=gamma, lam=lam)
    return torch.where(mask, promote(values) + found, torch.zeros_like(found))


def terminal_rewards(
    rewards: Float[Tensor, "*batch P G"], mask: Bool[Tensor, "*batch P G T"]
) -> Float[Tensor, "*batch P G T"]:
    """Place each response's reward on its last trainable token.

    Example:
        >>> terminal_rewards(torch.tensor([[2.0]]), torch.tensor([[[True, True, False]]]))
        tensor([[[0., 2., 0.]]])
    """
    after = mask.flip(-1).cumsum(-1).flip(-1)
    last = mask & (after == 1)
    return torch.where(last, rewards.unsqueeze(-1), rewards.new_zeros(()))
