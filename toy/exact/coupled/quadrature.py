"""Quotients as mixtures of exponentials, so that a group factorizes into its responses.

    1 / S^p = 1 / Gamma(p) * integral of t^(p - 1) e^(-t S)
    1 / (sqrt(v) + e)   = integral of a(t) e^(-t v),   a(t) = 1 / sqrt(pi t) - e erfcx(e sqrt t)
    1 / (sqrt(v) + e)^2 = integral of b(t) e^(-t v),   b(t) = - d a(t) / d e

over t > 0, every density positive, and e^(-t S) is one factor a response.  The rule is the
trapezoid in s with t = exp(s - exp(-s)): in log t where t is large, and doubly exponential towards
0, where densities such as t^(-1/2) would make a trapezoid in log t long.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

STEP = 0.22
# exp(-75 / 2) and exp(-40) are below rounding: where the density t^{-1/2} and e^{-t x} end.
LEAST, MOST = -math.log(75.0), 40.0
# From here on the densities come from their expansion: their closed forms cancel.
LARGE = 6.0


def laplace(
    low: float, high: float, *, step: float = STEP
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """Nodes and weights of an integral over t > 0 of density times e^(-t S).

        1 / S = sum over q of weights[q] e^(-nodes[q] S)

    and likewise with a density f(nodes) as a factor, smooth in log t and no steeper at 0 than
    t^(-1/2), for every S from `low` to `high`.  The number of nodes grows as log(high / low).

    Args:
        low, high: least and largest value of S, above 0.
        step: of the trapezoid; halving it squares the relative error, 1e-13 as it stands.

    Example:
        >>> t, w = laplace(1.0, 8.0)
        >>> (w * torch.exp(-t * 4.0)).sum()
        tensor(0.2500, dtype=torch.float64)
    """
    count = math.ceil((math.log(MOST * high / low) - LEAST) / step) + 1
    s = LEAST + step * torch.arange(count, dtype=torch.float64)
    inner = torch.exp(-s)
    t = torch.exp(s - inner) / high
    return t, step * (1 + inner) * t


def raised(
    nodes: Float[Tensor, " Q"], weights: Float[Tensor, " Q"], power: int
) -> Float[Tensor, " Q"]:
    """Weights of 1/S^power at the nodes of 1/S.

    Example:
        >>> t, w = laplace(1.0, 8.0)
        >>> (raised(t, w, 2) * torch.exp(-t * 4.0)).sum()
        tensor(0.0625, dtype=torch.float64)
    """
    return weights * nodes.pow(power - 1) / math.factorial(power - 1)


def _expanded(z: Float[Tensor, " n"], *, squared: bool) -> Float[Tensor, " n"]:
    """Asymptotic series of sqrt(pi) z erfcx(z), less its first term, for z of 6 or more."""
    x = 1 / (2 * z.square())
    term, total = torch.ones_like(z), torch.zeros_like(z)
    for n in range(1, 30):
        term = -term * (2 * n - 1) * x
        total = total - (2 * n * term if squared else term)
    return total


def root_density(t: Float[Tensor, " n"], eps: float) -> Float[Tensor, " n"]:
    """Density a(t) whose exponentials make 1 / (sqrt(v) + eps).

    Example:
        >>> t, w = laplace(0.01, 1.0)
        >>> round(float((w * root_density(t, 0.5) * torch.exp(-0.25 * t)).sum()), 12)
        1.0
    """
    z = eps * t.sqrt()
    near = 1 - math.sqrt(math.pi) * z * torch.special.erfcx(z)
    share = torch.where(z < LARGE, near, _expanded(z.clamp(min=LARGE), squared=False))
    return share / (math.pi * t).sqrt()


def square_density(t: Float[Tensor, " n"], eps: float) -> Float[Tensor, " n"]:
    """Density b(t) whose exponentials make 1 / (sqrt(v) + eps)^2.

    Example:
        >>> t, w = laplace(0.01, 1.0)
        >>> round(float((w * square_density(t, 0.5) * torch.exp(-0.25 * t)).sum()), 12)
        1.0
    """
    z = eps * t.sqrt()
    near = (1 + 2 * z.square()) * torch.special.erfcx(z) - 2 * z / math.sqrt(math.pi)
    far = z.clamp(min=LARGE)
    series = _expanded(far, squared=True) / (math.sqrt(math.pi) * far)
    return torch.where(z < LARGE, near, series)
