"""Sums in buckets of groups, and figures of them with a standard error.

Every figure is a function of sums.  Groups fall into 64 buckets by a hash of their name, so that a
dump of any length needs one pass and fixed memory; leaving out a bucket at a time (jackknife) gives
the standard error, which respects that tokens of a response and responses of a group go together.
Equal groups of two dumps fall into equal buckets, so that differences between dumps are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, final
from zlib import crc32

import numpy as np
from jaxtyping import Float, Int

BUCKETS = 64
FEWEST = 4
Named = Mapping[str, np.ndarray]


def bucket(name: str) -> int:
    """The bucket of a group, the same in every dump.

    Example:
        >>> bucket("3/prompt 17")
        5
    """
    return crc32(name.encode("utf-8", "surrogatepass")) % BUCKETS


@cache
def student(freedom: int) -> float:
    """Half-width of a 95 % interval in standard errors.

    Example:
        >>> round(student(63), 3)
        1.998
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its uncertainty; None: it has none, or is unknown.

    Args:
        value: of everything.
        error: standard error.
        buckets: that hold something.
        left: the value without each of them, by its number.
    """

    value: float | None
    error: float | None = None
    buckets: int = 0
    left: Mapping[int, float] = field(default_factory=dict, repr=False)

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval."""
        return None if self.error is None else student(self.buckets - 1) * self.error

    def beyond(self, value: float) -> float:
        """Standard errors by which the figure exceeds a value; 0 where that is unknown.

        Errors from few buckets count as larger, as Student's t says.
        """
        if self.value is None or self.half_width is None:
            return 0.0
        distance = self.value - value
        if self.half_width == 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / (self.half_width / student(BUCKETS - 1))


@final
class Sums:
    """Sums by name, bucket and bin.

    Args:
        names: of what is added up; the first counts.
        bins: of each name.
    """

    def __init__(self, *names: str, bins: int = 1) -> None:
        self.bins = bins
        self.table = {name: np.zeros((BUCKETS, bins)) for name in names}

    def add(
        self,
        buckets: Int[np.ndarray, " N"],
        bins: Int[np.ndarray, " N"] | int,
        **columns: Float[np.ndarray, " N"],
    ) -> None:
        """Add up columns, each by bucket and bin."""
        place = buckets * self.bins + bins
        for name, column in columns.items():
            found = np.bincount(place, column, minlength=BUCKETS * self.bins)
            self.table[name] += found.reshape(BUCKETS, self.bins)

    def over(self, bins: Any = slice(None)) -> dict[str, np.ndarray]:
        """Sums of some bins together, a number a bucket."""
        return {name: table[:, bins].reshape(BUCKETS, -1).sum(1) for name, table in
                self.table.items()}  # fmt: skip


def replicates(sums: Named) -> tuple[dict[str, np.ndarray], list[int]]:
    """Sums of everything, then of everything but one bucket, and the buckets that hold something.

    Args:
        sums: by name, the first axis the bucket; those that hold something differ from 0.
    """
    filled = np.zeros(BUCKETS, dtype=bool)
    for table in sums.values():
        filled |= (table != 0).reshape(BUCKETS, -1).any(1)
    out = {}
    for name, table in sums.items():
        whole = table.sum(0, keepdims=True)
        out[name] = np.concatenate([whole, whole - table[filled]])
    return out, np.flatnonzero(filled).tolist()


def figures(sums: Named, function: Callable[[Named], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Values of a function of sums and their standard errors; NaN where there is none.

        error^2 = (B - 1) / B * sum over buckets of (left out - mean of left out)^2

    Args:
        sums: by name, the first axis the bucket.
        function: of sums whose first axis counts replicates.

    Example:
        >>> n = np.zeros(64); n[:4] = 1.0
        >>> x = np.zeros(64); x[:4] = [1.0, 2.0, 3.0, 4.0]
        >>> value, error = figures({"n": n, "x": x}, lambda s: s["x"] / s["n"])
        >>> float(value), round(float(error), 6) == round((5 / 3 / 4) ** 0.5, 6)
        (2.5, True)
    """
    together, filled = replicates(sums)
    count = len(filled)
    with np.errstate(all="ignore"):
        found = np.asarray(function(together), dtype=np.float64)
    left = found[1:]
    if count < FEWEST:
        return found[0], np.full_like(found[0], np.nan)
    with np.errstate(all="ignore"):
        square = (left - left.mean(0)) ** 2
        return found[0], np.sqrt(square.sum(0) * (count - 1) / count)


def figure(sums: Named, function: Callable[[Named], np.ndarray]) -> Figure:
    """One number of sums with its standard error."""
    together, filled = replicates(sums)
    with np.errstate(all="ignore"):
        found = np.asarray(function(together), dtype=np.float64)
    return jackknife(float(found[0]), dict(zip(filled, found[1:].tolist(), strict=True)))


def jackknife(value: float | None, left: Mapping[int, float | None]) -> Figure:
    """A figure from its value and its values with one bucket left out at a time.

    Example:
        >>> round(jackknife(3.0, {0: 2.0, 1: 4.0, 2: 2.0, 3: 4.0}).error, 6) == round(3 ** 0.5, 6)
        True
    """
    if value is None or not math.isfinite(value):
        return Figure(value=None, buckets=len(left))
    known = {number: v for number, v in left.items() if v is not None and math.isfinite(v)}
    if len(known) < len(left) or len(known) < FEWEST:
        return Figure(value=value, buckets=len(left))
    spread = float(np.var(list(known.values())))
    error = math.sqrt(spread * (len(known) - 1))
    return Figure(value=value, error=error, buckets=len(known), left=known)


def difference(mine: Figure, other: Figure) -> Figure:
    """A figure less another; what groups of the same name share cancels in the error.

    Example:
        >>> a = jackknife(3.0, {0: 2.0, 1: 4.0, 2: 2.0, 3: 4.0})
        >>> found = difference(a, a)
        >>> found.value, found.error
        (0.0, 0.0)
    """
    if mine.value is None or other.value is None:
        return Figure(value=None)
    numbers = sorted({*mine.left, *other.left}) if mine.left and other.left else []
    left = {n: mine.left.get(n, mine.value) - other.left.get(n, other.value) for n in numbers}
    return jackknife(mine.value - other.value, left)
