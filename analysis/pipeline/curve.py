"""A sigmoid through scores by compute, with intervals from the profile of the likelihood.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)        A ceiling, B efficiency, C_mid half the gain

Errors are independent and normal with one unknown spread.  The 95 % interval of a parameter holds
the values at which the least sum of squares over all others stays below

    S_min * (1 + t^2 / (n - p))        t: Student's, n - p degrees of freedom, p parameters

References:
    Khatri et al., 2025, arXiv:2510.13786 (the curve); Bates and Watts, 1988 (profile t).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, isfinite, log
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from windage.estimators.errors import BadInput

Floats = NDArray[np.float64]
NAMES = ("A", "B", "C_mid")
LEVEL = 0.95
FAR = 1e4  # gains of the data's range beyond which a ceiling counts as unbounded
STEEPEST, FLATTEST, DECADES = 1e3, 1e-3, 12.0
NOWHERE = 100.0  # far below, in logarithms


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Scores by compute, in order of compute; `base` is R0 where it is known."""

    compute: Floats
    score: Floats
    base: float | None = None

    def __post_init__(self) -> None:
        if len(self.compute) != len(self.score):
            raise BadInput(f"{len(self.compute)} of compute, {len(self.score)} scores")
        for row, (c, r) in enumerate(zip(self.compute, self.score, strict=True)):
            if not (isfinite(c) and c > 0 and isfinite(r)):
                raise BadInput(
                    f"row {row}: compute {c:g}, score {r:g}; allowed: compute above 0, both finite"
                )
        least = self.parameters + 2
        if len(np.unique(self.compute)) < least:
            raise BadInput(
                f"{len(np.unique(self.compute))} different values of compute; allowed: {least} or "
                "more"
            )
        if np.ptp(self.score) == 0:
            raise BadInput("all scores are equal; allowed: scores that change")

    @property
    def parameters(self) -> int:
        """Number of parameters to be fitted."""
        return 3 if self.base is not None else 4


def sigmoid(compute: Floats, a: float, b: float, c_mid: float, base: float) -> Floats:
    """R(C).

    Example:
        >>> sigmoid(np.array([1.0, 1e9]), 0.8, 2.0, 1.0, 0.2).round(3)
        array([0.5, 0.8])
    """
    return base + (a - base) * _share(np.log(compute), log(b), log(c_mid))


def _share(log_compute: Floats, log_b: float, log_mid: float) -> Floats:
    """Share of the gain: 1 / (1 + (C_mid / C)^B)."""
    from scipy.special import expit

    return expit(exp(min(log_b, 20.0)) * (log_compute - log_mid))


def _linear(d: Data, share: Floats, ceiling: float | None) -> tuple[Floats, float, float]:
    """Residuals, A and R0, which enter linearly, at their best."""
    known_base, known_top = d.base is not None, ceiling is not None
    rest = d.score - (d.base * (1 - share) if d.base is not None else 0)
    rest = rest - (ceiling * share if ceiling is not None else 0)
    free = [column for column, known in ((share, known_top), (1 - share, known_base)) if not known]
    if not free:
        return rest, ceiling or 0.0, d.base or 0.0
    matrix = np.stack(free, axis=1)
    found = np.linalg.lstsq(matrix, rest, rcond=None)[0]
    values = iter(found.tolist())
    top = ceiling if ceiling is not None else next(values)
    base = d.base if d.base is not None else next(values)
    return rest - matrix @ found, top, base


Fixed = dict[str, float]


def _solve(d: Data, fixed: Fixed, start: Floats) -> tuple[float, Floats]:
    """Least sum of squares with some parameters fixed, and log B and log C_mid there."""
    from scipy.optimize import least_squares

    logs = np.log(d.compute)
    free = [i for i, name in enumerate(("B", "C_mid")) if name not in fixed]

    def place(x: Floats) -> Floats:
        full = np.array([log(fixed.get("B", 1.0)), log(fixed.get("C_mid", 1.0))])
        full[free] = x
        return full

    def residuals(x: Floats) -> Floats:
        full = place(x)
        return _linear(d, _share(logs, full[0], full[1]), fixed.get("A"))[0]

    low = np.array([log(FLATTEST), logs.min() - DECADES * log(10)])[free]
    high = np.array([log(STEEPEST), logs.max() + DECADES * log(10)])[free]
    begin = np.clip(start[free], low + 1e-9, high - 1e-9)
    found = least_squares(residuals, begin, bounds=(low, high), xtol=1e-10, ftol=1e-10, gtol=1e-12)
    return 2 * float(found.cost), place(found.x)


def _best(d: Data) -> tuple[float, Floats]:
    """The least sum of squares from several starts."""
    logs = np.log(d.compute)
    starts = [
        np.array([log(b), logs.min() + share * np.ptp(logs)])
        for b in (0.7, 2.5)
        for share in (0.3, 0.7, 1.2)
    ]
    return min((_solve(d, {}, s) for s in starts), key=lambda pair: pair[0])


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A fitted curve.

    Args:
        data: what was fitted.
        values: A, B, C_mid and R0.
        squares: least sum of squares.
        place: log B and log C_mid.
    """

    data: Data
    values: dict[str, float]
    squares: float
    place: Floats

    @property
    def quantile(self) -> float:
        """Student's t beyond which a value lies outside its interval."""
        from scipy.stats import t

        return float(t.ppf(0.5 + LEVEL / 2, len(self.data.score) - self.data.parameters))

    @property
    def limit(self) -> float:
        """The sum of squares up to which a value belongs to its interval."""
        left = len(self.data.score) - self.data.parameters
        return self.squares * (1 + self.quantile**2 / left)

    @property
    def spread(self) -> float:
        """Standard deviation of a score around the curve."""
        return float(np.sqrt(self.squares / (len(self.data.score) - self.data.parameters)))


def fit(data: Data) -> Fit:
    """Fit by least squares.

    Example:
        >>> c = np.geomspace(0.1, 100, 12)
        >>> found = fit(Data(compute=c, score=sigmoid(c, 0.8, 1.5, 2.0, 0.1))).values
        >>> {name: round(value, 4) for name, value in found.items()}
        {'A': 0.8, 'B': 1.5, 'C_mid': 2.0, 'R0': 0.1}
    """
    squares, place = _best(data)
    _, top, base = _linear(data, _share(np.log(data.compute), place[0], place[1]), None)
    values = {"A": top, "B": exp(place[0]), "C_mid": exp(place[1]), "R0": base}
    return Fit(data=data, values=values, squares=squares, place=place)


def profile(f: Fit, name: str, value: float, start: Floats | None = None) -> tuple[float, Floats]:
    """Least sum of squares with one parameter held at a value, and where it is."""
    begins = [f.place if start is None else start]
    logs = np.log(f.data.compute)
    if f.place[1] > logs.max():
        begins.append(np.array([0.0, float(np.median(logs))]))
    return min((_solve(f.data, {name: value}, b) for b in begins), key=lambda pair: pair[0])


def interval(f: Fit, name: str) -> tuple[float, float]:
    """The 95 % interval of a parameter; an end that the data do not set is infinite, or 0."""
    return _end(f, name, -1), _end(f, name, 1)


def _far(f: Fit, name: str, side: int) -> float:
    """Distance in logarithms beyond which a parameter counts as unbounded on one side."""
    if side < 0:
        return NOWHERE
    gain = abs(f.values["A"] - f.values["R0"])
    most = {
        "A": FAR * float(np.ptp(f.data.score)) / gain,
        "B": STEEPEST / f.values["B"],
        "C_mid": 10**DECADES * float(f.data.compute.max()) / f.values["C_mid"],
    }
    return log(max(most[name], 1.0))


def _end(f: Fit, name: str, side: int) -> float:
    """Where the profile crosses the limit on one side, along the logarithm (A: of A - R0)."""
    from scipy.optimize import brentq

    value, anchor = f.values[name], f.values["R0"] if name == "A" else 0.0

    def at(distance: float) -> float:
        return anchor + (value - anchor) * exp(side * distance)

    if f.squares <= 1e-24 * float((f.data.score**2).sum()):
        return value  # every point is on the curve
    place, near, step, far = f.place, 0.0, 0.02, _far(f, name, side)
    while True:
        if step > far:
            return inf if side > 0 else (-inf if name == "A" else 0.0)
        squares, found = profile(f, name, at(step), place)
        if squares > f.limit:
            break
        place, near, step = found, step, 2 * step
    start = place

    def excess(distance: float) -> float:
        return profile(f, name, at(distance), start)[0] - f.limit

    return at(float(brentq(excess, near, step, xtol=1e-4 * step)))


def report(data: Data, source: str) -> dict[str, Any]:
    """The fit with intervals, warnings, the curve and the profile of A, for a document."""
    f = fit(data)
    rows = []
    for name in NAMES:
        low, high = interval(f, name)
        rows.append(
            {
                "parameter": name,
                "estimate": f.values[name],
                "low": low if isfinite(low) else None,
                "high": high if isfinite(high) else None,
            }
        )
    return {
        "source": source,
        "points": len(data.score),
        "base": f.values["R0"],
        "base_known": data.base is not None,
        "spread": f.spread,
        "level": LEVEL,
        "t": f.quantile,
        "parameters": rows,
        "warnings": warnings(f, rows),
        "data": [[float(c), float(r)] for c, r in zip(data.compute, data.score, strict=True)],
        "profile": profile_of_ceiling(f, rows[0]),
    }


def warnings(f: Fit, rows: list[dict[str, Any]]) -> list[str]:
    """What the data do not determine."""
    found, most = [], float(f.data.compute.max())
    middle = rows[NAMES.index("C_mid")]
    if most < f.values["C_mid"]:
        found.append(
            f"the largest compute, {most:.3g}, is below C_mid = {f.values['C_mid']:.3g}: A is not "
            "identified, the curve has not bent yet"
        )
    elif middle["high"] is None or most < middle["high"]:
        found.append(
            f"C_mid may lie beyond the largest compute, {most:.3g}: A rests on the shape of the "
            "curve more than on the data"
        )
    found += [
        f"{row['parameter']} has no {side} bound"
        for row in rows
        for side, end in (("upper", row["high"]), ("lower", row["low"]))
        if end is None
    ]
    return found


def profile_of_ceiling(f: Fit, row: dict[str, Any], points: int = 41) -> list[list[float]]:
    """Values of A and the profile's distance in units of t: the interval is where it is small."""
    value, size = f.values["A"], float(np.ptp(f.data.score))
    low = float(f.data.score.max()) - size / 2
    if row["low"] is not None:
        low = min(low, row["low"]) if row["high"] is None else value - 1.4 * (value - row["low"])
    high = low + 4 * size if row["high"] is None else value + 1.4 * (row["high"] - value)
    left = len(f.data.score) - f.data.parameters
    found = []
    for a in np.linspace(low, high, points):
        squares = profile(f, "A", float(a))[0]
        distance = np.sqrt(max(0.0, squares / f.squares - 1) * left) if f.squares > 0 else 0.0
        found.append([float(a), float(distance)])
    return found
