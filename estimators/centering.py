"""Score centering: subtract at each prefix the mean weighted score under the sampler.

    w_y s_y - sum over v of q_v w_v s_v        q the sampler, p the trainer, w = map(log p - log q)

Its mean under q is zero, so rewards that do not depend on the token move nothing.  Members return
the coefficients `[P G T K]` of the scores of the head tokens that are to be subtracted; they are
multiplied by the advantage and the aggregation of the response.  Exact only with token reach: the
weight of a head token must not depend on the rest of the response.

Differences:
    1. The published term with top-k and a rescaled tail; head and own coefficients share advantage
       and aggregation (one digest of the paper displays the sum without the advantage).
    2. Reaches other than token are refused (miles refuses them, SkyRL composes anyway).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.errors import positive
from windage.estimators.member import declare

Weigh = Callable[[Tensor], Tensor]
FLOOR = 1e-6


@runtime_checkable
class Centering(Protocol):
    """Head log-probabilities and a weight function to coefficients of the head's scores."""

    def __call__(
        self,
        head_logp: Float[Tensor, "*batch K"],
        head_behavior_logp: Float[Tensor, "*batch K"],
        weigh: Weigh,
    ) -> Float[Tensor, "*batch K"]: ...


def head_ratio(
    head_logp: Float[Tensor, "*batch K"], head_behavior_logp: Float[Tensor, "*batch K"]
) -> Float[Tensor, "*batch K"]:
    """Log p - log q of head tokens; 0 where the sampler never draws the token.

    Example:
        >>> head_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -torch.inf]))
        tensor([0.5000, 0.0000])
    """
    seen = head_behavior_logp.exp() > 0
    return torch.where(seen, head_logp - torch.where(seen, head_behavior_logp, 0.0), 0.0)


@declare("token", "head_logp", "head_behavior_logp")
def exact(
    head_logp: Float[Tensor, "*batch K"],
    head_behavior_logp: Float[Tensor, "*batch K"],
    weigh: Weigh,
) -> Float[Tensor, "*batch K"]:
    """Sum over the whole vocabulary (or the sampler's whole support).

        c[v] = q[v] w[v]

    Claims:
        Zero drift for any own-token weight; no change on-policy or for the untruncated ratio.

    Args:
        head_logp: trainer's log-probability of every token.
        head_behavior_logp: sampler's, -inf where it never draws the token.
        weigh: log-ratios to weights.

    Example:
        >>> q = torch.tensor([0.5, 0.5])
        >>> exact(q.log(), q.log(), torch.ones_like)
        tensor([0.5000, 0.5000])

    References:
        Marek and Ryabinin, 2026, arXiv:2609.20807.
    """
    return head_behavior_logp.exp() * weigh(head_ratio(head_logp, head_behavior_logp))


def likeliest(head_behavior_logp: Float[Tensor, "*batch K"], k: int) -> Bool[Tensor, "*batch K"]:
    """The sampler's k likeliest tokens of a head; ties go to the earlier.

    Example:
        >>> likeliest(torch.tensor([0.2, 0.5, 0.3]).log(), 2)
        tensor([False,  True,  True])
    """
    order = head_behavior_logp.argsort(dim=-1, descending=True, stable=True)
    nothing = torch.zeros_like(order, dtype=torch.bool)
    return nothing.scatter(-1, order[..., :k], True)


@declare("token", "head_logp", "head_behavior_logp")
def top_k(
    head_logp: Float[Tensor, "*batch K"],
    head_behavior_logp: Float[Tensor, "*batch K"],
    weigh: Weigh,
    *,
    k: int | None = None,
) -> Float[Tensor, "*batch K"]:
    """Sum over the recorded head; the tail is the trainer's, rescaled to the sampler's mass.

        c[v] = q[v] w[v] - alpha p[v],   alpha = rho w(1 / rho),   rho = (1 - Q) / (1 - P)

    with Q and P the masses of the head under sampler and trainer; uses sum of p s = 0.

    Claims:
        Exact if the sampler's tail is proportional to the trainer's, or the head is the whole
        vocabulary but one token.

    Args:
        head_logp: trainer's full-vocabulary log-probability of the head tokens.
        head_behavior_logp: sampler's, of the same tokens.
        weigh: log-ratios to weights.
        k: tokens of the head that are used, the sampler's likeliest; None: all that was recorded.

    Raises:
        ValueError: k is not above 0.

    Example:
        >>> q, p = torch.tensor([0.6, 0.2]), torch.tensor([0.5, 0.3])
        >>> top_k(p.log(), q.log(), torch.ones_like)
        tensor([ 0.1000, -0.1000])

    References:
        Marek and Ryabinin, 2026, arXiv:2609.20807.
    """
    head = exact(head_logp, head_behavior_logp, weigh)
    p, q = head_logp.exp(), head_behavior_logp.exp()
    if k is not None:
        positive(k=k)
        used = likeliest(head_behavior_logp, k)
        head, p, q = (torch.where(used, x, 0.0) for x in (head, p, q))
    rest = (1 - torch.stack([q.sum(-1, keepdim=True), p.sum(-1, keepdim=True)])).clamp(min=FLOOR)
    log_rho = rest[0].log() - rest[1].log()
    return head - log_rho.exp() * weigh(-log_rho) * p
