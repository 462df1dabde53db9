"""How the built-in study looks: a map of the best choice, bias against noise, and batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from windage.analysis import plots
from windage.analysis.plots import FAMILIES, GRAY, Figure, Later, family
from windage.analysis.report import Page, Section
from windage.analysis.studies.reading import UNCORRECTED, Study, crossing
from windage.analysis.tables import Column, Table, reasons, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
LEADING = ("token_is", "trajectory_is", UNCORRECTED, "starting_point", "grpo", "cispo")
FOLLOWED = (UNCORRECTED, "token_is", "trajectory_is", "starting_point", "centered", "grpo")
MIDDLE = 8
WRONG, BEYOND = "point the wrong way", "beyond the axes"
FORMULA = """\
bias     = |E g / scale - grad J| / |grad J|            scale = <E g, grad J> / <grad J, grad J>
noise    = sqrt(trace Cov g) / (scale |grad J|)         for N responses: divided by sqrt(N / batch)
progress = 1 / (1 + bias^2 + noise^2)                   0 where scale is not above 0"""


def title(document: Document) -> str:
    """The heading of the page and the terminal."""
    return "Which estimator for stale data? The whole catalogue, exactly"


def how(document: Document) -> str:
    """What was computed, for every caption."""
    engines = sorted({row["engine"] for row in document["rows"] if row["engine"]})
    exact = "Exact" if "sampling" not in engines else "Partly sampled"
    success = ", ".join(text(s, percent=True) for s in document["problem"]["success"])
    return (
        f"{exact} (engines {', '.join(engines)}): {document['problem']['prompts']} prompts solved "
        f"{success} of the time, {document['rows'][0]['group_size']} responses each, reward 0 or "
        f"1; the sampler is that many exact gradient steps behind, "
        f"{text(document['behavior']['divergence'])} nats a token each at first."
    )


def _tint(color: str, share: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(1 - share * (1 - c) for c in to_rgb(color))


def paint_map(axes: Any, study: Study, responses: int, *, names: bool) -> None:
    """Who makes most progress at each lag and length.

    Args:
        axes: to paint on.
        study: the figures.
        responses: an update.
        names: write the winner's name, or its family's marker where cells are small.
    """
    from matplotlib.patches import Rectangle

    for y, length in enumerate(study.lengths):
        for x, lag in enumerate(study.lags):
            name = study.leader(length, lag, responses)
            made, plain = (
                study.progress(n, length, lag, responses) or 0.0 for n in (name, UNCORRECTED)
            )
            color, marker = FAMILIES[family(name)]
            fill = _tint(color, 0.08 if name == UNCORRECTED else 0.38)
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=fill, ec="white", lw=1.5))
            if names:
                words = "no correction" if name == UNCORRECTED else name
                axes.text(x, y + 0.27, words, ha="center", va="center", fontsize=7.5)
            else:
                axes.plot(x - 0.3, y + 0.1, marker, color=color, ms=4)
            at = x if names else x + 0.1
            axes.text(at, y, f"{100 * made:.0f}", ha="center", va="center", fontsize=9.5)
            if name != UNCORRECTED:
                note = f"{UNCORRECTED} {100 * plain:.0f}" if names else f"({100 * plain:.0f})"
                axes.text(
                    at, y - 0.29, note, ha="center", va="center", fontsize=6.5, color="#454545"
                )
    axes.set_xlim(-0.5, len(study.lags) - 0.5)
    axes.set_ylim(-0.5, len(study.lengths) - 0.5)
    axes.set_xticks(range(len(study.lags)), [str(lag) for lag in study.lags])
    axes.set_yticks(range(len(study.lengths)), [str(n) for n in study.lengths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("lag (updates)")
    axes.set_title(f"{responses} responses an update")


def leaders(study: Study, *responses: int) -> set[str]:
    """Families that lead anywhere with so many responses an update."""
    return {
        family(study.leader(length, lag, n))
        for n in responses
        for length in study.lengths
        for lag in study.lags
    }


def paint_tradeoff(
    axes: Any, study: Study, length: int, lag: int, responses: int, *, limit: float
) -> Later:
    """Bias against noise of every entry at one lag and length; returns what names them."""
    shrink = math.sqrt(study.batch / responses)
    here = study.at(length, lag)
    points = [
        (row["relative_bias_rescaled"], row["noise"] * shrink, name)
        for name, row in here.items()
        if row["scale"] > 0
    ]
    name_them = plots.bias_against_noise(axes, points, named=LEADING, limit=limit)
    plots.aside(
        axes,
        {
            WRONG: [name for name, row in here.items() if row["scale"] <= 0],
            BEYOND: [name for bias, noise, name in points if max(bias, noise) > limit],
        },
    )
    axes.set_title(f"{length} tokens, lag {lag}")
    return name_them


def overview(document: Document) -> Figure:
    """The figure of the README: bias against noise at one lag, and the map below."""
    study = Study(document)
    responses = study.shown[0]
    lengths = (study.lengths[0], study.lengths[-2], study.lengths[-1])

    def paint(figure: Any) -> list[Later]:
        later: list[Later] = []
        above, below = figure.subfigures(2, 1, height_ratios=(1.12, 1))
        plots.heading(
            above, f"Bias against noise, {responses} responses an update (curves: equal progress)"
        )
        plots.heading(
            below,
            f"Who makes most progress, in % of the exact gradient's (brackets: {UNCORRECTED})",
        )
        plots.key(above, {family(row["estimator"]) for row in document["rows"]}, "lower")
        for place, (axes, length) in enumerate(zip(above.subplots(1, 3), lengths, strict=True)):
            axes.set_xlabel("bias / gradient")
            if place == 0:
                axes.set_ylabel("noise / gradient")
            later.append(paint_tradeoff(axes, study, length, MIDDLE, responses, limit=3.4))
        for place, (axes, n) in enumerate(
            zip(below.subplots(1, 3, sharey=True), study.shown, strict=True)
        ):
            paint_map(axes, study, n, names=False)
            if place == 0:
                axes.set_ylabel("tokens of a response")
        return later

    return plots.draw(
        "staleness",
        paint,
        size=(11, 8),
        caption=f"Above: every entry of the catalogue at lag {MIDDLE}; curves join equal "
        "progress, the dashed line the entries that nothing beats in both; '+1': one more entry at "
        "the same point; axes by square root. Below: which family "
        f"makes most progress, how much in % of the exact gradient's, and {UNCORRECTED}'s in "
        f"brackets. {how(document)}",
        alt=" ".join(document["reading"]),
    )


def map_figure(document: Document) -> Figure:
    """The map with names, one panel a batch size."""
    study = Study(document)

    def paint(figure: Any) -> list[Later]:
        plots.key(figure, leaders(study, *study.shown))
        for axes, n in zip(figure.subplots(len(study.shown), 1), study.shown, strict=True):
            paint_map(axes, study, n, names=True)
            axes.set_ylabel("tokens of a response")
        return []

    return plots.draw(
        "staleness_map",
        paint,
        size=(9, 10.5),
        caption="The entry that makes most progress in an update, its progress in % of the exact "
        f"gradient's, and {UNCORRECTED}'s for comparison; no correction where {UNCORRECTED} comes "
        "within a point of the best. Not ranked: dapo, which draws more responses than it uses. "
        f"{how(document)}",
        alt="Map of the best estimator by lag and length for three batch sizes. "
        + document["reading"][1],
    )


def tradeoff_figure(document: Document) -> Figure:
    """Bias against noise by lag and length."""
    study = Study(document)
    responses = study.shown[0]
    lags = [lag for lag in (2, MIDDLE, 32) if lag in study.lags]
    lengths = (study.lengths[0], study.lengths[-2], study.lengths[-1])

    def paint(figure: Any) -> list[Later]:
        later: list[Later] = []
        plots.key(figure, {family(row["estimator"]) for row in document["rows"]})
        grid = figure.subplots(len(lengths), len(lags), sharex=True, sharey=True)
        for line, length in zip(grid, lengths, strict=True):
            for axes, lag in zip(line, lags, strict=True):
                if lag == lags[0]:
                    axes.set_ylabel("noise / gradient")
                if length == lengths[-1]:
                    axes.set_xlabel("bias / gradient")
                later.append(paint_tradeoff(axes, study, length, lag, responses, limit=8))
        return later

    return plots.draw(
        "staleness_tradeoff",
        paint,
        size=(11, 10.5),
        caption=f"Every entry at {responses} responses an update, after dividing by its scale; "
        "axes by square root. Curves join equal progress; the dashed line joins the entries that "
        f"nothing beats in both. '+2': two more entries at the same point. {how(document)}",
        alt="Bias against noise for three lags and three lengths. " + document["reading"][0],
    )


def batch_figure(document: Document) -> Figure:
    """Progress against the size of the update, one panel a length."""
    study = Study(document)
    sizes = [study.batch * 2**k for k in range(2, 13)]

    def paint(figure: Any) -> list[Later]:
        later: list[Later] = []
        axes_of = figure.subplots(1, len(study.lengths), sharey=True)
        for axes, length in zip(axes_of, study.lengths, strict=True):
            series = {
                name: [100 * (study.progress(name, length, MIDDLE, n) or 0.0) for n in sizes]
                for name in FOLLOWED
            }
            axes.set_xscale("log")
            axes.set_xlim(sizes[0], sizes[-1])
            axes.set_ylim(0, 102)
            plots.lines(axes, sizes, series, markevery=2)
            axes.set_title(f"{length} tokens, lag {MIDDLE}")
            axes.set_xlabel("responses an update")
            later.append(partial(plots.name_lines, axes, sizes, series))
            here = study.at(length, MIDDLE)
            meet = crossing(here["trajectory_is"], here["token_is"])
            if meet is not None and sizes[0] < meet * study.batch < sizes[-1]:
                axes.axvline(meet * study.batch, color=GRAY, lw=0.8, ls=":")
                axes.annotate(
                    f"{meet * study.batch:,.0f}", (meet * study.batch, 2), (3, 0),
                    textcoords="offset points", fontsize=7, color=GRAY,
                )  # fmt: skip
        axes_of[0].set_ylabel("progress (% of the exact gradient's)")
        return later

    return plots.draw(
        "staleness_batch",
        paint,
        size=(12.5, 3.7),
        caption="More responses shrink noise and leave bias alone: each line levels off at what "
        "its bias allows. Dotted: from there on the trajectory ratio overtakes the token ratio. "
        f"{how(document)}",
        alt="Progress against batch size for four lengths. " + document["reading"][2],
    )


def progress_table(document: Document, responses: int, places: Sequence[tuple[int, int]]) -> Table:
    """Progress of every entry at some lengths and lags, the best of each column stressed."""
    study = Study(document)
    names = list(dict.fromkeys(row["estimator"] for row in document["rows"]))
    order = list(FAMILIES)
    names.sort(key=lambda name: order.index(family(name)))
    rows = [
        {"estimator": name, "family": family(name)}
        | {f"{n} {lag}": study.progress(name, n, lag, responses) for n, lag in places}
        for name in names
    ]
    strong = set()
    for n, lag in places:
        column = [row[f"{n} {lag}"] for row in rows]
        most = max(round(value, 3) for value in column if value is not None)
        strong |= {
            (i, f"{n} {lag}")
            for i, value in enumerate(column)
            if value is not None and round(value, 3) == most
        }
    columns = [Column(key="estimator", label="estimator", keep=9)]
    columns += [Column(key="family", label="family", keep=-9)]
    columns += [
        Column(
            key=f"{n} {lag}", label=f"{n} tokens\nlag {lag}", percent=True, keep=-abs(lag - MIDDLE)
        )
        for n, lag in places
    ]
    return Table(
        columns=columns,
        rows=rows,
        caption=f"Progress of one update of {responses} responses, in % of the exact gradient's; "
        "0 %: points the wrong way, or nowhere.",
        notes=reasons(document["rows"], "estimator"),
        strong=frozenset(strong),
    )


def site_table(document: Document) -> Table:
    """How far the sampler is from the policy at each lag and length."""
    return Table(
        columns=[
            Column(key="horizon", label="tokens"),
            Column(key="steps", label="lag"),
            Column(key="divergence", label="KL a token\n(nats)"),
            Column(key="effective_share", label="effective\nsample size", percent=True),
            Column(key="rate", label="step size"),
            Column(key="parameters", label="parameters"),
        ],
        rows=document["sites"],
        caption="Measure the same two in your own run: KL(policy | sampler) a token, and the "
        "effective sample size 1 / E[w^2] of the trajectory ratio w, in % of the responses.",
    )


def page(document: Document) -> Page:
    """The whole study on one page."""
    study = Study(document)
    lags = [lag for lag in (0, 2, MIDDLE, 32) if lag in study.lags]
    places = [(n, lag) for n in study.lengths for lag in lags]
    return Page(
        title=title(document),
        intro=document["reading"],
        sections=[
            Section(title="At a glance", figure=overview(document)),
            Section(title="Where each entry wins", figure=map_figure(document)),
            Section(
                title="Bias against noise",
                prose=(
                    "A correction trades one for the other. Left is less bias, down is less noise; "
                    "more responses move every point down, never left.",
                ),
                formula=FORMULA,
                figure=tradeoff_figure(document),
            ),
            Section(title="How many responses", figure=batch_figure(document)),
            Section(
                title="Every entry",
                table=progress_table(document, study.shown[1], places),
            ),
            Section(title="How stale is stale", table=site_table(document)),
            Section(title="What this does not say", prose=limits(document)),
        ],
        footer=f"{how(document)} {len(document['rows'])} rows in "
        f"{text(document['seconds'])} seconds.",
    )


def limits(document: Document) -> list[str]:
    """Where the study's world differs from a language model's."""
    return [
        "The sampler trails along the exact gradient, so that its ratios say what was learned "
        "since. A clip against the sampler then drops the very tokens that improved, and what is "
        "left can point back to the sampler: that is what 0 % of the clipped entries means. The "
        "noise of real updates makes it milder; a clip against a proximal policy is not in here.",
        "Every prefix has logits of its own and nothing is shared between prefixes: noise per "
        "response is higher than in a network that generalizes. Lengths are short so that every "
        "response can be listed; read the effective sample size, not the number of tokens, across "
        "to a run of yours.",
        "Progress lets each estimator have its best step size. dapo's refilled groups are not "
        "counted as cost.",
    ]


def summary(document: Document) -> Rendered:
    """What the terminal shows: one table, three sentences."""
    study = Study(document)
    lags = [lag for lag in (0, 2, 16) if lag in study.lags]
    places = [(n, lag) for n in (study.lengths[0], study.lengths[-1]) for lag in lags]
    return Rendered(
        title=title(document),
        table=progress_table(document, study.shown[1], places),
        lines=(*document["reading"], how(document)),
    )
