"""Aggregations: how the terms of tokens are combined over the whole batch.

Members take `(lengths, present)` and return the coefficient that every trainable token of a
response gets.  The mask enters by its row sums only, so neither padding nor tool tokens can matter,
and since denominators are taken over the whole optimizer batch, micro-batches and ranks cannot
either.

Differences:
    1. Denominators count what arrived, before admission and rejection (frameworks differ).
    2. An empty response counts as a response and contributes nothing.
    3. `constant_length` always divides by the responses as well; one verl snapshot left that out.
    4. `token_mean` is over the whole batch, not over a micro-batch (TRL `bnpo`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.errors import BadInput, positive
from windage.estimators.member import declare


@runtime_checkable
class Aggregation(Protocol):
    """Trainable tokens of each response to the coefficient of each of them."""

    def __call__(
        self, lengths: Int[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
    ) -> Float[Tensor, "*batch P G"]: ...


def _share(present: Tensor, total: Tensor) -> Tensor:
    """1 / total for responses that are present; a total of 0 gives a finite number."""
    return present.to(torch.float64) / total.clamp(min=1)


def _responses(present: Tensor) -> Tensor:
    return present.sum((-2, -1), keepdim=True)


@declare("response", "lengths", "present")
def token_sum(
    lengths: Int[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> Float[Tensor, "*batch P G"]:
    """Sum over the tokens of a response, mean over the N responses.

        scale[p, g] = 1 / N

    Claims:
        With an unbiased advantage: the gradient itself.

    Example:
        >>> token_sum(torch.tensor([[1, 3]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    return _share(present, _responses(present))


@declare("response", "lengths", "present")
def sequence_mean(
    lengths: Int[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> Float[Tensor, "*batch P G"]:
    """Mean over the tokens of a response, mean over the N responses.

        scale[p, g] = 1 / (N T[p, g])

    Claims:
        Biased in direction wherever lengths vary; parallel to `token_sum` at equal lengths.

    Example:
        >>> sequence_mean(torch.tensor([[1, 4]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 0.1250]], dtype=torch.float64)

    References:
        Shao et al., 2024, arXiv:2402.03300.
    """
    return _share(present, _responses(present) * lengths.clamp(min=1))


@declare("response", "lengths", "present")
def constant_length(
    lengths: Int[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    *,
    length: float | None = None,
) -> Float[Tensor, "*batch P G"]:
    """Sum over tokens divided by one constant, mean over the N responses.

        scale[p, g] = 1 / (N length)

    Claims:
        `token_sum` divided by `length`, whatever the padding.

    Args:
        length: the longest response that the task allows, in tokens; never the padded width.

    Raises:
        ValueError: the length was not given, or is not above 0.

    Example:
        >>> constant_length(torch.tensor([[2, 3]]), torch.tensor([[True, True]]), length=8)
        tensor([[0.0625, 0.0625]], dtype=torch.float64)

    References:
        Liu et al., 2025, arXiv:2503.20783.
    """
    if length is None:
        raise BadInput("length is None; allowed: the task's longest response in tokens")
    positive(length=length)
    return token_sum(lengths, present) / length


@declare("batch", "lengths", "present")
def token_mean(
    lengths: Int[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> Float[Tensor, "*batch P G"]:
    """Mean over all tokens of the batch.

        scale[p, g] = 1 / sum(T[q, h] for all q, h)

    Claims:
        The denominator is random: biased by O(1 / N) in direction where lengths vary.
        The same for every split into micro-batches or ranks.

    Example:
        >>> token_mean(torch.tensor([[1, 3]]), torch.tensor([[True, True]]))
        tensor([[0.2500, 0.2500]], dtype=torch.float64)

    References:
        Yu et al., 2025, arXiv:2503.14476.
    """
    return _share(present, (lengths * present).sum((-2, -1), keepdim=True))


@declare("group", "lengths", "present")
def prompt_mean(
    lengths: Int[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> Float[Tensor, "*batch P G"]:
    """Mean over the tokens of a prompt's group, mean over the P prompts.

        scale[p, g] = 1 / (P sum(T[p, h] for h))

    Example:
        >>> prompt_mean(torch.tensor([[1, 3], [1, 1]]), torch.ones(2, 2, dtype=torch.bool))
        tensor([[0.1250, 0.1250],
                [0.2500, 0.2500]], dtype=torch.float64)

    References:
        Khatri et al., 2025, arXiv:2510.13786.
    """
    prompts = present.any(-1, keepdim=True).sum(-2, keepdim=True)
    return _share(present, prompts * (lengths * present).sum(-1, keepdim=True).clamp(min=1))
