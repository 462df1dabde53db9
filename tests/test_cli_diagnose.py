"""`windage diagnose`: the document, the folder, two dumps, and bad input in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from windage.analysis.diagnose import document, written
from windage.analysis.diagnose.figures import agreement
from windage.analysis.diagnose.planted import Run, rows
from windage.analysis.diagnose.support import support
from windage.cli.main import main
from windage.estimators.catalogue import CATALOGUE

SMALL = Run(groups=16, group_size=3, lag=1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short catalogue: all of it takes seconds."""
    monkeypatch.setattr(document, "support", partial(support, names=("group_mean",)))


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    for name, run in (("a", SMALL), ("b", Run(groups=16, group_size=3, lag=1, top_p=0.8))):
        written.write(folder / f"{name}.parquet", rows(run, 1))
    return folder / "a.parquet", folder / "b.parquet"


@pytest.mark.long
def test_the_whole_catalogue_is_ranked_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json"]) == 0
    support = json.loads(capsys.readouterr().out)["support"]
    assert {row["estimator"] for row in support["rows"]} == set(CATALOGUE)
    assert support["rows"][0]["rank"] == 1


@pytest.mark.usefixtures("few")
def test_the_demo_raises_what_is_planted_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "windage/diagnose/1"
    assert {s["name"] for s in told["signs"] if s["state"] == "raised"} == {"stale_cache"}
    assert told["dump"]["rows_in"] == told["dump"]["rows_kept"] == 224
    row = next(row for row in told["rows"] if row["name"] == "mismatch/k3")
    assert row["verl"] == "rollout_corr/k3_kl" and row["half_width"] > 0
    assert told["support"]["rows"][0]["rank"] == 1
    assert {pair[1] > 0 for s in told["signs"] if (pair := s["found"])} == {True}


@pytest.mark.usefixtures("few")
def test_two_dumps_are_set_side_by_side_and_written(
    dumps: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, dumps)
    words = ["diagnose", a, "--compare", b, "--cap", "1.5", "--out", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Beside it" in printed and "difference" in printed
    names = {path.name for path in tmp_path.iterdir()}
    figures = {"mismatch.png", "support.png"}
    assert {"diagnose.json", "diagnose.csv", "diagnose.html", *figures} <= names
    told = json.loads((tmp_path / "diagnose.json").read_text())
    by = {row["name"]: row for row in told["rows"]}
    assert by["ratio/mean"]["differs"] and by["ratio/mean"]["difference"] > 0.05
    assert "limits/above_1.5" in by
    raised = {s["name"] for s in told["other"]["signs"] if s["state"] == "raised"}
    assert raised == {"support"}


def test_entries_that_do_the_same_are_one_in_the_table_of_cosines() -> None:
    names = ["a", "b", "c", "left out"]
    cosine = [[1.0, 0.999, 0.5, 0.1], [0.999, 1.0, 0.4, 0.1], [0.5, 0.4, 1.0, 0.1], [0.1] * 4]
    rows = [{"estimator": n, "rank": r} for n, r in zip(names, (1, 1, 2, None), strict=True)]
    told = {"rows": rows, "agreement": {"estimators": names, "cosine": cosine}}
    drawn = agreement({"support": told})
    assert drawn is not None and drawn.name == "agreement" and b"<svg" in drawn.svg
    for word in (b"a +1", b"c", b"0.50"):
        assert word in drawn.svg
    assert b"left out" not in drawn.svg and b"0.40" not in drawn.svg
    alike = {"estimators": names[:2], "cosine": [row[:2] for row in cosine[:2]]}
    assert agreement({"support": {"rows": rows[:2], "agreement": alike}}) is None


@pytest.mark.usefixtures("few")
def test_columns_of_an_unknown_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        json.dumps({"trainer": row.logp.tolist(), "engine": row.behavior_logp.tolist(),
                    "score": row.reward, "uid": row.group_id})
        for row in rows(SMALL, 2)
    ] + ["{broken"]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    given = "logp=trainer,behavior_logp=engine,reward=score,group_id=uid"
    assert main(["diagnose", str(path), "--columns", given, "--json"]) == 0
    dump = json.loads(capsys.readouterr().out)["dump"]
    assert dump["rows_in"] == 49 and dump["rows_kept"] == 48
    assert sum(dump["set_aside"].values()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.jsonl"], "is not there"),
        (["--cap", "0.5"], "above 1"),
        (["--cap", "two"], "above 1"),
        (["--columns", "logp"], "field=column"),
        (["--columns", "logp=a"], "needs a dump"),
        (["--columns", "lgop=a"], "nearest valid name: logp"),
        (["--compare", ""], "is not there"),
        (["--kap", "2"], "nearest valid name: --cap"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err


def test_a_file_without_usable_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"behavior_logp": [null], "logp": [-1.0]}\n')
    assert main(["diagnose", str(path), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no row can be used" in printed.err
