"""The rollout store: what goes in comes out, what is damaged is named and counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checks import refused

from windage.estimators.batch import ROLLOUT_FIELDS, ROLLOUT_OPTIONAL, Batch
from windage.llm import rollouts
from windage.llm.rollouts import (
    Fault,
    admission,
    fingerprint,
    read,
    steps,
    to_batch,
    write,
)

TOKENIZER = fingerprint(["a", "b", "c"])
LENGTHS = (3, 0, 5, 1)


def row(number: int, *, heads: int = 2, optional: bool = True) -> dict[str, Any]:
    """A response of 0 to 5 tokens, its numbers drawn from its own."""
    rng = np.random.default_rng(number)
    t = LENGTHS[number % len(LENGTHS)]
    found = {
        "group_id": f"question {number // 4}",
        "sample_id": f"sample {number}",
        "prompt_ids": rng.integers(0, 50, 4),
        "response_ids": rng.integers(0, 50, t),
        "mask": rng.random(t) < 0.8,
        "behavior_logp": -rng.random(t),
        "versions": rng.integers(0, 3, t),
        "reward": float(number % 3) / 4,
        "outcome": float(number % 3 > 0),
        "finish_reason": ("stop", "length")[number % 2],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": None if number % 2 else 40,
        "seed": number,
        "elapsed": number / 8,
        "rejected": "stale" if number % 5 == 4 else None,
    }
    if optional:
        found |= {
            "head_ids": np.argsort(rng.random((t, 9)))[:, :heads],
            "head_behavior_logp": -rng.random((t, heads)),
            "head_logp": -rng.random((t, heads)),
            "proximal_logp": -rng.random(t),
            "reference_logp": -rng.random(t),
            "components": rng.random(2),
            "verdict": ("right", None)[number % 2],
            "logp": -rng.random(t),
            "raw_logp": -rng.random(t),
            "probability_square": rng.random(t),
            "advantages": rng.random(t) - 0.5,
            "values": rng.random(t),
            "returns": rng.random(t) - 0.5,
            "turns": rng.integers(0, 3, t),
        }
    return found


def rows(count: int, **settings: Any) -> list[dict[str, Any]]:
    return [row(number, **settings) for number in range(count)]


def store(folder: Path, count: int = 8, step: int = 1, **settings: Any) -> Path:
    return write(folder, step, rows(count), tokenizer=TOKENIZER, **settings)


def assert_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == [*ROLLOUT_FIELDS, *(n for n in ROLLOUT_OPTIONAL if n in theirs)]
        for name, value in theirs.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(ours[name], value, err_msg=name)
            else:
                assert ours[name] == value, name


@pytest.mark.parametrize("optional", [True, False])
def test_what_goes_in_comes_out(optional, tmp_path):
    given = rows(200, optional=optional)
    write(tmp_path / "new", 7, given, tokenizer=TOKENIZER, precision="float64")
    assert_rows(list(read(tmp_path / "new", tokenizer=TOKENIZER)), given)
    assert steps(tmp_path / "new") == [7]


def test_single_precision_rounds_log_probabilities_and_nothing_else(tmp_path):
    store(tmp_path)
    for ours, theirs in zip(read(tmp_path, tokenizer=TOKENIZER), rows(8), strict=True):
        assert ours["behavior_logp"].dtype == np.float32
        np.testing.assert_array_equal(ours["behavior_logp"], np.float32(theirs["behavior_logp"]))
        assert ours["elapsed"] == theirs["elapsed"] and ours["reward"] == theirs["reward"]


def test_another_tool_reads_it(tmp_path):
    table = pd.read_parquet(store(tmp_path, precision="float64"))
    assert list(table) == [*ROLLOUT_FIELDS, *ROLLOUT_OPTIONAL]
    assert table["rejected"].fillna("no").tolist() == ["no"] * 4 + ["stale"] + ["no"] * 3
    np.testing.assert_array_equal(table["behavior_logp"][2], row(2)["behavior_logp"])
    np.testing.assert_array_equal(table["head_ids"][2][1], row(2)["head_ids"][1])


def test_what_another_tool_wrote_is_read(tmp_path):
    path = store(tmp_path, precision="float64")
    about = pq.ParquetFile(path).metadata.metadata
    again = pa.Table.from_pandas(pd.read_parquet(path, dtype_backend="pyarrow"))
    pq.write_table(again.replace_schema_metadata(about), path)
    assert_rows(list(read(tmp_path, tokenizer=TOKENIZER)), rows(8))


def test_every_column_is_documented():
    for name in (*ROLLOUT_FIELDS, *ROLLOUT_OPTIONAL):
        assert name in rollouts.__doc__


def test_a_response_that_the_trainer_never_saw_lacks_its_head(tmp_path):
    """Row 4 is rejected; a fault in a later row is still named by its own number."""
    given = rows(8)
    given[4] |= {"head_logp": None}
    write(tmp_path, 1, given, tokenizer=TOKENIZER)
    assert list(read(tmp_path, tokenizer=TOKENIZER))[4]["head_logp"].size == 0
    bad = [one | {"sample_id": f"again {n}"} for n, one in enumerate(given)]
    bad[6] |= {"head_logp": [[-1.0]] * len(bad[6]["response_ids"])}
    with refused("row 6", "head_logp 1"):
        write(tmp_path, 2, bad, tokenizer=TOKENIZER)


def test_ragged_heads_are_filled_up(tmp_path):
    one = row(0)
    one["head_ids"] = [[4], [1, 2, 3], []]
    one["head_behavior_logp"] = [[-1.0], [-1.0, -2.0, -3.0], []]
    one["head_logp"] = [[-2.0], [-1.5, -np.inf, -3.0], []]
    write(tmp_path, 1, [one], tokenizer=TOKENIZER)
    (found,) = read(tmp_path, tokenizer=TOKENIZER)
    assert found["head_ids"].tolist() == [[4, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert found["head_behavior_logp"][0].tolist() == [-1.0, -np.inf, -np.inf]
    write(tmp_path, 2, [found | {"sample_id": "again"}], tokenizer=TOKENIZER)
    assert to_batch([found]).head_ids.shape == (1, 1, 3, 3)


def test_steps_are_appended_and_never_overwritten(tmp_path):
    path = store(tmp_path)
    before = path.read_bytes()
    with refused("step-00000001.parquet", "exists"):
        store(tmp_path)
    assert path.read_bytes() == before
    others = [one | {"sample_id": f"later {n}"} for n, one in enumerate(rows(3))]
    write(tmp_path, 12, others, tokenizer=TOKENIZER)
    assert steps(tmp_path) == [1, 12]
    found = list(read(tmp_path, tokenizer=TOKENIZER))
    assert [one["sample_id"] for one in found[7:9]] == ["sample 7", "later 0"]
    assert len(list(read(tmp_path, tokenizer=TOKENIZER, only=[12]))) == 3
    with refused("no step 5", "1 to 12"):
        list(read(tmp_path, tokenizer=TOKENIZER, only=[5]))


def test_a_step_without_rows_is_a_step(tmp_path):
    write(tmp_path, 0, [], tokenizer=TOKENIZER)
    assert steps(tmp_path) == [0] and list(read(tmp_path, tokenizer=TOKENIZER)) == []


def test_reading_holds_one_piece_at_a_time(tmp_path):
    path = store(tmp_path, 10 * rollouts.ROWS)
    assert pq.ParquetFile(path).num_row_groups == 10
    taken = itertools.islice(read(tmp_path, tokenizer=TOKENIZER), rollouts.ROWS)
    spoil(path, group=9)
    assert len(list(taken)) == rollouts.ROWS


def spoil(path: Path, group: int) -> None:
    """Flip a byte in the data of a row group."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(3)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)


def test_rows_of_a_damaged_part_are_counted(tmp_path):
    path = store(tmp_path, 3 * rollouts.ROWS)
    spoil(path, group=1)
    with refused(path.name, f"row {rollouts.ROWS}", "damaged"):
        list(read(tmp_path, tokenizer=TOKENIZER))
    left_out: list[Fault] = []
    kept = list(read(tmp_path, tokenizer=TOKENIZER, refuse=left_out.append))
    assert len(kept) == 2 * rollouts.ROWS
    assert [f.row for f in left_out] == list(range(rollouts.ROWS, 2 * rollouts.ROWS))


Edit = Callable[[dict[str, Any]], Any]
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nan log-prob": ({"behavior_logp": [-1.0, np.nan, -1.0]}, ("behavior_logp", "token 1", "nan")),
    "null log-prob": ({"behavior_logp": [-1.0, -1.0, None]}, ("behavior_logp", "token 2", "null")),
    "infinite log-prob": ({"behavior_logp": [-np.inf, -1.0, -1.0]}, ("token 0", "-inf")),
    "log-prob above 0": ({"behavior_logp": [0.5, -1.0, -1.0]}, ("behavior_logp", "0.5")),
    "probability": ({"proximal_logp": [0.9, 0.9, 0.9]}, ("proximal_logp", "to 0")),
    "short log-probs": ({"behavior_logp": [-1.0]}, ("behavior_logp has 1", "response_ids 3")),
    "short mask": ({"mask": []}, ("mask has 0",)),
    "long versions": ({"versions": [1, 1, 1, 1]}, ("versions has 4",)),
    "short head": ({"head_ids": [[1]], "head_behavior_logp": [[-1.0]]}, ("head_ids has 1",)),
    "uneven head": (
        {"head_ids": [[1], [1, 2], [1]], "head_behavior_logp": [[-1.0]] * 3},
        ("head_ids at token 1 has 2 entries", "head_behavior_logp 1"),
    ),
    "uneven head of the trainer": (
        {"head_logp": [[-1.0, -2.0], [-1.0], [-1.0, -2.0]]},
        ("head_ids at token 1 has 2 entries", "head_logp 1"),
    ),
    "above 0 in head of the trainer": (
        {"head_logp": [[-1.0, -2.0], [-1.0, 0.5], [-1.0, -2.0]]},
        ("head_logp at token 1", "0.5", "-inf or finite numbers to 0"),
    ),
    "nan in head": (
        {"head_ids": [[1]] * 3, "head_behavior_logp": [[-1.0], [np.nan], [-1.0]]},
        ("head_behavior_logp at token 1", "nan"),
    ),
    "twice in head": (
        {"head_ids": [[5, 7, 5]] * 3, "head_behavior_logp": [[-1.0, -2.0, -3.0]] * 3},
        ("head_ids at token 0", "twice"),
    ),
    "no token in head": (
        {"head_ids": [[-1]] * 3, "head_behavior_logp": [[-1.0]] * 3},
        ("head_ids at token 0", "-inf beside -1"),
    ),
    "nan reward": ({"reward": np.nan}, ("reward is nan",)),
    "infinite outcome": ({"outcome": np.inf}, ("outcome is inf",)),
    "reward without outcome": ({"outcome": None}, ("outcome is null",)),
    "nan component": ({"components": [0.0, np.nan]}, ("components at entry 1",)),
    "negative token": ({"response_ids": [1, -2, 3]}, ("response_ids at token 1 is -2",)),
    "negative prompt token": ({"prompt_ids": [-1]}, ("prompt_ids at entry 0 is -1",)),
    "top_p": ({"top_p": 1.5}, ("top_p is 1.5", "from 0 to 1")),
    "temperature": ({"temperature": np.nan}, ("temperature is nan",)),
    "elapsed": ({"elapsed": -1.0}, ("elapsed is -1",)),
    "top_k": ({"top_k": 0}, ("top_k is 0", "from 1")),
    "no id": ({"sample_id": None}, ("sample_id is null",)),
    "no group": ({"group_id": None}, ("group_id is null",)),
    "id twice": ({"sample_id": "sample 2"}, ("sample_id 'sample 2' occurs twice",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_with_a_fault_is_named_left_out_and_counted(name, tmp_path, monkeypatch):
    changes, words = FAULTS[name]
    given = rows(12)
    given[8] = given[8] | changes
    with refused("step-00000001.parquet", "row 8", *words):
        write(tmp_path, 1, given, tokenizer=TOKENIZER)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(rollouts, "faults", lambda table, seen: {})
        path = write(tmp_path, 1, given, tokenizer=TOKENIZER)
    with refused(path.name, "row 8", *words):
        list(read(tmp_path, tokenizer=TOKENIZER))
    left_out: list[Fault] = []
    kept = list(read(tmp_path, tokenizer=TOKENIZER, refuse=left_out.append))
    assert [(fault.file, fault.row) for fault in left_out] == [(path, 8)]
    assert all(word in left_out[0].what for word in words)
    assert [one["sample_id"] for one in kept] == [f"sample {n}" for n in range(12) if n != 8]


def test_a_sample_occurs_once_in_all_steps(tmp_path):
    store(tmp_path, 2, step=1)
    store(tmp_path, 3, step=2)
    left_out: list[Fault] = []
    kept = list(read(tmp_path, tokenizer=TOKENIZER, refuse=left_out.append))
    assert len(kept) == 3 and [(f.file.name, f.row) for f in left_out] == [
        ("step-00000002.parquet", 0),
        ("step-00000002.parquet", 1),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": 1.0}, ("unknown column 'rewards'", "nearest valid name: reward")),
        ({"reward": "good"}, ("reward does not fit", "number or null")),
        ({"response_ids": [1.5, 2.0, 3.0]}, ("response_ids does not fit", "integers")),
        ({"head_ids": np.ones((3, 2))}, ("head_ids does not fit", "integers by token")),
        ({"behavior_logp": [[-1.0], [-1.0], [-1.0]]}, ("behavior_logp does not fit", "numbers")),
        ({"mask": "yes"}, ("mask does not fit", "booleans")),
        ({"prompt_ids": [2**40]}, ("prompt_ids does not fit",)),
        ({"head_ids": 7}, ("head_ids does not fit", "integers by token")),
    ],
)
def test_a_row_that_does_not_fit_is_named(changes, words, tmp_path):
    given = rows(6)
    given[4] = given[4] | changes
    with refused("row 4", *words):
        write(tmp_path, 1, given, tokenizer=TOKENIZER)
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table], **about: str) -> None:
    """The same file by another hand."""
    kept = pq.ParquetFile(path).metadata.metadata
    told = {k.decode(): v.decode() for k, v in kept.items()} | about
    table = change(pq.read_table(path)).replace_schema_metadata(told)
    pq.write_table(table, path)


def cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, name, table[name].cast(kind))

    return change


@pytest.mark.parametrize(
    ("change", "about", "words"),
    [
        (lambda t: t.drop_columns("versions"), {}, ("no column versions",)),
        (lambda t: t.drop_columns("head_ids"), {}, ("no column head_ids",)),
        (lambda t: t.append_column("extra", t["reward"]), {}, ("unknown column 'extra'",)),
        (cast("response_ids", pa.list_(pa.float64())), {}, ("response_ids", "double", "integers")),
        (cast("behavior_logp", pa.list_(pa.float16())), {}, ("behavior_logp", "halffloat")),
        (cast("reward", pa.string()), {}, ("column reward holds string", "number or null")),
        (lambda t: t, {"tokenizer": "0" * 64}, ("another tokenizer, 000000000000",)),
        (lambda t: t, {"schema": "windage/rollouts/2"}, ("'windage/rollouts/2'", "rollouts/1'")),
        (lambda t: t.slice(2), {}, ("counts of rows differ", "['6', '8']")),
    ],
)
def test_a_file_that_does_not_fit_is_named(change, about, words, tmp_path):
    path = store(tmp_path)
    rewritten(path, change, **about)
    with refused(path.name, *words):
        list(read(tmp_path, tokenizer=TOKENIZER))


def test_wider_integers_and_numbers_are_the_same_kinds(tmp_path):
    path = store(tmp_path, precision="float64")
    rewritten(path, cast("response_ids", pa.list_(pa.int64())))
    rewritten(path, cast("group_id", pa.large_string()))
    assert_rows(list(read(tmp_path, tokenizer=TOKENIZER)), rows(8))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(share, tmp_path):
    path = store(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with refused(path.name, "damaged"):
        list(read(tmp_path, tokenizer=TOKENIZER))


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """The bytes with one flipped, some cut out, or some written over."""
    at = int(rng.integers(len(content)))
    size = int(rng.integers(1, 40))
    kind = rng.integers(3)
    if kind == 0:
        return content[:at] + bytes([content[at] ^ int(rng.integers(1, 256))]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + content[at + size :]
    return (content[:at] + rng.bytes(size) + content[at + size :])[: len(content)]


def check_mutated(folder: Path, numbers: range) -> int:
    """Read files with a fault each: all rows, or a line that says why not; how many refused."""
    path = store(folder, 20, precision="float64")
    content, refusals = path.read_bytes(), 0
    for number in numbers:
        path.write_bytes(mutated(content, np.random.default_rng(number)))
        try:
            assert_rows(list(read(folder, tokenizer=TOKENIZER)), rows(20))
        except ValueError as problem:
            assert path.name in str(problem) and "\n" not in str(problem)
            refusals += 1
    return refusals


def test_mutated_files_are_refused_or_read_whole(tmp_path):
    assert check_mutated(tmp_path, range(150)) > 120


@pytest.mark.long
def test_many_mutated_files_are_refused_or_read_whole(tmp_path):
    assert check_mutated(tmp_path, range(1000, 6000)) > 4000


def test_a_folder_that_is_none_is_named(tmp_path):
    with refused("nowhere", "no folder"):
        list(read(tmp_path / "nowhere", tokenizer=TOKENIZER))
    (tmp_path / "file").touch()
    with refused("file", "allowed: a folder"):
        store(tmp_path / "file")
    with refused("step is -1"):
        store(tmp_path, step=-1)


def test_rows_become_the_batch_of_their_columns(tmp_path):
    store(tmp_path, 8, precision="float64")
    found = list(read(tmp_path, tokenizer=TOKENIZER))
    given = [one | {"rejected": None} for one in found]
    batch = to_batch(given, group_size=4, current_version=3)
    expected = Batch.from_rows(
        [one["reward"] for one in rows(8)],
        [one["group_id"] for one in rows(8)],
        mask=[one["mask"].tolist() for one in rows(8)],
        current_version=3,
        outcomes=[one["outcome"] for one in rows(8)],
        truncated=[n % 2 == 1 for n in range(8)],
        elapsed=[n / 8 for n in range(8)],
        **{
            name: [one[name].tolist() for one in rows(8)]
            for name in (*ROLLOUT_OPTIONAL, "behavior_logp", "versions")
            if name in rollouts.BATCH
        },
    )
    for name, value in vars(expected).items():
        ours = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours, value), name
        else:
            assert ours == value, name


def test_what_admission_dropped_stays_visible(tmp_path):
    store(tmp_path, 8)
    found = list(read(tmp_path, tokenizer=TOKENIZER))
    assert admission(found) == {"admitted": 7, "stale": 1}
    batch = to_batch(found, group_size=4)
    assert batch.present.tolist() == [[True] * 4, [False, True, True, True]]
    assert batch.missing.tolist() == [0, 1]
    assert found[batch.row_index[1, 0]]["rejected"] == "stale"
    again = to_batch([one | {"rejected": None} for one in found], group_size=4)
    assert again.present.all() and again.missing.tolist() == [0, 0]


def test_an_unscored_response_is_absent(tmp_path):
    one = row(0) | {"reward": None, "outcome": None}
    write(tmp_path, 1, [one, row(1)], tokenizer=TOKENIZER)
    batch = to_batch(list(read(tmp_path, tokenizer=TOKENIZER)), group_size=2)
    assert batch.present.tolist() == [[False, True]]


def test_an_optional_column_in_some_rows_only_is_refused():
    with refused("row 1 has no head_ids"):
        to_batch([row(0), row(1, optional=False)])


def test_heads_of_different_width_share_a_batch():
    batch = to_batch([row(0, heads=2), row(2, heads=3)])
    assert batch.head_ids[0, 0, :, 2].tolist() == [-1] * 3 + [0] * 2
    assert (batch.head_behavior_logp[0, 0, :3, 2] == -np.inf).all()
