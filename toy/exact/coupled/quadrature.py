"""Quadrature of reciprocals: a sum over responses in a denominator becomes a product over them.

    1 / S^p = 1 / Gamma(p) * integral over t > 0 of t^(p - 1) e^(-t S)

and e^(-t S) is one factor a response.  All terms are positive, so nothing cancels.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Width of a step in the logarithm of t; where e^(-t S) starts to differ from 1; where it is 0.
STEP, START, END = 0.25, 1e-22, 42.0


def laplace(
    low: float, high: float, *, step: float = STEP
) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    """Nodes and weights of 1/S for every S from `low` to `high`: a trapezoid in log t.

        1 / S = sum over q of weights[q] e^(-nodes[q] S)

    The error is the same for every S in range: about 2 |Gamma(p + 2 pi i / step)| / Gamma(p), below
    1e-13 for p up to 2.

    Args:
        low, high: least and largest value of S, above 0.
        step: of the trapezoid.

    Example:
        >>> t, w = laplace(1.0, 8.0)
        >>> (w * torch.exp(-t * 4.0)).sum()
        tensor(0.2500, dtype=torch.float64)
    """
    start, end = math.log(START / high), math.log(END / low)
    count = math.ceil((end - start) / step) + 1
    nodes = (start + step * torch.arange(count, dtype=torch.float64)).exp()
    return nodes, step * nodes


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
