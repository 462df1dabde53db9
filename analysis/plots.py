"""One look for every figure: colors, markers, labels, and the same bytes for the same numbers.

Families of estimators have a color that color-blind readers can tell apart and a marker that
survives a gray print.  matplotlib is imported where a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from windage.estimators.catalogue import CATALOGUE

INK, GRAY, PALE = "#1a1a1a", "#6b6b6b", "#dcdcdc"
BORDER, FAR, LEFT = "#7a3e9d", 1e3, 0.01
FAMILIES: dict[str, tuple[str, str]] = {
    "no correction": (INK, "o"),
    "token ratio": ("#0072b2", "s"),
    "sequence ratio": ("#d55e00", "D"),
    "clip": ("#e69f00", "v"),
    "taper": ("#cc79a7", "P"),
    "score centering": ("#009e73", "^"),
    "other": (GRAY, "X"),
}
_REACHES = {"token": "token ratio"} | dict.fromkeys(
    ("prefix", "suffix", "trajectory", "geometric", "farthest", "over_group", "over_batch"),
    "sequence ratio",
)
_REACHES["token_over_batch"] = "token ratio"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "windage",
    "svg.fonttype": "path",
    "path.simplify": False,
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
DPI = 200
BLANK = ("Date", "Creator", "Format", "Type")


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """A finished figure.

    Args:
        name: of its files, without an ending.
        caption: what was computed and how.
        alt: what it shows, in a sentence, for who cannot see it.
        png, svg: the files.
    """

    name: str
    caption: str
    alt: str
    png: bytes
    svg: bytes


Later = Callable[[], None]


def draw(
    name: str,
    paint: Callable[[Any], Iterable[Later]],
    *,
    size: tuple[float, float],
    caption: str,
    alt: str,
) -> Figure:
    """Paint a matplotlib figure in the house's style and save it in both formats.

    Args:
        name: of its files.
        paint: receives the empty figure; returns what is to be done once the layout is known.
        size: width and height in inches.
        caption: what was computed and how.
        alt: what it shows, in a sentence.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE}
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=size)
        FigureCanvasAgg(canvas)
        later = list(paint(canvas))
        canvas.draw_without_rendering()
        for action in later:
            action()
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        png, svg = io.BytesIO(), io.BytesIO()
        canvas.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
        canvas.savefig(svg, format="svg", metadata=dict.fromkeys(BLANK))
    return Figure(name=name, caption=caption, alt=alt, png=png.getvalue(), svg=svg.getvalue())


def family(name: str) -> str:
    """The family of an estimator, read from its composition.

    Example:
        >>> [family(name) for name in ("rloo", "cispo", "prefix_is", "grpo", "topr", "centered")]
        ['no correction', 'token ratio', 'sequence ratio', 'clip', 'taper', 'score centering']
    """
    entry = CATALOGUE.get(name.partition(" ")[0].partition(":")[0])
    if entry is None:
        return "other"
    if entry.centering is not None:
        return "score centering"
    active = [c for c in entry.corrections if not c.idle]
    if not active:
        return "no correction"
    first = active[0]
    for word in ("clip", "taper"):
        if first.map.name.endswith(word):
            return word
    return _REACHES[first.reach.name]


def heading(figure: Any, words: str) -> None:
    """What a row of panels shows, at its upper left."""
    figure.suptitle(words, x=0.012, ha="left", fontsize=10.5, fontweight="bold")


def key(figure: Any, families: Iterable[str], place: str = "upper") -> None:
    """One line that names the families, above the panels or below ("lower")."""
    from matplotlib.lines import Line2D

    wanted = set(families)
    names = [name for name in FAMILIES if name in wanted]
    handles = [
        Line2D([], [], color=FAMILIES[n][0], marker=FAMILIES[n][1], ls="", ms=6) for n in names
    ]
    figure.legend(
        handles, names, loc=f"outside {place} center", ncols=len(names), frameon=False, fontsize=8.5
    )


def label_points(
    axes: Any, points: Sequence[tuple[float, float, str, str]], obstacles: Sequence[tuple]
) -> None:
    """Write each label beside its point where it covers neither a label nor a point.

    A label that fits nowhere is left out; points come in order of importance.

    Args:
        axes: with limits already set and the layout done.
        points: x, y, text, color.
        obstacles: x, y of every point drawn.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    renderer = figure.canvas.get_renderer()
    unit = figure.dpi / 72
    inside = axes.get_window_extent(renderer)
    dots = axes.transData.transform([(x, y) for x, y in obstacles])
    taken = [Bbox.from_bounds(x - 3 * unit, y - 3 * unit, 6 * unit, 6 * unit) for x, y in dots]
    offsets = [(s * r, v * r) for r in (7, 12, 18, 25) for v in (0.4, -0.4, 1, -1) for s in (1, -1)]
    for x, y, text, color in points:
        for dx, dy in offsets:
            note = axes.annotate(
                text,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right",
                va="center",
                fontsize=7.5,
                color=color,
                arrowprops={"arrowstyle": "-", "color": PALE, "lw": 0.7, "shrinkA": 0, "shrinkB": 3}
                if abs(dx) > 9
                else None,
            )
            note.set_in_layout(False)
            box = note.get_window_extent(renderer).expanded(1.02, 1.0)
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 + 12 * unit
            fits = fits and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if fits and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            note.remove()


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Places near the values, in their order, no two closer than the gap.

    Example:
        >>> spread([0.0, 0.0, 5.0], 1.0)
        [-0.5, 0.5, 5.0]
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    blocks: list[tuple[float, list[int]]] = []
    for i in order:
        blocks.append((values[i], [i]))
        while len(blocks) > 1:
            (low, below), (high, above) = blocks[-2:]
            if high - low >= gap * (len(below) + len(above)) / 2 - 1e-12:
                break
            members = below + above
            middle = sum(values[j] for j in members) / len(members)
            blocks[-2:] = [(middle, members)]
    places = [0.0] * len(values)
    for middle, members in blocks:
        for k, i in enumerate(members):
            places[i] = middle + gap * (k - (len(members) - 1) / 2)
    return places


def name_lines(
    axes: Any,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    colors: Mapping[str, str] | None = None,
) -> None:
    """Write the name of each line at its last point, apart from one another.

    Args:
        axes: with limits already set.
        xs: shared by all lines.
        series: values by name; None is a gap.
        colors: by name; None: of the estimator's family.
    """
    ends: dict[float, list[tuple[float, str]]] = {}
    for name, values in series.items():
        last = [(x, v) for x, v in zip(xs, values, strict=True) if v is not None][-1:]
        for x, y in last:
            ends.setdefault(x, []).append((y, name))
    dpi = axes.get_figure(root=True).dpi
    for x, names in ends.items():
        points = [float(axes.transData.transform((x, y))[1]) for y, _ in names]
        places = spread(points, 9.5 * dpi / 72)
        for (y, name), at, target in zip(names, points, places, strict=True):
            axes.annotate(
                name,
                (x, y),
                (7, (target - at) * 72 / dpi),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=FAMILIES[family(name)][0] if colors is None else colors[name],
                annotation_clip=False,
            )


def lines(
    axes: Any, xs: Sequence[float], series: Mapping[str, Sequence[float | None]], **settings: Any
) -> None:
    """One line an estimator in its family's color and marker, apart by dashes inside a family.

    None leaves a gap.
    """
    seen: dict[str, int] = {}
    for name, values in series.items():
        kind = family(name)
        color, marker = FAMILIES[kind]
        dash = DASHES[seen.setdefault(kind, 0) % len(DASHES)]
        seen[kind] += 1
        ys = [float("nan") if v is None else v for v in values]
        axes.plot(
            xs, ys, color=color, marker=marker, ms=4, lw=1.4, ls=dash, clip_on=False, **settings
        )


def apt_scale(axes: Any, side: str, values: Sequence[float]) -> None:
    """A log scale where values span two decades, one that reaches 0 where some are 0."""
    positive = [v for v in values if v > 0]
    wide = bool(positive) and max(positive) >= 100 * min(positive)
    many = len(set(values)) > 2 and bool(positive) and max(positive) >= 8 * min(positive)
    if not (wide or (side == "x" and many)):
        return
    if len(positive) == len(values):
        getattr(axes, f"set_{side}scale")("log")
    elif min(values) >= 0:
        threshold = max(min(positive), max(positive) * 1e-6)
        getattr(axes, f"set_{side}scale")("symlog", linthresh=threshold, linscale=0.4)
        getattr(axes, f"set_{side}lim")(left=0) if side == "x" else axes.set_ylim(bottom=0)
    if side == "x" and len(values) <= 12:
        axes.set_xticks(values, [f"{v:g}" for v in values])
        axes.minorticks_off()


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates (smaller is better), from left to right.

    Example:
        >>> frontier([(0.0, 2.0), (1.0, 1.0), (1.0, 3.0), (2.0, 1.0)])
        [(0.0, 2.0), (1.0, 1.0)]
    """
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def aside(axes: Any, said: Mapping[str, Sequence[str]], most: int = 3) -> None:
    """Say in the upper right corner which names are not shown, and why.

    Args:
        axes: to write on.
        said: names by reason; empty ones are passed over.
        most: names written out.
    """
    lines = []
    for why, names in said.items():
        rest = f" +{len(names) - most}" if len(names) > most else ""
        lines += [f"{why}: {', '.join(names[:most])}{rest}"] if names else []
    axes.text(
        0.98, 0.985, "\n".join(lines), transform=axes.transAxes, ha="right", va="top",
        fontsize=6.8, color=GRAY, linespacing=1.35, zorder=0.5,
        bbox={"fc": "white", "ec": "none", "pad": 1},
    )  # fmt: skip


ROOT_TICKS = (0, 0.1, 0.5, 1, 2, 4, 8, 16)


def _plane(axes: Any, wide: float, limit: float) -> None:
    """Square-root axes and lines of equal progress."""
    import numpy as np

    for side, end in (("x", wide), ("y", limit)):
        getattr(axes, f"set_{side}scale")(
            "function", functions=(lambda v: np.sqrt(np.maximum(v, 0)), np.square)
        )
        getattr(axes, f"set_{side}lim")(0, end)
        ticks = [t for t in ROOT_TICKS if t <= end]
        getattr(axes, f"set_{side}ticks")(ticks, [f"{t:g}" for t in ticks])
    before = 0.0
    for share in (0.9, 0.75, 0.5, 0.25, 0.1):
        radius = (1 / share - 1) ** 0.5
        if radius >= limit:
            continue
        angle = np.linspace(0, np.pi / 2, 200)
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        axes.plot(x, y, color=PALE, lw=0.9, zorder=0)
        if (radius / wide) ** 0.5 - before < 0.085 or radius >= wide:
            continue
        before = (radius / wide) ** 0.5
        axes.text(
            radius, 0.008 * limit, f"{100 * share:.0f} %", color=GRAY, fontsize=6.8, ha="center",
            va="center", bbox={"fc": "white", "ec": "none", "pad": 0.6},
        )  # fmt: skip
    axes.annotate(
        "better", (0.012, 0.012), (0.09, 0.09), xycoords="axes fraction", fontsize=7, color=GRAY,
        arrowprops={"arrowstyle": "->", "color": GRAY, "lw": 0.7}, ha="center", va="center",
    )  # fmt: skip


def bias_against_noise(
    axes: Any,
    points: Sequence[tuple[float, float, str]],
    *,
    named: Sequence[str],
    limit: float,
    across: float | None = None,
    joined: bool = True,
) -> Later:
    """Bias against noise on square-root axes, with lines of equal progress and the frontier.

    Args:
        axes: to paint on.
        points: bias and noise, both relative to the gradient, and an estimator's name.
        named: entries to name besides the frontier's.
        limit: of both axes.
        across: of the axis of bias, where it is another.
        joined: whether a dashed line joins the frontier's points.

    Returns:
        What writes the names, once the layout is known.
    """
    wide = across or limit
    _plane(axes, wide, limit)
    shown = [p for p in points if p[0] <= wide and p[1] <= limit]
    best = frontier([(round(b, 12), round(n, 12)) for b, n, _ in shown])
    if joined:
        axes.plot(*zip(*best, strict=True), color=GRAY, lw=1.1, ls=(0, (4, 2)), zorder=1)
    together: dict[tuple[float, float], list[str]] = {}
    for bias, noise, name in shown:
        color, marker = FAMILIES[family(name)]
        axes.plot(bias, noise, marker, color=color, ms=6, mec="white", mew=0.6, clip_on=False)
        together.setdefault((round(bias, 3), round(noise, 3)), []).append(name)
    close = {(round(b, 3), round(n, 3)) for b, n in best}
    wanted = {at: names for at, names in together.items() if at in close or set(names) & set(named)}
    labels = []
    for (x, y), names in wanted.items():
        lead = next((n for n in named if n in names), names[0])
        others = len(names) - 1
        color = FAMILIES[family(lead)][0]
        labels.append((x, y, lead + (f" +{others}" if others else ""), color))
    return lambda: label_points(axes, labels, [(b, n) for b, n, _ in shown])


def attainable(axes: Any, curve: Sequence[tuple[float, float]], words: str) -> None:
    """A border, its name, and in a pale shade what lies beyond it.

    Args:
        axes: to paint on.
        curve: from left to right, falling; where it starts to the right of 0, nothing is
            attainable left of it.
        words: what the border is.
    """
    (first, top), (_, floor) = curve[0], curve[-1]
    start = (first, FAR) if first > LEFT else (0.0, top)
    xs, ys = zip(start, *curve, (FAR, floor), strict=True)
    axes.fill_between([0.0, *xs], [ys[0], *ys], color=BORDER, alpha=0.08, lw=0, zorder=0.2)
    axes.plot(xs, ys, color=BORDER, lw=1.8, zorder=1.5)
    axes.annotate(
        words, (1, ys[-1]), (-6, -9), xycoords=("axes fraction", "data"), ha="right", va="center",
        textcoords="offset points", fontsize=8, color=BORDER,
    )  # fmt: skip


def ring(axes: Any, x: float, y: float, name: str) -> None:
    """An open circle in the color of an estimator."""
    color = FAMILIES[family(name)][0]
    axes.plot(x, y, "o", mfc="white", mec=color, ms=7, mew=1.5, zorder=5)


def decades(axes: Any) -> None:
    """Ticks of two log axes: powers of ten, few of them, without the small ones' words."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_formatter(NullFormatter())
