"""Admission: which responses reach the update.  Members return True where a response is kept.

Differences:
    1. `zero_variance` looks at the outcomes before shaping; a length penalty cannot revive a group
       in which every answer is wrong.
    2. The lag of a response is that of its oldest trainable token when it is consumed, so time
       spent in a queue counts, and what several versions wrote is as old as its first part.
    3. A rejected sibling stays in the baseline and in the denominators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.errors import ordered, positive, within
from windage.estimators.member import declare


@runtime_checkable
class Admission(Protocol):
    """Fields of the batch to a mask of the responses kept."""

    def __call__(self, *fields: Tensor) -> Bool[Tensor, "*batch P G"]: ...


@declare("group", "outcomes", "present", refill=True)
def zero_variance(
    outcomes: Float[Tensor, "*batch P G"], present: Bool[Tensor, "*batch P G"]
) -> Bool[Tensor, "*batch P G"]:
    """Drop groups in which every outcome is the same; the sampler draws others in their place.

    Claims:
        With independent groups, equal weights and a centered advantage: only a rescaling, by
        1 / P(accept).

    Example:
        >>> zero_variance(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.ones(2, 2, dtype=bool))
        tensor([[False, False],
                [ True,  True]])

    References:
        Yu et al., 2025, arXiv:2503.14476.
    """
    low = torch.where(present, outcomes, torch.inf).amin(-1, keepdim=True)
    high = torch.where(present, outcomes, -torch.inf).amax(-1, keepdim=True)
    return present & (low < high)


@declare("group", "outcomes", "present", refill=True)
def difficulty_band(
    outcomes: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    *,
    low: float = 0.2,
    high: float = 0.8,
) -> Bool[Tensor, "*batch P G"]:
    """Keep groups that vary and whose mean outcome lies in a band.

    Claims:
        Changes the direction of the update across prompts.

    Raises:
        ValueError: low above high.

    Example:
        >>> difficulty_band(torch.tensor([[0.5, 0.5], [0.4, 0.6]]), torch.ones(2, 2, dtype=bool))
        tensor([[False, False],
                [ True,  True]])
    """
    ordered(low=low, high=high)
    count = present.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(present, outcomes, 0.0).sum(-1, keepdim=True) / count
    return zero_variance(outcomes, present) & (mean >= low) & (mean <= high)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Lag:
    """How old a response is when it is consumed, in updates; 0 where it has no trainable token.

    Args:
        oldest: of its oldest trainable token; in_flight + in_queue.
        in_flight: updates that arrived while it was written.
        in_queue: updates since its newest token.
        mean: over its trainable tokens.
    """

    oldest: Int[Tensor, "*batch P G"]
    in_flight: Int[Tensor, "*batch P G"]
    in_queue: Int[Tensor, "*batch P G"]
    mean: Float[Tensor, "*batch P G"]


def lag(
    versions: Int[Tensor, "*batch P G T"], mask: Bool[Tensor, "*batch P G T"], current_version: int
) -> Lag:
    """Lag of each response, counted when it is consumed.

    Args:
        versions: number of the weights that sampled each token.
        current_version: number of the weights when the response is consumed.

    Example:
        >>> found = lag(torch.tensor([[[3, 3, 5]]]), torch.ones(1, 1, 3, dtype=bool), 6)
        >>> [x.item() for x in (found.oldest, found.in_flight, found.in_queue)]
        [3, 2, 1]
    """
    behind = torch.nn.functional.pad(current_version - versions, (0, 1))
    real = torch.nn.functional.pad(mask, (0, 1))
    empty = ~mask.any(-1)
    oldest = behind.masked_fill(~real, torch.iinfo(behind.dtype).min).amax(-1)
    newest = behind.masked_fill(~real, torch.iinfo(behind.dtype).max).amin(-1)
    oldest, newest = oldest.masked_fill(empty, 0), newest.masked_fill(empty, 0)
    total = behind.masked_fill(~real, 0).sum(-1).to(torch.float64)
    return Lag(
        oldest=oldest,
        in_flight=oldest - newest,
        in_queue=newest,
        mean=total / mask.sum(-1).clamp(min=1),
    )


@declare("response", "versions", "mask", "current_version")
def staleness_cap(
    versions: Int[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    current_version: int,
    *,
    max_lag: int = 8,
) -> Bool[Tensor, "*batch P G"]:
    """Keep responses whose oldest trainable token is at most `max_lag` versions old.

        keep[p, g] = current_version - min(versions[p, g, t]) <= max_lag

    Claims:
        Harmless only if lag is independent of the response; length makes it depend.

    Args:
        versions: number of the weights that sampled each token.
        current_version: number of the weights when the response is consumed.
        max_lag: updates.

    Raises:
        ValueError: a max_lag below 0.

    Example:
        >>> staleness_cap(torch.tensor([[[3, 5, 5]]]), torch.ones(1, 1, 3, dtype=bool), 6,
        ...               max_lag=2)
        tensor([[False]])
    """
    within(0, math.inf, max_lag=max_lag)
    return lag(versions, mask, current_version).oldest <= max_lag


@declare("response", "truncated")
def overlong(truncated: Bool[Tensor, "*batch P G"]) -> Bool[Tensor, "*batch P G"]:
    """Drop responses that the engine cut at a limit, by its finish reason.

    Claims:
        Selection on the response: biased, with drift even under constant reward.

    Example:
        >>> overlong(torch.tensor([[True, False]]))
        tensor([[False,  True]])
    """
    return ~truncated


@declare("response", "elapsed")
def time_out(
    elapsed: Float[Tensor, "*batch P G"], *, limit: float = 600.0
) -> Bool[Tensor, "*batch P G"]:
    """Drop responses that took longer than a limit in seconds.

    Claims:
        Selection on the response, as `overlong`.

    Raises:
        ValueError: a limit not above 0.

    Example:
        >>> time_out(torch.tensor([[10.0, 900.0]]))
        tensor([[ True, False]])
    """
    positive(limit=limit)
    return elapsed <= limit


@declare("response", "log_ratio", "mask")
def veto(
    log_ratio: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    low: float = 1e-4,
) -> Bool[Tensor, "*batch P G"]:
    """Drop a response if any of its tokens has a ratio below `low`.

    Claims:
        Bias is exactly minus the dropped mass.

    Raises:
        ValueError: low below 0.

    Example:
        >>> veto(torch.tensor([[[-10.0, 0.0]]]), torch.ones(1, 1, 2, dtype=bool))
        tensor([[False]])
    """
    within(0, math.inf, low=low)
    return ~(mask & (log_ratio.exp() < low)).any(-1)
