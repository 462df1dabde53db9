"""Gradients of other objectives than the expected reward, by autograd through enumeration.

largest of k rewards:        E[max of k draws] = sum over r of r (F(r)^k - F(below r)^k)
log p, series to order m:    -sum over j from 1 to m of (1 - p)^j / j,   p = E[R], R of 0 or 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from windage.toy.problems import Problem


def _largest(chance: Tensor, rewards: Tensor, k: int) -> Tensor:
    order = rewards.argsort()
    below = chance[order].cumsum(0)
    whole = torch.cat([below.new_zeros(1), below]).pow(k)
    return (rewards[order] * whole.diff()).sum()


def _log_series(chance: Tensor, rewards: Tensor, order: int) -> Tensor:
    miss = 1 - (chance * rewards).sum()
    return -sum((miss**j / j for j in range(1, order + 1)), miss.new_zeros(()))


VALUES: Mapping[str, Callable[[Tensor, Tensor, int, Mapping[str, Any]], Tensor]] = {
    "largest of k rewards": lambda p, r, size, s: _largest(p, r, s["k"]),
    "largest of G rewards": lambda p, r, size, s: _largest(p, r, size),
    "log p, series to order G": lambda p, r, size, s: _log_series(p, r, size),
    "log p, series to order G - 1": lambda p, r, size, s: _log_series(p, r, size - 1),
}


def defined(name: str | None, problem: Problem) -> bool:
    """Whether an objective has a meaning on a problem: the series of log p asks for 0 or 1."""
    binary = bool(((problem.rewards == 0) | (problem.rewards == 1)).all())
    return binary or name is None or not name.startswith("log p")


def other_gradient(
    name: str, problem: Problem, group_size: int, settings: Mapping[str, Any]
) -> Tensor:
    """Gradient by the logits of an objective of a group, averaged over prompts.

    Example:
        >>> from windage.toy.problems import Tree, make
        >>> coin = make("coin", Tree(2, None, 1), torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]]))
        >>> other_gradient("largest of k rewards", coin, 4, {"k": 2})
        tensor([[[-0.2500,  0.2500]]], dtype=torch.float64)
    """
    logits = problem.logits.clone().requires_grad_()
    prefixes, tokens = problem.tree.paths
    real = prefixes >= 0
    place = torch.where(real, prefixes * problem.tree.vocab + tokens, 0)
    logp = torch.where(real, logits.log_softmax(-1).flatten(1)[:, place], 0.0)
    chances = logp.sum(-1).exp()
    values = [
        VALUES[name](chance, rewards, group_size, settings)
        for chance, rewards in zip(chances, problem.rewards, strict=True)
    ]
    torch.stack(values).mean().backward()
    assert logits.grad is not None
    return logits.grad
