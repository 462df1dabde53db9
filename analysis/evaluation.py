"""How an evaluation looks: figures with intervals, verdicts, questions, two models in pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windage.analysis.plots import GRAY, INK, PALE, Figure, Later, draw
from windage.analysis.report import Page, Section
from windage.analysis.tables import NULL, Column, Table, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
Row = Mapping[str, Any]
VERDICTS = {"right": "#009e73", "format": "#56b4e9", "wrong": "#d55e00", "invalid": "#9a9a9a"}
HATCHES = {"right": "", "format": "//", "wrong": "", "invalid": ".."}
MODELS = ((INK, "o"), ("#0072b2", "s"))
LENGTHS = ("tokens", "finished_tokens")
# Bars narrower than this share of the whole carry no number.
NARROW = 0.06
DIFFERENCE = "difference"


def name_of(figure: str) -> str:
    """A figure's name for a reader.

    Example:
        >>> name_of("pass_at_8"), name_of("finished_tokens")
        ('pass@8', 'finished tokens')
    """
    return figure.replace("_at_", "@").replace("_", " ")


def interval(row: Row) -> str:
    """A figure and its interval, shares in per cent; a difference carries its sign.

    Example:
        >>> interval({"figure": "pass_at_1", "value": 0.5, "low": 0.25, "high": 0.75})
        '50.0 [25.0, 75.0]'
        >>> interval({"figure": "tokens", "value": 7.0, "low": None, "high": None})
        '7.0'
    """
    scale = 1.0 if row["figure"] in LENGTHS else 100.0
    sign = "+" if row.get("against") else ""
    value = f"{scale * row['value']:{sign}.1f}"
    if row["low"] is None:
        return value
    return f"{value} [{scale * row['low']:{sign}.1f}, {scale * row['high']:{sign}.1f}]"


def models(document: Document) -> list[str]:
    """Names of the models, in order."""
    return [model["model"] for model in document["models"]]


def table(document: Document) -> Table:
    """A row a figure, a column a model, and the difference of two."""
    rows: dict[str, dict[str, Any]] = {}
    for row in document["rows"]:
        entries = rows.setdefault(row["figure"], {"figure": name_of(row["figure"])})
        if row["against"] is None:
            entries[row["model"]] = interval(row)
        else:
            better = f"{100 * row['more']:.0f} / {100 * row['less']:.0f}"
            entries |= {DIFFERENCE: interval(row), "split": better, "p": _chance(row["p_value"])}
    first, *second = models(document)
    columns = [Column(key="figure", label="", keep=9), Column(key=first, label=first, keep=8)]
    if second:
        columns += [
            Column(key=second[0], label=second[0], keep=6),
            Column(key=DIFFERENCE, label=f"{second[0]}\nminus {first}", keep=7),
            Column(key="split", label="% of questions\nmore / less", keep=4),
            Column(key="p", label="sign test", keep=3),
        ]
    return Table(
        columns=columns,
        rows=list(rows.values()),
        caption="Means over the questions and 95 % intervals by question; shares in %.",
        notes=_notes(document),
    )


def _chance(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _notes(document: Document) -> list[str]:
    """What was asked, a line a model, and what could not be checked."""
    notes = [
        f"{model['model']}: {model['questions']} {model['split']} questions of {model['task']}, "
        f"{model['samples']} responses each, seed {model['seed']}; {_told(model['sampling'])}."
        for model in document["models"]
    ]
    for row in document["rows"]:
        if row["figure"] == "unchecked" and row["against"] is None and row["value"] > 0:
            notes.append(f"{row['model']}: some answers could not be checked; see unchecked.")
    return notes


def _told(sampling: Mapping[str, Any]) -> str:
    """Settings in words, those left out that say nothing."""
    told = {name: value for name, value in sampling.items() if value not in (None, (), [])}
    return ", ".join(f"{name.replace('_', ' ')} {text(value)}" for name, value in told.items())


def verdict(document: Document) -> str:
    """The answer in a sentence."""
    found = {(r["model"], r["figure"]): r for r in document["rows"] if r["against"] is None}
    first, *second = models(document)
    words = f"pass@1 of {first} in %: {interval(found[first, 'pass_at_1'])}."
    if not second:
        return words
    row = next(r for r in document["rows"] if r["against"] and r["figure"] == "pass_at_1")
    low, high = row["low"], row["high"]
    if low is None or low <= 0 <= high:
        return f"{words} {second[0]} is not shown to be better or worse: {interval(row)}."
    return f"{words} {second[0]} is {'better' if low > 0 else 'worse'} by {interval(row)}."


def _paint(canvas: Any, document: Document) -> Iterable[Later]:
    verdicts, counts, curve = canvas.subplots(1, 3, width_ratios=(1.05, 1, 1))
    _bars(verdicts, document)
    _histogram(counts, document)
    _curves(curve, document)
    return ()


def _bars(axes: Any, document: Document) -> None:
    """What responses came to, a bar a model."""
    names = models(document)
    value = {(r["model"], r["figure"]): r["value"] for r in document["rows"] if not r["against"]}
    start = [0.0] * len(names)
    for word, color in VERDICTS.items():
        widths = [value[name, word] for name in names]
        axes.barh(
            range(len(names)), widths, left=start, height=0.55, color=color, hatch=HATCHES[word],
            edgecolor="white", linewidth=0.6, label=word,
        )  # fmt: skip
        for place, (at, width) in enumerate(zip(start, widths, strict=True)):
            if width >= NARROW:
                axes.text(
                    at + width / 2, place, f"{100 * width:.0f}", ha="center", va="center",
                    fontsize=8,
                    bbox={"fc": "white", "ec": "none", "pad": 1, "alpha": 0.8},
                )  # fmt: skip
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xticks((0, 0.5, 1), ("0", "50", "100 %"))
    axes.set_title("Verdicts on responses, in %")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False, fontsize=7.5,
        columnspacing=1, handlelength=1.2,
    )  # fmt: skip


def _histogram(axes: Any, document: Document) -> None:
    """Questions by right answers; the second model's as points."""
    for (color, marker), name in zip(MODELS, models(document), strict=False):
        rows = [row for row in document["histogram"] if row["model"] == name]
        most = max(row["correct"] for row in rows)
        xs = [row["correct"] / most for row in rows]
        ys = [row["questions"] for row in rows]
        if color == INK:
            axes.bar(
                xs, ys, width=0.8 / most, color=PALE, edgecolor=GRAY, linewidth=0.6, label=name
            )
        else:
            axes.plot(xs, ys, color=color, marker=marker, ms=4, lw=1.2, label=name)
    axes.set_xlim(-0.5 / most - 0.02, 1 + 0.5 / most + 0.02)
    axes.set_ylim(bottom=0)
    axes.set_xticks((0, 0.5, 1), ("0", "50", "100 %"))
    axes.set_xlabel("right responses of a question")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Questions")
    if len(models(document)) > 1:
        axes.legend(frameon=False, fontsize=7.5)


def _curves(axes: Any, document: Document) -> None:
    """pass@k and maj@k with their intervals."""
    several = len(models(document)) > 1
    for (color, marker), name in zip(MODELS, models(document), strict=False):
        apart = 1.0 if not several else 0.97 if color == INK else 1.03
        for kind, dash, fill in (("pass", "-", color), ("maj", "--", "white")):
            points = _points(document, name, kind)
            xs = [k * apart for k, _ in points]
            ys = [row["value"] for _, row in points]
            arms = [
                [0.0 if row[end] is None else abs(row[end] - row["value"]) for _, row in points]
                for end in ("low", "high")
            ]
            axes.errorbar(
                xs, ys, arms, color=color, marker=marker, mfc=fill, ms=4.5, lw=1.3, ls=dash,
                capsize=2, elinewidth=0.9, label=f"{kind}@k{f', {name}' * several}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(document["k"], [str(k) for k in document["k"]])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_yticks((0, 0.5, 1), ("0", "50", "100 %"))
    axes.set_xlabel("k")
    axes.set_title("Some of k right, and the vote of k")
    axes.legend(frameon=False, fontsize=7.5)


def _points(document: Document, model: str, kind: str) -> list[tuple[int, Row]]:
    """The rows of pass@k or maj@k by k; a vote of one is what pass@1 is."""
    found = {r["figure"]: r for r in document["rows"] if r["model"] == model and not r["against"]}
    return [(k, found[f"{kind}_at_{k}" if k > 1 else "pass_at_1"]) for k in document["k"]]


def figure(document: Document) -> Figure:
    """Verdicts, questions by right answers, and what k samples reach."""
    names = " and ".join(models(document))
    return draw(
        "evaluate",
        lambda canvas: _paint(canvas, document),
        size=(10.5, 3.2),
        caption="Left: what responses came to. Middle: questions by the share of their responses "
        "that are right. Right: the chance that one of k is right, and that the vote of k is, with "
        "95 % intervals by question.",
        alt=f"Verdicts, histogram of questions and pass@k of {names}.",
    )


def _paint_pairs(canvas: Any, document: Document) -> Iterable[Later]:
    forest, plane = canvas.subplots(1, 2, width_ratios=(1.25, 1))
    rows = [row for row in document["rows"] if row["against"]]
    for place, row in enumerate(rows):
        low, high = (row["value"] if row[end] is None else row[end] for end in ("low", "high"))
        sure = not low <= 0 <= high
        forest.plot((low, high), (place, place), color=INK if sure else GRAY, lw=1.3)
        forest.plot(row["value"], place, "o", color=INK, mfc=INK if sure else "white", ms=5)
    forest.axvline(0, color=PALE, lw=1, zorder=0)
    forest.set_yticks(range(len(rows)), [name_of(row["figure"]) for row in rows])
    forest.set_ylim(len(rows) - 0.5, -0.5)
    forest.xaxis.set_major_formatter(lambda v, _: f"{100 * v:+.0f}" if abs(v) > 1e-12 else "0")
    first, second = models(document)
    forest.set_xlabel("percentage points")
    forest.set_title(f"{second} minus {first}")
    _plane(plane, document)
    return ()


def _plane(axes: Any, document: Document) -> None:
    """A point a pair of shares of right answers, as large as the questions that have it."""
    first, second = models(document)
    share: dict[str, dict[str, float]] = {first: {}, second: {}}
    for row in document["questions"]:
        correct = row["right"] + row["format"]
        share[row["model"]][row["question"]] = correct / row["samples"]
    pairs = Counter((share[first][q], share[second][q]) for q in share[first] if q in share[second])
    most = max(pairs.values())
    for (x, y), count in pairs.items():
        color = GRAY if x == y else VERDICTS["right"] if y > x else VERDICTS["wrong"]
        marker = "o" if x == y else "^" if y > x else "v"
        size = 14 + 120 * count / most
        axes.scatter(x, y, s=size, color=color, marker=marker, alpha=0.75, lw=0, clip_on=False)
    axes.plot((0, 1), (0, 1), color=PALE, lw=1, zorder=0)
    for side, name in (("x", first), ("y", second)):
        getattr(axes, f"set_{side}lim")(-0.03, 1.03)
        getattr(axes, f"set_{side}ticks")((0, 0.5, 1), ("0", "50", "100 %"))
        getattr(axes, f"set_{side}label")(name)
    axes.set_aspect("equal")
    axes.set_title("Right responses of a question")


def pairs_figure(document: Document) -> Figure:
    """Two models in pairs."""
    first, second = models(document)
    return draw(
        "evaluate_pairs",
        lambda canvas: _paint_pairs(canvas, document),
        size=(9.0, 3.9),
        caption="Left: differences question by question, with 95 % intervals; filled where 0 is "
        "outside. Right: each question's share of right responses, larger where more questions "
        f"share the place; above the line {second} is better.",
        alt=f"Differences of {second} from {first} by figure, and their shares by question.",
    )


def definitions(document: Document) -> Table:
    """What each figure means."""
    rows = [{"figure": name_of(k), "means": v} for k, v in document["figures"].items()]
    columns = (Column(key="figure", label="figure"), Column(key="means", label="what it is"))
    return Table(columns=columns, rows=rows)


def examples(document: Document) -> Table:
    """Some responses as they were."""
    rows = [
        {key: _short(str(row[key])) for key in ("model", "question", "response", "verdict")}
        for row in document["examples"]
    ]
    columns = [Column(key=k, label=k) for k in ("model", "question", "response", "verdict")]
    return Table(columns=columns, rows=rows, caption="The first response to the first questions.")


def hardest(document: Document, most: int = 10) -> Table:
    """The questions with the fewest right answers of the last model."""
    name = models(document)[-1]
    mine: Sequence[Row] = [row for row in document["questions"] if row["model"] == name]
    ranked = sorted(mine, key=lambda row: (row["right"] + row["format"]) / row["samples"])[:most]
    rows = [
        {
            "question": _short(row["text"]),
            "answer": _short(row["answer"], 24),
            "right": f"{row['right'] + row['format']} of {row['samples']}",
            "invalid": str(row["invalid"]) if row["invalid"] else NULL,
        }
        for row in ranked
    ]
    columns = [Column(key=key, label=key) for key in ("question", "answer", "right", "invalid")]
    return Table(columns=columns, rows=rows, caption=f"Of {name}, those with fewest right answers.")


def _short(text: str, most: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def page(document: Document) -> Page:
    """The evaluation as one page."""
    sections = [Section(title="Figures", prose=(verdict(document),), table=table(document))]
    sections.append(Section(title="Verdicts, questions and votes", figure=figure(document)))
    if len(models(document)) > 1:
        sections.append(Section(title="In pairs", figure=pairs_figure(document)))
    sections += [
        Section(title="The hardest questions", table=hardest(document)),
        Section(title="Some responses", table=examples(document)),
        Section(title="What the figures mean", table=definitions(document)),
    ]
    seconds = sum(model["seconds"] for model in document["models"])
    return Page(
        title=f"Evaluation of {' and '.join(models(document))}",
        intro=(
            "Held-out questions, several responses each. Intervals are about questions like these: "
            "responses to one question are no independent trials.",
        ),
        sections=sections,
        footer=f"{seconds:.0f} seconds of asking and judging.",
    )


def summary(document: Document) -> Rendered:
    """The table and the answer."""
    return Rendered(
        title=f"Evaluation of {' and '.join(models(document))}",
        table=table(document),
        lines=(verdict(document),),
    )
