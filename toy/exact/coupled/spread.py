"""Group standard deviation over any number of rewards, at a cost free of the group size.

With m the group's mean, v = (1/G) sum of (r_i - m)^2 and D_i = r_i - m the advantage is
D_i / (a sqrt(v) + eps), a^2 = G / (G - ddof): a mixture over t of D_i e^(-t v) (`quadrature`), and

    e^(-t v) = sqrt(t / pi) * integral over c of product over i of u(r_i)
    u(r) = e^(-(t / G) (r - c)^2)

since the sum of (r_i - c)^2 is G v + G (m - c)^2.  Given v and m, c - m is normal with variance
1 / 2t, so that under the integral D_i may be read as r_i - c and D_i D_j as (r_i - c)(r_j - c) -
1 / 2t.  Responses are independent under the integral: with y_k = p_k u_k and Z = sum of y

    E[D e^(-t v) | k]        (r_k - c) u_k Z^(G-1)
    E[D^2 e^(-t v) | k]      ((r_k - c)^2 - 1 / 2t) u_k Z^(G-1)
    E[D D' e^(-t v) | k, l]  ((r_k - c)(r_l - c) - 1 / 2t) u_k u_l Z^(G-2)

Groups of equal rewards give 0 and are left out term by term (Z^n - y_k^n instead of Z^n), so that
rare groups that vary are not lost in the rounding of common ones that do not.  The trapezoid in c
converges faster than exponentially; c need only lie near two rewards at once.  What is cut off at
large t is at most G P(v > 0) E[e^(-t v) | v > 0].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.exact.coupled.by_reward import Products
from windage.toy.exact.coupled.quadrature import laplace, root_density, square_density

# Trapezoid in c, in units of 1 / sqrt(t), and how far a factor e^(-x) is followed.
PITCH, FAR = 0.5, 44.0
TOLERANCE = 1e-16
CELLS = 500_000


@final
@dataclass(frozen=True, kw_only=True)
class Law:
    """Rewards of one prompt, ascending, and how the group's deviation divides.

    Args:
        rewards: distinct.
        mass: probability of each under the sampler.
        group_size: responses of a group.
        ddof: of the deviation.
        eps: added to it.
    """

    rewards: Float[Tensor, " R"]
    mass: Float[Tensor, " R"]
    group_size: int
    ddof: int
    eps: float

    @property
    def varying(self) -> float:
        """Probability of a group whose rewards are not all equal."""
        rest = rest_of(self.mass.unsqueeze(0), self.mass)[0]
        return float(self.mass @ without(rest, self.group_size - 1))

    def nodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values of t, and the weights there of 1 / (a sqrt v + eps) and of its square."""
        g = self.group_size
        stretch = math.sqrt((g - self.ddof) / g)
        eps = self.eps * stretch
        span = float(self.rewards[-1] - self.rewards[0])
        least = float(self.rewards.diff().min()) ** 2 * (g - 1) / g**2
        t, dt = laplace(least, max(span**2 / 4, eps**2))
        return t, stretch * dt * root_density(t, eps), stretch**2 * dt * square_density(t, eps)


def rest_of(y: Float[Tensor, "n R"], mass: Float[Tensor, " R"]) -> Float[Tensor, "n R"]:
    """Share of all other rewards in each row, exact where the likeliest reward fills the row."""
    total = y.sum(1, keepdim=True)
    rest = (total - y).clamp(min=0)
    main = int(mass.argmax())
    rest[:, main] = y[:, :main].sum(1) + y[:, main + 1 :].sum(1)
    return rest / total.clamp(min=torch.finfo(y.dtype).tiny)


def without(rest: Float[Tensor, "*shape"], power: int) -> Float[Tensor, "*shape"]:
    """1 - (1 - rest)^power without cancellation: the part of Z^n that is not all one reward.

    Example:
        >>> without(torch.tensor([0.5]), 2)
        tensor([0.7500])
    """
    if power == 0:
        return torch.zeros_like(rest)
    return -torch.expm1(power * torch.log1p(-rest.clamp(max=1)))


@final
class Totals:
    """What the integral over t and c adds up to.

    Args:
        rewards: how many.
    """

    def __init__(self, rewards: int) -> None:
        zero = torch.zeros(rewards, dtype=torch.float64)
        self.mean, self.norm, self.same = zero, zero.clone(), zero.clone()
        self.pairs = zero.new_zeros(())
        self.seen = zero.new_zeros(())


def centers(
    rewards: Float[Tensor, " R"], reach: float, pitch: float, tail: float
) -> Float[Tensor, " n"]:
    """Multiples of the pitch within `reach` of two rewards, no farther than `tail` from all.

    Example:
        >>> centers(torch.tensor([0.0, 1.0, 9.0]), 1.5, 0.5, 0.25)
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
    """
    low = torch.maximum(rewards[1:] - reach, rewards[0] - tail)
    high = torch.minimum(rewards[:-1] + reach, rewards[-1] + tail)
    first = (low / pitch).ceil().long()
    last = (high / pitch).floor().long()
    first[1:] = torch.maximum(first[1:], last[:-1].cummax(0).values + 1)
    count = (last - first + 1).clamp(min=0)
    start = torch.repeat_interleave(first - (count.cumsum(0) - count), count)
    return (start + torch.arange(len(start))).to(rewards.dtype) * pitch


def pieces(
    rewards: Float[Tensor, " R"], c: Float[Tensor, " n"], reach: float
) -> Iterator[tuple[slice, slice]]:
    """Runs of centers with the run of rewards within reach of any of them."""
    low = torch.searchsorted(rewards, c - reach)
    high = torch.searchsorted(rewards, c + reach, right=True)
    width = 2 * int((high - low).max()) + 8 if len(c) else 0
    start = 0
    while start < len(c):
        first = int(low[start])
        last = int(torch.searchsorted(high, first + width, right=True))
        end = max(start + 1, min(last, start + max(1, CELLS // width)))
        yield slice(start, end), slice(first, int(high[end - 1]))
        start = end


def off_diagonal(
    a: Float[Tensor, "n w"], products: Products, here: slice, main: int
) -> Float[Tensor, " n"]:
    """Sum over k != l of a_k a_l X_k . X_l in each row, with the likeliest reward set apart."""
    left, right, same = products.left[:, here], products.right[:, here], products.same[here]
    total = a.new_zeros(len(a))
    if 0 <= main < a.shape[1]:
        row = products.right[:, here].T @ (products.core.T @ left[:, main])
        alone = a[:, main].clone()
        a = a.clone()
        a[:, main] = 0
        total = 2 * alone * (a @ row)
    return total + ((a @ left.T) @ products.core * (a @ right.T)).sum(1) - a.square() @ same


def gather(
    totals: Totals,
    law: Law,
    products: Products,
    t: float,
    weights: tuple[float, float],
) -> float:
    """Add one value of t; gives the probability of varying groups under e^(-t v)."""
    g, r = law.group_size, law.rewards
    reach, pitch = math.sqrt(FAR * g / t), PITCH / math.sqrt(t)
    c = centers(r, reach, pitch, math.sqrt(FAR / t))
    root = math.sqrt(t / math.pi) * pitch
    first, second = root * weights[0], root * weights[1]
    left = 0.0
    main = int(law.mass.argmax())
    floor = 1e-24 * law.varying
    for rows, here in pieces(r, c, reach):
        away = r[here] - c[rows].unsqueeze(1)
        u = torch.exp((-t / g) * away.square())
        z = (u @ law.mass[here]).pow(g - 1)
        kept = (z > floor).nonzero().squeeze(1)
        if len(kept) < len(z):
            if not len(kept):
                continue
            away, u, z = away[kept], u[kept], z[kept]
        y = law.mass[here] * u
        total = y.sum(1)
        rest = rest_of(y, law.mass[here])
        one = without(rest, g - 1) * z.unsqueeze(1)
        left += float((one * y).sum())
        moment = away * u
        square = away.square() - 1 / (2 * t)
        totals.mean[here] += first * (moment * one).sum(0)
        totals.norm[here] += second * (square * u * one).sum(0)
        z = z / total
        two = without(rest, g - 2) * z.unsqueeze(1)
        totals.same[here] += second * (square * u.square() * two).sum(0)
        apart = off_diagonal(moment, products, here, main - here.start)
        apart = apart - off_diagonal(u, products, here, main - here.start) / (2 * t)
        totals.pairs += second * (z @ apart)
    return root * left


def totals(law: Law, products: Products) -> Totals:
    """Coefficients of the mean, of the squared norms and of the pairs' products, summed over t."""
    found = Totals(len(law.rewards))
    varying = law.varying
    for t, *weights in zip(*(x.tolist() for x in law.nodes()), strict=True):
        left = gather(found, law, products, t, (weights[0], weights[1]))
        if law.group_size * left <= TOLERANCE * varying:
            break
    return found
