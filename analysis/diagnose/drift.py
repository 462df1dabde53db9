"""Drift where a head was recorded: what a constant reward moves, and centering takes away.

Before each token, with q the sampler, p the trainer, w an entry's weight of a token at advantage 1
and s_v the score of token v by the logits, e_v - p,

    mean over q of w s = sum over v of c[v] (e_v - p)        c as of `centering.top_k`

It is 0 where q = p, and where w is the ratio p / q without a cap; what else it is holds no
information about rewards.  Its size is the sum of what it moves the logits by, each taken
positive: for w = 1 the distance sum |q - p|, the tail as one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from windage.analysis.diagnose.blocks import Block
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import Figure, Sums, figure
from windage.estimators.catalogue import CATALOGUE
from windage.estimators.centering import exact, top_k
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import use


def of_head(entry: Estimator) -> Estimator:
    """The entry with its centering over the recorded head, the tail the trainer's.

    Example:
        >>> of_head(CATALOGUE["centered"]).centering.name
        'top_k'
    """
    if entry.centering is None or entry.centering.function is not exact:
        return entry
    return replace(entry, centering=use(top_k))


CENTERED: Mapping[str, Estimator] = {
    name: of_head(entry) for name, entry in CATALOGUE.items() if entry.centering is not None
}


def headed(row: Row) -> bool:
    """Whether a response has a head, of both sides and of what drew."""
    return (
        row.head_ids is not None
        and row.head_behavior_logp is not None
        and row.head_logp is not None
        and row.raw is not True
    )


def moved(
    coefficients: Float[Tensor, "*batch K"], head_logp: Float[Tensor, "*batch K"]
) -> Float[Tensor, "*batch"]:
    """By how much logits move: the sum over the vocabulary of |sum of c[v] (e_v - p)|.

        sum over the head of |c[v] - m p[v]| + |m| (1 - P)        m the sum of c, P that of p

    Example:
        >>> q, p = torch.tensor([0.6, 0.3]), torch.tensor([0.5, 0.3])
        >>> moved(q - 0.5 * p, p.log())
        tensor(0.2000)
    """
    p = head_logp.exp()
    whole = coefficients.sum(-1, keepdim=True)
    tail = (1 - p.sum(-1)).clamp(min=0)
    return (coefficients - whole * p).abs().sum(-1) + whole.squeeze(-1).abs() * tail


@final
class Drift:
    """The drift of every entry that centers, a token."""

    def __init__(self) -> None:
        self.sums = {name: Sums("n", "size") for name in CENTERED}

    def add(self, block: Block) -> None:
        """Look at a block."""
        wide: dict[int, list[int]] = {}
        for number, row in enumerate(block.rows):
            if headed(row):
                assert row.head_logp is not None
                wide.setdefault(row.head_logp.shape[1], []).append(number)
        for numbers in wide.values():
            p, q = (
                torch.from_numpy(np.concatenate([_own(block.rows[n], name) for n in numbers]))
                for name in ("head_logp", "head_behavior_logp")
            )
            at = np.repeat(block.bucket[numbers], block.count[numbers])
            for name, entry in CENTERED.items():
                taken = center(entry, p, q, torch.ones(1, dtype=p.dtype))
                size = moved(taken, p).numpy()
                self.sums[name].add(at, 0, n=np.ones_like(size), size=size)

    def figures(self) -> Mapping[str, Figure]:
        """By name: `drift/centered` and the like."""
        tables = {name: sums.over() for name, sums in self.sums.items()}
        return {
            f"drift/{name}": figure(table, lambda s: s["size"] / s["n"])
            for name, table in tables.items()
            if table["n"].any()
        }


def _own(row: Row, name: str) -> np.ndarray:
    """Log-probabilities of the head before the trainable tokens."""
    values: np.ndarray = getattr(row, name)[row.mask]
    return values.astype(np.float64)
