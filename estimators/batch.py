"""The one record that every stage reads.

Axes, here and in every signature of the package: `P` prompts, `G` responses of a prompt, `T` tokens
of a response (the stop token included), `K` head tokens; any leading axes are replicates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SCHEMA_VERSION = 1
TOKEN_FIELDS = ("logp", "behavior_logp", "proximal_logp", "reference_logp", "values", "versions")
HEAD_FIELDS = ("head_ids", "head_behavior_logp", "head_logp")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Responses of P prompts, G a prompt, padded to T tokens.

    Args:
        rewards: one scalar a response, after shaping.
        present: False where a group is incomplete; such rows count nowhere.
        mask: True on the tokens that the policy chose (no prompt, tool or padding token).
        logp: log-probability of each token under the policy being trained, in nats.
        behavior_logp: the same under the distribution that really sampled it.
        proximal_logp: under the anchor of a decoupled clip.
        reference_logp: under the reference of a penalty.
        values: critic's value before each token, in units of reward.
        versions: number of the weights that sampled each token.
        head_ids, head_behavior_logp, head_logp: the sampler's K likeliest tokens at each position
            and their log-probabilities under sampler and trainer; full vocabulary: exact.
        outcomes: rewards before shaping (admission looks here); absent: the rewards.
        requested: group size asked for, a prompt; absent: G.
        truncated: the engine stopped the response at a limit.
        elapsed: seconds from request to verdict, a response.
        current_version: number of the weights being trained.
        group_ids: names of the prompts, for messages.
        row_index: position of each response in the rows it was built from, -1 where padded.
    """

    rewards: Float[Tensor, "*batch P G"]
    mask: Bool[Tensor, "*batch P G T"]
    logp: Float[Tensor, "*batch P G T"]
    present: Bool[Tensor, "*batch P G"] | None = None
    behavior_logp: Float[Tensor, "*batch P G T"] | None = None
    proximal_logp: Float[Tensor, "*batch P G T"] | None = None
    reference_logp: Float[Tensor, "*batch P G T"] | None = None
    values: Float[Tensor, "*batch P G T"] | None = None
    versions: Int[Tensor, "*batch P G T"] | None = None
    head_ids: Int[Tensor, "*batch P G T K"] | None = None
    head_behavior_logp: Float[Tensor, "*batch P G T K"] | None = None
    head_logp: Float[Tensor, "*batch P G T K"] | None = None
    outcomes: Float[Tensor, "*batch P G"] | None = None
    requested: Int[Tensor, " P"] | None = None
    truncated: Bool[Tensor, "*batch P G"] | None = None
    elapsed: Float[Tensor, "*batch P G"] | None = None
    current_version: int | None = None
    group_ids: tuple[Hashable, ...] | None = None
    row_index: Int[Tensor, "P G"] | None = None

    @property
    def lengths(self) -> Int[Tensor, "*batch P G"]:
        """Trainable tokens of each response."""
        return self.mask.sum(-1)

    def get(self, name: str) -> Any:
        """A field by name, with the stated stand-ins for absent `present` and `outcomes`.

        Raises:
            ValueError: the field is absent.
        """
        value = getattr(self, name)
        if value is None and name == "present":
            return torch.ones_like(self.rewards, dtype=torch.bool)
        if value is None and name == "outcomes":
            return self.rewards
        if value is None:
            raise ValueError(f"the batch has no {name}, which this estimator needs")
        return value

    def select(self, prompts: Any) -> Batch:
        """The same record for some prompts only (a slice or an index along P)."""
        changes = {
            f.name: (
                value[prompts]
                if f.name in ("requested", "row_index")
                else value[..., prompts, :]
                if f.name in ("rewards", "present", "outcomes", "truncated", "elapsed")
                else value[..., prompts, :, :, :]
                if f.name in HEAD_FIELDS
                else value[..., prompts, :, :]
            )
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        names = self.group_ids
        if names is not None:
            picked = torch.arange(len(names))[prompts].tolist()
            changes["group_ids"] = tuple(names[i] for i in picked)
        return replace(self, **changes)

    def validate(self) -> Batch:
        """Check shapes and values once; stages rely on it.

        Raises:
            ValueError: names the argument, the row (group and member) and the value.
        """
        shape = self.mask.shape
        present = self.get("present")
        real = self.mask & present.unsqueeze(-1)
        for name in (*TOKEN_FIELDS, *HEAD_FIELDS, "rewards", "outcomes", "elapsed"):
            value = getattr(self, name)
            if value is None:
                continue
            depth = 4 if name in HEAD_FIELDS else 3 if name in TOKEN_FIELDS else 2
            want = shape[:-1] if depth == 2 else shape
            if value.shape[: len(want)] != want:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, mask {tuple(shape)}")
            if not value.is_floating_point():
                continue
            where = present if depth == 2 else real if depth == 3 else real.unsqueeze(-1)
            allowed = torch.isfinite(value)
            if name.startswith("head_"):
                allowed = allowed | (value == -math.inf)
            bad = torch.nonzero(where & ~allowed)
            if len(bad):
                place = tuple(bad[0].tolist())
                raise ValueError(
                    f"{name} is {float(value[place])} at {self.row_name(place)}; "
                    "allowed: finite numbers"
                )
        return self

    def row_name(self, place: Sequence[int]) -> str:
        """Words for an index `(..., p, g[, t[, k]])` of a two- or three-axis field."""
        lead = self.rewards.dim() - 2
        prompt, member, *rest = place[lead:]
        group = self.group_ids[prompt] if self.group_ids is not None else prompt
        row = "" if self.row_index is None else f"row {int(self.row_index[prompt, member])}, "
        token = f", token {rest[0]}" if rest else ""
        return f"{row}group {group}, response {member}{token}"

    @classmethod
    def from_rows(
        cls,
        rewards: Sequence[float | None],
        group_ids: Sequence[Hashable],
        *,
        mask: Sequence[Sequence[int | bool]],
        group_size: int | None = None,
        dtype: torch.dtype = torch.float64,
        current_version: int | None = None,
        **rows: Sequence[Any],
    ) -> Batch:
        """Group and pad rows that come in any order.

        Args:
            rewards: one a row; None where a response could not be scored (absent).
            group_ids: the prompt of each row; groups appear in the order of their first row.
            mask: 0/1 for each token of each row.
            group_size: size asked for; default: the rows that a group has.
            rows: any other field of `Batch`, one entry a row.

        Raises:
            ValueError: an unknown field, rows of different length, NaN, or None inside a row.

        Example:
            >>> batch = Batch.from_rows([1.0, None, 0.0], "aab", mask=[[1], [1], [1]],
            ...                         logp=[[-0.1], [-0.2], [-0.3]], group_size=2)
            >>> batch.present.tolist()
            [[True, False], [True, False]]
        """
        known = {f.name for f in fields(cls)}
        for name in rows:
            if name not in known:
                raise ValueError(f"Batch has no field {name!r}; it has: {', '.join(sorted(known))}")
        for name, column in {"group_ids": group_ids, "mask": mask, **rows}.items():
            if len(column) != len(rewards):
                raise ValueError(f"{name} has {len(column)} rows, rewards {len(rewards)}")
        members: dict[Hashable, list[int]] = {}
        for row, group in enumerate(group_ids):
            members.setdefault(group, []).append(row)
        names = tuple(members)
        sizes = [len(members[name]) for name in names]
        width = max([*sizes, group_size or 1])
        index = torch.full((len(names), width), -1)
        for p, name in enumerate(names):
            index[p, : sizes[p]] = torch.tensor(members[name])
        tokens = max([len(row) for row in mask], default=0)

        def pad(name: str, column: Sequence[Any]) -> Tensor:
            per_token = name in (*TOKEN_FIELDS, *HEAD_FIELDS, "mask")
            for row, entry in enumerate(column):
                if per_token and len(entry) != len(mask[row]):
                    raise ValueError(
                        f"row {row}: {name} has length {len(entry)}, mask {len(mask[row])}"
                    )
                cells = entry if per_token and name not in HEAD_FIELDS else [entry]
                if any(cell is None for cell in cells):
                    place = next(i for i, cell in enumerate(cells) if cell is None)
                    raise ValueError(f"row {row}: {name} is None at position {place}")
            kind = (
                torch.int64
                if name in ("versions", "head_ids")
                else torch.bool
                if name in ("mask", "truncated")
                else dtype
            )
            values = [torch.as_tensor(entry, dtype=kind) for entry in column]
            if not per_token:
                flat = torch.stack(values) if values else torch.zeros(0, dtype=kind)
                return torch.where(
                    index >= 0, flat[index.clamp(min=0)], torch.zeros((), dtype=kind)
                )
            tail = values[0].shape[1:] if values else ()
            out = torch.zeros((len(names), width, tokens, *tail), dtype=kind)
            for p, name_ in enumerate(names):
                for g, row in enumerate(members[name_]):
                    out[p, g, : len(values[row])] = values[row]
            return out

        scored = [reward is not None for reward in rewards]
        present = pad("truncated", scored)
        numbers = [0.0 if reward is None else float(reward) for reward in rewards]
        for row, number in enumerate(numbers):
            if not math.isfinite(number):
                raise ValueError(
                    f"rewards: row {row} is {number}; allowed: a finite number or None"
                )
        padded = {name: pad(name, column) for name, column in rows.items()}
        filled = pad("mask", mask) & present.unsqueeze(-1)
        padded.setdefault("logp", torch.zeros(filled.shape, dtype=dtype))
        asked = [max(size, group_size or 0) for size in sizes]
        return cls(
            rewards=pad("rewards", numbers),
            present=present,
            mask=filled,
            requested=torch.tensor(asked),
            group_ids=names,
            row_index=index,
            current_version=current_version,
            **padded,
        ).validate()

    def to_rows(self, value: Tensor) -> Tensor:
        """Values `[P G ...]` back in the order of the rows this batch was built from."""
        if self.row_index is None:
            raise ValueError("to_rows needs a batch made by Batch.from_rows")
        real = self.row_index >= 0
        out = value.new_zeros((int(real.sum()), *value.shape[2:]))
        out[self.row_index[real]] = value[real]
        return out


def promote(logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """bfloat16 and float16 become float32; wider types stay as they are."""
    return logp.float() if logp.dtype in (torch.bfloat16, torch.float16) else logp


def log_ratio(
    numerator: Float[Tensor, "*batch T"],
    denominator: Float[Tensor, "*batch T"],
    mask: Bool[Tensor, "*batch T"],
) -> Float[Tensor, "*batch T"]:
    """Difference of two log-probabilities, exactly 0 where the mask is False.

        x[t] = numerator[t] - denominator[t]

    Claims:
        What stands under a False mask, NaN included, reaches neither value nor gradient.
        Half precision is promoted before the subtraction.

    Example:
        >>> log_ratio(torch.tensor([-1.0, float("nan")]), torch.tensor([-2.0, 0.0]),
        ...           torch.tensor([True, False]))
        tensor([1., 0.])
    """
    difference = promote(numerator) - promote(denominator)
    return torch.where(mask, difference, torch.zeros_like(difference))
