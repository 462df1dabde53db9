"""How learning studies look: a panel a question, a table of orderings, intervals over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from windage.analysis.plots import GRAY, INK, Figure, Later, apt_scale, draw, name_lines
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered
from windage.toy.scores import FIGURES

Document = Mapping[str, Any]
Row = Mapping[str, Any]
COLORS = (INK, "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GRAY, "#7a3e9d")
LABELS = {
    "pass_at_1": "right answers",
    "invalid": "invalid answers",
    "kl_start": "divergence from the start in nats",
    "easy": "right on easy prompts",
    "hard": "right on hard prompts",
    "entropy": "entropy in nats",
    "value": "expected reward",
}
ARMS = (
    Column(key="panel", label="panel", keep=3),
    Column(key="arm", label="arm", keep=9),
    Column(key="at", label="at", keep=4),
    Column(key="value", label="reward", keep=8),
    Column(key="pass_at_1", label="pass@1", percent=True, keep=8),
    Column(key="pass_at_1_half_width", label="±", percent=True, keep=7),
    Column(key="maj_at_k", label="maj@k", percent=True, keep=3),
    Column(key="pass_at_k", label="pass@k", percent=True, keep=2),
    Column(key="invalid", label="invalid", percent=True, keep=6),
    Column(key="never", label="no right\nanswer", percent=True, keep=1),
    Column(key="confident", label="90 %\nright", percent=True, keep=1),
    Column(key="entropy", label="entropy\nnats", keep=0),
    Column(key="kl_start", label="KL to\nstart", keep=0),
)
JUDGED = (
    Column(key="says", label="statement", keep=5),
    Column(key="difference", label="difference", keep=3),
    Column(key="half_width", label="±", keep=2),
    Column(key="seeds", label="seeds", keep=4),
    Column(key="verdict", label="here", keep=4),
    Column(key="source", label="source", keep=1),
)
WIDTH, HEIGHT = 3.6, 2.9


def verdict(ordering: Row) -> str:
    """What became of a statement, in words.

    Example:
        >>> verdict({"holds": True, "robust": True}), verdict({"holds": False, "robust": False})
        ('holds', 'not shown here')
    """
    if ordering["holds"]:
        return "holds"
    return "FAILS" if ordering["robust"] else "not shown here"


def rows_of(document: Document, study: str, panel: str) -> list[Row]:
    """Rows of one panel."""
    return [r for r in document["rows"] if (r["study"], r["panel"]) == (study, panel)]


def lasts(rows: Sequence[Row]) -> list[Row]:
    """Of each arm, and each place on the axis, the last evaluation."""
    found: dict[Any, Row] = {}
    for row in rows:
        found[row["arm"], row["x"]] = row
    return list(found.values())


def curve(
    rows: Sequence[Row], xs: Sequence[float], arm: str, figure: str
) -> tuple[list[float | None], list[float], list[float]]:
    """Means of an arm along the axis (None where it was not evaluated) and their intervals."""
    mine = {place(row): row for row in rows if row["arm"] == arm}
    means = [mine[x][figure] if x in mine else None for x in xs]
    halves = [(mine[x][f"{figure}_half_width"] or 0.0) if x in mine else 0.0 for x in xs]
    nowhere = float("nan")
    pairs = list(zip(means, halves, strict=True))
    most = 1.0 if FIGURES[figure].unit == "share" else float("inf")
    low = [nowhere if v is None else max(0.0, v - h) for v, h in pairs]
    high = [nowhere if v is None else min(most, v + h) for v, h in pairs]
    return means, low, high


def carried(values: Sequence[float | None]) -> list[float | None]:
    """The last value known at each place: a line's name stands at the right, wherever it ends.

    Example:
        >>> carried([None, 0.5, None])
        [None, 0.5, 0.5]
    """
    found: list[float | None] = []
    for here in values:
        found.append(found[-1] if here is None and found else here)
    return found


def place(row: Row) -> float:
    """Where a row stands on the axis of its panel."""
    return float(row["step"] if row["x"] is None else row["x"])


def names_width(rows: Sequence[Row]) -> float:
    """Inches that the longest name of an arm takes beside the axes."""
    return 0.2 + 0.065 * max(len(row["arm"]) for row in rows)


def paint(canvas: Any, panel: Row, rows: Sequence[Row]) -> Iterator[Later]:
    """One plot a figure of the panel: a line an arm, its interval over seeds as a band."""
    inside = WIDTH * len(panel["figures"])
    canvas.get_layout_engine().set(rect=(0, 0, inside / (inside + names_width(rows)), 1))
    grid = canvas.subplots(1, len(panel["figures"]), squeeze=False)[0]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    colors = {arm: COLORS[number % len(COLORS)] for number, arm in enumerate(arms)}
    xs = sorted({place(row) for row in rows})
    for axes, figure in zip(grid, panel["figures"], strict=True):
        series = {}
        for arm in arms:
            series[arm], low, high = curve(rows, xs, arm, figure)
            there = [i for i, v in enumerate(series[arm]) if v is not None]
            axes.plot(
                [xs[i] for i in there],
                [series[arm][i] for i in there],
                color=colors[arm],
                lw=1.4,
                marker="o",
                ms=2.5,
            )
            axes.fill_between(xs, low, high, color=colors[arm], alpha=0.15, lw=0)
        if panel["log"]:
            apt_scale(axes, "x", xs)
        axes.set_xlabel(panel["x"])
        axes.set_title(LABELS[figure])
        axes.margins(x=0.02)
        if figure != "value":
            axes.set_ylim(bottom=0)
        if axes is grid[-1] and len(arms) > 1:
            ends = {arm: carried(values) for arm, values in series.items()}
            yield partial(name_lines, axes, xs, ends, colors)


def figure(document: Document, study: Row, panel: Row) -> Figure:
    """The figure of a panel."""
    rows = rows_of(document, study["name"], panel["name"])
    seeds = study["settings"]["seeds"]
    number = [p["name"] for p in study["panels"]].index(panel["name"]) + 1
    return draw(
        f"learn-{study['name']}-{number}",
        lambda canvas: paint(canvas, panel, rows),
        size=(WIDTH * len(panel["figures"]) + names_width(rows), HEIGHT),
        caption=f"{panel['name']}: mean over {seeds} seeds on held-out prompts; the band is the "
        "95 % interval (Student's t).",
        alt=f"{study['title']} {panel['name']}.",
    )


def spread(canvas: Any, rows: Sequence[Row]) -> Iterator[Later]:
    """Share of prompts by number of right answers: a line an arm."""
    canvas.get_layout_engine().set(rect=(0, 0, WIDTH / (WIDTH + names_width(rows)), 1))
    axes = canvas.subplots()
    xs = list(range(len(rows[0]["histogram"])))
    series = {row["arm"]: row["histogram"] for row in rows}
    colors = {row["arm"]: COLORS[number] for number, row in enumerate(rows)}
    for arm, shares in series.items():
        axes.step(xs, shares, where="mid", color=colors[arm], lw=1.4)
    axes.set_xlabel(f"right answers of {xs[-1]}")
    axes.set_title("share of held-out prompts")
    axes.set_ylim(bottom=0)
    yield partial(name_lines, axes, xs, series, colors)


def spread_figure(document: Document, study: Row, panel: Row) -> Figure:
    """The base, and arms of a panel at their end, by what they do to single prompts."""
    rows = rows_of(document, study["name"], panel["name"])
    ends = {row["arm"]: row for row in lasts(rows)}
    base = {**next(row for row in rows if row["step"] == 0), "arm": "base"}
    chosen = [base, *(ends[arm] for arm in panel["spread"])]
    number = [p["name"] for p in study["panels"]].index(panel["name"]) + 1
    return draw(
        f"learn-{study['name']}-{number}-prompts",
        lambda canvas: spread(canvas, chosen),
        size=(WIDTH + names_width(chosen), HEIGHT),
        caption=f"{panel['name']}: prompts by their number of right answers at the end of "
        f"training, mean over {study['settings']['seeds']} seeds.",
        alt=f"{study['title']} Share of prompts by number of right answers.",
    )


def unshown(orderings: Sequence[Row]) -> tuple[str, ...]:
    """A sentence for each statement that did not come out.

    Example:
        >>> row = {"says": "A beats B.", "source": "a paper", "wins": 2, "of": 8, "holds": False}
        >>> unshown([row])
        ('Said (a paper) and not shown by this task, in 2 of 8 seeds only: A beats B.',)
    """
    return tuple(
        f"Said ({o['source']}) and not shown by this task, in {o['wins']} of {o['of']} seeds only: "
        f"{o['says']}"
        for o in orderings
        if not o["holds"]
    )


def arm_table(document: Document, study: Row) -> Table:
    """The last evaluation of every arm."""
    rows = []
    for panel in study["panels"]:
        for row in lasts(rows_of(document, study["name"], panel["name"])):
            at = row["step"] if row["x"] is None else row["x"]
            rows.append({**row, "at": f"{at:g}"})
    known = {key for row in rows for key in row}
    columns = [column for column in ARMS if column.key in known]
    return Table(columns=columns, rows=rows, caption="Means over seeds at the end of training.")


def ordering_table(orderings: Sequence[Row], quick: bool) -> Table:
    """What others say, judged seed by seed."""
    rows = [{**o, "seeds": f"{o['wins']}/{o['of']}", "verdict": verdict(o)} for o in orderings]
    note = "Judged at full size only: this run is a quick one." if quick else ""
    return Table(
        columns=JUDGED,
        rows=rows,
        caption="Paired by seed; a statement holds where it does in at least 7 of 8 seeds.",
        notes=(note,) if note else (),
    )


def sections(document: Document, study: Row) -> Iterator[Section]:
    """A study: its question, its panels, its arms, its orderings."""
    title, intro = study["title"], study["intro"]
    for number, panel in enumerate(study["panels"]):
        prose = (*intro, panel["note"]) if number == 0 else (panel["note"],)
        yield Section(
            title=title if number == 0 else panel["name"],
            prose=tuple(p for p in prose if p),
            figure=figure(document, study, panel),
        )
        if panel["spread"]:
            yield Section(
                title=f"{panel['name']}: prompt by prompt",
                figure=spread_figure(document, study, panel),
            )
    mine = [o for o in document["orderings"] if o["study"] == study["name"]]
    yield Section(
        title=f"{study['name']}: what is said, and what happens here",
        prose=() if document["quick"] else unshown(mine),
        table=ordering_table(mine, document["quick"]),
    )
    yield Section(title=f"{study['name']}: every arm", table=arm_table(document, study))


def page(document: Document) -> Page:
    """One page with every study that was run."""
    names = ", ".join(study["name"] for study in document["studies"])
    return Page(
        title=f"What estimators do to learning: {names}",
        intro=(
            "Small autoregressive policies with shared parameters learn to add digits in steps, "
            "with the estimators of the catalogue. A statement of a paper is set beside what "
            "happens here, also where it does not: the task is small, responses have six to nine "
            "tokens, and nothing was tried with a transformer.",
        ),
        sections=[s for study in document["studies"] for s in sections(document, study)],
        footer=f"Seeds from {document['seed']}; {document['seconds']:.0f} seconds.",
    )


def summary(document: Document) -> Rendered:
    """The orderings, and the arms of a single study."""
    studies = document["studies"]
    if len(studies) == 1:
        judged = ordering_table(document["orderings"], document["quick"])
        lines = "\n".join(
            f"{row['seeds']:>5}  {row['verdict']:<14}  {row['says']}" for row in judged.rows
        )
        return Rendered(
            title=studies[0]["title"], table=arm_table(document, studies[0]), lines=(lines,)
        )
    return Rendered(
        title="What estimators do to learning",
        table=ordering_table(document["orderings"], document["quick"]),
    )
