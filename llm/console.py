"""One line a step for who watches a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Name in the line, metric, and how it is written.
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", lambda v: f"{v:.3f}"),
    ("invalid", "reward/invalid", lambda v: f"{100 * v:.0f} %"),
    ("lag", "lag/mean", lambda v: f"{v:.1f}"),
    ("k3", "mismatch/k3", lambda v: f"{v:.1e}"),
    ("ess", "ratio/ess", lambda v: f"{v:.3f}"),
    ("grad", "update/gradient_norm", lambda v: f"{v:.2g}"),
    ("tok/s", "time/tokens_per_second", lambda v: f"{v:,.0f}"),
)


def line(record: Mapping[str, Any], steps: int | None = None) -> str:
    """A record as one line; what it lacks is left out.

    Example:
        >>> line({"step": 3, "reward/mean": 0.25, "reward/invalid": 0.5}, steps=20)
        'step  3/20  reward 0.250  invalid 50 %'
    """
    number = f"{record['step']}"
    if steps is not None:
        number = f"{number.rjust(len(str(steps)))}/{steps}"
    words = [f"step {number}"]
    for name, metric, write in SHOWN:
        value = record.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            words.append(f"{name} {write(value)}")
    return "  ".join(words)


def watcher(steps: int | None = None, stream: Any = None) -> Callable[[Mapping[str, Any]], None]:
    """Print each record as a line on standard error; a stream that was closed is let be."""
    out = sys.stderr if stream is None else stream

    def show(record: Mapping[str, Any]) -> None:
        try:
            print(line(record, steps), file=out, flush=True)
        except (BrokenPipeError, ValueError):
            return

    return show
