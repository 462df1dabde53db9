"""The two halves of an estimator on the rectangles `[B T]` that foreign engines hold.

    advantages[b, t]          once, with every sibling in sight
    loss = -sum(stop_gradient(C[b, t]) * logp[b, t])

A micro-batch knows its own tokens and responses; the engine tells how many there are in the whole
optimizer batch, over all micro-batches and ranks, and the aggregation's denominator is that one.

Differences:
    1. A response that was not admitted has the advantage 0; denominators still count it.
    2. A share of a whole group (`prompt_mean`) rides on the advantage as a positive factor, so an
       optimizer batch must hold whole groups of one size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import (
    Estimator,
    Terms,
    batch_terms,
    coefficients,
    token_coefficients,
)
from windage.llm.adapters.carry import Host, early_half, folds, is_given, late_half


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Where the rows of a rectangle stand among prompts and responses.

    Args:
        names: of the groups, in the order of their first row.
        place: p * size + g of each row.
        size: of the largest group.
    """

    names: tuple[Hashable, ...]
    place: Int[Tensor, " B"]
    size: int

    def up(self, value: Tensor) -> Tensor:
        """Rows `[B ...]` as `[P G ...]`, zeros where a group has fewer responses."""
        out = value.new_zeros((len(self.names) * self.size, *value.shape[1:]))
        out[self.place.to(value.device)] = value
        return out.view(len(self.names), self.size, *value.shape[1:])

    def down(self, value: Tensor) -> Tensor:
        """Back again."""
        return value.flatten(0, 1)[self.place.to(value.device)]


def groups_of(index: Sequence[Hashable]) -> Groups:
    """Groups of rows that share a name.

    Example:
        >>> groups_of(["b", "a", "b"]).place.tolist()
        [0, 2, 1]
    """
    numbers: dict[Hashable, int] = {}
    counts: list[int] = []
    found = []
    for name in index:
        p = numbers.setdefault(name, len(numbers))
        if p == len(counts):
            counts.append(0)
        found.append((p, counts[p]))
        counts[p] += 1
    size = max(counts, default=1)
    place = torch.tensor([p * size + g for p, g in found], dtype=torch.long)
    return Groups(names=tuple(numbers), place=place, size=size)


def batch_of(
    rewards: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    groups: Groups,
    *,
    present: Bool[Tensor, " B"] | None = None,
    **fields: Tensor,
) -> Batch:
    """The record of some rows, all siblings in sight; the largest group says what was asked for.

    Args:
        rewards: one a row; 0 where not present.
        mask: True on the tokens that the policy chose.
        groups: of the same rows.
        present: False where a row could not be scored.
        fields: others of `Batch`, a row each.

    Raises:
        ValueError: a value that is not finite; names the row.
    """
    real = torch.ones_like(rewards, dtype=torch.bool) if present is None else present
    up: dict[str, Any] = {name: groups.up(value) for name, value in fields.items()}
    return Batch(
        rewards=groups.up(torch.where(real, rewards, 0.0)),
        mask=groups.up(mask & real.unsqueeze(1)),
        present=groups.up(real),
        requested=torch.full((len(groups.names),), groups.size),
        group_ids=groups.names,
        row_index=groups.up(torch.arange(1, len(rewards) + 1)) - 1,
        **up,
    ).validate()


@torch.no_grad()
def advantages_of(estimator: Estimator, batch: Batch) -> Float[Tensor, "P G T_or_1"]:
    """The half that the advantage hook computes, admission and shares of groups included.

    Args:
        estimator: one that the engine can carry.
        batch: every response of the batch; mask and rewards suffice.

    Raises:
        ValueError: what `Estimator.check` refuses, such as a group of one.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> groups = groups_of("aa")
        >>> batch = batch_of(torch.tensor([1.0, 0.0]), torch.ones(2, 3).bool(), groups)
        >>> advantages_of(get("cispo"), batch).squeeze(-1)
        tensor([[ 0.7071, -0.7071]])
    """
    half = early_half(estimator)
    batch = half.check(batch)
    terms = batch_terms(half, batch)
    found = torch.where((terms.reason == 0).unsqueeze(-1), terms.advantages, 0.0)
    if folds(estimator):
        share = terms.scale * batch.get("present").sum()
        found = found * share.unsqueeze(-1).to(found.dtype)
    return found


@torch.no_grad()
def loss_coefficients(
    estimator: Estimator,
    host: Host,
    policies: Mapping[str, Tensor],
    advantages: Float[Tensor, "B T_or_1"],
    mask: Bool[Tensor, "B T"],
    *,
    tokens: float | Tensor,
    responses: float | Tensor,
    present: Bool[Tensor, " B"] | None = None,
    weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The half that the loss computes: coefficients of a micro-batch of whole responses.

    Args:
        estimator: one that the engine can carry.
        host: the engine.
        policies: `logp` and what else the engine knows of the sampled tokens, `[B T]`.
        advantages: from `advantages_of`, or the engine's.
        mask: True on the tokens that the policy chose.
        tokens, responses: of the whole optimizer batch, over all micro-batches and ranks.
        present: False where a row could not be scored and counts nowhere.
        weights: of the correction that the engine hands over.

    Raises:
        ValueError: weights that are missing or that no correction takes, or a number that is not
            finite.
    """
    _takes(estimator, host, weights is not None)
    half = late_half(estimator, host)
    real = torch.ones_like(mask[:, :1]) if present is None else present.unsqueeze(1)
    mask = mask & real
    known: dict[str, Any] = {n: value.detach().unsqueeze(1) for n, value in policies.items()}
    batch = Batch(
        rewards=advantages.new_zeros(real.shape),
        mask=mask.unsqueeze(1),
        present=real,
        **known,
    ).validate()
    local = half.aggregation(batch.lengths, real)
    here, whole = (
        (mask.sum(), tokens)
        if half.aggregation.traits.scope == "batch"
        else (real.sum(), responses)
    )
    terms = Terms(
        advantages=torch.where(mask, advantages, 0.0).unsqueeze(1),
        scale=local * (here.clamp(min=1) / whole),
        reason=(~real).long(),
        reasons=("absent",),
    )
    own = token_coefficients(half, terms, batch).validate(batch).own.squeeze(1)
    return own if weights is None else torch.where(mask, own * weights, 0.0)


def _takes(estimator: Estimator, host: Host, given: bool) -> None:
    """Weights that the engine hands over belong to a correction, and the other way round."""
    wanted = any(is_given(c, host) for c in estimator.corrections if not c.idle)
    if given and not wanted:
        raise BadInput(
            f"{estimator.name} was given weights by {host.name} and has no such correction; "
            "allowed: none, since the estimator corrects by itself"
        )
    if wanted and not given:
        raise BadInput(
            f"{estimator.name} was given no weights by {host.name}; allowed: a token each"
        )


@torch.no_grad()
def whole_coefficients(estimator: Estimator, batch: Batch, groups: Groups) -> Float[Tensor, "B T"]:
    """Coefficients of all rows of an optimizer batch at once.

    Raises:
        ValueError: what `Estimator.check` and `Coefficients.validate` refuse.
    """
    batch = estimator.check(batch)
    return groups.down(coefficients(estimator, batch).validate(batch).own)
