"""Any advantage over few distinct rewards, under a shared denominator.

Given the counts n of the rewards in a group the advantages A_c are known.  With P(n, t) the
probability of the counts under the tilted measure, of which reward c has the mass m_c(t),

    mean      sum over n, c of P n_c A_c / m_c                                      E[1{c} x]
    square    sum over n, c of P n_c A_c^2 / m_c                                    E[1{c} |x|^2]
    pairs     sum over n, c, d of P (n_c n_d - 1{c=d} n_c) A_c A_d / (m_c m_d)      X_c . X_d

Lengths and weights need no classes of their own: the tilt carries them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.exact.coupled.tilted import Expansion, Tilt

CELLS = 4_000_000


def by_counts(
    tilt: Tilt,
    members: Float[Tensor, "R K"],
    counts: Float[Tensor, "C R"],
    advantages: Float[Tensor, "C R"],
    first: Float[Tensor, "C Q"],
    second: Float[Tensor, "C Q"],
    signs: int,
) -> Expansion:
    """Mean and mean square of a group whose advantages depend on the counts of its rewards.

    Args:
        tilt: measure of one response.
        members: 1 for the responses of each reward.
        counts: of the rewards; rows may repeat, with other advantages.
        advantages: of each reward in each row, 0 where it has no member.
        first, second: P(n, t) times the weights of the nodes, for the mean and the mean square.
        signs: of the advantage, for which contributions differ.
    """
    mass = tilt.masses(members)
    if signs > 1:
        advantages = torch.cat([advantages.clamp(min=0), advantages.clamp(max=0)], 1)
        counts, mass, members = counts.repeat(1, 2), mass.repeat(2, 1), members.repeat(2, 1)
    total = counts * advantages
    mean = tilt.weighted((total.T @ first) / mass) * members
    square = tilt.weighted(((total * advantages).T @ second) / mass) * members
    own = torch.diag_embed(second.T @ (total * advantages)).permute(1, 2, 0)
    pairs = own.new_zeros(own.shape)
    width = total.shape[1] ** 2
    for rows in torch.arange(len(total)).split(max(1, CELLS // width)):
        product = (total[rows].unsqueeze(2) * total[rows].unsqueeze(1)).flatten(1)
        pairs = pairs + (product.T @ second[rows]).view_as(own)
    sign = torch.arange(signs).repeat_interleave(len(members) // signs)
    return Expansion(
        features=members,
        sign=sign,
        kernel=(pairs - own) / mass.unsqueeze(1) / mass,
        mean=mean.view(signs, -1, mean.shape[1]).sum(1),
        square=square.view(signs, -1, square.shape[1]).sum(1),
    )
