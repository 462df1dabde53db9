"""The dump that ships with the package: a run whose engine keeps its cache over updates.

    python -m windage.analysis.diagnose.demo

writes analysis/diagnose/demo.parquet.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from windage.analysis.diagnose.planted import Run, rows
from windage.analysis.diagnose.rows import Row

RUN = Run(groups=56, group_size=4, lag=3, in_flight=0.5, cache=1.0, drift=0.08)
SEED = 11
NUMBERS = ("behavior_logp", "logp", "probability_square")
INTEGERS = ("response_ids", "versions")
ONE = ("group_id", "sample_id", "reward", "finish_reason", "current_version", "temperature")


def table(some: Iterable[Row]) -> pa.Table:
    """Rows under the names that the reader of plain files knows."""
    held = list(some)
    columns = {
        name: pa.array(
            [np.asarray(getattr(row, name), np.float32) for row in held], pa.list_(pa.float32())
        )
        for name in NUMBERS
        if all(getattr(row, name) is not None for row in held)
    }
    columns |= {
        name: pa.array([getattr(row, name) for row in held], pa.list_(pa.int32()))
        for name in INTEGERS
        if all(getattr(row, name) is not None for row in held)
    }
    columns |= {
        name: pa.array([getattr(row, name) for row in held])
        for name in ONE
        if all(getattr(row, name) is not None for row in held)
    }
    return pa.table(columns)


def write(path: Path, some: Iterable[Row]) -> None:
    """A dump as a plain parquet file."""
    pyarrow.parquet.write_table(table(some), path, compression="zstd", compression_level=19)


if __name__ == "__main__":
    write(Path(__file__).with_name("demo.parquet"), rows(RUN, SEED))
