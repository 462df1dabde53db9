"""Lengths and mismatch of recorded responses: what a request may take from data.

Rows hold `logp` and `behavior_logp`, a number a token of the response: log-probabilities under the
trainer and under the sampler that drew it, of the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windage.estimators.errors import BadInput

NEEDED = ("logp", "behavior_logp")
FEWEST = 8


def measured(path: Path) -> dict[str, float]:
    """Mean length, spread of its logarithm, and mismatch a token.

        mismatch = max(0, sum of ratio * log ratio - (ratio - 1)) / tokens,   ratio = exp(x)

    with x the log-ratio of policy to sampler: an estimate of KL(policy | sampler) from the
    sampler's tokens, each term 0 or more.

    Raises:
        BadInput: a file that cannot be read, a row without the columns, a value that is not finite.
    """
    lengths: list[int] = []
    total = 0.0
    for number, row in enumerate(_rows(path)):
        x = _gap(row, path, number)
        lengths.append(len(x))
        total += float(np.sum(np.exp(x) * x - np.expm1(x)))
    if len(lengths) < FEWEST:
        raise BadInput(f"{path}: {len(lengths)} rows; allowed: at least {FEWEST}")
    logs = np.log(lengths)
    return {
        "response_tokens": float(np.mean(lengths)),
        "spread": float(logs.std(ddof=1)),
        "mismatch": max(0.0, total) / sum(lengths),
    }


def _gap(row: Any, path: Path, number: int) -> np.ndarray:
    if not isinstance(row, Mapping):
        raise BadInput(f"{path}: row {number} is no object; allowed: objects with {NEEDED}")
    for name in NEEDED:
        if row.get(name) is None:
            raise BadInput(f"{path}: row {number} has no {name}; needed: {', '.join(NEEDED)}")
    try:
        logp, behavior = (np.asarray(row[name], dtype=np.float64) for name in NEEDED)
    except (TypeError, ValueError):
        raise BadInput(f"{path}: row {number}: {NEEDED} must be lists of numbers") from None
    if logp.ndim != 1 or logp.shape != behavior.shape or not len(logp):
        raise BadInput(
            f"{path}: row {number}: logp has shape {logp.shape}, behavior_logp {behavior.shape}; "
            "allowed: two lists of the same length, one token or more"
        )
    x = logp - behavior
    if not np.isfinite(np.exp(x)).all() or not np.isfinite(x).all():
        place = int(np.argmin(np.isfinite(x) & np.isfinite(np.exp(np.where(np.isfinite(x), x, 0)))))
        raise BadInput(
            f"{path}: row {number}, token {place}: log-ratio {x[place]}; allowed: finite"
        )
    return x


def _rows(path: Path) -> Iterator[Any]:
    """Rows of a JSONL or parquet file, one after the other."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as problem:
                        raise BadInput(f"{path}: line {number + 1} is no JSON: {problem}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput(f"{path}: {problem}; allowed: a JSONL or parquet file") from None


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        missing = [name for name in NEEDED if name not in file.schema_arrow.names]
        if missing:
            raise BadInput(f"{path}: no column {missing[0]}; needed: {', '.join(NEEDED)}")
        for batch in file.iter_batches(columns=list(NEEDED)):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as problem:
        raise BadInput(f"{path}: not a readable parquet file: {problem}") from None
