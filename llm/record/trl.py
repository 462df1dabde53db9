"""TRL: what a GRPOTrainer passes by between generating and its first pass over each response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windage.estimators.errors import BadInput, within
from windage.llm.record.writer import Recorder, Rectangle, here, turns, vocabulary

# What is wrapped on the trainer.
METHODS = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
# Columns that are recorded where they are asked for.
OTHERS = ("probability_square", "head_ids", "head_behavior_logp")


def record_trl(
    trainer: Any, folder: str | Path, *, head: int = 0, square: bool = False
) -> Recorder:
    """Record the responses of a GRPOTrainer; each rank writes a store of its own.

    Args:
        trainer: made, not yet trained; its methods are wrapped on this object only.
        folder: of the store; with several ranks of the stores `rank-00000`, ...
        head: how many of the sampler's likeliest tokens; vLLM tells them.
        square: the sum of squared probabilities before each token, which TRL's output layer makes
            beside the log-probabilities.

    Returns:
        The recorder; training's end closes it.

    Raises:
        BadInput: a trainer that lacks what is wrapped, or cannot tell what is asked.
    """
    for name in METHODS:
        if not hasattr(trainer, name):
            raise BadInput(
                f"the recorder: the trainer has no {name}; allowed: TRL 1.16's GRPOTrainer"
            )
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    place = Path(folder) if ranks == 1 else Path(folder) / f"rank-{rank:05d}"
    heads = Heads(trainer, head) if head else None
    squares = Squares(trainer) if square else None
    recorder = Recorder(place, tokenizer=vocabulary(trainer._tokenizer))
    _Watch(trainer, recorder, heads, squares)
    return recorder


class Heads:
    """The likeliest tokens that vLLM tells with each generation.

    TRL takes the first of a token's log-probabilities for that of the token itself, which is so as
    long as it asks for no others; so it is handed those of the tokens alone.
    """

    def __init__(self, trainer: Any, count: int) -> None:
        engine = getattr(trainer, "vllm_generation", None)
        if engine is None or getattr(trainer, "rollout_func", None) is not None or trainer.tools:
            raise BadInput(
                f"the recorder: head is {count}, and only vLLM tells the likeliest tokens, one "
                "turn a response; allowed: use_vllm=True without tools and rollout_func, or no head"
            )
        model = getattr(getattr(engine, "llm", None), "llm_engine", None)
        within(1, getattr(getattr(model, "model_config", None), "max_logprobs", 10**6), head=count)
        self.count, self.engine = count, engine
        self.ids = self.logp = torch.zeros(0)
        self._inner, engine.logprobs = engine.generate, count
        engine.generate = self._generate

    def _generate(self, *given: Any, **named: Any) -> Any:
        prompts, completions, logprobs, ids = self._inner(*given, **named)
        self.ids, self.logp = _table(ids, logprobs, self.count)
        own = [
            [[by_id.get(token)] for token, by_id in zip(tokens, maps, strict=True)]
            for tokens, maps in zip(completions, _maps(ids, logprobs), strict=True)
        ]
        return prompts, completions, own, ids


def _maps(ids: Any, logprobs: Any) -> Iterator[list[dict[int, Any]]]:
    for row, values in zip(ids, logprobs, strict=True):
        yield [dict(zip(i, v, strict=True)) for i, v in zip(row, values, strict=True)]


def _table(ids: Any, logprobs: Any, count: int) -> tuple[Tensor, Tensor]:
    """The first so many of each token, `[B T K]`, without those that are unknown or impossible."""
    width = max((len(row) for row in ids), default=0)
    found = torch.full((len(ids), width, count), -1)
    logp = torch.full((len(ids), width, count), -torch.inf)
    for b, (row, values) in enumerate(zip(ids, logprobs, strict=True)):
        for t, pairs in enumerate(zip(row, values, strict=True)):
            own = [(i, v) for i, v in zip(*pairs, strict=True) if v is not None and v > -torch.inf]
            for k, (token, value) in enumerate(own[:count]):
                found[b, t, k], logp[b, t, k] = token, min(value, 0.0)
    return found, logp


class Squares:
    """Sums of squared probabilities, which TRL's output layer can make beside the others."""

    def __init__(self, trainer: Any) -> None:
        model = trainer.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        module = import_module("trl.trainer.utils")
        module.add_fused_lm_head(
            model,
            temperature=trainer.temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )
        self.seen: list[Tensor] = []
        inner = model.forward

        @wraps(inner)
        def forward(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            if (told := getattr(found, "log_sum_sq_probs", None)) is not None:
                self.seen.append(told.detach())
            return found

        model.forward = forward

    def take(self, width: int) -> Tensor:
        """Those of the passes since the last time, of the last so many tokens."""
        found = torch.cat([part[:, -width:] for part in self.seen]).exp().clamp(max=1)
        self.seen = []
        return found


class _Watch:
    """The wrapped trainer, and what is known of the last generation."""

    def __init__(
        self, trainer: Any, recorder: Recorder, heads: Heads | None, squares: Squares | None
    ) -> None:
        self.trainer, self.recorder, self.heads, self.squares = trainer, recorder, heads, squares
        self.scores = self.seen = torch.zeros(0)
        self.pending: dict[str, Tensor] | None = None
        self.about: dict[str, Any] = {}
        self.trained: set[int] = set()
        for name in METHODS:
            setattr(trainer, name, self._around(getattr(trainer, name), getattr(self, name)))
        callback = import_module("transformers").TrainerCallback
        ended = lambda *_, **__: self.end()  # noqa: E731
        trainer.add_callback(type("Recording", (callback,), {"on_train_end": ended}))

    @staticmethod
    def _around(inner: Any, wrapped: Any) -> Any:
        return lambda *given, **named: wrapped(inner, *given, **named)

    def _calculate_rewards(self, inner: Any, *given: Any, **named: Any) -> Tensor:
        self.scores = inner(*given, **named)
        return self.scores

    def _get_per_token_logps_and_entropies(self, inner: Any, *given: Any, **named: Any) -> Any:
        if self.squares is not None:
            self.squares.seen = []
        found = inner(*given, **named)
        self.seen = found[0].detach()
        return found

    def _generate_and_score_completions(self, inner: Any, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = inner(inputs)
        if self.trainer.model.training:
            self.flush()
            rows = len(output["completion_ids"])
            output["record_row"] = torch.arange(rows, device=output["completion_ids"].device)
            self.pending = {name: here(v) for name, v in output.items() if torch.is_tensor(v)}
            self.about = {"version": self.trainer.state.global_step, "scores": here(self.scores)}
            self.trained = set()
            if self.heads is not None:
                self.pending |= {"head_ids": self.heads.ids, "head_behavior_logp": self.heads.logp}
        return output

    def _compute_loss(self, inner: Any, model: Any, inputs: dict[str, Any]) -> Any:
        loss = inner(model, inputs)
        if self.pending is not None and "record_row" in inputs:
            found = {"logp": self.seen}
            if self.squares is not None:
                found["probability_square"] = self.squares.take(self.seen.shape[1])
            rows = inputs["record_row"].cpu()
            if not self._known(rows):
                self.trained.add(self.trainer.state.global_step)
                for name, value in found.items():
                    value = here(value)
                    empty = torch.zeros_like(self._mask(), dtype=value.dtype)
                    self.pending.setdefault(name, empty)[rows] = value
                self.pending.setdefault("known", torch.zeros(len(self._mask()), dtype=torch.bool))
                self.pending["known"][rows] = True
        return loss

    def _known(self, rows: Tensor) -> bool:
        """Whether a pass over these responses came before."""
        assert self.pending is not None
        known = self.pending.get("known")
        return known is not None and bool(known[rows].all())

    def _mask(self) -> Tensor:
        assert self.pending is not None
        return self.pending["completion_mask"].bool()

    def end(self) -> None:
        """Write what is left, and wait for it."""
        self.flush()
        self.recorder.close()

    def flush(self) -> None:
        """Hand the last generation to the recorder."""
        held, about, self.pending = self.pending, self.about, None
        if held is not None:
            told = {**about, "trained": self.trained, "step": self.recorder.next}
            self.recorder.put(lambda: _rectangle(self.trainer, held, told))


def _rectangle(trainer: Any, held: Mapping[str, Tensor], about: Mapping[str, Any]) -> Rectangle:
    """A generation as rows of the store."""
    rank, count, step = (
        trainer.accelerator.process_index,
        len(held["completion_ids"]),
        about["step"],
    )
    own = about["scores"][rank * count : (rank + 1) * count]
    rewards = _rewards(own, here(trainer.reward_weights))
    prompts = zip(held["prompt_ids"], held["prompt_mask"].bool(), strict=True)
    lengths = _lengths(held, trainer._tokenizer.pad_token_id)
    left_out = (held["completion_mask"].sum(1) == 0).tolist()
    ends, limit = set(trainer.eos_token_ids), trainer.max_completion_length
    reasons = zip(left_out, _reasons(held["completion_ids"], lengths, ends, limit), strict=True)
    size, trained = trainer.num_generations, about["trained"]
    return Rectangle(
        prompts=[row[real].tolist() for row, real in prompts],
        lengths=lengths,
        tokens=_tokens(held, about["version"]),
        responses={
            "group_id": [f"{step}/{(rank * count + b) // size}" for b in range(count)],
            "sample_id": [f"{rank}/{step}/{b}" for b in range(count)],
            "reward": rewards,
            "outcome": rewards,
            "finish_reason": ["length" if left else reason for left, reason in reasons],
            "rejected": ["truncated" if left else None for left in left_out],
        },
        constants={
            "temperature": float(trainer.temperature),
            "top_p": float(trainer.top_p),
            "top_k": trainer.top_k or None,
        },
        version=min(trained) if len(trained) == 1 else None,
    )


def _rewards(scores: Tensor, weights: Tensor) -> list[float | None]:
    """The weighted sum of what reward functions said; None where none said anything."""
    absent, total = scores.isnan().all(1).tolist(), (scores * weights).nansum(1).tolist()
    return [None if none else value for none, value in zip(absent, total, strict=True)]


def _lengths(held: Mapping[str, Tensor], pad: int) -> list[int]:
    """Tokens of each response; the mask of one that is left out has none."""
    ids, mask = held["completion_ids"], held["completion_mask"].bool()
    places = torch.arange(1, ids.shape[1] + 1)
    whole = torch.where(ids != pad, places, 0).amax(1)
    found: list[int] = torch.where(mask.any(1), mask.sum(1), whole).tolist()
    return found


def _reasons(ids: Tensor, lengths: Sequence[int], ends: set[int], limit: int) -> list[str]:
    """Why responses ended: at the limit without a token that ends one, or by themselves."""
    last = [row[n - 1] if n else -1 for row, n in zip(ids.tolist(), lengths, strict=True)]
    return [
        "length" if n >= limit and token not in ends else "stop"
        for token, n in zip(last, lengths, strict=True)
    ]


def _tokens(held: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """The columns that have an entry a token."""
    ids, mask = held["completion_ids"], held["completion_mask"].bool()
    mask = mask & held["tool_mask"].bool() if "tool_mask" in held else mask
    old, now = held.get("old_per_token_logps"), held.get("logp")
    sampled = held.get("sampling_per_token_logps")
    advantages = held["advantages"]
    known = {
        "behavior_logp": next(v for v in (sampled, old, now) if v is not None),
        "proximal_logp": old,
        "reference_logp": held.get("ref_per_token_logps"),
        "logp": now,
    }
    return {
        "response_ids": ids,
        "mask": mask,
        "versions": torch.full_like(ids, version),
        "turns": turns(mask),
        "advantages": advantages
        if advantages.dim() == 2
        else advantages.unsqueeze(1).expand(ids.shape),
        **{n: torch.where(mask, v, 0.0) for n, v in known.items() if v is not None},
        **{n: held[n] for n in OTHERS if n in held},
    }
