"""`windage evaluate`: a real model of few parameters, what was written, and bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_language_model

from windage.analysis import evaluation
from windage.cli import evaluate
from windage.cli.main import main
from windage.llm import checkpoint, rollouts
from windage.llm.config import Config
from windage.llm.tasks.index import TASKS, get

ASKED = ("--task", "arithmetic:digits=1", "--questions", "5", "--samples", "4", "--max-tokens", "6")


def refusal(capsys, *words):
    """The line on standard error; nothing on standard output."""
    assert main(["evaluate", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("windage evaluate: ")
    return err


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models, and the evaluation of both as the command wrote it."""
    root = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate(("first", "second")):
        tiny_language_model.make(root / name, seed=seed)
    words = ["evaluate", root / "first", "--against", root / "second", *ASKED]
    assert main([*map(str, words), "--out", str(root / "written"), "--seed", "4"]) == 0
    return root


def document(folder):
    return json.loads((folder / "evaluate.json").read_text())


def test_two_models_are_asked_the_same_and_everything_is_written(folders):
    names = {path.name for path in (folders / "written").iterdir()}
    figures = {f"{n}.{end}" for n in ("evaluate", "evaluate_pairs") for end in ("png", "svg")}
    tables = {f"evaluate.{end}" for end in ("json", "csv", "parquet", "html")}
    assert names == figures | tables | {"responses"}
    found = document(folders / "written")
    assert found["schema"] == "windage/evaluate/1" and found["k"] == [1, 2, 4]
    assert [m["model"] for m in found["models"]] == ["first", "second"]
    asked = [
        [row["question"] for row in found["questions"] if row["model"] == name]
        for name in ("first", "second")
    ]
    held_out = [q.id for q in get("arithmetic", {"digits": 1}).questions("held out", 4, 0, 5)]
    assert asked[0] == asked[1] == held_out
    assert all(row["samples"] == 4 for row in found["questions"])
    told = found["models"][0]
    assert (told["task"], told["settings"], told["seed"]) == ("arithmetic", {"digits": "1"}, 4)
    assert told["sampling"]["max_tokens"] == 6 and told["sampling"]["sampler"] == "transformers"
    assert len(found["examples"]) == 10


def test_the_store_holds_the_responses_that_the_figures_come_from(folders):
    found = document(folders / "written")
    from windage.llm import models

    loaded = models.load(folders / "second")
    store = folders / "written" / "responses" / "second"
    rows = list(rollouts.read(store, tokenizer=loaded.fingerprint))
    tallies = [row for row in found["questions"] if row["model"] == "second"]
    assert len(rows) == sum(t["samples"] for t in tallies)
    assert sum(len(row["response_ids"]) for row in rows) == sum(t["tokens"] for t in tallies)
    words = [row["verdict"] for row in rows]
    for word in ("right", "format", "wrong", "invalid"):
        assert words.count(word) == sum(t[word] for t in tallies)
    assert sum(row["finish_reason"] == "length" for row in rows) == sum(t["cut"] for t in tallies)


def test_what_was_written_is_read_again_without_the_model(folders, capsys):
    assert main(["evaluate", str(folders / "written"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document(folders / "written")
    assert main(["evaluate", str(folders / "written"), "--k", "3"]) == 0
    printed = capsys.readouterr().out
    assert "pass@3" in printed and "maj@3" in printed and "pass@4" not in printed
    assert "second" in printed and "5 held out questions of arithmetic" in printed


def test_the_same_seed_gives_the_same_document_and_a_pair_of_two_evaluations(folders, capsys):
    for name in ("first", "second"):
        assert main(["evaluate", str(folders / name), *ASKED, "--seed", "4", "--json"]) == 0
        (folders / f"{name} alone").mkdir()
        (folders / f"{name} alone" / "evaluate.json").write_text(capsys.readouterr().out)
    places = [str(folders / f"{name} alone") for name in ("first", "second")]
    assert main(["evaluate", places[0], "--against", places[1], "--json"]) == 0
    found, wanted = json.loads(capsys.readouterr().out), document(folders / "written")
    for part in ("rows", "histogram", "questions", "examples"):
        assert found[part] == wanted[part], part
    assert main(["evaluate", places[0], "--against", places[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [m["model"] for m in found["models"]] == ["first (1)", "first (2)"]
    assert all(row["value"] == 0 for row in found["rows"] if row["against"])
    line = refusal(capsys, folders / "written", "--against", places[0])
    assert "3 models in all" in line


def test_two_runs_are_compared_by_their_newest_checkpoints(folders, tmp_path, capsys):
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    assert "has no checkpoint yet" in refusal(capsys, tmp_path / "none", *ASKED)
    for name in ("first", "second"):
        for step, other in ((1, "first"), (2, name)):
            checkpoint.save(
                tmp_path / name / "checkpoints", step, tensors={}, state={}, keep=2,
                also=lambda there, other=other: shutil.copytree(
                    folders / other, there, dirs_exist_ok=True
                ),
            )  # fmt: skip
    words = ["evaluate", tmp_path / "first", "--against", tmp_path / "second", *ASKED]
    assert main([*map(str, words), "--seed", "4", "--json"]) == 0
    found, wanted = json.loads(capsys.readouterr().out), document(folders / "written")
    for part in ("rows", "histogram", "questions", "examples"):
        assert found[part] == wanted[part], part
    assert any("checkpoint-00000002" in path for path in found["models"][1]["inputs"])


def test_bad_input_is_refused_in_a_line(folders, tmp_path, capsys):
    first, written = folders / "first", folders / "written"
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": 1}\n{"question": "b"}\n')
    (tmp_path / "empty").mkdir()
    shutil.copytree(written, tmp_path / "damaged")
    (tmp_path / "damaged" / "evaluate.json").write_text('{"schema": "windage/evaluate/1"')
    refusals = [
        ((tmp_path / "nowhere",), "is no folder; allowed: a model folder with config.json"),
        ((tmp_path / "empty",), "holds neither"),
        ((tmp_path / "damaged",), "damaged"),
        ((written, "--questions", "5"), "--questions: everything was asked before"),
        ((first, "--task", "aritmetic"), "nearest valid name: arithmetic"),
        ((first, "--task", "arithmetic:digit=2"), "nearest valid name: digits"),
        ((first, "--task", "arithmetic:held_out=0"), "no question is held out"),
        ((first, "--task", "jsonl:check=proof"), "unknown check 'proof'"),
        (
            (first, "--task", f"jsonl:held_out={tmp_path / 'bad.jsonl'}"),
            "line 2: no field 'answer'",
        ),
        ((first, "--task", "jsonl:train=a", "--split", "held-out"), "no held out questions"),
        ((first, "--split", "test"), "allowed: held-out, train"),
        ((first, "--sampler", "vlm"), "allowed: transformers, vllm"),
        ((first, "--k", "0"), "allowed: whole numbers from 1 on"),
        ((first, "--k", "9"), "9 is more than the 8 samples"),
        ((written, "--k", "5"), "k is 5, first has 4 samples"),
        ((first, "--samples", "0"), "a whole number from 1 on"),
        ((first, "--temperature", "warm"), "allowed: a number"),
        ((first, "--temperature", "-1"), "temperature is -1"),
        ((first, "--top-p", "0"), "top_p is 0"),
        ((first, "--dtype", "int4"), "allowed: float32"),
        ((first, "--device", "tpu"), "device is 'tpu'"),
        ((first, "--out", written), "holds responses of an evaluation"),
        ((first, "--max-token", "3"), "nearest valid name: --max-tokens"),
    ]
    for words, part in refusals:
        assert part in refusal(capsys, *words), words


def test_a_broken_model_is_refused_in_a_line(folders, tmp_path, capsys):
    shutil.copytree(folders / "first", tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "broken" in refusal(capsys, tmp_path / "broken", *ASKED)


def test_a_refusal_loads_nothing_heavy(folders):
    program = (
        "import sys; from windage.cli.main import main; status = main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)));"
        "sys.exit(status)"
    )
    words = ["evaluate", str(folders / "first"), "--task", "arithmetic:digits=99"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == "[]\n", done.stdout
    assert "digits is 99" in done.stderr


def test_the_page_shows_what_was_measured(folders):
    found = document(folders / "written")
    page = (folders / "written" / "evaluate.html").read_text()
    row = next(r for r in found["rows"] if r["figure"] == "wrong" and r["against"])
    assert evaluation.interval(row) in page and "<script" not in page
    assert found["examples"][0]["question"] in page
    for name in ("evaluate", "evaluate_pairs"):
        assert (folders / "written" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/svg+xml") == 2


def test_help_names_every_task_and_the_defaults_of_the_library(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in TASKS)
    sampling = Config().sampling
    for name in ("max_tokens", "batch", "top_p", "temperature", "top_k"):
        assert evaluate.ASKING[name] == getattr(sampling, name)


def test_names_of_models_tell_them_apart():
    assert evaluate.names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert evaluate.names([Path("/a/x"), Path("/b/x")]) == ["/a/x", "/b/x"]
