"""Behavior policies: how the sampler comes to differ from the policy being trained.

Each kind maps a problem to the sampler's log-probabilities at every prefix; -inf where a token is
never drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.errors import BadInput, unknown
from windage.toy.chains import Chain
from windage.toy.exact.plan import Site
from windage.toy.objective import objective
from windage.toy.problems import normalize

ROUNDING = 1e-12
S = TypeVar("S", bound=Site)
LogProbabilities = Float[Tensor, "P N V"]


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise BadInput(f"behavior: {name} is {value:g}; allowed: {allowed}")


def _backward_steps(problem: Site, steps: int, rate: float) -> list[Tensor]:
    """Logits after 0, 1, ... `steps` exact steps down the gradient from the current ones."""
    _require(steps >= 0, "steps", steps, "a whole number from 0")
    history = [problem.logits]
    for _ in range(steps):
        now = replace(problem, logits=history[-1])
        history.append(history[-1] - rate * objective(now).gradient)
    return history


def stale(problem: Site, *, steps: int = 1, rate: float = 1.0) -> LogProbabilities:
    """The policy `steps` exact gradient steps behind, found by stepping back from the current one.

        z[k + 1] = z[k] - rate * grad J(z[k]),   z[0] the current logits, sampler softmax(z[steps])

    To first order in the rate these are the iterates of an ascent that arrives at the current
    policy; ascending again from z[steps] misses it by the second order.

    Args:
        steps: updates of lag.
        rate: step size on the gradient of the objective, a mean over prompts.

    Raises:
        BadInput: a negative number of steps.
    """
    return normalize(_backward_steps(problem, steps, rate)[-1])


def noise(problem: Site, *, sigma: float = 0.1, seed: int = 0) -> LogProbabilities:
    """Independent Gaussian noise on every logit.

    Args:
        sigma: standard deviation of the noise.
        seed: of its generator.

    Raises:
        BadInput: a negative sigma.
    """
    _require(sigma >= 0, "sigma", sigma, "a number from 0")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(problem.logits.shape, generator=generator, dtype=torch.float64)
    return normalize(problem.logits + sigma * drawn)


def bits(problem: Site, *, b: int = 4) -> LogProbabilities:
    """Logits rounded to 2^b levels between the least and the greatest of each prompt.

    Args:
        b: bits a logit.

    Raises:
        BadInput: b outside 1..52.
    """
    _require(1 <= b <= 52, "b", b, "a whole number from 1 to 52")
    low, high = (f(problem.logits, (1, 2), keepdim=True) for f in (torch.amin, torch.amax))
    step = ((high - low) / (2**b - 1)).clamp(min=torch.finfo(torch.float64).tiny)
    return normalize(low + step * ((problem.logits - low) / step).round())


def temperature(problem: Site, *, t: float = 1.0) -> LogProbabilities:
    """Logits divided by a temperature.

    Args:
        t: below 1 sharpens.

    Raises:
        BadInput: t not above 0.
    """
    _require(t > 0, "t", t, "a number above 0")
    return normalize(problem.logits / t)


def top_k(problem: Site, *, k: int = 1) -> LogProbabilities:
    """The k likeliest tokens, renormalized; ties go to the lower id.

    Args:
        k: tokens kept at each prefix; the vocabulary or more changes nothing.

    Raises:
        BadInput: k below 1.
    """
    _require(k >= 1, "k", k, "a whole number from 1")
    order = problem.logits.argsort(dim=-1, descending=True, stable=True)
    dropped = torch.ones_like(order, dtype=torch.bool).scatter(-1, order[..., :k], False)
    return normalize(problem.logits.masked_fill(dropped, -torch.inf))


def top_p(problem: Site, *, p: float = 1.0) -> LogProbabilities:
    """The likeliest tokens up to and including the one that reaches mass p, renormalized.

    Ties go to the lower id; p = 1 changes nothing.

    Args:
        p: probability mass.

    Raises:
        BadInput: p outside (0, 1].
    """
    _require(0 < p <= 1, "p", p, "a number above 0, at most 1")
    order = problem.logits.argsort(dim=-1, descending=True, stable=True)
    from_here = problem.logp.exp().gather(-1, order).flip(-1).cumsum(-1).flip(-1)
    beyond = from_here <= (1 - p) * (1 + ROUNDING)
    beyond[..., 0] = False
    dropped = torch.zeros_like(beyond).scatter(-1, order, beyond)
    return normalize(problem.logits.masked_fill(dropped, -torch.inf))


def mixed(problem: Site, *, steps: int = 1, rate: float = 1.0) -> LogProbabilities:
    """Weights updated during generation: versions that differ along one response.

    The first token comes from the policy `steps` behind, the last from the current one, with the
    updates spread evenly in between; in a bandit the only token comes from the older.

    Args:
        steps: updates that arrive while a response is written.
        rate: as in `stale`.

    Raises:
        BadInput: a negative number of steps.
    """
    if isinstance(problem, Chain):
        raise BadInput("behavior: mixed needs a tree of prefixes; allowed with chains: stale")
    history = _backward_steps(problem, steps, rate)
    horizon = problem.tree.horizon
    out = torch.empty_like(problem.logits)
    for t in range(horizon):
        lag = steps if horizon == 1 else round(steps * (1 - t / (horizon - 1)))
        level = problem.tree.level(t)
        out[:, level] = history[lag][:, level]
    return normalize(out)


KINDS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (stale, noise, bits, temperature, top_k, top_p, mixed)
}


def with_behavior(problem: S, kind: str, **settings: Any) -> S:
    """The same problem sampled by a kind of behavior policy.

    Raises:
        BadInput: an unknown kind, or a setting outside its range.

    Example:
        >>> from windage.toy.problems import bandit
        >>> with_behavior(bandit(), "top_k", k=1).behavior_logp.exp().max().item()
        1.0
    """
    if kind not in KINDS:
        raise unknown("behavior", kind, KINDS)
    return replace(problem, behavior_logp=KINDS[kind](problem, **settings))
