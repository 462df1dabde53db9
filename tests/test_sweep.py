"""Sweeps with many cells: equal to single rows, and shown as far as a person can read."""

import json

import pytest

from windage.analysis import report
from windage.analysis.studies import study_page
from windage.analysis.studies.grid import Settings
from windage.analysis.studies.study import run


@pytest.fixture(scope="module")
def wide():
    return run(
        Settings(
            problem=("bandit", {}),
            estimators=(("rloo", {}), ("token_is", {}), ("reinforce", {})),
            behavior=("noise", {}),
            sweep={"sigma": (0.1, 0.2, 0.3, 0.4), "group_size": (2, 3, 4), "arms": (3, 8)},
        )
    )


def test_a_long_table_ends_and_says_so(wide, monkeypatch):
    assert len(wide["rows"]) == 72 and len(study_page.rows_table(wide).rows) == 72
    monkeypatch.setattr(study_page, "MOST_ROWS", 50)
    table = study_page.rows_table(wide)
    assert len(table.rows) == 50
    assert table.notes[0] == "22 more rows: --json and --out have them."
    monkeypatch.setattr(study_page, "MOST_ROWS", 72)
    assert not study_page.rows_table(wide).notes


def test_a_wide_figure_holds_the_slow_keys_and_says_so(wide, monkeypatch):
    monkeypatch.setattr(study_page, "MOST_LINES", 9)
    figure = study_page.sweep_figure(wide, "arms")
    assert "against arms at sigma=0.3; a gap" in figure.caption
    assert figure.alt.startswith("Bias and variance of 9 estimators")
    monkeypatch.setattr(study_page, "MOST_LINES", 8)
    assert (
        "against arms at sigma=0.3 group_size=3; a" in study_page.sweep_figure(wide, "arms").caption
    )
    first = {**wide, "sweep": {**wide["sweep"], "sigma": (0.1,)}, "rows": wide["rows"][:18]}
    monkeypatch.setattr(study_page, "MOST_LINES", 9)
    assert "against arms; a gap" in study_page.sweep_figure(first, "arms").caption


def test_a_figure_of_many_lines_is_drawn(wide):
    """As many as there may be: the names leave room for the axes."""
    most = study_page.MOST_LINES
    rows = [{**row, "estimator": f"name{k}"} for k in range(most) for row in wide["rows"][:2]]
    few = {**wide, "sweep": {"arms": (3, 8)}, "rows": rows}
    assert f"variance of {most} estimators" in study_page.sweep_figure(few, "arms").alt


def test_a_large_document_is_one_line(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MANY", 71)
    report.write(wide, tmp_path)
    text = (tmp_path / "study.json").read_text()
    assert text.count("\n") == 1 and json.loads(text) == json.loads(json.dumps(wide))
    assert len((tmp_path / "study.csv").read_text().splitlines()) == 73
    monkeypatch.setattr(report, "MANY", 72)
    report.write(wide, tmp_path)
    assert (tmp_path / "study.json").read_text().count("\n") > 73


ENTRIES = ("rloo", "dr_grpo", "grpo", "dapo", "token_tis", "trajectory_is", "topr", "centered")


def alone(settings, row):
    """The same row, asked for by itself."""
    key, keys = row["estimator"], settings.sweep
    behavior = {**settings.behavior[1], **{k: row[k] for k in ("steps",) if k in keys}}
    problem = {**settings.problem[1], **{k: row[k] for k in ("horizon",) if k in keys}}
    (found,) = run(
        Settings(
            problem=(settings.problem[0], problem),
            behavior=(settings.behavior[0], behavior),
            estimators=((key, {}),),
            group_size=row["group_size"],
        )
    )["rows"]
    return found


@pytest.mark.parametrize(
    ("problem", "horizons", "tolerance"),
    [("token_tree", (2, 3), 0.0), ("reasoning", (5, 8), 1e-12)],
)
def test_swept_rows_are_those_asked_for_alone(problem, horizons, tolerance):
    """Whatever estimators, group sizes and samplers share."""
    settings = Settings(
        problem=(problem, {}),
        estimators=tuple((name, {}) for name in ENTRIES),
        behavior=("stale", {"rate": 0.5}),
        sweep={"steps": (0, 3), "group_size": (2, 3, 7), "horizon": horizons},
    )
    swept = run(settings)["rows"]
    assert len(swept) == 12 * len(ENTRIES)
    for row in swept[:: 7 if problem == "token_tree" else 11]:
        single = alone(settings, row)
        assert row["engine"] == single["engine"] not in (None, "sampling")
        for name in ("scale", "relative_bias", "variance", "drift"):
            bound = tolerance * max(1.0, abs(single[name]))
            assert abs(row[name] - single[name]) <= bound, (row["estimator"], name)
        gaps = [abs(a - b) for a, b in zip(row["mean"], single["mean"], strict=True)]
        assert max(gaps) <= tolerance
