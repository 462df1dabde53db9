"""Readers of dumps: what was written comes back, what cannot be read is named and counted."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_pickles as hostile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checks import refused
from dump_files import (
    HOLDS,
    WRITERS,
    lines,
    nemo_rl,
    pipeline_rl,
    plain_jsonl,
    plain_parquet,
    prime_rl,
    responses,
    slime,
    store,
    text,
    trace,
    unmasked,
)

from windage.analysis.diagnose import readers
from windage.analysis.diagnose.readers import jsonl, tensors
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.index import READERS, detect, read
from windage.analysis.diagnose.rows import Rejected, Row
from windage.estimators.batch import ROLLOUT_FIELDS, ROLLOUT_OPTIONAL

ROWS = responses(12)
FILES = sorted(Path(readers.__path__[0]).glob("*.py"))


def taken(path: Path, **settings: Any) -> tuple[list[Row], list[Rejected]]:
    """Rows kept and rows set aside."""
    rejected: list[Rejected] = []
    return list(read(path, refuse=rejected.append, **settings)), rejected


def counts(rejected: list[Rejected]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in rejected:
        found[each.reason] += each.rows
    return +found


def by_tokens(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.response_ids.tolist())


def assert_holds(name: str, kept: list[Row], wanted: list[Row]) -> None:
    """Every field that the format holds came back."""
    for found, row in zip(by_tokens(kept), by_tokens(wanted), strict=True):
        for field in sorted(HOLDS[name]):
            value, want = getattr(found, field), getattr(row, field)
            if isinstance(want, np.ndarray):
                assert value.dtype == want.dtype and value.tolist() == want.tolist(), field
            else:
                assert value == want, field


# Formats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_comes_back(name: str, tmp_path: Path) -> None:
    rows = unmasked(ROWS) if name == "open-instruct" else ROWS
    path = WRITERS[name](tmp_path / "dump", rows)
    assert detect(path) == name.removesuffix(" with traces").split()[0]
    kept, rejected = taken(path)
    assert counts(rejected) == {}
    assert_holds(name, kept, rows)
    groups = Counter(row.group_id for row in kept)
    assert sorted(groups.values()) == [4, 4, 4]
    assert len({row.sample_id for row in kept}) == len(kept)


@pytest.mark.parametrize("name", WRITERS)
def test_a_single_file_of_a_dump_is_a_dump(name: str, tmp_path: Path) -> None:
    root = WRITERS[name](tmp_path / "dump", unmasked(ROWS))
    files = [p for p in root.rglob("*") if p.suffix in (".jsonl", ".pt", ".parquet")]
    words = ("stats", "metadata", "traces", "train_data/")
    own = [p for p in files if not any(word in str(p) for word in words)] or [root]
    assert sum(len(taken(path)[0]) for path in own) == len(ROWS)


def test_a_log_probability_belongs_to_the_token_beside_it(tmp_path: Path) -> None:
    """Per format a token's number is its id: a reader off by one gives that of a neighbor."""
    rows = [
        replace(row, behavior_logp=-row.response_ids / 7, mask=np.ones(len(row.mask), bool))
        for row in ROWS
    ]
    for name, writer in WRITERS.items():
        kept, _ = taken(writer(tmp_path / name, rows))
        assert len(kept) == len(rows)
        for row in kept:
            np.testing.assert_allclose(row.behavior_logp, -row.response_ids / 7, rtol=1e-6)


def test_packed_sequences_are_told_apart_by_their_positions(tmp_path: Path) -> None:
    kept, rejected = taken(prime_rl(tmp_path, ROWS, pack=3))
    assert rejected == []
    assert_holds("prime-rl", kept, ROWS)
    assert {row.where.rsplit(", ")[-1] for row in kept} == {f"sequence {n}" for n in range(3)}


def test_one_bad_sequence_of_a_pack_leaves_the_others(tmp_path: Path) -> None:
    path = prime_rl(tmp_path, ROWS, pack=4) / "token_exports/step_5/rank_0.jsonl"
    first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    at = first["loss_mask"].index(True)
    first["inference_logprobs"][at] = None
    lines(path, [first, *rest])
    kept, rejected = taken(tmp_path)
    assert (len(kept), counts(rejected)) == (11, {"not finite": 1})
    assert "line 1, sequence 0 has inference" not in str(rejected[0])
    assert str(rejected[0]).endswith("behavior_logp nan at token 0; allowed: finite numbers")


def test_steps_without_the_mark_are_not_finished(tmp_path: Path) -> None:
    rows = [replace(row, step=5 + n // 6) for n, row in enumerate(ROWS)]
    prime_rl(tmp_path, rows)
    (tmp_path / "token_exports/step_6/STABLE").unlink()
    kept, rejected = taken(tmp_path)
    assert ({row.step for row in kept}, counts(rejected)) == ({5}, {"unfinished step": 6})
    (tmp_path / "token_exports/step_5/STABLE").unlink()
    assert len(taken(tmp_path)[0]) == 12


def test_traces_are_joined_by_tokens_and_those_left_were_not_trained_on(tmp_path: Path) -> None:
    prime_rl(tmp_path, ROWS[:8])
    place = tmp_path / "rollouts/step_5"
    lines(place / "train/all/traces.jsonl", [trace(row) for row in ROWS[2:]])
    lines(place / "eval/all/traces.jsonl", [trace(row) for row in responses(5, seed=9)])
    kept, rejected = taken(tmp_path)
    assert rejected == []
    assert Counter(row.others["trace"] for row in kept) == {True: 10, False: 2}
    assert Counter(row.rejected for row in kept) == {None: 8, "no token export": 4}
    left = [row for row in kept if row.rejected]
    for found, row in zip(by_tokens(left), by_tokens(ROWS[8:]), strict=True):
        assert found.behavior_logp.tolist() == row.behavior_logp.tolist()
        assert (found.reward, found.elapsed) == (row.reward, row.elapsed)
    assert taken(tmp_path / "token_exports/step_5")[0][-1].rejected == "no token export"


def test_traces_of_a_step_that_is_not_exported_are_not_called_untrained(tmp_path: Path) -> None:
    rows = [replace(row, step=5 + n // 6) for n, row in enumerate(ROWS)]
    prime_rl(tmp_path, rows, traces=True)
    (tmp_path / "token_exports/step_6/rank_0.jsonl").unlink()
    (tmp_path / "token_exports/step_6/rank_1.jsonl").unlink()
    kept, _ = taken(tmp_path)
    assert len(kept) == 6 and not any(row.rejected for row in kept)
    assert len(taken(tmp_path / "rollouts")[0]) == 12


def test_equal_responses_take_one_trace_each(tmp_path: Path) -> None:
    twice = [
        replace(ROWS[0], sample_id=name, reward=reward) for name, reward in (("a", 1), ("b", 0))
    ]
    prime_rl(tmp_path, twice)
    lines(tmp_path / "rollouts/step_5/train/all/traces.jsonl", [trace(row) for row in twice])
    kept, _ = taken(tmp_path)
    assert sorted(row.reward for row in kept) == [0, 1]


def test_a_broken_trace_costs_no_row(tmp_path: Path) -> None:
    prime_rl(tmp_path, ROWS, traces=True)
    path = tmp_path / "rollouts/step_5/train/all/traces.jsonl"
    first, second, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    first["nodes"][1]["parent"] = 1
    second["nodes"][0]["token_ids"] = "none"
    lines(path, [first, second, *rest])
    kept, rejected = taken(tmp_path)
    assert len(kept) == 12 and counts(rejected) == {}
    assert [each.reason for each in rejected] == ["trace unread"] * 2


def test_padding_is_taken_away_and_a_wrong_width_is_named(tmp_path: Path) -> None:
    path = nemo_rl(tmp_path, ROWS, wrapped=False) / "train_data_step5.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["input_lengths"] = 3
    records[1]["prev_logprobs"].pop()
    records[2]["sample_loss_mask"] = 0.0
    records[3]["rewards"], records[3]["filtered_rewards"] = 1.0, 0.5
    records[4]["advantages"] = 0.25
    lines(path, records)
    kept, rejected = taken(path)
    assert counts(rejected) == {"lengths differ": 2}
    assert [row.rejected for row in kept].count("sample_loss_mask is 0") == 1
    assert (kept[1].reward, kept[1].outcome) == (0.5, 1.0)
    assert kept[2].advantages.tolist() == [0.25] * len(kept[2].mask)


def test_what_slime_dropped_is_kept_with_the_reason(tmp_path: Path) -> None:
    slime(tmp_path, ROWS)
    for path in tmp_path.rglob("5.pt"):
        saved = torch.load(path, weights_only=True)
        if "samples" in saved:
            saved["samples"][0]["status"] = "aborted"
            saved["samples"][1]["remove_sample"] = True
            saved["samples"][2]["weight_versions"] = ["3", "5"]
            saved["samples"][3]["reward"] = {"exact": 1.0}
            saved["samples"][4]["status"] = "failed"
        else:
            columns = saved["rollout_data"]
            saved["rollout_data"] = {key: value[:-1] for key, value in columns.items()}
        torch.save(saved, path)
    kept, rejected = taken(tmp_path)
    assert rejected == []
    reasons = [row.rejected for row in kept]
    assert reasons == ["aborted", "removed", None, None, "failed", *[None] * 6, "no train data"]
    assert set(kept[2].versions.tolist()) == {3} and kept[2].others == {"last_version": 5}
    assert kept[3].reward is None and kept[-1].logp is None


def test_the_trainer_s_files_of_slime_alone_are_a_dump(tmp_path: Path) -> None:
    kept, rejected = taken(slime(tmp_path, ROWS) / "train_data")
    assert rejected == []
    assert_holds(
        "slime",
        [
            replace(r, versions=w.versions, group_id=w.group_id, finish_reason=w.finish_reason)
            for r, w in zip(kept, ROWS, strict=True)
        ],
        ROWS,
    )


def test_the_trainer_s_stream_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    pipeline_rl(tmp_path, ROWS)
    full = [{**text(row), "old_logprobs": [0.0] * 4 + row.behavior_logp.tolist()} for row in ROWS]
    path = lines(tmp_path / "streams/training_data/0/0/0.jsonl", full)
    kept, rejected = taken(tmp_path)
    assert len(kept) == 12 and {each.rows for each in rejected} == {0}
    assert_holds("pipeline-rl", taken(path)[0], ROWS)


def test_heads_and_squares_come_back_from_a_table(tmp_path: Path) -> None:
    rows = []
    for row in ROWS:
        t = len(row.mask)
        ids, logp = np.tile([3, 1], (t, 1)), np.tile([-0.5, -1.5], (t, 1))
        square = np.full(t, 0.25)
        rows.append(replace(row, head_ids=ids, head_behavior_logp=logp, probability_square=square))
    for writer in (plain_jsonl, plain_parquet):
        kept, rejected = taken(writer(tmp_path / writer.__name__, rows))
        assert rejected == [] and len(kept) == 12
        assert all(row.head_ids.tolist()[0] == [3, 1] for row in kept)
        assert all((row.probability_square == 0.25).all() for row in kept)


def test_a_short_head_ends_in_nothing(tmp_path: Path) -> None:
    record = {
        "logp": [-1.0, -2.0],
        "head_ids": [[4], [5, 6]],
        "head_behavior_logp": [[-1], [-2, -3]],
    }
    kept, _ = taken(lines(tmp_path / "a.jsonl", [record]))
    assert kept[0].head_ids.tolist() == [[4, -1], [5, 6]]
    assert kept[0].head_behavior_logp.tolist() == [[-1, -np.inf], [-2, -3]]


def test_names_of_the_store_are_read(tmp_path: Path) -> None:
    """A column that stores may have is a field of a row or stands under `others`."""
    kept, _ = taken(store(tmp_path, ROWS))
    known = {*Row.__dataclass_fields__, *kept[0].others}
    optional = {"components", "verdict", *ROLLOUT_OPTIONAL}
    assert {*ROLLOUT_FIELDS} - known == set() and known - {*Row.__dataclass_fields__} <= {
        *ROLLOUT_FIELDS,
        *optional,
    }
    assert all(row.elapsed and row.others["seed"] == 1 for row in kept)


# Columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_go_by_the_names_of_a_map(kind: str, tmp_path: Path) -> None:
    records = [
        {"lp_old": row.behavior_logp.tolist(), "lp": row.logp.tolist(), "score": row.reward}
        for row in ROWS
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        lines(path, records)
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    columns = {"behavior_logp": "lp_old", "logp": "lp", "reward": "score"}
    kept, rejected = taken(path, columns=columns)
    assert rejected == [] and len(kept) == 12
    assert kept[3].reward == ROWS[3].reward
    assert kept[3].behavior_logp.tolist() == ROWS[3].behavior_logp.tolist()
    with refused("unknown field 'lp'; nearest valid name: logp"):
        read(path, columns={"lp": "logp"})


def test_a_column_of_the_map_has_to_be_there(tmp_path: Path) -> None:
    path = plain_parquet(tmp_path, ROWS)
    with refused("unknown column 'rewards'; nearest valid name: reward"):
        taken(path, columns={"reward": "rewards"})
    kept, rejected = taken(plain_jsonl(tmp_path, ROWS), columns={"reward": "rewards"})
    assert kept == [] and counts(rejected) == {"missing field": 12}


def test_a_null_among_whole_numbers_costs_one_row(tmp_path: Path) -> None:
    records = [{"logp": [-1.0, -2.0], "versions": [n, None if n == 2 else 1]} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    kept, rejected = taken(tmp_path / "a.parquet")
    assert (len(kept), counts(rejected)) == (4, {"wrong type": 1})


# Faults -----------------------------------------------------------------------------------------

GOOD = {"behavior_logp": [-1.0, -2.0], "logp": [-1.5, -2.5], "mask": [1, 1], "sample_id": "a"}
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"logp": [-1.0, None]}, "not finite"),
    ({"logp": [-1.0, float("nan")]}, "not finite"),
    ({"logp": [-1.0, float("-inf")]}, "not finite"),
    ({"logp": [-1.0, 0.5]}, "above 0"),
    ({"logp": [-1.0]}, "lengths differ"),
    ({"logp": [-1.0, "-2.0"]}, "wrong type"),
    ({"logp": [-1.0, True]}, "wrong type"),
    ({"logp": [-1.0, 10**400]}, "wrong type"),
    ({"logp": [[-1.0, -2.0]]}, "wrong type"),
    ({"logp": "-1 -2"}, "wrong type"),
    ({"logp": {"0": -1.0}}, "wrong type"),
    ({"mask": [0, 0]}, "empty"),
    ({"mask": [0, 2]}, "wrong type"),
    ({"mask": [1]}, "lengths differ"),
    ({"behavior_logp": None, "logp": None}, "missing field"),
    ({"versions": [1, 1.5]}, "wrong type"),
    ({"response_ids": [1, 2**63]}, "wrong type"),
    ({"reward": "good"}, "wrong type"),
    ({"reward": float("inf")}, "not finite"),
    ({"group_id": ["a"]}, "wrong type"),
    ({"sample_id": "same", "group_id": 1, "step": 1}, "duplicate"),
]


@pytest.mark.parametrize(("change", "reason"), FAULTS)
def test_a_faulty_row_is_set_aside_with_its_reason(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    first = {**GOOD, "sample_id": "same", "group_id": 1, "step": 1}
    path = lines(tmp_path / "a.jsonl", [first, {**GOOD, **change}, {**GOOD, "sample_id": "b"}])
    kept, rejected = taken(path)
    assert [row.sample_id for row in kept] == ["same", "b"]
    assert counts(rejected) == {reason: 1}
    assert rejected[0].where.endswith("a.jsonl: line 2")
    with refused("line 2"):
        list(read(path))


def test_what_stands_beside_a_tool_s_token_may_be_anything(tmp_path: Path) -> None:
    record = {**GOOD, "mask": [0, 1], "logp": [None, -1.0], "behavior_logp": [3.0, -1.0]}
    (row,), rejected = taken(lines(tmp_path / "a.jsonl", [record]))
    assert rejected == [] and row.logp.tolist() == [0.0, -1.0]


def test_lines_that_are_none(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    content = {
        b"\xef\xbb\xbf" + good: None,
        good.replace(b'"a"', b'"b"') + b"\r": None,
        b"   ": None,
        b"{": "no JSON",
        b"[1]": "no object",
        b"\x00" * 50: "no JSON",
        good.replace(b"a", b"\xff"): "no UTF-8",
        good.decode().encode("utf-16"): "no UTF-8",
        b"[" * 1_000_000: "too deep",
        b'{"logp": ' + b"[" * 500_000 + b"]" * 500_000 + b"}": "too deep",
        b"[" + b"[]," * 2_000_001: "too many parts",
        b'{"logp": [' + b"1" * 5000 + b"]}": "no JSON",
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(content))
    kept, rejected = taken(path)
    assert len(kept) == 2
    wanted = Counter(reason for reason in content.values() if reason)
    assert counts(rejected) == wanted


def test_a_long_line_is_skipped_and_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 5_000 + b"\n" + b'{"a": 2}\n' + b"y" * 5_000)
    rejected: list[Rejected] = []
    values = [value for _, value in jsonl.objects(path, rejected.append, longest=1_000)]
    assert values == [{"a": 1}, {"a": 2}]
    assert [each.where[-6:] for each in rejected] == ["line 2", "line 4"]


@pytest.mark.long
def test_a_line_of_ten_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "a.jsonl"
    lines(path, [GOOD])
    os.truncate(path, 10 * 2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept, rejected = taken(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(kept) == 1 and counts(rejected) == {"line too long": 1}
    assert after - before < 400 * 2**10


def test_links_and_devices_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    plain_jsonl(tmp_path / "dump", ROWS)
    secret = plain_jsonl(tmp_path / "elsewhere", responses(3, seed=8))
    (tmp_path / "dump" / "link.jsonl").symlink_to(secret)
    (tmp_path / "dump" / "folder").symlink_to(secret.parent)
    (tmp_path / "dump" / "loop").symlink_to(tmp_path / "dump")
    os.mkfifo(tmp_path / "dump" / "pipe.jsonl")
    kept, rejected = taken(tmp_path / "dump")
    assert len(kept) == 12 and len(rejected) == 4
    assert {(each.rows, each.reason) for each in rejected} == {(0, "no dump file")}
    with refused("is no file and no folder"):
        read(tmp_path / "dump" / "pipe.jsonl")
    with refused("is no file and no folder"):
        read(tmp_path / "nothing\n\x1b[31m")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1.jsonl", b'{"input": "a", "output": "b", "gts": 1, "score": 1.0, "step": 1}', "verl"),
        ("a.jsonl", b'{"head_version": 1, "tail_version": 2, "prompt_len": 3}', "AReaL"),
        ("a.jsonl", b'{"sampling_client_step": 1}', "tinker-cookbook"),
        ("a.pkl", b"\x80\x04K\x01.", "is a pickle, which is never read"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "is compressed"),
        ("a.jsonl", b"", "holds no dump"),
        ("a.jsonl", b'{"a": 1}', "is of no known format"),
        ("a.parquet", b"PAR1" + bytes(40), "is damaged"),
        ("a.pt", b"PK\x03\x04" + bytes(40), "is damaged"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with refused(words):
            read(path)


def test_completions_of_trl_are_refused(tmp_path: Path) -> None:
    table = pa.table({"step": [1], "prompt": ["a"], "completion": ["b"], "advantage": [0.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    with refused("a dump of TRL, which holds text and rewards but no log-probabilities"):
        read(tmp_path / "a.parquet")


def test_two_formats_in_a_folder_are_refused(tmp_path: Path) -> None:
    nemo_rl(tmp_path, ROWS)
    slime(tmp_path, ROWS)
    with refused("holds dumps of nemo-rl and slime; allowed: one of them"):
        read(tmp_path)


def test_a_damaged_part_of_a_table_is_counted_by_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    records = [{"logp": [-1.0 - n, -2.0]} for n in range(300)]
    pq.write_table(
        pa.Table.from_pylist(records),
        path,
        row_group_size=100,
        compression="none",
        write_page_checksum=True,
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    kept, rejected = taken(path)
    assert len(kept) == 200 and counts(rejected) == {"damaged": 100}


# Saved tensors ----------------------------------------------------------------------------------


def test_saved_values_are_those_that_torch_reads(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
    shared = torch.arange(12.0)
    saved = {
        "tensors": [(torch.randn(3, 4, generator=rng) * 9).to(kind) for kind in kinds],
        "views": [shared[2:5], shared[5:].reshape(7, 1), shared[:0], torch.tensor(3.5)],
        "flags": torch.tensor([True, False]),
        "numbers": [1, -1, 255, 256, 65536, -70000, 2**40, -(2**70), 1.5, float("inf"), True, None],
        "floats": torch.randn(5000, generator=rng).double().tolist(),
        "ids": torch.randint(0, 200_000, (5000,), generator=rng).tolist(),
        "nested": ({"a": [(), (1,), ("b", "ü\ud7ff")]}, [[[]]]),
        3: "key",
    }
    torch.save(saved, tmp_path / "a.pt")
    assert_same(tensors.load(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True))


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.shape == tuple(wanted.shape) and found.tolist() == wanted.tolist()
    elif isinstance(wanted, dict):
        assert [*found] == [*wanted]
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(wanted) and found == wanted


def test_numbers_and_arrays_of_numpy_are_read(tmp_path: Path) -> None:
    arrays = [np.arange(6).reshape(2, 3), np.array([1.5, -2.0], np.float32), np.array([True])]
    saved = {"scalars": [np.float64(0.5), np.int32(-3), np.bool_(True)], "arrays": arrays}
    torch.save(saved, tmp_path / "a.pt")
    found = tensors.load(tmp_path / "a.pt")
    assert found["scalars"] == [0.5, -3, True]
    for one, other in zip(found["arrays"], arrays, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


def test_an_object_in_a_sample_costs_that_sample(tmp_path: Path) -> None:
    path = slime(tmp_path, ROWS, train=False) / "rollout_data/5.pt"
    saved = torch.load(path, weights_only=True)
    saved["samples"][3]["metadata"] = {"deep": [{"er": Path("x")}]}
    torch.save(saved, path)
    kept, rejected = taken(tmp_path)
    assert len(kept) == 11
    assert "sample 3 holds pathlib.PosixPath, which is not read" in str(rejected[0])


def test_hostile_opcodes_run_nothing_and_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = hostile.CALLS | hostile.NONSENSE
    assert len(inputs) >= 140
    path = tmp_path / "a.pt"
    for label, data in inputs.items():
        hostile.archive(path, data)
        rejected: list[Rejected] = []
        rows = list(READERS["slime"](Dump(root=path, files=[path]), rejected.append))
        assert rows == [] and sum(each.rows for each in rejected) >= 1, label
        called = label.removesuffix(", called").removesuffix(", made").removesuffix(", sample")
        if called in hostile.NAMES:
            assert f"holds {called}, which is not read" in str(rejected[0]), label
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    data = hostile.HEAD + hostile.text("rollout_id") + b"."
    path = hostile.archive(tmp_path / "a.pt", data, compress=True)
    with pytest.raises(tensors.Fault, match="compressed"):
        tensors.load(path)
    path = hostile.archive(tmp_path / "a.pt", data, main="../../escape/data.txt")
    with pytest.raises(tensors.Fault, match=r"needs one data\.pkl"):
        tensors.load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_readers_import_nothing_that_runs_what_it_reads(path: Path) -> None:
    forbidden = {"pickle", "pickletools", "marshal", "shelve", "joblib", "dill", "yaml", "torch"}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & forbidden
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__", "getattr")
