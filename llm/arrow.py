"""Kinds of columns, as words, in arrow's types: plain ones that every parquet tool knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

PLAIN = {
    "text": (pa.string(), lambda t: types.is_string(t) or types.is_large_string(t)),
    "integer": (pa.int64(), types.is_integer),
    "boolean": (pa.bool_(), types.is_boolean),
    "number": (pa.float64(), lambda t: types.is_float32(t) or types.is_float64(t)),
}
PRECISIONS = {"float32": pa.float32(), "float64": pa.float64()}


def parts(kind: str) -> tuple[str, int]:
    """What a kind's words say: a plain kind, and how many lists are around it.

    Example:
        >>> parts("number or null"), parts("integers"), parts("numbers by token")
        (('number', 0), ('integer', 1), ('number', 2))
    """
    word = kind.removesuffix(" or null").removesuffix(" by token")
    depth = word.endswith("s") + kind.endswith(" by token")
    return word.removesuffix("s"), depth


def type_of(kind: str, precision: str) -> pa.DataType:
    """The type in which a kind is written; ids and versions in 32 bits.

    Args:
        precision: of lists of numbers.

    Example:
        >>> type_of("integers", "float32").value_type
        DataType(int32)
    """
    word, depth = parts(kind)
    found = PLAIN[word][0]
    if depth:
        found = {"integer": pa.int32(), "number": PRECISIONS[precision]}.get(word, found)
    for _ in range(depth):
        found = pa.list_(found)
    return found


def kind_fits(kind: str, found: pa.DataType) -> bool:
    """Whether a column of a file holds the kind, in whatever width.

    Example:
        >>> kind_fits("integers", pa.list_(pa.int64())), kind_fits("integers", pa.int64())
        (True, False)
    """
    word, depth = parts(kind)
    for _ in range(depth):
        if not (types.is_list(found) or types.is_large_list(found)):
            return False
        found = found.value_type
    return bool(PLAIN[word][1](found))


def array_of(entries: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Entries of rows as a column; None is null.

    Raises:
        ArrowException, TypeError: an entry does not fit.

    Example:
        >>> array_of([[1, 2], None], pa.list_(pa.int32())).null_count
        1
    """
    if types.is_list(kind) and types.is_list(kind.value_type):
        tables = [entry for entry in entries if isinstance(entry, np.ndarray)]
        if tables and len(tables) == len(entries) and all(t.ndim == 2 for t in tables):
            return _of_tables(tables, kind)
        entries = [None if entry is None else list(entry) for entry in entries]
    elif types.is_list(kind):
        entries = [None if entry is None else _array(entry, kind.value_type) for entry in entries]
    return pa.array(entries, kind)


def _array(entry: Any, kind: pa.DataType) -> Any:
    """Numbers in the width of their column; arrow itself would cut the fraction off a number.

    Raises:
        TypeError: numbers of another kind.
    """
    found = np.asarray(entry)
    if found.ndim != 1 or found.dtype.kind == "O" or len(found) == 0:
        return list(entry)
    allowed = "b" if types.is_boolean(kind) else "iu" if types.is_integer(kind) else "fiu"
    if found.dtype.kind not in allowed:
        raise TypeError(f"{found.dtype} does not fit {kind}")
    return found.astype(kind.to_pandas_dtype()) if types.is_floating(kind) else found


def _of_tables(tables: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Tables `[T K]` as lists of lists, without an object a token."""
    counts = [len(table) for table in tables]
    widths = np.repeat([table.shape[1] for table in tables], counts)
    values = np.concatenate([table.ravel() for table in tables])
    inner_type = kind.value_type
    numbers = pa.array(_array(values, inner_type.value_type), inner_type.value_type)
    inner = pa.ListArray.from_arrays(_offsets(widths), numbers)
    return pa.ListArray.from_arrays(_offsets(counts), inner)


def _offsets(counts: Any) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
