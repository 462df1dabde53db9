"""Rows as a plain parquet file, under the names that the reader of plain files knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from windage.analysis.diagnose.readers.fields import HEADS, LOGPS
from windage.analysis.diagnose.rows import Row
from windage.estimators.errors import BadInput

NUMBERS, INTEGERS = pa.list_(pa.float32()), pa.list_(pa.int32())
KINDS: Mapping[str, pa.DataType] = {
    **dict.fromkeys((*LOGPS, "probability_square", "advantages"), NUMBERS),
    **dict.fromkeys(("response_ids", "prompt_ids"), INTEGERS),
    "versions": pa.list_(pa.int64()),
    "mask": pa.list_(pa.bool_()),
    "head_ids": pa.list_(INTEGERS),
    **dict.fromkeys(HEADS, pa.list_(NUMBERS)),
    **dict.fromkeys(("group_id", "sample_id", "finish_reason", "rejected"), pa.string()),
    **dict.fromkeys(("step", "current_version", "top_k"), pa.int64()),
    **dict.fromkeys(
        ("reward", "outcome", "temperature", "top_p", "elapsed", "verifier_seconds"), pa.float64()
    ),
    "raw": pa.bool_(),
}


def table(some: Iterable[Row]) -> pa.Table:
    """Rows as columns; a field that no row has is left out, as is a mask of whole responses.

    Numbers of tokens are in single precision.
    """
    rows = list(some)
    columns = {name: [getattr(row, name) for row in rows] for name in KINDS}
    if all(row.mask.all() for row in rows):
        del columns["mask"]
    return pa.table(
        {
            name: pa.array([_listed(value) for value in values], KINDS[name])
            for name, values in columns.items()
            if any(value is not None for value in values)
        }
    )


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return list(value)
    return value


def write(path: Path, some: Iterable[Row]) -> None:
    """A dump as a plain parquet file; it is there whole, or as it was.

    Raises:
        BadInput: it cannot be written there.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        try:
            pa.parquet.write_table(table(some), part, compression="zstd", compression_level=19)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as problem:
        raise BadInput(
            f"{str(path)!r}: {problem.strerror or problem}; allowed: a file that can be written"
        ) from None
