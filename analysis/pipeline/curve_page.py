"""How a fitted curve of score by compute looks: never a bare point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from windage.analysis.plots import GRAY, INK, Figure, Later, draw
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
BLUE, RED = "#0072b2", "#d55e00"
FORMULA = "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)"
MEANING = {"A": "ceiling", "B": "efficiency", "C_mid": "compute at half the gain"}


def table(document: Document) -> Table:
    """Estimates with intervals; an end without a bound is said to be."""
    rows = [
        {
            **row,
            "meaning": MEANING[row["parameter"]],
            "low": "unbounded" if row["low"] is None else f"{row['low']:.4g}",
            "high": "unbounded" if row["high"] is None else f"{row['high']:.4g}",
            "estimate": "not identified"
            if row["low"] is None or row["high"] is None
            else f"{row['estimate']:.4g}",
        }
        for row in document["rows"]
    ]
    found = document["curve"]
    base = f"R0 = {found['base']:.3g}, {'given' if found['base_known'] else 'fitted'}"
    return Table(
        columns=(
            Column(key="parameter", label="parameter", keep=9),
            Column(key="low", label="95 % from", keep=8),
            Column(key="estimate", label="estimate", keep=7),
            Column(key="high", label="to", keep=8),
            Column(key="meaning", label="meaning", keep=3),
        ),
        rows=rows,
        caption=f"{found['points']} points, {base}, spread of a score {found['spread']:.2g}; "
        "intervals from the profile of the likelihood.",
        notes=tuple(f"Warning: {warning}." for warning in found["warnings"]),
    )


def paint(canvas: Any, document: Document) -> Iterator[Later]:
    """Points and curve; the profile of A with its limit."""
    import numpy as np

    from windage.analysis.pipeline.curve import sigmoid

    found = document["curve"]
    value = {row["parameter"]: row for row in document["rows"]}
    left, right = canvas.subplots(1, 2, width_ratios=(1.5, 1))
    data = np.array(found["data"])
    low, high = data[:, 0].min(), data[:, 0].max()
    xs = np.geomspace(low / 1.5, high * 10, 300)
    a, b, mid = (value[k]["estimate"] for k in ("A", "B", "C_mid"))
    ys = sigmoid(xs, a, b, mid, found["base"])
    inside = xs <= high
    left.plot(xs[inside], ys[inside], color=BLUE, lw=1.5)
    left.plot(xs[~inside], ys[~inside], color=BLUE, lw=1.5, ls=(0, (4, 2)))
    left.plot(data[:, 0], data[:, 1], "o", ms=3.5, color=INK)
    top = value["A"]["high"]
    edge = left.get_ylim()[1]
    ends = (value["A"]["low"] if value["A"]["low"] is not None else ys.min(), top or edge)
    left.axhspan(ends[0], min(ends[1], edge + np.ptp(data[:, 1])), color=BLUE, alpha=0.12, lw=0)
    left.set_xscale("log")
    left.set_xlabel("compute")
    left.set_ylabel("score")
    left.set_title("fit, extrapolated (dashed); band: interval of A")
    profile = np.array(found["profile"])
    right.plot(profile[:, 0], profile[:, 1], color=BLUE, lw=1.5)
    right.set_xlim(profile[0, 0], profile[-1, 0])
    if profile[0, 0] < a < profile[-1, 0]:
        right.axvline(a, color=GRAY, lw=0.8)
    right.axhline(found["t"], color=RED, lw=1, ls=(0, (4, 2)))
    right.text(profile[0, 0], found["t"], " 95 %", color=RED, va="bottom", fontsize=8)
    right.set_ylim(0, max(1.2 * found["t"], min(profile[:, 1].max(), 3 * found["t"])))
    right.set_xlabel("A held at")
    right.set_ylabel("distance from the best fit, t")
    right.set_title("profile of A")
    return iter(())


def figure(document: Document) -> Figure:
    """The curve and the profile of its ceiling."""
    return draw(
        "pipeline-curve",
        partial(paint, document=document),
        size=(7.2, 3.0),
        caption="Left: scores, the fitted sigmoid and its extrapolation. Right: how much worse the "
        "best fit becomes with A held at a value; below the dashed line lies its 95 % interval.",
        alt="A sigmoid through scores by compute, and the profile of its ceiling.",
    )


def page(document: Document) -> Page:
    """One page."""
    name = Path(document["curve"]["source"]).name
    return Page(
        title=f"Score by compute: {name}",
        intro=("The ceiling, the efficiency and the compute at half the gain, with intervals.",),
        sections=[
            Section(title="Fit", formula=FORMULA, figure=figure(document), table=table(document))
        ],
        footer=f"{document['seconds']:.1f} seconds.",
    )


def summary(document: Document) -> Rendered:
    """The table with its warnings."""
    name = Path(document["curve"]["source"]).name
    return Rendered(title=f"{name}: {FORMULA}", table=table(document))
