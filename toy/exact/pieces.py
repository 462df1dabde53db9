"""Maps of a log-ratio as pieces a + b exp(e), and smooth versions of them with few frequencies.

A map between limits is w(e) = sum over pieces of (a + b exp(e)) 1{l < e < r}.  With the step at
each limit replaced by

    S(z) = Phi(z) + z phi(z) / 2,    z = (e - limit) / width

w has, on a window beyond which it is continued periodically, a Fourier series whose terms vanish
beyond the frequency 9.2 / width.  S is the step smoothed by a kernel without a second moment, and

    |S(z) - 1{z > 0}| <= const * exp(-z^2 / (2 * 1.15^2))

so that the error is known to be at most a sum of bells at the limits, which has such a series too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from windage.estimators.member import Member

# Where exp(-z^2 / 2) (1 + z^2 / 2) and the smooth step's error are below rounding.
BAND, REACH = 9.2, 7.5
BELL = 1.15
# A smooth indicator of an interval is at most this in absolute value.
STEP_AT_MOST = 1.1
FIT = 1e-12
FAR = 30.0
DEGREES = 3
ONE = torch.ones(1, dtype=torch.float64)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """A function of a log-ratio e, as sums of 1, exp(e) and exp(2 e) between limits.

    Args:
        limits: in order.
        terms: coefficients of the three functions, a row a piece.
    """

    limits: Float[Tensor, " E"]
    terms: Float[Tensor, "J 3"]

    def squared(self) -> Pieces:
        """The square of a function of 1 and exp(e)."""
        a, b, _ = self.terms.unbind(1)
        return Pieces(limits=self.limits, terms=torch.stack([a * a, 2 * a * b, b * b], 1))

    def less(self, base: Float[Tensor, " 3"]) -> Pieces:
        """The function minus another that is the same everywhere."""
        return Pieces(limits=self.limits, terms=self.terms - base)

    @property
    def change(self) -> Float[Tensor, "E 3"]:
        """By how much the terms change at the left cut, at the limits and at the right cut."""
        zero = self.terms.new_zeros((1, DEGREES))
        return torch.diff(self.terms, dim=0, prepend=zero, append=zero)

    @property
    def degrees(self) -> list[int]:
        """Powers of exp(e) that the function has."""
        return self.terms.abs().amax(0).nonzero().squeeze(1).tolist()

    def at(self, effective: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Its values."""
        piece = torch.bucketize(effective, self.limits)
        powers = torch.stack([torch.ones_like(effective), effective.exp(), (2 * effective).exp()])
        return (self.terms[piece].movedim(-1, 0) * powers).sum(0)


def _candidates(map_: Member) -> list[float]:
    """Log-ratios at which a map may change: log of its settings v, of 1 + v and 1 - v; v and -v."""
    numbers = [v for _, v in map_.settings if isinstance(v, int | float) and math.isfinite(v)]
    ratios = {r for v in numbers for r in (v, 1 + v, 1 - v) if r > 0} | {1.0}
    return sorted({math.log(r) for r in ratios} | {r for v in numbers for r in (v, -v)})


def pieces(map_: Member, sign: float) -> Pieces | None:
    """A map's pieces for one sign of the advantage, read off its values; None if it has none.

    Limits are looked for where the map's settings put them; between two candidates the map must be
    a + b exp(e) at 33 points, and outside as far as exp(30).

    Example:
        >>> from windage.estimators.correction import truncate
        >>> from windage.estimators.member import use
        >>> found = pieces(use(truncate, cap=2.0), 1.0)
        >>> found.limits, found.terms[:, :2]
        (tensor([0.6931], dtype=torch.float64), tensor([[0., 1.],
                [2., 0.]], dtype=torch.float64))
    """
    if map_.traits.needs:
        return None
    limits = _candidates(map_)
    ends = [limits[0] - FAR, *limits, limits[-1] + FAR]
    inside = torch.linspace(0.01, 0.99, 33, dtype=torch.float64)
    found: list[Tensor] = []
    for low, high in pairwise(ends):
        x = low + (high - low) * inside
        terms = _fit(x, map_(x, x.new_tensor(sign)))
        if terms is None:
            return None
        found.append(terms)
    kept = [
        (limit, after)
        for limit, before, after in zip(limits, found[:-1], found[1:], strict=True)
        if not torch.allclose(before, after, rtol=FIT, atol=FIT)
    ]
    return Pieces(
        limits=torch.tensor([limit for limit, _ in kept], dtype=torch.float64),
        terms=torch.stack([found[0], *(after for _, after in kept)]),
    )


def _fit(x: Float[Tensor, " n"], w: Float[Tensor, " n"]) -> Float[Tensor, " 3"] | None:
    """Coefficients of 1 and exp(x): one of them if that is enough."""
    one, power = torch.ones_like(x), x.exp()
    nothing = one.new_zeros(())
    table = torch.stack([one, power / power.max()], 1)
    both = torch.linalg.lstsq(table, w.unsqueeze(1)).solution.squeeze(1)
    for a, b in (
        (w.median(), nothing),
        (nothing, (w / power).median()),
        (both[0], both[1] / power.max()),
    ):
        if bool((a + b * power - w).abs().max() <= FIT * w.abs().max()):
            return torch.stack([a, b, nothing])
    return None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Where a sum of log-ratios nearly always lies, and the frequencies of functions there.

    Args:
        low, high: the window.
        frequencies: their number beyond 0.
        least, most: of the summands, where a mean is looked at: t of them lie between t times it.
    """

    low: float
    high: float
    frequencies: int
    least: float = -math.inf
    most: float = math.inf

    @property
    def width(self) -> float:
        """Of a smooth step: the period holds the window, and the reach of a step on both sides."""
        share = BAND / (2 * math.pi * self.frequencies)
        return share * (self.high - self.low) / (1 - 2 * REACH * share)

    @property
    def margin(self) -> float:
        return REACH * self.width

    @property
    def period(self) -> float:
        return self.high - self.low + 2 * self.margin

    @property
    def omega(self) -> Float[Tensor, " K"]:
        """Frequencies from 0 on."""
        return 2 * math.pi / self.period * torch.arange(self.frequencies + 1, dtype=torch.float64)

    def places(self, shape: Pieces, lengths: Float[Tensor, " n"]) -> Float[Tensor, "E n"]:
        """Where w(e / t) changes within the window, and where it is cut off out of its reach.

        Limits beyond the cuts come together there and cancel.
        """
        low = (self.least * lengths).clamp(min=self.low) - self.margin
        high = (self.most * lengths).clamp(max=self.high) + self.margin
        limits = shape.limits.unsqueeze(1) * lengths
        return torch.cat([low.unsqueeze(0), limits.clamp(min=low, max=high), high.unsqueeze(0)])

    def series(
        self, shape: Pieces, omega: Float[Tensor, " K"], lengths: Float[Tensor, " n"] = ONE
    ) -> Complex[Tensor, "K n"]:
        """Coefficients c of w(e / t) = Re sum over k of c[k, t] exp(i omega[k] e), smooth.

        Args:
            shape: of the function.
            omega: of the frequencies.
            lengths: values of t.
        """
        places = self.places(shape, lengths)
        total = torch.zeros((len(omega), len(lengths)), dtype=torch.complex128)
        for degree in shape.degrees:
            change = shape.change[:, degree]
            z = torch.complex(omega.unsqueeze(1), degree / lengths.expand(len(omega), -1))
            flat = -(change @ places)
            wave = sum(
                c * torch.exp(-1j * z * place) for c, place in zip(change, places, strict=True)
            )
            part = torch.where(z == 0, flat.to(z), wave / (1j * torch.where(z == 0, 1.0, z)))
            square = (self.width * z).square() / 2
            total = total + part * torch.exp(-square) * (1 + square)
        return self._both_sides(total, omega)

    def bells(
        self, shape: Pieces, omega: Float[Tensor, " K"], lengths: Float[Tensor, " n"] = ONE
    ) -> Complex[Tensor, "K n"]:
        """The series of a bound on the error that smooth steps make in the window."""
        places = self.places(shape, lengths)
        jump, height = torch.zeros_like(places), torch.zeros_like(places)
        for degree in shape.degrees:
            size = shape.change[:, degree].unsqueeze(1) * torch.exp(degree / lengths * places)
            jump = jump + size
            fastest = degree * self.width / float(lengths.min())
            height = height + size.abs() * (lengths.min() / lengths * _excess(fastest))
        height = height + jump.abs() * _excess(None)
        spread = BELL * self.width
        bell = spread * math.sqrt(2 * math.pi) * torch.exp(-(spread * omega).square() / 2)
        at = omega.view(-1, 1, 1) * places
        wave = (torch.exp(-1j * at) * height).sum(1)
        return self._both_sides(bell.unsqueeze(1) * wave, omega)

    def greatest(self, shape: Pieces) -> float:
        """A bound on the absolute value of the series anywhere, at lengths of 1 or more."""
        places = self.places(shape, ONE).squeeze(1)
        highest = (places[1:].unsqueeze(1) + self.margin).clamp(min=0)
        powers = torch.exp(torch.arange(DEGREES) * highest)
        inside = (places[1:] > places[:-1]).unsqueeze(1)
        return STEP_AT_MOST * float((shape.terms.abs() * powers * inside).sum())

    def _both_sides(self, coefficients: Tensor, omega: Tensor) -> Tensor:
        """Negative frequencies folded onto positive ones."""
        return coefficients * torch.where(omega > 0, 2.0, 1.0).unsqueeze(1) / self.period


def _excess(rate: float | None) -> float:
    """Greatest quotient of the smooth step's error times |exp(rate z) - 1| and the bell.

    Of the error alone where the rate is None.
    """
    z = torch.linspace(0, 14, 14001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    error = (torch.special.ndtr(-z) - z * density / 2).abs()
    growth = torch.ones_like(z) if rate is None else torch.expm1(rate * z)
    return 1.001 * float((error * growth * torch.exp((z / BELL).square() / 2)).max())
