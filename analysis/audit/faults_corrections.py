"""Planted faults in the corrections of the second tier: slips of each new member."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.faults import posing
from windage.analysis.audit.logged import Subject, at_once
from windage.estimators import batchwide, maps, penalty, reaches
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.correction import clip, dual_clip
from windage.estimators.estimator import Coefficients, Estimator
from windage.estimators.member import Member


def _in_place(entry: str, wrong: Callable[..., Any], right: Any, **traits: Any) -> Subject:
    """An entry with one member of its corrections or penalties replaced."""
    base = get(entry)

    def changed(member: Member) -> Member:
        if member.function is not right:
            return member
        posed = posing(wrong, right, **traits)
        own = {k: v for k, v in member.settings if k in dict(posed.settings)}
        return posed.change(**own)

    found = replace(
        base,
        corrections=tuple(c.change(changed) for c in base.corrections),
        penalties=tuple(changed(m) for m in base.penalties),
    )
    return Subject(estimator=found)


def dual_clip_of_both_signs() -> Subject:
    """The second bound of the dual clip holds for positive advantages too."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        cap: float = 3.0,
    ) -> Tensor:
        weight = clip(effective, advantages, clip_low=clip_low, clip_high=math.inf)
        return torch.where(effective > math.log(cap), 0.0, weight)

    return _in_place("dual_clip", wrong, dual_clip)


def proximal_twice() -> Subject:
    """The decoupled form multiplies by policy / sampler instead of proximal / sampler."""
    base = get("decoupled_ppo")
    first, second = base.corrections
    return Subject(estimator=replace(base, corrections=(replace(first, numerator="logp"), second)))


def anchored_at_the_sampler() -> Subject:
    """The decoupled form's clip compares with the sampler."""
    base = get("decoupled_tis")
    first, second = base.corrections
    changed = replace(second, denominator="behavior_logp")
    return Subject(estimator=replace(base, corrections=(first, changed)))


def opsm_of_both_signs() -> Subject:
    """The off-policy mask drops far responses of either sign."""

    def wrong(effective: Tensor, advantages: Tensor, *, delta: float = 0.5) -> Tensor:
        return (effective >= -delta).to(effective.dtype)

    return _in_place("opsm", wrong, maps.mask_negative)


def opsm_of_the_inverse() -> Subject:
    """The off-policy mask measures log(pi / mu) instead of log(mu / pi)."""

    def wrong(effective: Tensor, advantages: Tensor, *, delta: float = 0.5) -> Tensor:
        return (~((advantages < 0) & (effective > delta))).to(effective.dtype)

    return _in_place("opsm", wrong, maps.mask_negative)


def gate_without_ratio() -> Subject:
    """The soft gate lacks the ratio in front."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
    ) -> Tensor:
        weight = maps.soft_gate(effective, advantages, tau_pos=tau_pos, tau_neg=tau_neg)
        return weight * (-effective).exp()

    return _in_place("sapo", wrong, maps.soft_gate)


def gate_temperatures_swapped() -> Subject:
    """The soft gate takes the temperature of the other sign."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
    ) -> Tensor:
        return maps.soft_gate(effective, advantages, tau_pos=tau_neg, tau_neg=tau_pos)

    return _in_place("sapo", wrong, maps.soft_gate)


def gamma_not_one_at_one() -> Subject:
    """The gamma-shaped weight lacks the constant that makes it 1 at ratio 1."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        *,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> Tensor:
        limits = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg}
        weight = maps.gamma_weight(effective, advantages, lambda_neg=lambda_neg, **limits)
        rate = torch.where(
            advantages >= 0, weight.new_tensor(lambda_pos), weight.new_tensor(lambda_neg)
        )
        return weight * (-rate).exp()

    return _in_place("vespo", wrong, maps.gamma_weight)


def inverse_of_negatives() -> Subject:
    """The inverse ratio goes to negative advantages."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        cap: float = 3.0,
    ) -> Tensor:
        plain = dual_clip(effective, advantages, clip_low=clip_low, clip_high=clip_high, cap=cap)
        inverse = torch.where(plain > 0, (-effective).clamp(max=math.log(cap)).exp(), 0.0)
        return torch.where(advantages < 0, inverse, plain)

    return _in_place("aspo", wrong, maps.inverse_positive)


def total_variation_of_both_sides() -> Subject:
    """The trust region by probability drops moves against the advantage too."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        logp: Tensor,
        behavior_logp: Tensor,
        *,
        limit: float = 0.15,
        cap: float = 20.0,
    ) -> Tensor:
        far = (logp.exp() - behavior_logp.exp()).abs() > limit
        return torch.where(far, 0.0, effective.clamp(max=math.log(cap)).exp())

    return _in_place("dppo_tv", wrong, maps.tv_mask)


def divergence_the_other_way() -> Subject:
    """The trust region by divergence takes KL(policy, sampler)."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        logp: Tensor,
        behavior_logp: Tensor,
        *,
        limit: float = 0.05,
        cap: float = 20.0,
    ) -> Tensor:
        kept = maps.kl_mask(effective, -advantages, behavior_logp, logp, limit=limit, cap=cap)
        return torch.where(kept > 0, effective.clamp(max=math.log(cap)).exp(), 0.0)

    return _in_place("dppo_kl", wrong, maps.kl_mask)


def log_clip_of_both_sides() -> Subject:
    """The geometric mean clips each token's log-ratio on both sides."""

    def wrong(
        log_ratio: Tensor, advantages: Tensor, *, log_low: float = 0.4, log_high: float = 0.4
    ) -> Tensor:
        return log_ratio.clamp(min=-log_low, max=log_high)

    return _in_place("gmpo", wrong, maps.one_sided)


def clipped_tokens_keep_their_gradient() -> Subject:
    """A token clipped inside the geometric mean keeps its own gradient."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, log_low: float = 0.4, log_high: float = 0.4
    ) -> Tensor:
        return torch.ones_like(effective)

    return _in_place("gmpo", wrong, maps.unclipped)


def group_sum_for_mean() -> Subject:
    """Self-normalized weights of a group add up to 1 instead of G."""

    def wrong(log_ratio: Tensor, mask: Tensor, *, cap: float = math.inf) -> Tensor:
        return reaches.over_group(log_ratio, mask, cap=cap) - math.log(log_ratio.shape[-2])

    return _in_place("self_normalized", wrong, reaches.over_group)


def normalized_over_the_batch() -> Subject:
    """Self-normalized weights divide by the mean of the batch instead of the group."""

    def wrong(log_ratio: Tensor, mask: Tensor, *, cap: float = math.inf) -> Tensor:
        return reaches.over_batch(log_ratio, mask, cap=cap)

    return _in_place("self_normalized", wrong, reaches.over_group, scope="batch")


def normalized_by_micro_batch() -> Subject:
    """Weights normalized over the batch are normalized over each micro-batch."""
    return Subject(estimator=get("self_normalized_batch"), slices=_piece_by_piece)


def _piece_by_piece(estimator: Estimator, batch: Batch, parts: Any) -> list[Coefficients]:
    whole = at_once(estimator, batch)
    scale = len(batch.rewards)
    pieces = [at_once(estimator, batch.select(part)) for part in parts]
    return [
        replace(piece, own=piece.own * (piece.terms.scale.shape[-2] / scale), head=whole.head)
        for piece in pieces
    ]


def truncated_after_the_mean() -> Subject:
    """The cap of normalized token weights is applied after the mean."""

    def wrong(log_ratio: Tensor, mask: Tensor, *, cap: float = math.inf) -> Tensor:
        return reaches.token_over_batch(log_ratio, mask).clamp(max=math.log(cap))

    return _in_place("normalized_tis", wrong, reaches.token_over_batch)


def empty_in_the_mean() -> Subject:
    """Padding and tool tokens count as ratios of 1 in the mean of the batch."""

    def wrong(log_ratio: Tensor, mask: Tensor, *, cap: float = math.inf) -> Tensor:
        return reaches.token_over_batch(log_ratio, torch.ones_like(mask), cap=cap)

    return _in_place("normalized_tis", wrong, reaches.token_over_batch)


def farthest_above_only() -> Subject:
    """The worst token is the one of largest ratio, however small another is."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.amax(-1, keepdim=True).expand_as(log_ratio)

    return _in_place("worst_token_mask", wrong, reaches.farthest)


def second_moment_by_token() -> Subject:
    """Each token's squared log-ratio is held to the limit of the mean."""

    def wrong(effective: Tensor, advantages: Tensor, mask: Tensor, *, tau: float = 0.04) -> Tensor:
        return torch.where(effective.square() < tau, effective.exp(), 0.0)

    return _in_place("m2po", wrong, batchwide.second_moment)


def smallest_covariances() -> Subject:
    """The covariance mask drops the smallest covariances of the band."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        logp: Tensor,
        mask: Tensor,
        *,
        share: float = 2e-4,
        low: float = 1.0,
        high: float = 5.0,
    ) -> Tensor:
        found = batchwide.covariance(advantages, logp, mask)
        inside = mask & (found > low) & (found < high)
        least = torch.where(inside, found, math.inf).amin((-3, -2, -1), keepdim=True)
        return (~(inside & (found <= least))).to(effective.dtype)

    return _in_place("clip_cov", wrong, batchwide.covariance_clip)


def pull_away_from_the_sampler() -> Subject:
    """The covariance penalty pushes away from the sampler."""

    def wrong(
        advantages: Tensor,
        log_ratio: Tensor,
        logp: Tensor,
        mask: Tensor,
        *,
        share: float = 2e-4,
        coefficient: float = 1.0,
    ) -> Tensor:
        fields = (advantages, log_ratio, logp, mask)
        return -batchwide.loss_kl_cov(*fields, share=share, coefficient=coefficient)

    return _in_place("kl_cov", wrong, batchwide.loss_kl_cov)


def square_of_the_tokens() -> Subject:
    """The squared log-ratio of the response is that of each token, without a half."""

    def wrong(log_ratio: Tensor, *, coefficient: float = 0.1) -> Tensor:
        return -2 * coefficient * log_ratio

    return _in_place("kimi", wrong, penalty.loss_square_response)


CORRECTIONS: dict[str, tuple[Callable[[], Subject], ...]] = {
    "correction": (
        dual_clip_of_both_signs,
        proximal_twice,
        anchored_at_the_sampler,
        opsm_of_both_signs,
        opsm_of_the_inverse,
        gate_without_ratio,
        gate_temperatures_swapped,
        gamma_not_one_at_one,
        inverse_of_negatives,
        total_variation_of_both_sides,
        divergence_the_other_way,
        log_clip_of_both_sides,
        clipped_tokens_keep_their_gradient,
        group_sum_for_mean,
        normalized_over_the_batch,
        truncated_after_the_mean,
        empty_in_the_mean,
        farthest_above_only,
        second_moment_by_token,
        smallest_covariances,
    ),
    "penalty": (
        pull_away_from_the_sampler,
        square_of_the_tokens,
    ),
    "whole": (normalized_by_micro_batch,),
}
