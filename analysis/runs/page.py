"""How runs look: what they came to, their figures, their card, what they wrote."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from windage.analysis.card import lines as card_lines
from windage.analysis.report import Page, Section
from windage.analysis.runs.panels import GROUPS, group, learning, records, shadows
from windage.analysis.runs.reading import series
from windage.analysis.runs.sentences import ends
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
Row = Mapping[str, Any]
COLUMNS = (
    Column(key="run", label="run", keep=9),
    Column(key="steps", label="steps", keep=8),
    Column(key="reward_first", label="reward\nat first", keep=5),
    Column(key="reward", label="reward\nat the end", keep=7),
    Column(key="pass_first", label="pass@1\nat first", percent=True, keep=6),
    Column(key="pass", label="pass@1\nat the end", percent=True, keep=8),
    Column(key="interval", label="interval", keep=4),
    Column(key="invalid", label="invalid", percent=True, keep=5),
    Column(key="lag", label="lag", keep=3),
    Column(key="k3", label="k3\nnats", keep=4),
    Column(key="ess", label="ESS", percent=True, keep=4),
    Column(key="norm", label="gradient\nnorm", keep=3),
    Column(key="speed", label="tokens\na second", keep=3),
)
FIGURES = {
    "reward": "reward/mean",
    "invalid": "reward/invalid",
    "lag": "lag/mean",
    "k3": "mismatch/k3",
    "ess": "ratio/ess",
    "norm": "update/gradient_norm",
    "speed": "time/tokens_per_second",
}
LONG, LINE = 600, 96


def row(document: Document, run: Row) -> dict[str, Any]:
    """What a run came to."""
    mine = records(document, run["name"])
    found: dict[str, Any] = {"run": run["name"], "steps": run["steps"]}
    for key, figure in FIGURES.items():
        _, values = series(mine, figure)
        found[key] = ends(values)[1] if values else None
        if key == "reward":
            found["reward_first"] = ends(values)[0] if values else None
    held = [e for e in records(document, run["name"], "evaluations") if "pass_at_1" in e]
    if held:
        last = held[-1]
        found["pass_first"], found["pass"] = held[0]["pass_at_1"], last["pass_at_1"]
        if {"pass_at_1_low", "pass_at_1_high"} <= set(last):
            low, high = (100 * last[f"pass_at_1_{side}"] for side in ("low", "high"))
            found["interval"] = f"{low:.0f}–{high:.0f} %"
    return found


def table(document: Document) -> Table:
    """A row a run."""
    rows = [row(document, run) for run in document["runs"]]
    known = {key for one in rows for key, value in one.items() if value is not None}
    notes = [f"{run['name']}: {note}" for run in document["runs"] for note in run["notes"]]
    return Table(
        columns=[column for column in COLUMNS if column.key in known],
        rows=rows,
        caption="Means over the first and the last tenth of the steps; held-out questions apart.",
        notes=notes,
    )


def printable(text: Any) -> str:
    """A response as a page shows it: lines folded, no control characters, not without end.

    Example:
        >>> printable("a\\x07b")
        'a\\ufffdb'
    """
    words = str(text)
    cut = words if len(words) <= LONG else f"{words[:LONG]} ... ({len(words)} characters)"
    clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in cut)
    return "\n".join(
        part for line in clean.split("\n") for part in textwrap.wrap(line, LINE) or [""]
    )


def samples(run: Row) -> str:
    """Questions, responses and verdicts, some early and some late."""
    blocks = []
    for one in run["samples"]:
        head = f"step {one['step']} · {one.get('verdict', '?')} · reward {one.get('reward')}"
        parts = (("question", "question"), ("response", "response"), ("answer", "wanted"))
        body = "\n".join(
            textwrap.indent(printable(one[key]), "    ").replace("    ", f"{word:>9}  ", 1)
            for key, word in parts
            if one.get(key) is not None
        )
        blocks.append(f"{head}\n{body}")
    return "\n\n".join(blocks)


def flat(config: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """A configuration as lines `section.key = value`."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key} = {value}"


def of_run(document: Document, run: Row) -> Iterator[Section]:
    """What belongs to one run: shadows, card, samples, configuration."""
    name = run["name"]
    if len(document["runs"]) > 1 and run["reading"]:
        yield Section(title=f"{name}: what its figures say", prose=run["reading"])
    beside = shadows(document, name)
    if beside is not None:
        yield Section(title=f"{name}: what other recipes would have done", figure=beside)
    if run["card"] is not None:
        try:
            said = "\n".join(card_lines(run["card"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            said = "\n".join(flat(run["card"]))
        yield Section(title=f"{name}: the recipe's card, from before the run", formula=said)
    if run["samples"]:
        yield Section(title=f"{name}: responses at first and at the end", formula=samples(run))
    settings = "\n".join(flat(run["config"]))
    versions = "\n".join(flat(run["versions"], "version of "))
    hashes = "\n".join(f"SHA-256 of {file} = {digest}" for file, digest in run["hashes"].items())
    yield Section(
        title=f"{name}: configuration, versions, files",
        formula="\n\n".join(part for part in (settings, versions, hashes) if part),
    )


def sections(document: Document) -> Iterator[Section]:
    """All runs first, then each by itself."""
    yield Section(title="What it came to", table=table(document))
    if document["rows"] or document["evaluations"]:
        yield Section(title="Learning", figure=learning(document))
    for name, (title, _) in GROUPS.items():
        found = group(document, name)
        if found is not None:
            yield Section(title=title, figure=found)
    for run in document["runs"]:
        yield from of_run(document, run)


def _heading(document: Document) -> str:
    return ", ".join(run["name"] for run in document["runs"])


def page(document: Document) -> Page:
    """One page for a run, or for several side by side."""
    runs = document["runs"]
    intro = [f"{run['name']}: {run['reading'][0]}" for run in runs if run["reading"]]
    if len(runs) == 1:
        intro = runs[0]["reading"]
    return Page(
        title=f"Training: {_heading(document)}",
        intro=intro or ["No step was recorded."],
        sections=list(sections(document)),
        footer="Every figure's formula and unit: docs/metrics.md. Read from "
        + ", ".join(run["folder"] for run in runs)
        + ".",
    )


def summary(document: Document) -> Rendered:
    """What each run came to, and what a single one says."""
    runs = document["runs"]
    said = tuple(runs[0]["reading"]) if len(runs) == 1 else ()
    return Rendered(title=f"Training: {_heading(document)}", table=table(document), lines=said)
