"""Laws of lengths and times: how many tokens a response has, how long a verifier takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from windage.estimators.errors import BadInput, positive, within


@runtime_checkable
class Law(Protocol):
    """A law of numbers that are 0 or more, with a finite mean."""

    @property
    def mean(self) -> float:
        """Its expectation."""
        ...

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Independent values; two calls give what one call for both would give."""
        ...


@final
@dataclass(frozen=True)
class Equal:
    """Always the mean.

    Example:
        >>> Equal(2.0).draw(np.random.default_rng(0), 3)
        array([2., 2., 2.])
    """

    mean: float = 1.0

    def __post_init__(self) -> None:
        within(0, inf, mean=self.mean)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """The mean, so many times."""
        return np.full(size, float(self.mean))


@final
@dataclass(frozen=True)
class Exponential:
    """Exponential, the law without memory."""

    mean: float = 1.0

    def __post_init__(self) -> None:
        positive(mean=self.mean)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Independent values."""
        return generator.exponential(size=size) * self.mean


@final
@dataclass(frozen=True)
class Lognormal:
    """Lognormal: exp of a normal with standard deviation `sigma`."""

    mean: float = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        positive(mean=self.mean)
        within(0, 5, sigma=self.sigma)

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Independent values."""
        normal = generator.normal(size=size)
        return self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)


@final
@dataclass(frozen=True, eq=False)
class Empirical:
    """Any of the observed values, with equal probability.

    Args:
        values: observed, 0 or more.
        source: where they come from, for tables.
    """

    values: NDArray[np.float64] = field(repr=False)
    source: str = "values"

    def __post_init__(self) -> None:
        if not len(self.values):
            raise BadInput(f"{self.source}: no values; allowed: one value or more")
        for row, value in enumerate(self.values):
            if not 0 <= value < inf:
                raise BadInput(
                    f"{self.source}: value {row} is {value:g}; allowed: finite, 0 or more"
                )

    @property
    def mean(self) -> float:
        """Mean of the observed values."""
        return float(self.values.mean())

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Values picked with replacement."""
        return self.values[generator.integers(len(self.values), size=size)]


@final
@dataclass(frozen=True, eq=False)
class Observed:
    """Responses as they were seen: length, seconds in the slot and seconds of the verdict together.

    Args:
        tokens: lengths, above 0.
        seconds: in the slot, a response each.
        verifier: from there to the verdict.
        source: where they come from, for tables.
    """

    tokens: NDArray[np.float64] = field(repr=False)
    seconds: NDArray[np.float64] = field(repr=False)
    verifier: NDArray[np.float64] = field(repr=False)
    source: str = "values"

    def __post_init__(self) -> None:
        sizes = {len(self.tokens), len(self.seconds), len(self.verifier)}
        if len(sizes) > 1 or 0 in sizes:
            raise BadInput(
                f"{self.source}: {sorted(sizes)} values; allowed: as many of each, not 0"
            )
        for name in ("tokens", "seconds", "verifier"):
            values = getattr(self, name)
            fine = np.isfinite(values) & (values > 0 if name == "tokens" else values >= 0)
            if not fine.all():
                row = int(np.argmin(fine))
                allowed = "above 0" if name == "tokens" else "0 or more"
                raise BadInput(
                    f"{self.source}: {name} of response {row} is {values[row]:g}; allowed: finite, "
                    f"{allowed}"
                )
        if not self.seconds.sum() > 0:
            raise BadInput(f"{self.source}: every response took 0 s; allowed: a mean above 0")

    def draw(
        self, generator: np.random.Generator, size: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Tokens, seconds a token and seconds of the verdict of responses picked with replacement.

        Example:
            >>> two = Observed(np.array([1.0, 4.0]), np.array([3.0, 2.0]), np.array([0.0, 5.0]))
            >>> [column.tolist() for column in two.draw(np.random.default_rng(1), 3)]
            [[1.0, 4.0, 4.0], [3.0, 0.5, 0.5], [0.0, 5.0, 5.0]]
        """
        rows = generator.integers(len(self.tokens), size=size)
        return self.tokens[rows], (self.seconds / self.tokens)[rows], self.verifier[rows]

    def __str__(self) -> str:
        return f"observed({Path(self.source).name}, {self.tokens.mean():g})"


def describe(law: Law) -> str:
    """A law in one word and its mean.

    Example:
        >>> describe(Lognormal(100.0, 0.5)), describe(Equal(3))
        ('lognormal(100, 0.5)', 'equal(3)')
    """
    if isinstance(law, Empirical):
        return f"empirical({Path(law.source).name}, {law.mean:g})"
    name = type(law).__name__.lower()
    return f"{name}({law.mean:g}{f', {law.sigma:g}' if isinstance(law, Lognormal) else ''})"
