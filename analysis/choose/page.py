"""How a choice looks: the ranking with reasons, what would change it, pace against merit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windage.analysis.plots import (
    FAMILIES,
    GRAY,
    PALE,
    Figure,
    Later,
    decades,
    draw,
    family,
    key,
    label_points,
)
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
RANKED = (
    Column(key="rank", label="", keep=9),
    Column(key="recipe", label="recipe", keep=9),
    Column(key="relative_gain", label="gain,\nbest = 100 %", percent=True, keep=8),
    Column(key="merit", label="merit", percent=True, keep=7),
    Column(key="mean_lag", label="lag", keep=3),
    Column(key="updates_per_hour", label="updates\nan hour", keep=4),
    Column(key="way", label="run", keep=6),
    Column(key="why", label="why", keep=1),
)
CHANGED = (
    Column(key="change", label="if", keep=3),
    Column(key="first", label="first is", keep=3),
    Column(key="way", label="run", keep=1),
)
BORNE = (
    Column(key="says", label="document 002", keep=3),
    Column(key="first", label="this", keep=2),
    Column(key="second", label="against", keep=2),
    Column(key="ratio", label="ratio of\ngains", keep=3),
    Column(key="verdict", label="here", keep=3),
)
TICKS = tuple(m * 10.0**k for k in range(-4, 6) for m in (1, 2, 5))
ASSUMED = (
    "Gain is merit times updates an hour, a GPU: how many exact gradient steps' worth of "
    "improvement a GPU-hour buys.",
    "Merit is exact for a small model of reasoning at this length, not for yours: three prompts of "
    "different difficulty, a sampler some gradient steps behind with an error on its logits.",
    "It takes J to be quadratic with one curvature, and every recipe at its own best step size.",
)


def verdict(document: Document) -> str:
    """The answer in one sentence."""
    first = document["ranking"][0]
    if document["verdict"] != "undecided":
        return f"{first['recipe']}, run {first['way']}, and no change tried puts another first."
    return f"Undecided between {' and '.join(document['rivals'])}."


def ranking(document: Document) -> Table:
    """Every recipe in its best way to run."""
    out = document["excluded"]
    notes = tuple(f"Left out: {each['recipe']}: {each['reason']}." for each in out)
    return Table(
        columns=RANKED,
        rows=document["ranking"],
        caption="Each recipe in the way to run that gives it the most gain.",
        notes=notes,
    )


def changes(document: Document) -> Table:
    """What would change the order."""
    return Table(columns=CHANGED, rows=document["sensitivity"])


def conditions(document: Document) -> Table:
    """The conditions that the document ends with, computed."""
    rows = [
        {**each, "verdict": "agrees" if each["agrees"] else "does not agree"}
        for each in document["conditions"]
    ]
    return Table(columns=BORNE, rows=rows, caption="For the recipe that is first here.")


def plan(document: Document) -> str:
    """The experiment that would decide, in words; empty where nothing is undecided."""
    found = document["experiment"]
    if found is None:
        return ""
    if found["gpu_hours"] is None:
        return "No experiment of reasonable size would tell them apart: take either."
    runs = "; ".join(
        f"{arm}: {updates:,} updates"
        for arm, updates in zip(found["arms"], found["updates"], strict=True)
    )
    return (
        f"To decide: {found['seeds']} seeds of each of {runs}; {found['gpu_hours']:,.0f} GPU-hours "
        f"for an expected difference of {found['difference']:.3f} in score."
    )


def paint(canvas: Any, document: Document) -> Iterator[Later]:
    """Updates an hour against merit, a point a recipe and way; lines of equal gain."""
    axes = canvas.subplots()
    rows = [row for row in document["rows"] if row["gain"] > 0]
    most = max(row["gain"] for row in rows)
    shown = [row for row in rows if row["gain"] > most / 100]
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in shown:
        color, marker = FAMILIES[family(row["recipe"])]
        axes.plot(
            row["updates_per_hour"], row["merit"], marker=marker, ms=4.5, color=color, ls="none"
        )
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    for part in (1.0, 0.5, 0.1):
        ends = [part * most * document["gpus"] / x for x in (low, high)]
        axes.plot((low, high), ends, color=PALE, lw=1.0, zorder=0)
        axes.annotate(
            f"{part:.0%} of the best gain".replace("%", " %"),
            (high, ends[1]),
            (4, 0),
            textcoords="offset points",
            fontsize=7,
            color=GRAY,
            va="center",
            annotation_clip=False,
        )
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top * 1.15)
    axes.minorticks_off()
    axes.set_xlabel("updates an hour")
    axes.set_ylabel("merit of an update")
    decades(axes)
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    key(canvas, [family(row["recipe"]) for row in shown])
    ranked = [row for row in document["ranking"] if row["gain"] > most / 100]
    yield lambda: name_best(axes, shown, ranked)


def name_best(axes: Any, rows: list[Mapping[str, Any]], ranked: list[Mapping[str, Any]]) -> None:
    """Names of recipes at their best way, as far as there is room."""
    points = [
        (r["updates_per_hour"], r["merit"], r["recipe"], FAMILIES[family(r["recipe"])][0])
        for r in ranked
    ]
    label_points(axes, points, [(r["updates_per_hour"], r["merit"]) for r in rows])


def figure(document: Document) -> Figure:
    """Throughput against update quality."""
    return draw(
        "choose",
        lambda canvas: paint(canvas, document),
        size=(7.2, 4.4),
        caption="Each point is a recipe run in one way; gray lines join points of equal gain.",
        alt="Merit of an update against updates an hour for every recipe and way to run.",
    )


def page(document: Document) -> Page:
    """The choice as one page."""
    request = document["request"]
    told = ", ".join(f"{key} {value}" for key, value in request.items())
    sections = [
        Section(title="The order", prose=(verdict(document),), table=ranking(document)),
        Section(title="Pace against merit", figure=figure(document)),
        Section(
            title="What would change it",
            prose=tuple(p for p in (plan(document),) if p),
            table=changes(document),
        ),
        Section(title="The document's conditions, computed", table=conditions(document)),
    ]
    return Page(
        title="Which recipe for this run?",
        intro=ASSUMED,
        sections=sections,
        footer=f"Stated: {told}. {document['seconds']:.0f} seconds.",
    )


def summary(document: Document) -> Rendered:
    """The ranking, the answer, and what would change it."""
    sensitive = [
        f"{each['change']}: {each['first']}, {each['way']}"
        for each in document["sensitivity"]
        if each["first"] != document["ranking"][0]["recipe"]
    ]
    borne = "\n".join(
        f"{'agrees' if each['agrees'] else 'does not agree':<15} {each['says']}"
        for each in document["conditions"]
    )
    lines = [verdict(document), "\n".join(sensitive), plan(document), borne, " ".join(ASSUMED[1:])]
    return Rendered(
        title="Which recipe for this run?",
        table=ranking(document),
        lines=tuple(line for line in lines if line),
    )
