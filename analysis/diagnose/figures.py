"""Figures of a diagnosis: mismatch by position and lag, and the entries by bias and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windage.analysis.plots import (
    FAMILIES,
    GRAY,
    INK,
    PALE,
    Figure,
    Later,
    draw,
    family,
    key,
    label_points,
)

Document = Mapping[str, Any]
AXES = {
    "position": "position in the response, tokens",
    "lag": "lag, updates",
    "length": "length of the response, tokens",
}
MOST_BIAS, MOST_NOISE = 10.0, 30.0
NAMED = 14
# Entries of the table of cosines, and from which cosine on two do the same.
SHOWN, ALIKE = 12, 0.995


def panels(document: Document) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Bins of each kind that there are at least two of."""
    found: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
    for by in AXES:
        rows = [row for row in document["bins"] if row["by"] == by and row["k3"] is not None]
        if len(rows) > 1:
            found.append((by, rows))
    return found


def mismatch(document: Document) -> Figure | None:
    """Mismatch a token by position, lag and length."""
    found = panels(document)
    if not found:
        return None
    return draw(
        "mismatch",
        lambda canvas: _paint_bins(canvas, found),
        size=(2.75 * len(found) + 0.4, 2.9),
        caption="k3 a token with 95 % intervals (groups independent); bins with few tokens are "
        "wide.",
        alt="The divergence between trainer and sampler by position in the response, by lag and by "
        "length.",
    )


def _paint_bins(
    canvas: Any, found: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
) -> Iterator[Later]:
    grid = canvas.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (by, rows) in zip(grid, found, strict=True):
        xs = range(len(rows))
        ys = [row["k3"] for row in rows]
        bars = [row["k3_half_width"] or 0.0 for row in rows]
        low = [min(bar, y) for bar, y in zip(bars, ys, strict=True)]
        axes.errorbar(xs, ys, yerr=(low, bars), color=INK, marker="o", ms=4, lw=1.2, elinewidth=0.8)
        crowded = len(rows) > 6
        axes.set_xticks(
            list(xs),
            [row["label"].replace("-", "\N{EN DASH}") for row in rows],
            rotation=40 if by != "lag" or crowded else 0,
            ha="right" if by != "lag" or crowded else "center",
        )
        axes.set_xlabel(AXES[by])
        axes.grid(axis="y", color=PALE, lw=0.6)
        axes.set_axisbelow(True)
    top = max(row["k3"] + (row["k3_half_width"] or 0.0) for _, rows in found for row in rows)
    grid[0].set_ylim(0, 1.05 * top or 1.0)
    grid[0].set_ylabel("mismatch a token (k3), nats")
    yield from ()


def entries(document: Document) -> Figure | None:
    """Bias against noise of the entries that are ranked."""
    rows = [
        row
        for row in document["support"]["rows"]
        if row["rank"] is not None and row["bias"] is not None and row["noise"] is not None
    ]
    shown = [row for row in rows if row["bias"] <= MOST_BIAS and row["noise"] <= MOST_NOISE]
    if not shown:
        return None
    return draw(
        "support",
        lambda canvas: _paint_entries(canvas, shown),
        size=(7.2, 4.3),
        caption="Each point is a catalogue entry on the dump's groups: what its update is away "
        "from the unbiased one, against its power for equal progress. Filled: none is surely "
        "better in both; bars are their 95 % intervals.",
        alt="Bias proxy against noise of every estimator of the catalogue on this dump.",
    )


def _paint_entries(canvas: Any, rows: Sequence[Mapping[str, Any]]) -> Iterator[Later]:
    axes = canvas.subplots()
    for row in rows:
        color, marker = FAMILIES[family(row["estimator"])]
        first = row["rank"] == 1
        x, y = max(row["bias"], 0.0), row["noise"]
        if first:
            axes.errorbar(
                x, y, xerr=([min(x, row["bias_half_width"] or 0)], [row["bias_half_width"] or 0]),
                yerr=row["noise_half_width"] or 0, color=color, lw=0, elinewidth=0.7, alpha=0.5,
                zorder=1,
            )  # fmt: skip
        axes.plot(
            x, y, marker=marker, ms=6, color=color, mfc=color if first else "white", ls="none",
            mew=1.0, zorder=3 if first else 2,
        )  # fmt: skip
    axes.set_yscale("log")
    top = max(max(row["noise"] for row in rows) * 1.3, 1.5)
    axes.set_ylim(0.9, top)
    axes.set_xlim(left=-0.02 * max(max(row["bias"] for row in rows), 0.1))
    ticks = [t for t in (1, 1.5, 2, 3, 5, 10, 20, 30) if t <= top]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.axhline(1.0, color=PALE, lw=0.8, zorder=0)
    axes.set_xlabel("bias proxy, relative to the plain update")
    axes.set_ylabel("noise, plain update = 1")
    key(canvas, [family(row["estimator"]) for row in rows])
    yield lambda: _name(axes, rows)


def _name(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Names of the first, one for entries that are at the same place."""
    from matplotlib.patheffects import Normal, Stroke

    places: dict[tuple[float, float], list[str]] = {}
    for row in sorted(rows, key=lambda r: r["rank"]):
        at = (round(row["bias"], 2), round(row["noise"], 2))
        places.setdefault(at, []).append(row["estimator"])
    points = []
    for (x, y), names in list(places.items())[:NAMED]:
        words = names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")
        color = FAMILIES[family(names[0])][0]
        points.append((x, y, words, color if color != GRAY else INK))
    label_points(axes, points, [(row["bias"], row["noise"]) for row in rows])
    for words in axes.texts:
        words.set_path_effects([Stroke(linewidth=2.5, foreground="white"), Normal()])


def agreement(document: Document) -> Figure | None:
    """Cosines of the first entries' updates, one entry of those that do the same."""
    told = document["support"]["agreement"]
    if told is None:
        return None
    names, cosine = _distinct(document["support"]["rows"], told)
    if len(names) < 2:
        return None
    return draw(
        "agreement",
        lambda canvas: _paint_agreement(canvas, names, cosine),
        size=(7.2, 0.9 + 0.3 * len(names)),
        caption="Cosine of two entries' updates on the dump's groups, by the logits of each token; "
        "entries by rank, those that do the same (cosine above 0.995) as one.",
        alt="Cosines between the updates of the first entries.",
    )


def _distinct(
    rows: Sequence[Mapping[str, Any]], told: Mapping[str, Any]
) -> tuple[list[str], list[list[float]]]:
    """Names, with how many others do the same, and the cosines between them."""
    place = {name: i for i, name in enumerate(told["estimators"])}
    cosine = told["cosine"]
    groups: list[list[str]] = []
    for row in rows:
        if row["rank"] is None:
            continue
        own = cosine[place[row["estimator"]]]
        same = (g for g in groups if (own[place[g[0]]] or 0.0) > ALIKE)
        found = next(same, None)
        if found is not None:
            found.append(row["estimator"])
        elif None not in (own[place[g[0]]] for g in groups):
            groups.append([row["estimator"]])
    shown = groups[:SHOWN]
    names = [g[0] + (f" +{len(g) - 1}" if len(g) > 1 else "") for g in shown]
    return names, [[cosine[place[a[0]]][place[b[0]]] for b in shown] for a in shown]


def _paint_agreement(
    canvas: Any, names: Sequence[str], cosine: Sequence[Sequence[float]]
) -> Iterator[Later]:
    axes = canvas.subplots()
    least = min(min(row) for row in cosine)
    below = [[v if j <= i else math.nan for j, v in enumerate(row)] for i, row in enumerate(cosine)]
    axes.imshow(below, cmap="Blues", vmin=min(least, 0.9), vmax=1.15, aspect="auto")
    for i, row in enumerate(below):
        for j, value in enumerate(row[: i + 1]):
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=INK)
    numbers = [str(i + 1) for i in range(len(names))]
    axes.set_xticks(range(len(names)), numbers)
    axes.set_yticks(range(len(names)), [f"{n}  {i}" for n, i in zip(names, numbers, strict=True)])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    yield from ()
