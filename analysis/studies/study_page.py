"""How any other study looks: a table of rows, and bias against noise or against the sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from windage.analysis import plots
from windage.analysis.plots import Figure, Later, family
from windage.analysis.report import Page, Section
from windage.analysis.studies import decision_page, length_page, staleness_page
from windage.analysis.studies.sampled import LENGTHS, resolved, shown
from windage.analysis.tables import NOISE, Column, Table, reasons, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
FIGURES = {
    "scale": ("scale", 5),
    "cosine": ("cosine", 4),
    "relative_bias": ("bias", 3),
    "relative_bias_rescaled": ("bias\nrescaled", 8),
    "variance": ("variance", 2),
    "variance_rescaled": ("variance\nrescaled", 7),
    "drift": ("drift", 1),
    "unsupported_mass": ("mass never\ndrawn", 0),
}
DECIDING = {
    "groups_needed_rescaled": ("groups\nto {error}", -1),
    "crossover_groups_rescaled": ("groups\nto crossover", -2),
    "signal_to_noise": ("signal\nto noise", -3),
    "excess_bias_rescaled": ("excess\nbias", 10),
    "excess_variance_rescaled": ("excess\nvariance", 10),
    "excess_error_rescaled": ("excess\nerror", 9),
}
FORMULA = """\
scale    = <E g, grad J> / <grad J, grad J>       cosine = <E g, grad J> / (|E g| |grad J|)
bias     = |E g - grad J| / |grad J|              variance = trace of Cov g
rescaled = the same for g / scale                 drift = |E g| with advantage 1"""
MEANING = (
    "Scale is harmless (a step size makes up for it); rescaled bias is what no number of responses "
    "takes away; rescaled variance falls as one over the number of batches."
)
EXCESS = (
    "Excess, rescaled: bias beyond the least that own-token weights have with this variance; "
    "variance above their least with this bias, as a share; mean squared error of {} batch{} above "
    "their least, as a share. – no such weights have this bias, or this little variance."
)

FARTHEST = 8.0
MOST_ROWS = 500
MOST_LINES = 30
NAMED: Mapping[str, Any] = {"length": length_page, "staleness": staleness_page}


def title(document: Document) -> str:
    """The problem and the sampler, in a line."""
    behavior = dict(document.get("behavior") or {})
    kind = behavior.pop("kind", "policy")
    words = {"policy": "sampled from the policy itself", "file": "sampled as the file says"}
    settings = f" ({text(behavior)})" if behavior else ""
    return f"{document['problem']['name']}, {words.get(kind, f'sampled {kind}{settings}')}"


def how(document: Document) -> str:
    """Engine and problem, for captions."""
    problem, goal = document["problem"], document["objective"]
    engines = sorted({row["engine"] for row in document["rows"] if row["engine"]})
    sampled = "; ± is one standard error of sampling" if "sampling" in engines else "; exact"
    counts = ", ".join(
        f"{problem[key]} {key if problem[key] != 1 else key[:-1]}"
        for key in ("prompts", "responses", "parameters")
        if problem[key] is not None
    )
    return (
        f"{counts}; J = {text(goal['value'])}, |grad J| = {text(goal['gradient_norm'])}; engines: "
        f"{', '.join(engines) or 'none'}{sampled}."
    )


def swept(document: Document) -> list[str]:
    """Keys of the sweep, slowest first."""
    return list(document.get("sweep") or {})


def rows_table(document: Document) -> Table:
    """Every row; figures that were sampled carry their standard error."""
    given = _given(document["rows"])
    error = text(document.get("error"))
    deciding = {
        key: (label.format(error=error), keep)
        for key, (label, keep) in DECIDING.items()
        if key in document["rows"][0]
    }
    shown: list[Mapping[str, Any]] = []
    for row in document["rows"][:MOST_ROWS]:
        errors = row["standard_error"] or {}
        cells = {key: _cell(key, row[key], errors.get(key)) for key in FIGURES}
        cells |= {key: row[key] for key in deciding}
        names = {key: row[key] for key in swept(document)}
        shown.append(
            {**names, **cells, "estimator": row["estimator"] + given(row), "engine": row["engine"]}
        )
    columns = [Column(key="estimator", label="estimator", keep=99)]
    columns += [Column(key=k, label=k.replace("_", " "), keep=90) for k in swept(document)]
    figures = {**FIGURES, **deciding}
    columns += [Column(key=k, label=label, keep=keep) for k, (label, keep) in figures.items()]
    columns.append(Column(key="engine", label="engine", keep=6))
    return Table(columns=columns, rows=shown, caption=how(document), notes=_notes(document["rows"]))


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why figures are missing, and what a scale that is not above 0 means."""
    notes = reasons(rows, "estimator")
    if (more := len(rows) - MOST_ROWS) > 0:
        notes.insert(0, f"{more:,} more rows: --json and --out have them.")
    if any(row[key] is None for row in rows if not row.get("reason") for key in FIGURES):
        notes.append("– without a reason: a quotient by 0")
    if any(row.get(flag) is False for row in rows for flag in LENGTHS.values()):
        notes.append("< x: not resolved, within three standard errors of 0; plotted at 0.")
    if any(row["scale"] is not None and row["scale"] <= 0 for row in rows):
        notes.append("A scale that is not above 0: the estimate points the wrong way.")
    return notes


def _cell(key: str, value: Any, error: float | None) -> Any:
    """A figure, with its standard error; a length that is not told from 0 as what it is below."""
    if value is None or error is None:
        return value
    if key in (*LENGTHS, "drift") and not resolved(value, error):
        return shown(value, error)
    return f"{text(value)} ± {text(error)}"


def _bias(row: Mapping[str, Any]) -> float:
    """The rescaled bias to plot: 0 where sampling does not tell it from 0."""
    return 0.0 if row.get("bias_resolved_rescaled") is False else row["relative_bias_rescaled"]


def _given(rows: Sequence[Mapping[str, Any]]) -> Any:
    """What tells apart rows of one estimator with different settings that no sweep names."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        known = kinds.setdefault(row["estimator"], [])
        if row["settings"] not in known:
            known.append(row["settings"])

    def words(row: Mapping[str, Any]) -> str:
        known = kinds[row["estimator"]]
        varied = [k for k in row["settings"] if any(s[k] != row["settings"][k] for s in known)]
        varied = [key for key in varied if row.get(key) != row["settings"][key]]
        return (
            f":{text({k: row['settings'][k] for k in varied}).replace(' ', ',')}" if varied else ""
        )

    return words


def tradeoff(document: Document) -> Figure | None:
    """Bias against noise of one batch, where there is no sweep; None where no row has both."""
    goal = document["objective"]["gradient_norm"]
    rows = [r for r in document["rows"] if r["variance_rescaled"] is not None]
    points = [
        (
            _bias(r),
            math.sqrt(max(0.0, r["variance_rescaled"])) / goal,
            r["estimator"],
        )
        for r in rows
        if r["scale"] > 0
    ]
    if not points:
        return None
    limit = min(FARTHEST, 1.12 * max(max(bias, noise) for bias, noise, _ in points))
    names = [name for _, _, name in points]
    said = {
        staleness_page.WRONG: [r["estimator"] for r in rows if r["scale"] <= 0],
        staleness_page.BEYOND: [n for bias, noise, n in points if max(bias, noise) > limit],
    }

    def paint(figure: Any) -> list[Later]:
        plots.key(figure, map(family, names))
        axes = figure.subplots()
        axes.set_xlabel("bias / gradient, rescaled")
        axes.set_ylabel("noise / gradient of one batch, rescaled")
        plots.aside(axes, said)
        return [plots.bias_against_noise(axes, points, named=names, limit=limit)]

    return plots.draw(
        "study_tradeoff",
        paint,
        size=(7.5, 6),
        caption="After dividing by scale; axes by square root. Curves join equal progress, "
        "1 / (1 + bias² + noise²); the dashed line joins what nothing beats in both. "
        f"{how(document)}",
        alt=f"Bias against noise of {len(points)} estimators.",
    )


def sweep_figure(document: Document, key: str) -> Figure | None:
    """Bias and variance against the last key of a sweep, one line an estimator."""
    values = document["sweep"][key]
    rows, fixed = _few(document, key)
    others = [k for k in swept(document) if k not in (key, *fixed)]
    given = _given(rows)
    series: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for row in rows:
        place = "".join(f", {k} {text(row[k])}" for k in others)
        series.setdefault(row["estimator"] + given(row) + place, {})[row[key]] = row
    panels = {
        "relative_bias_rescaled": "bias / gradient, rescaled",
        "variance_rescaled": "variance, rescaled",
    }
    if not any(row[panel] is not None for row in rows for panel in panels):
        return None
    where = f" at {text(fixed)}" if fixed else ""

    def paint(figure: Any) -> list[Later]:
        later: list[Later] = []
        for axes, (panel, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            found = {n: [_point(r.get(v), panel) for v in values] for n, r in series.items()}
            plots.lines(axes, values, found)
            numbers = [v for line in found.values() for v in line if v is not None]
            plots.apt_scale(axes, "x", values)
            plots.apt_scale(axes, "y", numbers)
            axes.set_xlabel(key.replace("_", " "))
            axes.set_title(label)
            later.append(partial(plots.name_lines, axes, values, found))
        return later

    return plots.draw(
        f"study_{key}",
        paint,
        size=(11, 4.2),
        caption=f"Bias and variance after dividing by scale, against {key}{where}; a gap where "
        f"scale is not above 0. {how(document)}",
        alt=f"Bias and variance of {len(series)} estimators against {key}.",
    )


def _few(document: Document, key: str) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Rows for few enough lines against a key, and where the other swept keys were held for that.

    The slowest keys are held at the middle of their values first.
    """
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    fixed: dict[str, Any] = {}
    for other in swept(document):
        if len(rows) <= MOST_LINES * len(document["sweep"][key]) or other == key:
            break
        values = document["sweep"][other]
        fixed[other] = values[len(values) // 2]
        rows = [row for row in rows if row[other] == fixed[other]]
    return rows, fixed


def _point(row: Mapping[str, Any] | None, panel: str) -> float | None:
    """A figure to plot: rounding noise is 0, nothing where the estimate points the wrong way."""
    if row is None or row[panel] is None or row["scale"] <= 0:
        return None
    value = _bias(row) if panel == "relative_bias_rescaled" else row[panel]
    return 0.0 if value < NOISE else float(value)


def page(document: Document) -> Page:
    """The page of a study; the built-in one has its own."""
    if document.get("study") in NAMED:
        return NAMED[document["study"]].page(document)
    keys = swept(document)
    figures = {
        "At a glance": sweep_figure(document, keys[-1]) if keys else tradeoff(document),
        "How many groups": decision_page.error_figure(document),
        "What is attainable": decision_page.frontier_figure(document),
    }
    table = rows_table(document)
    names = [row["estimator"] for row in table.rows]
    return Page(
        title=f"Bias and variance on {title(document)}",
        intro=(MEANING,),
        sections=[
            *(Section(title=t, figure=f) for t, f in figures.items() if f is not None),
            Section(title="Every row", formula=FORMULA, table=table),
            Section(
                title="What decides",
                formula=decision_page.FORMULA.format(wanted=text(document["error"])),
                table=decision_page.decision_table(document, names),
            ),
        ],
        footer=f"{how(document)} {text(document['seconds'])} seconds.",
    )


def summary(document: Document) -> Rendered:
    """What the terminal shows."""
    if document.get("study") in NAMED:
        return NAMED[document["study"]].summary(document)
    lines: tuple[str, ...] = (MEANING,)
    if document.get("frontier"):
        batches = document["frontier_batches"]
        lines += (EXCESS.format(text(batches), "es" if batches != 1 else ""),)
    return Rendered(title=title(document), table=rows_table(document), lines=lines)
