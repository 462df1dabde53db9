"""Behavior policies: how the sampler comes to differ from the policy being trained.

Each kind maps a problem to the sampler's log-probabilities at every prefix; -inf where a token is
never drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.objective import objective
from windage.toy.problems import Problem

LogProbabilities = Float[Tensor, "P N V"]


def _backward_steps(problem: Problem, steps: int, rate: float) -> list[Tensor]:
    """Logits of 0, 1, ... `steps` exact gradient steps ago, by stepping down the gradient."""
    history = [problem.logits]
    for _ in range(steps):
        now = replace(problem, logits=history[-1])
        history.append(history[-1] - rate * objective(now).gradient * problem.prompts)
    return history


def stale(problem: Problem, *, steps: int = 1, rate: float = 1.0) -> LogProbabilities:
    """The policy `steps` exact gradient steps behind.

    Args:
        steps: updates of lag.
        rate: step size on the gradient of each prompt's own expected reward.
    """
    return _backward_steps(problem, steps, rate)[-1].log_softmax(-1)


def noise(problem: Problem, *, sigma: float = 0.1, seed: int = 0) -> LogProbabilities:
    """Independent Gaussian noise on every logit.

    Args:
        sigma: standard deviation of the noise.
        seed: of its generator.
    """
    generator = torch.Generator().manual_seed(seed)
    noise_ = torch.randn(problem.logits.shape, generator=generator, dtype=torch.float64)
    return (problem.logits + sigma * noise_).log_softmax(-1)


def bits(problem: Problem, *, b: int = 4) -> LogProbabilities:
    """Logits rounded to 2^b levels between the least and the greatest of each prompt.

    Args:
        b: bits a logit.
    """
    flat = problem.logits.flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    step = ((high - low) / (2**b - 1)).clamp(min=torch.finfo(torch.float64).tiny)
    low, step = low[:, None, None], step[:, None, None]
    return (low + step * ((problem.logits - low) / step).round()).log_softmax(-1)


def temperature(problem: Problem, *, t: float = 1.0) -> LogProbabilities:
    """Logits divided by a temperature.

    Args:
        t: above 0; below 1 sharpens.
    """
    return (problem.logits / t).log_softmax(-1)


def top_k(problem: Problem, *, k: int = 1) -> LogProbabilities:
    """The k likeliest tokens, renormalised; ties go to the lower id.

    Args:
        k: tokens kept at each prefix.
    """
    order = problem.logits.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1]).expand_as(order)
    )
    return problem.logits.masked_fill(rank >= k, -torch.inf).log_softmax(-1)


def top_p(problem: Problem, *, p: float = 1.0) -> LogProbabilities:
    """The likeliest tokens up to and including the one that reaches mass p, renormalised.

    Args:
        p: probability mass.
    """
    order = problem.logits.argsort(dim=-1, descending=True, stable=True)
    sorted_p = problem.logp.exp().gather(-1, order)
    before = sorted_p.cumsum(-1) - sorted_p
    dropped = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before >= p)
    return problem.logits.masked_fill(dropped, -torch.inf).log_softmax(-1)


def mixed(problem: Problem, *, steps: int = 1, rate: float = 1.0) -> LogProbabilities:
    """Weights updated during generation: the first token comes from the policy `steps` behind, the
    last from the current one, with the updates spread evenly in between.

    Args:
        steps: updates that arrive while a response is written.
        rate: as in `stale`.
    """
    history = _backward_steps(problem, steps, rate)
    horizon = problem.tree.horizon
    out = torch.empty_like(problem.logits)
    for t in range(horizon):
        lag = steps if horizon == 1 else round(steps * (1 - t / (horizon - 1)))
        level = problem.tree.level(t)
        out[:, level] = history[lag][:, level]
    return out.log_softmax(-1)


KINDS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (stale, noise, bits, temperature, top_k, top_p, mixed)
}


def with_behavior(problem: Problem, kind: str, **settings: Any) -> Problem:
    """The same problem sampled by a kind of behavior policy.

    Example:
        >>> from windage.toy.problems import bandit
        >>> with_behavior(bandit(), "top_k", k=1).behavior_logp.exp().max().item()
        1.0
    """
    return replace(problem, behavior_logp=KINDS[kind](problem, **settings))
