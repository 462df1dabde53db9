"""What a study keeps while it runs: a parquet file a prompt, each whole or not there.

    study/
        request.json             what was asked, and of which model; another request is refused
        responses/SAMPLER/       the rollout store of each sampler, a step a prompt
        measured/prompt-N.parquet    averages of the estimates at a prompt

A row of such a file is one sampler, group size and entry:

    sampler, group_size, entry
    groups, square, pair, kept   of `moments.Averages`
    mean, drift                  sketches; entry "": the gradient's own estimate, and the mean score
    tokens, reward, weight, weight_square, gap    entry "": averages over the responses: tokens,
                                 reward, ratio of policy to sampler, its square, log-ratio a token

The sampler `baselines` is the policy in the place of its own sampler, its entries those of
`baselines.measured`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from windage.estimators.errors import BadInput
from windage.llm.durable import new_file, tidy

SCHEMA = "windage/measured/1"
NUMBERS = ("square", "pair", "kept", "tokens", "reward", "weight", "weight_square", "gap")
FIELDS = pa.schema(
    [
        ("sampler", pa.string()),
        ("group_size", pa.int32()),
        ("entry", pa.string()),
        ("groups", pa.int32()),
        *((name, pa.float64()) for name in NUMBERS),
        ("mean", pa.list_(pa.float32())),
        ("drift", pa.list_(pa.float32())),
    ],
    metadata={"schema": SCHEMA},
)
Row = dict[str, Any]


def opened(folder: Path, request: Mapping[str, Any]) -> None:
    """Make the folder of a study, or go on in it.

    Raises:
        BadInput: it holds another study; names what differs.
    """
    check(folder, request)
    (folder / "measured").mkdir(parents=True, exist_ok=True)
    tidy(folder)
    tidy(folder / "measured")
    path = folder / "request.json"
    if not path.exists():
        with new_file(path) as sink:
            sink.write((json.dumps(request, indent=1, allow_nan=False) + "\n").encode())


def check(folder: Path, request: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another study.

    Raises:
        BadInput: names what differs.
    """
    path = folder / "request.json"
    if not path.exists():
        return
    try:
        before = json.loads(path.read_bytes())
        keys = [k for k in {**before, **request} if before.get(k) != request.get(k)]
    except (OSError, ValueError, TypeError, AttributeError):
        raise BadInput(f"{str(path)!r} is damaged; allowed: a new folder") from None
    if keys:
        other = str(before.get(keys[0]))[:60]
        raise BadInput(
            f"{str(folder)!r} holds a study with another {keys[0]}: {other}; allowed: the same "
            "request, which goes on, or a new folder"
        )


def path_of(folder: Path, prompt: int) -> Path:
    """The file of a prompt."""
    return folder / "measured" / f"prompt-{prompt:06d}.parquet"


def write(folder: Path, prompt: int, rows: Sequence[Row]) -> None:
    """Keep what was measured at a prompt, a row group a sampler and group size."""
    with new_file(path_of(folder, prompt)) as sink:
        writer = pq.ParquetWriter(sink, FIELDS, store_schema=False, compression="zstd")
        try:
            for _, part in groupby(rows, key=lambda row: (row["sampler"], row["group_size"])):
                writer.write_table(pa.Table.from_pylist(list(part), schema=FIELDS))
        finally:
            writer.close()


def read(folder: Path, prompt: int, sampler: str, group_size: int) -> dict[str, Row]:
    """What was measured at a prompt with one sampler and group size, by entry.

    Raises:
        BadInput: the file is damaged.
    """
    path = path_of(folder, prompt)
    try:
        wanted = [("sampler", "in", [sampler, ""]), ("group_size", "in", [group_size, 0])]
        table = pq.read_table(path, filters=wanted, partitioning=None)
        if table.schema.names != FIELDS.names:
            raise ValueError("its columns are others")
    except (pa.ArrowException, OSError, ValueError) as problem:
        why = (str(problem).splitlines() or ["?"])[0]
        raise BadInput(f"{str(path)!r} is damaged: {why}; allowed: remove it, and go on") from None
    vectors = {
        name: [column.values.to_numpy() for column in table[name]] for name in ("mean", "drift")
    }
    rows = table.drop_columns(["mean", "drift"]).to_pylist()
    found = {}
    for n, row in enumerate(rows):
        name = row["entry"] if row["sampler"] else "reference"
        found[name] = row | {key: values[n] for key, values in vectors.items()}
    return found
