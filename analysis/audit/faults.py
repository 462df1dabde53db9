"""Planted faults in the stages: members that pose as those of a catalogue entry and are wrong.

Each function carries the name and the traits of the member it replaces, as a slip in that member's
code would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.logged import Subject, at_once
from windage.estimators import advantage, aggregation, centering, correction, penalty
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.estimator import (
    Coefficients,
    Estimator,
    batch_terms,
    coefficients,
    token_coefficients,
)
from windage.estimators.member import Member, use


def posing(function: Callable[..., Any], original: Any, **traits: Any) -> Member:
    """A wrong function as a member, under the name and the traits of the right one."""
    function.__name__ = original.__name__
    function.traits = replace(original.traits, **traits)  # type: ignore[attr-defined]
    return use(function)


def _with_advantage(entry: str, function: Callable[..., Any], **traits: Any) -> Subject:
    base = get(entry)
    member = posing(function, base.advantage.function, **traits)
    return Subject(estimator=replace(base, advantage=member))


def _with_map(entry: str, function: Callable[..., Any], **traits: Any) -> Subject:
    base = get(entry)
    (only,) = base.corrections
    member = posing(function, only.map.function, **traits)
    settings = {k: v for k, v in only.map.settings if k in dict(member.settings)}
    changed = replace(only, map=member.change(**settings))
    return Subject(estimator=replace(base, corrections=(changed,)))


def _with_reach(entry: str, function: Callable[..., Any]) -> Subject:
    base = get(entry)
    (only,) = base.corrections
    reach = posing(function, only.reach.function)
    return Subject(estimator=replace(base, corrections=(replace(only, reach=reach),)))


def _with_aggregation(entry: str, function: Callable[..., Any], **traits: Any) -> Subject:
    base = get(entry)
    member = posing(function, base.aggregation.function, **traits)
    return Subject(estimator=replace(base, aggregation=member))


def _with_centering(function: Callable[..., Any]) -> Subject:
    base = get("centered_tis")
    return Subject(estimator=replace(base, centering=posing(function, centering.exact)))


def _with_penalty(function: Callable[..., Any], original: Any) -> Subject:
    return Subject(estimator=replace(get("grpo"), penalties=(posing(function, original),)))


def loo_over_g() -> Subject:
    """Leave-one-out divides the others' sum by G."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        kept = torch.where(present, rewards, 0.0)
        others = kept.sum(-1, keepdim=True) - kept
        return torch.where(present, kept - others / present.sum(-1, keepdim=True), 0.0)

    return _with_advantage("rloo", wrong)


def self_in_baseline() -> Subject:
    """The leave-one-out baseline includes the response itself."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        return advantage.group_mean(rewards, present)

    return _with_advantage("rloo", wrong)


def batch_baseline() -> Subject:
    """The baseline is the mean of the whole batch."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        kept = torch.where(present, rewards, 0.0)
        mean = kept.sum((-2, -1), keepdim=True) / present.sum((-2, -1), keepdim=True)
        return torch.where(present, kept - mean, 0.0)

    return _with_advantage("group_mean", wrong, scope="batch", linear=False)


def mean_over_the_others() -> Subject:
    """The group's mean is that of the other responses."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        return advantage.leave_one_out(rewards, present)

    return _with_advantage("group_mean", wrong)


def absent_in_mean() -> Subject:
    """The group's mean counts responses that never arrived."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        kept = torch.where(present, rewards, 0.0)
        return torch.where(present, kept - kept.mean(-1, keepdim=True), 0.0)

    return _with_advantage("group_mean", wrong)


def sign_of_advantage() -> Subject:
    """The advantage is the baseline minus the reward."""

    def wrong(rewards: Tensor, present: Tensor) -> Tensor:
        return -advantage.group_std(rewards, present)

    return _with_advantage("grpo", wrong)


def std_over_batch() -> Subject:
    """The standard deviation is taken over the batch instead of the group."""

    def wrong(rewards: Tensor, present: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
        return advantage.batch_std(rewards, present, ddof=ddof, eps=eps)

    return _with_advantage("grpo", wrong, scope="batch")


def population_std() -> Subject:
    """The standard deviation has ddof 0 whatever the setting."""

    def wrong(rewards: Tensor, present: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
        return advantage.group_std(rewards, present, ddof=0, eps=eps)

    return _with_advantage("grpo", wrong)


def rounding_residue() -> Subject:
    """Equal rewards leave a rounding residue that is divided by eps."""

    def wrong(rewards: Tensor, present: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
        count = present.sum(-1, keepdim=True)
        kept = torch.where(present, rewards, 0.0)
        centered = torch.where(present, rewards - kept.sum(-1, keepdim=True) / count, 0.0)
        spread = (centered.square().sum(-1, keepdim=True) / (count - ddof)).sqrt()
        return centered / (spread + eps)

    return _with_advantage("grpo", wrong)


def gae_decays_at_tools() -> Subject:
    """GAE decays at tokens of tools."""

    def wrong(
        token_rewards: Tensor,
        values: Tensor,
        mask: Tensor,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
    ) -> Tensor:
        carry = following = torch.zeros_like(values[..., 0])
        columns = []
        for t in reversed(range(values.shape[-1])):
            here = mask[..., t]
            delta = token_rewards[..., t] + gamma * following - values[..., t]
            carry = torch.where(here, delta, 0.0) + gamma * lam * carry
            following = torch.where(here, values[..., t], following)
            columns.append(torch.where(here, carry, 0.0))
        return torch.stack(columns[::-1], -1)

    return _with_advantage("ppo", wrong)


def gae_bootstraps_from_tools() -> Subject:
    """GAE bootstraps from the value at a tool's token."""

    def wrong(
        token_rewards: Tensor,
        values: Tensor,
        mask: Tensor,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
    ) -> Tensor:
        carry = following = torch.zeros_like(values[..., 0])
        columns = []
        for t in reversed(range(values.shape[-1])):
            here = mask[..., t]
            delta = token_rewards[..., t] + gamma * following - values[..., t]
            carry = torch.where(here, delta + gamma * lam * carry, carry)
            following = values[..., t]
            columns.append(torch.where(here, carry, 0.0))
        return torch.stack(columns[::-1], -1)

    return _with_advantage("ppo", wrong)


def ratio_inverted() -> Subject:
    """The ratio is behavior over current."""

    def wrong(effective: Tensor, advantages: Tensor) -> Tensor:
        return (-effective).exp()

    return _with_map("trajectory_is", wrong)


def product_for_geometric() -> Subject:
    """GSPO's ratio is the product instead of the geometric mean."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return correction.trajectory(log_ratio, mask)

    return _with_reach("gspo", wrong)


def geometric_for_product() -> Subject:
    """The trajectory's ratio is the geometric mean instead of the product."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return correction.geometric(log_ratio, mask)

    return _with_reach("trajectory_is", wrong)


def prefix_exclusive() -> Subject:
    """The prefix ratio leaves out the token itself."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.cumsum(-1) - log_ratio

    return _with_reach("prefix_is", wrong)


def suffix_for_prefix() -> Subject:
    """The prefix ratio runs to the end instead of from the start."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return correction.suffix(log_ratio, mask)

    return _with_reach("prefix_is", wrong)


def off_by_one() -> Subject:
    """A token gets the ratio of the token before."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.roll(1, -1)

    return _with_reach("token_is", wrong)


def geometric_over_width() -> Subject:
    """The geometric mean divides by the padded width."""

    def wrong(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return correction.trajectory(log_ratio, mask) / mask.shape[-1]

    return _with_reach("gspo", wrong)


def zero_above_cap() -> Subject:
    """A token above the cap loses its gradient."""

    def wrong(effective: Tensor, advantages: Tensor, *, cap: float = 2.0) -> Tensor:
        return torch.where(effective > math.log(cap), 0.0, effective.exp())

    return _with_map("token_tis", wrong)


def cap_on_the_inverse() -> Subject:
    """The cap is applied to behavior over current: a floor, no cap."""

    def wrong(effective: Tensor, advantages: Tensor, *, cap: float = 2.0) -> Tensor:
        return effective.clamp(min=-math.log(cap)).exp()

    return _with_map("cispo", wrong)


def cap_for_positives() -> Subject:
    """The cap is applied to positive advantages only."""

    def wrong(effective: Tensor, advantages: Tensor, *, cap: float = 2.0) -> Tensor:
        return torch.where(advantages > 0, effective.clamp(max=math.log(cap)), effective).exp()

    return _with_map("sequence_tis", wrong, reads="sign")


def floor_beside_cap() -> Subject:
    """A floor of one over the cap beside the cap."""

    def wrong(effective: Tensor, advantages: Tensor, *, cap: float = 2.0) -> Tensor:
        return effective.clamp(min=-math.log(cap), max=math.log(cap)).exp()

    return _with_map("starting_point", wrong)


def clip_sides_swapped() -> Subject:
    """The lower and the upper clip are swapped."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
    ) -> Tensor:
        return correction.clip(effective, advantages, clip_low=clip_high, clip_high=clip_low)

    return _with_map("dapo", wrong)


def clip_signs_swapped() -> Subject:
    """The clip takes positive advantages for negative ones."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
    ) -> Tensor:
        return correction.clip(effective, -advantages, clip_low=clip_low, clip_high=clip_high)

    return _with_map("ppo", wrong)


def clip_both_signs() -> Subject:
    """The clip zeroes both sides whatever the sign: min before multiply."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
    ) -> Tensor:
        return correction.keep(effective, advantages, low=1 - clip_low, high=1 + clip_high) * (
            effective.exp()
        )

    return _with_map("dr_grpo", wrong)


def dual_clip_unasked() -> Subject:
    """Ratios above 3 are zeroed for both signs."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
    ) -> Tensor:
        weight = correction.clip(effective, advantages, clip_low=clip_low, clip_high=clip_high)
        return torch.where(weight > 3, 0.0, weight)

    return _with_map("grpo", wrong)


def band_as_mask() -> Subject:
    """Inside the band the weight is 1 instead of the ratio."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, low: float = 0.5, high: float = 5.0
    ) -> Tensor:
        return correction.keep(effective, advantages, low=low, high=high)

    return _with_map("icepop", wrong)


def band_of_logs() -> Subject:
    """The band compares log-ratios with ratios."""

    def wrong(
        effective: Tensor, advantages: Tensor, *, low: float = 0.5, high: float = 5.0
    ) -> Tensor:
        inside = (effective >= low) & (effective <= high)
        return torch.where(inside, effective.exp(), 0.0)

    return _with_map("centered_mask", wrong)


def taper_signs_swapped() -> Subject:
    """TOPR tapers positive responses and keeps negative ones."""

    def wrong(
        effective: Tensor,
        advantages: Tensor,
        *,
        a_pos: float = 1.0,
        b_pos: float = 1.0,
        a_neg: float = 0.0,
        b_neg: float = 1.0,
    ) -> Tensor:
        return correction.taper(
            effective, advantages, a_pos=a_neg, b_pos=b_neg, a_neg=a_pos, b_neg=b_pos
        )

    return _with_map("topr", wrong)


def sum_for_mean() -> Subject:
    """Responses are summed, not averaged."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        return present.to(torch.float64)

    return _with_aggregation("rloo", wrong)


def mean_for_sum() -> Subject:
    """Tokens are averaged, not summed."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        return aggregation.sequence_mean(lengths, present)

    return _with_aggregation("reinforce", wrong)


def width_for_length() -> Subject:
    """The sequence mean divides by the padded width."""

    def wrong(mask: Tensor, present: Tensor) -> Tensor:
        responses = present.sum((-2, -1), keepdim=True)
        return present.to(torch.float64) / (responses * mask.shape[-1])

    return _with_aggregation("grpo", wrong, needs=("mask", "present"))


def width_for_constant() -> Subject:
    """The constant length is replaced by the padded width."""

    def wrong(mask: Tensor, present: Tensor, *, length: float | None = None) -> Tensor:
        responses = present.sum((-2, -1), keepdim=True)
        return present.to(torch.float64) / (responses * mask.shape[-1])

    return _with_aggregation("dr_grpo", wrong, needs=("mask", "present"))


def absent_in_denominator() -> Subject:
    """The mean over responses counts those that never arrived."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        return present.to(torch.float64) / (present.shape[-2] * present.shape[-1])

    return _with_aggregation("reinforce", wrong)


def empty_not_counted() -> Subject:
    """Empty responses are left out of the denominator."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        real = present & (lengths > 0)
        return present.to(torch.float64) / real.sum((-2, -1), keepdim=True).clamp(min=1)

    return _with_aggregation("rloo", wrong)


def sequence_mean_for_token_mean() -> Subject:
    """The token mean weighs every response alike."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        return aggregation.sequence_mean(lengths, present)

    return _with_aggregation("dapo", wrong)


def token_mean_by_prompt() -> Subject:
    """The token mean is taken prompt by prompt."""

    def wrong(lengths: Tensor, present: Tensor) -> Tensor:
        return aggregation.prompt_mean(lengths, present)

    return _with_aggregation("cispo", wrong)


def centering_dropped() -> Subject:
    """The mean score is not subtracted: drift is left in."""
    return Subject(estimator=replace(get("centered_tis"), centering=None))


def centering_added() -> Subject:
    """The mean score is added instead of subtracted."""

    def wrong(head_logp: Tensor, head_behavior_logp: Tensor, weigh: Any) -> Tensor:
        return -centering.exact(head_logp, head_behavior_logp, weigh)

    return _with_centering(wrong)


def centering_unweighted() -> Subject:
    """The mean score is not weighted as the token is."""

    def wrong(head_logp: Tensor, head_behavior_logp: Tensor, weigh: Any) -> Tensor:
        return head_behavior_logp.exp()

    return _with_centering(wrong)


def centering_by_trainer() -> Subject:
    """The mean score is taken under the trainer."""

    def wrong(head_logp: Tensor, head_behavior_logp: Tensor, weigh: Any) -> Tensor:
        ratio = centering.head_ratio(head_logp, head_behavior_logp)
        return head_logp.exp() * weigh(ratio)

    return _with_centering(wrong)


def k3_sign() -> Subject:
    """The k3 penalty pushes away from the reference."""

    def wrong(reference_ratio: Tensor, *, coefficient: float = 0.001) -> Tensor:
        return -penalty.loss_k3(reference_ratio, coefficient=coefficient)

    return _with_penalty(wrong, penalty.loss_k3)


def k1_for_k3() -> Subject:
    """K1 stands in the loss, whose gradient has mean zero."""

    def wrong(reference_ratio: Tensor, *, coefficient: float = 0.001) -> Tensor:
        return penalty.loss_k1(reference_ratio, coefficient=coefficient)

    return _with_penalty(wrong, penalty.loss_k3)


def entropy_sign() -> Subject:
    """The entropy bonus lowers the entropy."""

    def wrong(logp: Tensor, *, coefficient: float = 0.001) -> Tensor:
        return coefficient * logp

    return _with_penalty(wrong, penalty.entropy)


def contiguous_groups() -> Subject:
    """Rows are reshaped into groups without a look at their ids."""

    def assemble(rewards: Sequence[Any], group_ids: Sequence[Any], **columns: Any) -> Batch:
        groups = len(set(group_ids))
        names = [i * groups // len(group_ids) for i in range(len(group_ids))]
        return Batch.from_rows(rewards, names, **columns)

    return Subject(estimator=get("rloo"), assemble=assemble)


def denominators_by_micro_batch() -> Subject:
    """Denominators are those of the micro-batch."""

    def slices(estimator: Estimator, batch: Batch, parts: Sequence[slice]) -> list[Coefficients]:
        return [coefficients(estimator, batch.select(part)) for part in parts]

    return Subject(estimator=get("dapo"), slices=slices)


def mask_by_multiplication() -> Subject:
    """Log-ratios are multiplied by the mask, and NaN times 0 is NaN."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        terms = batch_terms(estimator, estimator.check(batch))
        (only,) = estimator.corrections
        ratio = (batch.logp - batch.get("behavior_logp")) * batch.mask
        weights = only.map(only.reach(ratio, batch.mask), terms.advantages) * batch.mask
        own = terms.advantages * terms.scale.unsqueeze(-1) * weights
        return Coefficients(own=own, head=None, terms=terms, weights=weights)

    return Subject(estimator=get("trajectory_is"), whole=whole)


def empty_dropped() -> Subject:
    """Empty responses are dropped from their group."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        left = batch.get("present") & (batch.lengths > 0)
        return at_once(estimator, replace(batch, present=left))

    return Subject(estimator=get("rloo"), whole=whole)


def rejected_out_of_denominator() -> Subject:
    """Rejected responses are taken out of the denominator."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        terms = batch_terms(estimator, estimator.check(batch))
        left = batch.get("present") & (terms.reason == 0)
        scale = estimator.aggregation(batch.lengths, left)
        return token_coefficients(estimator, replace(terms, scale=scale), batch)

    return Subject(estimator=get("starting_point"), whole=whole)


def rejected_out_of_baseline() -> Subject:
    """Rejected responses are taken out of their group's baseline."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        terms = batch_terms(estimator, estimator.check(batch))
        left = batch.get("present") & (terms.reason == 0)
        advantages = estimator.advantage(batch.rewards, left).unsqueeze(-1)
        return token_coefficients(estimator, replace(terms, advantages=advantages), batch)

    return Subject(estimator=get("starting_point"), whole=whole)


def advantage_of_the_neighbor() -> Subject:
    """Each response gets the advantage of the next one in its group."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        terms = batch_terms(estimator, estimator.check(batch))
        rolled = replace(terms, advantages=terms.advantages.roll(1, -2))
        return token_coefficients(estimator, rolled, batch)

    return Subject(estimator=get("group_mean"), whole=whole)


def head_without_advantage() -> Subject:
    """Head coefficients lack the advantage of their response."""

    def whole(estimator: Estimator, batch: Batch) -> Coefficients:
        found = at_once(estimator, batch)
        ones = replace(found.terms, advantages=torch.ones_like(found.terms.advantages))
        return replace(found, head=token_coefficients(estimator, ones, batch).head)

    return Subject(estimator=get("centered"), whole=whole)


STAGES: dict[str, tuple[Callable[[], Subject], ...]] = {
    "advantage": (
        loo_over_g,
        self_in_baseline,
        batch_baseline,
        mean_over_the_others,
        absent_in_mean,
        sign_of_advantage,
        std_over_batch,
        population_std,
        rounding_residue,
        gae_decays_at_tools,
        gae_bootstraps_from_tools,
    ),
    "correction": (
        ratio_inverted,
        product_for_geometric,
        geometric_for_product,
        prefix_exclusive,
        suffix_for_prefix,
        off_by_one,
        geometric_over_width,
        zero_above_cap,
        cap_on_the_inverse,
        cap_for_positives,
        floor_beside_cap,
        clip_sides_swapped,
        clip_signs_swapped,
        clip_both_signs,
        dual_clip_unasked,
        band_as_mask,
        band_of_logs,
        taper_signs_swapped,
    ),
    "aggregation": (
        sum_for_mean,
        mean_for_sum,
        width_for_length,
        width_for_constant,
        absent_in_denominator,
        empty_not_counted,
        sequence_mean_for_token_mean,
        token_mean_by_prompt,
    ),
    "centering": (
        centering_dropped,
        centering_added,
        centering_unweighted,
        centering_by_trainer,
    ),
    "penalty": (k3_sign, k1_for_k3, entropy_sign),
    "whole": (
        contiguous_groups,
        denominators_by_micro_batch,
        mask_by_multiplication,
        empty_dropped,
        rejected_out_of_denominator,
        rejected_out_of_baseline,
        advantage_of_the_neighbor,
        head_without_advantage,
    ),
}
