"""Log-probabilities of tokens without a table of tokens times vocabulary.

    z = softcap(scale (h W' + b)) / temperature         log p = z - logsumexp(z)

One pass over pieces of the logits keeps four numbers a token (greatest logit, and sums of exp(z),
z exp(z) and exp(2 z) relative to it) and what was asked for; the backward pass computes each piece
again.  Memory grows with the tokens and with the vocabulary, never with their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from windage.estimators.batch import promote
from windage.estimators.errors import positive

TOKENS, VOCABULARY = 256, 8192


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LogProbs:
    """What a trainer needs of each token's distribution, all differentiable.

    Args:
        logp: of the target, in nats.
        entropy: -sum of p log p, in nats.
        probability_square: sum of p^2.
        head_logp: of the head tokens, -inf where there is none.
    """

    logp: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]
    probability_square: Float[Tensor, " N"]
    head_logp: Float[Tensor, "N K"] | None


@final
@dataclass(frozen=True, kw_only=True)
class Logits:
    """How logits are made of hidden states, and in what pieces.

    Args:
        temperature: divides the logits last, as a sampler does.
        scale: multiplies the product first.
        softcap: bounds the scaled logits smoothly, c tanh(z / c); None: no bound.
        tokens, vocabulary: size of a piece.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY

    def piece(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits of some tokens for some of the vocabulary."""
        z = hidden @ weight.T
        if bias is not None:
            z += bias
        z *= self.scale
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature)

    def pull(self, gradient: Tensor, z: Tensor) -> Tensor:
        """The gradient by h W' + b from that by the logits, in place."""
        if self.softcap is not None:
            gradient *= 1 - (z * (self.temperature / self.softcap)).square_()
        return gradient.mul_(self.scale / self.temperature)


def log_probs(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    head_ids: Int[Tensor, "N K"] | None = None,
    *,
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
) -> LogProbs:
    """Log-probability, entropy, sum of squares and head log-probabilities of each token.

    Claims:
        Values and gradients of log_softmax; those of half-precision input in float32.
        Peak memory beside input and output: some pieces of `tokens` times `vocabulary`.

    Args:
        hidden: last hidden state before each token.
        weight: output matrix, tied to the embedding or not.
        targets: the sampled tokens.
        head_ids: tokens whose log-probabilities are wanted besides; below 0: none.
        bias: of the output layer.
        temperature: that of the sampler, so that both speak of one distribution.
        scale, softcap: of models that have them.
        tokens, vocabulary: size of a piece of the logits; larger ones serve an accelerator better.

    Returns:
        In float32 or wider.  An id that is not in the vocabulary gives NaN.

    Raises:
        BadInput: a temperature, scale, softcap or size that is not above 0.

    Example:
        >>> found = log_probs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3]))
        >>> found.logp, found.entropy, found.probability_square
        (tensor([-1.3863]), tensor([1.3863]), tensor([0.2500]))
    """
    positive(temperature=temperature, scale=scale, tokens=tokens, vocabulary=vocabulary)
    positive(**({} if softcap is None else {"softcap": softcap}))
    logits = Logits(
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        tokens=tokens,
        vocabulary=vocabulary,
    )
    ids = targets.new_empty((len(targets), 0)) if head_ids is None else head_ids
    logp, entropy, square, head = _Pass.apply(hidden, weight, bias, targets, ids, logits)
    return LogProbs(
        logp=logp,
        entropy=entropy,
        probability_square=square,
        head_logp=None if head_ids is None else head,
    )


def _spans(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _local(ids: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Places of ids inside a span of the vocabulary, and which are there."""
    local = ids - span.start
    inside = (local >= 0) & (local < span.stop - span.start)
    return torch.where(inside, local, 0), inside


class _Sums:
    """Running sums over the vocabulary, relative to the greatest logit so far."""

    def __init__(self, like: Tensor) -> None:
        self.greatest = torch.full_like(like, -math.inf)
        self.mass, self.weighted, self.square = (torch.zeros_like(like) for _ in range(3))

    def add(self, where: slice, z: Tensor) -> None:
        """Take a piece of logits, which is overwritten."""
        before, mass = self.greatest[where], self.mass[where]
        now = torch.maximum(before, z.amax(1))
        shift = torch.where(mass > 0, before - now, 0.0)
        old = shift.exp()
        z -= now.unsqueeze(1)
        e = z.exp()
        self.weighted[where] = old * (self.weighted[where] + shift * mass) + _dots(e, z)
        self.mass[where] = old * mass + e.sum(1)
        self.square[where] = old.square() * self.square[where] + _dots(e, e)
        self.greatest[where] = now

    @property
    def entropy(self) -> Tensor:
        """Of the whole vocabulary."""
        return self.mass.log() - self.weighted / self.mass

    @property
    def probability_square(self) -> Tensor:
        """Of the whole vocabulary."""
        return self.square / self.mass.square()


class _Law(NamedTuple):
    """What is kept of each token's distribution; the greatest logit stands apart for precision."""

    greatest: Tensor
    log_mass: Tensor
    entropy: Tensor
    square: Tensor

    def logp(self, z: Tensor) -> Tensor:
        """Log-probabilities of logits, a row a token."""
        return (z - self.greatest.unsqueeze(1)).sub_(self.log_mass.unsqueeze(1))

    def select(self, rows: slice) -> _Law:
        """That of some tokens."""
        return _Law(*(value[rows] for value in self))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Products summed over rows, without a table of them."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


class _Pass(torch.autograd.Function):
    """The pass and its gradient, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head_ids: Tensor,
        logits: Logits,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = promote(hidden[:0]).dtype
        chosen = torch.full_like(targets, math.nan, dtype=exact)
        head = torch.full_like(head_ids, math.nan, dtype=exact)
        sums = _Sums(chosen)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _spans(len(weight), logits.vocabulary):
                w = weight[columns].to(exact)
                b = None if bias is None else bias[columns].to(exact)
                for rows in _spans(len(hidden), logits.tokens):
                    z = logits.piece(hidden[rows].to(exact), w, b)
                    for ids, out in ((targets.unsqueeze(1), chosen.unsqueeze(1)), (head_ids, head)):
                        local, inside = _local(ids[rows], columns)
                        out[rows] = torch.where(inside, z.gather(1, local), out[rows])
                    sums.add(rows, z)
        law = _Law(sums.greatest, sums.mass.log(), sums.entropy, sums.probability_square)
        ctx.save_for_backward(hidden, weight, bias, targets, head_ids, *law)
        ctx.logits = logits
        ctx.set_materialize_grads(False)
        head = torch.where(head_ids < 0, -math.inf, law.logp(head))
        # no view: FSDP puts a hook on what a policy returns
        return chosen.sub_(law.greatest).sub_(law.log_mass), law.entropy, law.square, head

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_logp: Tensor | None,
        by_entropy: Tensor | None,
        by_square: Tensor | None,
        by_head: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, head_ids, *saved = ctx.saved_tensors
        law = _Law(*saved)
        needs, logits, exact = ctx.needs_input_grad, ctx.logits, law.entropy.dtype
        by_hidden = torch.zeros_like(hidden, dtype=exact) if needs[0] else None
        by_weight = torch.empty_like(weight) if needs[1] else None
        by_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
        asked = _Asked(by_logp, by_entropy, by_square, by_head, targets, head_ids)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _spans(len(weight), logits.vocabulary):
                w = weight[columns].to(exact)
                b = None if bias is None else bias[columns].to(exact)
                sum_w, sum_b = torch.zeros_like(w), w.new_zeros(len(w))
                for rows in _spans(len(hidden), logits.tokens):
                    h = hidden[rows].to(exact)
                    z = logits.piece(h, w, b)
                    gradient = logits.pull(asked.by_logits(z, law, rows, columns), z)
                    if by_hidden is not None:
                        by_hidden[rows] += gradient @ w
                    if by_weight is not None:
                        sum_w += gradient.T @ h
                    if by_bias is not None:
                        sum_b += gradient.sum(0)
                if by_weight is not None:
                    by_weight[columns] = sum_w.to(weight.dtype)
                if by_bias is not None:
                    by_bias[columns] = sum_b.to(by_bias.dtype)
        found = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return found, by_weight, by_bias, None, None, None


class _Asked:
    """Gradients by the outputs, and what they are by a piece of the logits.

    by z[v] = p[v] (-sum of g - g_entropy (log p[v] + entropy) + 2 g_square (p[v] - sum of p^2))
              + g of the target and of head tokens where v is that token
    """

    def __init__(
        self,
        by_logp: Tensor | None,
        by_entropy: Tensor | None,
        by_square: Tensor | None,
        by_head: Tensor | None,
        targets: Tensor,
        head_ids: Tensor,
    ) -> None:
        self.entropy, self.square = by_entropy, by_square
        self.picked: list[tuple[Tensor, Tensor]] = []
        if by_logp is not None:
            self.picked.append((targets.unsqueeze(1), by_logp.unsqueeze(1)))
        if by_head is not None:
            self.picked.append((head_ids, torch.where(head_ids < 0, 0.0, by_head)))

    def by_logits(self, z: Tensor, law: _Law, rows: slice, columns: slice) -> Tensor:
        """Gradient by a piece of the logits."""
        here = law.select(rows)
        logp = here.logp(z)
        p = logp.exp()
        factor = torch.zeros_like(here.entropy)
        for _, gradient in self.picked:
            factor -= gradient[rows].sum(1)
        out = p * factor.unsqueeze(1)
        if self.entropy is not None:
            out -= (
                logp.add_(here.entropy.unsqueeze(1)).mul_(p).mul_(self.entropy[rows].unsqueeze(1))
            )
        if self.square is not None:
            out += (p - here.square.unsqueeze(1)).mul_(p).mul_(2 * self.square[rows].unsqueeze(1))
        for ids, gradient in self.picked:
            local, inside = _local(ids[rows], columns)
            out.scatter_add_(1, local, torch.where(inside, gradient[rows], 0.0))
        return out
