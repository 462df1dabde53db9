"""Lengths and times of the responses of a dump, as a pipeline draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Any

import numpy as np

from windage.analysis.diagnose.rows import Row
from windage.estimators.errors import BadInput
from windage.toy.pipeline.laws import Empirical, Observed

APART = "generation and verdict"
WHOLE = "request to verdict, all of it in the slot"
NONE = "none: the setting token_seconds"


def observed(rows: Iterable[Row], source: str) -> tuple[Observed | Empirical, dict[str, Any]]:
    """The law of responses, and what was told of it.

    A response's tokens are those that the policy chose.  Its seconds in the slot are `elapsed` less
    `verifier_seconds`, or all of it where the dump does not say what the verdict took; a dump
    without times gives lengths alone.

    Args:
        rows: of a dump; a rejected response was written as well and counts.
        source: its name.

    Returns:
        The law, and `rows`, `used`, `set_aside` (a count by reason), `seconds` (of what).

    Raises:
        BadInput: no row.
    """
    found = [(float(row.mask.sum()), *_times(row), row.verifier_seconds) for row in rows]
    if not found:
        raise BadInput(f"{source}: no responses; allowed: one response or more")
    timed = [row for row in found if row[1] is not None]
    if not timed:
        told = {"rows": len(found), "used": len(found), "set_aside": {}, "seconds": NONE}
        return Empirical(np.array([length for length, *_ in found]), source), told
    good = [row for row in timed if 0 <= (row[1] or 0.0) < inf and 0 <= row[2] < inf]
    if not sum(row[1] or 0.0 for row in good) > 0:
        raise BadInput(f"{source}: no response took any time; allowed: seconds above 0")
    aside = Counter(
        {"no seconds": len(found) - len(timed), "seconds below 0": len(timed) - len(good)}
    )
    told = {
        "rows": len(found),
        "used": len(good),
        "set_aside": {reason: count for reason, count in aside.items() if count},
        "seconds": WHOLE if any(row[3] is None for row in good) else APART,
    }
    tokens, seconds, verifier = (np.array([row[k] for row in good], float) for k in range(3))
    return Observed(tokens, seconds, verifier, source), told


def _times(row: Row) -> tuple[float | None, float]:
    """Seconds in the slot, and of the verdict."""
    verdict = row.verifier_seconds or 0.0
    return None if row.elapsed is None else row.elapsed - verdict, verdict
