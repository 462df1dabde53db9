"""Entries of the second tier that differ in the correction, and what each claims.

Where a paper was not read in full the entry says what was read.  The sources of a rule are its
paper and the public code named in the differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from windage.estimators.advantage import group_mean, group_std, leave_one_out
from windage.estimators.aggregation import sequence_mean, token_mean, token_sum
from windage.estimators.batchwide import covariance_clip, loss_kl_cov, second_moment
from windage.estimators.claims import (
    BEHIND,
    CLIPPED,
    DIVERGED,
    DUAL,
    FAR,
    LOG_CLIPPED,
    MOVED,
    claims,
    how,
)
from windage.estimators.correction import (
    Correction,
    band,
    clip,
    dual_clip,
    geometric,
    keep,
    none,
    ratio,
    token,
    trajectory,
    truncate,
)
from windage.estimators.estimator import Estimator
from windage.estimators.maps import (
    gamma_weight,
    inverse_positive,
    kl_mask,
    mask_negative,
    one_sided,
    soft_gate,
    tv_mask,
    unclipped,
)
from windage.estimators.member import use
from windage.estimators.penalty import loss_square, loss_square_response
from windage.estimators.reaches import farthest, over_batch, over_group, token_over_batch

PROXIMAL = "a problem without a proximal policy stands for the first pass: it is the policy itself."
SAMPLER = "The ratio is to the sampler; the paper's is to the policy before the first pass."
SHARES = {
    token_mean: "1 / tokens of the batch",
    sequence_mean: "1 / (N T)",
    token_sum: "1 / N",
}
OUTSIDE = "ratio < low or ratio > high"
CLIP = "ratio, 0 beyond the clip; own token"


def _of(reach: Any, map_: Any, policies: str = "logp / behavior_logp", **settings: Any) -> Any:
    numerator, denominator = policies.split(" / ")
    return Correction(
        reach=use(reach),
        map=use(map_, **settings),
        numerator=numerator,
        denominator=denominator,
    )


def _entry(
    name: str,
    *corrections: Correction,
    weight: str,
    zero: str = "nowhere",
    held: tuple[str, ...] = (),
    advantage: Callable[..., Any] = group_std,
    aggregation: Callable[..., Any] = token_mean,
    sibling: str | None = None,
    **rest: Any,
) -> Estimator:
    """An entry and its claims: what its advantage and aggregation imply, and what is given."""
    implied = {
        group_std: ("shift_invariant", "zero_when_equal", "unit_variance"),
        group_mean: ("shift_invariant", "zero_when_equal"),
        leave_one_out: ("shift_invariant", "zero_when_equal"),
    }[advantage]
    relation = () if sibling is None else how(on_policy_as=(sibling, "1"))
    return Estimator(
        name=name,
        tier=2,
        advantage=use(advantage),
        corrections=corrections,
        aggregation=use(aggregation),
        claims=(
            *claims(*implied, *held),
            *how(weight=weight, zero_region=zero, share=SHARES[aggregation]),
            *relation,
        ),
        **rest,
    )


def _differences(*words: str) -> tuple[str, ...]:
    return tuple(f"{number}. {text}" for number, text in enumerate(words, start=1))


CLIPS = (
    _entry(
        "dual_clip",
        _of(token, dual_clip),
        weight="ratio, 0 beyond the dual clip; own token",
        zero=DUAL,
        held=("bounded",),
        sibling="dapo",
        paper="Ye et al., 2019, arXiv:1912.09729",
        differences=_differences(
            SAMPLER,
            "Group advantages; the paper has a critic. verl and SkyRL clip at 3 by default.",
            "TRL's `delta` is the cap (INTELLECT-2: 4).",
        ),
    ),
    _entry(
        "bypass_ppo",
        _of(token, clip),
        weight=CLIP,
        zero=CLIPPED,
        sibling="dapo",
        paper="verl `bypass_mode`, slime `--use-rollout-logprobs`, 2026",
        differences=_differences(
            "Two policies only: the clip compares with the sampler, and nothing else corrects.",
            "As dapo with equal margins, without refilled groups and shaping.",
        ),
    ),
    _entry(
        "decoupled_ppo",
        _of(token, ratio, "proximal_logp / behavior_logp"),
        _of(token, clip, "logp / proximal_logp"),
        weight=f"ratio; own token; proximal / sampler × {CLIP}; policy / proximal",
        zero=CLIPPED,
        sibling="dapo",
        paper="Hilton et al., 2021, arXiv:2110.00641; Fu et al., 2025, arXiv:2505.24298",
        differences=_differences(
            f"Needs proximal log-probabilities; {PROXIMAL}",
            "The first factor is not truncated; AReaL caps it by a setting (`decoupled_tis`).",
            "AReaL may interpolate the proximal policy instead of a forward pass; not here.",
        ),
    ),
    _entry(
        "decoupled_tis",
        _of(token, truncate, "proximal_logp / behavior_logp"),
        _of(token, clip, "logp / proximal_logp"),
        weight=f"ratio, at most cap; own token; proximal / sampler × {CLIP}; policy / proximal",
        zero=CLIPPED,
        sibling="dapo",
        paper="verl decoupled mode with token truncation at 2, 2026",
        differences=_differences(
            f"Needs proximal log-probabilities; {PROXIMAL}",
            "slime, SkyRL and OpenRLHF truncate the same factor; OpenRLHF to [0.5, 5].",
        ),
    ),
    _entry(
        "gspo_token",
        _of(geometric, clip, clip_low=3e-4, clip_high=4e-4),
        weight="ratio, 0 beyond the clip; response, geometric",
        zero=CLIPPED,
        aggregation=sequence_mean,
        sibling="grpo",
        paper="Zheng et al., 2025, arXiv:2507.18071",
        differences=_differences(
            "With one advantage a response it is gspo, coefficient by coefficient; it differs "
            "where the advantage does by token (`gae`), whose sign then clips each token.",
            "The gradient runs through the token's own factor only, as a coefficient always does.",
        ),
    ),
    _entry(
        "gmpo",
        Correction(before=use(one_sided), reach=use(geometric), map=use(ratio)),
        _of(token, unclipped),
        weight="ratio; response, geometric of one-sided × 1, 0 beyond the log clip; own token",
        zero=LOG_CLIPPED,
        aggregation=sequence_mean,
        sibling="grpo",
        paper="Zhao et al., 2025, arXiv:2507.20673",
        differences=_differences(
            SAMPLER,
            "A clipped token keeps its place in the mean and loses its own gradient, as in the "
            "authors' code.",
        ),
    ),
    _entry(
        "clip_cov",
        _of(token, clip),
        _of(token, covariance_clip),
        weight=f"{CLIP} × 1, 0 on the largest covariances; own token",
        zero=CLIPPED,
        paper="Cui et al., 2025, arXiv:2505.22617",
        differences=_differences(
            "The tokens of largest covariance are taken; verl draws them at random in the band.",
            "The share is of the whole batch; verl counts a micro-batch and unclipped tokens.",
        ),
    ),
    _entry(
        "kl_cov",
        _of(token, ratio),
        weight="ratio; own token",
        penalties=(use(loss_kl_cov),),
        sibling="dapo",
        paper="Cui et al., 2025, arXiv:2505.22617",
        differences=_differences(
            "The divergence's gradient is that of |log pi - log mu|, as in verl.",
            "At least one token of a batch is pulled, as in verl: a large part of a toy batch.",
            "The share is of the whole batch; verl counts a micro-batch.",
        ),
    ),
)

MASKS = (
    _entry(
        "geometric_mask",
        _of(geometric, keep, low=0.99, high=1.01),
        weight="1 inside [low, high], else 0; response, geometric",
        zero=OUTSIDE,
        held=("bounded",),
        sibling="dapo",
        paper="verl rejection sampling by geometric mean, SkyRL, slime, 2026",
        differences=_differences(
            "SkyRL's band [0.99, 1.01]; verl has [0.999, 1.001], slime [0.9999, 1.0001].",
            "No clip; the frameworks multiply the mask with PPO's.",
        ),
    ),
    _entry(
        "seq_mask_tis",
        _of(geometric, keep, low=0.99, high=1.01),
        _of(token, ratio),
        weight="1 inside [low, high], else 0; response, geometric × ratio; own token",
        zero=OUTSIDE,
        sibling="dapo",
        paper="OpenRLHF and NeMo-RL `seq-mask-tis`, 2026",
        differences=_differences(
            "The token ratio is not truncated, as in both; the name promises it.",
            "The ratio is policy / sampler; theirs is the trainer's old policy / sampler.",
        ),
    ),
    _entry(
        "opsm",
        _of(geometric, mask_negative),
        _of(token, clip),
        weight=f"1, 0 where A < 0 and log ratio < -delta; response, geometric × {CLIP}",
        zero=BEHIND,
        aggregation=sequence_mean,
        sibling="grpo",
        paper="DeepSeek, 2025, arXiv:2512.02556",
        differences=_differences(
            "delta 0.5 as TRL suggests; slime's default is 1e-4, so set it.",
            SAMPLER,
        ),
    ),
    _entry(
        "dppo_tv",
        _of(token, tv_mask),
        weight="ratio, at most cap, 0 where p - q exceeds limit along A; own token",
        zero=MOVED,
        held=("bounded",),
        sibling="dapo",
        paper="Qi et al., 2026, arXiv:2602.04879",
        differences=_differences(
            "One limit, 0.15 as in verl's recipe, for both signs; prime-rl takes two of 0.2.",
            "The ratio is capped at 20 as in verl; prime-rl does not cap.",
        ),
    ),
    _entry(
        "dppo_kl",
        _of(token, kl_mask),
        weight="ratio, at most cap, 0 where binary KL exceeds limit along A; own token",
        zero=DIVERGED,
        held=("bounded",),
        sibling="dapo",
        paper="Qi et al., 2026, arXiv:2602.04879",
        differences=_differences(
            "Limit 0.05 and cap 20 as in verl's recipe.",
            "No epsilon inside the logarithm; verl adds 1e-8.",
        ),
    ),
    _entry(
        "sequence_mis",
        _of(trajectory, band, low=0.0, high=3.0),
        weight="ratio inside [low, high], else 0; response",
        zero=OUTSIDE,
        held=("bounded",),
        sibling="dapo",
        paper="TRL `sequence_mask` with cap 3, 2026",
        differences=_differences(
            "No floor, as TRL's default; verl's band is [0.5, 2].",
            "The ratio is policy / sampler; TRL's is the trainer's old policy / sampler.",
        ),
    ),
    _entry(
        "worst_token_mask",
        _of(farthest, keep),
        weight="1 inside [low, high], else 0; response, farthest token",
        zero=OUTSIDE,
        held=("bounded",),
        sibling="dapo",
        paper="only an abstract was read: arXiv:2512.23075",
        differences=_differences(
            "The whole response is dropped if the ratio of any token leaves a band.",
            "The paper bounds a divergence of each token; the exact rule was not read.",
        ),
    ),
    _entry(
        "m2po",
        _of(token, second_moment),
        weight="ratio, 0 from where the mean square reaches tau; own token",
        zero=FAR,
        held=("bounded",),
        sibling="dapo",
        paper="Zheng et al., 2025, arXiv:2510.01161",
        differences=_differences(
            "The squared log-ratio is to the sampler; AReaL takes proximal / sampler.",
            "No clip besides; the batch is the whole optimizer batch.",
        ),
    ),
)

SOFT = (
    _entry(
        "sapo",
        _of(token, soft_gate),
        weight="ratio sech^2(tau (ratio - 1) / 2); own token",
        held=("bounded",),
        aggregation=sequence_mean,
        sibling="grpo",
        paper="Gao et al., 2025, arXiv:2511.20347",
        differences=_differences(SAMPLER),
    ),
    _entry(
        "vespo",
        _of(trajectory, gamma_weight),
        weight="ratio^k exp(lambda (1 - ratio)); response",
        held=("bounded",),
        sibling="dapo",
        paper="Shen et al., 2026, arXiv:2602.10693",
        differences=_differences("The published form and TRL's; TRL's defaults of k and lambda."),
    ),
    _entry(
        "aspo",
        _of(token, inverse_positive),
        weight="1 / ratio if A > 0, else ratio, 0 beyond the dual clip; own token",
        zero=DUAL,
        held=("bounded",),
        sibling="dapo",
        paper="Wang et al., 2025, arXiv:2510.06062",
        differences=_differences(
            "Margins of 0.2 for every token; the authors' code widens them with the entropy.",
            SAMPLER,
        ),
    ),
)

ON_POLICY = ("unbiased_on_policy", "parallel_on_policy", "zero_drift_on_policy")
NORMALIZED = (
    _entry(
        "self_normalized",
        _of(over_group, ratio),
        weight="ratio; response, over the mean of the group",
        held=(*ON_POLICY, "bounded"),
        advantage=leave_one_out,
        aggregation=token_sum,
        sibling="rloo",
        paper="Owen, 2013",
        differences=_differences("With one response a prompt it would be no correction."),
    ),
    _entry(
        "self_normalized_batch",
        _of(over_batch, ratio),
        weight="ratio; response, over the mean of the batch",
        held=(*ON_POLICY, "bounded"),
        advantage=leave_one_out,
        aggregation=token_sum,
        sibling="rloo",
        paper="Owen, 2013; verl `rollout_is_batch_normalize`, 2026",
        differences=_differences("Untruncated; verl's option follows a truncation."),
    ),
    _entry(
        "normalized_tis",
        Correction(reach=use(token_over_batch, cap=2.0), map=use(ratio)),
        weight="ratio; own token, over the mean of the batch",
        held=(*ON_POLICY, "bounded"),
        advantage=leave_one_out,
        aggregation=token_sum,
        sibling="rloo",
        paper="slime `tis_batch_normalize`, 2026",
        differences=_differences("Cap 2 before the mean over the tokens of the whole batch."),
    ),
)

SQUARED = (
    _entry(
        "kimi",
        _of(token, none),
        weight="1",
        held=("parallel_on_policy", "zero_drift_on_policy", "bounded"),
        advantage=group_mean,
        aggregation=token_sum,
        penalties=(use(loss_square_response),),
        sibling="group_mean",
        paper="Kimi team, 2025, arXiv:2501.12599",
        differences=_differences(
            "The update of the report's section 2.3.2, from a derivation and from ROLL's `kimi15`; "
            "the report itself was not read.",
            "The squared log-ratio is to the sampler and of the whole response; ROLL's by token.",
            "Claims are about the update without the penalty, which is 0 on-policy.",
        ),
    ),
    _entry(
        "prime_rl",
        _of(token, tv_mask, limit=0.2, cap=math.inf),
        weight="ratio, at most cap, 0 where p - q exceeds limit along A; own token",
        zero=MOVED,
        advantage=group_mean,
        aggregation=token_mean,
        penalties=(use(loss_square, coefficient=2e-3),),
        paper="prime-rl default loss, 2026",
        differences=_differences(
            "The squared log-ratio has a half here, so `kl_tau` 1e-3 is a coefficient of 2e-3.",
            "One limit for both signs, as its two defaults agree.",
        ),
    ),
)

CORRECTED = (*CLIPS, *MASKS, *SOFT, *NORMALIZED, *SQUARED)
