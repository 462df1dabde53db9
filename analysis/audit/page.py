"""How an audit looks: what was claimed, what was measured, and the smallest input that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table, text
from windage.analysis.terminal import Rendered
from windage.estimators.claims import ALWAYS, PROPERTIES, VALUED

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
COLUMNS = (
    Column(key="target", label="target", keep=2),
    Column(key="property", label="property", keep=8),
    Column(key="claimed", label="claimed", keep=4),
    Column(key="measured", label="measured", keep=6),
    Column(key="verdict", label="verdict", keep=7),
    Column(key="outcome", label="", keep=9),
    Column(key="witness", label="where", keep=3),
    Column(key="found", label="found", keep=1),
)
PLANTED = (
    Column(key="target", label="planted fault", keep=5),
    Column(key="witness", label="in", keep=3),
    Column(key="claimed", label="what is wrong", keep=2),
    Column(key="found", label="found by", keep=4),
)
NAMED = 1
OUTCOME = {True: "ok", False: "FAILED", None: ""}
MEASURED = (
    "measured: the largest departure found. Of an entry, relative to the gradient or the "
    "coefficient; of a loss, in units of its own coefficients."
)
CLOSEST = (
    Column(key="entries", label="entry", keep=5),
    Column(key="composition", label="correction · aggregation", keep=2),
    Column(key="multiple", label="multiple", keep=4),
    Column(key="residual", label="left after\nthe multiple", keep=4),
    Column(key="largest_difference", label="largest difference\nwithout it", keep=3),
)


def _rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "outcome": OUTCOME[row["ok"]]} for row in rows]


def _table(rows: Rows) -> Table:
    columns = [c for c in COLUMNS if c.key != "target"]
    return Table(columns=columns, rows=_rows(rows), caption=MEASURED)


def _planted(document: Document, most: int | None = None) -> Table:
    """One line a fault: where, what, and the checks that found it, `most` of them by name."""

    def named(found: str) -> str:
        checks = found.split(", ")
        if most is None or len(checks) <= most:
            return found
        return ", ".join([*checks[:most], f"{len(checks) - most} more"])

    rows = [{**row, "found": named(row["found"])} for row in document["rows"]]
    return Table(columns=PLANTED, rows=rows)


def _summary_rows(document: Document) -> list[dict[str, Any]]:
    """One line a target: claims decided, as claimed, failed."""
    out = []
    for target in document["targets"]:
        mine = [row for row in document["rows"] if row["target"] == target]
        bad = [row["property"] for row in mine if row["ok"] is False]
        out.append(
            {
                "target": target,
                "decided": sum(row["ok"] is not None for row in mine),
                "holds": sum(row["verdict"] == "holds" for row in mine),
                "does_not": sum(row["verdict"] == "does not hold" for row in mine),
                "failed": ", ".join(bad) or "none",
            }
        )
    return out


SUMMARY = (
    Column(key="target", label="target", keep=5),
    Column(key="decided", label="claims\ndecided", keep=4),
    Column(key="holds", label="hold", keep=2),
    Column(key="does_not", label="do not\nhold", keep=2),
    Column(key="failed", label="not as claimed", keep=6),
)


def _verdict(document: Document) -> str:
    decided = sum(row["ok"] is not None for row in document["rows"])
    if document["planted"]:
        survivors = [row["target"] for row in document["rows"] if not row["ok"]]
        return f"{decided} planted faults; not found: {', '.join(survivors) or 'none'}."
    if document["failed"]:
        return f"{document['failed']} of {decided} claims do not hold as claimed."
    return f"All {decided} claims are as claimed." if decided else "Nothing was claimed."


def _loss_lines(document: Document) -> list[str]:
    """How each loss was called, and what it is closest to."""
    lines = []
    for loss in document["losses"]:
        called = f"{loss['target']} is your own code and was run, called as {loss['signature']}"
        called += f" ({loss['layout']})" if loss["layout"] else ""
        lines.append(f"{called}, on {loss['inputs']} inputs.")
        lines.append(closest(loss))
    return lines


def closest(loss: Mapping[str, Any]) -> str:
    """A sentence on the entry that a loss is closest to."""
    best = loss["closest"][0]
    names = " = ".join(best["entries"])
    times = (
        f" with length {best['length']:.6g}"
        if best["length"] is not None
        else ""
        if abs(best["multiple"] - 1) < 1e-5
        else f" × {best['multiple']:.6g}"
    )
    if best["equal"] or best["residual"] <= 1e-5:
        return f"It equals the correction and aggregation of {names}{times}."
    return (
        f"Closest in the catalogue: {names}{times}; {100 * best['residual']:.3g} % of its "
        "gradient remains, in root mean square over the inputs."
    )


def _examples(document: Document) -> list[str]:
    return [
        f"The smallest input found where {e['target']} fails ({e['property']}):\n\n{e['python']}"
        for e in document["counter_examples"]
    ]


def title(document: Document) -> str:
    """What was audited."""
    targets = document["targets"]
    if document["planted"]:
        return "planted faults"
    return targets[0] if len(targets) == 1 else f"{len(targets)} targets"


def summary(document: Document) -> Rendered:
    """What a terminal shows: one target in full, several as one line each."""
    single = len(document["targets"]) == 1
    lines = (*_loss_lines(document), *_examples(document), _verdict(document))
    if document["planted"]:
        table = _planted(document, NAMED)
    elif single:
        table = _table(document["rows"])
    else:
        bad = [row for row in document["rows"] if row["ok"] is False]
        table = Table(columns=SUMMARY, rows=_summary_rows(document))
        lines = (*(_failed(row) for row in bad), *lines)
    return Rendered(title=f"windage audit: {title(document)}", table=table, lines=lines)


def _failed(row: Mapping[str, Any]) -> str:
    return (
        f"{row['target']}: {row['property']} claimed {row['claimed']!r}, measured "
        f"{text(row['measured'])}, {row['verdict']}, on {row['witness']}"
    )


def page(document: Document) -> Page:
    """The HTML page: verdict, closest entries, counter-examples, every row."""
    if document["planted"]:
        sections = [Section(title="Which check finds which fault", table=_planted(document))]
        return Page(
            title=f"windage audit: {title(document)}",
            intro=(_verdict(document),),
            sections=sections,
        )
    sections = []
    if len(document["targets"]) > 1:
        table = Table(columns=SUMMARY, rows=_summary_rows(document))
        sections.append(Section(title="Targets", table=table))
    for loss in document["losses"]:
        rows = [{**c, "entries": " = ".join(c["entries"])} for c in loss["closest"]]
        sections.append(
            Section(
                title=f"{loss['target']} beside the catalogue",
                prose=(closest(loss),),
                formula="C[n, t] = -d loss / d logp[n, t]        entry: A * weight * share",
                table=Table(columns=CLOSEST, rows=rows),
            )
        )
    for example in document["counter_examples"]:
        sections.append(
            Section(
                title=f"Where {example['target']} fails: {example['property']}",
                formula=example["python"],
            )
        )
    for target in document["targets"]:
        mine = [row for row in document["rows"] if row["target"] == target]
        sections.append(Section(title=target, table=_table(mine)))
    return Page(
        title=f"windage audit: {title(document)}",
        intro=(_verdict(document), *_loss_lines(document), *_meanings(document)),
        sections=sections,
        footer=f"seed {document['seed']}; {document['seconds']:.1f} s",
    )


def _meanings(document: Document) -> tuple[str, ...]:
    """What the properties of entries mean, those that were decided."""
    known = {**PROPERTIES, **VALUED, **ALWAYS}
    used = dict.fromkeys(row["property"] for row in document["rows"])
    words = [f"{name}: {known[name]}" for name in used if name in known]
    return ("; ".join(words) + ".",) if words else ()
