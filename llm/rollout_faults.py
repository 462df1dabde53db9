"""What a row of a rollout store may not hold; the same for writing and for reading."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from windage.estimators.batch import ROLLOUT_FIELDS, ROLLOUT_OPTIONAL
from windage.llm.arrow import parts

COLUMNS = {**ROLLOUT_FIELDS, **ROLLOUT_OPTIONAL}
OWN_LENGTH = ("prompt_ids", "components")
HEAD = ("head_ids", "head_behavior_logp")
# Log-probabilities of head tokens, which may be -inf.
HEADS = ("head_behavior_logp", "head_logp")
# What only the trainer says, and so not of a response that it never saw.
TRAINED = ("logp", "head_logp", "probability_square", "advantages")
# What rounding in half precision may add to a log-probability of 0.
ROUNDING = 0.01
LIMITS = {
    "prompt_ids": (0, math.inf),
    "response_ids": (0, math.inf),
    "behavior_logp": (-math.inf, ROUNDING),
    "proximal_logp": (-math.inf, ROUNDING),
    "reference_logp": (-math.inf, ROUNDING),
    "logp": (-math.inf, ROUNDING),
    "raw_logp": (-math.inf, ROUNDING),
    "probability_square": (0, 1 + ROUNDING),
    "turns": (0, math.inf),
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (1, math.inf),
    "elapsed": (0, math.inf),
    "head_ids": (-1, math.inf),
    **dict.fromkeys(HEADS, (-math.inf, ROUNDING)),
}
Found = Iterator[tuple[int, str]]


def faults(table: pa.RecordBatch, seen: set[str]) -> dict[int, str]:
    """The first fault of each row that has one, in words, by the row's place in the table.

    Args:
        table: its columns and their types are those of the schema.
        seen: sample ids that came before; those of this table are added.
    """
    found: dict[int, str] = {}
    for row, what in _every(table, seen):
        found.setdefault(row, what)
    return dict(sorted(found.items()))


def _every(table: pa.RecordBatch, seen: set[str]) -> Found:
    out = ~_unknown(table["rejected"])
    for name in table.schema.names:
        for row, what in _nulls(name, table[name]):
            if not (name in TRAINED and out[row] and not table[name][row].is_valid):
                yield row, what
    for place in np.flatnonzero(_unknown(table["outcome"]) & ~_unknown(table["reward"])):
        yield int(place), "outcome is null beside a reward; allowed: the reward before shaping"
    yield from _lengths(table)
    for name in table.schema.names:
        yield from _beyond(name, table[name])
    if HEAD[0] in table.schema.names:
        yield from _heads(table)
        if HEADS[1] in table.schema.names:
            yield from _uneven(table, HEADS[1])
    for row, name in enumerate(table["sample_id"].to_pylist()):
        if name in seen:
            yield row, f"sample_id {name!r} occurs twice; allowed: once in a store"
        if name is not None:
            seen.add(name)


def lengths_of(column: pa.Array) -> np.ndarray:
    """Entries of each list, 0 where there is none."""
    found: np.ndarray = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _flat(column: pa.Array, depth: int) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Innermost values of a column, with the row and the token of each."""
    rows = np.arange(len(column))
    tokens = np.zeros(len(column), dtype=np.int64)
    for level in range(depth):
        counts = lengths_of(column)
        rows = np.repeat(rows, counts)
        if level == 0:
            starts = np.cumsum(counts) - counts
            tokens = np.arange(len(rows)) - np.repeat(starts, counts)
        else:
            tokens = np.repeat(tokens, counts)
        column = column.flatten()
    return column, rows, tokens


def _at(name: str, depth: int, token: int) -> str:
    return f"{name} at {'entry' if name in OWN_LENGTH else 'token'} {token}" if depth else name


def _nulls(name: str, column: pa.Array) -> Found:
    kind = COLUMNS[name]
    for depth in range(parts(kind)[1] + 1):
        values, rows, tokens = _flat(column, depth)
        if values.null_count and not (depth == 0 and kind.endswith(" or null")):
            for place in np.flatnonzero(_unknown(values)):
                where = _at(name, depth, int(tokens[place]))
                yield int(rows[place]), f"{where} is null; allowed: {kind}"


def _lengths(table: pa.RecordBatch) -> Found:
    wanted = lengths_of(table["response_ids"])
    for name in table.schema.names:
        if parts(COLUMNS[name])[1] and name not in OWN_LENGTH:
            counts, there = lengths_of(table[name]), ~_unknown(table[name])
            for row in np.flatnonzero((counts != wanted) & there):
                yield (
                    int(row),
                    f"{name} has {counts[row]} entries, response_ids {wanted[row]}; "
                    "allowed: one a token",
                )


def _beyond(name: str, column: pa.Array) -> Found:
    """Numbers that are not finite or beyond their limits."""
    word, depth = parts(COLUMNS[name])
    if word not in ("number", "integer"):
        return
    values, rows, tokens = _flat(column, depth)
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    good = np.isfinite(numbers) & (numbers >= low) & (numbers <= high)
    if name in HEADS:
        good |= numbers == -np.inf
    good |= _unknown(values)
    for place in np.flatnonzero(~good):
        where = _at(name, depth, int(tokens[place]))
        yield int(rows[place]), f"{where} is {numbers[place]:g}; allowed: {_allowed(name)}"


def _unknown(values: pa.Array) -> np.ndarray:
    found: np.ndarray = values.is_null().to_numpy(zero_copy_only=False)
    return found


def _allowed(name: str) -> str:
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    words = "finite numbers"
    if name in HEADS:
        words = "-inf or finite numbers"
    if low > -math.inf:
        words += f" from {low:g}"
    if high < math.inf:
        words += f" to {high if float(high).is_integer() else round(high - ROUNDING):g}"
    return words


def _heads(table: pa.RecordBatch) -> Found:
    ids, rows, tokens = _flat(table[HEAD[0]], 1)
    logp = _flat(table[HEAD[1]], 1)[0]
    uneven = list(_uneven(table, HEAD[1]))
    yield from uneven
    if uneven or not len(ids) or len(ids) != len(logp):
        return
    heads = padded(ids, -1)
    empty = (heads < 0) & (padded(logp, -np.inf) > -np.inf)
    for place in np.flatnonzero(empty.any(1)):
        what = "has a log-probability without a token; allowed: -inf beside -1"
        yield int(rows[place]), f"head_ids at token {tokens[place]} {what}"
    heads.sort(1)
    twice = (heads[:, 1:] == heads[:, :-1]) & (heads[:, 1:] >= 0)
    for place in np.flatnonzero(twice.any(1)):
        what = "names a token twice; allowed: once"
        yield int(rows[place]), f"head_ids at token {tokens[place]} {what}"


def _uneven(table: pa.RecordBatch, name: str) -> Found:
    """Tokens whose head has another length here than in `head_ids`."""
    there = np.flatnonzero(~_unknown(table[name]))
    ids, rows, tokens = _flat(table[HEAD[0]].take(there), 1)
    counts, others = lengths_of(ids), lengths_of(_flat(table[name].take(there), 1)[0])
    for place in np.flatnonzero(counts != others) if len(counts) == len(others) else ():
        yield (
            int(there[rows[place]]),
            f"head_ids at token {tokens[place]} has {counts[place]} entries, {name} "
            f"{others[place]}; allowed: the same",
        )


def padded(lists: pa.Array, nothing: float) -> np.ndarray:
    """Lists of different lengths as a table, filled up."""
    counts = lengths_of(lists)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    kind = values.dtype if len(values) else np.asarray(nothing).dtype
    out = np.full((len(counts), int(counts.max(initial=0))), nothing, kind)
    out[np.arange(out.shape[1]) < counts[:, None]] = values
    return out
