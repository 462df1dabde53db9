"""Figures of pipelines: who waits when, how old what is consumed is, who is selected, sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from windage.analysis.plots import GRAY, INK, PALE, Figure, Later, apt_scale, draw, name_lines

Document = Mapping[str, Any]
Row = Mapping[str, Any]
COLORS = {
    "synchronous": INK,
    "overlap": "#e69f00",
    "asynchronous": "#0072b2",
    "in_flight": "#009e73",
    "in_flight_recompute": "#cc79a7",
}
TRAINER = "#d55e00"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, GRAY)
SWEPT = (
    ("throughput", "responses a second"),
    ("lag_mean", "mean lag of a response, versions"),
    ("dropped", "share dropped"),
)


def label(document: Document, number: int) -> str:
    """A row's name: its mode where only modes differ, else what was swept."""
    row = document["rows"][number]
    others = [k for k in document["sweep"] if k != "mode"]
    words = [f"{k}={row[k]:g}" if isinstance(row[k], float) else f"{k}={row[k]}" for k in others]
    many = len(document["sweep"].get("mode", ())) > 1
    return ", ".join(([row["mode"].replace("_", " ")] if many or not words else []) + words)


def shades(most: int) -> list[Any]:
    """A color a lag, from pale to dark."""
    from matplotlib import colormaps

    return [colormaps["Blues"](0.25 + 0.65 * k / max(1, most)) for k in range(most + 1)]


def paint_timelines(canvas: Any, document: Document) -> Iterator[Later]:
    """A panel a row: slots as lanes, colored by the lag at which they are consumed; the trainer."""
    from matplotlib.patches import Patch

    pictures = document["pictures"]
    seconds = max(p["timeline"]["seconds"] for p in pictures)
    most = min(4, max(b["lag"] or 0 for p in pictures for b in p["timeline"]["bars"]))
    colors = shades(most)
    panels = canvas.subplots(len(pictures), 1, sharex=True, squeeze=False)[:, 0]
    for axes, picture in zip(panels, pictures, strict=True):
        _lanes(axes, picture["timeline"], colors)
        axes.set_title(label(document, picture["row"]))
        axes.set_xlim(0, seconds)
    panels[-1].set_xlabel("seconds")
    names = [f"lag {k}" if k < most else f"lag {k} or more" for k in range(most + 1)]
    handles = [Patch(color=c, label=n) for c, n in zip(colors, names, strict=True)]
    handles += [Patch(color=PALE, label="consumed later"), Patch(color=TRAINER, label="trainer")]
    if any(b["dropped"] for p in pictures for b in p["timeline"]["bars"]):
        handles.append(Patch(fc="white", ec=GRAY, hatch="////", label="dropped"))
    canvas.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return iter(())


def _lanes(axes: Any, timeline: Row, colors: Sequence[Any]) -> None:
    """Slots from above, the trainer below; white is waiting."""
    slots = 1 + max((bar["slot"] for bar in timeline["bars"]), default=0)
    for bar in timeline["bars"]:
        lag, style = bar["lag"], {"ec": "white", "lw": 0.25}
        color = PALE if lag is None else colors[min(lag, len(colors) - 1)]
        if bar["dropped"]:
            color, style = "white", {"ec": GRAY, "lw": 0.25, "hatch": "////"}
        width = bar["end"] - bar["begin"]
        axes.barh(bar["slot"], width, left=bar["begin"], height=1.0, fc=color, **style)
    lane = slots + 1.5
    for step in timeline["steps"]:
        width = step["end"] - step["begin"]
        axes.barh(lane, width, left=step["begin"], height=2.4, fc=TRAINER, ec="white", lw=0.8)
        axes.axvline(step["end"], color=TRAINER, lw=0.5, alpha=0.5)
    axes.set_ylim(slots + 3, -0.8)
    axes.set_yticks([slots / 2 - 0.5, lane], [f"{slots} slots", "trainer"])
    axes.tick_params(axis="y", length=0)


def timelines(document: Document) -> Figure:
    """Who waits when."""
    count = len(document["pictures"])
    return draw(
        "pipeline-timeline",
        partial(paint_timelines, document=document),
        size=(7.2, 0.9 + 1.25 * count),
        caption="A few slots and the trainer during some steps in the middle of the run. A bar is "
        "a response, its shade the lag at which it is consumed; white is waiting, a line a commit.",
        alt="Bars of slots and trainer over time, a panel for each pipeline.",
    )


def paint_lags(canvas: Any, document: Document) -> Iterator[Later]:
    """Shares by lag: outlined of responses, filled of tokens."""
    pictures = document["pictures"]
    columns = min(3, len(pictures))
    last = max(
        k + 1 for p in pictures for k, v in enumerate(p["histogram"]["responses"]) if v > 5e-4
    )
    lines = -(-len(pictures) // columns)
    grid = canvas.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes, picture in zip(grid, pictures, strict=False):
        responses, tokens = (picture["histogram"][k] for k in ("responses", "tokens"))
        responses, tokens = (([*v, *[0.0] * last])[:last] for v in (responses, tokens))
        color = COLORS[document["rows"][picture["row"]]["mode"]]
        places = range(last)
        axes.bar(places, tokens, width=0.9, color=color, alpha=0.45, lw=0)
        axes.step(
            [-0.5, *(k + 0.5 for k in places)], [responses[0], *responses],
            where="pre", color=color, lw=1.4,
        )  # fmt: skip
        axes.set_title(label(document, picture["row"]))
        axes.set_xlabel("lag, versions")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(-0.6, max(last, 3) - 0.4)
        axes.set_ylim(0, 1)
    for axes in grid[len(pictures) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("share consumed")
    return iter(())


def lags(document: Document) -> Figure:
    """How old what is consumed is."""
    lines = -(-len(document["pictures"]) // 3)
    return draw(
        "pipeline-lag",
        partial(paint_lags, document=document),
        size=(7.2, 0.4 + 2.1 * lines),
        caption="Share of the responses (line, by the oldest version in them) and of the tokens "
        "(bars, by the version that wrote each) consumed at each lag.",
        alt="Histograms of lag, a panel for each pipeline.",
    )


def ratios(cells: Sequence[Row], axis: str) -> tuple[list[float], list[float]]:
    """Admitted over generated by fifths of an axis, and where the fifths lie (0 to 1)."""
    keys = list(dict.fromkeys(tuple(c[axis]) for c in cells))
    shares = []
    for key in keys:
        mine = [c for c in cells if tuple(c[axis]) == key]
        generated = sum(c["generated"] for c in mine)
        shares.append(sum(c["admitted"] for c in mine) / generated if generated else float("nan"))
    return [(k + 0.5) / len(keys) for k in range(len(keys))], shares


def paint_selection(canvas: Any, document: Document) -> Iterator[Later]:
    """Admitted over generated, by difficulty and by length."""
    panels = canvas.subplots(1, 2, sharey=True)
    names = [label(document, p["row"]) for p in document["pictures"]]
    colors = {n: PALETTE[i % len(PALETTE)] for i, n in enumerate(names)}
    for axes, axis in zip(panels, ("difficulty", "length"), strict=True):
        series: dict[str, list[float | None]] = {}
        xs: list[float] = []
        for name, picture in zip(names, document["pictures"], strict=True):
            xs, values = ratios(picture["selection"], axis)
            series[name] = list(values)
            axes.plot(xs, values, marker="o", ms=3.5, lw=1.4, color=colors[name])
        axes.axhline(1, color=GRAY, lw=0.8, zorder=0)
        axes.set_xlabel(f"{axis}, by fifths")
        axes.set_xticks(xs, [f"{k + 1}" for k in range(len(xs))])
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.9), max(high, 1.1))
        if axis == "length" and len(names) > 1:
            yield partial(name_lines, axes, xs, series, colors)
    panels[0].set_ylabel("admitted over generated")


def selection(document: Document) -> Figure:
    """Who is selected."""
    names = [label(document, p["row"]) for p in document["pictures"]]
    longest = max(map(len, names)) if len(names) > 1 else 0

    def paint(canvas: Any) -> Iterator[Later]:
        room = 0.052 * longest + 0.15
        canvas.get_layout_engine().set(rect=(0, 0, 1 - room / (6.0 + room), 1))
        return paint_selection(canvas, document)

    return draw(
        "pipeline-selection",
        paint,
        size=(6.15 + 0.052 * longest, 2.7),
        caption="Share of each fifth among the responses consumed over its share among those "
        "generated: 1 where the pipeline does not select.",
        alt="Admitted over generated by difficulty and by length.",
    )


def paint_sweep(canvas: Any, document: Document, key: str) -> Iterator[Later]:
    """A panel a figure: along one swept key, a line for each of the other values."""
    rows = [row for row in document["rows"] if row["throughput"] is not None]
    others = [k for k in document["sweep"] if k != key]
    names = {id(row): ", ".join(f"{row[k]}".replace("_", " ") for k in others) for row in rows}
    lines = list(dict.fromkeys(names.values()))
    xs = [float(v) for v in sorted(document["sweep"][key])]
    colors = {n: PALETTE[i % len(PALETTE)] for i, n in enumerate(lines)}
    longest = 0.055 * max(map(len, lines)) + 0.1
    canvas.get_layout_engine().set(rect=(0, 0, 7.0 / (7.0 + longest), 1))
    panels = canvas.subplots(1, len(SWEPT))
    for axes, (figure, title) in zip(panels, SWEPT, strict=True):
        series: dict[str, list[float | None]] = {}
        for name in lines:
            at = {float(row[key]): row[figure] for row in rows if names[id(row)] == name}
            series[name] = [at.get(x) for x in xs]
            there = [(x, y) for x, y in zip(xs, series[name], strict=True) if y is not None]
            axes.plot(
                *zip(*there, strict=True),
                marker="o",
                ms=3,
                lw=1.3,
                color=colors[name],
                clip_on=False,
            )
        apt_scale(axes, "x", xs)
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_xlabel(key.replace("_", " "))
        if axes is panels[-1] and len(lines) > 1:
            yield partial(name_lines, axes, xs, series, colors)


def sweep(document: Document) -> Figure | None:
    """Figures along the first swept number, where at most eight lines tell the rest apart."""
    numbers = {
        k: v for k, v in document["sweep"].items() if k not in ("mode", "refill") and len(v) > 1
        and all(isinstance(x, (int, float)) for x in v)
    }  # fmt: skip
    if not numbers:
        return None
    key = max(numbers, key=lambda k: len(numbers[k]))
    lines = {tuple(row[k] for k in document["sweep"] if k != key) for row in document["rows"]}
    if len(lines) > len(PALETTE):
        return None
    return draw(
        "pipeline-sweep",
        partial(paint_sweep, document=document, key=key),
        size=(8.4, 2.6),
        caption=f"Along {key.replace('_', ' ')}; every point sees the same responses.",
        alt=f"Throughput, lag and drops along {key}.",
    )
