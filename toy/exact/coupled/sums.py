"""Truncated moments of the sum of a group's other rewards: what a gate by sign needs.

For two responses with rewards r_k, r_l let S be the sum over the G - 2 others, drawn independently
from weights q on the rewards, and tau_kl = (G-1) r_k - r_l.  A gate needs

    N_j = E[(tau - S)_+^j],   j = 1, 2       and likewise with (S - tau)_+

for every pair and, under a deviation, summed over nodes n that tilt q and weigh pairs by u_nk u_nl.
Three laws of S:

    lattice   rewards are whole multiples of one number: powers by the Fourier transform, exact
    listed    every multiset of siblings
    waves     |x| and x |x| as Fourier series of period 2 L, a mode at w = m pi / L for odd m,
              |x|   = L / 2 - sum of 4 / (L w^2) cos(w x)
              x |x| = sum of (4 s_m / w^2 - 8 / (L w^3)) sin(w x),   s_m = sin(m pi / 2)
              for |x| <= L / 2: E needs the characteristic function to the power n, which is
              negligible from some mode on if rewards are many; what is cut off is estimated.
              e^(i w tau) is a product of k's and l's factors: sums over nodes are matrix products
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from windage.toy.exact.tuples import ways

# Most cells of a lattice, and what counts as a whole multiple, in units of the span.
LEVELS, WHOLE = 100_000, 1e-13
# Numbers in one table; numbers in a list of siblings that is kept between calls.
CELLS, SMALL = 1_000_000, 100_000
# Modes that are looked at where the characteristic function may come back.
SCAN = 1 << 18


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Tilted:
    """Measures at some nodes, and how the nodes are weighed.

    Args:
        law: weights q of a sibling's reward.
        own: factor u of an own response by its reward.
        weights: of each node, in means and in squares.
        siblings: how many, G - 2.
    """

    law: Float[Tensor, "n R"]
    own: Float[Tensor, "n R"]
    weights: Float[Tensor, "2 n"]
    siblings: int

    def thresholds(self, values: Shaped[Tensor, " R"], rows: slice) -> Shaped[Tensor, "k R"]:
        """Thresholds tau for some k and every l."""
        return (self.siblings + 1) * values[rows, None] - values

    def summed(
        self, rows: slice, low: tuple[Tensor, Tensor], high: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "6 k R"]:
        """Tables over nodes, weighed and added."""
        pair = self.own[:, rows].unsqueeze(2) * self.own.unsqueeze(1)
        shape = pair.shape

        def total(table: Tensor, weights: Tensor) -> Tensor:
            return torch.tensordot(weights, table.view(shape) * pair, 1)

        first = [total(low[0], self.weights), total(high[0], self.weights)]
        second = [total(table[1], self.weights[1:]) for table in (low, high)]
        return torch.cat([*first, *second])[[0, 2, 1, 3, 4, 5]]


@runtime_checkable
class Sums(Protocol):
    """The law of S."""

    def tables(self, nodes: Tilted, rows: slice) -> Float[Tensor, "6 k R"]:
        """N_1 below and above in means; N_1 below, above, N_2 below, above in squares."""
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

    def tables(self, nodes: Tilted, rows: slice) -> Float[Tensor, "6 k R"]:
        """By sums of the law up to each threshold."""
        law = self.law(nodes.law, nodes.siblings)
        sums = self.unit * torch.arange(law.shape[1], dtype=law.dtype)
        tau = self.unit * nodes.thresholds(self.places, rows).to(law.dtype)
        return _from_atoms(nodes, rows, sums, law, tau)


def _from_atoms(nodes: Tilted, rows: slice, sums: Tensor, law: Tensor, tau: Tensor) -> Tensor:
    """Tables from the ascending values of S, their weights and the thresholds."""
    middle = tau.mean()
    sums, tau = sums - middle, (tau - middle).flatten()
    low = _below(sums, law, tau)
    high = _below(-sums.flip(0), law.flip(1), -tau)
    return nodes.summed(rows, low, high)


def _below(
    values: Float[Tensor, " C"], weights: Float[Tensor, "n C"], tau: Float[Tensor, " K"]
) -> tuple[Tensor, Tensor]:
    """N_1 and N_2 of ascending atoms, by their sums up to each threshold."""
    at = torch.searchsorted(values, tau)
    powers = torch.stack([weights, weights * values, weights * values.square()])
    total = torch.nn.functional.pad(powers.cumsum(-1), (1, 0))[..., at]
    first = tau * total[0] - total[1]
    return first, tau.square() * total[0] - 2 * tau * total[1] + total[2]


def _listed(rewards: int, siblings: int) -> tuple[Int[Tensor, "C n"], Float[Tensor, " C"]]:
    """Every multiset of siblings, ascending inside, and the orders in which it can be drawn."""
    members = torch.zeros((1, 0), dtype=torch.long)
    ways_, run = torch.ones((2, 1), dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.long)
    for n in range(siblings):
        count = rewards - last
        row = torch.repeat_interleave(count)
        start = (count.cumsum(0) - count)[row]
        following = last[row] + torch.arange(len(row)) - start
        again = (following == last[row]) & (n > 0)
        run = torch.where(again, run[row] + 1, 1.0)
        ways_ = ways_[row] * (n + 1) / run
        members = torch.cat([members[row], following.unsqueeze(1)], 1)
        last = following
    return members, ways_


_kept = lru_cache(maxsize=64)(_listed)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """Sums of every multiset of siblings."""

    rewards: Float[Tensor, " R"]

    def tables(self, nodes: Tilted, rows: slice) -> Float[Tensor, "6 k R"]:
        """By sums of the list up to each threshold."""
        number, siblings = len(self.rewards), nodes.siblings
        small = ways(number, siblings) * max(siblings, 1) < SMALL
        members, orders = (_kept if small else _listed)(number, siblings)
        sums, order = self.rewards[members].sum(1).sort()
        law = orders.expand(len(nodes.law), -1)
        for column in members.T:
            law = law * nodes.law[:, column]
        tau = nodes.thresholds(self.rewards, rows)
        return _from_atoms(nodes, rows, sums, law[:, order], tau)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Waves:
    """Sums of many rewards, by characteristic functions.

    Args:
        rewards: ascending.
        half: L, at least twice the largest |tau - S| that matters.
        modes: which m, all odd.
    """

    rewards: Float[Tensor, " R"]
    half: float
    modes: Int[Tensor, " M"]

    def frequencies(self) -> Float[Tensor, " M"]:
        """The modes' w."""
        return self.modes.to(self.rewards.dtype) * (math.pi / self.half)

    def coefficients(self) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Of cosines in |x| and of sines in x |x|."""
        w = self.frequencies()
        turn = 2.0 - self.modes % 4
        return -4 / (self.half * w.square()), 4 * turn / w.square() - 8 / (self.half * w**3)

    def characteristic(self, nodes: Tilted) -> Tensor:
        """E[exp(-i w S)] at each node and mode."""
        phase = torch.outer(self.rewards, self.frequencies())
        single = torch.complex(nodes.law @ phase.cos(), -(nodes.law @ phase.sin()))
        return single.pow(nodes.siblings) if nodes.siblings else torch.ones_like(single)

    def sizes(self, nodes: Tilted) -> Float[Tensor, " M"]:
        """Largest coefficient of each mode in E|tau - S| over the nodes."""
        return (self.characteristic(nodes).abs() * self.coefficients()[0].abs()).amax(0)

    def tables(self, nodes: Tilted, rows: slice) -> Float[Tensor, "6 k R"]:
        """By one matrix product for each part of the series and for each power of tau - S."""
        one, two, three = self._polynomials(nodes, rows)
        step = max(1, CELLS // max(1, len(self.modes) * len(self.rewards)))
        law = self.characteristic(nodes)
        even, odd = self.coefficients()
        w = self.frequencies().unsqueeze(1)
        ahead = torch.exp(1j * (nodes.siblings + 1) * w * self.rewards[rows])
        behind = torch.exp(-1j * w * self.rewards)
        size, signed = one.new_zeros((2, *one.shape[1:])), one.new_zeros(one.shape[1:])
        for start in range(0, len(law), step):
            some = slice(start, start + step)
            left = law[some].unsqueeze(2) * ahead * nodes.own[some, None, rows]
            right = (behind * nodes.own[some].unsqueeze(1)).flatten(0, 1)
            right = torch.cat([right.real, right.imag])
            for number, weights in enumerate(nodes.weights[:, some]):
                mine = (left * (weights[:, None, None] * even.unsqueeze(1))).flatten(0, 1)
                size[number] += torch.cat([mine.real, -mine.imag]).T @ right
            mine = (left * (nodes.weights[1, some, None, None] * odd.unsqueeze(1))).flatten(0, 1)
            signed += torch.cat([mine.imag, mine.real]).T @ right
        size += self.half / 2 * three
        low, high = (size + one) / 2, (size - one) / 2
        return torch.stack(
            [low[0], high[0], low[1], high[1], (two + signed) / 2, (two - signed) / 2]
        )

    def _polynomials(self, nodes: Tilted, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of tau - S in means and squares, of its square, and of 1, over nodes."""
        total = nodes.law.sum(1)
        mean = (nodes.law @ self.rewards) / total
        spread = (nodes.law @ self.rewards.square()) / total - mean.square()
        tau, n = nodes.thresholds(self.rewards, rows), nodes.siblings
        z = total.pow(n)

        def over(factor: Tensor) -> Tensor:
            weights = nodes.weights * z * factor
            return (weights.unsqueeze(1) * nodes.own[:, rows].T) @ nodes.own

        plain, first = over(torch.ones_like(z)), over(n * mean)
        second = over((n * mean).square() + n * spread)[1]
        square = tau.square() * plain[1] - 2 * tau * first[1] + second
        return tau * plain - first, square, plain


def settle(
    rewards: Float[Tensor, " R"], nodes: Tilted, half: float, *, tolerance: float, most: int
) -> tuple[Waves, float]:
    """Waves with enough modes for a tolerance, or `most`; and the estimate of what is cut off.

    The estimate is the root of the squares of the last half of the modes: it cannot know of a
    characteristic function that comes back later, which `counting` looks for.
    """
    count = 32
    while True:
        waves = Waves(rewards=rewards, half=half, modes=2 * torch.arange(count) + 1)
        cut = float(waves.sizes(nodes)[count // 2 :].norm())
        if cut <= tolerance or 2 * count > most:
            return waves, cut
        count *= 2


def counting(
    rewards: Float[Tensor, " R"], nodes: Tilted, half: float, *, tolerance: float
) -> tuple[Waves, float]:
    """Waves of the modes that count among the first `SCAN`, and the estimate of what is cut off."""
    kept, dropped, last = [], 0.0, 0.0
    for some in (2 * torch.arange(SCAN) + 1).split(max(1, CELLS // len(rewards))):
        sizes = Waves(rewards=rewards, half=half, modes=some).sizes(nodes)
        counts = sizes > tolerance / math.sqrt(SCAN)
        kept.append(some[counts])
        dropped += float(sizes[~counts].square().sum())
        last += float(sizes[some > SCAN].square().sum())
    return Waves(rewards=rewards, half=half, modes=torch.cat(kept)), math.sqrt(dropped + last)
