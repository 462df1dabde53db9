"""Render docs/peers.md from the measured rows; needs no framework and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
HEAD = """# Losses of other frameworks, audited

Every loss is called as its trainer calls it, on structured and random inputs (finite, |log-ratio|
at most 5), and minus its gradient is compared with the coefficients that the claim writes down
(benchmarks/peers/claimed.py and the catalogue's members). Regenerate with `make audit-trl` and
`make audit-verl`; each builds its own environment. Differences are relative to the largest
coefficient of an input. A claim is what the framework's documentation or the paper it names says.
"""
NOISE = 1e-5


def measured(row: dict[str, Any]) -> str:
    """What the gradients showed."""
    size = "not finite" if row["difference"] is None else f"{row['difference']:.2g}"
    words = [f"as claimed (largest difference {size})"] if row["holds"] else []
    if not row["holds"]:
        words.append(f"differs by up to {size}; nearest entry: {row['closest']}")
    return ". ".join(words)


def deviation(row: dict[str, Any]) -> str:
    """Everything that departs from the claim or from what every loss should do."""
    notes = [row["witness"]] if row["witness"] else []
    if row["partition"] > NOISE:
        notes.append(f"two micro-batches change the gradient by {row['partition']:.2g}")
    if row["padding"] is None:
        notes.append("arbitrary numbers in the padding make it NaN")
    elif row["padding"] > NOISE:
        notes.append(f"arbitrary numbers in the padding change it by {row['padding']:.2g}")
    if not row["repeatable"]:
        notes.append("not the same twice")
    if row["raised"]:
        notes.append(f"raises on {row['raised']}")
    return "; ".join(notes) or "none"


def cells(*texts: str) -> str:
    """One row of a table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    return [cells(*columns), cells(*("---" for _ in columns)), *(cells(*row) for row in rows)]


def losses(found: dict[str, Any]) -> list[str]:
    """The table of losses."""
    who = (found["peer"], found["version"])
    return table(
        ("peer", "version", "loss", "what it claims", "measured", "deviation"),
        [(*who, r["name"], r["claims"], measured(r), deviation(r)) for r in found["losses"]],
    )


def advantages(found: dict[str, Any]) -> list[str]:
    """The table of advantage estimators."""
    rows = [
        (
            r["name"],
            r["claims"],
            "as claimed" if r["difference"] <= NOISE else f"differs by up to {r['difference']:.2g}",
            f"{r['scale']:.4g}",
            "0" if r["bias"] <= NOISE else f"{r['bias']:.4f}",
        )
        for r in found["advantages"]
    ]
    columns = ("estimator", "what it claims", "measured", "scale", "bias after rescaling")
    return [
        "Called in float32 on random groups, one of them of equal rewards. Scale and bias are "
        "exact: the mean of advantage times score over all groups of three of the problem TREE, "
        "on-policy, against the gradient of the expected reward.",
        "",
        *table(columns, rows),
    ]


def findings(found: dict[str, Any]) -> list[str]:
    """The table of single calls."""
    return table(
        ("call", "expected", "measured", "deviates"),
        [
            (r["what"], r["claimed"], r["measured"], "yes" if r["deviates"] else "no")
            for r in found["findings"]
        ],
    )


def render() -> str:
    """The page."""
    parts = [HEAD]
    for path in sorted(RESULTS.glob("peers-*.json")):
        found = json.loads(path.read_text())
        title = f"## {found['peer']} {found['version']} (torch {found['torch']})"
        parts += [title, "", "### Losses", "", *losses(found), ""]
        if "advantages" in found:
            parts += ["### Advantage estimators", "", *advantages(found), ""]
        parts += ["### Single calls", "", *findings(found), ""]
    return "\n".join(parts).rstrip("\n") + "\n"
