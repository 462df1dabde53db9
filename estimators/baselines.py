"""Baselines of least variance, estimated from the group.

The constant b that makes the variance of (r - b) S least is E[|S|^2 r] / E[|S|^2], with S the score
of the response.  Members here put a proxy for |S|^2 in its place: the length, or the sum over
tokens of the squared norm of the score by the logits, 1 - 2 pi + sum of pi^2; for the response as a
whole, or for each position up to there.  The optimum itself needs the moments of a problem:
`windage.toy.exact.optimum.optimal_baseline`; `windage.analysis.studies.baselines` says how much of
the possible each of them reaches.

Differences:
    1. As published the baseline holds the response itself, which turns the direction; the siblings
       named `_apart` leave it out and are unbiased.
    2. Where the siblings have no trainable token their plain mean stands in.
    3. Positions are counted in trainable tokens: tokens of tools do not shift them (verl counts
       columns).
    4. No weight of an importance ratio enters the token baseline (verl can scale by its square).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.advantage import from_mean, returns_to_go
from windage.estimators.batch import promote
from windage.estimators.member import declare


def _from_weighted(rewards: Tensor, present: Tensor, weights: Tensor, *, own: bool) -> Tensor:
    """Reward minus the weighted mean, with or without the response's own part."""
    centered, count = from_mean(rewards, present)
    weights = torch.where(present, weights, 0).to(centered.dtype)
    size = weights.shape[-1]
    who = torch.ones(size, size, dtype=weights.dtype, device=weights.device)
    who = who if own else who.fill_diagonal_(0.0)  # a difference of sums would leave rounding
    total, paid = weights @ who, (weights * centered) @ who
    plain = torch.zeros_like(centered) if own else -centered / (count - 1).clamp(min=1)
    baseline = torch.where(total > 0, paid / torch.where(total > 0, total, 1.0), plain)
    return torch.where(present & (count > 1), centered - baseline, 0.0)


@declare("group", "rewards", "present", "lengths")
def length_weighted(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    lengths: Int[Tensor, "*batch P G"],
) -> Float[Tensor, "*batch P G"]:
    """Subtract the group's mean reward weighted by length, the response's own included.

        A[p, g] = r[p, g] - sum(T[p, h] r[p, h] for h) / sum(T[p, h] for h)

    Claims:
        The least variance over constants where |S|^2 is proportional to the length.
        Biased on-policy, in direction where lengths vary.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        present: False where a group is incomplete.
        lengths: trainable tokens.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> length_weighted(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]),
        ...                 torch.tensor([[3, 1]]))
        tensor([[ 0.2500, -0.7500]])

    References:
        Hao et al., 2025, arXiv:2505.23585.
    """
    return _from_weighted(rewards, present, lengths, own=True)


@declare("group", "rewards", "present", "lengths")
def length_weighted_apart(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    lengths: Int[Tensor, "*batch P G"],
) -> Float[Tensor, "*batch P G"]:
    """Subtract the mean reward of the other responses weighted by length.

        A[p, g] = r[p, g] - sum(T[p, h] r[p, h] for h != g) / sum(T[p, h] for h != g)

    Claims:
        Unbiased on-policy: the baseline of a response does not depend on it.
        Equal lengths: `leave_one_out`.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        present: False where a group is incomplete.
        lengths: trainable tokens.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> length_weighted_apart(torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3).bool(),
        ...                       torch.tensor([[3, 1, 1]]))
        tensor([[ 1.0000, -0.7500, -0.7500]])
    """
    return _from_weighted(rewards, present, lengths, own=False)


def score_norm(logp: Tensor, probability_square: Tensor) -> Tensor:
    """Squared norm of a token's score by the logits that drew it.

        |onehot(y) - pi|^2 = 1 - 2 pi(y) + sum over v of pi(v)^2

    Example:
        >>> score_norm(torch.tensor([0.5]).log(), torch.tensor([0.5]))
        tensor([0.5000])
    """
    return (1 - 2 * promote(logp).exp() + promote(probability_square)).clamp(min=0)


def _of_scores(logp: Tensor, probability_square: Tensor, mask: Tensor) -> Tensor:
    """Squared score norms of responses, tokens added up."""
    return torch.where(mask, score_norm(logp, probability_square), 0.0).sum(-1)


@declare("group", "rewards", "present", "logp", "probability_square", "mask")
def score_weighted(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    logp: Float[Tensor, "*batch P G T"],
    probability_square: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
) -> Float[Tensor, "*batch P G"]:
    """Subtract the group's mean reward weighted by the squared norm of the score.

        A[p, g] = r[p, g] - sum(W[p, h] r[p, h] for h) / sum(W[p, h] for h)
        W[p, h] = sum over t of (1 - 2 pi(y[h, t]) + sum over v of pi(v)^2)

    Claims:
        As the group grows, the least variance over constants where each prefix has logits of its
        own: W is |S|^2 there.  With shared parameters it leaves out products of tokens.
        Biased on-policy: the baseline holds the response itself.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        present: False where a group is incomplete.
        logp: of the sampled tokens, under the policy.
        probability_square: sum of squared probabilities of all tokens at each position.
        mask: trainable tokens.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> logp, ones = torch.tensor([[[0.5], [0.25]]]).log(), torch.ones(1, 2, 1)
        >>> score_weighted(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]), logp,
        ...                ones * 0.375, ones.bool())
        tensor([[ 0.7000, -0.3000]])

    References:
        Greensmith et al., 2004; arXiv:2602.07078 for the sum of squares.
    """
    weights = _of_scores(logp, probability_square, mask)
    return _from_weighted(rewards, present, weights, own=True)


@declare("group", "rewards", "present", "logp", "probability_square", "mask")
def score_weighted_apart(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    logp: Float[Tensor, "*batch P G T"],
    probability_square: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
) -> Float[Tensor, "*batch P G"]:
    """`score_weighted` with the other responses' rewards only.

        A[p, g] = r[p, g] - sum(W[p, h] r[p, h] for h != g) / sum(W[p, h] for h != g)

    Claims:
        Unbiased on-policy: the baseline of a response does not depend on it.
        Equal weights: `leave_one_out`.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        present: False where a group is incomplete.
        logp: of the sampled tokens, under the policy.
        probability_square: sum of squared probabilities of all tokens at each position.
        mask: trainable tokens.

    Raises:
        ValueError: groups of one response.

    Example:
        >>> logp, ones = torch.tensor([[[0.5], [0.25]]]).log(), torch.ones(1, 2, 1)
        >>> score_weighted_apart(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]), logp,
        ...                      ones * 0.375, ones.bool())
        tensor([[ 1., -1.]])
    """
    weights = _of_scores(logp, probability_square, mask)
    return _from_weighted(rewards, present, weights, own=False)


def _from_tokens(
    token_rewards: Tensor, logp: Tensor, probability_square: Tensor, mask: Tensor, *, own: bool
) -> Tensor:
    """Return-to-go minus the baseline of the token's position among the trainable tokens."""
    returns = returns_to_go(token_rewards, mask)
    norm = score_norm(logp, probability_square)
    energy = torch.where(mask, norm, 0.0).to(returns.dtype).cumsum(-1)
    place = (mask.cumsum(-1) - 1).clamp(min=0)

    def by_place(value: Tensor) -> Tensor:
        """Values of trainable tokens moved to the front, 0 behind the last."""
        kept = torch.where(mask, value, torch.zeros_like(value))
        return torch.zeros_like(kept).scatter_add(-1, place, kept)

    weight, paid, real = by_place(energy), by_place(returns), by_place(mask.to(energy.dtype)) > 0
    least = torch.where(real, paid, torch.inf).amin(-2, keepdim=True)
    rise = torch.where(real, paid - least, 0.0)  # exactly 0 where returns are equal
    size = mask.shape[-2]
    who = torch.ones(size, size, dtype=energy.dtype, device=mask.device)
    who = who if own else who.fill_diagonal_(0.0)
    total, sums = who @ weight, who @ (weight * rise)
    known = total > (weight if own else 0.0)
    found = torch.where(known, rise - sums / torch.where(known, total, 1.0), 0.0 if own else paid)
    return torch.where(mask, found.gather(-1, place), 0.0)


@declare("group", "token_rewards", "logp", "probability_square", "mask")
def token_weighted(
    token_rewards: Float[Tensor, "*batch P G T"],
    logp: Float[Tensor, "*batch P G T"],
    probability_square: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
) -> Float[Tensor, "*batch P G T"]:
    """Subtract at each position the group's mean return weighted by the score's squared norm.

        A[p, g, t] = U[p, g, t] - sum(W[p, h, t] U[p, h, t] for h) / sum(W[p, h, t] for h)
        W[p, g, t] = sum over j up to t of (1 - 2 pi(y[j]) + sum over v of pi(v)^2)

    with U the return-to-go and t a position among the trainable tokens.

    Claims:
        Biased on-policy: the baseline holds the response itself.
        A position that one response alone reaches gets 0.

    Args:
        token_rewards: reward that arrives with each token.
        logp: of the sampled tokens, under the policy.
        probability_square: sum of squared probabilities of all tokens at each position.
        mask: trainable tokens.

    Example:
        >>> ones = torch.ones(1, 2, 1)
        >>> token_weighted(torch.tensor([[[1.0], [0.0]]]), (ones / 2).log(), ones / 2,
        ...                ones.bool())
        tensor([[[ 0.5000],
                 [-0.5000]]])

    References:
        arXiv:2602.07078.
    """
    return _from_tokens(token_rewards, logp, probability_square, mask, own=True)


@declare("group", "token_rewards", "logp", "probability_square", "mask")
def token_weighted_apart(
    token_rewards: Float[Tensor, "*batch P G T"],
    logp: Float[Tensor, "*batch P G T"],
    probability_square: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
) -> Float[Tensor, "*batch P G T"]:
    """`token_weighted` with the other responses' returns only.

        A[p, g, t] = U[p, g, t] - sum(W U at t for h != g) / sum(W at t for h != g)

    Claims:
        Unbiased on-policy: the baseline of a response does not depend on it.
        A position that no other response reaches has the baseline 0.

    Args:
        token_rewards: reward that arrives with each token.
        logp: of the sampled tokens, under the policy.
        probability_square: sum of squared probabilities of all tokens at each position.
        mask: trainable tokens.

    Example:
        >>> ones = torch.ones(1, 2, 1)
        >>> token_weighted_apart(torch.tensor([[[1.0], [0.0]]]), (ones / 2).log(), ones / 2,
        ...                      ones.bool())
        tensor([[[ 1.],
                 [-1.]]])
    """
    return _from_tokens(token_rewards, logp, probability_square, mask, own=False)
