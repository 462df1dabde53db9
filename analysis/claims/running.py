"""Run claims: import the rows, measure, time, and say which failed."""

from __future__ import annotations

import math
import pkgutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from windage.analysis import claims as package
from windage.analysis.claims.claim import REGISTRY, Claim, Outcome
from windage.analysis.claims.index import IDS, source


def registry() -> Mapping[str, Claim]:
    """Every claim by id; rows live in the modules named after their document: b_*, t_*, g_*."""
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith(("b_", "t_", "g_")):
            import_module(f"{package.__name__}.{module.name}")
    return {i: REGISTRY[i] for i in IDS if i in REGISTRY}


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim that ran."""

    claim: Claim
    outcome: Outcome
    seconds: float

    @property
    def failures(self) -> list[str]:
        """What is wrong with it, in words; empty where nothing is."""
        wrong = [
            f"{f.name} is {f.value:.6g}, expected {allowed(f.expected, f.tolerance)}"
            for f in self.outcome.figures
            if not f.ok
        ]
        if self.outcome.verdict != self.claim.verdict:
            wrong.append(f"verdict '{self.outcome.verdict}', expected '{self.claim.verdict}'")
        return wrong

    def document(self) -> dict[str, Any]:
        """The row in `--json`."""
        errors = {
            f.name: f.standard_error for f in self.outcome.figures if f.standard_error is not None
        }
        return {
            "id": self.claim.id,
            "source": source(self.claim.id),
            "section": self.claim.section,
            "statement": self.claim.statement,
            "kind": self.claim.kind,
            "figures": [f.document() for f in self.outcome.figures],
            "verdict": self.outcome.verdict,
            "expected_verdict": self.claim.verdict,
            "condition": self.claim.condition or None,
            "seeds": list(self.outcome.seeds) or None,
            "standard_error": errors or None,
            "seconds": self.seconds,
        }


def allowed(expected: float | None, tolerance: float | tuple[float | None, ...]) -> str:
    """Words for what a figure may be, with as many digits as count.

    Example:
        >>> allowed(0.5, (0.4, None)), allowed(0.349, 1e-4), allowed(0.0, 1e-12), allowed(4, 0)
        ('0.5 (at least 0.4)', '0.3490 ± 0.0001', '0 ± 1e-12', '4')
    """
    if isinstance(tolerance, tuple):
        low, high = tolerance
        if low is not None and high is not None:
            words = f"{low:g} to {high:g}"
        else:
            words = f"at least {low:g}" if low is not None else f"at most {high:g}"
        return words if expected is None else f"{expected:g} ({words})"
    assert expected is not None
    if expected == 0 or not 0 < tolerance < 1:
        return f"{expected:g}" if tolerance == 0 else f"{expected:g} ± {tolerance:.2g}"
    digits = -math.floor(math.log10(tolerance))
    return f"{expected:.{min(digits, 9)}f} ± {tolerance:.2g}"


def run(claim: Claim, *, seed: int = 0) -> Row:
    """Measure one claim; only simulated rows look at the seed."""
    start = time.perf_counter()
    outcome = claim.measure(seed=seed) if claim.kind == "simulated" else claim.measure()
    return Row(claim=claim, outcome=outcome, seconds=time.perf_counter() - start)


def run_all(ids: Iterable[str], *, kind: str | None = None, seed: int = 0) -> Iterator[Row]:
    """Rows of the chosen claims, one by one as they are measured."""
    claims = registry()
    for name in ids:
        if name in claims and kind in (None, claims[name].kind):
            yield run(claims[name], seed=seed)
