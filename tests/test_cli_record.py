"""`windage record`: hooks looked for in what is installed, and prime-rl's two halves joined."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from dump_files import lines, prime_rl, responses, trace

from windage.analysis.diagnose.readers.index import read
from windage.cli.main import main
from windage.llm import rollouts

ROWS = responses(12)
TRAINER = """
class GRPOTrainer:
    def _calculate_rewards(self, inputs): ...
    def _generate_and_score_completions(self, inputs): ...
    def _get_per_token_logps_and_entropies(self, model, input_ids): ...
    def _compute_loss(self, model, inputs): ...
"""
UTILS = (
    "def add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=()): ...\n"
)


def told(capsys, *words: object) -> tuple[int, Any]:
    status = main(["record", *map(str, words), "--json"])
    output = capsys.readouterr()
    return status, json.loads(output.out) if output.out else output.err


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed TRL of these files."""

    def make(trainer: str, utils: str = UTILS) -> None:
        about = tmp_path / "trl-9.9.dist-info" / "METADATA"
        for file, text in {
            tmp_path / "trl/__init__.py": "raise RuntimeError('was imported')",
            tmp_path / "trl/trainer/grpo_trainer.py": trainer,
            tmp_path / "trl/trainer/utils.py": utils,
            about: "Metadata-Version: 2.1\nName: trl\nVersion: 9.9\n",
        }.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    return make


def test_what_recording_needs_is_found_without_importing_the_engine(installed, capsys):
    installed(TRAINER)
    status, document = told(capsys, "trl")
    (row,) = document["rows"]
    assert status == 0 and (row["installed"], row["hook"]) == ("9.9", True)
    assert main(["record"]) == 0
    assert "record_trl(trainer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trainer", "utils", "lacks"),
    [
        (TRAINER.replace("_compute_loss", "_loss"), UTILS, "GRPOTrainer._compute_loss"),
        (TRAINER.replace("model, inputs", "inputs"), UTILS, "GRPOTrainer._compute_loss"),
        (TRAINER, UTILS.replace("outputs", "fields"), "add_fused_lm_head"),
        ("broken(", UTILS, "GRPOTrainer._calculate_rewards"),
    ],
)
def test_what_is_not_there_is_named_and_the_check_fails(installed, capsys, trainer, utils, lacks):
    installed(trainer, utils)
    status, document = told(capsys, "trl")
    (row,) = document["rows"]
    assert status == 1 and row["hook"] is False
    assert lacks in row["missing"]
    assert main(["record", "trl"]) == 1
    assert lacks in capsys.readouterr().out


def halves(folder: Path) -> Path:
    """Eight responses exported, ten in traces: two without a trace, four not exported."""
    prime_rl(folder / "run", ROWS[:8])
    records = [trace(row) for row in ROWS[2:]]
    return lines(folder / "apart/step_5/train/all/traces.jsonl", records)


def test_exports_and_traces_are_joined_and_what_has_no_other_half_is_counted(tmp_path, capsys):
    traces = halves(tmp_path)
    words = ("prime-rl", tmp_path / "run", "--traces", tmp_path / "apart")
    status, document = told(capsys, *words, "--store", tmp_path / "store")
    assert status == 0
    (counts,) = document["rows"]
    assert counts == {"step": 5, "joined": 6, "not_exported": 4, "without_trace": 2}
    assert document["set_aside"] == {"no trace": 2}
    found = {
        tuple(row["response_ids"].tolist()): row
        for row in rollouts.read(tmp_path / "store", tokenizer="unknown")
    }
    assert len(found) == 10
    for number, row in enumerate(ROWS[2:], start=2):
        own = found[tuple(row.response_ids.tolist())]
        assert own["behavior_logp"].tolist() == pytest.approx(row.behavior_logp.tolist())
        assert (own["reward"], own["group_id"]) == (row.reward, row.group_id)
        assert own["versions"].tolist() == row.versions.tolist()
        assert own["rejected"] == (None if number < 8 else "no token export")
        if number < 8:
            assert own["logp"].tolist() == pytest.approx(row.logp.tolist())
    assert traces.exists()


def test_a_diagnosis_of_the_store_knows_the_lag_and_siblings_that_were_not_exported(
    tmp_path, capsys
):
    halves(tmp_path)
    words = ("prime-rl", tmp_path / "run", "--traces", tmp_path / "apart")
    told(capsys, *words, "--store", tmp_path / "store")
    rows = list(read(tmp_path / "store"))
    assert {row.current_version for row in rows} == {4} and {row.step for row in rows} == {5}
    assert [row.logp is None for row in rows] == [row.rejected is not None for row in rows]


def test_traces_beside_the_exports_need_no_flag_and_branches_keep_apart(tmp_path, capsys):
    prime_rl(tmp_path / "run", ROWS)
    records = [{**trace(row), "id": "same"} for row in ROWS]
    lines(tmp_path / "run/rollouts/step_5/train/all/traces.jsonl", records)
    status, document = told(capsys, "prime-rl", tmp_path / "run", "--store", tmp_path / "store")
    assert status == 0 and document["rows"][0]["joined"] == 12
    names = [row["sample_id"] for row in rollouts.read(tmp_path / "store", tokenizer="unknown")]
    assert names[:3] == ["same", "same#2", "same#3"] and len({*names}) == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verl", "."), "allowed: prime-rl RUN"),
        (("--store", "x"), "--store needs a run"),
        (("prime-rl", "nowhere", "--store", "x"), "'nowhere' is not there"),
        (("prime-rl", "."), "--store is missing"),
        (("prime-rl", ".", "--traces", "nowhere", "--store", "x"), "--traces 'nowhere'"),
        (("sglang",), "choose from"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(words, said, capsys):
    status, line = told(capsys, *words)
    assert status == 2 and said in line and line.count("\n") == 1


def test_traces_of_something_else_are_refused(tmp_path, capsys):
    run = prime_rl(tmp_path / "run", ROWS)
    for export, traces, said in ((run, run, "no traces"), (tmp_path / "other", run, "traces")):
        lines(tmp_path / "other/rows.jsonl", [{"behavior_logp": [-1.0], "logp": [-1.0]}])
        words = ("prime-rl", export, "--traces", traces, "--store", tmp_path / "store")
        status, line = told(capsys, *words)
        assert status == 2 and said in line, line
    assert not (tmp_path / "store").exists()
