"""Advantages over statistics of the whole batch, where rewards take few values.

The other prompts enter an advantage through a sum over prompts only (of squares about the group's
mean, or of tokens and of rewards by token), so that its law is a convolution of the laws of single
groups on few values.  Each value keeps one batch that has it: the estimator's own advantage is
called on the prompt's group beside that batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.advantage import batch_std, constant, terminal_rewards
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member, use
from windage.estimators.whitening import whitened_group_mean, whitened_returns
from windage.toy.exact.classes import signs
from windage.toy.exact.coupled.counts import by_counts
from windage.toy.exact.coupled.ratios import Shared, ratios
from windage.toy.exact.coupled.shared import Nodes, Prompt
from windage.toy.exact.coupled.tilted import Expansion, Tilt
from windage.toy.exact.moments import Moments
from windage.toy.exact.tuples import spread
from windage.toy.problems import Problem

CELLS = 4_000_000
# Sums that differ by less than this part of the largest are one value.
MERGED = 1e-12

Key = Callable[[Tensor, Tensor], Tensor]


def squares(rewards: Float[Tensor, "C G"], lengths: Float[Tensor, "C G"]) -> Float[Tensor, "C 1"]:
    """Sum of squares about the group's mean.

    Example:
        >>> squares(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2))
        tensor([[0.5000]])
    """
    return (rewards - rewards.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)


def by_token(rewards: Float[Tensor, "C G"], lengths: Float[Tensor, "C G"]) -> Float[Tensor, "C 3"]:
    """Tokens of the group, and over its tokens the sums of the reward and of its square."""
    return torch.stack([(lengths * rewards.pow(k)).sum(-1) for k in range(3)], -1)


def by_token_centered(
    rewards: Float[Tensor, "C G"], lengths: Float[Tensor, "C G"]
) -> Float[Tensor, "C 3"]:
    """The same of the reward minus the group's mean."""
    return by_token(rewards - rewards.mean(-1, keepdim=True), lengths)


KEYS: dict[Callable[..., Any], Key] = {
    batch_std: squares,
    whitened_group_mean: by_token_centered,
    whitened_returns: by_token,
}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Law:
    """The law of a sum over prompts, at every node.

    Args:
        keys: values of the sum.
        weight: of each at each node.
        rewards, lengths: one batch for each value.
    """

    keys: Float[Tensor, "L k"]
    weight: Float[Tensor, "L Q"]
    rewards: Float[Tensor, "L P G"]
    lengths: Float[Tensor, "L P G"]

    def then(self, other: Law) -> Law:
        """The law of the sum of two, equal values merged."""
        keys = (self.keys.unsqueeze(1) + other.keys).flatten(0, 1)
        weight = (self.weight.unsqueeze(1) * other.weight).flatten(0, 1)
        unit = MERGED * keys.abs().amax(0).clamp(min=1e-300)
        _, place = (keys / unit).round().unique(dim=0, return_inverse=True)
        count = int(place.max()) + 1
        one = torch.zeros(count, dtype=torch.long).scatter(0, place, torch.arange(len(place)))
        first, second = one // len(other.keys), one % len(other.keys)
        return Law(
            keys=keys[one],
            weight=weight.new_zeros((count, weight.shape[1])).index_add(0, place, weight),
            rewards=torch.cat([self.rewards[first], other.rewards[second]], 1),
            lengths=torch.cat([self.lengths[first], other.lengths[second]], 1),
        )


def members_of(prompt: Prompt) -> tuple[Tensor, Tensor, Tensor]:
    """Class, reward and length of each member of each group of a prompt."""
    who = spread(prompt.groups.counts.long(), prompt.group_size)
    return who, prompt.values[who, 0], prompt.values[who, 1]


def law_of(prompts: list[Prompt], key: Key, group_size: int, u: Float[Tensor, " Q"]) -> Law:
    """The law of the sum over some prompts, times e^(-u S) of their responses."""
    nothing = torch.zeros((1, 0, group_size), dtype=u.dtype)
    found = Law(
        keys=u.new_zeros((1, 1)),
        weight=torch.ones_like(u).unsqueeze(0),
        rewards=nothing,
        lengths=nothing,
    )
    for prompt in prompts:
        _, rewards, lengths = members_of(prompt)
        one = Law(
            keys=key(rewards, lengths),
            weight=prompt.kept(Tilt(prompt.walk, prompt.s, u)),
            rewards=rewards.unsqueeze(1),
            lengths=lengths.unsqueeze(1),
        )
        found = found.then(one)
    return found


def _advantages(
    member: Member, rewards: Float[Tensor, "C P G"], lengths: Float[Tensor, "C P G"]
) -> Float[Tensor, "C G"]:
    """Advantages of the first prompt of each batch, the same at all tokens of a response."""
    fields = {"rewards": rewards, "present": torch.ones_like(rewards, dtype=torch.bool)}
    if "mask" in member.traits.needs:
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        fields |= {"mask": mask, "token_rewards": terminal_rewards(rewards, mask)}
    found: Tensor = member(*(fields[name] for name in member.traits.needs))[:, 0]
    return found if found.dim() == 2 else found[..., 0]


def by_length(advantage: Member) -> bool:
    """Whether a statistic counts tokens, so that lengths are classes of their own."""
    return "mask" in advantage.traits.needs


def expand(prompts: list[Prompt], p: int, tilt: Tilt, nodes: Nodes, advantage: Member) -> Expansion:
    """One prompt's part, over its own groups and the law of the others."""
    prompt, key = prompts[p], KEYS[advantage.function]
    law = law_of(prompts[:p] + prompts[p + 1 :], key, prompt.group_size, nodes.others)
    who, rewards, lengths = members_of(prompt)
    groups, values = len(who), len(law.keys)
    found = rewards.new_zeros((groups, values, len(prompt.members)))
    width = int(torch.cat([lengths.flatten(), law.lengths.flatten()]).max())
    width = width if by_length(advantage) else 1
    step = max(1, CELLS // (values * len(prompts) * prompt.group_size * width))
    for rows in torch.arange(groups).split(step):
        both = [
            torch.cat(
                [
                    own[rows, None, None].expand(-1, values, 1, -1),
                    other.expand(len(rows), *other.shape),
                ],
                2,
            ).flatten(0, 1)
            for own, other in ((rewards, law.rewards), (lengths, law.lengths))
        ]
        mine = _advantages(advantage, *both).view(len(rows), values, -1)
        found[rows] = found[rows].scatter(2, who[rows, None].expand_as(mine), mine)
    weight = (prompt.kept(tilt).unsqueeze(1) * law.weight).flatten(0, 1)
    return by_counts(
        tilt,
        prompt.members,
        prompt.groups.counts.repeat_interleave(values, 0),
        found.flatten(0, 1),
        weight * nodes.first,
        weight * nodes.second,
        len(signs(prompt.estimator)),
    )


def batch(shared: Shared, problem: Problem, group_size: int) -> Moments:
    """Mean, variance and drift of an estimator whose advantage has statistics of the batch."""
    advantage = shared.estimator.advantage
    counted: Estimator = replace(shared.estimator, advantage=use(constant))

    def each(prompts: list[Prompt], p: int, tilt: Tilt, nodes: Nodes) -> Expansion:
        return expand(prompts, p, tilt, nodes, advantage)

    shared = replace(shared, estimator=counted)
    apart = by_length(advantage)
    return ratios(shared, problem, group_size, expand=each, classes_by_length=apart)
