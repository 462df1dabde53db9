"""Advantages cut by their sign: maps that clip gains and losses differently, at any group size.

With D = r - m, n siblings whose rewards sum to S, and own rewards r_k <= r_l of two responses

    G D_k = (G-1) r_k - S                            n = G - 1
    G D_k = tau_kl - S,   D_l = D_k + r_l - r_k      n = G - 2,   tau_kl = (G-1) r_k - r_l

so that E[D_k^+] and E[D_k^+ D_l^+] need the truncated moments N_1, N_2 of S (`sums`) alone:

    P(k, l) = E[D_k D_l; D_k > 0] = (r_l - r_k) N_1 / G + N_2 / G^2      below tau_kl
    H(k, l) = E[D_k D_l; D_k < 0] = (r_k - r_l) N_1 / G + N_2 / G^2      above tau_kl

both gain: P of the smaller reward; both lose: H of the larger; l loses and k > l gains:
P(k, l) - P(l, k).  Under a group deviation the same holds at each (t, c) of `spread`, siblings
drawn from p u instead of p.
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.exact.coupled.by_reward import ByReward
from windage.toy.exact.coupled.spread import FAR, PITCH, TOLERANCE, Law, centers, pieces
from windage.toy.exact.coupled.sums import Lattice, Listed, Sums, common, settle
from windage.toy.exact.moments import Undefined
from windage.toy.exact.tuples import ways

# Numbers that a list of multisets may hold, and how many times a lattice's levels it may have.
LIST, LEVEL = 1e7, 4.0
# Numbers in one table; what waves cut off may be, in units of |D|, and how many are worth it.
CELLS, CUT, WORK = 1_000_000, 1e-11, 2e9


@final
class Gate:
    """Sums over nodes of what advantages of each sign contribute, by own rewards.

    Args:
        rewards: how many.
        group_size: responses of a group.
    """

    def __init__(self, rewards: int, group_size: int) -> None:
        self.group_size = group_size
        self.mean = torch.zeros((2, rewards), dtype=torch.float64)
        self.norm = self.mean.clone()
        self.gain = self.mean.new_zeros((rewards, rewards))
        self.loss = self.gain.clone()

    def add(
        self,
        sums: tuple[Sums, Sums],
        rewards: Float[Tensor, " w"],
        here: slice,
        law: Float[Tensor, "n w"],
        tilt: Float[Tensor, "n w"],
        weights: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    ) -> None:
        """Add some nodes, of which only a run of rewards has weight.

        Args:
            sums: the sum of G - 1 and of G - 2 siblings.
            rewards: that run.
            here: its place.
            law: weights of a sibling's reward.
            tilt: factor of an own response by its reward.
            weights: of each node in means and in squares.
        """
        g = self.group_size
        first, second = weights
        low, low2, high, high2 = sums[0](law, g - 1, lambda r: (g - 1) * r)
        for sign, (one, two) in enumerate(((low, low2), (-high, high2))):
            self.mean[sign, here] += first @ (tilt * one) / g
            self.norm[sign, here] += second @ (tilt * two) / g**2
        width = len(rewards)
        step = max(1, CELLS // (width * len(law)))
        for start in range(0, width, step):
            mine = slice(start, start + step)

            def thresholds(r: Tensor, mine: slice = mine) -> Tensor:
                return ((g - 1) * r[mine, None] - r).flatten()

            low, low2, high, high2 = sums[1](law, g - 2, thresholds)
            ahead = (rewards - rewards[mine, None]).flatten() / g
            pair = (tilt[:, mine].unsqueeze(2) * tilt.unsqueeze(1)).flatten(1)
            pair = pair * second.unsqueeze(1)
            rows = slice(here.start + start, here.start + min(start + step, width))
            gain = (pair * (low * ahead + low2 / g**2)).sum(0)
            loss = (pair * (high2 / g**2 - high * ahead)).sum(0)
            self.gain[rows, here] += gain.view(-1, width)
            self.loss[rows, here] += loss.view(-1, width)

    def pairs(self, prompt: ByReward) -> Float[Tensor, ""]:
        """Sum over pairs of rewards and signs of E[A A' x . x']."""
        gain = self.gain.triu() + self.gain.triu(1).T
        loss = self.loss.tril() + self.loss.tril(-1).T
        mixed = (self.gain - self.gain.T).tril(-1)
        every = slice(None)
        return (
            (gain * prompt.products(0, 0).rows(every)).sum()
            + (loss * prompt.products(1, 1).rows(every)).sum()
            + 2 * (mixed * prompt.products(0, 1).rows(every)).sum()
        )


def chosen(
    rewards: Float[Tensor, " w"],
    law: Float[Tensor, "n w"],
    siblings: int,
    unit: float | None,
    half: float,
) -> Sums:
    """The cheapest exact law of the siblings' sum, or enough waves.

    Args:
        rewards: of one sibling.
        law: their weights.
        siblings: how many.
        unit: of a lattice, if the rewards lie on one.
        half: of a period of the waves.

    Raises:
        Undefined: the sum takes too many values to list and too few to be smooth.
    """
    listed = ways(len(rewards), siblings)
    levels = math.inf if unit is None else siblings * float(rewards[-1] - rewards[0]) / unit + 1
    if listed <= LIST / (len(rewards) + len(law)) and listed <= LEVEL * levels:
        return Listed(rewards=rewards)
    if unit is not None:
        return Lattice(rewards=rewards, unit=unit)
    most = int(WORK / (len(law) * len(rewards) ** 2))
    tolerance = CUT * half
    waves, cut = settle(rewards, law, siblings, half, tolerance=tolerance, most=most)
    if cut > 100 * tolerance:
        raise Undefined(
            f"the sum of {siblings} siblings' rewards takes too many values to list and is not "
            f"smooth: {waves.modes} waves leave an error of about {cut / half:.0e}"
        )
    return waves


def linear(law: Law, factor: float) -> Gate:
    """A gate for advantages factor * (r - m)."""
    g, r = law.group_size, law.rewards
    gate = Gate(len(r), g)
    mass, one = law.mass.unsqueeze(0), torch.ones((1, len(r)), dtype=r.dtype)
    half, unit = 2 * g * float(r[-1] - r[0]), common(r)
    sums = chosen(r, mass, g - 1, unit, half), chosen(r, mass, g - 2, unit, half)
    weight = torch.full((1,), factor, dtype=r.dtype)
    gate.add(sums, r, slice(0, len(r)), mass, one, (weight, weight.square()))
    return gate


def gated_spread(law: Law) -> Gate:
    """A gate for advantages (r - m) / (std + eps)."""
    g, r = law.group_size, law.rewards
    gate, unit = Gate(len(r), g), common(r)
    varying = law.varying
    span = float(r[-1] - r[0])
    for t, first, second in zip(*(x.tolist() for x in law.nodes()), strict=True):
        reach, pitch = math.sqrt(FAR * g / t), PITCH / math.sqrt(t)
        c = centers(r, reach, pitch, math.sqrt(FAR / t))
        root = math.sqrt(t / math.pi) * pitch
        half = 2 * g * min(span, (1 + math.sqrt(g)) * math.sqrt(FAR / t))
        left = 0.0
        for rows, here in pieces(r, c, reach):
            u = torch.exp((-t / g) * (r[here] - c[rows].unsqueeze(1)).square())
            z = (u @ law.mass[here]).pow(g - 1)
            u = u[z > 1e-24 * varying]
            q = law.mass[here] * u
            step = max(1, CELLS // u.shape[1] ** 2)
            for some, weight in zip(u.split(step), q.split(step), strict=True):
                if not len(some):
                    continue
                left += float((weight.sum(1).pow(g) - weight.pow(g).sum(1)).clamp(min=0).sum())
                sums = (
                    chosen(r[here], weight, g - 1, unit, half),
                    chosen(r[here], weight, g - 2, unit, half),
                )
                node = torch.full((len(some),), root, dtype=r.dtype)
                gate.add(sums, r[here], here, weight, some, (first * node, second * node))
        if g * root * left <= TOLERANCE * varying:
            break
    return gate
