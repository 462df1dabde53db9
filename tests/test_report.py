"""How results look: numbers, tables, figures, files, and the sentences that figures choose."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from windage.analysis import plots, report, tables, terminal
from windage.analysis.plots import family, frontier, spread
from windage.analysis.report import Page, Section
from windage.analysis.studies import reading, staleness, staleness_page, study, study_page
from windage.analysis.tables import Column, Table, text
from windage.estimators.batch import Batch
from windage.estimators.catalogue import CATALOGUE, FIRST
from windage.estimators.estimator import coefficients
from windage.toy.behavior import with_behavior
from windage.toy.exact.walk import Walk
from windage.toy.objective import objective

SMALL = {"estimators": (("rloo", {}), ("ppo", {}), ("grpo", {}), ("trajectory_is", {}))}


@pytest.fixture(scope="module")
def small():
    """A study with an undefined row and a sweep."""
    settings = study.Settings(
        problem=("bandit", {"arms": 4}),
        behavior=("temperature", {}),
        sweep={"t": (1.0, 2.0)},
        **SMALL,
    )
    return study.run(settings)


@pytest.fixture(scope="module")
def stale_page(stale):
    return report.page(stale)


@pytest.fixture(scope="module")
def stale():
    """The built-in study on few lags and lengths."""
    patch = pytest.MonkeyPatch()
    with patch.context() as change:
        change.setattr(staleness, "LENGTHS", (2, 4))
        change.setattr(staleness, "LAGS", (0, 2, 8, 32))
        yield staleness.run()


def printed(thing, width):
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(report.table(thing) if isinstance(thing, dict) else thing)
    return console.export_text()


# Numbers


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (True, "yes"),
        (0, "0"),
        (0.0, "0"),
        (-0.0, "0"),
        (1e-17, "<1e-10"),
        (-1e-17, "<1e-10"),
        (1e-9, "1.00e-9"),
        (1e-4, "0.0001"),
        (-0.5, "-0.5"),
        (999.4, "999"),
        (9999.4, "9999"),
        (9999.6, "1.00e4"),
        (123456, "123456"),
        (math.pi, "3.14"),
        (0.9996, "1-4e-04"),
        (-1.00004, "-1+4e-05"),
        (1 + 1e-15, "1"),
        (0.9994, "0.999"),
        ([1.0, 0.25], "1, 0.25"),
        ({"cap": 2.0, "eps": 1e-6}, "cap=2 eps=1.00e-6"),
        ("inf", "inf"),
    ],
)
def test_numbers_as_words(value, words):
    assert text(value) == words


def test_per_cent_never_rounds_something_to_nothing():
    shares = (None, 0.0, 1e-9, 0.0049, 0.005, 0.994, 1.0)
    assert [text(s, percent=True) for s in shares] == (
        ["–", "0 %", "<1 %", "<1 %", "0 %", "99 %", "100 %"]
    )


@given(st.floats(min_value=1e-9, max_value=1e12), st.sampled_from([1, -1]))
def test_three_digits_are_kept(size, sign):
    value = sign * size
    words = text(value)
    near = re.fullmatch(r"-?1([+-]\de-\d\d)", words)
    found = math.copysign(1 + float(near[1]), value) if near else float(words)
    assert found == pytest.approx(value, rel=5.1e-3)


# Tables


def a_table(**changes):
    columns = [
        Column(key="name", label="name", keep=9),
        Column(key="x", label="x\n(units)", keep=1),
    ]
    rows = [{"name": "a", "x": 0.5}, {"name": "b", "x": None}]
    return replace(
        Table(columns=columns, rows=rows, caption="What it is.", notes=["A note."]), **changes
    )


def test_columns_go_by_worth_and_it_is_said():
    columns = [Column(key=c, label=c * 9, keep=k) for c, k in (("a", 9), ("b", 1), ("c", 2))]
    table = Table(columns=columns, rows=[{"a": 1, "b": 2, "c": 3}])
    assert [[c.key for c in part] for part in terminal.fit(table, 100)] == [["a", "b", "c"], []]
    assert [[c.key for c in part] for part in terminal.fit(table, 25)] == [["a", "c"], ["b"]]
    assert [[c.key for c in part] for part in terminal.fit(table, 1)] == [["a"], ["b", "c"]]
    starred = a_table(columns=[Column(key="x", label="x")], strong=frozenset({(0, "x")}))
    assert terminal.widths(starred) == {"x": len("* 0.5") + 2}


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_terminal_is_no_wider_than_it_is(small, stale, width):
    for document in (small, stale):
        shown = printed(document, width)
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        if width in (40, 200):
            assert ("Left out at this width" in shown) == (width == 40)


def test_terminal_stars_the_best_and_explains_a_dash():
    table = a_table(strong=frozenset({(0, "x")}))
    rendered = terminal.Rendered(title="T", table=table, lines=("Last.",))
    lines = printed(rendered, 60).splitlines()
    assert any(line.split() == ["a", "*", "0.5"] for line in lines)
    assert any(line.split() == ["b", "–"] for line in lines)
    assert [lines[0], lines[-1]] == ["T", "Last."] and "A note." in lines


def test_undefined_rows_say_why(small):
    for words in (printed(small, 120), report.html(report.page(small))):
        assert "ppo: needs values, which a problem does not have" in words


def test_reasons_are_gathered():
    rows = [
        {"n": "a", "reason": "why"},
        {"n": "b"},
        {"n": "c", "reason": "why"},
        {"n": "a", "reason": "why"},
    ]
    assert tables.reasons(rows, "n") == ["– a, c: why"]


def test_sampled_figures_carry_their_error():
    settings = study.Settings(engine="sampling", samples=4096, **SMALL)
    document = study.run(settings)
    row = document["rows"][0]
    shown = f"{text(row['scale'])} ± {text(row['standard_error']['scale'])}"
    assert shown in printed(document, 200)
    assert "± is one standard error" in printed(document, 200)


def test_settings_tell_apart_rows_of_one_name():
    document = study.run(
        study.Settings(estimators=(("token_tis", {"cap": 1.0}), ("token_tis", {"cap": 4.0})))
    )
    names = [row["estimator"] for row in study_page.rows_table(document).rows]
    assert names == ["token_tis:cap=1", "token_tis:cap=4"]


# Pages and files


def test_page_is_one_file_that_opens_offline(small, stale_page):
    for page in (report.page(small), stale_page):
        words = report.html(page)
        assert "http" not in words and "<script" not in words and "@import" not in words
        sources = re.findall(r'(?:src|href)="([^"]{0,30})', words)
        assert len(sources) == len(page.figures) > 0
        assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
        for section in page.sections:
            assert section.title in words


def test_page_escapes_what_it_is_given():
    rows = [{"name": "<b>&", "x": 1.0}]
    page = Page(title="<i>", intro=["<p>"], sections=[Section(title="s", table=a_table(rows=rows))])
    words = report.html(page)
    assert "<b>" not in words and "&lt;b&gt;&amp;" in words
    assert "<i>" not in words and "&lt;p&gt;" in words


def test_page_shows_every_cell():
    words = report.html(Page(title="t", intro=[], sections=[Section(title="s", table=a_table())]))
    assert re.search(r'<th scope="row">a</th>\s*<td class="number">0.5</td>', words)
    assert re.search(r'<th scope="row">b</th>\s*<td class="number">–</td>', words)
    assert "x<br>(units)" in words and "What it is." in words and "A note." in words


def test_files_hold_the_same_numbers(small, tmp_path):
    files = report.write(small, tmp_path / "new" / "folder")
    names = {f.name for f in files}
    pictures = {f"study_{name}.{form}" for name in ("t", "errors") for form in ("png", "svg")}
    assert names == pictures | {f"study.{e}" for e in ("json", "csv", "parquet", "html")}
    assert sorted(names) == sorted(f.name for f in (tmp_path / "new" / "folder").iterdir())
    assert json.loads((tmp_path / "new/folder/study.json").read_text()) == small
    with (tmp_path / "new/folder/study.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    parquet = pd.read_parquet(tmp_path / "new/folder/study.parquet")
    assert len(kept) == len(parquet) == len(small["rows"])
    for row, line, (_, cells) in zip(small["rows"], kept, parquet.iterrows(), strict=True):
        for key in ("scale", "cosine", "variance", "t", "drift"):
            assert line[key] == ("" if row[key] is None else repr(row[key]))
            assert (row[key] is None and np.isnan(cells[key])) or cells[key] == row[key]
        assert line["estimator"] == row["estimator"]
    assert "mean" not in kept[0]


def test_same_document_same_bytes(small, tmp_path):
    first, second = (report.write(small, tmp_path / name) for name in "ab")
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in second]


def test_a_verb_without_a_look_gets_its_rows(tmp_path):
    rows = [
        {"claim": "B-01", "measured": 0.25, "curve": [1.0]},
        {"claim": "B-02", "measured": None},
    ]
    document = {"schema": "windage/nonsense/1", "rows": rows}
    shown = printed(document, 80)
    assert "B-01" in shown and "0.25" in shown and "curve" not in shown
    assert {f.name for f in report.write(document, tmp_path)} == {
        f"nonsense.{e}" for e in ("json", "csv", "parquet", "html")
    }


# Figures


def test_every_entry_has_a_family_and_none_looks_like_another():
    assert "other" not in {family(name) for name in CATALOGUE}
    known = {
        "rloo": "no correction",
        "icepop": "token ratio",
        "suffix_is": "sequence ratio",
        "gspo": "clip",
        "topr": "taper",
        "centered_mask": "score centering",
    }
    assert {name: family(name) for name in known} == known
    assert family("nobody") == "other" and family("token_tis:cap=4") == "token ratio"
    colors, markers = zip(*plots.FAMILIES.values(), strict=True)
    assert len(set(colors)) == len(set(markers)) == len(plots.FAMILIES)


points = st.tuples(st.integers(0, 5).map(float), st.integers(0, 5).map(float))


@given(st.lists(points, min_size=1, max_size=12))
def test_frontier_is_what_nothing_beats(found):
    def beaten(p):
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in found)

    assert frontier(found) == sorted({p for p in found if not beaten(p)})


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0.1, 2))
def test_spread_keeps_order_and_distance(values, gap):
    places = spread(values, gap)
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    sorted_places = [places[i] for i in order]
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(sorted_places))
    if all(abs(values[i] - values[j]) >= gap for i in order for j in order if i != j):
        assert places == values


def test_labels_cover_neither_labels_nor_points():
    boxes = []

    def paint(figure):
        axes = figure.subplots()
        spots = [(x / 7, (3 * x % 7) / 7, f"entry_{x}") for x in range(7)] + [
            (0.5, 0.5, "rloo")
        ] * 2

        def check():
            plots.label_points(axes, [(*s, "black") for s in spots], [(x, y) for x, y, _ in spots])
            renderer = figure.canvas.get_renderer()
            boxes.extend(t.get_window_extent(renderer) for t in axes.texts)
            spans = [axes.transData.transform(s[:2]) for s in spots]
            assert not any(box.contains(*at) for box in boxes for at in spans)

        return [check]

    figure = plots.draw("test", paint, size=(4, 4), caption="", alt="")
    assert len(boxes) >= 7
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert (
        figure.png.startswith(b"\x89PNG") and b"<svg" in figure.svg and b"dc:date" not in figure.svg
    )


def test_figure_is_the_same_twice(stale, stale_page):
    assert staleness_page.overview(stale) == stale_page.figures[0]


def test_captions_say_what_was_computed_and_how(stale_page):
    assert len(stale_page.figures) == 4
    for figure in stale_page.figures:
        assert "Exact (engines" in figure.caption and "3 prompts solved 20 %" in figure.caption
        assert figure.alt


# The built-in study


@pytest.mark.parametrize("length", [2, 5])
def test_problem_is_as_stated(length):
    fresh = staleness.problem(length)
    solved = (Walk(fresh).leaf_probability * fresh.rewards).sum(-1)
    assert solved.tolist() == pytest.approx(staleness.SUCCESS, abs=1e-6)
    right = fresh.tree.paths[1].sum(-1) / length >= 0.5
    assert torch.equal(fresh.rewards[1], right.double()) and 0 < right.sum() < len(right)
    step = staleness.rate(fresh)
    behind = with_behavior(fresh, "stale", steps=1, rate=step)
    assert float(staleness.divergence(behind)) == pytest.approx(staleness.DIVERGENCE, rel=1e-6)
    assert float(staleness.effective_share(fresh)) == pytest.approx(1)
    assert float(staleness.divergence(fresh)) == pytest.approx(0, abs=1e-15)


def test_measures_of_mismatch_by_listing():
    behind = with_behavior(staleness.problem(3), "stale", steps=4, rate=2.0)
    share = total = 0.0
    prefixes, tokens = behind.tree.paths
    for p in range(behind.prompts):
        logs = [
            table[p][prefixes, tokens].sum(-1).double()
            for table in (behind.logp, behind.behavior_logp)
        ]
        ratio = (logs[0] - logs[1]).exp()
        share += 1 / float((logs[1].exp() * ratio**2).sum()) / behind.prompts
        total += float((logs[0].exp() * ratio.log()).sum()) / behind.prompts / 3
    assert float(staleness.effective_share(behind)) == pytest.approx(share, rel=1e-12)
    assert float(staleness.divergence(behind)) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("entry", [e for e in FIRST if e.name != "ppo"], ids=lambda e: e.name)
def test_a_large_update_averages_batches(entry):
    """At equal lengths the coefficients of two batches together are half of those of each."""
    generator = torch.Generator().manual_seed(3)
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.float64)
    head = torch.randn(2, 4, 3, 5, 2, generator=generator, dtype=torch.float64).log_softmax(-1)
    whole = Batch(
        rewards=rewards,
        mask=torch.ones(4, 3, 5, dtype=torch.bool),
        logp=head[0, ..., 0],
        behavior_logp=head[1, ..., 0],
        head_logp=head[0],
        head_behavior_logp=head[1],
    )
    sized = study.bind(entry, staleness.problem(5))
    together = coefficients(sized, whole)
    for half in (slice(0, 2), slice(2, 4)):
        alone = coefficients(sized, whole.select(half))
        torch.testing.assert_close(together.own[half], alone.own / 2)
        if alone.head is not None:
            torch.testing.assert_close(together.head[half], alone.head / 2)


def test_rows_are_exact_and_complete(stale):
    assert {row["engine"] for row in stale["rows"]} == {None, "prefix_tree", "classes"}
    assert len(stale["rows"]) == 2 * 4 * len(FIRST)
    for row in stale["rows"]:
        assert row["standard_error"] is None and ("reason" in row) == (row["estimator"] == "ppo")
        if row["estimator"] == "trajectory_is":
            assert row["relative_bias"] < 1e-10 and row["scale"] == pytest.approx(1)
    rloo = [r for r in stale["rows"] if r["estimator"] == "rloo" and r["steps"] == 0]
    assert all(r["relative_bias"] < 1e-10 for r in rloo)


def test_progress_is_the_gain_of_the_best_step(stale):
    """The best gain of a step along g where J has unit curvature, by a search over step sizes."""
    for row in stale["rows"][:: len(FIRST) + 1]:
        norm = row["gradient_norm"]
        target = objective(staleness.problem(row["horizon"])).gradient
        assert norm == pytest.approx(float(target.norm()))
        if row["noise"] is None or row["scale"] <= 0:
            continue
        for batches in (1, 16):
            along = row["scale"] * norm**2
            bias = row["relative_bias_rescaled"]
            mean_square = row["scale"] ** 2 * norm**2 * (1 + bias**2) + row["variance"] / batches
            steps = np.linspace(0, 2 * along / mean_square, 4001)
            gain = (steps * along - steps**2 * mean_square / 2).max() / (norm**2 / 2)
            assert reading.progress(row, batches) == pytest.approx(gain, rel=1e-6)


def test_an_update_that_points_nowhere_makes_no_progress():
    nowhere = {"scale": 0.0, "relative_bias_rescaled": None, "noise": None}
    assert reading.progress(nowhere, 1) == 0.0
    assert reading.progress({**nowhere, "scale": None}, 1) is None
    assert reading.progress(entry(0.1, 0.1, scale=-1.0), 1) == 0.0


def entry(bias, noise, scale=1.0):
    return {"relative_bias_rescaled": bias, "noise": noise, "scale": scale}


positive = st.floats(0.01, 10)


@given(positive, positive, positive, positive)
def test_crossing_is_where_progress_is_equal(bias, noise, other_bias, other_noise):
    a, b = entry(bias, noise), entry(other_bias, other_noise)
    at = reading.crossing(a, b)
    if at is None:
        few, many = ([reading.progress(x, n) for x in (a, b)] for n in (1e-9, 1e12))
        assert few[0] >= few[1] - 1e-12 or many[0] <= many[1] + 1e-12
    else:
        assert reading.progress(a, at) == pytest.approx(reading.progress(b, at), rel=1e-9)
        assert reading.progress(a, at * 2) > reading.progress(b, at * 2)


def invented(figures, lags=(0, 8), lengths=(2, 12)):
    """A document whose bias and noise are given by (estimator, length, lag)."""
    rows = [
        {"estimator": name, "horizon": n, "steps": lag, **entry(*figures(name, n, lag))}
        for n in lengths
        for lag in lags
        for name in ("rloo", "dapo", "trajectory_is", "token_is")
    ]
    return {
        "sweep": {"horizon": list(lengths), "steps": list(lags)},
        "responses": {"batch": 24, "shown": [24, 2400]},
        "rows": rows,
    }


def test_leader_is_the_first_of_the_best_and_simple_where_that_costs_nothing():
    table = {"rloo": 1.0, "dapo": 0.0, "trajectory_is": 0.999, "token_is": 0.999}
    found = reading.Study(invented(lambda name, n, lag: (0.0, table[name])))
    assert found.leader(2, 0, 24) == "rloo"
    table["rloo"] = 1.05
    found = reading.Study(invented(lambda name, n, lag: (0.0, table[name])))
    assert found.leader(2, 0, 24) == "trajectory_is"
    table["token_is"] = 0.9
    found = reading.Study(invented(lambda name, n, lag: (0.0, table[name])))
    assert found.leader(2, 0, 24) == "token_is"


def test_sentences_change_with_the_figures():
    nothing = invented(lambda name, n, lag: (0.0, 1.0))
    price, length, bias = reading.reading(nothing)
    assert "50 % of the exact gradient's progress at lag 0 and 50 % at lag 8" in price
    assert "less than half" in price and length.startswith("Length does not change the choice")
    assert bias.startswith("trajectory_is has no advantage over rloo")

    def drift(name, n, lag):
        return {
            "rloo": (3.0 if lag else 0.0, 1.0),
            "trajectory_is": (0.0, (0.5 if n == 2 else 4.0) if lag else 1.0),
            "token_is": (1.0 if lag else 0.0, 1.0),
            "dapo": (9.0, 9.0),
        }[name]

    price, length, bias = reading.reading(invented(drift, lags=(0, 8, 8.5)))
    assert "9 % at lag 8, where bias is the larger part" in price and "bias 3, noise 1 " in price
    assert "at lag 8 with 24 responses an update trajectory_is beats token_is" in length
    assert "(80 % against 33 %) and loses to it with 12 (6 % against 33 %)" in length
    assert "from about 360 responses" in bias and "(4 times as large)" in bias
    assert "token_is's bias (1 times the gradient)" in bias


def test_sentences_of_the_study_hold(stale):
    found = reading.Study(stale)
    assert stale["reading"] == reading.reading(stale)
    assert f"makes {text(found.progress('rloo', 4, 0, 384), percent=True)}" in stale["reading"][0]


def test_best_of_each_column_is_stressed(stale):
    table = staleness_page.progress_table(stale, 384, [(4, 8), (2, 0)])
    for column in table.columns[2:]:
        values = [row[column.key] for row in table.rows]
        most = max(v for v in values if v is not None)
        stressed = {i for i, key in table.strong if key == column.key}
        assert values.index(most) in stressed
        assert all(most - values[i] < 0.001 for i in stressed)
