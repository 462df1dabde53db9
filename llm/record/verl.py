"""verl: each batch into a store at the moment when its advantages are known.

verl keeps batches in two places.  Trainers of its v1 (`trainer.use_v1`, the default of 0.9) hold
the names of rows and keep their fields in TransferQueue, which is asked for them; older ones hold a
whole `DataProto`.  Weights are numbered as verl does: step n trains those numbered n - 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.llm.record.writer import Recorder, Rectangle, here, turns, vocabulary

# Names the store's folder; with windage beside verl that is all a run needs.
ASKED = "WINDAGE_RECORD"
SQUARE = "WINDAGE_RECORD_SQUARE"
V1 = "verl.trainer.ppo.v1.trainer_base"
# Where nothing says how long a response may be, nothing says why it ended.
UNTOLD = "untold"
# Columns of the store by verl's names.
COLUMNS = {
    "rollout_log_probs": "behavior_logp",
    "old_log_probs": "proximal_logp",
    "ref_log_prob": "reference_logp",
    "advantages": "advantages",
    "sum_pi_squared": "probability_square",
}


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
    folder: str | Path,
    *,
    tokenizer: Any = None,
    trainer: type | None = None,
    rollout: Any = None,
    square: bool = False,
) -> Recorder | None:
    """Record each batch at the moment when verl has computed its advantages.

    Args:
        folder: of the store.
        tokenizer: of transformers; None: the trainer's own, which only those of v1 have.
        trainer: a class of verl's v1 trainers; None: with a tokenizer, trainers that hold a whole
            `DataProto`, and without, the class from which all of verl's v1 descend.
        rollout: `config.actor_rollout_ref.rollout`; None: the trainer's own under v1, else
            temperature, top-p and top-k are recorded as if they had no effect.
        square: record the sum of squared probabilities too, which verl's workers then make beside
            the old log-probabilities; older trainers are asked by verl's own
            `actor.calculate_sum_pi_squared`.

    Returns:
        The recorder, to be closed at the end; None where it takes the trainer's tokenizer, and
        closes when the trainer's `fit` ends.

    Raises:
        BadInput: see `drawn`; a verl that has not what is wrapped.
    """
    if trainer is None and tokenizer is None:
        trainer = _hook(_module(V1), "PPOTrainer")
    if trainer is not None:
        return _after_v1(trainer, Path(folder), tokenizer, rollout, square)
    if square:
        raise BadInput(
            "the recorder: square is for trainers of v1; allowed: actor.calculate_sum_pi_squared "
            "in verl's configuration"
        )
    told = drawn(rollout, tokenizer)
    recorder = Recorder(Path(folder), tokenizer=vocabulary(tokenizer))
    module = _module("verl.trainer.ppo.ray_trainer")
    inner = _hook(module, "compute_advantage")

    @wraps(inner)
    def compute_advantage(data: Any, *given: Any, **named: Any) -> Any:
        found = inner(data, *given, **named)
        others = found.non_tensor_batch
        _put(
            recorder,
            dict(found.batch.items()),
            list(others["uid"]),
            told,
            born=list(others["min_global_steps"]) if "min_global_steps" in others else None,
        )
        return found

    module.compute_advantage = compute_advantage
    return recorder


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as problem:
        raise BadInput(f"the recorder: {problem}; allowed: verl 0.9 with what it needs") from None


def _hook(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise BadInput(f"the recorder: {owner.__name__} has no {name}; allowed: verl 0.9")
    return found


def _after_v1(
    trainer: type, folder: Path, tokenizer: Any, rollout: Any, square: bool
) -> Recorder | None:
    """Wrap a class of v1 trainers."""
    queue = import_module(trainer.__module__).tq
    inner, fit = _hook(trainer, "_compute_advantage"), getattr(trainer, "fit", None)
    told = None if rollout is None else drawn(rollout, tokenizer)
    open_: list[Recorder] = []
    if tokenizer is not None:
        open_.append(Recorder(folder, tokenizer=vocabulary(tokenizer)))

    @wraps(inner)
    def _compute_advantage(self: Any, batch: Any, metrics: Any) -> Any:
        out = inner(self, batch, metrics)
        words = self.tokenizer if tokenizer is None else tokenizer
        if not open_:
            open_.append(Recorder(folder, tokenizer=vocabulary(words)))
        config = getattr(self, "config", None)
        own = None if config is None else config.actor_rollout_ref.rollout
        _take(
            queue, batch, open_[0], told or drawn(own, words), getattr(self, "global_steps", None)
        )
        return out

    @wraps(fit or _after_v1)
    def closing(self: Any, *given: Any, **named: Any) -> Any:
        assert fit is not None
        try:
            return fit(self, *given, **named)
        finally:
            for recorder in open_:
                recorder.close()

    trainer._compute_advantage = _compute_advantage  # type: ignore[attr-defined]
    if fit is not None:
        trainer.fit = closing  # type: ignore[attr-defined]
    if square:
        _squared(trainer, queue)
    return open_[0] if open_ else None


def _squared(trainer: type, queue: Any) -> None:
    """Have the workers' pass for the old log-probabilities make the sums of squares as well."""
    inner = _hook(trainer, "_compute_old_log_prob")
    cut = import_module("verl.workers.utils.padding").response_from_nested

    @wraps(inner)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any) -> Any:
        rules = self.config.algorithm.get("rollout_correction", None)
        if rules and rules.get("bypass_mode", False):
            raise BadInput(
                "the recorder: with bypass_mode verl makes no pass that could tell sums of squared "
                "probabilities; allowed: no square"
            )
        if self.config.actor_rollout_ref.model.get("use_fused_kernels", False):
            raise BadInput(
                "the recorder: fused kernels tell no sums of squared probabilities; allowed: "
                "actor_rollout_ref.model.use_fused_kernels=false, or no square"
            )
        batch.extra_info["calculate_sum_pi_squared"] = True
        out = inner(self, batch, metrics)
        batch.extra_info.pop("calculate_sum_pi_squared", None)
        known = {"keys": out.keys, "partition_id": out.partition_id}
        data = queue.kv_batch_get(**known, select_fields=["sum_pi_squared", "response_mask"])
        data["sum_pi_squared"] = cut(data["sum_pi_squared"], data["response_mask"])
        queue.kv_batch_put(**known, fields=data.select("sum_pi_squared"))
        return out

    trainer._compute_old_log_prob = _compute_old_log_prob  # type: ignore[attr-defined]


def _take(queue: Any, batch: Any, recorder: Recorder, told: Drawn, step: int | None) -> None:
    """A batch's fields out of TransferQueue; rows that only fill it up are left out."""
    wanted = ["uid", "prompts", "responses", "response_mask", "rm_scores", "token_level_rewards"]
    data = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[*wanted, *COLUMNS]
    )
    tags = getattr(batch, "tags", None) or [{}] * len(data["prompts"])
    real = torch.tensor([not tag.get("is_padding", False) for tag in tags])
    kept = real.nonzero().flatten().tolist()
    names = data.pop("uid").tolist()
    prompts = [here(one) for one in data.pop("prompts").unbind()]
    lengths = [len(one) for one in data["responses"].unbind()]
    born = [tag.get("min_global_steps") for tag in tags]
    _put(
        recorder,
        {name: value.to_padded_tensor(0)[real] for name, value in data.items()},
        [names[n] for n in kept],
        told,
        prompts=[prompts[n] for n in kept],
        lengths=[lengths[n] for n in kept],
        born=[born[n] for n in kept],
        trained=None if step is None else step - 1,
    )


def _put(
    recorder: Recorder,
    columns: Mapping[str, Tensor],
    names: Sequence[Any],
    told: Drawn,
    *,
    prompts: Sequence[Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    born: Sequence[Any] | None = None,
    trained: int | None = None,
) -> None:
    """Hand a batch to the recorder.

    Args:
        born: number of the weights that drew each response; None, or None in it: not known, and the
            recorder's step stands for it.
        trained: number of the weights that the step trains.
    """
    mask, ids = here(columns["response_mask"]).bool(), here(columns["responses"])
    limit = ids.shape[1] if lengths is None else None
    if prompts is None or lengths is None:
        attention = here(columns["attention_mask"]).bool()
        width = columns["prompts"].shape[1]
        before = here(columns["prompts"])
        prompts = [row[own] for row, own in zip(before, attention[:, :width], strict=True)]
        lengths = attention[:, width:].sum(1).tolist()
    tokens = {ours: here(columns[n]) for n, ours in COLUMNS.items() if n in columns}
    tokens.setdefault("behavior_logp", tokens["proximal_logp"])
    scores = columns["rm_scores"] if "rm_scores" in columns else columns["token_level_scores"]
    shaped = columns.get("token_level_rewards", scores)
    step = recorder.next
    told_born = born is not None and all(version is not None for version in born)
    versions = torch.tensor([int(v) for v in born] if told_born and born else [step] * len(ids))
    tokens |= {"response_ids": ids, "mask": mask, "turns": turns(mask)}
    tokens["versions"] = versions.unsqueeze(1).expand(ids.shape)
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
        version=trained if told_born else None,
    )
    recorder.put(lambda: made)


# From the environment.


def when_asked() -> None:
    """Record with verl's v1 trainers if WINDAGE_RECORD says so; what fails then fails aloud.

    verl hides the errors of a plugin, so nothing can fail here: the trainer's module is watched,
    and what is wrong stops its import.
    """
    if not os.environ.get(ASKED):
        return
    if V1 in sys.modules:
        _as_asked(sys.modules[V1])
    else:
        sys.meta_path.insert(0, _AfterImport(V1, _as_asked))


def _as_asked(module: ModuleType) -> None:
    folder, square = os.environ[ASKED], os.environ.get(SQUARE, "")
    if not os.path.isabs(folder):
        raise BadInput(f"{ASKED} is {folder!r}; allowed: a path that starts with /, for Ray's sake")
    if square not in ("", "0", "1"):
        raise BadInput(f"{SQUARE} is {square!r}; allowed: 1, or unset")
    record_verl(folder, trainer=_hook(module, "PPOTrainer"), square=square == "1")


class _AfterImport(MetaPathFinder):
    """Does something with a module right after it was imported."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act, self._busy = name, act, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with something to do after it ran."""
        if name != self.name or self._busy:
            return None
        self._busy = True
        try:
            spec = find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            inner = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                inner(module)
                self.act(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
