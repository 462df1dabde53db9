"""The vote of several samples: the probability that the right answer wins, exactly."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def majority(
    right: Float[Tensor, "*batch"], wrong: Float[Tensor, "*batch C"], votes: int
) -> Float[Tensor, "*batch"]:
    """Probability that the right answer has the most votes; shared ties count in part.

        sum over n >= 1 of P(n votes for the right answer, none has more) / (1 + answers with n)

    The law of the counts is built answer by answer over (votes used, answers that tie).

    Claims:
        With one vote: the probability of the right answer.

    Args:
        right: probability of a vote for the right answer.
        wrong: of a vote for each wrong one; what is left to 1 does not vote.
        votes: samples drawn; no vote at all counts as wrong.

    Example:
        >>> majority(torch.tensor(0.5), torch.tensor([0.5]), 2)
        tensor(0.5000)
    """
    silent = (1 - right - wrong.sum(-1)).clamp(min=0)
    total = torch.zeros_like(right)
    for n in range(1, votes + 1):
        left = votes - n
        table = right.new_zeros((*right.shape, left + 1, wrong.shape[-1] + 1))
        table[..., 0, 0] = right**n / math.factorial(n)
        for c in range(wrong.shape[-1]):
            table = _add(table, wrong[..., c], n)
        rest = torch.stack([silent**m / math.factorial(m) for m in range(left, -1, -1)], -1)
        share = 1 / torch.arange(1, wrong.shape[-1] + 2, dtype=table.dtype)
        found = (table * rest.unsqueeze(-1) * share).sum((-2, -1))
        total = total + math.factorial(votes) * found
    return total


def _add(
    table: Float[Tensor, "*batch U R"], chance: Float[Tensor, "*batch"], most: int
) -> Float[Tensor, "*batch U R"]:
    """Let one more answer have up to `most` votes; with exactly `most` it ties."""
    out = torch.zeros_like(table)
    for m in range(min(most, table.shape[-2] - 1) + 1):
        term = table[..., : table.shape[-2] - m, :]
        term = term * (chance**m / math.factorial(m))[..., None, None]
        if m < most:
            out[..., m:, :] += term
        else:
            out[..., m:, 1:] += term[..., :-1]
    return out
