"""How what decides is shown: panels, lines that lead, the border of what is attainable."""

from __future__ import annotations

import math

import pytest

from windage.analysis import plots, report
from windage.analysis.studies import decision_page, study_page
from windage.analysis.studies.study import Settings, run

ENTRIES = tuple((name, {}) for name in ("rloo", "token_is", "trajectory_is", "grpo", "ppo"))


@pytest.fixture(scope="module")
def found():
    settings = {"behavior": ("stale", {"steps": 8}), "estimators": ENTRIES}
    return run(Settings(frontier=4, **settings))


@pytest.fixture(scope="module")
def wide():
    settings = {"behavior": ("stale", {}), "estimators": ENTRIES[:3], "frontier": 1}
    return run(Settings(sweep={"steps": (1, 4), "group_size": (2, 4, 8)}, **settings))


class Axes:
    """Keeps what was painted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        return lambda *a, **k: self.calls.append((name, a, k))

    def made(self, name: str) -> list[tuple]:
        return [arguments for call, arguments, _ in self.calls if call == name]


def test_the_page_shows_both_figures_and_what_decides(found):
    page = report.page(found)
    assert [f.name for f in page.figures] == ["study_tradeoff", "study_errors", "study_frontier"]
    table = page.sections[-1].table
    assert {c.key for c in table.columns} >= {
        "groups_needed_rescaled",
        "crossover_groups_rescaled",
        "effective_share_response",
        "excess_bias_rescaled",
    }
    assert [row["estimator"] for row in table.rows] == [name for name, _ in ENTRIES]
    assert "an error of at most 0.1" in page.sections[-1].formula


def test_without_a_frontier_there_is_no_figure_of_it(found):
    plain = {k: v for k, v in found.items() if not k.startswith("frontier")}
    assert decision_page.frontier_figure(plain) is None
    assert [f.name for f in report.page(plain).figures] == ["study_tradeoff", "study_errors"]
    assert len(study_page.summary(plain).lines) == 1
    assert "of 4 batches" in study_page.summary(found).lines[1]


def test_nothing_to_show_is_no_figure(found):
    rows = [row for row in found["rows"] if row["estimator"] == "ppo"]
    assert decision_page.error_figure({**found, "rows": rows}) is None
    assert decision_page.frontier_figure({**found, "rows": rows}) is None


def test_panels_are_points_and_of_many_the_middle_one(wide):
    (only,) = decision_page.points(wide)
    assert only[0] == "steps=4 group_size=2"
    few = {**wide, "rows": [row for row in wide["rows"] if row["group_size"] == 4]}
    assert [words for words, _ in decision_page.points(few)] == [
        "steps=1 group_size=4",
        "steps=4 group_size=4",
    ]
    assert decision_page.error_figure(few) is not None
    assert decision_page.frontier_figure(few) is not None


def test_each_point_has_its_own_curve(wide):
    rows = [row for row in wide["rows"] if (row["steps"], row["group_size"]) == (4, 8)]
    mine = [p for p in wide["frontier"] if (p["steps"], p["group_size"]) == (4, 8)]
    curve = decision_page._curve(wide, rows)
    norm = rows[0]["gradient_norm"]
    expected = [(p["relative_bias_rescaled"], p["variance_rescaled"] ** 0.5 / norm) for p in mine]
    assert curve == sorted(expected) and len(curve) == len(set(curve))
    assert [noise for _, noise in curve] == sorted((n for _, n in curve), reverse=True)


def test_lines_that_lead_somewhere_are_named(found):
    errors = decision_page._errors(found["rows"])
    assert set(errors) == {"rloo", "token_is", "trajectory_is"}
    many = {f"{name} {k}": pair for k in range(9) for name, pair in errors.items()}
    leaders = decision_page._leaders(many, [1, 10, 100, 1e4])
    assert {name.split()[0] for name in leaders} == {"token_is", "trajectory_is"}
    assert decision_page._leaders(errors, [1]) == set(errors)


def test_equal_rows_are_one_line_with_their_number(found):
    twice = [row for row in found["rows"] if row["estimator"] in ("rloo", "token_is")] * 2
    assert set(decision_page._errors(twice)) == {"rloo +1", "token_is +1"}
    assert plots.family("rloo +1") == "no correction"


def test_circles_stand_where_the_lines_cross(found):
    axes = Axes()
    row = next(row for row in found["rows"] if row["estimator"] == "token_is")
    errors = {"token_is": decision_page._errors(found["rows"])["token_is"]}
    xs = [10 ** (k / 4) for k in range(20)]
    decision_page._paint_errors(axes_of(axes), errors, {"token_is"}, xs, 1, 0.1)
    ((x, y, _),) = [a for a in axes.made("plot") if len(a) == 3]
    assert x == row["crossover_groups_rescaled"]
    fair = decision_page._errors(found["rows"])["trajectory_is"][1]
    assert y == pytest.approx(fair.after(x), rel=0.05) and y > fair.after(x)


def axes_of(axes: Axes) -> Axes:
    for name in ("xaxis", "yaxis"):
        setattr(axes, name, Axes())
    return axes


@pytest.mark.parametrize("first", [0.0, 0.3])
def test_what_is_not_attainable_is_shaded(first):
    axes = Axes()
    plots.attainable(axes, [(first, 2.0), (0.5, 1.0)], "border")
    ((xs, ys),) = axes.made("fill_between")
    ((_, _),) = axes.made("plot")
    assert ys[-1] == 1.0 and math.isclose(xs[-1], plots.FAR)
    assert ys[0] == (plots.FAR if first else 2.0)
