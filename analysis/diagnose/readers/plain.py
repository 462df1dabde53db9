"""Rows in our own names, or in names that a map gives, from JSONL or parquet.

Lists have one entry a token of the response.  Without `mask` every token is the policy's.
`advantages` and `versions` may be one number for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers import jsonl, tables
from windage.analysis.diagnose.readers.fields import (
    HEADS,
    LOGPS,
    Fault,
    Refuse,
    Seen,
    flags,
    integer,
    integers,
    kept,
    member,
    number,
    numbers,
    once,
    row,
    text,
)
from windage.analysis.diagnose.readers.files import Dump, container
from windage.analysis.diagnose.rows import Row
from windage.estimators.errors import BadInput, unknown

NAME = "plain"
FIELDS = tuple(f.name for f in fields(Row) if f.name not in ("where", "others"))
HEAD = ("head_ids", *HEADS)
ONE: Mapping[str, Callable[[str, Any], Any]] = {
    "current_version": integer,
    "group_id": text,
    "sample_id": text,
    "step": integer,
    "reward": number,
    "outcome": number,
    "finish_reason": text,
    "rejected": text,
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "elapsed": number,
    "verifier_seconds": number,
}
MANY: Mapping[str, Callable[[str, Any], np.ndarray]] = {
    **dict.fromkeys(LOGPS, numbers),
    "probability_square": numbers,
    "response_ids": integers,
    "prompt_ids": integers,
}
READ: Mapping[str, Callable[[str, Any], Any]] = {**ONE, **MANY}
BROADCAST: Mapping[str, Callable[[str, Any], np.ndarray]] = {
    "versions": integers,
    "advantages": numbers,
}


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is in our own names."""
    return "behavior_logp" in record or "logp" in record


def named(columns: Mapping[str, str] | None) -> Mapping[str, str]:
    """The column of each field that a dump may have.

    Raises:
        BadInput: a field that rows have not.
    """
    for name in columns or {}:
        if name not in FIELDS:
            raise unknown("field", name, FIELDS)
    return {**{name: name for name in FIELDS}, **(columns or {})}


def rows(dump: Dump, refuse: Refuse, *, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The rows of JSONL or parquet files.

    Raises:
        BadInput: an unknown field, or a parquet file without a column of the map.
    """
    names = named(columns)
    seen = Seen()
    for path in dump.files:
        if container(path) == "parquet":
            _check(path, columns or {})
            items = tables.records(path, list(names.values()), refuse)
        else:
            items = jsonl.records(path, refuse)
        yield from kept(items, partial(made, names=names, given=columns or {}, seen=seen), refuse)


def _check(path: Path, columns: Mapping[str, str]) -> None:
    try:
        there = tables.opened(path).schema_arrow.names
    except Fault:
        return
    for column in columns.values():
        if column not in there:
            raise BadInput(f"{path}: {unknown('column', column, there)}")


def made(
    where: str,
    record: Mapping[str, Any],
    *,
    names: Mapping[str, str],
    given: Mapping[str, str],
    seen: Seen,
    **also: Any,
) -> Row:
    """A row of named columns.

    Args:
        where: for messages.
        record: its columns.
        names: the column of each field.
        given: those that have to be there.
        seen: names of the rows before.
        also: fields that are known otherwise.

    Raises:
        Fault: what is wrong with it.
    """
    for column in given.values():
        member(record, column)
    there = {f: value for f, c in names.items() if (value := record.get(c)) is not None}
    if not any(name in there for name in LOGPS):
        missing = "behavior_logp" if "behavior_logp" not in there else "logp"
        raise Fault("missing field", f"has no {names[missing]}; needed")
    found: dict[str, Any] = {f: READ[f](names[f], v) for f, v in there.items() if f in READ}
    length = next(len(found[name]) for name in (*LOGPS, "response_ids") if name in found)
    mask = flags(names["mask"], there["mask"]) if "mask" in there else np.ones(length, bool)
    for name, read in BROADCAST.items():
        if name in there:
            found[name] = _for_all(names[name], there[name], len(mask), read)
    for name in HEAD:
        if name in there:
            found[name] = head(names[name], there[name], name == "head_ids")
    if "raw" in there:
        found["raw"] = bool(flags(names["raw"], [there["raw"]])[0])
    once(seen, found.get("step"), found.get("group_id"), found.get("sample_id"))
    return row(where, mask, **{**also, **found})


def _for_all(
    name: str, value: Any, length: int, read: Callable[[str, Any], np.ndarray]
) -> np.ndarray:
    """A list, or one number for every token."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return np.repeat(read(name, [value]), length)
    return read(name, value)


def head(name: str, value: Any, ids: bool) -> np.ndarray:
    """Lists of different length as a table; a short head ends in id -1, -inf.

    Raises:
        Fault: of another type.
    """
    if not isinstance(value, list):
        raise Fault("wrong type", f"has {name} of {type(value).__name__}; allowed: lists by token")
    read: Callable[[str, Any], np.ndarray] = integers if ids else numbers
    parts = [read(name, part) for part in value]
    width = max(map(len, parts), default=0)
    if width * len(parts) > 16 * sum(map(len, parts)) + 2**20:
        raise Fault("too many parts", f"has {name} of very different lengths; not read")
    out = np.full((len(parts), width), -1 if ids else -np.inf, np.int64 if ids else np.float64)
    for t, part in enumerate(parts):
        out[t, : len(part)] = part
    return out
