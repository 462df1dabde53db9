"""Rows of a parquet file as plain values and arrays, a piece of the file at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from windage.analysis.diagnose.readers.fields import Fault, Refuse, shown
from windage.analysis.diagnose.rows import Rejected

BROKEN = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, IndexError)
# Values of one column in memory at a time, and of one row at most.
PIECE = 2**20
WIDEST = 2**26
Record = dict[str, Any]


def opened(path: Path) -> pq.ParquetFile:
    """The file.

    Raises:
        Fault: it is damaged.
    """
    try:
        file = pq.ParquetFile(
            path, page_checksum_verification=True, pre_buffer=False, buffer_size=2**20
        )
        file.schema_arrow  # noqa: B018
        return file
    except BROKEN as problem:
        raise Fault("damaged", f"is damaged: {_first_line(problem)}") from None


def _first_line(problem: BaseException) -> str:
    line = (str(problem).splitlines() or [type(problem).__name__])[0]
    return "".join(c if c.isprintable() else "?" for c in line)[:200]


def metadata(file: pq.ParquetFile) -> Mapping[str, str]:
    """What the file says of itself."""
    told = file.metadata.metadata or {}
    return {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in told.items()
    }


def records(path: Path, columns: Sequence[str], refuse: Refuse) -> Iterator[tuple[str, Record]]:
    """Each row's values of some columns, lists as arrays, and where it stands.

    A part of the file that is damaged is set aside with the rows that it says it has.

    Args:
        path: a parquet file.
        columns: those wanted; one that the file lacks is left out.
        refuse: told of damaged parts.
    """
    try:
        file = opened(path)
    except Fault as fault:
        refuse(Rejected(where=shown(path), reason=fault.reason, what=fault.what))
        return
    name = shown(path)
    with file:
        wanted = [column for column in columns if column in file.schema_arrow.names]
        start = 0
        for group in range(file.num_row_groups):
            end = start + max(0, file.metadata.row_group(group).num_rows)
            what = "are missing from the file"
            try:
                for piece in _pieces(file, group, wanted):
                    for n, record in enumerate(_rows(piece, wanted)):
                        yield f"{name}: row {start + n}", record
                    start += len(piece)
            except Fault as fault:
                what = fault.what
            except BROKEN as problem:
                what = f"are damaged: {_first_line(problem)}"
            if start < end:
                where = f"{name}: rows {start} to {end - 1}"
                refuse(Rejected(where=where, reason="damaged", what=what, rows=end - start))
            start = max(start, end)


def _pieces(file: pq.ParquetFile, group: int, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Some rows at a time, fewer where rows are long.

    Raises:
        Fault: rows that are too long.
    """
    known = file.metadata.row_group(group)
    values = max((known.column(c).num_values for c in range(known.num_columns)), default=0)
    longest = values / max(1, known.num_rows)
    if longest > WIDEST:
        raise Fault("too many parts", f"have {longest:.3g} values a row; allowed: {WIDEST}")
    size = int(max(1, min(1024, PIECE // max(1.0, longest))))
    yield from file.iter_batches(size, row_groups=[group], columns=wanted, use_threads=False)


def _rows(piece: pa.RecordBatch, wanted: list[str]) -> Iterator[Record]:
    columns = {name: _column(piece[name]) for name in wanted}
    for n in range(len(piece)):
        yield {name: column[n] for name, column in columns.items()}


def _column(column: pa.Array) -> Sequence[Any]:
    """One value a row; a type that is not read gives its name in a tuple, which fits nothing."""
    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if types.is_fixed_size_list(kind):
        column, kind = column.cast(pa.list_(kind.value_type)), pa.list_(kind.value_type)
    if _is_list(kind):
        return _lists(column)
    if types.is_string(kind) or types.is_large_string(kind):
        return _texts(column)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return column.to_pylist()
    return [value if value is None else (str(kind),) for value in pc.is_valid(column).to_pylist()]


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _texts(column: pa.Array) -> list[str | None]:
    wide = column.cast(pa.large_binary(), safe=False).to_pylist()
    return [None if word is None else word.decode(errors="backslashreplace") for word in wide]


def _lists(column: pa.Array) -> list[Any]:
    """Arrays, or lists of arrays; a null list is None.

    Whole numbers with a null among them become objects, which fit nothing.
    """
    counts = pc.list_value_length(column)
    inner = column.flatten()
    lengths = counts.fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    values, unknown = _lists(inner) if _is_list(inner.type) else _values(inner), None
    if inner.null_count and not types.is_floating(inner.type):
        unknown = np.cumsum(np.r_[0, inner.is_null().to_numpy(zero_copy_only=False)])
    found: list[Any] = []
    for n, end, there in zip(lengths, ends, counts.is_valid().to_pylist(), strict=True):
        part = values[end - n : end] if there else None
        if unknown is not None and there and unknown[end] > unknown[end - n]:
            part = np.full(n, None, object)
        found.append(part)
    return found


def _values(inner: pa.Array) -> np.ndarray:
    """Numbers; of other types as many objects."""
    kind = inner.type
    if types.is_floating(kind):
        return np.asarray(inner.to_numpy(zero_copy_only=False))
    if types.is_integer(kind) or types.is_boolean(kind):
        filler = pa.scalar(False if types.is_boolean(kind) else 0, kind)
        return np.asarray(inner.fill_null(filler).to_numpy(zero_copy_only=False))
    return np.full(len(inner), None, object)
