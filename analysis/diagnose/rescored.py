"""Shares of a mismatch by cause, from a sample rescored under the policies in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.attribution import MEASURES, averaged, every_order, extremes, shares
from windage.estimators.errors import BadInput

# Undone first, in this order.
FIRST = ("engine", "support")
ALL = "all"
BY_RESPONSE = ("chi_square_response",)


def parts(
    *,
    recorded: Float[Tensor, "R T"],
    repeated: Float[Tensor, "R T"],
    policies: Float[Tensor, "L R T"],
    mask: Bool[Tensor, "R T"],
    causes: Sequence[str],
) -> list[dict[str, Any]]:
    """Each cause's part and share of each measure, with errors and with extremes over orders.

    Args:
        recorded: log-probabilities by the sampler.
        repeated: the same with the engine undone.
        policies: with top-k and top-p undone as well, and every subset of `causes`.
        mask: tokens that the policy chose.
        causes: undone in all orders.

    Returns:
        A row a measure and cause: `value` (a token; of `BY_RESPONSE` a response), its `error` with
        responses independent, `least` and `most` among all orders, `share` of the whole, its error.
        None: not finite, or without meaning.  The cause `all` is the whole.

    Raises:
        BadInput: fewer than two responses.
    """
    if len(mask) < 2:
        raise BadInput(f"{len(mask)} responses were rescored; allowed: two or more")
    found = []
    for name, measure in MEASURES.items():
        first = shares(torch.stack([recorded, repeated, policies[0]]), mask, measure)
        rest = every_order(policies, mask, measure, since=recorded)
        each = torch.cat([first, rest])
        whole = each.sum(0)
        size = torch.ones_like(whole) if name in BY_RESPONSE else mask.sum(1).to(whole)
        value, error = averaged(torch.cat([each, whole.unsqueeze(0)]), size)
        share, share_error = averaged(each, whole)
        scale = len(mask) / size.sum()
        low, high = (end * scale for end in extremes(policies, mask, measure, since=recorded))
        least = torch.cat([value[: len(FIRST)], low, value[-1:]])
        most = torch.cat([value[: len(FIRST)], high, value[-1:]])
        for i, cause in enumerate((*FIRST, *causes, ALL)):
            found.append(
                {
                    "cause": cause,
                    "measure": name,
                    "unit": "response" if name in BY_RESPONSE else "token",
                    "value": _finite(value[i]),
                    "error": _finite(error[i]),
                    "least": _finite(least[i]),
                    "most": _finite(most[i]),
                    "share": None if cause == ALL else _finite(share[i]),
                    "share_error": None if cause == ALL else _finite(share_error[i].abs()),
                }
            )
    return found


def gap(one: Float[Tensor, "R T"], other: Float[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> float:
    """Mean distance of two log-probabilities of a token."""
    return float((one - other).abs()[mask].mean())


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
