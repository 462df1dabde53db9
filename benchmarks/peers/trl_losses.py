"""Every loss of TRL's GRPOTrainer, called through its own `_compute_loss`.

The trainer is made without its constructor, with the attributes that the constructor takes from a
real GRPOConfig; in place of a model stand the per-token log-probabilities.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import claimed
import torch
import trl
from accelerate import Accelerator
from claimed import composed
from peer import Finding, Peer, document
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from windage.analysis.audit.samples import Sample, sample
from windage.estimators.aggregation import constant_length, sequence_mean, token_mean, token_sum
from windage.estimators.correction import clip, dual_clip, geometric, token, trajectory, truncate
from windage.estimators.maps import gamma_weight, soft_gate
from windage.estimators.member import use
from windage.estimators.penalty import loss_k3, loss_k3_weighted

NAME, VERSION = "TRL GRPOTrainer", trl.__version__


def config(**settings: Any) -> GRPOConfig:
    """TRL's own settings with its own defaults."""
    folder = tempfile.gettempdir()
    return GRPOConfig(output_dir=folder, report_to=[], use_cpu=True, bf16=False, **settings)


def trainer(args: GRPOConfig, micro_batches: int = 1) -> GRPOTrainer:
    """A trainer with the attributes that `_compute_loss` reads, as its constructor sets them."""
    made: Any = object.__new__(GRPOTrainer)
    args.steps_per_generation = micro_batches
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    attributes = {
        "args": args,
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(cpu=True),
        "current_gradient_accumulation_steps": micro_batches,
        "loss_type": args.loss_type,
        "importance_sampling_level": args.importance_sampling_level,
        "off_policy_mask_threshold": args.off_policy_mask_threshold,
        "top_entropy_quantile": args.top_entropy_quantile,
        "entropy_coef": args.entropy_coef,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "_entropy_bonus_enabled": args.entropy_coef != 0.0 or args.use_adaptive_entropy,
        "epsilon_low": args.epsilon,
        "epsilon_high": high,
        "beta": args.beta,
        "max_completion_length": args.max_completion_length,
        "use_vllm": args.use_vllm,
        "vllm_importance_sampling_correction": args.vllm_importance_sampling_correction,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def called(made: Any, s: Sample, items: Tensor, **extra: Any) -> Tensor:
    """One micro-batch through `_compute_loss`; the reference of a penalty is the sampler."""
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        s.logp,
        torch.zeros_like(s.logp),
        None,
    )
    rows = len(s.mask)
    inputs = {
        "prompt_ids": torch.zeros((rows, 1), dtype=torch.long),
        "prompt_mask": torch.ones((rows, 1), dtype=torch.long),
        "completion_ids": torch.zeros(s.mask.shape, dtype=torch.long),
        "completion_mask": s.mask.long(),
        "advantages": s.advantages,
        "old_per_token_logps": s.behavior_logp,
        "ref_per_token_logps": s.behavior_logp,
        "num_items_in_batch": items,
        **extra,
    }
    loss: Tensor = made._compute_loss(made.model, inputs)
    return loss


def peer(name: str, claims: str, expected: Any, **settings: Any) -> Peer:
    """A loss with settings of GRPOConfig."""
    args = config(**settings)
    whole, halves = trainer(args), trainer(config(**settings), micro_batches=2)

    def loss(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        s = Sample(
            name="", logp=logp, behavior_logp=behavior_logp, advantages=advantages, mask=mask
        )
        return called(whole, s, mask.sum())

    def parts(samples: Sequence[Sample]) -> Tensor:
        items = torch.stack([s.mask.sum() for s in samples]).sum()
        return torch.stack([called(halves, s, items) for s in samples]).sum()

    return Peer(name=name, claims=claims, expected=expected, loss=loss, parts=parts)


def peers() -> list[Peer]:
    """Every loss type, at its defaults and at its paper's settings."""
    sequence = {"importance_sampling_level": "sequence"}
    tight = {"epsilon": 3e-4, "epsilon_high": 4e-4}
    band = {"clip_low": 3e-4, "clip_high": 4e-4}
    longest = config().max_completion_length
    return [
        peer(
            "grpo",
            "GRPO: clip 0.2, mean over tokens, then over responses",
            composed(token, clip, sequence_mean),
            loss_type="grpo",
        ),
        peer(
            "grpo, sequence level",
            "GSPO: geometric ratio clipped at 3e-4 and 4e-4, mean over tokens, then responses",
            composed(geometric, clip, sequence_mean, **band),
            loss_type="grpo",
            **sequence,
            **tight,
        ),
        peer(
            "dr_grpo",
            f"Dr. GRPO: clip 0.2, sum over tokens divided by max_completion_length ({longest})",
            composed(token, clip, use(constant_length, length=longest)),
            loss_type="dr_grpo",
        ),
        peer(
            "dapo, epsilon_high=0.28",
            "DAPO: clip 0.2 and 0.28, mean over the tokens of the whole batch",
            composed(token, clip, token_mean, clip_high=0.28),
            loss_type="dapo",
            epsilon_high=0.28,
        ),
        peer(
            "bnpo",
            "clip 0.2, mean over the tokens of the local batch",
            composed(token, clip, token_mean),
            loss_type="bnpo",
        ),
        peer(
            "cispo",
            "CISPO (MiniMax-M1): detached ratio, at most 1 + epsilon_high, no floor",
            composed(token, truncate, token_mean, cap=1.2),
            loss_type="cispo",
        ),
        peer(
            "cispo, epsilon_high=5",
            "CISPO (ScaleRL): detached ratio, at most epsilon_high, no floor",
            composed(token, truncate, token_mean, cap=5.0),
            loss_type="cispo",
            epsilon_high=5.0,
        ),
        peer(
            "sapo",
            "SAPO: sigmoid gate with temperatures 1 and 1.05, mean over tokens, then responses",
            composed(token, soft_gate, sequence_mean),
            loss_type="sapo",
        ),
        peer(
            "luspo, sequence level",
            "LUSPO: geometric ratio clipped at 0.2, sum over tokens, mean over responses",
            composed(geometric, clip, token_sum),
            loss_type="luspo",
            **sequence,
        ),
        peer(
            "luspo",
            "LUSPO: geometric ratio clipped at 0.2, sum over tokens, mean over responses",
            composed(geometric, clip, token_sum),
            loss_type="luspo",
        ),
        peer(
            "vespo",
            "VESPO: gamma weight of the response's ratio, 1 on-policy, mean over all tokens",
            composed(trajectory, gamma_weight, token_mean),
            loss_type="vespo",
        ),
        peer(
            "dapo, delta=2",
            "two-sided clip: for A < 0 no gradient above the ratio 2",
            composed(token, dual_clip, token_mean, cap=2.0),
            loss_type="dapo",
            delta=2.0,
        ),
        peer(
            "dapo, off_policy_mask_threshold=0.1",
            "DeepSeek-V3.2: responses with A < 0 and mean log(old/new) above 0.1 are dropped",
            claimed.without_far_rows(0.1),
            loss_type="dapo",
            off_policy_mask_threshold=0.1,
        ),
        peer(
            "dapo, beta=0.1",
            "k3 times the ratio in the loss: the gradient of KL(pi, ref)",
            claimed.pulled(loss_k3_weighted, 0.1, claimed.PPO),
            loss_type="dapo",
            beta=0.1,
        ),
        peer(
            "dapo, beta=0.1, use_bias_correction_kl=False",
            "k3 in the loss: the gradient of KL(ref, pi)",
            claimed.pulled(loss_k3, 0.1, claimed.PPO),
            loss_type="dapo",
            beta=0.1,
            use_bias_correction_kl=False,
        ),
    ]


def on_policy_cispo() -> Finding:
    """The largest coefficient that CISPO's defaults give on-policy, times the tokens."""
    one = sample("on-policy", [[0.0]], [1.0])
    found = next(p for p in peers() if p.name == "cispo").coefficients(one)
    return Finding(
        what="cispo at its defaults, ratio 1, A = 1: weight of the token",
        claimed="1 (the cap only acts beyond 1 + epsilon_high)",
        measured=f"{float(found):.3g}: epsilon_high, 0.2 by default, is an absolute cap",
        deviates=float(found) != 1.0,
    )


def masked_vespo() -> Finding:
    """VESPO's weight of a response in which the mask mode of vLLM's correction drops one token."""
    weight = [
        float(
            GRPOTrainer.get_gamma_weights(
                advantages=torch.ones(1, 1),
                log_ratio_per_token=torch.zeros(1, 4),
                mask=torch.ones(1, 4),
                importance_sampling_ratio=torch.tensor([[1.0, 1.0, 1.0, dropped]]),
            )
        )
        for dropped in (1.0, 0.0)
    ]
    return Finding(
        what="vespo, four on-policy tokens, one of them masked by the sampler correction "
        "(ratio 0): weight of the response",
        claimed=f"{weight[0]:.3g} for the three tokens left",
        measured=f"{weight[1]:.1e}: the whole response is dropped",
        deviates=weight[1] < 0.5 * weight[0],
    )


def findings() -> list[Finding]:
    """What single calls show beside the gradients."""
    return [on_policy_cispo(), masked_vespo()]


def measure() -> dict[str, Any]:
    """The rows of TRL."""
    return document(NAME, VERSION, peers(), findings())
