"""One decided claim, as tables and JSON show it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

HOLDS_BELOW = 1e-10
SHOWS_ABOVE = 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """A property of a target: what was claimed, what was measured, where, and the verdict.

    Args:
        target: catalogue entry or `module:function`.
        property: name of the claim.
        claimed: in words.
        measured: the size of the largest departure found; None where nothing was measured.
        verdict: holds, does not hold, undecided, undefined, or reported.
        ok: whether the verdict is what was claimed; None where nothing was claimed.
        witness: the problem or input of the measured figure.
        found: what was seen, where a number does not say it.
    """

    target: str
    property: str
    claimed: str
    measured: float | None
    verdict: str
    ok: bool | None
    witness: str
    found: str = ""

    def document(self) -> dict[str, Any]:
        """The row for JSON, which holds no NaN."""
        out = dict(vars(self))
        if self.measured is not None and not math.isfinite(self.measured):
            out["measured"] = None
        return out


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """The size of a departure from a property, and where it was seen."""

    size: float
    witness: str
    found: str = ""


def worst(findings: list[Finding]) -> Finding:
    """The largest departure; one that is not a number counts as the largest."""
    return max(findings, key=lambda f: math.inf if math.isnan(f.size) else f.size)


def decide(size: float) -> str:
    """A departure below 1e-10 is none; one above 1e-6 is one; between them nothing is decided.

    Example:
        >>> decide(1e-14), decide(0.3), decide(1e-8)
        ('holds', 'does not hold', 'undecided')
    """
    if size <= HOLDS_BELOW:
        return "holds"
    return "undecided" if size < SHOWS_ABOVE else "does not hold"


def judged(
    target: str, property: str, finding: Finding, *, claimed: str = "holds", holds: bool = True
) -> Row:
    """The row of a claim that was measured."""
    verdict = decide(finding.size)
    return Row(
        target=target,
        property=property,
        claimed=claimed,
        measured=finding.size,
        verdict=verdict,
        ok=verdict == ("holds" if holds else "does not hold"),
        witness=finding.witness,
        found=finding.found,
    )
