"""What a claim is: figures with tolerances, a verdict that follows from them, and a registry.

A row is a function that measures and returns an `Outcome`; `@claim` stands beside it with the
statement in our words and the verdict that the specification expects.  The verdict itself is
decided by the function from what it measured:

    stands and not limited   holds
    stands and limited       holds only if (the condition)
    not stands               does not hold as stated (the condition says what does)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, final

from windage.analysis.claims.index import IDS

Verdict = Literal["holds", "holds only if", "does not hold as stated"]
Kind = Literal["exact", "simulated", "counted"]
ZERO = 1e-12


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number and what it may be.

    Args:
        name: what was measured.
        value: as measured; NaN where it could not be.
        expected: the number stated, or None where only a band is.
        tolerance: the largest distance from `expected`, or the two ends of a band, None: open.
        kind: how it was measured.
        standard_error: of a simulated value.
    """

    name: str
    value: float
    expected: float | None
    tolerance: float | tuple[float | None, float | None]
    kind: Kind = "exact"
    standard_error: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the value lies where it may."""
        if isinstance(self.tolerance, tuple):
            low, high = self.tolerance
            above = low is None or self.value >= low
            return above and (high is None or self.value <= high) and not math.isnan(self.value)
        assert self.expected is not None
        return self.value == self.expected or abs(self.value - self.expected) <= self.tolerance

    def document(self) -> dict[str, Any]:
        """The figure's fields in `--json`; a value that is no finite number becomes null."""
        tolerance = list(self.tolerance) if isinstance(self.tolerance, tuple) else self.tolerance
        return {
            "name": self.name,
            "value": self.value if math.isfinite(self.value) else None,
            "expected": self.expected,
            "tolerance": tolerance,
            "ok": self.ok,
        }


def exact(name: str, value: Any, printed: str) -> Figure:
    """A figure known exactly, met to one unit in the last digit of the printed number.

    Example:
        >>> exact("bias", 0.34896, "0.3490").ok, exact("bias", 0.3488, "0.3490").ok
        (True, False)
    """
    number = Decimal(printed.replace(",", "").replace("\N{MINUS SIGN}", "-"))
    unit = 10.0 ** int(number.as_tuple().exponent)
    return Figure(
        name=name, value=float(value), expected=float(number), tolerance=unit * (1 + 1e-9)
    )


def series(
    template: str, labels: Iterable[Any], values: Iterable[Any], printed: str
) -> list[Figure]:
    """Exact figures named `template.format(label)`; printed numbers are separated by ", ".

    Example:
        >>> [f.name for f in series("G = {}", (2, 3), (0.5, 0.6667), "0.50, 0.667")]
        ['G = 2', 'G = 3']
    """
    rows = zip(labels, values, printed.split(", "), strict=True)
    return [exact(template.format(label), value, text) for label, value, text in rows]


def equal(name: str, value: Any, expected: float, *, tolerance: float = ZERO) -> Figure:
    """A figure whose exact value is known in full; the tolerance is relative.

    Example:
        >>> equal("scale", 2 / 3, 2 / 3).ok
        True
    """
    allowed = tolerance * max(1.0, abs(expected))
    return Figure(name=name, value=float(value), expected=expected, tolerance=allowed)


def zero(name: str, value: Any, *, tolerance: float = ZERO) -> Figure:
    """A figure that must vanish; give it relative to what it is compared with.

    Example:
        >>> zero("drift", 1e-17).ok
        True
    """
    return equal(name, value, 0.0, tolerance=tolerance)


def counted(name: str, value: float, expected: float) -> Figure:
    """Integer bookkeeping, met exactly.

    Example:
        >>> counted("refreshes", 16, 16).ok
        True
    """
    return Figure(name=name, value=value, expected=expected, tolerance=0.0, kind="counted")


def band(
    name: str,
    value: Any,
    low: float | None,
    high: float | None,
    *,
    expected: float | None = None,
    standard_error: float | None = None,
    kind: Kind = "simulated",
) -> Figure:
    """A figure that must lie between two ends; None leaves an end open.

    Example:
        >>> band("seeds that fall", 7, 7, 8).ok
        True
    """
    return Figure(
        name=name,
        value=float(value),
        expected=expected,
        tolerance=(low, high),
        kind=kind,
        standard_error=standard_error,
    )


def around(
    name: str, value: Any, expected: float, margin: float, *, standard_error: float | None = None
) -> Figure:
    """A simulated figure within `margin` of the stated number.

    Example:
        >>> around("throughput", 63.1, 64.0, 0.03 * 64.0, standard_error=0.2).ok
        True
    """
    return band(
        name,
        value,
        expected - margin,
        expected + margin,
        expected=expected,
        standard_error=standard_error,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a row measured, and what follows.

    Args:
        figures: with their tolerances.
        stands: the measured figures support the statement (where it has a condition: under it).
        limited: the measured figures show it fail outside the condition.
        seeds: numbers of the generators used, where anything was drawn.
    """

    figures: Sequence[Figure]
    stands: bool
    limited: bool = False
    seeds: tuple[int, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """One of the three."""
        if not self.stands:
            return "does not hold as stated"
        return "holds only if" if self.limited else "holds"


Measure = Callable[..., Outcome]


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, how to measure it, and what the specification expects.

    Args:
        id: stable.
        section: of the document.
        statement: in our words.
        verdict: expected.
        condition: under which it holds, or what holds instead.
        note: a limit that does not change the verdict.
        kind: simulated where any figure is; such a row's function takes `seed`.
        problem, formula: for the page.
        measure: the row.
    """

    id: str
    section: str
    statement: str
    verdict: Verdict
    condition: str
    note: str
    kind: Kind
    problem: str
    formula: str
    measure: Measure


REGISTRY: dict[str, Claim] = {}


def claim(
    claim_id: str,
    *,
    section: str,
    statement: str,
    verdict: Verdict = "holds",
    condition: str = "",
    note: str = "",
    kind: Kind = "exact",
    problem: str,
    formula: str,
) -> Callable[[Measure], Measure]:
    """Register the function below it as the row of a claim.

    Raises:
        ValueError: an id that does not exist or is taken, or a limit without its condition.
    """
    if claim_id not in IDS or claim_id in REGISTRY:
        raise ValueError(f"claim {claim_id} is {'taken' if claim_id in REGISTRY else 'unknown'}")
    if (verdict == "holds") == bool(condition):
        raise ValueError(f"claim {claim_id}: a condition belongs to every verdict but 'holds'")

    def register(measure: Measure) -> Measure:
        REGISTRY[claim_id] = Claim(
            id=claim_id,
            section=section,
            statement=statement,
            verdict=verdict,
            condition=condition,
            note=note,
            kind=kind,
            problem=problem,
            formula=formula,
            measure=measure,
        )
        return measure

    return register
