"""Advantages cut by their sign: maps that clip gains and losses differently, at any group size.

With D = r - m and own rewards r_k, r_l of two responses, whose G - 2 siblings sum to S (`sums`),

    G D_k = tau_kl - S,      D_l = D_k + r_l - r_k,      tau_kl = (G-1) r_k - r_l

    P(k, l) = E[D_k D_l; D_k > 0] = (r_l - r_k) N_1 / G + N_2 / G^2      below tau_kl
    H(k, l) = E[D_k D_l; D_k < 0] = (r_k - r_l) N_1 / G + N_2 / G^2      above tau_kl

both gain: P of the smaller reward; both lose: H of the larger; k gains and l < k loses:
P(k, l) - P(l, k).  One response alone: E[D_k^+ | k] = sum over l of p_l N_1(tau_kl) / G, and so for
its square.  Under a group deviation the same holds at each (t, c) of `spread`, siblings drawn from
p u instead of p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.exact.coupled.by_reward import ByReward
from windage.toy.exact.coupled.spread import FAR, PITCH, TOLERANCE, Law, centers, pieces
from windage.toy.exact.coupled.sums import (
    CELLS,
    Lattice,
    Listed,
    Sums,
    Tilted,
    Waves,
    common,
    counting,
    settle,
)
from windage.toy.exact.moments import Undefined
from windage.toy.exact.tuples import ways

# Numbers that a list of multisets may hold, and how many times a lattice's levels it may have.
LIST, LEVEL = 1e7, 4.0
# What waves should cut off, and may at most, in units of |D|; numbers that are worth it,
# and modes that always are.
CUT, LOOSE, WORK, MODES = 1e-11, 10.0, 2e9, 512


@final
class Gate:
    """Sums over nodes of N_1 and N_2 by pairs of own rewards, and what follows from them.

    Args:
        law: rewards and their probabilities.
    """

    def __init__(self, law: Law) -> None:
        self.law = law
        count = len(law.rewards)
        self.tables = torch.zeros((6, count, count), dtype=torch.float64)

    def add(self, sums: Sums, nodes: Tilted, here: slice) -> None:
        """Add some nodes, of which only a run of rewards has weight."""
        width = here.stop - here.start
        step = max(1, CELLS // (width * len(nodes.law)))
        for start in range(0, width, step):
            mine = slice(start, min(start + step, width))
            rows = slice(here.start + mine.start, here.start + mine.stop)
            self.tables[:, rows, here] += sums.tables(nodes, mine)

    @property
    def mean(self) -> Float[Tensor, "2 R"]:
        """E[A | k], of advantages above and below 0."""
        low, high = self.tables[:2] @ self.law.mass / self.law.group_size
        return torch.stack([low, -high])

    @property
    def norm(self) -> Float[Tensor, "2 R"]:
        """E[A^2 | k], of advantages above and below 0."""
        return self.tables[4:] @ self.law.mass / self.law.group_size**2

    def pairs(self, prompt: ByReward) -> Float[Tensor, ""]:
        """Sum over pairs of rewards and signs of E[A A' x . x']."""
        g, r = self.law.group_size, self.law.rewards
        ahead = (r - r.unsqueeze(1)) / g
        gain = ahead * self.tables[2] + self.tables[4] / g**2
        loss = self.tables[5] / g**2 - ahead * self.tables[3]
        mixed = (gain - gain.T).tril(-1)
        gain, loss = gain.triu() + gain.triu(1).T, loss.tril() + loss.tril(-1).T
        every = slice(None)
        return (
            (gain * prompt.products(0, 0).rows(every)).sum()
            + (loss * prompt.products(1, 1).rows(every)).sum()
            + 2 * (mixed * prompt.products(0, 1).rows(every)).sum()
        )


def chosen(
    rewards: Float[Tensor, " w"],
    nodes: Tilted,
    unit: float | None,
    half: float,
    *,
    once: bool = False,
) -> Sums:
    """The cheapest exact law of the siblings' sum, or enough waves.

    Args:
        rewards: of one sibling.
        nodes: its measures.
        unit: of a lattice, if the rewards lie on one.
        half: of a period of the waves.
        once: whether there is but this law, so that a search among many modes pays.

    Raises:
        Undefined: the sum takes too many values to list and too few to be smooth.
    """
    listed = ways(len(rewards), nodes.siblings)
    span = float(rewards[-1] - rewards[0])
    levels = math.inf if unit is None else nodes.siblings * span / unit + 1
    if listed <= LIST / (nodes.siblings + len(nodes.law)) and listed <= LEVEL * levels:
        return Listed(rewards=rewards)
    if unit is not None:
        return Lattice(rewards=rewards, unit=unit)
    most = max(MODES, int(WORK / (len(nodes.law) * len(rewards) ** 2)))
    find = counting if once else partial(settle, most=most)
    waves, cut = find(rewards, nodes, half, tolerance=CUT * half)
    if cut > LOOSE * CUT * half or len(waves.modes) > most:
        raise Undefined(
            f"the sum of {nodes.siblings} siblings' rewards takes too many values to list and is "
            f"not smooth: {len(waves.modes)} waves leave an error of about {cut / half:.0e}"
        )
    return waves


def linear(law: Law, factor: float) -> Gate:
    """A gate for advantages factor * (r - m)."""
    gate, r = Gate(law), law.rewards
    nodes = _untilted(law, factor)
    half = 2 * law.group_size * float(r[-1] - r[0])
    gate.add(chosen(r, nodes, common(r), half, once=True), nodes, slice(0, len(r)))
    return gate


def _untilted(law: Law, factor: float) -> Tilted:
    """The rewards' own law, for advantages factor * (r - m)."""
    return Tilted(
        law=law.mass.unsqueeze(0),
        own=torch.ones((1, len(law.rewards)), dtype=law.rewards.dtype),
        weights=torch.tensor([[factor], [factor**2]], dtype=law.rewards.dtype),
        siblings=law.group_size - 2,
    )


def gated_spread(law: Law) -> Gate:
    """A gate for advantages (r - m) / (std + eps)."""
    gate, unit = Gate(law), common(law.rewards)
    varying, smooth = law.varying, False
    for t, first, second in zip(*(x.tolist() for x in law.nodes()), strict=True):
        left = 0.0
        for nodes, here in _tilts(law, t, (first, second), 1e-24 * varying):
            q = nodes.law
            left += float((q.sum(1).pow(law.group_size) - q.pow(law.group_size).sum(1)).sum())
            sums = chosen(law.rewards[here], nodes, unit, _half(law, t))
            if isinstance(sums, Waves) and not smooth:
                smooth = _smooth(law)
            gate.add(sums, nodes, here)
        if law.group_size * PITCH / math.sqrt(math.pi) * left <= TOLERANCE * varying:
            break
    return gate


def _smooth(law: Law) -> bool:
    """Whether the modes of untilted rewards that count are those that `settle` stops at.

    Raises:
        Undefined: the characteristic function comes back, as that of a lattice with noise does.
    """
    r, nodes = law.rewards, _untilted(law, 1.0)
    half = 2 * law.group_size * float(r[-1] - r[0])
    first, _ = settle(r, nodes, half, tolerance=CUT * half, most=MODES)
    found, _ = counting(r, nodes, half, tolerance=CUT * half)
    missed = found.sizes(nodes)[found.modes > first.modes[-1]].norm()
    if float(missed) > LOOSE * CUT * half:
        raise Undefined(
            "rewards are almost, but not quite, multiples of one number: sums are rough"
        )
    return True


def _half(law: Law, t: float) -> float:
    """Twice the largest |tau - S| that a group has which e^(-t v) does not make negligible."""
    g, span = law.group_size, float(law.rewards[-1] - law.rewards[0])
    return 2 * g * min(span, (1 + math.sqrt(g)) * math.sqrt(FAR / t))


def _tilts(
    law: Law, t: float, weights: tuple[float, float], floor: float
) -> Iterator[tuple[Tilted, slice]]:
    """Values of c for one t, with the run of rewards that have weight there."""
    g, r = law.group_size, law.rewards
    reach, pitch = math.sqrt(FAR * g / t), PITCH / math.sqrt(t)
    root = math.sqrt(t / math.pi) * pitch
    c = centers(r, reach, pitch, math.sqrt(FAR / t))
    for rows, here in pieces(r, c, reach):
        u = torch.exp((-t / g) * (r[here] - c[rows].unsqueeze(1)).square())
        u = u[(u @ law.mass[here]).pow(g - 1) > floor]
        for own in u.split(max(1, CELLS // u.shape[1] ** 2)):
            if len(own):
                scale = torch.tensor(weights, dtype=r.dtype).unsqueeze(1) * root
                yield (
                    Tilted(
                        law=law.mass[here] * own,
                        own=own,
                        weights=scale.expand(2, len(own)),
                        siblings=g - 2,
                    ),
                    here,
                )
