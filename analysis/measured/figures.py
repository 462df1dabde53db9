"""Figures of a study of a language model: bias beside variance, and the toy beside both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from windage.analysis.plots import (
    FAMILIES,
    GRAY,
    PALE,
    Figure,
    Later,
    draw,
    family,
    key,
    label_points,
)

Document = Mapping[str, Any]
Point = tuple[float, float, str, str]
COLUMNS = 3


def plane(document: Document, size: int) -> Figure:
    """Bias and variance of every entry, a panel a sampler."""

    def paint(axes: Any, rows: list[Mapping[str, Any]], name: str) -> list[Point]:
        norm = document["gradient"]["norm"] ** 2 or 1.0
        points = []
        for row in rows:
            bias, variance = row["relative_bias_rescaled"], row["variance_rescaled"]
            if bias is None or not variance or variance <= 0:
                continue
            told = bool(row["bias_rescaled_resolved"])
            x = bias if told else row["interval"]["relative_bias_rescaled"][1]
            if x is None:
                continue
            color, marker = FAMILIES[family(row["estimator"])]
            y = variance / norm
            axes.plot(
                x, y, marker=marker if told else "<", ms=4.5, color=color, ls="none",
                mfc=color if told else "white",
            )  # fmt: skip
            points.append((x, y, row["estimator"], color))
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        return points

    return _panels(
        document,
        size,
        paint,
        name="measured",
        sides=("bias after rescaling, share of |grad J|", "variance after rescaling / |grad J|²"),
        caption=f"Groups of {size}. Filled: the bias is told from 0. Open, pointing left: it is "
        "not, and the point stands at its upper limit; without one it is not drawn.",
        alt="Bias against variance of every entry, a panel a sampler.",
    )


def against_toy(document: Document, size: int) -> Figure:
    """Measured merit against the toy's, a panel a sampler."""
    toy = {
        (row["sampler"], row["estimator"]): row
        for row in document["toy"]["rows"]
        if row["group_size"] == size
    }

    def paint(axes: Any, rows: list[Mapping[str, Any]], name: str) -> list[Point]:
        points = []
        for row in rows:
            own = toy.get((name, row["estimator"]))
            if own is None or row["merit"] is None or own["merit"] <= 0:
                continue
            color, marker = FAMILIES[family(row["estimator"])]
            low, high = (max(0.0, end) for end in row["interval"]["merit"])
            axes.plot((own["merit"],) * 2, (low, high), color=PALE, lw=1, zorder=0)
            axes.plot(own["merit"], row["merit"], marker=marker, ms=4.5, color=color, ls="none")
            points.append((own["merit"], row["merit"], row["estimator"], color))
        axes.set_ylim(bottom=0)
        return points

    return _panels(
        document,
        size,
        paint,
        name="toy",
        sides=("merit of one group, toy", "merit of one group, measured"),
        caption=f"Groups of {size}; lines are intervals at 95 % by prompt.",
        alt="Measured merit against the toy's of every entry, a panel a sampler.",
    )


def _panels(
    document: Document,
    size: int,
    paint: Callable[[Any, list[Mapping[str, Any]], str], list[Point]],
    *,
    name: str,
    sides: tuple[str, str],
    caption: str,
    alt: str,
) -> Figure:
    """A panel a sampler."""
    names = [about["sampler"] for about in document["samplers"]]
    count = math.ceil(len(names) / COLUMNS)

    def all_of_them(canvas: Any) -> Iterator[Later]:
        grid = canvas.subplots(count, min(COLUMNS, len(names)), squeeze=False)
        families = set()
        for place, axes in enumerate(grid.flat):
            if place >= len(names):
                axes.set_axis_off()
                continue
            rows = [
                row
                for row in document["rows"]
                if row["sampler"] == names[place] and row["group_size"] == size
            ]
            points = paint(axes, rows, names[place])
            families |= {family(point[2]) for point in points}
            axes.set_title(_short(names[place]))
            if not points:
                axes.text(
                    0.5, 0.5, "nothing told", color=GRAY, ha="center", transform=axes.transAxes
                )
                continue
            yield _later(axes, points)
        canvas.supxlabel(sides[0], fontsize=9)
        canvas.supylabel(sides[1], fontsize=9)
        key(canvas, families)

    width = 3.4 * min(COLUMNS, len(names)) + 0.6
    return draw(name, all_of_them, size=(width, 2.6 * count + 0.9), caption=caption, alt=alt)


def _later(axes: Any, points: list[Point]) -> Later:
    """Names once the layout is known."""
    return lambda: label_points(axes, points, [(x, y) for x, y, _, _ in points])


def _short(name: str) -> str:
    """A sampler's name without the folder of its weights.

    Example:
        >>> _short("checkpoint:path=runs/a/step-4,steps=4"), _short("rounded:bits=4")
        ('checkpoint, steps=4', 'rounded:bits=4')
    """
    kind, _, rest = name.partition(":")
    kept = [part for part in rest.split(",") if part and not part.startswith("path=")]
    return ", ".join([kind, *kept]) if kind == "checkpoint" else name
