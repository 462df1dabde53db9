"""Rows kept on disk while a study runs: interruption, resumption, damage."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from windage.analysis.studies import store, study
from windage.analysis.studies.grid import Settings, cells, request
from windage.analysis.studies.store import Rows, differences
from windage.cli import main as frame
from windage.estimators.errors import BadInput

SETTINGS = Settings(
    problem=("token_tree", {"horizon": 2}),
    estimators=(("rloo", {}), ("dr_grpo", {}), ("ppo", {}), ("topr", {"b_pos": float("inf")})),
    behavior=("stale", {"rate": 2.0}),
    sweep={"steps": (0, 3), "group_size": (2, 5)},
)
WORDS = [
    *("--problem", "token_tree:horizon=2", "--behavior", "stale:rate=2", "--seed", "3"),
    *("--estimators", "rloo", "trajectory_is", "--engine", "sampling"),
    *("--samples", "2048", "--sweep", "steps=0,1,2,3,4,5", "group_size=2"),
]


def rows_of(folder, settings=SETTINGS):
    return Rows(folder, request(settings), len(cells(settings)))


def without_seconds(document):
    return {key: value for key, value in document.items() if key != "seconds"}


@pytest.fixture
def each_row(monkeypatch):
    """A part for every row."""
    monkeypatch.setattr(store, "SECONDS", -1.0)


@pytest.fixture
def computed(monkeypatch):
    """Names of the rows that are computed, in order."""
    found, original = [], study.row

    def counted(estimator, site, goal, group_size, *rest):
        found.append((estimator.name, group_size))
        return original(estimator, site, goal, group_size, *rest)

    monkeypatch.setattr(study, "row", counted)
    return found


def interrupted(folder, after, settings=SETTINGS):
    """A study that a person interrupts after so many rows."""
    rows = rows_of(folder, settings)

    def advance(done, total):
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(settings, advance, rows)
    rows.flush()
    return rows


@pytest.mark.parametrize("after", [1, 6, 15])
def test_a_resumed_study_is_the_uninterrupted_one(after, tmp_path, each_row, computed):
    whole = study.run(SETTINGS)
    assert len(computed) == len(whole["rows"]) == 16
    interrupted(tmp_path, after)
    computed.clear()
    told = []
    again = study.run(SETTINGS, lambda done, total: told.append(done), rows_of(tmp_path))
    assert len(computed) == 16 - after and told[0] == after and told[-1] == 16
    assert without_seconds(again) == without_seconds(whole)
    assert [list(row) for row in again["rows"]] == [list(row) for row in whole["rows"]]
    assert json.dumps(again["rows"]) == json.dumps(whole["rows"])


def test_parts_are_tables_that_a_person_can_read(tmp_path, each_row):
    interrupted(tmp_path, 6)
    parts = sorted(tmp_path.glob("rows-*.parquet"))
    assert [part.name for part in parts][::5] == ["rows-00001.parquet", "rows-00006.parquet"]
    table = pd.concat([pd.read_parquet(part) for part in parts])
    kept = study.run(SETTINGS)["rows"]
    assert list(table["estimator"]) == [kept[n]["estimator"] for n in table["number"]]
    assert list(table["variance"].dropna()) == [
        v for n in table["number"] if (v := kept[n]["variance"]) is not None
    ]


def test_a_part_is_written_when_the_last_is_a_second_old(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: clock[0])
    rows = rows_of(tmp_path)
    for number, now in enumerate((0.5, 0.9, 1.1, 1.9, 2.0, 2.2)):
        clock[0] = now
        rows.add(number, {"estimator": "rloo"})
    found = [len(pd.read_parquet(part)) for part in sorted(tmp_path.glob("rows-*.parquet"))]
    assert found == [3, 3]


def test_another_request_is_bad_input_that_says_what_differs(tmp_path, each_row):
    interrupted(tmp_path, 3)
    other = Settings(**{**vars(SETTINGS), "seed": 7, "behavior": ("stale", {"rate": 1.0})})
    with pytest.raises(BadInput, match=r"seed was 0, is 7.*allowed: the same request") as caught:
        rows_of(tmp_path, other)
    assert "behavior: rate was 2.0, is 1.0" in str(caught.value) and "\n" not in str(caught.value)
    assert len(rows_of(tmp_path).read()) == 3


def test_another_version_is_another_request(tmp_path, monkeypatch):
    rows_of(tmp_path)
    monkeypatch.setattr(store, "version", lambda package: "0")
    with pytest.raises(BadInput, match=r"windage was .*, is .0."):
        rows_of(tmp_path)


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "text": lambda data: b"rows",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_part_is_named_and_costs_its_own_rows_only(kind, tmp_path, each_row, computed):
    interrupted(tmp_path, 6)
    part = tmp_path / "rows-00004.parquet"
    part.write_bytes(DAMAGE[kind](part.read_bytes()))
    with pytest.raises(BadInput) as caught:
        rows_of(tmp_path).read()
    line = str(caught.value)
    assert str(part) in line and "delete it, and its rows are computed again" in line
    part.unlink()
    computed.clear()
    again = study.run(SETTINGS, store=rows_of(tmp_path))
    assert len(computed) == 11
    assert without_seconds(again) == without_seconds(study.run(SETTINGS))


def test_a_flipped_bit_is_seen_or_changes_nothing(tmp_path, each_row):
    interrupted(tmp_path, 1)
    before, part = rows_of(tmp_path).read(), tmp_path / "rows-00001.parquet"
    data = part.read_bytes()
    seen = 0
    for place in range(0, len(data), 41):
        part.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        try:
            assert rows_of(tmp_path).read() == before, place
        except BadInput as problem:
            seen += "is damaged" in str(problem)
    assert seen > 10


def test_parts_that_say_too_much_are_damaged(tmp_path):
    rows = rows_of(tmp_path)
    rows.add(99, {"estimator": "rloo"})
    rows.flush()
    with pytest.raises(BadInput, match=r"rows-00001.parquet.* is damaged"):
        rows_of(tmp_path).read()


def test_a_damaged_request_and_parts_without_one_are_bad_input(tmp_path, each_row):
    interrupted(tmp_path, 2)
    (tmp_path / "rows.json").write_text("[")
    with pytest.raises(BadInput, match=r"rows.json. is damaged; allowed: delete it and rows"):
        rows_of(tmp_path)
    (tmp_path / "rows.json").unlink()
    with pytest.raises(BadInput, match=r"rows-00001.parquet without rows.json"):
        rows_of(tmp_path)


def test_differences_are_short():
    a, b = {"sweep": {"cap": [1.0] * 100}}, {"sweep": {"cap": [2.0] * 100}, "seed": 1}
    assert len(differences(a, b)) < 200
    assert differences(a, b).startswith("sweep: cap was [1.0, 1.0,")
    assert differences(a, a) == ""


def start(folder):
    """The command, a part a row and five rows a second, once the first is there."""
    program = (
        "import sys, time; from windage.analysis.studies import store, study\n"
        "store.SECONDS, plain = 0.0, study.in_turn\n"
        "study.in_turn = lambda *a: (time.sleep(0.2) or row for row in plain(*a))\n"
        "from windage.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", program, "study", *WORDS, "--json", "--out", str(folder)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = folder / "rows-00001.parquet"
    while not first.exists():
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.01)
    return running


def finished(folder, capsys):
    """The same command in this process: its document, and the rows that it read back."""
    rows = {n: row for part in folder.glob("rows-*.parquet") for n, row in read(part)}
    assert frame.main(["study", *WORDS, "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not list(folder.glob("rows*"))
    assert {"study.json", "study.csv", "study.parquet", "study.html"} <= set(os.listdir(folder))
    return found, rows


def read(part):
    table = pd.read_parquet(part)
    return [(n, json.loads(row)) for n, row in zip(table["number"], table["row"], strict=True)]


@pytest.fixture(scope="module")
def uninterrupted():
    from windage.cli import study as verb
    from windage.cli.common import common

    parser = frame.Parser(prog="windage study")
    verb.configure(parser)
    common(parser)
    return study.run(Settings(**verb.check(parser.parse_args(WORDS))._asdict()))


def pressed_again(running):
    """What it said; an interrupt that arrives in a destructor is lost: press again."""
    while True:
        try:
            return running.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)


def test_an_interrupted_command_keeps_its_rows_and_goes_on(tmp_path, capsys, uninterrupted):
    running = start(tmp_path)
    running.send_signal(signal.SIGINT)
    out, err = pressed_again(running)
    assert (running.returncode, out, err.count("\n")) == (130, "", 1)
    found, rows = finished(tmp_path, capsys)
    assert f"interrupted; {tmp_path} keeps {len(rows)} of 12 rows" in err
    assert 0 < len(rows) < 12
    for n, row in rows.items():  # blocks are kept for comparing sampled rows, not shown
        shown = {k: v for k, v in row.items() if k != "left_out"}
        assert {k: found["rows"][n][k] for k in shown} == shown
    assert without_seconds(found) == without_seconds(json.loads(json.dumps(uninterrupted)))


def test_a_killed_command_loses_no_part(tmp_path, capsys, uninterrupted):
    running = start(tmp_path)
    running.kill()
    running.communicate(timeout=60)
    (tmp_path / "rows-00002.unfinished").write_bytes(b"PAR1")
    found, rows = finished(tmp_path, capsys)
    assert 0 < len(rows) < 12
    assert without_seconds(found) == without_seconds(json.loads(json.dumps(uninterrupted)))
