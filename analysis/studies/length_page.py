"""How the study of length looks: bias and noise by length, and a map of the best choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from windage.analysis import plots
from windage.analysis.plots import GRAY, Figure, Later
from windage.analysis.report import Page, Section
from windage.analysis.studies.length import GROUP_SIZE, LAG, nats, of_size
from windage.analysis.studies.reading import UNBIASED, UNCORRECTED, Study
from windage.analysis.studies.staleness_page import (
    FORMULA,
    leaders,
    paint_map,
    progress_table,
)
from windage.analysis.tables import NOISE, Column, Table, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
FOLLOWED = (UNCORRECTED, "token_is", UNBIASED, "sequence_tis", "centered", "grpo")
# Biases below are as good as none, and not shown.
LEAST = 4e-3
CONTOURS = (0.01, 0.1, 1.0, 10.0)


def title(document: Document) -> str:
    """The heading of the page and the terminal."""
    lengths = document["sweep"]["horizon"]
    return f"Which estimator for which length? {lengths[0]} to {lengths[-1]} tokens, exactly"


def how(document: Document) -> str:
    """What was computed, for every caption."""
    problem = document["problem"]
    return (
        f"Exact (recursion over {problem['parameters'] // problem['prompts']} parameters a prompt "
        f"that serve at every token): {problem['prompts']} prompts, reward 0 or 1, responses a "
        "quarter of the horizon long on average; the sampler is that many exact gradient steps "
        f"behind, {text(document['behavior']['divergence'])} nats a token at first."
    )


def mismatches(document: Document, key: str) -> dict[int, str]:
    """A mismatch a token at each lag: the middle one of all lengths."""
    out = {}
    for lag in document["sweep"]["steps"]:
        middle = median(site[key] for site in document["sites"] if site["steps"] == lag)
        out[lag] = "0" if abs(middle) < NOISE else f"{middle:.0e}".replace("e-0", "e-")
    return out


def paint_growth(axes: Any, study: Study, key: str, factor: float, label: str) -> Later:
    """One figure of the named estimators against length, both axes logarithmic."""
    values = {
        name: [factor * study.at(n, LAG)[name][key] for n in study.lengths] for name in FOLLOWED
    }
    series = {name: [v if v > LEAST else math.nan for v in vs] for name, vs in values.items()}
    if key != "noise":
        del series[UNBIASED]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(study.lengths[0], study.lengths[-1])
    axes.set_xticks(study.lengths[::2], [f"{n:,}" for n in study.lengths[::2]])
    axes.minorticks_off()
    axes.axhline(1, color=GRAY, lw=0.8, ls=":")
    plots.lines(axes, study.lengths, series)
    axes.set_title(label)
    return partial(plots.name_lines, axes, study.lengths, series)


def paint_nats(axes: Any, document: Document, study: Study) -> None:
    """Lines of equal divergence of a whole response over a map, named between two cells."""
    import numpy as np

    far = nats(document)
    grid = np.log10(
        [[max(far[length, lag], NOISE) for lag in study.lags] for length in study.lengths]
    )
    between = (grid[1:] + grid[:-1]) / 2
    for value in CONTOURS:
        level = math.log10(value)
        axes.contour(grid, levels=[level], colors=GRAY, linewidths=1.0, linestyles="--", zorder=2)
        places = [
            (float(np.interp(level, line, range(len(line)))), y + 0.5)
            for y, line in enumerate(between)
            if line[0] < level < line[-1]
        ]
        if places:
            x, y = min(places, key=lambda place: abs(place[0] % 1 - 0.5))
            axes.text(
                x, y, f"{value:g} nats", ha="center", va="center", fontsize=6.8, zorder=4,
                bbox={"fc": "white", "ec": "none", "pad": 1.2},
            )  # fmt: skip


def paint_phases(axes: Any, document: Document, study: Study, responses: int) -> None:
    """Who makes most progress by lag and length, with the mismatch a token below each lag."""
    paint_map(axes, study, responses, names=False)
    paint_nats(axes, document, study)
    kl, square = mismatches(document, "kl"), mismatches(document, "chi_squared")
    words = [f"{lag}\n{kl[lag]}\n{square[lag]}" for lag in study.lags]
    axes.set_xticks(range(len(study.lags)), words)
    axes.set_yticks(range(len(study.lengths)), [f"{n:,}" for n in study.lengths])
    axes.set_xlabel("lag (updates); below: KL a token (nats); chi-squared a token")
    axes.set_ylabel("longest response (tokens)")


def overview(document: Document) -> Figure:
    """The figure of the README: bias and noise by length, and the phase diagram."""
    study = Study(of_size(document))
    responses = study.shown[-1]
    shrink = math.sqrt(study.batch / responses)
    kl = mismatches(document, "kl")[LAG]

    def paint(figure: Any) -> list[Later]:
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
        plots.heading(left, f"At lag {LAG} (KL {kl} nats a token), in units of the gradient")
        plots.heading(
            right,
            f"Least squared error: progress in % of the exact gradient's (brackets: {UNCORRECTED})",
        )
        above, below = left.subplots(2, 1, sharex=True)
        later = [
            paint_growth(
                above, study, "relative_bias_rescaled", 1.0, f"bias ({UNBIASED} has none)"
            ),
            paint_growth(below, study, "noise", shrink, f"noise of {responses} responses"),
        ]
        below.set_xlabel("longest response (tokens)")
        plots.key(right, leaders(study, responses), "lower")
        axes = right.subplots()
        paint_phases(axes, document, study, responses)
        axes.set_title(
            f"{responses} responses an update in groups of {GROUP_SIZE}; dashed: KL of a response"
        )
        return later

    return plots.draw(
        "length",
        paint,
        size=(13, 7),
        caption="Left: what one update of the stated size gets wrong, after dividing by its scale; "
        f"biases below {LEAST:g} are not shown. "
        f"Right, {responses} responses an update in groups of {GROUP_SIZE}: which family has the "
        f"least mean squared error after dividing by its scale, the progress that leaves in % of "
        f"the exact gradient's, and {UNCORRECTED}'s in brackets; "
        f"gray where {UNCORRECTED} is within a point of the best; dashed: equal KL of a whole "
        f"response. {how(document)}",
        alt=" ".join(document["reading"]),
    )


def map_figure(document: Document) -> Figure:
    """The phase diagram at every size of the update."""
    study = Study(of_size(document))

    def paint(figure: Any) -> list[Later]:
        plots.key(figure, leaders(study, *study.shown))
        for axes, n in zip(figure.subplots(1, len(study.shown)), study.shown, strict=True):
            paint_phases(axes, document, study, n)
        return []

    return plots.draw(
        "length_map",
        paint,
        size=(15, 7),
        caption="The more responses, the more noise is affordable, and the less bias. "
        f"{how(document)}",
        alt="Maps of the best estimator by lag and length. " + document["reading"][1],
    )


def group_table(document: Document, responses: int, lengths: Sequence[int]) -> Table:
    """Progress of the named estimators by group size at one lag, the number of responses fixed."""
    sizes = document["sweep"]["group_size"]
    studies = {size: Study(of_size(document, size)) for size in sizes}
    rows = [
        {"estimator": name}
        | {
            f"{n} {size}": studies[size].progress(name, n, LAG, responses)
            for n in lengths
            for size in sizes
        }
        for name in FOLLOWED
    ]
    columns = [Column(key="estimator", label="estimator", keep=9)]
    columns += [
        Column(key=f"{n} {size}", label=f"{n} tokens\nG = {size}", percent=True)
        for n in lengths
        for size in sizes
    ]
    return Table(
        columns=columns,
        rows=rows,
        caption=f"Progress at lag {LAG} of {responses} responses an update, in groups of G.",
    )


def site_table(document: Document) -> Table:
    """How far the sampler is from the policy at each length and lag."""
    return Table(
        columns=[
            Column(key="horizon", label="longest\nresponse"),
            Column(key="tokens", label="tokens\non average"),
            Column(key="steps", label="lag"),
            Column(key="kl", label="KL a token\n(nats)"),
            Column(key="chi_squared", label="chi-squared\na token"),
            Column(key="effective_share", label="effective\nsample size", percent=True),
            Column(key="rate", label="step size"),
        ],
        rows=document["sites"],
        caption="KL(policy | sampler) and E[rho^2] - 1 of the ratio rho, a token; effective sample "
        "size 1 / E[w^2] of the ratio w of a response, in % of the responses.",
    )


def page(document: Document) -> Page:
    """The whole study on one page."""
    own = of_size(document)
    study = Study(own)
    lengths = [study.lengths[0], study.lengths[len(study.lengths) // 2], study.lengths[-1]]
    places = [(n, lag) for n in lengths for lag in study.lags[::2]]
    absent = [f"{name}: {why}" for name, why in document["left_out"].items()]
    return Page(
        title=title(document),
        intro=document["reading"],
        sections=[
            Section(title="At a glance", formula=FORMULA, figure=overview(document)),
            Section(title="How many responses", figure=map_figure(document)),
            Section(title="Every entry", table=progress_table(own, study.shown[-1], places)),
            Section(title="Group size", table=group_table(document, study.shown[-1], lengths)),
            Section(title="How stale is stale", table=site_table(document)),
            Section(title="What this does not say", prose=limits(document)),
            Section(title="Entries left out", prose=absent),
        ],
        footer=f"{how(document)} {len(document['rows'])} rows in "
        f"{text(document['seconds'])} seconds.",
    )


def limits(document: Document) -> list[str]:
    """Where the study's world differs from a language model's."""
    return [
        "Length and horizon grow together, and with them the time between changes of track: a "
        "longer response here is a longer line of thought, not more of the same steps. All of its "
        "tokens share a few parameters.",
        "The sampler trails along the exact gradient, step by step, with a step size that keeps "
        "the divergence a token of one step the same at every length. The divergence of a whole "
        "response then grows with its length; that, not the number of tokens, carries over.",
        "Progress lets each estimator have its best step size. Rows with a scale that is not above "
        "0 point the wrong way and make none.",
        bounded(document),
    ]


def bounded(document: Document) -> str:
    """Which rows are approximate, and how far from the truth they may be."""
    rows = [row for row in document["rows"] if row["error_bound"]]
    names = " and ".join(sorted({row["estimator"] for row in rows}))
    if not rows:
        return "All rows are exact."
    share = median(row["error_bound"]["variance"] / row["variance"] for row in rows)
    return (
        f"{names} look at the law of a whole response's ratio, which is approximate: each row has "
        f"its proven error_bound, {text(share, percent=True)} of the variance for the middle one. "
        "The other rows are exact."
    )


def summary(document: Document) -> Rendered:
    """What the terminal shows: one table, three sentences."""
    own = of_size(document)
    study = Study(own)
    lags = [lag for lag in (LAG, study.lags[-1]) if lag in study.lags]
    lengths = [study.lengths[0], study.lengths[len(study.lengths) // 2], study.lengths[-1]]
    places = [(n, lag) for n in lengths for lag in lags]
    return Rendered(
        title=title(document),
        table=progress_table(own, study.shown[-1], places),
        lines=(*document["reading"], how(document)),
    )
