"""Planted faults in the second tier's advantages, aggregations and penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.faults import posing
from windage.analysis.audit.logged import Subject
from windage.estimators import advantage, baselines, objectives
from windage.estimators.catalogue import get


def _with(entry: str, function: Callable[..., Any], **traits: Any) -> Subject:
    """An entry whose advantage is a wrong function under the right one's name and settings."""
    base = get(entry)
    member = posing(function, base.advantage.function, **traits)
    settings = {k: v for k, v in base.advantage.settings if k in dict(member.settings)}
    return Subject(estimator=replace(base, advantage=member.change(**settings)))


def batch_std_by_group() -> Subject:
    """The spread over the batch is the largest reward of the group."""

    def wrong(rewards: Tensor, present: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
        found = advantage.group_mean(rewards, present)
        return found / (torch.where(present, rewards, 0.0).abs().amax(-1, keepdim=True) + eps)

    return _with("batch_std", wrong)


def whitened_by_prompt() -> Subject:
    """Returns are whitened over each prompt's tokens instead of the batch's."""

    def wrong(
        token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, eps: float = 1e-8
    ) -> Tensor:
        returns = advantage.returns_to_go(token_rewards, mask, gamma=gamma)
        return advantage.whiten(returns, mask, ddof=1, eps=eps)

    return _with("reinforce_plus_plus", wrong)


def whitened_over_padding() -> Subject:
    """The mean and the spread of whitening count masked tokens."""

    def wrong(rewards: Tensor, present: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
        centered = advantage.group_mean(rewards, present).unsqueeze(-1) * mask
        flat = centered.flatten(-3).unsqueeze(-2)
        every = torch.ones_like(flat, dtype=torch.bool)
        return advantage.whiten(flat, every, ddof=1, eps=eps).view(mask.shape) * mask

    return _with("reinforce_plus_plus_baseline", wrong)


def components_added_first() -> Subject:
    """The components are added up before they are normalized, and no batch follows."""

    def wrong(components: Tensor, present: Tensor, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
        return advantage.group_std(components.sum(-1), present, ddof=ddof, eps=eps)

    return _with("gdpo", wrong)


def success_average_centered() -> Subject:
    """The success average subtracts its mean: one order of the series is lost."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        return objectives.relative_mean(rewards, present)

    return _with("success_average", wrong)


def maxrl_over_std() -> Subject:
    """MaxRL divides by the standard deviation instead of the mean."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        return advantage.group_std(rewards, present)

    return _with("maxrl", wrong)


def maxrl_of_failures() -> Subject:
    """In a group without a success MaxRL counts every response as a failure."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        none = (torch.where(present, rewards, 0.0).sum(-1, keepdim=True) == 0) & present
        return torch.where(none, -1.0, objectives.relative_mean(rewards, present))

    return _with("maxrl", wrong)


def subsets_of_one_more() -> Subject:
    """Pass@k counts subsets of k + 1 responses where the group has them."""

    def wrong(rewards: Tensor, present: Tensor, *, k: int = 2) -> Tensor:
        return objectives.subset_max(rewards, present, k=min(k + 1, rewards.shape[-1]))

    return _with("pass_at_k", wrong)


def subsets_added_up() -> Subject:
    """PKPO's advantages are those of a sum over the group, under a mean."""

    def wrong(rewards: Tensor, present: Tensor, *, k: int = 2) -> Tensor:
        count = present.sum(-1, keepdim=True).clamp(min=1)
        return objectives.subset_gain(rewards, present, k=k) / count

    return _with("pkpo", wrong)


def gain_over_everyone() -> Subject:
    """PKPO's baseline is the mean of all subsets, the response's own among them."""

    def wrong(rewards: Tensor, present: Tensor, *, k: int = 2) -> Tensor:
        return advantage.group_mean(objectives.subset_max(rewards, present, k=k), present)

    return _with("pkpo", wrong)


def lead_over_std() -> Subject:
    """The lead of the best response is divided by the group's standard deviation."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        spread = torch.where(present, advantage.group_mean(rewards, present), 0.0)
        free = (present.sum(-1, keepdim=True) - 1).clamp(min=1)
        std = (spread.square().sum(-1, keepdim=True) / free).sqrt()
        return objectives.best_over_second(rewards, present) / (std + 1e-6)

    return _with("max_minus_second", wrong)


def opo_of_counts() -> Subject:
    """OPO's baseline leaves out the lengths."""

    def wrong(rewards: Tensor, present: Tensor, lengths: Tensor) -> Tensor:
        return advantage.leave_one_out(rewards, present)

    return _with("opo", wrong)


def opo_own_part_kept() -> Subject:
    """The leave-one-out form of OPO holds the response itself."""

    def wrong(rewards: Tensor, present: Tensor, lengths: Tensor) -> Tensor:
        return baselines.length_weighted(rewards, present, lengths)

    return _with("opo_leave_one_out", wrong)


def score_weights_left_out() -> Subject:
    """The baseline weighted by score norms leaves them out."""

    def wrong(rewards: Tensor, present: Tensor, *others: Tensor) -> Tensor:
        return advantage.leave_one_out(rewards, present)

    return _with("score_weighted", wrong)


def score_own_part_kept() -> Subject:
    """The leave-one-out form of the score-weighted baseline holds the response itself."""

    def wrong(rewards: Tensor, present: Tensor, *others: Tensor) -> Tensor:
        return baselines.score_weighted(rewards, present, *others)

    return _with("score_weighted_leave_one_out", wrong)


def _by_columns(own: bool) -> Callable[..., Tensor]:
    right = baselines.token_weighted if own else baselines.token_weighted_apart

    def wrong(token_rewards: Tensor, logp: Tensor, square: Tensor, mask: Tensor) -> Tensor:
        every = torch.ones_like(mask)
        reach = advantage.returns_to_go(token_rewards, mask)
        following = torch.nn.functional.pad(reach[..., 1:], (0, 1))
        return torch.where(mask, right(reach - following, logp, square, every), 0.0)

    return wrong


def positions_by_column() -> Subject:
    """The token baseline counts columns: a tool's tokens shift the positions after them."""
    return _with("optimal_token_baseline", _by_columns(True))


def token_own_part_kept() -> Subject:
    """The leave-one-out form of the token baseline holds the response itself."""

    def wrong(token_rewards: Tensor, logp: Tensor, square: Tensor, mask: Tensor) -> Tensor:
        return baselines.token_weighted(token_rewards, logp, square, mask)

    return _with("optimal_token_baseline_leave_one_out", wrong)


def lambda_of_width() -> Subject:
    """The lambda by length takes the padded width for the length."""

    def wrong(
        token_rewards: Tensor,
        values: Tensor,
        mask: Tensor,
        *,
        gamma: float = 1.0,
        alpha: float = 0.05,
    ) -> Tensor:
        lam = max(0.0, 1 - 1 / (alpha * mask.shape[-1]))
        return advantage.gae(token_rewards, values, mask, gamma=gamma, lam=lam)

    found = _with("ppo_length_adaptive", wrong)
    return replace(found, estimator=found.estimator.change(alpha=2.0))


def prompt_mean_of_means() -> Subject:
    """The prompt's mean is one of response means instead of tokens."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        prompts = present.any(-1, keepdim=True).sum(-2, keepdim=True)
        count = present.sum(-1, keepdim=True) * lengths.clamp(min=1)
        return present.double() / (prompts * count).clamp(min=1)

    base = get("prompt_mean")
    member = posing(wrong, base.aggregation.function)
    return Subject(estimator=replace(base, aggregation=member))


def likelihood_of_all() -> Subject:
    """The likelihood of correct responses is that of every response."""

    def wrong(outcomes: Tensor, *, coefficient: float = 0.1) -> Tensor:
        return torch.full_like(outcomes, coefficient).unsqueeze(-1)

    base = get("ppo_length_adaptive")
    (only,) = base.penalties
    return Subject(estimator=replace(base, penalties=(posing(wrong, only.function),)))


def k1_penalty_added() -> Subject:
    """The penalty k1 raises the reward where it should lower it."""

    def wrong(reference_ratio: Tensor, *, coefficient: float = 0.001) -> Tensor:
        return coefficient * reference_ratio

    base = get("rloo_k1_reward")
    (only,) = base.penalties
    return Subject(estimator=replace(base, penalties=(posing(wrong, only.function),)))


ADVANTAGES: dict[str, tuple[Callable[[], Subject], ...]] = {
    "advantage": (
        batch_std_by_group,
        whitened_by_prompt,
        whitened_over_padding,
        components_added_first,
        success_average_centered,
        maxrl_over_std,
        maxrl_of_failures,
        subsets_of_one_more,
        subsets_added_up,
        gain_over_everyone,
        lead_over_std,
        opo_of_counts,
        opo_own_part_kept,
        score_weights_left_out,
        score_own_part_kept,
        positions_by_column,
        token_own_part_kept,
        lambda_of_width,
    ),
    "aggregation": (prompt_mean_of_means,),
    "penalty": (likelihood_of_all, k1_penalty_added),
}
