"""Random logged rows for the structural checks, and what an estimator makes of them.

A subject is an estimator with the two functions that feed it; a planted fault may replace either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from windage.analysis.audit.moments import sized
from windage.estimators.batch import HEAD_FIELDS, TOKEN_FIELDS, Batch
from windage.estimators.estimator import (
    Coefficients,
    Estimator,
    batch_terms,
    token_coefficients,
)
from windage.estimators.member import Member

LENGTH = 8.0
VOCAB = 3
VERSION = 4


def in_slices(estimator: Estimator, batch: Batch, parts: Sequence[slice]) -> list[Coefficients]:
    """Coefficients micro-batch by micro-batch, with the couplings computed over the whole batch."""
    terms = batch_terms(estimator, batch)
    return [token_coefficients(estimator, terms.select(p), batch.select(p)) for p in parts]


def at_once(estimator: Estimator, batch: Batch) -> Coefficients:
    """Coefficients of a whole batch, checked."""
    return estimator(batch)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """An estimator, how rows become its batch, and how a batch becomes coefficients."""

    estimator: Estimator
    assemble: Callable[..., Batch] = Batch.from_rows
    whole: Callable[[Estimator, Batch], Coefficients] = at_once
    slices: Callable[[Estimator, Batch, Sequence[slice]], list[Coefficients]] = in_slices

    @property
    def ready(self) -> Estimator:
        """The estimator with a constant length where it needs one."""
        return sized(self.estimator, LENGTH)


@final
@dataclass(frozen=True, kw_only=True)
class Logged:
    """Rows as a rollout store gives them, unpadded."""

    rewards: list[float | None]
    groups: list[int]
    mask: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    group_size: int | None = None
    made: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What these rows give, made on first use: an audit asks for it entry by entry."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def pick(self, order: Sequence[int]) -> Logged:
        """Some rows, in some order."""
        picked: Logged = self._once(tuple(order), lambda: self._picked(order))
        return picked

    def _picked(self, order: Sequence[int]) -> Logged:
        return replace(
            self,
            rewards=[self.rewards[i] for i in order],
            groups=[self.groups[i] for i in order],
            mask=[self.mask[i] for i in order],
            columns={name: [column[i] for i in order] for name, column in self.columns.items()},
        )

    def batch(self, subject: Subject) -> Batch:
        """The padded batch, with rewards and parts of them that the estimator can take."""
        signed = subject.estimator.advantage.traits.rewards == "any"
        key = subject.assemble, signed
        batch: Batch = self._once(key, lambda: self._batch(subject.assemble, signed))
        return batch

    def _batch(self, assemble: Callable[..., Batch], signed: bool) -> Batch:
        rewards = [r if r is None or signed else abs(r) for r in self.rewards]
        batch = assemble(
            rewards,
            self.groups,
            mask=self.mask,
            group_size=self.group_size,
            current_version=VERSION,
            **self.columns,
        )
        return scored(batch, batch.rewards)


def scored(batch: Batch, rewards: Tensor) -> Batch:
    """The batch with other rewards, and two components of each that grow with it and add up to it.

    Example:
        >>> batch = Batch(rewards=torch.zeros(1, 1), mask=torch.ones(1, 1, 1).bool())
        >>> scored(batch, torch.ones(1, 1)).components.sum(-1)
        tensor([[1.]])
    """
    tilt = 0.2 * torch.sin(2 * rewards)
    components = torch.stack([rewards / 2 + tilt, rewards / 2 - tilt], -1)
    return replace(batch, rewards=rewards, components=components)


def _column(name: str, length: int, generator: torch.Generator) -> Any:
    """One row's entries of a field."""
    if name == "versions":
        return torch.randint(0, VERSION + 1, (length,), generator=generator).tolist()
    if name in HEAD_FIELDS:
        size = (length, VOCAB)
        table = torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(-1)
        return torch.arange(VOCAB).expand(size) if name == "head_ids" else table
    numbers = torch.randn(length, generator=generator, dtype=torch.float64)
    if name == "probability_square":
        return (1 + numbers.square()).tolist()
    return (numbers if name == "values" else -1.5 + 0.7 * numbers).tolist()


@lru_cache(maxsize=64)
def random_rows(seed: int, *, sizes: tuple[int, ...] = (4, 3, 4), holes: bool = True) -> Logged:
    """Groups in interleaved order, rows of one to five tokens with tool tokens among them.

    Args:
        seed: of the generator.
        sizes: rows of each group.
        holes: whether masked tokens stand inside responses.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    mask = []
    for _ in groups:
        length = int(torch.randint(1, 6, (), generator=generator))
        row = (torch.rand(length, generator=generator) < 0.7).int().tolist() if holes else []
        row = row or [1] * length
        row[int(torch.randint(0, length, (), generator=generator))] = 1
        mask.append(row)
    names = [*TOKEN_FIELDS, *HEAD_FIELDS]
    rewards = torch.randn(len(groups), generator=generator, dtype=torch.float64).tolist()
    return Logged(
        rewards=rewards,
        groups=groups,
        mask=mask,
        columns={n: [_column(n, len(row), generator) for row in mask] for n in names},
        group_size=max(sizes),
    )


def trainable(found: Coefficients, batch: Batch) -> Tensor:
    """Coefficients of the trainable tokens, row by row as logged; head coefficients behind."""
    mask = batch.to_rows(batch.mask)
    own = batch.to_rows(found.own)[mask]
    if found.head is None:
        return own
    return torch.cat([own, batch.to_rows(found.head)[mask].flatten()])


def run(subject: Subject, rows: Logged) -> Tensor:
    """What an estimator makes of logged rows."""
    batch = rows.batch(subject)
    return trainable(subject.whole(subject.ready, batch), batch)


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value; infinite where one is not finite.

    Example:
        >>> gap(torch.tensor([2.0]), torch.tensor([1.0]))
        0.5
    """
    if a.shape != b.shape or not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-12))


def picks(estimator: Estimator) -> list[Member]:
    """Members that pick tokens by the advantages of the whole batch."""
    maps = [c.map for c in estimator.corrections if c.reads == "value"]
    return maps + [m for m in estimator.penalties if "advantages" in m.traits.needs]


def at_shares(subject: Subject) -> list[Subject]:
    """The subject; with members that pick a share, at shares at which random rows show it."""
    settings = {key for member in picks(subject.estimator) for key, _ in member.settings}
    if "share" not in settings:
        return [subject]
    limits = {"low": 0.0, "high": math.inf, "clip_low": math.inf, "clip_high": math.inf}
    wide = {k: v for k, v in limits.items() if k in subject.estimator.settings}
    shares = [k / 40 for k in range(1, 40)]
    return [replace(subject, estimator=subject.estimator.change(share=s, **wide)) for s in shares]
