"""Rows of a dump as flat arrays, a block of tokens at a time, so that a dump of any length fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from jaxtyping import Bool, Float, Int

from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import bucket

TOKENS = 1 << 18
UNKNOWN = -(2**31)


def group_name(row: Row) -> str:
    """The name under which a response is grouped: prompts of different steps are different."""
    if row.group_id is None:
        return f"\0{row.where}"
    return row.group_id if row.step is None else f"{row.step}/{row.group_id}"


def policy(row: Row) -> Float[np.ndarray, " T"] | None:
    """The trainer's log-probabilities: as late as the dump has them."""
    return row.proximal_logp if row.logp is None else row.logp


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Trainable tokens of some responses, one after another.

    Args:
        rows: the responses.
        bucket: of each response's group.
        count: trainable tokens of each response.
        response: number of each token's response.
        position: place of each token in its response, prompt apart.
        logp, behavior: of trainer and sampler.
        square: sum of squared probabilities before each token; NaN where it is not recorded.
        version: that drew each token, and `current` that was trained; `UNKNOWN` where not recorded.
    """

    rows: list[Row]
    bucket: Int[np.ndarray, " R"]
    count: Int[np.ndarray, " R"]
    response: Int[np.ndarray, " N"]
    position: Int[np.ndarray, " N"]
    logp: Float[np.ndarray, " N"]
    behavior: Float[np.ndarray, " N"]
    square: Float[np.ndarray, " N"]
    version: Int[np.ndarray, " N"]
    current: Int[np.ndarray, " N"]

    @cached_property
    def x(self) -> Float[np.ndarray, " N"]:
        """Log-ratio of policy to sampler."""
        return self.logp - self.behavior

    @cached_property
    def buckets(self) -> Int[np.ndarray, " N"]:
        """Bucket of each token."""
        return self.bucket[self.response]

    @cached_property
    def aged(self) -> Bool[np.ndarray, " N"]:
        """Whether the lag of a token is known."""
        return (self.version != UNKNOWN) & (self.current != UNKNOWN)

    @cached_property
    def lag(self) -> Int[np.ndarray, " N"]:
        """Updates between the weights that drew and the weights that were trained."""
        return np.where(self.aged, self.current - self.version, UNKNOWN)

    @cached_property
    def first(self) -> Int[np.ndarray, " R"]:
        """Number of each response's first token."""
        return np.cumsum(self.count) - self.count

    def places(self, some: Int[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
        """Numbers of the tokens of some responses, one response after another."""
        count = self.count[some]
        start = self.first[some] - (np.cumsum(count) - count)
        return np.repeat(start, count) + np.arange(count.sum())

    @cached_property
    def changed(self) -> Bool[np.ndarray, " N"]:
        """Whether new weights arrived before this token, in its response."""
        start = self.version[self.first]
        return (self.version != start[self.response]) & self.aged


def measurable(row: Row) -> bool:
    """Whether a response has tokens and what both trainer and sampler say of them."""
    return row.count > 0 and policy(row) is not None and row.behavior_logp is not None


def block(rows: list[Row]) -> Block:
    """The measurable ones of some rows."""
    rows = [row for row in rows if measurable(row)]
    count = np.array([row.count for row in rows], dtype=np.int64)

    def gather(name: str, absent: float, kind: type) -> np.ndarray:
        found = [policy(row) if name == "logp" else getattr(row, name) for row in rows]
        if all(value is None for value in found):
            return np.full(count.sum(), absent, kind)
        parts = [
            np.full(row.count, absent) if value is None else _own(row, value)
            for row, value in zip(rows, found, strict=True)
        ]
        return np.concatenate([np.zeros(0), *parts]).astype(kind)

    position = [_own(row, np.arange(len(row.mask))) for row in rows]
    current = [UNKNOWN if row.current_version is None else row.current_version for row in rows]
    number = np.repeat(np.arange(len(rows)), count)
    return Block(
        rows=rows,
        bucket=np.array([bucket(group_name(row)) for row in rows], dtype=np.int64),
        count=count,
        response=number,
        position=np.concatenate([np.zeros(0, int), *position]),
        logp=gather("logp", np.nan, float),
        behavior=gather("behavior_logp", np.nan, float),
        square=gather("probability_square", np.nan, float),
        version=gather("versions", UNKNOWN, np.int64),
        current=np.array(current, dtype=np.int64)[number] if rows else np.zeros(0, np.int64),
    )


def _wide(row: Row) -> int:
    """What a head takes beside the other columns of a token, about."""
    return 0 if row.head_ids is None else row.head_ids.shape[1] // 4


def _own(row: Row, values: np.ndarray) -> np.ndarray:
    """Of the tokens that the policy chose."""
    return values if row.whole else values[row.mask]


def gathered(rows: Iterable[Row], tokens: int = TOKENS) -> Iterator[list[Row]]:
    """Rows in lists of about so many tokens, at most as many rows."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row.mask) * (1 + _wide(row)) + 16
        if size >= tokens:
            yield held
            held, size = [], 0
    if held:
        yield held
