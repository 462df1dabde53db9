"""What decides between estimators, from the exact bias and variance of rows alone.

The mean squared error of n batches is

    MSE(n) = |E g - grad J|^2 + (trace of Cov g) / n

One batch holds every prompt once, so it is one group a prompt and G responses of each.  Each row
gets, with the relative figures and with the rescaled ones (`_rescaled`):

    relative_error_by_groups   sqrt(MSE) / |grad J| at 1, 10, 100, ... batches, by number of groups
    groups_needed              fewest groups at which it is at most the error asked for
    responses_needed           the same in responses
    crossover_groups           fewest groups at which `crossover_against`, the quietest unbiased
                               entry of the same point, has the smaller error
    crossover_responses        the same in responses
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

Row = Mapping[str, Any]

ERROR = 0.1
UNBIASED = 1e-10
BATCHES = tuple(10**k for k in range(7))
WHOLE = 2**53
FORMS = ("", "_rescaled")
NEEDED = ("groups_needed", "responses_needed", "groups_needed_reason")
CROSSED = ("crossover_groups", "crossover_responses", "crossover_against")
EMPTY: dict[str, dict[str, Any]] = {
    form: dict.fromkeys(n + form for n in ("relative_error_by_groups", *NEEDED, *CROSSED))
    for form in FORMS
}
NAMES = tuple(name for form in FORMS for name in EMPTY[form])


class Error(NamedTuple):
    """Squared bias and variance of one batch, in units of |grad J|^2."""

    bias: float
    variance: float

    def after(self, batches: float) -> float:
        """Root mean squared error of the average of so many batches, in units of |grad J|.

        Example:
            >>> Error(0.25, 4.0).after(16)
            0.7071067811865476
        """
        return math.sqrt(self.bias + self.variance / batches)


def error_of(row: Row, form: str) -> Error | None:
    """A row's squared bias and variance; None where it has none.

    Args:
        row: of a study.
        form: "" or "_rescaled".
    """
    bias, variance = row.get(f"relative_bias{form}"), row.get(f"variance{form}")
    norm = row.get("gradient_norm")
    if bias is None or variance is None or not norm:
        return None
    found = Error(bias * bias, max(0.0, variance) / norm / norm)
    return found if math.isfinite(sum(found)) else None


def least(start: float, holds: Any) -> int | float | None:
    """The least whole number near a start, rounding apart, at which a condition holds."""
    if start > WHOLE:
        return start if math.isfinite(start) else None
    first = max(1, math.ceil(start) - 2)
    return next((n for n in range(first, first + 5) if holds(n)), None)


def batches_needed(error: Error, wanted: float) -> int | float | None:
    """Fewest batches with a root mean squared error of at most `wanted`; None: bias alone is more.

    Beyond 2^53 it is a real number.

    Example:
        >>> batches_needed(Error(0.0, 4.0), 0.5), batches_needed(Error(0.25, 4.0), 0.5)
        (16, None)
    """
    room = wanted**2 - error.bias
    if room <= 0:
        return 1 if room == 0 and error.variance == 0 else None
    return least(error.variance / room, lambda n: error.bias + error.variance / n <= wanted**2)


def crossover(biased: Error, unbiased: Error) -> int | float | None:
    """Fewest batches at which the second has the smaller mean squared error; None: never.

    Beyond 2^53 it is a real number.

    Example:
        >>> crossover(Error(0.25, 1.0), Error(0.0, 5.0))
        17
    """
    lead = biased.bias - unbiased.bias
    if lead <= 0:
        return None

    def behind(n: int) -> bool:
        return biased.bias + biased.variance / n > unbiased.bias + unbiased.variance / n

    return least((unbiased.variance - biased.variance) / lead, behind)


def decided(
    rows: Sequence[Row], *, prompts: int, keys: Sequence[str] = (), wanted: float = ERROR
) -> list[dict[str, Any]]:
    """The rows with what decides between them.

    Args:
        rows: of a study, with `relative_bias`, `variance`, `gradient_norm` and `group_size`.
        prompts: groups of a batch.
        keys: of the sweep: rows are compared where they have the same values.
        wanted: root mean squared error, in units of |grad J|.
    """
    places = [tuple(row.get(key) for key in keys) for row in rows]
    points: dict[tuple[Any, ...], list[Row]] = {}
    for at, row in zip(places, rows, strict=True):
        points.setdefault(at, []).append(row)
    quiet = {at: [_quietest(here, form) for form in FORMS] for at, here in points.items()}
    out = []
    for at, row in zip(places, rows, strict=True):
        made = dict(row)
        for form, against in zip(FORMS, quiet[at], strict=True):
            made |= _columns(row, form, prompts, wanted, against)
        out.append(made)
    return out


def _quietest(rows: Sequence[Row], form: str) -> Row | None:
    """The exact row of least variance among those without bias."""
    found = [
        row
        for row in rows
        if row[f"relative_bias{form}"] is not None
        and row["standard_error"] is None
        and row[f"relative_bias{form}"] < UNBIASED
        and (row["scale"] or 0.0) > 0
        and row[f"variance{form}"] is not None
    ]
    return min(found, key=lambda row: row[f"variance{form}"], default=None)


@cache
def _labels(prompts: int) -> tuple[tuple[int, str], ...]:
    """Numbers of batches, and of groups in words."""
    return tuple((n, str(n * prompts)) for n in BATCHES)


def _columns(
    row: Row, form: str, prompts: int, wanted: float, against: Row | None
) -> dict[str, Any]:
    """The columns of one form; None where the row has no figures, with the reason."""
    out = dict(EMPTY[form])
    error = error_of(row, form)
    if form and (row["scale"] or 0.0) <= 0:
        error = None
    if error is None:
        missing = "no bias and variance" + (" after rescaling" if form else "")
        out[f"groups_needed_reason{form}"] = missing
        return out
    groups, group_size = prompts, row["group_size"]
    bias, variance = error
    out[f"relative_error_by_groups{form}"] = {
        label: math.sqrt(bias + variance / n) for n, label in _labels(prompts)
    }
    batches = batches_needed(error, wanted)
    if batches is None:
        why = f"the bias alone is {math.sqrt(bias):.3g}, above {wanted:g}"
        if row.get(f"bias_resolved{form}") is False:
            why = f"the bias is not told from 0 by sampling, but not from {wanted:g} either"
        out[f"groups_needed_reason{form}"] = why
    else:
        out[f"groups_needed{form}"] = groups * batches
        out[f"responses_needed{form}"] = groups * batches * group_size
    if against is None or math.sqrt(error.bias) < UNBIASED:
        return out
    other = error_of(against, form)
    crossed = None if other is None else crossover(error, other)
    if crossed is not None:
        out[f"crossover_groups{form}"] = groups * crossed
        out[f"crossover_responses{form}"] = groups * crossed * group_size
        out[f"crossover_against{form}"] = against["estimator"]
    return out
