"""TRL: GRPO's trainer with an estimator of the catalogue, chosen by one field of its configuration.

    config = WindageConfig(estimator="cispo:cap=5", ...)
    WindageTrainer(model=..., reward_funcs=..., args=config, train_dataset=...).train()

The sampler's log-probabilities are those that vLLM or a `rollout_func` returned; without them TRL
itself sampled, and they are the trainer's at that time.

Differences from TRL:
    1. A response that no reward function could score counts nowhere; TRL gives it the advantage 0.
    2. Denominators are those of one optimizer step, over micro-batches and ranks; TRL scales the
       tokens of the generation batch.
    3. The entry decides what `loss_type`, `epsilon` and the like do in TRL; set ones are refused.
    4. With a penalty against the reference, `beta` must equal the entry's coefficient; it only
       makes TRL keep a reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator, surrogate
from windage.llm.adapters.carry import batch_wide, named, refuse
from windage.llm.adapters.hosts import TRL as HOST
from windage.llm.adapters.terms import advantages_of, batch_of, groups_of, loss_coefficients

# What the entry decides in the place of TRL.
DECIDED = (
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "scale_rewards",
    "multi_objective_aggregation",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "use_liger_kernel",
)
PICTURES = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class WindageConfig(GRPOConfig):
    """TRL's configuration with one more field.

    Args:
        estimator: an entry and its settings, `NAME:key=value,...`.
    """

    estimator: str = field(
        default="cispo", metadata={"help": "entry of Windage's catalogue, NAME:key=value,..."}
    )


def check(args: WindageConfig) -> Estimator:
    """The estimator that a configuration asks for.

    Raises:
        BadInput: TRL cannot carry it, or a setting that would be ignored.
    """
    estimator = refuse(named(args.estimator), HOST)
    defaults = {f.name: f.default for f in fields(GRPOConfig)}
    for name in DECIDED:
        value = getattr(args, name)
        if value != defaults[name]:
            raise BadInput(
                f"{name} is {value!r}, which the estimator {estimator.name} decides; allowed: "
                f"{defaults[name]!r}, TRL's default"
            )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        raise BadInput(
            "vllm_importance_sampling_correction is True, and the estimator corrects by itself; "
            "allowed: False"
        )
    beta = estimator.settings["coefficient"] if "reference_logp" in estimator.needs else 0.0
    if args.beta != beta:
        raise BadInput(f"beta is {args.beta:g}; allowed with {args.estimator}: {beta:g}")
    steps, parts = args.gradient_accumulation_steps, args.steps_per_generation
    if (parts != steps) if batch_wide(estimator) else (parts % steps != 0):
        word = "" if batch_wide(estimator) else "a multiple of "
        raise BadInput(
            f"steps_per_generation is {parts}; allowed with {estimator.name}: {word}"
            f"gradient_accumulation_steps, which is {steps}"
        )
    return estimator


class WindageTrainer(GRPOTrainer):
    """GRPO's trainer whose advantages and loss are those of an estimator of the catalogue."""

    args: WindageConfig

    def __init__(self, *positional: Any, args: WindageConfig, **named_: Any) -> None:
        self.estimator = check(args)
        super().__init__(*positional, args=args, **named_)

    def _calculate_rewards(self, *positional: Any, **named_: Any) -> Tensor:
        self._scores: Tensor = super()._calculate_rewards(*positional, **named_)
        return self._scores

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mask = loss_mask(output)
        advantages, present = self._advantages(mask)
        rank, rows = self.accelerator.process_index, len(mask)
        here = slice(rank * rows, (rank + 1) * rows)
        found = advantages[here, : mask.shape[1]]
        output["advantages"] = found.squeeze(1) if found.shape[1] == 1 else found
        output["present"] = present[here]
        wanted = [c.numerator for c in self.estimator.corrections if not c.idle]
        if "proximal_logp" in wanted and "old_per_token_logps" not in output:
            with torch.no_grad():
                output["old_per_token_logps"] = self._logp(self.model, output)[0]
        if not self.model.training:
            self._tell([output])
        return output

    def _advantages(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ranks' responses `[B 1|T]`, and which of them could be scored."""
        weights = self.reward_weights.to(self._scores.device)
        present = ~self._scores.isnan().all(1)
        rewards = torch.where(present, (self._scores * weights).nansum(1), 0.0).double()
        wide = self.accelerator.pad_across_processes(mask, dim=1)
        size = self.num_generations if self.model.training else self.num_generations_eval
        groups = groups_of([row // size for row in range(len(rewards))])
        extra: dict[str, Tensor] = {}
        if "components" in self.estimator.needs:
            if (weights != 1).any():
                raise BadInput("reward_weights are set; allowed with gdpo: none")
            extra["components"] = self._scores.double()
        whole = self.accelerator.gather(wide)
        batch = batch_of(rewards, whole, groups, present=present, **extra)
        return groups.down(advantages_of(self.estimator, batch)).float(), present

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self.model.training and "step_tokens" not in inputs:
            steps = self.args.gradient_accumulation_steps
            for start in range(0, len(self._buffered_inputs), steps):
                self._tell(self._buffered_inputs[start : start + steps])
        return inputs

    def _tell(self, window: list[dict[str, Any]]) -> None:
        """Tell the micro-batches of one optimizer step how much all of them hold on all ranks."""
        masks = [loss_mask(part) & part["present"].unsqueeze(1) for part in window]
        tokens = torch.stack([mask.sum() for mask in masks]).sum()
        responses = torch.stack([part["present"].sum() for part in window]).sum()
        totals = self.accelerator.reduce(torch.stack([tokens, responses]), reduction="sum")
        for part in window:
            part["step_tokens"], part["step_responses"] = totals[0], totals[1]

    def _logp(self, model: Any, inputs: dict[str, Any], **asked: Any) -> Any:
        """TRL's pass over prompts and completions."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        pictures = {name: inputs.get(name) for name in PICTURES}
        size = self.args.per_device_train_batch_size
        return self._get_per_token_logps_and_entropies(
            model,
            ids,
            attention,
            inputs["completion_ids"].size(1),
            batch_size=size,
            **asked,
            **pictures,
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logp, entropies, auxiliary = self._logp(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        mask = loss_mask(inputs)
        advantages = inputs["advantages"]
        own = loss_coefficients(
            self.estimator,
            HOST,
            policies_of(inputs, logp),
            advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
            mask,
            tokens=inputs["step_tokens"],
            responses=inputs["step_responses"],
            present=inputs["present"],
        )
        loss: Tensor = surrogate(own, logp) * self.accelerator.num_processes
        mode = "train" if self.model.training else "eval"
        if self.aux_loss_enabled:
            steps = self.args.gradient_accumulation_steps if mode == "train" else 1
            loss = loss + self.router_aux_loss_coef * auxiliary / steps
        sums = torch.stack([torch.where(mask, entropies, 0.0).sum(), mask.sum().float()])
        total, count = self.accelerator.reduce(sums.detach(), reduction="sum")
        self._metrics[mode]["entropy"].append((total / count.clamp(min=1)).item())
        return loss


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """True on the tokens that the policy chose and that count."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def policies_of(inputs: dict[str, Any], logp: Tensor) -> dict[str, Tensor]:
    """Log-probabilities of the tokens under each policy that TRL knows."""
    now = logp.detach()
    old = inputs.get("old_per_token_logps")
    sampled = inputs.get("sampling_per_token_logps")
    behavior = sampled if sampled is not None else old if old is not None else now
    found = {"logp": now, "behavior_logp": behavior, "proximal_logp": now if old is None else old}
    if (reference := inputs.get("ref_per_token_logps")) is not None:
        found["reference_logp"] = reference
    return found
