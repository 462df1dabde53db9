"""Advantages that climb another objective than the expected reward of one response.

A group of G responses of one prompt is G draws from the policy, so functions of several draws (the
best of k, the chance of at least one success, the logarithm of that of one) have unbiased gradients
too.  Summed with `token_sum`, a mean over the responses, the expectation is that gradient itself.

Differences:
    1. Advantages are G times those of papers that add up a group: our aggregation is a mean.
    2. `subset_max` and `subset_gain` take any reward; pass@k is the largest of k rewards of 0 or 1.
    3. `best_over_second` does not divide by the group's standard deviation, as verl's `grpo_passk`
       does by default: the quotient is biased for the expected maximum.
    4. `success_average` and `relative_mean` give 0 to a group without a success.  That makes the
       first the sum of the logarithm's series up to order G and the second, for the baseline of -1
       is then missing, up to order G - 1; documentation of frameworks says G for both.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.advantage import everyone, from_mean
from windage.estimators.batch import promote
from windage.estimators.errors import BadInput
from windage.estimators.member import declare


def _mean(rewards: Tensor, present: Tensor) -> Tensor:
    """Mean reward of each group, 1 where it is not above 0; and where it is."""
    count = present.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(present, rewards, 0.0).sum(-1, keepdim=True) / count
    return torch.where(mean > 0, mean, 0.0)


@declare("group", "rewards", "present", rewards="nonnegative")
def success_average(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None = None
) -> Float[Tensor, "*batch P G"]:
    """Divide each reward by the mean reward of its group: the mean score of the successes.

        A[p, g] = r[p, g] / mean,   0 where the mean is 0

    Claims:
        Rewards of 0 or 1 with mean p: expectation on-policy is the gradient of log p, its series in
        1 - p cut after order G:  sum over j from 1 to G of (1 - p)^(j - 1) grad p.

    Args:
        rewards: at least 0; a row holds independent responses of one prompt.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> success_average(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[2., 0., 0., 2.]])

    References:
        arXiv:2602.02710.
    """
    present = everyone(rewards, present)
    from_mean(rewards, present)
    rewards = promote(rewards)
    mean = _mean(rewards, present)
    share = torch.where(present, rewards, 0.0) / torch.where(mean > 0, mean, 1.0)
    return torch.where(mean > 0, share, 0.0)


@declare("group", "rewards", "present", rewards="nonnegative")
def relative_mean(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None = None
) -> Float[Tensor, "*batch P G"]:
    """Subtract the mean reward of the group and divide by it.

        A[p, g] = (r[p, g] - mean) / mean,   0 where the mean is 0

    Claims:
        Rewards of 0 or 1 with mean p: expectation on-policy is the gradient of log p, its series in
        1 - p cut after order G - 1.
        Equals `success_average` minus 1 where a reward is above 0; each row sums to zero.

    Args:
        rewards: at least 0; a row holds independent responses of one prompt.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> relative_mean(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[ 1., -1., -1.,  1.]])

    References:
        arXiv:2602.02710.
    """
    present = everyone(rewards, present)
    centered, _ = from_mean(rewards, present)
    mean = _mean(promote(rewards), present)
    return torch.where(mean > 0, centered / torch.where(mean > 0, mean, 1.0), 0.0)


def _ranked(
    rewards: Tensor, present: Tensor | None, k: int, least: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards in ascending order (absent ones last, as 0), the order, ranks from 1, and counts.

    Raises:
        BadInput: a k that no subset of the group can have.
    """
    size = rewards.shape[-1]
    if not least <= k <= size or k != int(k):
        raise BadInput(f"k is {k:g}; allowed: from {least} to the group's size, here {size}")
    rewards, present = promote(rewards), everyone(rewards, present)
    key = torch.where(present, rewards, rewards.new_full((), torch.inf))
    order = key.argsort(-1)
    count = present.sum(-1, keepdim=True).to(torch.float64)
    ascending = torch.where(present, rewards, 0.0).gather(-1, order)
    rank = torch.arange(1, size + 1, device=rewards.device, dtype=torch.float64)
    return ascending, order, rank.expand(rewards.shape), count


def _subsets(n: Tensor, k: int, of: Tensor, size: int) -> Tensor:
    """C(n, k) / C(of, size), 0 where either is; in float64."""

    def log(a: Tensor, b: int) -> Tensor:
        free = (a - b).clamp(min=0)
        return torch.lgamma(a.clamp(min=0) + 1) - torch.lgamma(free + 1) - torch.lgamma(one * b + 1)

    one = torch.ones_like(n)
    if k < 0:
        return torch.zeros_like(n)
    exists = (n >= k) & (of >= size)
    return torch.where(exists, (log(n, k) - log(of, size)).exp(), 0.0)


@declare("group", "rewards", "present")
def subset_max(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    k: int = 2,
) -> Float[Tensor, "*batch P G"]:
    """Give each response the largest reward of the subsets of k responses that it is in.

        A[p, g] = G / C(G, k) * sum over subsets S of k with g of max(r[p, h] for h in S)

    Rewards of 0 or 1 with c successes: k for a success, k (1 - C(G - 1 - c, k - 1) /
    C(G - 1, k - 1)) for a failure.

    Claims:
        Expectation on-policy is the gradient of the expected largest of k rewards (pass@k).
        k = 1: the reward itself.

    Args:
        rewards: a row holds independent responses of one prompt; one with fewer than k gets 0.
        k: responses of a subset.

    Raises:
        ValueError: k not from 1 to the group's size.

    Example:
        >>> subset_max(torch.tensor([[1.0, 0.0, 0.0]]), k=2)
        tensor([[2., 1., 1.]])

    References:
        Walder and Karkhanis, 2025, arXiv:2505.15201.
    """
    r, order, rank, count = _ranked(rewards, present, k, 1)
    own = _subsets(rank - 1, k - 1, count, k).to(r.dtype) * r
    below = _subsets(rank - 2, k - 2, count, k).to(r.dtype) * r
    above = below.flip(-1).cumsum(-1).flip(-1) - below
    here = rank <= count
    found = torch.where(here, (own + above) * count.to(r.dtype), 0.0)
    return torch.zeros_like(r).scatter(-1, order, found)


@declare("group", "rewards", "present")
def subset_gain(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    k: int = 2,
) -> Float[Tensor, "*batch P G"]:
    """Give each response what it adds to the largest reward of subsets of k - 1 others.

        A[p, g] = G / C(G, k) * sum over subsets S of k with g of
                  max(r[p, h] for h in S) - max(r[p, h] for h in S but g)

    Claims:
        Expectation on-policy is that of `subset_max`: what is subtracted does not depend on g.
        Never below 0, and 0 for the smallest reward of the group.
        k = G: `best_over_second`.

    Args:
        rewards: a row holds independent responses of one prompt; one with fewer than k gets 0.
        k: responses of a subset.

    Raises:
        ValueError: k not from 2 to the group's size.

    Example:
        >>> subset_gain(torch.tensor([[1.0, 0.0, 0.0]]), k=2)
        tensor([[2., 0., 0.]])

    References:
        Walder and Karkhanis, 2025, arXiv:2505.15201.
    """
    r, order, rank, count = _ranked(rewards, present, k, 2)
    weight = _subsets(rank - 1, k - 2, count, k).to(r.dtype).unsqueeze(-2)
    rise = r.unsqueeze(-1) - r.unsqueeze(-2)
    lower = rank.unsqueeze(-1) > rank.unsqueeze(-2)
    gain = torch.where(lower, weight * rise, 0.0).sum(-1)
    found = torch.where(rank <= count, gain * count.to(r.dtype), 0.0)
    return torch.zeros_like(r).scatter(-1, order, found)


@declare("group", "rewards", "present")
def best_over_second(
    rewards: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"] | None = None
) -> Float[Tensor, "*batch P G"]:
    """Give the best response of a group its lead over the second, and nothing to the others.

        A[p, g] = G (r[p, g] - max(r[p, h] for h != g)) if that is above 0, else 0

    Claims:
        Expectation on-policy is the gradient of the expected largest of G rewards.
        Equals `subset_gain` with k = G.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> best_over_second(torch.tensor([[1.0, 0.25, 0.0]]))
        tensor([[2.2500, 0.0000, 0.0000]])

    References:
        Tang et al., 2025, arXiv:2503.19595.
    """
    present = everyone(rewards, present)
    _, count = from_mean(rewards, present)
    rewards = promote(rewards)
    key = torch.where(present, rewards, rewards.new_full((), -torch.inf))
    best, second = key.topk(2, -1).values.split(1, -1)
    lead = torch.where(present & (count > 1), rewards - second, 0.0)
    return torch.where(key == best, lead.clamp(min=0) * count, 0.0)
