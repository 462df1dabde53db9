"""Truncated moments of the sum of a group's other rewards: what a gate by sign needs.

With n siblings drawn independently from weights q on the rewards and S the sum of their rewards,

    N_j(tau) = E[(tau - S)_+^j],   j = 1, 2       and likewise with (S - tau)_+

decide every moment of advantages cut at 0 (`gated`).  Three laws of S:

    lattice   rewards are whole multiples of one number: powers by the Fourier transform, exact
    listed    every multiset of siblings
    waves     |x| and x |x| as Fourier series of period 2 L, a mode at w = m pi / L for odd m,
              |x|   = L / 2 - sum of 4 / (L w^2) cos(w x)
              x |x| = sum of (4 s_m / w^2 - 8 / (L w^3)) sin(w x),   s_m = sin(m pi / 2)
              for |x| <= L / 2, so that E needs the characteristic function to the power n, which is negligible from
              some mode on if rewards are many; the terms cut off are estimated, not bounded
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.toy.exact.classes import SMALL
from windage.toy.exact.tuples import compositions, ways

# Most cells of a lattice, and what counts as a whole multiple, in units of the span.
LEVELS, WHOLE = 100_000, 1e-13


Take = Callable[[Float[Tensor, " R"]], Float[Tensor, " K"]]


class Sums(Protocol):
    """Moments above and below thresholds for each row of weights."""

    def __call__(
        self, weights: Float[Tensor, "n R"], siblings: int, take: Take
    ) -> tuple[Tensor, ...]:
        """N_1, N_2 below and N_1, N_2 above the thresholds take(rewards): each `[n K]`."""
        ...


def common(rewards: Float[Tensor, " R"]) -> float | None:
    """The number of which all differences of rewards are whole multiples; None: none is found.

    Example:
        >>> round(common(torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)), 12)
        0.2
    """
    steps = rewards.diff().tolist()
    span = float(rewards[-1] - rewards[0])
    found = steps[0]
    for step in steps[1:]:
        while step > span / (4 * LEVELS):
            found, step = step, found % step
            step = 0.0 if found - step < span / (4 * LEVELS) else step
    if found < span / LEVELS:
        return None
    places = (rewards - rewards[0]) / found
    found = span / round(span / found)
    places = (rewards - rewards[0]) / found
    return found if bool(((places - places.round()).abs() * found <= WHOLE * span).all()) else None


def _below(
    values: Float[Tensor, " C"], weights: Float[Tensor, "n C"], tau: Float[Tensor, " K"]
) -> tuple[Tensor, Tensor]:
    """N_1 and N_2 of ascending atoms, by their sums up to each threshold."""
    at = torch.searchsorted(values, tau)
    powers = torch.stack([weights, weights * values, weights * values.square()])
    total = torch.nn.functional.pad(powers.cumsum(-1), (1, 0))[..., at]
    first = tau * total[0] - total[1]
    return first, tau.square() * total[0] - 2 * tau * total[1] + total[2]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Lattice:
    """Sums of rewards that are whole multiples of `unit` above the least."""

    rewards: Float[Tensor, " R"]
    unit: float

    @property
    def places(self) -> Int[Tensor, " R"]:
        """Steps of each reward above the least."""
        return ((self.rewards - self.rewards[0]) / self.unit).round().long()

    def law(self, weights: Float[Tensor, "n R"], siblings: int) -> Float[Tensor, "n C"]:
        """Weight of each sum."""
        places = self.places
        size = int(places[-1]) * siblings + 1
        single = weights.new_zeros((len(weights), int(places[-1]) + 1))
        single[:, places] = weights
        if siblings < 2:
            return single if siblings else single.new_ones((len(weights), 1))
        padded = 1 << (size - 1).bit_length()
        power = torch.fft.rfft(single, padded).pow(siblings)
        return torch.fft.irfft(power, padded)[:, :size].clamp(min=0)

    def __call__(
        self, weights: Float[Tensor, "n R"], siblings: int, take: Take
    ) -> tuple[Tensor, ...]:
        places, law = self.places.to(weights.dtype), self.law(weights, siblings)
        sums = torch.arange(law.shape[1], dtype=law.dtype)
        tau = take(places).round()
        middle = float(tau.mean().round())
        low = _below(sums - middle, law, tau - middle)
        high = _below(middle - sums.flip(0), law.flip(1), middle - tau)
        scale = (self.unit, self.unit**2)
        return tuple(scale[i % 2] * x for i, x in enumerate((*low, *high)))


@lru_cache(maxsize=64)
def _kept(rewards: int, siblings: int) -> Int[Tensor, "C R"]:
    return compositions(rewards, siblings)


def multisets(rewards: int, siblings: int) -> Float[Tensor, "C R"]:
    """Counts of the rewards in every multiset of siblings; small tables are kept."""
    small = ways(rewards, siblings) * rewards < SMALL
    return (_kept if small else compositions)(rewards, siblings).double()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """Sums of every multiset of siblings."""

    rewards: Float[Tensor, " R"]

    def __call__(
        self, weights: Float[Tensor, "n R"], siblings: int, take: Take
    ) -> tuple[Tensor, ...]:
        counts = multisets(len(self.rewards), siblings)
        sums, order = (counts @ self.rewards).sort()
        counts = counts[order]
        ways = math.lgamma(siblings + 1) - torch.lgamma(counts + 1).sum(1)
        tiny = torch.finfo(weights.dtype).tiny
        law = (weights.clamp(min=tiny).log() @ counts.T + ways).exp()
        tau = take(self.rewards)
        low = _below(sums, law, tau)
        return *low, *_below(-sums.flip(0), law.flip(1), -tau)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Waves:
    """Sums of many rewards, by characteristic functions.

    Args:
        rewards: ascending.
        half: L, at least twice the largest |tau - S| that matters.
        modes: how many.
    """

    rewards: Float[Tensor, " R"]
    half: float
    modes: int

    def frequencies(self) -> Float[Tensor, " M"]:
        """The modes' w."""
        odd = 2 * torch.arange(self.modes, dtype=self.rewards.dtype) + 1
        return odd * (math.pi / self.half)

    def coefficients(self) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Of cosines in |x| and of sines in x |x|."""
        w = self.frequencies()
        turn = 1.0 - 2.0 * (torch.arange(self.modes) % 2)
        return -4 / (self.half * w.square()), 4 * turn / w.square() - 8 / (self.half * w**3)

    def characteristic(self, weights: Float[Tensor, "n R"], siblings: int) -> Tensor:
        """E[exp(-i w S)] at each mode."""
        phase = torch.outer(self.rewards, self.frequencies())
        single = torch.complex(weights @ phase.cos(), -(weights @ phase.sin()))
        return single.pow(siblings) if siblings else torch.ones_like(single)

    def cut(self, weights: Float[Tensor, "n R"], siblings: int) -> Float[Tensor, " n"]:
        """Estimate of the terms behind the last mode, from those of the last half of the modes."""
        size = self.characteristic(weights, siblings).abs() * self.coefficients()[0].abs()
        return size[:, self.modes // 2 :].square().sum(1).sqrt()

    def __call__(
        self, weights: Float[Tensor, "n R"], siblings: int, take: Take
    ) -> tuple[Tensor, ...]:
        law = self.characteristic(weights, siblings)
        tau = take(self.rewards)
        even, odd = self.coefficients()
        phase = torch.outer(self.frequencies(), tau)
        cos, sin = phase.cos(), phase.sin()
        z = weights.sum(1, keepdim=True).pow(siblings)
        mean = siblings * ((weights @ self.rewards) / weights.sum(1)).unsqueeze(1)
        share = (weights @ self.rewards.square() / weights.sum(1)).unsqueeze(1)
        spread = siblings * (share - (mean / max(siblings, 1)).square())
        first = z * (tau - mean)
        second = z * ((tau - mean).square() + spread)
        size = self.half / 2 * z + (law.real * even) @ cos - (law.imag * even) @ sin
        signed = (law.imag * odd) @ cos + (law.real * odd) @ sin
        pairs = ((size, first), (second, signed))
        below = [(a + b) / 2 for a, b in pairs]
        return *below, *((size - first) / 2, (second - signed) / 2)


def settle(
    rewards: Float[Tensor, " R"],
    weights: Float[Tensor, "n R"],
    siblings: int,
    half: float,
    *,
    tolerance: float,
    most: int,
) -> tuple[Waves, float]:
    """Waves with enough modes for a tolerance, or `most`; and the estimate of what is cut off."""
    modes = 32
    while True:
        waves = Waves(rewards=rewards, half=half, modes=modes)
        cut = float(waves.cut(weights, siblings).max())
        if cut <= tolerance or 2 * modes > most:
            return waves, cut
        modes *= 2
