"""How a study shows what decides: error against groups, and rows against the best attainable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from windage.analysis import plots
from windage.analysis.plots import Figure, Later, family
from windage.analysis.studies.decision import Error, error_of
from windage.analysis.tables import Column, Table, text

Document = Mapping[str, Any]
Row = Mapping[str, Any]

PANELS = 4
FARTHEST = 8.0
NAMED = 8
STEPS = 20
FORM = "_rescaled"
CLASS = "leave_one_out"
COLUMNS = (
    ("signal_to_noise", "signal\nto noise"),
    ("groups_needed_rescaled", "groups\nneeded"),
    ("responses_needed_rescaled", "responses\nneeded"),
    ("crossover_groups_rescaled", "crossover\ngroups"),
    ("crossover_against_rescaled", "crossover\nagainst"),
    ("effective_share_token", "effective share\nof tokens"),
    ("effective_share_response", "effective share\nof responses"),
    ("chi_squared_response", "chi-squared\na response"),
    ("excess_bias_rescaled", "excess\nbias"),
    ("excess_variance_rescaled", "excess\nvariance"),
    ("excess_error_rescaled", "excess\nerror"),
)
FORMULA = """\
error(n groups) = sqrt(|E g / scale - grad J|^2 + variance / scale^2 / batches) / |grad J|
groups needed   = fewest with an error of at most {wanted};  – where the bias alone is more
crossover       = fewest groups at which the quietest unbiased entry has the smaller error
effective share = E[w]^2 / E[w^2] of the ratio w of policy to sampler;  chi-squared = 1 / share - 1
excess          = bias beyond the least that own-token weights have with this variance; variance,
                  and mean squared error, as a share above their least"""


def points(document: Document) -> list[tuple[str, list[Row]]]:
    """The rows of each point of the sweep with its words; of many points the middle one alone."""
    sweep = document.get("sweep") or {}
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in document["rows"]:
        found.setdefault(tuple(row[key] for key in sweep), []).append(row)
    named = [
        (text(dict(zip(sweep, at, strict=True))) if sweep else "", rows)
        for at, rows in found.items()
    ]
    return named if len(named) <= PANELS else [named[len(named) // 2]]


def decision_table(document: Document, names: Sequence[str]) -> Table:
    """Every row shown, under what decides.

    Args:
        document: of a study.
        names: of the rows shown.
    """
    sweep = list(document.get("sweep") or {})
    shown = [{**row, "estimator": name} for row, name in zip(document["rows"], names, strict=False)]
    columns = [Column(key="estimator", label="estimator", keep=99)]
    columns += [Column(key=key, label=key.replace("_", " "), keep=90) for key in sweep]
    columns += [Column(key=k, label=label) for k, label in COLUMNS if k in document["rows"][0]]
    notes = [f"– {why}" for why in [document.get("frontier_reason")] if why]
    return Table(columns=columns, rows=shown, caption="After dividing by scale.", notes=notes)


def _errors(rows: Sequence[Row]) -> dict[str, tuple[Row, Error]]:
    """Errors of the rows that point the right way; of equal ones the first, with their number."""
    found: dict[tuple[float, float], list[tuple[Row, Error]]] = {}
    for row in rows:
        error = error_of(row, FORM)
        if error is not None and (row["scale"] or 0.0) > 0:
            near = float(f"{math.sqrt(error.bias):.6f}"), float(f"{error.variance:.6g}")
            found.setdefault(near, []).append((row, error))
    out = {}
    for same in found.values():
        row, error = same[0]
        others = f" +{len(same) - 1}" if len(same) > 1 else ""
        out[row["estimator"] + others] = (row, error)
    return out


def _leaders(errors: Mapping[str, tuple[Row, Error]], batches: Sequence[float]) -> set[str]:
    """Names that have the least error somewhere; all of them where they are few."""
    if len(errors) <= NAMED:
        return set(errors)
    return {min(errors, key=lambda name: errors[name][1].after(n)) for n in batches}


def error_figure(document: Document) -> Figure | None:
    """Error against the number of groups; circles where the quietest unbiased entry takes over."""
    panels = [(words, _errors(rows)) for words, rows in points(document)]
    panels = [(words, errors) for words, errors in panels if errors]
    if not panels:
        return None
    prompts, wanted = document["problem"]["prompts"], document["error"]
    marks = [
        row[key]
        for _, errors in panels
        for row, _ in errors.values()
        for key in ("groups_needed_rescaled", "crossover_groups_rescaled")
        if row[key] is not None
    ]
    decades = min(7, max(3, math.ceil(math.log10(max([1, *marks]) / prompts) + 0.3)))
    batches = [10 ** (k / STEPS) for k in range(STEPS * decades + 1)]

    def paint(figure: Any) -> list[Later]:
        shown = [_leaders(errors, batches) for _, errors in panels]
        plots.key(figure, {family(n) for some in shown for n in some})
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        grid[0].set_ylabel("root mean squared error / gradient, rescaled")
        ends = [
            error.after(n)
            for _, errors in panels
            for _, error in errors.values()
            for n in (batches[0], batches[-1])
        ]
        grid[0].set_yscale("log")
        low = max(1e-4, min([wanted, *ends]) / 1.4)
        grid[0].set_ylim(low, min(max(ends) * 1.3, 50 * max(1.0, wanted)))
        later: list[Later] = []
        for axes, (words, errors), named in zip(grid, panels, shown, strict=True):
            axes.set_title(words)
            axes.set_xlabel("groups" if prompts == 1 else f"groups, {prompts} a batch")
            later.append(_paint_errors(axes, errors, named, batches, prompts, wanted))
        return later

    return plots.draw(
        "study_errors",
        paint,
        size=(3.2 + 4.2 * len(panels), 4.6),
        caption="Root mean squared error after dividing by scale. A circle is where the quietest "
        "unbiased entry takes over from a biased one; gray lines lead nowhere. The dashed line is "
        f"an error of {text(wanted)} of the gradient. {document['problem']['name']}.",
        alt=f"Error against groups of {len(panels[0][1])} estimators.",
    )


def _paint_errors(
    axes: Any,
    errors: Mapping[str, tuple[Row, Error]],
    named: set[str],
    batches: Sequence[float],
    prompts: int,
    wanted: float,
) -> Later:
    """One panel of errors."""
    xs = [prompts * n for n in batches]
    axes.set_xscale("log")
    axes.set_xlim(xs[0], xs[-1])
    plots.decades(axes)
    axes.axhline(wanted, color=plots.GRAY, lw=0.9, ls=(0, (4, 3)), zorder=0)
    for name, (_, error) in errors.items():
        if name not in named:
            axes.plot(xs, [error.after(n) for n in batches], color=plots.PALE, lw=0.8, zorder=0.5)
    series = {name: [errors[name][1].after(n) for n in batches] for name in errors if name in named}
    plots.lines(axes, xs, series, markevery=[len(xs) - 1])
    for name in series:
        row, error = errors[name]
        crossed = row["crossover_groups_rescaled"]
        if crossed is not None and xs[0] < crossed < xs[-1]:
            plots.ring(axes, crossed, error.after(crossed / prompts), name)
    return partial(plots.name_lines, axes, xs, series)


def frontier_figure(document: Document) -> Figure | None:
    """Bias against noise of one batch beside the best that own-token weights attain."""
    panels = [
        (words, rows, curve)
        for words, rows in points(document)
        if (curve := _curve(document, rows)) and _errors(rows)
    ]
    if not panels:
        return None

    def place(error: Error) -> tuple[float, float]:
        return math.sqrt(error.bias), math.sqrt(error.variance)

    found = [
        [(*place(error), name) for name, (_, error) in _errors(rows).items()]
        for _, rows, _ in panels
    ]
    limit = min(FARTHEST, 1.12 * max(noise for some in found for _, noise, _ in some))
    across = min(FARTHEST, max(1.0, 1.3 * max(bias for some in found for bias, *_ in some)))

    def paint(figure: Any) -> list[Later]:
        plots.key(figure, {family(name) for some in found for *_, name in some})
        later: list[Later] = []
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        grid[0].set_ylabel("noise / gradient of one batch, rescaled")
        for axes, (words, _, curve), some in zip(grid, panels, found, strict=True):
            axes.set_title(words)
            axes.set_xlabel("bias / gradient, rescaled")
            plots.attainable(axes, curve, "best own-token weights")
            names = [name for *_, name in some]
            name_them = plots.bias_against_noise(
                axes, some, named=names, limit=limit, across=across, joined=False
            )
            later.append(name_them)
        return later

    return plots.draw(
        "study_frontier",
        paint,
        size=(2.0 + 5.2 * len(panels), 5.8),
        caption="After dividing by scale; axes by square root. The line is the least bias at each "
        "noise over all weights that look at their own prefix and token, with a leave-one-out "
        "advantage: exact, by convex optimization. Entries whose weights look at the whole "
        "response or at the advantage's sign are outside of that class and may lie beyond. Curves "
        "join equal progress, 1 / (1 + bias² + noise²).",
        alt=f"Bias against noise of {len(found[0])} estimators and the frontier.",
    )


def _curve(document: Document, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Bias and noise of the frontier at the rows' point, by rising bias."""
    norm, keys = rows[0]["gradient_norm"], ("group_size", *(document.get("sweep") or ()))
    found = [
        (p["relative_bias_rescaled"], math.sqrt(p["variance_rescaled"]) / norm)
        for p in document.get("frontier") or ()
        if p["advantage"] == CLASS and all(p[key] == rows[0][key] for key in keys if key in p)
    ]
    return sorted(found)
