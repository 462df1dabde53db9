"""Dumps broken in bytes and in structure: no traceback, and every row is kept or set aside."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dump_files import WRITERS, responses

from windage.analysis.diagnose.readers.index import read
from windage.analysis.diagnose.rows import Rejected, Row
from windage.estimators.errors import BadInput

ROWS = 12
FORMATS = sorted(WRITERS)
LOGPS = ("behavior_logp", "logp", "proximal_logp", "reference_logp")
Random = np.random.Generator


def some(rng: Random, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


# Bytes ------------------------------------------------------------------------------------------


def flip(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    for place in rng.integers(0, len(out), int(rng.integers(1, 9))):
        out[place] = rng.integers(256)
    return bytes(out)


def cut(data: bytes, rng: Random) -> bytes:
    return data[: int(rng.integers(1, len(data)))]


def remove(data: bytes, rng: Random) -> bytes:
    start, size = rng.integers(0, len(data)), rng.integers(1, 200)
    return data[:start] + data[start + size :] or b"x"


def insert(data: bytes, rng: Random) -> bytes:
    start = int(rng.integers(0, len(data)))
    noise = some(rng, [bytes(64), b"\xff\xfe\x80", b"[" * 3000, b"\n\n\r\n", b"NaN", rng.bytes(40)])
    return data[:start] + noise + data[start:]


def repeat(data: bytes, rng: Random) -> bytes:
    start, size = rng.integers(0, len(data)), rng.integers(1, 500)
    return data[: start + size] + data[start:]


def mark(data: bytes, rng: Random) -> bytes:
    return b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")


BYTES = (flip, cut, remove, insert, repeat, mark)

# Values -----------------------------------------------------------------------------------------

SCALARS: tuple[Any, ...] = (
    None,
    "",
    "three",
    "\ud800",
    -1,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    True,
    {},
    [],
    [[]],
    {"a": {"b": 1}},
)


def entry(value: list[Any], rng: Random) -> list[Any]:
    """One entry replaced."""
    out = list(value)
    if out:
        out[int(rng.integers(len(out)))] = some(rng, (*SCALARS, 0.5, 2, -0.0))
    return out


def shorter(value: list[Any], rng: Random) -> list[Any]:
    return value[: int(rng.integers(0, max(1, len(value))))]


def longer(value: list[Any], rng: Random) -> list[Any]:
    return value + value[-1:] * int(rng.integers(1, 5))


def changed(record: dict[str, Any], rng: Random) -> dict[str, Any]:
    """A record with one field replaced, removed, or changed inside."""
    out = dict(record)
    key = some(rng, sorted(out))
    value = out[key]
    if isinstance(value, list) and rng.random() < 0.6:
        if value and isinstance(value[0], list) and rng.random() < 0.8:
            out[key] = [some(rng, (entry, shorter, longer))(value[0], rng), *value[1:]]
        else:
            out[key] = some(rng, (entry, shorter, longer))(value, rng)
    elif rng.random() < 0.4:
        del out[key]
    else:
        out[key] = some(rng, SCALARS)
    return out


# Dumps ------------------------------------------------------------------------------------------


def parts(folder: Path) -> list[Path]:
    found = (folder,) if folder.is_file() else sorted(folder.rglob("*"))
    return [p for p in found if p.is_file() and p.stat().st_size and "stats" not in p.parts]


def break_bytes(dump: Path, rng: Random) -> None:
    """One file's bytes changed."""
    path = some(rng, [p for p in parts(dump) if "metadata" not in p.name])
    path.write_bytes(some(rng, BYTES)(path.read_bytes(), rng))


def break_structure(dump: Path, rng: Random) -> None:
    """One row's fields changed, a row doubled, or something else in its place."""
    path = some(rng, [p for p in parts(dump) if "metadata" not in p.name])
    {".jsonl": _json, ".pt": _torch, ".parquet": _parquet}[path.suffix](path, rng)


def _json(path: Path, rng: Random) -> None:
    values = [json.loads(line) for line in path.read_text().splitlines()]
    n = int(rng.integers(len(values)))
    kind = rng.integers(8)
    if kind == 0:
        values.append(values[n])
    elif kind == 1:
        values[n] = some(rng, SCALARS)
    elif isinstance(values[n], list):
        values[n] = [changed(record, rng) for record in values[n]]
    else:
        values[n] = changed(values[n], rng)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _torch(path: Path, rng: Random) -> None:
    saved = torch.load(path, weights_only=True)
    if "samples" in saved:
        n = int(rng.integers(len(saved["samples"])))
        saved["samples"][n] = changed(saved["samples"][n], rng)
    else:
        saved["rollout_data"] = changed(saved["rollout_data"], rng)
    torch.save(saved, path)


def _parquet(path: Path, rng: Random) -> None:
    table = pq.read_table(path)
    about = table.schema.metadata
    kind = rng.integers(4)
    name = some(rng, table.column_names)
    if kind == 0:
        table = table.drop_columns([name])
    elif kind == 1:
        table = pa.concat_tables([table, table.slice(int(rng.integers(len(table))), 1)])
    else:
        values = [table[name].to_pylist()[i] for i in range(len(table))]
        n = int(rng.integers(len(values)))
        inner = values[n]
        if isinstance(inner, list) and kind == 2:
            values[n] = some(rng, (shorter, longer))(inner, rng)
            if inner and not isinstance(inner[0], (bool, list)):
                values[n][:1] = [some(rng, (None, 3, -1))]
            column = pa.array(values)
        else:
            column = some(
                rng,
                (
                    pa.array([None] * len(values)),
                    pa.array([{"a": 1}] * len(values)),
                    pa.array([b"\xff"] * len(values)),
                    pa.array([[["x"]]] * len(values)),
                    pa.array([10**12] * len(values), pa.timestamp("s")),
                ),
            )
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table.replace_schema_metadata(about), path)


# The promise ------------------------------------------------------------------------------------


def sound(row: Row) -> None:
    """What the readers promise of a row that they keep."""
    assert row.mask.dtype == bool and row.mask.any()
    for name in (*LOGPS, "advantages"):
        column = getattr(row, name)
        if column is not None:
            assert column.shape == row.mask.shape and column.dtype == np.float64
            assert np.isfinite(column).all()
            assert name == "advantages" or (column[row.mask] <= 0.01).all()
    for name in ("response_ids", "versions"):
        column = getattr(row, name)
        assert column is None or (column.shape == row.mask.shape and column.dtype == np.int64)
    for name in ("group_id", "sample_id", "finish_reason", "rejected"):
        word = getattr(row, name)
        assert word is None or word.encode()
    for name in ("reward", "elapsed", "temperature"):
        value = getattr(row, name)
        assert value is None or np.isfinite(value)


def places(dump: Path) -> Counter[str]:
    """Rows in, counted without the readers: by line, or by file where a file is opaque."""
    found: Counter[str] = Counter()
    for path in parts(dump):
        if "metadata" in path.name or path.name == "traces.jsonl":
            continue
        if path.suffix == ".jsonl":
            for n, line in enumerate(path.read_bytes().split(b"\n"), 1):
                found[f"{path}: line {n}"] += bool(line.removeprefix(b"\xef\xbb\xbf").strip())
        elif path.parent.name != "train_data":
            found[str(path)] = _inside(path)
    return +found


def _inside(path: Path) -> int:
    """Rows of a whole file; 1 of a damaged one."""
    try:
        if path.suffix == ".parquet":
            return max(1, pq.ParquetFile(path).metadata.num_rows)
        return len(torch.load(path, weights_only=True)["samples"])
    except Exception:
        return 1


def place(where: str) -> str:
    """Line or file of a row."""
    return re.sub(r": (sample|rows?) .*|, (sequence|entry) \d+$", "", where)


def check(name: str, breaking: Callable[[Path, Random], None], seed: int, folder: Path) -> str:
    """Break a dump, read it, and account for every row.

    Returns:
        `read`, or `refused` where there is no dump left to recognize.
    """
    rng = np.random.default_rng(seed)
    shutil.rmtree(folder, ignore_errors=True)
    dump = WRITERS[name](folder, responses(ROWS, seed=seed % 7))
    breaking(dump, rng)
    wanted = places(dump)
    rejected: list[Rejected] = []
    try:
        kept = list(read(dump, refuse=rejected.append))
    except BadInput as refused:
        assert "\n" not in str(refused)
        return "refused"
    for row in kept:
        sound(row)
    for fault in rejected:
        assert "\n" not in str(fault) and str(fault).encode() and fault.reason
    seen = Counter(place(row.where) for row in kept if row.rejected != "no token export")
    for fault in rejected:
        seen[place(fault.where)] += fault.rows
    seen = Counter({where: n for where, n in seen.items() if "traces.jsonl" not in where})
    assert +seen == wanted or _packed(name, seen, wanted), (seed, seen - wanted, wanted - seen)
    return "read"


def _packed(name: str, seen: Counter[str], wanted: Counter[str]) -> bool:
    """Lines of these formats may hold several rows: no line is missing."""
    several = name.startswith(("prime-rl", "pipeline-rl"))
    return several and {*(+seen)} == {*wanted}


def count(breaking: Callable[[Path, Random], None], seeds: range, folder: Path) -> Counter[str]:
    found = Counter(check(FORMATS[s % len(FORMATS)], breaking, s, folder / "dump") for s in seeds)
    return found


BREAKING: Mapping[str, Callable[[Path, Random], None]] = {
    "bytes": break_bytes,
    "structure": break_structure,
}


@pytest.mark.parametrize("breaking", BREAKING)
def test_broken_dumps_lose_no_row(breaking: str, tmp_path: Path) -> None:
    found = count(BREAKING[breaking], range(36), tmp_path)
    assert found["read"] >= 27


@pytest.mark.long
@pytest.mark.parametrize("breaking", BREAKING)
def test_many_broken_dumps_lose_no_row(breaking: str, tmp_path: Path) -> None:
    found = count(BREAKING[breaking], range(1000, 1360), tmp_path)
    assert found["read"] >= 270


def test_a_row_that_vanishes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windage.analysis.diagnose.readers import nemo_rl

    honest = nemo_rl.records
    monkeypatch.setattr(nemo_rl, "records", lambda *a, **k: list(honest(*a, **k))[1:])
    with pytest.raises(AssertionError):
        check("nemo-rl", lambda dump, rng: None, 0, tmp_path / "dump")
