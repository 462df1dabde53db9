"""Reaches of the second tier: ratios relative to a mean over responses, and the farthest token.

A ratio divided by a mean over siblings is exp(e) with e = x - log mean exp(x), so that the maps of
`correction` follow as usual.

Differences:
    1. A response without trainable tokens has no ratio: it enters no mean.
    2. The mean is over responses (or tokens) of the group or of the whole batch; slime and verl
       normalize a micro-batch or a rank where they do not gather first.
    3. The cap bounds the ratio before the mean is taken, so a weight may exceed it afterwards.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.errors import positive
from windage.estimators.member import declare

GROUP, BATCH = (-2, -1), (-3, -2, -1)


@declare("group")
def over_group(
    log_ratio: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    cap: float = math.inf,
) -> Float[Tensor, "*batch P G T"]:
    """Of the whole response, relative to the mean over the responses of its prompt.

        e[p, g] = x[p, g] - log(mean(exp(x[p, h]) for all h)),   x = min(sum of tokens, log cap)

    Claims:
        The mean over the group of exp(e) is 1; a group of one is not corrected at all.

    Args:
        cap: an absolute ratio, before the mean; infinite for none.

    Raises:
        ValueError: the cap is not above 0.

    Example:
        >>> e = over_group(torch.tensor([[[3.0]], [[1.0]]]).log().view(1, 2, 1),
        ...                torch.ones(1, 2, 1, dtype=torch.bool))
        >>> e.exp().flatten()
        tensor([1.5000, 0.5000])

    References:
        Owen, 2013, Monte Carlo theory, methods and examples, chapter 9.
    """
    return _relative(*_summed(log_ratio, mask, cap), GROUP).expand_as(log_ratio)


@declare("batch")
def over_batch(
    log_ratio: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    cap: float = math.inf,
) -> Float[Tensor, "*batch P G T"]:
    """Of the whole response, relative to the mean over all responses of the batch.

        e[p, g] = x[p, g] - log(mean(exp(x[q, h]) for all q, h)),   x as in `over_group`

    Args:
        cap: an absolute ratio, before the mean; infinite for none.

    Raises:
        ValueError: the cap is not above 0.

    Example:
        >>> e = over_batch(torch.tensor([3.0, 1.0]).log().view(2, 1, 1),
        ...                torch.ones(2, 1, 1, dtype=torch.bool))
        >>> e.exp().flatten()
        tensor([1.5000, 0.5000])
    """
    return _relative(*_summed(log_ratio, mask, cap), BATCH).expand_as(log_ratio)


@declare("batch")
def token_over_batch(
    log_ratio: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    cap: float = math.inf,
) -> Float[Tensor, "*batch P G T"]:
    """The token's own, relative to the mean over all tokens of the batch.

        e[p, g, t] = x[p, g, t] - log(mean(exp(x) over all tokens)),   x = min(x, log cap)

    Args:
        cap: an absolute ratio, before the mean; infinite for none.

    Raises:
        ValueError: the cap is not above 0.

    Example:
        >>> e = token_over_batch(torch.tensor([9.0, 1.0]).log().view(1, 1, 2),
        ...                      torch.ones(1, 1, 2, dtype=torch.bool), cap=3.0)
        >>> e.exp().flatten()
        tensor([1.5000, 0.5000])
    """
    positive(cap=cap)
    return _relative(log_ratio.clamp(max=math.log(cap)), mask, BATCH)


@declare("response")
def farthest(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """The log-ratio of largest size in the response, of equal ones the positive.

        e[t] = x[u] with u = argmax |x[u]|

    Example:
        >>> farthest(torch.tensor([0.5, -0.75]), torch.tensor([True, True]))
        tensor([-0.7500, -0.7500])
    """
    low, high = log_ratio.amin(-1, keepdim=True), log_ratio.amax(-1, keepdim=True)
    return torch.where(high >= -low, high, low).expand_as(log_ratio)


def _summed(log_ratio: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Capped log-ratio of each response, and whether it has tokens; the token axis is kept."""
    positive(cap=cap)
    return log_ratio.sum(-1, keepdim=True).clamp(max=math.log(cap)), mask.any(-1, keepdim=True)


def _relative(x: Tensor, counted: Tensor, over: tuple[int, ...]) -> Tensor:
    """Log of exp(x) over the mean of it, among what is counted; 0 elsewhere."""
    count = counted.sum(over, keepdim=True).clamp(min=1).to(x.dtype)
    known = torch.where(counted, x, -math.inf)
    total = torch.logsumexp(known, over, keepdim=True) - count.log()
    return torch.where(counted, x - total, 0.0)
