"""The distribution that a token is drawn from, and the draw."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import promote
from windage.llm.samplers.protocol import Sampling

# Mass this close to 1 - top_p counts as equal to it.
ROUNDING = 1e-9


def behavior(logits: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """Log-probabilities of what is drawn: temperature, then top-k, then top-p of the rest.

    Ties go to the lower id. At temperature 0 all mass is on the likeliest token.

    Returns:
        In float32 or wider, -inf on tokens that cannot occur.

    Example:
        >>> z = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> behavior(z, Sampling(top_k=2)).exp()
        tensor([[0.6250, 0.3750, 0.0000]])
        >>> behavior(z, Sampling(temperature=0)).exp()
        tensor([[1., 0., 0.]])
    """
    logits = promote(logits)
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        certain = torch.full_like(logits, -math.inf).scatter(1, likeliest, 0.0)
        usable = logits.amax(-1, keepdim=True).isfinite()
        return certain.masked_fill(~usable, math.nan)
    z = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < z.shape[1]:
        z = z.masked_fill(_beyond_k(z, sampling.top_k), -math.inf)
    if sampling.top_p < 1:
        z = z.masked_fill(_beyond_p(z, sampling.top_p), -math.inf)
    return z.log_softmax(-1)


def _beyond_k(z: Tensor, k: int) -> Tensor:
    """All but the k likeliest."""
    last = z.topk(k, dim=-1).values[:, -1:]
    tied = z == last
    room = k - (z > last).sum(-1, keepdim=True)
    return (z < last) | (tied & (tied.cumsum(-1) > room))


def _beyond_p(z: Tensor, p: float) -> Tensor:
    """All after the one with which the likeliest reach mass p."""
    order = z.sort(dim=-1, descending=True, stable=True).indices
    mass = z.double().softmax(-1).gather(-1, order)
    from_here = mass.flip(-1).cumsum(-1).flip(-1)
    beyond = from_here <= (1 - p) * (1 + ROUNDING)
    beyond[:, 0] = False
    return torch.zeros_like(beyond).scatter(-1, order, beyond)


def draw(logp: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """The token of each row at which the cumulative probability exceeds a uniform number.

    Args:
        logp: of the tokens, in nats.
        uniform: from 0 up to 1, float64.

    Returns:
        -1 where the row is not a distribution.
    """
    reached = logp.double().exp().cumsum(-1)
    total = reached[:, -1:]
    aim = torch.minimum(uniform.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    found = torch.searchsorted(reached, aim, right=True).clamp(max=logp.shape[1] - 1)
    usable = total.isfinite() & (total > 0)
    return torch.where(usable, found, -1).squeeze(1)


def head(logp: Float[Tensor, "R V"], count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row and their log-probabilities, best first.

    Returns:
        Ids and log-probabilities `[R count]`; -1 and -inf where fewer can occur.
    """
    best = logp.topk(min(count, logp.shape[1]), dim=-1)
    short = count - best.values.shape[1]
    values = torch.nn.functional.pad(best.values, (0, short), value=-math.inf)
    ids = torch.nn.functional.pad(best.indices, (0, short), value=-1)
    return torch.where(values == -math.inf, -1, ids), values
