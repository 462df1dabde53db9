"""Few vectors of which many are mixtures, so that each costs one backward pass and no more.

Coefficients of entries on the tokens of one response are rows of a table.  Those that weigh the
whole response are multiples of one row; those that weigh tokens span at most as many dimensions as
there are tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Rest of a row, as a share of its length, that is left out: far below a sketch's error, and above
# what rounding makes of equal log-probabilities.
TOLERANCE = 1e-5


class Directions(NamedTuple):
    """A table as mixtures of few rows.

    Args:
        rows: of length 1.
        mixture: table = mixture @ rows, up to the tolerance.
    """

    rows: Float[Tensor, "r W"]
    mixture: Float[Tensor, "N r"]


def directions(table: Float[Tensor, "N W"], tolerance: float = TOLERANCE) -> Directions:
    """Rows of a table, chosen greedily, of which all its rows are mixtures.

    Args:
        tolerance: of what is left of a row, relative to its length.

    Example:
        >>> found = directions(torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]).double())
        >>> found.rows.shape, [round(float(x), 4) + 0.0 for x in found.mixture]
        (torch.Size([1, 2]), [1.4142, 0.0, 2.8284])
    """
    length = table.norm(dim=-1, keepdim=True)
    unit = table / torch.where(length > 0, length, 1.0)
    rest, picked, basis = unit.clone(), list[int](), unit[:0]
    for _ in range(min(table.shape)):
        left = rest.square().sum(-1)
        best = int(left.argmax())
        if float(left[best]) <= tolerance**2:
            break
        picked.append(best)
        axis = rest[best] - basis.T @ (basis @ rest[best])
        basis = torch.cat([basis, (axis / axis.norm()).unsqueeze(0)])
        rest = unit - (unit @ basis.T) @ basis
    rows = unit[picked]
    if not picked:
        return Directions(rows, table.new_zeros((len(table), 0)))
    return Directions(rows, torch.linalg.lstsq(rows.T, table.T).solution.T)
