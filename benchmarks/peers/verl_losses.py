"""Every policy loss of verl's registry, its rollout correction, and its advantage estimators.

Losses are called by name with a real ActorConfig, as `verl.workers.utils.losses.ppo_loss` calls
them: `global_batch_info` holds the tokens and responses of the whole batch before any rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import claimed
import torch
import verl_advantages
from claimed import composed
from peer import Finding, Peer, document
from torch import Tensor
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig, PolicyLossConfig

from windage.analysis.audit.samples import Sample, sample
from windage.estimators.aggregation import constant_length, sequence_mean, token_mean, token_sum
from windage.estimators.correction import (
    band,
    clip,
    dual_clip,
    geometric,
    keep,
    none,
    taper,
    token,
    trajectory,
    truncate,
)
from windage.estimators.maps import kl_mask, soft_gate, tv_mask
from windage.estimators.member import use
from windage.estimators.penalty import k2, k3

NAME, VERSION = "verl", version("verl")


def config(policy: dict[str, Any] | None = None, **settings: Any) -> ActorConfig:
    """Settings with verl's own defaults; the fields that have none are filled in."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**(policy or {})),
        **settings,
    )


def called(
    name: str,
    actor: ActorConfig,
    s: Sample,
    tokens: Tensor | None,
    rows: int | None,
    *,
    seed: int = 0,
) -> Tensor:
    """One micro-batch through a registered loss, with the denominators of the whole batch.

    torch's global generator, which clip_cov draws from, is seeded.
    """
    torch.manual_seed(seed)
    info = {
        "dp_size": 1,
        "batch_num_tokens": tokens,
        "global_batch_size": rows,
        "loss_scale_factor": actor.loss_scale_factor,
    }
    actor.global_batch_info.update(info)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=s.behavior_logp,
        log_prob=s.logp,
        advantages=s.advantages.unsqueeze(1).expand_as(s.logp).clone(),
        response_mask=s.mask.to(s.logp.dtype),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=None,
    )
    return loss


def peer(
    name: str,
    claims: str,
    expected: Any,
    *,
    loss: str,
    policy: dict[str, Any] | None = None,
    whole_batch: bool = True,
    **settings: Any,
) -> Peer:
    """A registered loss with settings of ActorConfig.

    Args:
        name, claims, expected: of the row.
        loss: in the registry.
        policy: settings of PolicyLossConfig.
        whole_batch: whether the denominators of the whole batch are handed over.
        settings: of ActorConfig.
    """
    actor = config(policy, **settings)

    def run(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        s = Sample(
            name="", logp=logp, behavior_logp=behavior_logp, advantages=advantages, mask=mask
        )
        return called(loss, actor, s, *_totals([s], whole_batch))

    def parts(samples: Sequence[Sample]) -> Tensor:
        totals = _totals(samples, whole_batch)
        return torch.stack([called(loss, actor, s, *totals) for s in samples]).sum()

    return Peer(name=name, claims=claims, expected=expected, loss=run, parts=parts)


def _totals(samples: Sequence[Sample], whole_batch: bool) -> tuple[Tensor | None, int | None]:
    if not whole_batch:
        return None, None
    tokens = torch.stack([s.mask.sum() for s in samples]).sum()
    return tokens, sum(len(s.mask) for s in samples)


PPO = "PPO: clip 0.2, for A < 0 no gradient above the ratio 3"


def aggregated() -> list[Peer]:
    """The default loss under each aggregation."""
    modes = {
        "token-mean": ("mean over the tokens of the whole batch", token_mean, {}),
        "seq-mean-token-sum": ("sum over tokens, mean over responses", token_sum, {}),
        "seq-mean-token-mean": ("mean over tokens, then over responses", sequence_mean, {}),
        "seq-mean-token-sum-norm": (
            "sum over tokens divided by a constant (8), mean over responses",
            use(constant_length, length=8),
            {"loss_scale_factor": 8},
        ),
    }
    rows = [
        peer(
            f"vanilla, {mode}",
            f"{PPO}; {words}",
            composed(token, dual_clip, share, cap=3.0),
            loss="vanilla",
            loss_agg_mode=mode,
            **settings,
        )
        for mode, (words, share, settings) in modes.items()
    ]
    unset = peer(
        "vanilla, seq-mean-token-sum-norm, no loss_scale_factor",
        f"{PPO}; sum over tokens divided by a constant, the longest response (6)",
        composed(token, dual_clip, use(constant_length, length=6), cap=3.0),
        loss="vanilla",
        loss_agg_mode="seq-mean-token-sum-norm",
    )
    return [*rows, unset]


def divergences() -> list[Peer]:
    """DPPO, whose truncation the code calls large: 20 where nothing is set."""
    words = "DPPO: mask by the {} of the token (0.2), detached ratio at most 20"
    rows = []
    for name, measure, said in (
        ("dppo_tv", tv_mask, "total variation"),
        ("dppo_kl", kl_mask, "KL"),
    ):
        rows += [
            peer(
                name,
                words.format(said),
                composed(token, measure, limit=0.2, cap=20.0),
                loss=name,
            ),
            peer(
                f"{name}, clip_ratio_c=20",
                words.format(said),
                composed(token, measure, limit=0.2, cap=20.0),
                loss=name,
                clip_ratio_c=20.0,
            ),
        ]
    return rows


def named() -> list[Peer]:
    """The other losses of the registry."""
    gspo = "GSPO: geometric ratio clipped at {}, mean over tokens, then over responses"
    inside = {"a_pos": 0.8, "b_pos": 1.2, "a_neg": 0.8, "b_neg": 1.2}
    return [
        peer(
            "gspo",
            gspo.format("0.2"),
            composed(geometric, clip, sequence_mean),
            loss="gspo",
        ),
        peer(
            "gspo, seq-mean-token-mean, clip_ratio 3e-4 and 4e-4",
            gspo.format("3e-4 and 4e-4"),
            composed(geometric, clip, sequence_mean, clip_low=3e-4, clip_high=4e-4),
            loss="gspo",
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=3e-4,
            clip_ratio_high=4e-4,
        ),
        peer(
            "sapo",
            "SAPO: sigmoid gate with temperatures 1 and 1.05, mean over tokens, then responses",
            composed(token, soft_gate, sequence_mean),
            loss="sapo",
        ),
        peer("gpg", "GPG: no ratio, mean over tokens", composed(token, none), loss="gpg"),
        peer(
            "clip_cov",
            "Clip-Cov: clip 0.2, and no gradient on a share of 0.0002 (at least one) of the tokens "
            "with covariance between 1 and 5, drawn at random (here with seed 0)",
            claimed.random_covariances(
                share=0.0002, low=1.0, high=5.0, clip_low=0.2, clip_high=0.2
            ),
            loss="clip_cov",
        ),
        peer(
            "kl_cov",
            "KL-Cov: the ratio, and a penalty 0.1 |x| on the tokens of highest covariance",
            claimed.largest_covariances(share=0.0002, coefficient=0.1),
            loss="kl_cov",
        ),
        peer(
            "geo_mean",
            "GMPO: geometric mean of ratios clipped in the log at 0.2, mean over responses",
            claimed.geometric_mean(clip_low=0.2, clip_high=0.2),
            loss="geo_mean",
        ),
        peer(
            "dro, dro_beta=0.5",
            "DRO: A - 0.5 log ratio, mean over tokens",
            claimed.quadratic(beta=0.5),
            loss="dro",
            policy={"dro_beta": 0.5},
        ),
        peer(
            "cispo",
            "CISPO: detached ratio between 0.8 and 1.2, mean over tokens",
            composed(token, taper, **inside),
            loss="cispo",
        ),
        peer(
            "cispo (as MiniMax-M1 sets it)",
            "CISPO: detached ratio, at most 1.2, no floor",
            composed(token, truncate, cap=1.2),
            loss="cispo",
        ),
    ]


def bypassed() -> list[Peer]:
    """Rollout correction inside the loss: the ratio is policy / rollout."""

    def row(name: str, claims: str, expected: Any, whole_batch: bool = True, **rules: Any) -> Peer:
        correction = RolloutCorrectionConfig(loss_type="reinforce", **rules)
        return peer(
            f"bypass_mode reinforce, {name}",
            claims,
            expected,
            loss="bypass_mode",
            policy={"rollout_correction": correction},
            whole_batch=whole_batch,
        )

    half_to_four = {"low": 0.5, "high": 4.0}
    k1 = {"rollout_is": None, "rollout_rs_threshold": "0.5_4.0"}
    return [
        peer(
            "bypass_mode ppo_clip",
            PPO,
            composed(token, dual_clip, cap=3.0),
            loss="bypass_mode",
            policy={"rollout_correction": RolloutCorrectionConfig(loss_type="ppo_clip")},
        ),
        row("token IS 2", "token ratio, at most 2", composed(token, truncate), rollout_is="token"),
        row(
            "sequence IS 2",
            "ratio of the response, at most 2",
            composed(trajectory, truncate),
            rollout_is="sequence",
        ),
        row(
            "token IS 0.5_5",
            "IcePop: token ratio inside [0.5, 5], else 0",
            composed(token, band),
            rollout_is="token",
            rollout_is_threshold="0.5_5.0",
        ),
        row(
            "token_k1 0.5_4.0",
            "reject tokens whose ratio is outside [0.5, 4]",
            composed(token, keep, **half_to_four),
            rollout_rs="token_k1",
            **k1,
        ),
        row(
            "seq_sum_k1 0.5_4.0",
            "reject responses whose ratio is outside [0.5, 4]",
            composed(trajectory, keep, **half_to_four),
            rollout_rs="seq_sum_k1",
            **k1,
        ),
        row(
            "seq_mean_k1 0.5_4.0",
            "reject responses whose geometric ratio is outside [0.5, 4]",
            composed(geometric, keep, **half_to_four),
            rollout_rs="seq_mean_k1",
            **k1,
        ),
        row(
            "token_k1 0.25_4.0, whole-batch counts",
            "reject tokens whose ratio is outside [0.25, 4]; denominator from before rejection",
            composed(token, keep, low=0.25, high=4.0),
            rollout_is=None,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.25_4.0",
        ),
        row(
            "token_k1 0.25_4.0, no counts given",
            "reject tokens whose ratio is outside [0.25, 4]; denominator from before rejection",
            composed(token, keep, low=0.25, high=4.0),
            whole_batch=False,
            rollout_is=None,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.25_4.0",
        ),
    ]


def rejections() -> list[Peer]:
    """Rejection by k2 and k3, by token and over the response."""
    forms = {"k2": (k2, "log(ratio)^2 / 2"), "k3": (_k3_to_policy, "ratio - 1 - log(ratio)")}
    rows = []
    for pool in ("token", "seq_sum", "seq_mean", "seq_max"):
        for kind, (divergence, words) in forms.items():
            over = pool.removeprefix("seq_")
            scope = "tokens whose" if pool == "token" else f"responses whose {over} of"
            rule = RolloutCorrectionConfig(
                loss_type="reinforce",
                rollout_is=None,
                rollout_rs=f"{pool}_{kind}",
                rollout_rs_threshold=0.1,
            )
            rows.append(
                peer(
                    f"bypass_mode reinforce, {pool}_{kind} 0.1",
                    f"reject {scope} {words} is above 0.1; denominator from before rejection",
                    claimed.rejected(divergence, 0.1, over),
                    loss="bypass_mode",
                    policy={"rollout_correction": rule},
                )
            )
    return rows


def _k3_to_policy(log_ratio: Tensor) -> Tensor:
    """The k3 of KL(mu, pi): ratio - 1 - log ratio."""
    return k3(-log_ratio)


def peers() -> list[Peer]:
    """Every registered loss."""
    return [*aggregated(), *divergences(), *named(), *bypassed(), *rejections()]


def k1_sides() -> Finding:
    """Which of two ratios the rejection by k1 keeps."""
    ratios = torch.tensor([[3.0, 1 / 3]]).log()
    mask, _ = compute_rollout_rejection_mask(
        ratios, torch.ones(1, 2), rollout_rs="token_k1", rollout_rs_threshold="0.5_4.0"
    )
    kept = ["kept" if keep_ else "rejected" for keep_ in mask[0].bool().tolist()]
    return Finding(
        what="token_k1 with bounds 0.5_4.0: ratios policy / rollout of 3 and of 1/3",
        claimed="kept, rejected",
        measured=f"{', '.join(kept)}: the bounds hold for the inverse ratio",
        deviates=kept != ["kept", "rejected"],
    )


def random_drop() -> Finding:
    """Whether clip_cov gives one update for one batch."""
    s = sample("", [[0.0, 0.0], [0.0, 0.0]], [3.0, -3.0])
    s = replace(s, logp=torch.tensor([[0.0, 0.0], [-3.0, -3.0]], dtype=torch.float64))
    s = replace(s, behavior_logp=s.logp)
    actor = config()
    seen = set()
    for seed in range(8):
        leaf = s.logp.clone().requires_grad_()
        fixed = replace(s, logp=leaf)
        loss = called("clip_cov", actor, fixed, s.mask.sum(), 2, seed=seed)
        seen.add(tuple(torch.autograd.grad(loss, leaf)[0].flatten().tolist()))
    return Finding(
        what="clip_cov on one batch under eight seeds of torch's global generator",
        claimed="one gradient",
        measured=f"{len(seen)} different gradients",
        deviates=len(seen) > 1,
    )


def empty_band() -> Finding:
    """IcePop where no ratio lies inside the band."""
    try:
        compute_rollout_correction_weights(
            torch.tensor([[3.0, 3.0]]), torch.ones(1, 2), "token", "0.5_5.0"
        )
        said = "weights 0"
    except ZeroDivisionError as problem:
        said = f"ZeroDivisionError: {problem}"
    return Finding(
        what="rollout_is=token with 0.5_5.0 (IcePop), every ratio outside the band",
        claimed="weights 0",
        measured=f"{said} (the effective sample size divides by the weights)",
        deviates=said != "weights 0",
    )


def findings() -> list[Finding]:
    """What single calls show beside the gradients."""
    return [k1_sides(), random_drop(), empty_band(), *verl_advantages.findings()]


def measure() -> dict[str, Any]:
    """The rows of verl."""
    rows = document(NAME, VERSION, peers(), findings())
    return {**rows, "advantages": verl_advantages.documents()}
