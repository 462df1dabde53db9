"""Figures of runs: learning, mismatch, lag and gradient, responses, shadows, time.

A step's figure is noisy: its values are drawn pale, their running mean over a twentieth of the run
in full color.  Long runs are thinned to means of neighboring steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from windage.analysis.plots import FAMILIES, GRAY, Figure, Later, draw, lines, name_lines
from windage.analysis.runs.reading import series

Document = Mapping[str, Any]
Records = Sequence[Mapping[str, Any]]
COLORS = tuple(color for color, _ in FAMILIES.values())
WIDTH, HEIGHT, PLOT, MOST = 3.5, 2.7, 3.0, 600


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot: a line a run, and a second figure drawn dashed.

    Args:
        title: what is shown, with its unit.
        figure: of the records.
        beside: a second figure, dashed, and its name in the title.
        share: of 1: the axis starts at 0 and ends at 1 at the most, or starts higher where all
            values are close to 1.
        log: a log scale, on which values are averaged as well, where all are above 0.
    """

    title: str
    figure: str
    beside: str = ""
    share: bool = False
    log: bool = False


GROUPS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "mismatch": (
        "How far the policy that trains is from the one that drew",
        (
            Panel(title="mismatch k3, nats a token", figure="mismatch/k3", log=True),
            Panel(
                title="effective sample size, tokens\n(dashed: after truncation)",
                figure="ratio/ess",
                beside="weight/ess",
                share=True,
            ),
            Panel(title="mass of the advantages clipped", figure="clip/mass", share=True),
        ),
    ),
    "update": (
        "How old the responses were, and how large the gradient",
        (
            Panel(title="lag in updates (dashed: largest)", figure="lag/mean", beside="lag/max"),
            Panel(title="gradient norm before clipping", figure="update/gradient_norm", log=True),
            Panel(title="entropy, nats a token", figure="policy/entropy"),
        ),
    ),
    "responses": (
        "What the responses are like",
        (
            Panel(title="tokens of a response", figure="length/mean"),
            Panel(
                title="invalid answers\n(dashed: right, but words follow)",
                figure="reward/invalid",
                beside="reward/format",
                share=True,
            ),
            Panel(title="groups with equal outcomes", figure="group/constant", share=True),
        ),
    ),
    "time": (
        "Where the time goes",
        (
            Panel(title="trained tokens a second", figure="time/tokens_per_second"),
            Panel(
                title="seconds a step (dashed: drawing)", figure="time/step", beside="time/sample"
            ),
        ),
    ),
}


def records(document: Document, name: str, rows: str = "rows") -> list[dict[str, Any]]:
    """The records of a run, with the clipped mass of both signs together."""
    found = []
    for row in document[rows]:
        if row["run"] == name:
            parts = [row[k] for k in ("clip/mass_positive", "clip/mass_negative") if k in row]
            found.append({**row, "clip/mass": sum(parts)} if parts else dict(row))
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """The running mean over a twentieth of the values, centered; fewer at the ends.

    Example:
        >>> smooth([1.0, 2.0])
        [1.0, 2.0]
    """
    reach = len(values) // 40
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    low, high = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    means: list[float] = ((total[high] - total[low]) / (high - low)).tolist()
    return means


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most some hundred points, each the mean of neighbors."""
    parts = min(len(values), MOST)
    if parts == len(values):
        return [float(s) for s in steps], list(values)
    groups = [np.array_split(np.asarray(v, dtype=float), parts) for v in (steps, values)]
    xs, ys = ([float(part.mean()) for part in group] for group in groups)
    return xs, ys


def trace(
    axes: Any, steps: Sequence[int], values: Sequence[float], color: str, log: bool, style: Any
) -> None:
    """Values pale, their running mean in full."""
    kept = np.log(values) if log else np.asarray(values)
    xs, ys = thinned(steps, list(kept))
    mean = thinned(steps, smooth(list(kept)))[1]
    pale, full = (np.exp(v) if log else v for v in (ys, mean))
    if mean != ys:
        axes.plot(xs, pale, color=color, lw=0.7, alpha=0.3)
    axes.plot(xs, full, color=color, lw=1.5, marker="o" if len(xs) == 1 else "", ms=3, ls=style)


def colors(document: Document) -> dict[str, str]:
    """A color a run."""
    return {r["name"]: COLORS[n % len(COLORS)] for n, r in enumerate(document["runs"])}


def _dress(axes: Any, panel: Panel, values: Sequence[float]) -> None:
    """Title, and an axis that starts at 0 wherever it can."""
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    if panel.share:
        low, high = min([*values, 1.0]), max([*values, 0.05])
        floor = 1 - max(0.01, 1.4 * (1 - low)) if 0.8 < low < 1 else 0.0
        axes.set_ylim(floor, min(1 + 0.03 * (1 - floor), 1.15 * high))
    elif _logged(panel, values):
        _plain_log(axes)
    elif values and min(values) >= 0:
        axes.set_ylim(bottom=0)


def _plain_log(axes: Any) -> None:
    """A log scale with a few plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _logged(panel: Panel, values: Sequence[float]) -> bool:
    return panel.log and bool(values) and min(values) > 0


def _key(canvas: Any, document: Document) -> None:
    """The runs' names, where there are several."""
    from matplotlib.lines import Line2D

    named = colors(document)
    if len(named) > 1:
        handles = [Line2D([], [], color=color, lw=1.8) for color in named.values()]
        canvas.legend(
            handles, list(named), loc="outside upper left", ncols=min(len(named), 4),
            frameon=False, fontsize=8.5,
        )  # fmt: skip


def _paint(canvas: Any, document: Document, panels: Sequence[Panel]) -> Iterator[Later]:
    grid = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        found = [
            (*series(records(document, name), figure), color, style)
            for name, color in colors(document).items()
            for figure, style in ((panel.figure, "-"), (panel.beside, (0, (4, 2))))
        ]
        shown = [v for _, values, _, _ in found for v in values]
        for steps, values, color, style in found:
            if values:
                trace(axes, steps, values, color, _logged(panel, shown), style)
        _dress(axes, panel, shown)
    _key(canvas, document)
    yield from ()


def group(document: Document, name: str) -> Figure | None:
    """A group of panels, of those that some run has figures for; None where no run has."""
    title, panels = GROUPS[name]
    has = {key for row in document["rows"] for key in row} | {"clip/mass"}
    if not any("clip/mass_positive" in row for row in document["rows"]):
        has.discard("clip/mass")
    panels = tuple(p for p in panels if p.figure in has)
    if not panels:
        return None
    return draw(
        f"train-{name}",
        lambda canvas: _paint(canvas, document, panels),
        size=(WIDTH * len(panels), HEIGHT + 0.3 * (len(document["runs"]) > 1)),
        caption=f"{title}, step by step; running means over a twentieth of the run.",
        alt=f"{title}: {', '.join(p.title.replace(chr(10), ' ') for p in panels)}.",
    )


def _learning(canvas: Any, document: Document, held: bool) -> Iterator[Later]:
    """Rewards of training, and held-out answers with their intervals."""
    grid = canvas.subplots(1, 1 + held, squeeze=False)[0]
    shown: list[float] = []
    for name, color in colors(document).items():
        steps, values = series(records(document, name), "reward/mean")
        shown += values
        if values:
            trace(grid[0], steps, values, color, False, "-")
        told = records(document, name, "evaluations")
        steps, values = series(told, "pass_at_1")
        if values and held:
            grid[1].plot(steps, values, color=color, lw=1.5, marker="o", ms=3.5)
            both = [r for r in told if {"pass_at_1_low", "pass_at_1_high"} <= set(r)]
            band = [[r[f"pass_at_1_{side}"] for r in both] for side in ("low", "high")]
            grid[1].fill_between([r["step"] for r in both], *band, color=color, alpha=0.15, lw=0)
    _dress(grid[0], Panel(title="mean reward of a step, training", figure=""), shown)
    if held:
        grid[1].set_title("held-out pass@1")
        grid[1].set_xlabel("step")
        grid[1].set_ylim(0, 1)
        grid[1].margins(x=0.02)
    _key(canvas, document)
    yield from ()


def learning(document: Document) -> Figure:
    """Reward and held-out answers."""
    held = any("pass_at_1" in e for e in document["evaluations"])
    return draw(
        "train-learning",
        lambda canvas: _learning(canvas, document, held),
        size=(4.6 * (1 + held), 3.0 + 0.3 * (len(document["runs"]) > 1)),
        caption="Reward while training"
        + (
            ", and held-out questions: the band is the interval that the evaluation gives."
            if held
            else "."
        ),
        alt="Reward and held-out pass@1 by step.",
    )


SHADOWED = (
    ("cosine", "cosine to the real update"),
    ("norm_ratio", "length beside the real update"),
    ("clipped_mass", "mass of the advantages clipped"),
    ("signal_to_noise", "signal to noise of two halves"),
)


def entries(found: Records) -> list[str]:
    """Names of the shadow recipes of some records, `real` last where it is there."""
    names: dict[str, None] = {}
    for row in found:
        for key in row:
            if key.startswith("shadow/"):
                names.setdefault(key.split("/", 1)[1].rsplit("/", 1)[0])
    return sorted(names, key=lambda name: name == "real")


def _room(found: Records) -> float:
    """Inches that the longest name takes beside the axes."""
    return 0.15 + 0.065 * max(map(len, entries(found)))


def _shadows(canvas: Any, found: Records, wanted: Sequence[tuple[str, str]]) -> Iterator[Later]:
    inside = PLOT * len(wanted)
    canvas.get_layout_engine().set(rect=(0, 0, inside / (inside + _room(found)), 1))
    grid = canvas.subplots(1, len(wanted), squeeze=False)[0]
    steps = sorted({int(row["step"]) for row in found})
    for axes, (figure, title) in zip(grid, wanted, strict=True):
        drawn: dict[str, list[float | None]] = {}
        xs: list[float] = [float(s) for s in steps]
        for name in entries(found):
            there = dict(zip(*series(found, f"shadow/{name}/{figure}"), strict=True))
            if there:
                known = iter(smooth(list(there.values())))
                drawn[name] = [next(known) if s in there else None for s in steps]
        keep = slice(None, None, max(1, len(steps) // 60))
        kept = {n: v[keep] for n, v in drawn.items()}
        lines(axes, xs[keep], kept, markevery=max(1, len(xs[keep]) // 8))
        values = [v for line in drawn.values() for v in line if v is not None]
        _dress(axes, Panel(title=title, figure="", share=figure == "clipped_mass"), values)
        if figure == "cosine":
            axes.axhline(0, color=GRAY, lw=0.6, zorder=0)
            axes.set_ylim(min([-0.05, *values]), 1.05)
        if axes is grid[-1]:
            yield partial(name_lines, axes, xs[keep], kept)


def shadows(document: Document, name: str) -> Figure | None:
    """What other recipes would have done in a run; None where none was logged."""
    found = [r for r in records(document, name) if any(k.startswith("shadow/") for k in r)]
    if not found:
        return None
    has = {key.rsplit("/", 1)[1] for row in found for key in row if key.startswith("shadow/")}
    wanted = [(figure, title) for figure, title in SHADOWED if figure in has]
    if not wanted:
        return None
    number = [r["name"] for r in document["runs"]].index(name) + 1
    return draw(
        f"train-shadows-{number}",
        lambda canvas: _shadows(canvas, found, wanted),
        size=(PLOT * len(wanted) + _room(found), HEIGHT),
        caption=f"Other recipes on the same forward passes of {name}, running means over a "
        "twentieth of the run; updates compared by the logits of each token.",
        alt="Cosine, length, clipped mass and signal to noise of shadow recipes by step.",
    )
