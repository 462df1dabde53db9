"""The document of a run of claims, and its rows as flat tables for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windage.analysis.claims.index import SOURCES
from windage.analysis.claims.reported import REPORTED
from windage.analysis.claims.running import Row


def document(rows: Sequence[Row], *, seconds: float, reported: bool) -> dict[str, Any]:
    """`windage/claims/1`.

    Args:
        rows: as they ran.
        seconds: all of them together.
        reported: whether to add the statements that are reported only, of the documents at hand.
    """
    sources = {row.claim.id[0] for row in rows}
    return {
        "schema": "windage/claims/1",
        "rows": [row.document() for row in rows],
        "failed": [row.claim.id for row in rows if row.failures],
        "reported": [r.document() for r in REPORTED if reported and r.letter in sources],
        "sources": [name for letter, name in SOURCES.items() if letter in sources],
        "seconds": seconds,
    }


def figure_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row a figure: numbers that a table of files can hold."""
    out = []
    for row in found["rows"]:
        errors = row["standard_error"] or {}
        for figure in row["figures"]:
            low, high = ends(figure)
            out.append(
                {
                    "id": row["id"],
                    "figure": figure["name"],
                    "value": figure["value"],
                    "standard_error": errors.get(figure["name"]),
                    "expected": figure["expected"],
                    "lowest": low,
                    "highest": high,
                    "ok": figure["ok"],
                }
            )
    return out


def ends(figure: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The least and the largest value that a figure may have.

    Example:
        >>> ends({"expected": 1.0, "tolerance": 0.5}), ends({"tolerance": [2.0, None]})
        ((0.5, 1.5), (2.0, None))
    """
    tolerance = figure["tolerance"]
    if isinstance(tolerance, list):
        low, high = tolerance
        return low, high
    return figure["expected"] - tolerance, figure["expected"] + tolerance
