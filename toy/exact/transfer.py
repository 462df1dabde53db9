"""Moments at real lengths, by recursion over the states of an automaton (E5).

The same logits serve at every time, so contributions of different times add up in one block a
state.  A stretch of tokens from state i to state j has, under a kernel nu(s, v) (the sampler, or
the sampler times a power of the ratio) with weighted scores z(s, v), a mass m, a mean u of the
summed scores, and a mean q of its squared norm.  One stretch after another is

    m(i, k) = sum over j of m1(i, j) m2(j, k)
    u(i, k) = sum over j of u1(i, j) m2(j, k) + m1(i, j) u2(j, k)
    q(i, k) = sum over j of q1(i, j) m2(j, k) + 2 u1(i, j) . u2(j, k) + m1(i, j) q2(j, k)

so that stretches of 2, 4, 8, ... tokens come by squaring, and T tokens in the logarithm of T steps.
Responses that end after t more tokens count with a factor f(t); with t = k B + b

    sum over t of f(t) P^t  =  sum over k of (sum over b of f(k B + b) P^b) P^(k B)

The product of ratios over a response is a kernel: nu = mu rho for the mean, mu rho^2 for the norm.
A ratio of a prefix or a suffix changes the kernel at the token whose score it weighs (`Passage`).
A kernel may be complex, such as mu e^{i w x}: norms are sums of squares, not of absolute squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from windage.toy.chains import Chain
from windage.toy.objective import Objective, objective

# Logarithm of the growth over a response up to which powers of a kernel are left as they are.
SAFE = 600.0
Then = Callable[[Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """Kernels that change at the tokens whose scores are counted: weights w of a prefix or suffix.

    The mean counts one token, with `between` before it and `after` behind it; the squared norm one
    token twice or two tokens, with the steps' own kernel before the first.  For w = product of rho
    over the prefix the three kernels are mu rho^2, mu rho and mu.

    Args:
        between: kernel between two counted tokens, or before the only one of the mean.
        after: kernel behind the last counted token.
        first, second: measure of the first and of the second of two tokens, or the only one's.
        both: measure of a token that is counted twice.
    """

    between: Float[Tensor, "*batch S V"]
    after: Float[Tensor, "*batch S V"]
    first: Float[Tensor, "*batch S V"]
    second: Float[Tensor, "*batch S V"]
    both: Float[Tensor, "*batch S V"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """What a token at each state does to the recursion.

    Args:
        kernel: measure of each token at each state.
        score: weighted, maybe centered, score of the token by the logits of its own state.
        factor: f(t) of a response of t + 1 tokens; may have axes before those of the kernel.
        passage: kernels behind a counted token where they differ from the one before it.
    """

    kernel: Inexact[Tensor, "*batch S V"]
    score: Float[Tensor, "*batch S V V"]
    factor: Inexact[Tensor, "*other T"]
    passage: Passage | None = None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ended:
    """Sums over responses by how they ended: stopped at each state, then cut at each state.

    Args:
        mass: kernel measure, times f.
        mean: of the contribution, times f; blocks by state.
        norm: of its squared norm, times f.
    """

    mass: Inexact[Tensor, "*batch C"]
    mean: Inexact[Tensor, "*batch C S V"]
    norm: Inexact[Tensor, "*batch C"]


def transfer(steps: Steps, successor: Int[Tensor, "S V"], start: int) -> Ended:
    """Sums over all responses from `start` that end by the horizon, the length of the factor.

    A kernel whose powers might leave float64 before the end is divided by its growth a token.
    """
    then = _then if steps.passage is None else _then_passing
    go, stop = _one_token(steps, successor)
    masses = 1 if steps.passage is None else 3
    horizon = steps.factor.shape[-1]
    go = go * _reached(go[..., 0, :], start)[..., None, None]
    here = torch.zeros_like(go[..., :1, :, :])
    here[..., 0, :masses, start] = 1.0
    even = bool((steps.factor == steps.factor[..., :1]).all())
    most = float(go[..., :masses, :].abs().sum(-1).max())
    safe = horizon * math.log(max(most, 1.0)) < SAFE
    if even and safe:
        stopped, cut = _sum(here, _doubled(go, horizon, then), horizon, then)
        ended = torch.cat([then(stopped, stop), cut], -1).squeeze(-3)
        ended = ended * steps.factor[..., 0][..., None, None]
    else:
        growth = None
        if not safe:
            growth = torch.stack([_growth(go[..., i, :]) for i in range(masses)]).amax(0)
        ended = _by_length(here, (go, stop), growth, steps.factor, then)
    return _read(ended, steps)


def _read(ended: Tensor, steps: Steps) -> Ended:
    """Name the rows."""
    shape = steps.kernel.shape[-2:]
    mean = ended[..., -shape.numel() :, :].unflatten(-2, shape).movedim(-1, -3)
    at = 1 if steps.passage is None else 3
    return Ended(mass=ended[..., 0, :], mean=mean, norm=ended[..., at, :])


def _doubled(go: Tensor, horizon: int, then: Then) -> list[Tensor]:
    """Stretches of 1, 2, 4, ... tokens, as long as the horizon holds them."""
    doubled = [go]
    for _ in range(horizon.bit_length() - 1):
        doubled.append(then(doubled[-1], doubled[-1]))
    return doubled


def _sum(
    here: Tensor, doubled: Sequence[Tensor], horizon: int, then: Then
) -> tuple[Tensor, Tensor]:
    """Sum over t below the horizon of what follows `here` after t tokens, and what does at last."""
    total = torch.zeros_like(here)
    for i, stretch in enumerate(doubled):
        if horizon >> i & 1:
            part = here
            for shorter in doubled[:i]:
                part = part + then(part, shorter)
            total = total + part
            here = then(here, stretch)
    return total, here


def _by_length(
    here: Tensor, ways: tuple[Tensor, Tensor], growth: Tensor | None, factor: Tensor, then: Then
) -> Tensor:
    """Sums with a factor for every length, of a kernel divided by its growth where one is given."""
    go, stop = ways
    horizon = factor.shape[-1]
    last = factor[..., -1]
    if growth is not None:
        log_up = (growth * horizon).clamp(min=0)
        log_factor = growth.unsqueeze(-1) * torch.arange(horizon + 1) - log_up.unsqueeze(-1)
        factor = factor * log_factor[..., :-1].exp()
        last = last * log_factor[..., -1].exp()
        go = go * (-growth).exp()[..., None, None, None]
    doubled = _doubled(go, horizon, then)
    stopped = then(_weighted(here, doubled, factor, then), stop)
    for i, stretch in enumerate(doubled):
        if horizon >> i & 1:
            here = then(here, stretch)
    ended = torch.cat([stopped, here * last[..., None, None, None]], -1).squeeze(-3)
    return ended if growth is None else ended * log_up.exp()[..., None, None]


def _then(
    first: Inexact[Tensor, "*batch I D J"], second: Inexact[Tensor, "*other J D K"]
) -> Inexact[Tensor, "*batch I D K"]:
    """Stretches of tokens after stretches of tokens: rows are mass, squared norm and mean.

    Example:
        >>> one = torch.tensor([[[0.5], [2.0], [1.0]]])
        >>> _then(one, one).flatten()
        tensor([0.2500, 4.0000, 1.0000])
    """
    out = _ahead(first[..., 0, :], second)
    out[..., 1:, :] += _behind(first[..., 1:, :], second[..., 0, :])
    out[..., 1, :] += 2 * _dots(first[..., 2:, :], second[..., 2:, :])
    return out


def _then_passing(
    first: Float[Tensor, "*batch I D J"], second: Float[Tensor, "*other J D K"]
) -> Float[Tensor, "*batch I D K"]:
    """The same where kernels change: rows are three masses a, b, c, norm q, then means u and v.

        u = u1 b2 + a1 u2,   v = v1 c2 + b1 v2,   q = q1 c2 + 2 u1 . v2 + a1 q2

    with u from `kernel` to `between` and v from `between` to `after`.

    Example:
        >>> one = torch.tensor([0.25, 0.5, 1.0, 1.0, 2.0, 3.0]).view(1, 6, 1)
        >>> _then_passing(one, one).flatten()
        tensor([ 0.0625,  0.2500,  1.0000, 13.2500,  1.5000,  4.5000])
    """
    half = (first.shape[-2] - 4) // 2
    split = (1, 1, 1, 1, half, half)
    a1, b1, c1, q1, u1, v1 = first.split(split, -2)
    a2, b2, c2, q2, u2, v2 = second.split(split, -2)
    a1, b1, c1, a2, b2, c2 = (x.squeeze(-2) for x in (a1, b1, c1, a2, b2, c2))
    masses = torch.stack([a1 @ a2, b1 @ b2, c1 @ c2], -2)
    pairs = 2 * _dots(u1, v2).unsqueeze(-2)
    norm = _behind(q1, c2) + pairs + _ahead(a1, q2)
    return torch.cat(
        [masses, norm, _behind(u1, b2) + _ahead(a1, u2), _behind(v1, c2) + _ahead(b1, v2)], -2
    )


def _ahead(mass: Tensor, x: Tensor) -> Tensor:
    """Sum over j of mass[i, j] x[j, d, k]."""
    return (mass @ x.flatten(-2)).unflatten(-1, x.shape[-2:])


def _behind(x: Tensor, mass: Tensor) -> Tensor:
    """Sum over j of x[i, d, j] mass[j, k]."""
    return (x.flatten(-3, -2) @ mass).unflatten(-2, x.shape[-3:-1])


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Sum over j and d of x[i, d, j] y[j, d, k]."""
    return x.flatten(-2) @ y.transpose(-3, -2).flatten(-3, -2)


def _one_token(steps: Steps, successor: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches of one token: those that go on, and those that stop, by their own state."""
    states = len(successor)
    own = torch.eye(states, dtype=steps.kernel.dtype)
    onto = torch.nn.functional.one_hot(successor + 1, states + 1).to(own)
    heads, norm, marks = [steps.kernel], steps.kernel, [steps.kernel]
    if (passage := steps.passage) is not None:
        heads += [passage.between, passage.after]
        norm, marks = passage.both, [passage.first, passage.second]
    heads.append(norm * steps.score.square().sum(-1))
    score = steps.score.to(own)
    head = torch.einsum("...svh,svn->...shn", torch.stack(heads, -1), onto)
    means = (torch.einsum("...sv,...svk,svn->...skn", mark, score, onto) for mark in marks)
    blocks = [torch.einsum("...skn,sr->...srkn", mean, own).flatten(-3, -2) for mean in means]
    paths = torch.cat([head, *blocks], -2)
    return paths[..., 1:], torch.einsum("...sd,sr->...sdr", paths[..., 0], own)


def _reached(mass: Inexact[Tensor, "*batch S S"], start: int) -> Float[Tensor, "*batch S"]:
    """1 for each state that some response visits: what happens elsewhere may exceed float64."""
    mass = mass.abs()
    reached = torch.zeros_like(mass[..., :1, :])
    reached[..., start] = 1.0
    for _ in range(mass.shape[-1]):
        reached = ((reached + reached @ mass) > 0).to(mass)
    return reached.squeeze(-2)


def _growth(mass: Inexact[Tensor, "*batch S S"]) -> Float[Tensor, "*batch"]:
    """Logarithm of the factor by which a kernel's mass grows a token, in the long run."""
    size = torch.linalg.eigvals(mass).abs().amax(-1)
    return torch.where(size > 0, size, 1.0).log()


def _weighted(
    here: Tensor, doubled: Sequence[Tensor], factor: Inexact[Tensor, "*other T"], then: Then
) -> Tensor:
    """Sum over t of f(t) times what follows `here` after t tokens.

    Args:
        here: paths so far, one row.
        doubled: stretches of 1, 2, 4, ... tokens.
        factor: f(t).
    """
    horizon = factor.shape[-1]
    half = (horizon - 1).bit_length() // 2
    block = 2**half
    for stretch in doubled[:half]:
        here = torch.cat([here, then(here, stretch)], -3)
    blocks = 1 << (-(-horizon // block) - 1).bit_length()
    padded = torch.nn.functional.pad(factor, (0, blocks * block - horizon))
    parts = torch.einsum(
        "...kb,...bdj->...kdj", padded.unflatten(-1, (blocks, block)).to(here), here
    )
    for stretch in doubled[half:]:
        if parts.shape[-3] == 1:
            break
        parts = parts[..., 0::2, :, :] + then(parts[..., 1::2, :, :], stretch)
    return parts


def cells(chain: Chain) -> float:
    """Numbers that the recursion of one kernel touches: T, S^2 V sqrt T and S^3 V log T of them."""
    states, vocab = chain.successor.shape
    row = states * (2 + states * vocab)
    columns = 2 * chain.horizon**0.5 + states * chain.horizon.bit_length()
    return chain.prompts * (chain.horizon + row * columns)


def mismatch(chain: Chain) -> dict[str, float]:
    """How far the sampler is from the policy, averaged over prompts.

    tokens: length of the policy's responses.  kl: KL(policy | sampler) a token of theirs, in nats.
    chi_squared: E[rho^2] - 1 of the ratio rho of a token, over tokens of the sampler's responses.
    effective_share: 1 / E[w^2] of the ratio w of a response.

    Example:
        >>> from windage.toy.chains import reasoning
        >>> found = mismatch(reasoning(16))
        >>> found["kl"], round(found["effective_share"], 12)
        (0.0, 1.0)
    """
    pi, mu = chain.logp.exp(), chain.behavior_logp.exp()
    ratio = torch.where(mu > 0, (chain.logp - chain.behavior_logp).exp(), 0.0)
    kernel = torch.stack([pi, mu, mu * ratio.square()])
    vocab = mu.shape[-1]
    counting = torch.eye(vocab, dtype=mu.dtype).expand(*kernel.shape, vocab)
    each = Steps(kernel=kernel, score=counting, factor=mu.new_ones(chain.horizon))
    found = transfer(each, chain.successor, chain.start)
    drawn, sampled = found.mean[:2].sum(2)
    tokens, seen = drawn.sum((1, 2)), sampled.sum((1, 2))
    away = torch.where(drawn > 0, drawn * (chain.logp - chain.behavior_logp), 0.0).sum((1, 2))
    square = (sampled * ratio.square()).sum((1, 2))
    return {
        "tokens": float(tokens.mean()),
        "kl": max(0.0, float((away / tokens).mean())),
        "chi_squared": float((square / seen).mean()) - 1,
        "effective_share": float((1 / found.mass[2].sum(-1)).mean()),
    }


@objective.register
def chain_objective(chain: Chain) -> Objective:
    """J, its gradient, and the policy's mass on responses with a token that is never drawn."""
    pi = chain.logp.exp()
    ones = pi.new_ones(chain.horizon)
    score = torch.eye(pi.shape[-1], dtype=pi.dtype) - pi.unsqueeze(-2)
    drawn = pi * (chain.behavior_logp.exp() > 0)
    both = Steps(kernel=torch.stack([pi, drawn]), score=torch.stack([score, score]), factor=ones)
    found = transfer(both, chain.successor, chain.start)
    value = (found.mass[0] * chain.rewards).sum(-1)
    centered = chain.rewards - value.unsqueeze(-1)
    return Objective(
        value=value.mean(),
        gradient=torch.einsum("pc,pcsv->psv", centered, found.mean[0]) / chain.prompts,
        unsupported_mass=(1 - found.mass[1].sum(-1)).clamp(min=0).mean(),
    )
