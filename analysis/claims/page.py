"""How claims look: text for a terminal as rows arrive, and one page with all of them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from windage.analysis.claims.pictures import picture
from windage.analysis.claims.running import allowed, registry
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered

Fields = Mapping[str, Any]
COLUMNS = (
    Column(key="name", label="figure", keep=4),
    Column(key="value", label="measured", keep=3),
    Column(key="allowed", label="expected", keep=2),
    Column(key="ok", label="", keep=1),
)
SUMMARY = (
    Column(key="id", label="claim", keep=6),
    Column(key="section", label="section", keep=5),
    Column(key="verdict", label="verdict", keep=4),
    Column(key="figures", label="figures", keep=1),
    Column(key="ok", label="as expected", keep=3),
    Column(key="seconds", label="seconds", keep=2),
)


def as_expected(row: Fields) -> bool:
    """Whether every figure and the verdict are what the specification expects."""
    return row["verdict"] == row["expected_verdict"] and all(f["ok"] for f in row["figures"])


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def figure_cells(row: Fields) -> list[dict[str, str]]:
    """Name, value with its standard error, what it may be, and a mark, for each figure."""
    errors = row["standard_error"] or {}
    out = []
    for figure in row["figures"]:
        tolerance = figure["tolerance"]
        error = errors.get(figure["name"])
        value = _number(figure["value"]) + ("" if error is None else f" (s.e. {error:.2g})")
        limits = tuple(tolerance) if isinstance(tolerance, list) else tolerance
        out.append(
            {
                "name": figure["name"],
                "value": value,
                "allowed": allowed(figure["expected"], limits),
                "ok": "ok" if figure["ok"] else "FAILED",
            }
        )
    return out


def verdict(row: Fields) -> str:
    """The verdict in words, with its condition, and the expected one where it differs."""
    words = row["verdict"]
    if row["condition"] and words != "holds":
        link = " " if words == "holds only if" else ": "
        words += link + row["condition"]
    if row["verdict"] != row["expected_verdict"]:
        words += f" [expected: {row['expected_verdict']}]"
    return words


def text(row: Fields, note: str, width: int) -> str:
    """A row for a terminal: statement, figures, verdict, note.

    Args:
        row: of the document.
        note: of the claim.
        width: of the terminal, in cells.
    """
    first, rest = f"{row['id']}  ", "      "

    def fill(words: str, start: str) -> str:
        return textwrap.fill(words, width, initial_indent=start, subsequent_indent=rest)

    cells = figure_cells(row)
    name = max((len(c["name"]) for c in cells), default=0)
    value = max((len(c["value"]) for c in cells), default=0)
    lines = [fill(row["statement"], first)]
    for c in cells:
        mark = "" if c["ok"] == "ok" else "  FAILED"
        lines.append(f"{rest}{c['name']:{name}}  {c['value']:>{value}}  {c['allowed']}{mark}")
    lines.append(fill(f"Verdict ({row['seconds']:.2f} s): {verdict(row)}", rest))
    if note:
        lines.append(fill(f"Note: {note}", rest))
    return "\n".join(lines)


def reported_text(statements: Iterable[Fields], width: int) -> str:
    """The statements that are reported only."""
    return "\n".join(
        textwrap.fill(_reported(s), width, subsequent_indent="      ") for s in statements
    )


def _reported(statement: Fields) -> str:
    words = f"reported  {statement['statement']}"
    return f"{words} Toys about the same: {', '.join(statement['stands_in'])}."


def summary_line(document: Fields) -> str:
    """How many claims ran, with which verdicts, and which failed."""
    rows = document["rows"]
    verdicts = Counter(row["verdict"] for row in rows)
    counted = ", ".join(f"{n} {name}" for name, n in verdicts.items())
    failed = ", ".join(document["failed"]) or "none"
    claims = f"{len(rows)} claim{'s' * (len(rows) != 1)}"
    return f"{claims} in {document['seconds']:.1f} s: {counted}. Not as expected: {failed}."


def _glance(rows: Iterable[Fields]) -> Table:
    """One line a claim."""
    shown = [
        {
            **row,
            "figures": len(row["figures"]),
            "ok": "yes" if as_expected(row) else "NO",
            "seconds": f"{row['seconds']:.2f}",
        }
        for row in rows
    ]
    return Table(columns=SUMMARY, rows=shown)


def summary(document: Fields) -> Rendered:
    """Every claim in one table."""
    table = _glance(document["rows"])
    return Rendered(title="windage claims", table=table, lines=(summary_line(document),))


def page(document: Fields) -> Page:
    """Every claim with problem, formula, figures, and a picture where it says more."""
    sections = []
    for source in document["sources"]:
        rows = [row for row in document["rows"] if row["source"] == source]
        if rows:
            sections.append(Section(title=f"Document {source}", table=_glance(rows)))
            sections += [_section(row) for row in rows]
    if document["reported"]:
        prose = [_reported(s) for s in document["reported"]]
        sections.append(Section(title="Reported, not executed", prose=prose))
    return Page(
        title="Claims, executed",
        intro=(
            "Each statement in our words, what was measured, and the verdict that follows from "
            "the measured figures.",
            summary_line(document),
            f"Documents: {', '.join(document['sources'])}.",
        ),
        sections=sections,
        footer="Exact figures come from enumeration or closed forms and are met to one unit in "
        "the last digit shown; simulated ones have a standard error and a band.",
    )


def _section(row: Fields) -> Section:
    claim = registry()[row["id"]]
    prose = [row["statement"], f"Verdict: {verdict(row)}."]
    prose += [f"Note: {claim.note}"] if claim.note else []
    prose += [f"On: {claim.problem}"]
    prose += [f"{row['section']}; {row['kind']}, {row['seconds']:.2f} s."]
    cells = figure_cells(row)
    strong = frozenset((i, "ok") for i, c in enumerate(cells) if c["ok"] != "ok")
    return Section(
        title=f"{row['id']} · {row['verdict']}",
        prose=prose,
        formula=claim.formula,
        figure=picture(row),
        table=Table(columns=COLUMNS, rows=cells, strong=strong),
    )
