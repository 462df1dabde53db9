"""Updates by the logits of each token: inner products, norms and what different data agree on.

An estimator is only a coefficient: the update by the logits before token t is

    d_t = C_t (e_y - pi) + sum over head tokens v of H_tv (e_v - pi)

so inner products of two recipes' updates need their coefficients, log pi of sampled and head tokens
and sum(pi^2), nothing else:  <d, d'> = <a, a'> - m' <a, pi> - m <a', pi> + m m' sum(pi^2)  with
a = C e_y + H and m its sum.  Without a head that is C C' (1 - 2 pi(y) + sum(pi^2)).

Differences:
    1. Logits of different tokens are told apart, so a cosine here is that of the parameters'
       gradients only where those do not mix tokens; it is exact for the logits themselves.
    2. `signal_to_noise` takes tokens of one kind together: the halves are the groups of even and of
       odd number, and a coordinate is the sum of d_t[y] over the tokens y of one id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Coefficients


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """What the policy says at each trainable token.

    Args:
        probability: of the sampled token.
        square: sum of squared probabilities.
        ids: the sampled tokens, numbered from 0; None: not known.
        half: whether the group's number is even.
        head_probability: of the head tokens; None: no head.
        sampled: where a head token is the sampled one.
    """

    probability: Float[Tensor, " N"]
    square: Float[Tensor, " N"]
    ids: Int[Tensor, " N"] | None
    half: Bool[Tensor, " N"]
    head_probability: Float[Tensor, "N K"] | None
    sampled: Bool[Tensor, "N K"] | None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Direction:
    """An update by the logits of each token, divided by `scale`.

    Args:
        own, head: coefficients.
        at_sampled: of the sampled token where it is in the head.
        mass: sum of own and head.
        seen: <a, pi>.
        scale: largest coefficient.
    """

    own: Float[Tensor, " N"]
    head: Float[Tensor, "N K"] | None
    at_sampled: Float[Tensor, " N"]
    mass: Float[Tensor, " N"]
    seen: Float[Tensor, " N"]
    scale: float


def space(batch: Batch, ids: Int[Tensor, "P G T"] | None) -> Space:
    """The geometry that all recipes of a batch share.

    Raises:
        ValueError: the batch has a head and the sampled tokens are not known.
    """
    mask = batch.mask
    groups = torch.arange(mask.shape[0], device=mask.device).view(-1, 1, 1).expand_as(mask)
    head, sampled = None, None
    if batch.head_logp is not None:
        if ids is None:
            raise ValueError("a head of tokens needs the ids of the sampled tokens as well")
        head = batch.head_logp[mask].double().exp()
        sampled = batch.get("head_ids")[mask] == ids[mask].unsqueeze(-1)
    return Space(
        probability=batch.get("logp")[mask].double().exp(),
        square=batch.get("probability_square")[mask].double(),
        ids=None if ids is None else torch.unique(ids[mask], return_inverse=True)[1],
        half=groups[mask] % 2 == 0,
        head_probability=head,
        sampled=sampled,
    )


def direction(made: Coefficients, batch: Batch, at: Space) -> Direction:
    """The update that coefficients make by the logits."""
    own = made.own[batch.mask].double()
    head = None if made.head is None else made.head[batch.mask].double()
    scale = own.abs().amax() if len(own) else own.new_zeros(())
    if head is not None and head.numel():
        scale = torch.maximum(scale, head.abs().amax())
    size = torch.where(scale > 0, scale, 1.0)
    own = own / size
    if head is None:
        return Direction(
            own=own,
            head=None,
            at_sampled=torch.zeros_like(own),
            mass=own,
            seen=own * at.probability,
            scale=float(scale),
        )
    assert at.head_probability is not None and at.sampled is not None
    head = head / size
    return Direction(
        own=own,
        head=head,
        at_sampled=torch.where(at.sampled, head, 0.0).sum(-1),
        mass=own + head.sum(-1),
        seen=own * at.probability + (head * at.head_probability).sum(-1),
        scale=float(scale),
    )


def inner(a: Direction, b: Direction, at: Space) -> Float[Tensor, ""]:
    """Inner product of two updates by the logits of all tokens, each divided by its scale."""
    product = a.own * b.own + a.own * b.at_sampled + b.own * a.at_sampled
    if a.head is not None and b.head is not None:
        product = product + (a.head * b.head).sum(-1)
    product = product - b.mass * a.seen - a.mass * b.seen + a.mass * b.mass * at.square
    return product.sum()


def signal_to_noise(a: Direction, at: Space) -> float | None:
    """How much the updates of alternate groups agree, beside how much they differ.

    Returns:
        None without ids, or where the halves do not differ.
    """
    if at.ids is None or not len(at.ids):
        return None
    here = a.own + a.at_sampled - a.mass * at.probability
    halves = here.new_zeros((2, int(at.ids.max()) + 1))
    for number, chosen in enumerate((at.half, ~at.half)):
        halves[number].index_add_(0, at.ids[chosen], here[chosen])
    signal = float(halves[0] @ halves[1])
    noise = float(halves.square().sum() / 2) - signal
    return signal / noise if noise > 1e-12 * float(halves.square().sum()) else None


def gram(own: Float[Tensor, "E N"], norms: Float[Tensor, " N"]) -> Float[Tensor, "E E"]:
    """Inner products of updates without a head, of all pairs at once.

        <d, d'> = sum(C C' |e_y - pi|^2)

    Claims:
        Equals `inner` of each pair where norms are 1 - 2 pi(y) + sum(pi^2).

    Args:
        own: coefficients of the sampled tokens, a row a recipe.
        norms: squared norm of each token's score by the logits.

    Example:
        >>> gram(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([0.5, 1.0]))
        tensor([[0.5000, 0.5000],
                [0.5000, 4.5000]])
    """
    return (own * norms) @ own.T


def score_bounds(
    logp: Float[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Between which the squared norm of a score lies, where sum(pi^2) is not known.

        (1 - pi(y))^2 <= |e_y - pi|^2 <= 2 (1 - pi(y))^2

    The other tokens hold 1 - pi(y) between them: spread thin, or on one of them.

    Example:
        >>> score_bounds(torch.tensor([0.5]).log())
        (tensor([0.2500]), tensor([0.5000]))
    """
    rest = (-torch.expm1(logp)).square()
    return rest, 2 * rest
