"""`windage claims`: the documents' statements, executed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from windage.analysis.claims.index import KINDS, chosen, source
from windage.cli.output import one_thread, write
from windage.estimators.errors import BadInput, unknown

if TYPE_CHECKING:
    from windage.analysis.claims.running import Row


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what selects claims."""
    parser.add_argument("--only", metavar="ID,ID", help="these claims only, such as B-07,T-12")
    parser.add_argument("--source", metavar="FILE", help="claims of one document only")
    parser.add_argument("--kind", metavar="|".join(KINDS), help="claims measured in one way only")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen claims; 1 where a figure or a verdict is not as expected."""
    only = None if arguments.only is None else [i.strip() for i in arguments.only.split(",")]
    ids = chosen(only, arguments.source)
    if arguments.kind is not None and arguments.kind not in KINDS:
        raise unknown("kind", arguments.kind, KINDS)
    from windage.analysis.claims.document import document

    start = time.perf_counter()
    rows = _measure(ids, arguments)
    if not rows:
        words = ", ".join(ids) if len(ids) < 5 else f"the {len(ids)} claims chosen"
        raise BadInput(f"--kind {arguments.kind}: none of {words} is measured so")
    whole = only is None and arguments.kind is None
    found = document(rows, seconds=time.perf_counter() - start, reported=whole)
    _show(found, arguments)
    for row in rows:
        for words in row.failures:
            print(f"windage claims: {row.claim.id}: {words}", file=sys.stderr)
    if found["failed"]:
        print(f"windage claims: failed: {', '.join(found['failed'])}", file=sys.stderr)
    return 1 if found["failed"] else 0


def _measure(ids: tuple[str, ...], arguments: argparse.Namespace) -> list[Row]:
    """Run claim by claim, each shown as it ends."""
    from windage.analysis.claims.page import text, verdict
    from windage.analysis.claims.running import run_all

    one_thread()
    rows: list[Row] = []
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    for row in run_all(ids, kind=arguments.kind, seed=arguments.seed):
        shown = row.document()
        if arguments.json:
            mark = "failed" if row.failures else "ok"
            print(
                f"{row.claim.id}  {row.seconds:6.2f} s  {mark}  {verdict(shown)}", file=sys.stderr
            )
        else:
            print(_heading(rows[-1] if rows else None, row), end="")
            print(text(shown, row.claim.note, width), end="\n\n", flush=True)
        rows.append(row)
    return rows


def _heading(before: Row | None, row: Row) -> str:
    """The document and the section, where either is new."""
    place = (source(row.claim.id), row.claim.section)
    last = None if before is None else (source(before.claim.id), before.claim.section)
    if place == last:
        return ""
    title = "" if last is not None and place[0] == last[0] else f"{place[0]}\n\n"
    return f"{title}{place[1]}\n\n"


def _show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    from windage.analysis.claims.document import figure_rows
    from windage.analysis.claims.page import reported_text, summary_line
    from windage.analysis.tables import frame

    if arguments.out is not None:
        write(found, arguments.out)
        figures = frame(figure_rows(found))
        figures.to_csv(arguments.out / "claims_figures.csv", index=False, lineterminator="\n")
        figures.to_parquet(arguments.out / "claims_figures.parquet", index=False)
    if arguments.json:
        print(json.dumps(found, allow_nan=False))
        return
    if found["reported"]:
        print(reported_text(found["reported"], 100), end="\n\n")
    print(summary_line(found))
