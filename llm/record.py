"""A recorder for runs of other engines: every response into a rollout store, beside the training.

    record_trl(trainer, "run/rollouts")                     any GRPOTrainer of TRL
    record_verl("run/rollouts", tokenizer=tokenizer, rollout=config.actor_rollout_ref.rollout)
                                                            in verl's driver, before the trainer
    record_verl(..., trainer=PPOTrainer)                    with the class of verl's v1 trainers

The training thread copies tensors; a thread of its own turns them into rows and writes a step's
file.  If the disk is slower than the run, training waits: nothing is left out silently, and what
the thread could not write is raised at the next step.

Differences from what the engines know:
    1. `behavior_logp` falls back to the trainer's log-probabilities where the engine gave none.
    2. `versions` is the number of optimizer steps at generation, unless the engine tells one.
    3. TRL and verl tell no head, and TRL no sum of squared probabilities; those columns are absent:
       verl's workers send none, and TRL's fused output layer makes no logits to take one from.
    4. Engines tell log-probabilities after temperature, top-k and top-p, never also those before,
       so `raw_logp` is absent; verl's `raw_logprobs` are refused where the two differ.
    5. `rejected` is `masked` where verl left no token of a response to train on, and `truncated`
       where TRL leaves out what its limit cut: such rows have no log-probabilities of the trainer.
       Groups that verl filters away (DAPO) never come to the hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.llm.rollouts import Row, fingerprint, steps, write

UNKNOWN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "seed": None,
    "elapsed": 0.0,
    "rejected": None,
}
# verl's v1 trainers do not say why a response ended.
UNTOLD = "untold"
# Columns of the store by verl's names.
VERL = {
    "rollout_log_probs": "behavior_logp",
    "old_log_probs": "proximal_logp",
    "ref_log_prob": "reference_logp",
    "advantages": "advantages",
    "sum_pi_squared": "probability_square",
}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangle:
    """Responses of one step, as an engine holds them.

    Args:
        prompts: tokens of each prompt, without padding.
        lengths: tokens of each response, tools' included.
        tokens: columns `[B T]`, padded at the end.
        responses: columns with one entry a response.
        constants: what all responses share.
    """

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    tokens: Mapping[str, Tensor]
    responses: Mapping[str, Sequence[Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """Rows of the store."""
        columns = {name: value.numpy() for name, value in self.tokens.items()}
        for b, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            yield {
                **UNKNOWN,
                **self.constants,
                "prompt_ids": prompt,
                **{name: value[b, :length] for name, value in columns.items()},
                **{name: values[b] for name, values in self.responses.items()},
            }


class Recorder:
    """Writes steps to a store in a thread of its own.

    Args:
        folder: of the store; continues after the steps that it holds.
        tokenizer: its `fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer: str) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.next = max(steps(folder), default=-1) + 1 if folder.exists() else 0
        self._queue: Queue[tuple[int, Callable[[], Iterable[Row]]] | None] = Queue(maxsize=2)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, rows: Callable[[], Iterable[Row]]) -> int:
        """Have the rows of one more step made and written.

        Returns:
            The step's number in the store.

        Raises:
            BadInput: an earlier step could not be written.
        """
        self._raise()
        step, self.next = self.next, self.next + 1
        self._queue.put((step, rows))
        return step

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            BadInput: a step could not be written.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._raise()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, rows = item
            if self._problem is None:
                try:
                    write(self.folder, step, rows(), tokenizer=self.tokenizer)
                except Exception as problem:
                    self._problem = problem

    def _raise(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise BadInput(f"the recorder: {problem}") from problem


def vocabulary(tokenizer: Any) -> str:
    """The fingerprint of a transformers tokenizer."""
    found = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return fingerprint([token for token, _ in found])


def here(value: Tensor) -> Tensor:
    """A copy that training cannot change any more; numbers in single precision or wider."""
    found = value.detach().to("cpu", copy=True)
    return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found


def turns(mask: Tensor) -> Tensor:
    """The number of each token's turn: one more whenever the policy goes on after a tool.

    Example:
        >>> turns(torch.tensor([[True, False, False, True]])).tolist()
        [[0, 0, 0, 1]]
    """
    begins = mask[:, 1:] & ~mask[:, :-1]
    return torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))


# verl.


@final
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How verl's engine draws, as far as it is known.

    Args:
        constants: columns of the store that all responses share.
        limit: tokens of a response.
        ends: tokens that end one; empty: unknown.
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    ends: frozenset[int] = frozenset()

    def reason(self, ids: Sequence[int], limit: int | None) -> str:
        """Why a response ended."""
        limit = self.limit if self.limit is not None else limit
        if len(ids) and ids[-1] in self.ends:
            return "stop"
        if limit is None:
            return UNTOLD
        return "length" if len(ids) >= limit else "stop"


def drawn(rollout: Any, tokenizer: Any) -> Drawn:
    """What the configuration of verl's engine says.

    Args:
        rollout: `config.actor_rollout_ref.rollout`; None: not known.
        tokenizer: of transformers.

    Raises:
        BadInput: log-probabilities before temperature, top-k and top-p, which are not those that a
            token was drawn with.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    ends = frozenset(() if end is None else (end,))
    if rollout is None:
        return Drawn(ends=ends)
    temperature, top_p, top_k = float(rollout.temperature), float(rollout.top_p), rollout.top_k
    top_k = None if top_k in (None, 0, -1) else int(top_k)
    mode = rollout.get("logprobs_mode", None)
    if mode is not None and mode.startswith("raw") and (temperature, top_p, top_k) != (1, 1, None):
        raise BadInput(
            f"the recorder: logprobs_mode is {mode!r}, at which log-probabilities are not those "
            "that tokens are drawn with; allowed: processed_logprobs"
        )
    return Drawn(
        constants={"temperature": temperature, "top_p": top_p, "top_k": top_k},
        limit=rollout.get("response_length", None),
        ends=ends,
    )


def record_verl(
    folder: str | Path, *, tokenizer: Any, trainer: type | None = None, rollout: Any = None
) -> Recorder:
    """Record each batch at the moment when verl has computed its advantages.

    Args:
        folder: of the store.
        tokenizer: of transformers.
        trainer: a class of verl's v1 trainers, which knows its configuration; None: the trainers
            that hold a whole `DataProto`.
        rollout: `config.actor_rollout_ref.rollout`; None: temperature, top-p and top-k are recorded
            as if they had no effect.

    Returns:
        The recorder, to be closed at the end.

    Raises:
        BadInput: see `drawn`.
    """
    told = drawn(rollout, tokenizer)
    recorder = Recorder(Path(folder), tokenizer=vocabulary(tokenizer))
    if trainer is not None:
        _after_v1(trainer, recorder, tokenizer, told)
        return recorder
    module: Any = import_module("verl.trainer.ppo.ray_trainer")
    inner = module.compute_advantage

    def compute_advantage(data: Any, *given: Any, **named: Any) -> Any:
        found = inner(data, *given, **named)
        columns = dict(found.batch.items())
        _put(recorder, columns, list(found.non_tensor_batch["uid"]), told)
        return found

    module.compute_advantage = compute_advantage
    return recorder


def _after_v1(trainer: type, recorder: Recorder, tokenizer: Any, told: Drawn) -> None:
    store = import_module(trainer.__module__).tq
    inner = trainer._compute_advantage  # type: ignore[attr-defined]
    wanted = ["uid", "prompts", "responses", "response_mask", "rm_scores", "advantages"]
    wanted += [name for name in VERL if name != "advantages"]

    def _compute_advantage(self: Any, batch: Any, metrics: Any) -> Any:
        out = inner(self, batch, metrics)
        data = store.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted
        )
        names = data.pop("uid").tolist()
        prompts = [here(one) for one in data.pop("prompts").unbind()]
        lengths = [len(one) for one in data["responses"].unbind()]
        columns = {name: value.to_padded_tensor(0) for name, value in data.items()}
        config = getattr(self, "config", None)
        known = told if config is None else drawn(config.actor_rollout_ref.rollout, tokenizer)
        _put(recorder, columns, names, known, prompts=prompts, lengths=lengths)
        return out

    trainer._compute_advantage = _compute_advantage  # type: ignore[attr-defined]


def _put(
    recorder: Recorder,
    columns: Mapping[str, Tensor],
    names: Sequence[Any],
    told: Drawn,
    prompts: Sequence[Tensor] | None = None,
    lengths: Sequence[int] | None = None,
) -> None:
    mask, ids = here(columns["response_mask"]).bool(), here(columns["responses"])
    limit = ids.shape[1] if lengths is None else None
    if prompts is None or lengths is None:
        attention = here(columns["attention_mask"]).bool()
        width = columns["prompts"].shape[1]
        before = here(columns["prompts"])
        prompts = [row[own] for row, own in zip(before, attention[:, :width], strict=True)]
        lengths = attention[:, width:].sum(1).tolist()
    tokens = {ours: here(columns[n]) for n, ours in VERL.items() if n in columns}
    tokens.setdefault("behavior_logp", tokens["proximal_logp"])
    scores = columns["rm_scores"] if "rm_scores" in columns else columns["token_level_scores"]
    shaped = columns.get("token_level_rewards", scores)
    step = recorder.next
    tokens |= {"response_ids": ids, "mask": mask, "turns": turns(mask)}
    tokens["versions"] = torch.full_like(ids, step)
    responses = {
        "group_id": [str(name) for name in names],
        "sample_id": [f"{step}/{b}" for b in range(len(names))],
        "reward": here(shaped.sum(-1)).tolist(),
        "outcome": here(scores.sum(-1)).tolist(),
        "finish_reason": [
            told.reason(row[:n], limit) for row, n in zip(ids.tolist(), lengths, strict=True)
        ],
        "rejected": [None if kept else "masked" for kept in mask.any(1).tolist()],
    }
    made = Rectangle(
        prompts=[prompt.tolist() for prompt in prompts],
        lengths=lengths,
        tokens=tokens,
        responses=responses,
        constants=told.constants,
    )
    recorder.put(made.rows)


# TRL.


def record_trl(trainer: Any, folder: str | Path) -> Recorder:
    """Record the responses of a GRPOTrainer; each rank writes a store of its own.

    Args:
        trainer: made, not yet trained; its methods are wrapped on this object only.
        folder: of the store; with several ranks of the stores `rank-00000`, ...

    Returns:
        The recorder; training's end closes it.
    """
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    place = Path(folder) if ranks == 1 else Path(folder) / f"rank-{rank:05d}"
    recorder = Recorder(place, tokenizer=vocabulary(trainer._tokenizer))
    _Watch(trainer, recorder)
    return recorder


class _Watch:
    """What a GRPOTrainer passes by between generating and the first pass over each response."""

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        self.trainer, self.recorder = trainer, recorder
        self.scores = self.seen = torch.zeros(0)
        self.pending: dict[str, Tensor] | None = None
        self.about: dict[str, Any] = {}
        for name in (
            "_calculate_rewards",
            "_generate_and_score_completions",
            "_get_per_token_logps_and_entropies",
            "_compute_loss",
        ):
            wrapped = getattr(self, name)
            setattr(trainer, name, self._around(getattr(trainer, name), wrapped))
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
        return output

    def _compute_loss(self, inner: Any, model: Any, inputs: dict[str, Any]) -> Any:
        loss = inner(model, inputs)
        if self.pending is not None and "record_row" in inputs:
            logp = here(self.seen)
            known = self.pending.setdefault(
                "logp", torch.zeros_like(self._mask(), dtype=logp.dtype)
            )
            known[inputs["record_row"].cpu()] = logp
        return loss

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
            trainer, step = self.trainer, self.recorder.next
            rank, count = trainer.accelerator.process_index, len(held["completion_ids"])
            constants = {
                "temperature": float(trainer.temperature),
                "top_p": float(trainer.top_p),
                "top_k": trainer.top_k or None,
            }
            size, weights = trainer.num_generations, here(trainer.reward_weights)
            ends, limit = set(trainer.eos_token_ids), trainer.max_completion_length
            own = about["scores"][rank * count : (rank + 1) * count]

            def rows() -> Iterator[Row]:
                rewards = _rewards(own, weights)
                prompts = zip(held["prompt_ids"], held["prompt_mask"].bool(), strict=True)
                lengths = _lengths(held, trainer._tokenizer.pad_token_id)
                left_out = (held["completion_mask"].sum(1) == 0).tolist()
                reasons = _reasons(held["completion_ids"], lengths, ends, limit)
                names: dict[str, Sequence[Any]] = {
                    "group_id": [f"{step}/{(rank * count + b) // size}" for b in range(count)],
                    "sample_id": [f"{rank}/{step}/{b}" for b in range(count)],
                    "reward": rewards,
                    "outcome": rewards,
                    "finish_reason": [
                        "length" if left else reason
                        for left, reason in zip(left_out, reasons, strict=True)
                    ],
                    "rejected": ["truncated" if left else None for left in left_out],
                }
                return Rectangle(
                    prompts=[row[real].tolist() for row, real in prompts],
                    lengths=lengths,
                    tokens=_tokens(held, about["version"]),
                    responses=names,
                    constants=constants,
                ).rows()

            self.recorder.put(rows)


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
    }
