"""Advantages brought to mean 0 and standard deviation 1 over the batch.

Members here couple all prompts: the advantage of a response depends on the rewards of every other.
`advantage.batch_std`, which divides by the batch's standard deviation and nothing else, is with its
siblings.

Differences:
    1. A spread is divided by as (std + eps); verl's `masked_whiten` takes sqrt(var + eps).
    2. Equal values give exactly 0, at any eps.
    3. Whitening counts trainable tokens, so a long response has more say in mean and spread than a
       short one (verl); OpenRLHF does likewise, and its option of a mean by response is not here.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.advantage import (
    everyone,
    from_mean,
    group_std,
    over_spread,
    returns_to_go,
    whiten,
)
from windage.estimators.batch import promote
from windage.estimators.errors import BadInput, within
from windage.estimators.member import declare


def _over_tokens(
    advantages: Float[Tensor, "*batch P G T"], mask: Bool[Tensor, "*batch P G T"], eps: float
) -> Float[Tensor, "*batch P G T"]:
    """`whiten` over all trainable tokens of the batch, with ddof 1."""
    flat = advantages.flatten(-3).unsqueeze(-2)
    every = mask.flatten(-3).unsqueeze(-2)
    return whiten(flat, every, ddof=1, eps=eps).view(mask.shape)


@declare("batch", "token_rewards", "mask", lone=True)
def whitened_returns(
    token_rewards: Float[Tensor, "*batch P G T"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> Float[Tensor, "*batch P G T"]:
    """Give each token its return-to-go, whitened over all trainable tokens of the batch.

        A[p, g, t] = (U[p, g, t] - mean) / (std + eps),   U the discounted return-to-go

    Claims:
        Needs no group: a prompt may have one response.
        Biased on-policy at every size of the batch: mean and std hold the response itself, and long
        responses count more often.

    Args:
        token_rewards: reward that arrives with each token, penalties included.
        mask: trainable tokens.
        gamma: discount a trainable token.
        eps: in units of reward.

    Raises:
        ValueError: gamma outside 0 to 1, eps below 0.

    Example:
        >>> whitened_returns(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]),
        ...                  torch.tensor([[[True, True], [True, True]]]), eps=0.0)
        tensor([[[ 0.8660,  0.8660],
                 [-0.8660, -0.8660]]])

    References:
        Hu et al., 2025, arXiv:2501.03262.
    """
    within(0, 1, gamma=gamma)
    return _over_tokens(returns_to_go(token_rewards, mask, gamma=gamma), mask, eps)


@declare("batch", "rewards", "present", "mask")
def whitened_group_mean(
    rewards: Float[Tensor, "*batch P G"],
    present: Bool[Tensor, "*batch P G"],
    mask: Bool[Tensor, "*batch P G T"],
    *,
    eps: float = 1e-8,
) -> Float[Tensor, "*batch P G T"]:
    """Subtract the group's mean, then whiten over all trainable tokens of the batch.

        A[p, g, t] = (c[p, g] - mean) / (std + eps),   c = r - group mean, on every token

    Claims:
        Biased on-policy: the mean over tokens is not 0 where lengths vary with the reward, and the
        spread holds the response itself.
        Groups that all have equal rewards give exactly 0.

    Args:
        rewards: one scalar a response; a row holds independent responses of one prompt.
        present: False where a group is incomplete.
        mask: trainable tokens.
        eps: in units of reward.

    Raises:
        ValueError: groups of one response, eps below 0.

    Example:
        >>> whitened_group_mean(torch.tensor([[1.0, 0.0]]), torch.tensor([[True, True]]),
        ...                     torch.tensor([[[True], [True]]]), eps=0.0)
        tensor([[[ 0.7071],
                 [-0.7071]]])

    References:
        Hu et al., 2025, arXiv:2501.03262.
    """
    centered, _ = from_mean(rewards, present)
    return _over_tokens(centered.unsqueeze(-1) * mask, mask, eps)


@declare("batch", "components", "present")
def decoupled_std(
    components: Float[Tensor, "*batch P G C"],
    present: Bool[Tensor, "*batch P G"] | None = None,
    *,
    component_weights: tuple[float, ...] | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Float[Tensor, "*batch P G"]:
    """Normalize each component of the reward in its group, add them up, normalize by the batch.

        z[p, g] = sum over c of weight[c] (r[p, g, c] - mean) / (std + eps)   within groups
        A[p, g] = (z[p, g] - mean) / (std + eps)                             over the batch

    Claims:
        A component on a large scale counts as much as one on a small scale.
        One component: `group_std` up to one factor for the batch.
        Groups that are equal in every component give exactly 0 where all groups are.

    Args:
        components: parts of the reward, each on its own scale.
        present: False where a group is incomplete.
        component_weights: one a component; None: 1 for each.
        ddof: of both standard deviations.
        eps: in units of reward.

    Raises:
        ValueError: groups of one response, ddof not 0 or 1, eps below 0, other than C weights.

    Example:
        >>> decoupled_std(torch.tensor([[[1.0, 10.0], [0.0, 0.0]]]), ddof=0, eps=0.0)
        tensor([[ 1., -1.]])

    References:
        Liu et al., 2026, arXiv:2601.05242.
    """
    parts = promote(components).movedim(-1, 0)
    weights = (1.0,) * len(parts) if component_weights is None else component_weights
    if len(weights) != len(parts):
        raise BadInput(
            f"component_weights is {weights}; allowed: a tuple of {len(parts)} numbers, one a "
            "component"
        )
    present = everyone(parts[0], present)
    normed = [group_std(part, present, ddof=ddof, eps=eps) for part in parts]
    terms = torch.stack([w * z for w, z in zip(weights, normed, strict=True)])
    total, largest = terms.sum(0), terms.abs().sum(0).amax((-2, -1), keepdim=True)
    count = present.sum((-2, -1), keepdim=True)
    mean = total.sum((-2, -1), keepdim=True) / count.clamp(min=1)
    centered = torch.where(present, total - mean, 0.0)
    return over_spread(centered, count - ddof, largest, (-2, -1), eps)
