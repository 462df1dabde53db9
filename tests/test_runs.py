"""Runs read from their folders: whatever is in them, and what the page says of it."""

import json
import math

import pytest
from checks import refused

from windage.analysis import report
from windage.analysis.runs import document, page, panels
from windage.analysis.runs.reading import names, read
from windage.analysis.runs.sentences import sentences
from windage.estimators.errors import BadInput
from windage.estimators.metrics import NAMES
from windage.llm.journal import Journal
from windage.llm.metrics import record
from windage.llm.shadow import FIGURES


def steps(count: int = 50) -> list[dict]:
    return [
        {
            "step": n,
            "reward/mean": n / count,
            "reward/invalid": 0.3,
            "mismatch/k3": 1e-4 * n,
            "ratio/ess": 1 - n / 1000,
            "weight/ess": 1 - n / 2000,
            "clip/mass_positive": 0.01,
            "clip/mass_negative": 0.02,
            "lag/mean": 1.0,
            "lag/max": 3,
            "update/gradient_norm": 20.0 if n == 7 else 1.0,
            "update/skipped": 1,
            "length/mean": 20.0 - n / 10,
            "shadow/gspo/cosine": 0.9,
            "shadow/cispo/cosine": 0.5,
            "shadow/gspo/norm_ratio": 1.1,
        }
        for n in range(1, count + 1)
    ]


def evaluation(step: int, value: float, half: float = 0.05) -> dict:
    limits = {"pass_at_1_low": value - half, "pass_at_1_high": value + half}
    return {"step": step, "pass_at_1": value, **limits, "questions": 100}


@pytest.fixture
def folder(tmp_path):
    """A run's folder with some of everything."""
    made = tmp_path / "mine"
    made.mkdir()
    (made / "config.toml").write_text('[recipe]\nname = "topr"\nsettings = {b_pos = inf}\n')
    (made / "versions.json").write_text('{"windage": "0.1.0"}')
    put(made / "metrics.jsonl", steps())
    put(made / "evaluate.jsonl", [evaluation(0, 0.1), evaluation(50, 0.7)])
    put(
        made / "samples.jsonl",
        [
            {
                "step": n,
                "question": "<b>2 + 2",
                "response": f"fo\x1bur {n}",
                "answer": "4",
                "verdict": "wrong",
                "reward": 0.0,
            }
            for n in range(40)
        ],
    )
    return made


def put(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_the_writers_write_is_read_back(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        journal.write(record(step, [], time__step=0.5 * step) | {"words": "x", "bad": math.nan})
    journal.close()
    found = read(tmp_path, "run")
    assert found.steps == [{"step": 1, "time/step": 0.5}, {"step": 2, "time/step": 1.0}]
    assert found.notes == [] and set(found.hashes) == {"metrics.jsonl"}


def test_figures_that_are_drawn_are_figures_that_are_logged():
    shown = [p for _, group in panels.GROUPS.values() for p in group]
    drawn = {f for p in shown for f in (p.figure, p.beside) if f} - {"clip/mass"}
    assert drawn | set(page.FIGURES.values()) <= set(NAMES)
    assert {figure for figure, _ in panels.SHADOWED} <= {row[0] for row in FIGURES}


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_torn_last_line_is_left_out_and_said(folder, cut):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    found = read(folder, "run")
    assert [r["step"] for r in found.steps] == list(range(1, 50))
    assert found.notes == ["metrics.jsonl: a last line without its end is left out"]


def test_lines_that_are_no_records_are_counted_and_nothing_else_is_lost(folder):
    path = folder / "metrics.jsonl"
    bad = [
        b"\xff\xfe",
        b"[1]",
        b'{"step": "1"}',
        b'{"step": -1}',
        b"[" * 100_000,
        b'{"step": true}',
    ]
    path.write_bytes(b"\n".join([*bad, path.read_bytes()]))
    found = read(folder, "run")
    assert len(found.steps) == 50
    (note,) = found.notes
    assert "line 1 and 5 more" in note


def test_a_step_that_is_there_twice_counts_as_it_was_written_last(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "reward/mean": 0.25}\n')
    found = read(folder, "run")
    assert found.steps[-1] == {"step": 50, "reward/mean": 0.25} and len(found.steps) == 50


def test_damaged_files_beside_the_metrics_are_named(folder):
    (folder / "config.toml").write_bytes(b"\xff = [")
    (folder / "card.json").write_text("[]")
    (folder / "versions.json").write_text("{")
    found = read(folder, "run")
    assert (found.config, found.card, found.versions) == ({}, None, {})
    assert sorted(note.split()[0] for note in found.notes) == [
        "card.json",
        "config.toml",
        "versions.json",
    ]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with refused("holds no run", str(tmp_path), error=BadInput):
        document.run([tmp_path])
    with refused("holds no run", error=BadInput):
        document.run([tmp_path / "nowhere"])
    (tmp_path / "metrics.jsonl").mkdir()
    with refused("cannot be read", error=BadInput):
        document.run([tmp_path])


def test_names_tell_runs_apart(tmp_path):
    assert names([tmp_path / "a/x", tmp_path / "b/x"]) == ["a/x", "b/x"]
    assert names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    same = names([tmp_path / "a", tmp_path / "a"])
    assert len(set(same)) == 2


def test_sentences_state_their_numbers(folder):
    said = " ".join(sentences(read(folder, "run")))
    assert "from 10.0 % (5.0 to 15.0) at step 0 to 70.0 % (65.0 to 75.0) at step 50" in said
    assert "the intervals do not meet" in said
    assert "20 times its median at step 7" in said and "1 update was skipped" in said
    assert "at least 0.95 (step 50)" in said and "30 % of the answers" in said
    assert "gspo would have" in said and "(mean cosine 0.90), cispo the least (0.50)" in said
    put(folder / "evaluate.jsonl", [evaluation(0, 0.5), evaluation(50, 0.55)])
    assert "the intervals meet" in " ".join(sentences(read(folder, "run")))


def test_the_document_is_strict_json_with_hashes_and_all_rows(folder):
    found = document.run([folder])
    text = json.dumps(found, allow_nan=False)
    assert found["schema"] == "windage/train/1" and len(found["rows"]) == 50
    (run,) = found["runs"]
    assert run["config"]["recipe"]["settings"]["b_pos"] == "inf" and "inf" in text
    assert set(run["hashes"]) == {p.name for p in folder.iterdir()}
    assert len(run["samples"]) == 9 and run["samples"][-1]["step"] == 39
    assert document.run([folder]) == found


def test_the_page_of_two_runs_opens_offline_and_its_figures_are_the_same_twice(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    few = ["step", "reward/mean", "ratio/ess"]
    for place, keys in ((folder, [*few, "shadow/gspo/cosine"]), (other, few)):
        put(place / "metrics.jsonl", [{k: row[k] for k in keys} for row in steps(8)])
    (other / "config.toml").write_text("")
    found = document.run([folder, other])
    out = tmp_path / "out"
    files = {path.name: path.read_bytes() for path in report.write(found, out)}
    drawn = ("learning", "mismatch", "shadows-1")
    assert {f"train-{name}.png" for name in drawn} == {n for n in files if n.endswith("png")}
    html = files["train.html"].decode()
    assert "&lt;b&gt;2 + 2" in html and "<b>2" not in html and "\x1b" not in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert "mine: what its figures say" in html
    assert panels.shadows(found, "mine").svg == files["train-shadows-1.svg"]


def test_a_run_without_a_step_has_a_page(tmp_path):
    (tmp_path / "config.toml").write_text("")
    found = document.run([tmp_path])
    assert "No step was recorded" in report.html(report.page(found))
    rendered = report.table(found)
    assert rendered.table.rows[0]["steps"] == 0


def test_a_card_of_another_version_is_shown_as_it_is(folder):
    (folder / "card.json").write_text('{"recipe": "x", "claims": [{"odd": 1}]}')
    found = document.run([folder])
    shown = list(page.of_run({**found, "rows": []}, found["runs"][0]))
    assert any("recipe = x" in section.formula for section in shown)


def test_long_runs_are_thinned_to_means():
    xs, ys = panels.thinned(range(6000), [1.0] * 3000 + [3.0] * 3000)
    assert len(xs) == panels.MOST and set(ys) == {1.0, 3.0}
    assert panels.thinned([1, 2], [5.0, 6.0]) == ([1.0, 2.0], [5.0, 6.0])
    flat = panels.smooth([2.0] * 100)
    assert flat == pytest.approx([2.0] * 100)
    step = panels.smooth([0.0] * 50 + [1.0] * 50)
    assert step[0] == 0 and step[-1] == 1 and 0 < step[49] < step[50] < 1


def test_responses_of_any_length_are_folded():
    shown = page.printable("word " * 1000 + "\u202e\x00")
    assert max(map(len, shown.split("\n"))) <= page.LINE and "5002 characters" in shown
