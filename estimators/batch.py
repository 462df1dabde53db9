"""The one record that every stage reads.

Axes, here and in every signature of the package: `P` prompts, `G` responses of a prompt, `T` tokens
of a response (the stop token included), `K` head tokens, `C` components of a reward; any leading
axes are replicates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TOKEN_FIELDS = (
    "logp",
    "behavior_logp",
    "proximal_logp",
    "reference_logp",
    "values",
    "versions",
    "probability_square",
)
HEAD_FIELDS = ("head_ids", "head_behavior_logp", "head_logp")
RESPONSE_FIELDS = ("outcomes", "truncated", "elapsed")

# Columns of a rollout store, one row a response, and what each holds; a list has one entry a token
# of the response, but for `prompt_ids` and `components`.  Written by `llm`, read by `analysis`.
SCHEMA_VERSION = 1
ROLLOUT_FIELDS = {
    "group_id": "text",
    "sample_id": "text",
    "prompt_ids": "integers",
    "response_ids": "integers",
    "mask": "booleans",
    "behavior_logp": "numbers",
    "versions": "integers",
    "reward": "number or null",
    "outcome": "number or null",
    "finish_reason": "text",
    "temperature": "number",
    "top_p": "number",
    "top_k": "integer or null",
    "seed": "integer or null",
    "elapsed": "number",
    "rejected": "text or null",
}
ROLLOUT_OPTIONAL = {
    "head_ids": "integers by token",
    "head_behavior_logp": "numbers by token",
    "head_logp": "numbers by token",
    "proximal_logp": "numbers",
    "reference_logp": "numbers",
    "components": "numbers",
    "verdict": "text or null",
    "logp": "numbers",
    "raw_logp": "numbers",
    "probability_square": "numbers",
    "advantages": "numbers",
    "values": "numbers",
    "returns": "numbers",
    "turns": "integers",
}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Responses of P prompts, G a prompt, padded to T tokens.

    Args:
        rewards: one scalar a response, after shaping.
        present: False where a group is incomplete; such rows count nowhere.
        mask: True on the tokens that the policy chose (no prompt, tool or padding token).
        logp: log-probability of each token under the policy being trained, in nats; absent until
            the trainer's forward pass.
        behavior_logp: the same under the distribution that really sampled it.
        proximal_logp: under the anchor of a decoupled clip.
        reference_logp: under the reference of a penalty.
        values: critic's value before each token, in units of reward.
        versions: number of the weights that sampled each token.
        head_ids, head_behavior_logp, head_logp: the sampler's K likeliest tokens at each position
            and their log-probabilities under sampler and trainer; full vocabulary: exact.  A head
            shorter than K is filled with -inf under both.
        probability_square: sum of squared probabilities of all tokens, before each token.
        components: parts of the reward, each on its own scale; the rewards stand beside them.
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
    logp: Float[Tensor, "*batch P G T"] | None = None
    present: Bool[Tensor, "*batch P G"] | None = None
    behavior_logp: Float[Tensor, "*batch P G T"] | None = None
    proximal_logp: Float[Tensor, "*batch P G T"] | None = None
    reference_logp: Float[Tensor, "*batch P G T"] | None = None
    values: Float[Tensor, "*batch P G T"] | None = None
    versions: Int[Tensor, "*batch P G T"] | None = None
    head_ids: Int[Tensor, "*batch P G T K"] | None = None
    head_behavior_logp: Float[Tensor, "*batch P G T K"] | None = None
    head_logp: Float[Tensor, "*batch P G T K"] | None = None
    probability_square: Float[Tensor, "*batch P G T"] | None = None
    components: Float[Tensor, "*batch P G C"] | None = None
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

    @property
    def missing(self) -> Int[Tensor, "*batch P"]:
        """Responses of each prompt that were asked for and did not arrive with a reward."""
        asked = self.rewards.shape[-1] if self.requested is None else self.requested
        return asked - self.get("present").sum(-1)

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
        """The same record for some prompts only: a slice, or a list or tensor of positions."""
        changes: dict[str, Any] = {
            f.name: (
                value[prompts]
                if f.name in ("requested", "row_index")
                else value[..., prompts, :]
                if f.name in ("rewards", "present", *RESPONSE_FIELDS)
                else value[..., prompts, :, :, :]
                if f.name in HEAD_FIELDS
                else value[..., prompts, :, :]
            )
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        names = self.group_ids
        if names is not None:
            picked = torch.arange(len(names), device=self.rewards.device)[prompts].tolist()
            changes["group_ids"] = tuple(names[i] for i in picked)
        return replace(self, **changes)

    def validate(self) -> Batch:
        """Check shapes and values once; stages rely on it.

        Returns:
            The batch, with the mask False on rows that are not present.

        Raises:
            ValueError: names the argument, the row (group and member) and the value.
        """
        shape = self.mask.shape
        present = self.get("present")
        self._shape("rewards", shape[:-1])
        self._shape("present", shape[:-1])
        real = self.mask & present.unsqueeze(-1)
        for name in ("rewards", *RESPONSE_FIELDS):
            self._check(name, shape[:-1], present)
        for name in TOKEN_FIELDS:
            self._check(name, shape, real)
        if self.components is not None:
            wide = (*shape[:-1], self.components.shape[-1])
            self._check("components", wide, present.unsqueeze(-1))
        heads = {getattr(self, n).shape[-1] for n in HEAD_FIELDS if getattr(self, n) is not None}
        if len(heads) > 1:
            raise ValueError(f"the head fields hold {sorted(heads)} tokens; allowed: the same")
        for name in HEAD_FIELDS:
            self._check(name, (*shape, *heads), real.unsqueeze(-1))
        for name in ("requested", "group_ids"):
            column = getattr(self, name)
            if column is not None and len(column) != shape[-3]:
                raise ValueError(f"{name} has {len(column)} entries, mask {shape[-3]} prompts")
        return self if self.present is None else replace(self, mask=real)

    def _shape(self, name: str, want: Sequence[int]) -> None:
        value = getattr(self, name)
        if value is not None and tuple(value.shape) != tuple(want):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, mask {tuple(self.mask.shape)}; "
                f"allowed: {tuple(want)}"
            )

    def _check(self, name: str, want: Sequence[int], where: Tensor) -> None:
        self._shape(name, want)
        value = getattr(self, name)
        if value is None or not value.is_floating_point():
            return
        allowed = torch.isfinite(value)
        words = "finite numbers"
        if name.startswith("head_"):
            allowed, words = allowed | (value == -math.inf), "finite numbers or -inf"
        bad = torch.nonzero(where & ~allowed)
        if len(bad):
            place = tuple(bad[0].tolist())
            at = self.row_name(place[:-1] if name == "components" else place)
            part = f", component {place[-1]}" if name == "components" else ""
            raise ValueError(f"{name} is {float(value[place])} at {at}{part}; allowed: {words}")

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
            rows: any other field that `Batch` has a row, one entry a row.

        Raises:
            ValueError: an unknown field, rows of different length, NaN, or None where a row has a
                reward.

        Example:
            >>> batch = Batch.from_rows([1.0, None, 0.0], "aab", mask=[[1], [1], [1]],
            ...                         logp=[[-0.1], [-0.2], [-0.3]], group_size=2)
            >>> batch.present.tolist()
            [[True, False], [True, False]]
        """
        known = (*TOKEN_FIELDS, *HEAD_FIELDS, *RESPONSE_FIELDS, "components")
        for name in rows:
            if name not in known:
                raise ValueError(f"rows have no field {name!r}; they have: {', '.join(known)}")
        for name, column in {"group_ids": group_ids, "mask": mask, **rows}.items():
            if len(column) != len(rewards):
                raise ValueError(f"{name} has {len(column)} rows, rewards {len(rewards)}")
        names, index = _by_group(group_ids, group_size or 1)
        scored = [reward is not None for reward in rewards]
        columns = {"rewards": rewards, "present": scored, "mask": mask, **rows}
        placed = {
            name: _responses(name, column, scored, index, dtype)
            if name in ("rewards", "present", *RESPONSE_FIELDS)
            else _components(column, scored, index, dtype)
            if name == "components"
            else _tokens(name, column, mask, index, dtype)
            for name, column in columns.items()
        }
        sizes = (index >= 0).sum(1)
        return cls(
            requested=sizes if group_size is None else sizes.clamp(min=group_size),
            group_ids=names,
            row_index=index,
            current_version=current_version,
            **placed,
        ).validate()

    def to_rows(self, value: Tensor) -> Tensor:
        """Values `[P G ...]` back in the order of the rows that this batch holds.

        A batch of selected prompts gives its own rows only, in their original order.
        """
        if self.row_index is None:
            raise ValueError("to_rows needs a batch made by Batch.from_rows")
        real = self.row_index >= 0
        return value[real][self.row_index[real].argsort()]


def _by_group(group_ids: Sequence[Hashable], width: int) -> tuple[tuple[Hashable, ...], Tensor]:
    """Names of the groups in the order of their first row, and the rows of each; -1: no row."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        members.setdefault(group, []).append(row)
    index = torch.full((len(members), max([width, *map(len, members.values())])), -1)
    for p, rows in enumerate(members.values()):
        index[p, : len(rows)] = torch.tensor(rows)
    return tuple(members), index


def _responses(
    name: str, column: Sequence[Any], scored: list[bool], index: Tensor, dtype: torch.dtype
) -> Tensor:
    """One number a row, placed `[P G]`; None is allowed, and is 0, where a row has no reward."""
    for row, entry in enumerate(column):
        if entry is None and scored[row]:
            raise ValueError(f"row {row}: {name} is None")
    kind = torch.bool if name in ("present", "truncated") else dtype
    flat = torch.tensor([0 if entry is None else entry for entry in column] or [0], dtype=kind)
    return torch.where(index >= 0, flat[index.clamp(min=0)], torch.zeros((), dtype=kind))


def _components(
    column: Sequence[Any], scored: list[bool], index: Tensor, dtype: torch.dtype
) -> Tensor:
    """The parts of each row's reward, placed `[P G C]`; None, and 0, where a row has no reward."""
    width = max((len(entry) for entry in column if entry is not None), default=0)
    filled: list[Any] = []
    for row, entry in enumerate(column):
        if entry is None and not scored[row]:
            entry = [0.0] * width
        if entry is None or len(entry) != width or any(part is None for part in entry):
            words = "None" if entry is None or len(entry) == width else f"of length {len(entry)}"
            raise ValueError(f"row {row}: components is {words}; allowed: {width} numbers")
        filled.append(entry)
    flat = torch.tensor(filled or [[0.0] * width], dtype=dtype)
    real = (index >= 0).unsqueeze(-1)
    return torch.where(real, flat[index.clamp(min=0)], torch.zeros((), dtype=dtype))


def _tokens(
    name: str, column: Sequence[Any], mask: Sequence[Any], index: Tensor, dtype: torch.dtype
) -> Tensor:
    """The tokens of each row, placed `[P G T ...]` and filled with 0."""
    integers = name in ("versions", "head_ids")
    kind = torch.int64 if integers else torch.bool if name == "mask" else dtype
    for row, entry in enumerate(column):
        if len(entry) != len(mask[row]):
            raise ValueError(f"row {row}: {name} has length {len(entry)}, mask {len(mask[row])}")
        if isinstance(entry, (list, tuple)) and None in entry:
            raise ValueError(f"row {row}: {name} is None at position {entry.index(None)}")
    placed = [column[row] for row in index[index >= 0].tolist()]
    counts = torch.tensor([len(entry) for entry in placed], dtype=torch.long)
    lengths = torch.zeros_like(index).masked_scatter(index >= 0, counts)
    if all(isinstance(entry, (list, tuple)) for entry in placed):
        flat = torch.tensor([token for entry in placed for token in entry], dtype=kind)
    else:
        written = [entry for entry in placed if len(entry)] or placed[:1]
        flat = torch.cat([torch.as_tensor(entry, dtype=kind) for entry in written])
    real = torch.arange(max(map(len, mask), default=0)) < lengths.unsqueeze(-1)
    out = torch.zeros((*real.shape, *flat.shape[1:]), dtype=kind)
    out[real] = flat.to(kind)
    return out


def promote(logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """bfloat16 and float16 become float32; wider types stay as they are.

    Example:
        >>> promote(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
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
