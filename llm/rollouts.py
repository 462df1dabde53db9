"""The rollout store: a folder with one parquet file a step, and every response in it as it was.

The columns are those of `ROLLOUT_FIELDS` and, where recorded, of `ROLLOUT_OPTIONAL`:

    group_id, sample_id    of the prompt, and of the response in the whole store
    prompt_ids             tokens of the prompt
    response_ids           tokens of the response, the stop token included
    mask                   whether the policy chose the token (a tool's tokens: no)
    behavior_logp          nats, under the distribution that really sampled the token
    versions               number of the weights that sampled the token
    reward, outcome        after and before shaping; null: it could not be scored
    finish_reason          `stop`, or `length` where a limit cut the response, or the engine's word
    temperature, top_p, top_k, seed    of the sampler; top_k null: no limit
    elapsed                seconds from request to verdict
    rejected               null where admission kept the response, else why not
    head_ids, head_behavior_logp    the sampler's likeliest tokens; a short head ends in id -1, -inf
    head_logp              of these tokens, under the policy that was trained
    proximal_logp, reference_logp   nats
    components             parts of the reward
    verdict                of the task: `right`, `format`, `wrong` or `invalid`
    logp                   nats, under the policy that was trained, as late as is known
    raw_logp               nats, of the engine before temperature, top-p and top-k
    probability_square     sum of squared probabilities of all tokens before the token
    advantages             as the trainer used them
    values, returns        a critic's value before each token, and what it was fitted to
    turns                  number of the turn in which the token was written

`logp`, `probability_square` and `advantages` of a response that was rejected may be null: the
trainer never saw it.

Each file's metadata holds the schema and the fingerprint of the tokenizer; there is no pickle and
no extension type, so any parquet tool reads them.  A step is written once and never again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from windage.estimators.batch import ROLLOUT_FIELDS, ROLLOUT_OPTIONAL, SCHEMA_VERSION, Batch
from windage.estimators.errors import BadInput, unknown, within
from windage.llm.arrow import array_of, kind_fits, parts, type_of
from windage.llm.durable import made, new_file, tidy
from windage.llm.rollout_faults import COLUMNS, HEAD, HEADS, faults, lengths_of, padded

SCHEMA = f"windage/rollouts/{SCHEMA_VERSION}"
ROWS = 64
# What the policy being trained says is said anew by its next forward pass.
BATCH = {field.name for field in fields(Batch)} - {"logp", "head_logp", "probability_square"}
STEP = re.compile(r"step-(\d{8})\.parquet")
Row = Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with one row of one file."""

    file: Path
    row: int
    what: str


def strict(fault: Fault) -> None:
    """Refuse a row.

    Raises:
        BadInput: names file and row.
    """
    raise BadInput(f"{str(fault.file)!r}, row {fault.row}: {fault.what}")


def fingerprint(tokens: Sequence[str]) -> str:
    """SHA-256 of a tokenizer's vocabulary in the order of its ids: what token ids mean.

    Example:
        >>> fingerprint(["a", "b"]) == fingerprint(["b", "a"])
        False
    """
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def path_of(folder: Path, step: int) -> Path:
    """The file of a step.

    Example:
        >>> path_of(Path("run"), 12).name
        'step-00000012.parquet'
    """
    return folder / f"step-{step:08d}.parquet"


def steps(folder: Path) -> list[int]:
    """The steps that a folder holds, in ascending order."""
    tidy(folder)
    found = (STEP.fullmatch(path.name) for path in folder.glob("step-*.parquet"))
    return sorted(int(match[1]) for match in found if match)


def write(
    folder: Path,
    step: int,
    rows: Iterable[Row],
    *,
    tokenizer: str,
    precision: str = "float32",
    version: int | None = None,
) -> Path:
    """Append a step to a store; the file is there when this returns, and before it is not.

    Args:
        folder: made where it is missing.
        step: not in the folder yet.
        rows: of lists or arrays; taken and written some hundreds at a time.  The first row says
            which optional columns there are.
        tokenizer: its `fingerprint`.
        precision: float32 or float64, of all log-probabilities.
        version: number of the weights that the step trained, where one was trained; kept in the
            file's metadata, for whoever asks how old the responses were.

    Raises:
        BadInput: a row that `read` would refuse (named; nothing is written), a step that is there
            already, or a folder that cannot be written to.
    """
    within(0, 99_999_999, step=step)
    path, rows = path_of(folder, step), iter(rows)
    first = list(itertools.islice(rows, 1))
    names = [n for n in COLUMNS if n in ROLLOUT_FIELDS or (first and n in first[0])]
    _check_names(path, names)
    schema = pa.schema([(name, type_of(COLUMNS[name], precision)) for name in names])
    try:
        made(folder)
    except OSError as problem:
        raise BadInput(
            f"{str(folder)!r}: {problem.strerror}; allowed: a folder that can be written to"
        ) from None
    seen: set[str] = set()
    count = 0
    with new_file(path) as sink:
        writer = pq.ParquetWriter(
            sink, schema, store_schema=False, write_page_checksum=True, compression="zstd"
        )
        try:
            rows = itertools.chain(first, rows)
            while piece := list(itertools.islice(rows, ROWS)):
                table = _table(piece, schema, path, count)
                for row, what in faults(table, seen).items():
                    strict(Fault(file=path, row=count + row, what=what))
                writer.write_batch(table)
                count += len(piece)
            about = {"schema": SCHEMA, "tokenizer": tokenizer, "step": step, "rows": count}
            about |= {} if version is None else {"version": version}
            writer.add_key_value_metadata({key: str(value) for key, value in about.items()})
        finally:
            writer.close()
    return path


def _table(piece: Sequence[Row], schema: pa.Schema, path: Path, count: int) -> pa.RecordBatch:
    """Rows as columns, what a row lacks as null."""
    for row, entries in enumerate(piece):
        for name in entries:
            if name not in schema.names:
                words = unknown("column", name, schema.names)
                strict(Fault(file=path, row=count + row, what=str(words)))
    arrays = []
    for field in schema:
        try:
            arrays.append(array_of([entries.get(field.name) for entries in piece], field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            for row, entries in enumerate(piece):
                try:
                    array_of([entries.get(field.name)], field.type)
                except (pa.ArrowException, TypeError, ValueError, OverflowError):
                    what = f"{field.name} does not fit; allowed: {COLUMNS[field.name]}"
                    strict(Fault(file=path, row=count + row, what=what))
            raise
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def read(
    folder: Path,
    *,
    tokenizer: str,
    only: Iterable[int] | None = None,
    refuse: Callable[[Fault], None] = strict,
) -> Iterator[dict[str, Any]]:
    """The rows of a store, step by step, some hundreds in memory at a time.

    Args:
        folder: of step files.
        tokenizer: `fingerprint` of the one that reads.
        only: some steps; None: all.
        refuse: told of each row that is left out, such as the `append` of a list; rows yielded and
            rows refused are together the rows of the files.

    Raises:
        BadInput: a file that is damaged, of another tokenizer or another schema, or, unless
            `refuse` says otherwise, a row with a fault: names file and row.
    """
    if not folder.is_dir():
        raise BadInput(f"{str(folder)!r} is no folder; allowed: a folder of step files")
    there = steps(folder)
    wanted = there if only is None else list(only)
    seen: set[str] = set()
    for step in wanted:
        if step not in there:
            raise BadInput(f"{str(folder)!r} has no step {step}; it has: {_words(there)}")
        path = path_of(folder, step)
        with _opened(path, tokenizer) as file:
            for start, table in _tables(file, path, refuse):
                try:
                    bad = faults(table, seen)
                    found = _rows(table)
                except (pa.ArrowException, ValueError) as problem:
                    bad, found = dict.fromkeys(range(len(table)), _first_line(problem)), []
                for row, what in bad.items():
                    refuse(Fault(file=path, row=start + row, what=what))
                yield from (entries for row, entries in enumerate(found) if row not in bad)


def _words(there: Sequence[int]) -> str:
    if not there:
        return "none"
    return f"{there[0]} to {there[-1]}" if len(there) > 1 else str(there[0])


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def _opened(path: Path, tokenizer: str) -> pq.ParquetFile:
    """The file, its schema checked."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        schema, known = file.schema_arrow, file.metadata
        total = sum(known.row_group(g).num_rows for g in range(known.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise _damaged(path, _first_line(problem)) from None
    told = {k.decode(errors="replace"): v for k, v in (known.metadata or {}).items()}
    written = told.get("schema", b"none").decode(errors="replace")
    if written != SCHEMA:
        raise BadInput(f"{str(path)!r} has the schema {written!r}; allowed: {SCHEMA!r}")
    other = told.get("tokenizer", b"none").decode(errors="replace")
    if other != tokenizer:
        raise BadInput(
            f"{str(path)!r} was written with another tokenizer, {other[:12]}; "
            f"allowed: {tokenizer[:12]}"
        )
    _check_names(path, schema.names)
    for field in schema:
        if not kind_fits(COLUMNS[field.name], field.type):
            raise BadInput(
                f"{str(path)!r}: column {field.name} holds {field.type}; "
                f"allowed: {COLUMNS[field.name]}"
            )
    counts = {str(known.num_rows), str(total)}
    counts |= {told["rows"].decode(errors="replace")} if "rows" in told else set()
    if len(counts) > 1:
        raise _damaged(path, f"its counts of rows differ: {sorted(counts)}")
    return file


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse columns that are unknown, missing, there twice, or half of a head."""
    for name in names:
        if name not in COLUMNS:
            raise BadInput(f"{str(path)!r}: {unknown('column', name, COLUMNS)}")
    head = HEAD if {*HEAD, *HEADS} & {*names} else ()
    for name in (*ROLLOUT_FIELDS, *head):
        if name not in names:
            raise BadInput(f"{str(path)!r} has no column {name}; allowed: {', '.join(COLUMNS)}")
    if len(set(names)) < len(names):
        raise _damaged(path, "a column occurs twice")


def _damaged(path: Path, what: str) -> BadInput:
    return BadInput(f"{str(path)!r} is damaged: {what}; allowed: a whole file of {SCHEMA}")


def _tables(
    file: pq.ParquetFile, path: Path, refuse: Callable[[Fault], None]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Pieces of a file with the number of their first row; refuses the rows of damaged parts."""
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        what = "rows are missing from the file"
        try:
            for table in file.iter_batches(ROWS, row_groups=[group], use_threads=False):
                yield start, table
                start += len(table)
        except (pa.ArrowException, OSError) as problem:
            what = f"damaged: {_first_line(problem)}"
        for row in range(start, end):
            refuse(Fault(file=path, row=row, what=what))
        start = end


def _rows(table: pa.RecordBatch) -> list[dict[str, Any]]:
    """Lists as arrays, heads as `[T K]`, the rest as plain values."""
    columns = {name: _column(name, table[name]) for name in table.schema.names}
    return [{name: column[n] for name, column in columns.items()} for n in range(len(table))]


def _column(name: str, column: pa.Array) -> Sequence[Any]:
    _, depth = parts(COLUMNS[name])
    if depth == 0:
        return column.to_pylist()
    counts, inner = lengths_of(column), column.flatten()
    values: np.ndarray = (
        inner.to_numpy(zero_copy_only=False)
        if depth == 1
        else padded(inner, -1 if name == "head_ids" else -np.inf)
    )
    return [values[end - n : end] for n, end in zip(counts, np.cumsum(counts), strict=True)]


def admission(rows: Iterable[Row]) -> dict[str, int]:
    """How many responses were admitted, and how many were not for each reason.

    Example:
        >>> admission([{"rejected": None}, {"rejected": "overlong"}, {"rejected": "overlong"}])
        {'admitted': 1, 'overlong': 2}
    """
    counts = Counter(row["rejected"] for row in rows)
    return {"admitted": counts.pop(None, 0), **{why: counts[why] for why in sorted(counts)}}


def to_batch(
    rows: Sequence[Row],
    *,
    group_size: int | None = None,
    current_version: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Rows as the record that estimators read.

    A response that an earlier admission rejected takes its place as one that is absent: it counts
    nowhere, and `missing`, `row_index` and the row itself still show it.  To decide anew, clear
    `rejected` in the rows.

    Args:
        rows: in any order; where `row_index` points.
        group_size: size asked for; None: the rows that a group has.
        current_version: number of the weights being trained.
        dtype: of the record's numbers.

    Raises:
        BadInput: only some of the rows have an optional column.
        ValueError: what `Batch.from_rows` refuses.
    """
    extra = {name: _optional(rows, name) for name in ROLLOUT_OPTIONAL if name in BATCH}
    width = max((np.shape(h)[-1] for h in extra["head_ids"] or ()), default=0)
    for name, nothing in zip(HEAD, (-1, -math.inf), strict=True):
        if (column := extra[name]) is not None:
            extra[name] = [torch.from_numpy(_wide(head, width, nothing)) for head in column]
    for name in ("proximal_logp", "reference_logp", "values"):
        if (column := extra[name]) is not None:
            extra[name] = [torch.tensor(entry) for entry in column]
    if (parts_of := extra["components"]) is not None:
        extra["components"] = [np.asarray(entry).tolist() for entry in parts_of]
    for name in ("behavior_logp", "versions"):
        extra[name] = [torch.tensor(row[name]) for row in rows]
    scored = [row["rejected"] is None and row["reward"] is not None for row in rows]
    return Batch.from_rows(
        [row["reward"] if kept else None for row, kept in zip(rows, scored, strict=True)],
        [row["group_id"] for row in rows],
        mask=[np.asarray(row["mask"], dtype=bool).tolist() for row in rows],
        group_size=group_size,
        current_version=current_version,
        dtype=dtype,
        outcomes=[row["outcome"] for row in rows],
        truncated=[row["finish_reason"] == "length" for row in rows],
        elapsed=[row["elapsed"] for row in rows],
        **{name: column for name, column in extra.items() if column is not None},
    )


def _optional(rows: Sequence[Row], name: str) -> list[Any] | None:
    having = [name in row for row in rows]
    if any(having) and not all(having):
        row = having.index(False)
        raise BadInput(f"row {row} has no {name}, others have; allowed: all or none")
    return [row[name] for row in rows] if any(having) else None


def _wide(head: np.ndarray, width: int, nothing: float) -> np.ndarray:
    head = np.asarray(head)
    return np.pad(head, ((0, 0), (0, width - head.shape[-1])), constant_values=nothing)
