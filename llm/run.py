"""A run made ready from its configuration: model, task, sampler, recipe, folder; new or resumed.

run/
    config.toml         resolved, every key there
    versions.json       of this package and of what it stands on
    inputs.json         SHA-256 of what was read
    card.json           the recipe's claims, audited before
    metrics.jsonl       one object a step
    samples.jsonl       responses that a person can read
    evaluate.jsonl      held-out evaluations
    nonfinite.jsonl     responses with numbers that are not finite
    rollouts/           the store: every response, with why it was rejected
    checkpoints/        each opens with transformers; what a resumed run needs beside
    report/             tables, figures and one HTML page, once the run has ended
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.llm import checkpoint, critic, models, recipe, reference, shadow, sources
from windage.llm import folder as folders
from windage.llm.config import Config
from windage.llm.critic import Critic
from windage.llm.draw import Desk
from windage.llm.guard import Count, Guard
from windage.llm.learner import Learner, Settings, optimizer_of, schedule_of
from windage.llm.models import Loaded, Lora, Policy
from windage.llm.packed import (
    owner,
    pack_optimizer,
    pack_random,
    seed_random,
    unpack_optimizer,
    unpack_random,
)
from windage.llm.ranks import ALONE, Ranks, shared_like
from windage.llm.samplers import probe
from windage.llm.samplers.protocol import Sampler, Sampling
from windage.llm.tasks.index import get as task_of
from windage.llm.tasks.protocol import Split
from windage.llm.verify import Scale

PROBES, LONGEST = 8, 64
WEIGHTS = "model.safetensors"
Sequences = list[tuple[tuple[int, ...], tuple[int, ...]]]


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
        told: updates behind the weights that the sampler was told of last; None: it was told of
            none yet.
        probes: prompts and responses on which sampler and trainer are compared after a sync: the
            last that were drawn, since unlikely tokens are where rounding alone makes gaps.
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
    told: int | None = None
    probes: Sequences = field(default_factory=list)

    def remember(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Compare on some of these responses from now on."""
        drawn = [row for row in rows if len(row["response_ids"])]
        chosen = drawn[:: max(1, len(drawn) // PROBES)][:PROBES]
        self.probes = [
            (
                tuple(int(i) for i in row["prompt_ids"]),
                tuple(int(i) for i in row["response_ids"][:LONGEST]),
            )
            for row in chosen
        ]

    @property
    def checkpoints(self) -> Path:
        """Their folder."""
        return self.folder / "checkpoints"

    def publish(self, *, asked: bool = False) -> None:
        """Give the sampler the weights as they are, and see that it takes them.

        No work where they did not move since.

        Args:
            asked: whether it is about to be asked held-out questions, all that it does offline.
        """
        offline = self.config.train.mode == "offline"
        if self.told == self.learner.updates or (offline and not asked):
            return
        news = self.news()
        with self.ranks.together():
            if news is not None and self.desk is not None:
                if offline:
                    sources.load(self.desk, news)
                else:
                    self.source.publish(news)
        self.told = self.learner.updates

    def news(self) -> sources.News | None:
        """The weights as they are, for a sampler; None where this process has none.

        All processes ask: those that each hold a share of the weights put them together.
        """
        ranks, known = self.ranks, self.loaded
        sequences: Sequences = []
        with ranks.together():
            if self.desk is not None:
                sequences = self.probes or _probes(self.config, known, self.desk)
        if self.desk is None and not ranks.sharded:
            return None
        sequences = ranks.same(sequences) if ranks.sharded else sequences
        expected, tolerance = score(known, sequences), _tolerance(self.config)
        weights: Any = models.weights(known.policy)
        if ranks.sharded:
            weights = list(ranks.gathered(weights).items())
        if self.desk is None:
            return None

        def check(sampler: Sampler) -> None:
            probe.check(sampler, sequences, expected, tolerance)

        return sources.News(weights=weights, version=self.learner.updates, check=check)

    def save(self, step: int) -> None:
        """Keep what a resumed run needs, and the model as transformers reads it."""
        learner, whole = self.learner, self.ranks.gathered
        optimizer, settings = pack_optimizer(learner.optimizer)
        generators, words = pack_random()
        tensors = {"optimizer": whole(optimizer.items()), "random": generators}
        if trained := _trained(self.loaded):
            tensors["trained"] = whole(trained)
        if learner.reference is not None and self.schedule != reference.NEVER:
            tensors["reference"] = whole(learner.reference.state_dict().items())
        critics, about = ({}, None) if learner.critic is None else learner.critic.packed()
        tensors |= {group: whole(named.items()) for group, named in critics.items()}
        model = whole(models.weights(self.loaded.policy))
        state = {
            "step": step,
            "updates": learner.updates,
            "optimizer": settings,
            "random": words,
            "schedule": _plain(learner.schedule.state_dict()),
            "guard": vars(learner.count),
            "critic": about,
        }
        with self.ranks.together():
            if self.ranks.first:
                checkpoint.save(
                    self.checkpoints,
                    step,
                    tensors=tensors,
                    state=state,
                    keep=self.config.run.keep,
                    also=lambda folder: _write_model(self.loaded, model, folder),
                )


def _write_model(loaded: Loaded, weights: Mapping[str, Tensor], folder: Path) -> None:
    base = loaded.policy.base
    base.config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    from safetensors.torch import save_file

    named = {name: value.contiguous() for name, value in weights.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    # vLLM reads every safetensors file of a folder, that of the optimizer too, but for an index.
    index = {"metadata": {}, "weight_map": dict.fromkeys(named, WEIGHTS)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1))


def _probes(config: Config, loaded: Loaded, desk: Desk) -> Sequences:
    """Questions that the run asks anyway, with their answers as responses."""
    split: Split = "held out" if config.train.mode == "offline" else "train"
    asked = desk.task.questions(split, config.run.seed, 0, PROBES)
    return [
        (
            models.encode(loaded, question.text),
            tuple(loaded.tokenizer(question.answer, add_special_tokens=False)["input_ids"])
            or loaded.stop_ids[:1],
        )
        for question in asked
    ]


def _rehearse(config: Config, loaded: Loaded, desk: Desk) -> None:
    """Sync once with every weight changed, and back: what a small step would not show."""
    policy, sequences = loaded.policy, _probes(config, loaded, desk)
    probe.rehearse(
        desk.sampler,
        policy.parameters(),
        lambda: models.weights(policy),
        lambda: score(loaded, sequences),
        sequences,
        _tolerance(config),
    )


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
    made = TransformersSampler(
        loaded.policy.base,
        stop_ids=loaded.stop_ids,
        batch=told.batch,
        share=False,
        autocast=models.DTYPES[narrow] if narrow else None,
    )
    made.model.to(models.chosen(config.model.device))
    return made


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
    kept = _found(folder, config, resume, ranks)
    estimator = recipe.resolve(config)
    seed_random(config.run.seed)
    path = str(kept) if kept and ranks.first else config.model.path
    desk, store, steps = None, None, config.train.steps
    with ranks.together():
        loaded = _load(config, config.model.path if config.model.lora_rank else path, ranks)
        if ranks.first and config.train.mode == "offline":
            store = _store(config, loaded, head=estimator.centering is not None)
            steps = steps or store.per_epoch * config.train.data_epochs
        if _asks(config, ranks):
            desk = desk_of(config, loaded, path)
            _rehearse(config, loaded, desk)
    ranks.begin(loaded.policy)
    steps = ranks.same(steps)
    learner, schedule = _learner(config, loaded, wrap, estimator, ranks, steps)
    first = 0 if kept is None else _restore(kept, loaded, learner, schedule)
    if first > steps:
        raise BadInput(f"train.steps is {steps}, and {first} are done; allowed: at least {first}")
    run = Run(
        config=config,
        folder=folder,
        loaded=loaded,
        learner=learner,
        source=store or _source(config, desk, loaded, first, steps),
        desk=desk,
        schedule=schedule,
        shadows=_shadows(config, estimator),
        start=first,
        steps=steps,
        ranks=ranks,
        # The rehearsal left the first weights there; a thread keeps what it is told, for a sampler
        # in place of one that dies.
        told=None if config.train.mode == "asynchronous" else 0,
    )
    with ranks.together():
        if ranks.first:
            folders.write(folder, config, tokenizer=loaded.fingerprint, step=first)
    run.publish()
    return run


def _found(folder: Path, config: Config, resume: bool, ranks: Ranks) -> Path | None:
    """The newest checkpoint of the folder's run, as the first process sees it."""
    kept = None
    with ranks.together():
        if ranks.first:
            there = folders.begun(folder)
            if there and not resume:
                raise BadInput(
                    f"run.folder {str(folder)!r} holds a run; allowed: another folder, or --resume"
                )
            if there:
                folders.unchanged(folder, config)
                kept = checkpoint.latest(folder / "checkpoints")
    found: Path | None = ranks.same(kept)
    return found


def _store(config: Config, loaded: Loaded, *, head: bool) -> sources.Offline:
    """The recorded rollouts that are trained on."""
    return sources.Offline(
        Path(config.train.store),
        tokenizer=loaded.fingerprint,
        prompts=config.train.prompts,
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        head=head,
    )


def _load(config: Config, path: str, ranks: Ranks = ALONE) -> Loaded:
    """The policy; one that will be sharded begins on the CPU."""
    told = config.model
    if told.liger == "on" and ranks.sharded:
        raise BadInput("model.liger is 'on' under FSDP; allowed: 'auto' or 'off'")
    lora = None
    if told.lora_rank:
        lora = Lora(rank=told.lora_rank, alpha=told.lora_alpha, targets=told.lora_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)  # adapters begin at random
        return models.load(
            path,
            dtype=told.dtype,
            autocast=told.autocast or None,
            device="cpu" if ranks.sharded else told.device,
            lora=lora,
            checkpointing=told.gradient_checkpointing,
            liger="off" if ranks.sharded else told.liger,
        )


def _learner(
    config: Config,
    loaded: Loaded,
    wrap: Callable[[Policy], Any],
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
        kept = wrap(_load(config, config.model.path, ranks).policy.requires_grad_(False))
    if ranks.sharded and train.optimizer == "adafactor":
        raise BadInput("train.optimizer is 'adafactor' under FSDP; allowed: adamw, sgd")
    policy = wrap(loaded.policy)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = optimizer_of(train.optimizer, trained, vars(train))
    epochs = train.data_epochs if train.mode == "iterated" else 1
    total = (steps - config.critic.warmup) * train.passes * train.minibatches * epochs
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
        critic=_critic(config, loaded, policy, ranks),
    )
    return learner, schedule


def _critic(config: Config, loaded: Loaded, policy: Any, ranks: Ranks) -> Critic | None:
    if not config.critic.kind:
        return None
    told = vars(config.train)
    with ranks.together():
        found = critic.build(
            config,
            loaded,
            policy,
            gamma=recipe.gamma(config),
            optimizer=lambda trained, rate: optimizer_of(
                config.train.optimizer, trained, {**told, "learning_rate": rate}
            ),
            ranks=ranks,
        )
    ranks.begin(found.module)
    return found


def _restore(path: Path, loaded: Loaded, learner: Learner, schedule: reference.Schedule) -> int:
    """Put everything where the checkpoint has it; the step to go on with."""
    ranks, kept = learner.ranks, None
    with ranks.together():
        if ranks.first:
            kept = checkpoint.load(path)
    state = ranks.same(kept and kept.state)

    def tensors(group: str, own: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
        named = ranks.spread(kept and kept.tensors.get(group, {}))
        return {name: shared_like(value, own(name)) for name, value in named}

    trained = dict(loaded.policy.named_parameters())
    with torch.no_grad():
        for name, value in tensors("trained", trained.get).items():
            trained[name].copy_(value)
    if learner.reference is not None and schedule != reference.NEVER:
        other = learner.reference.state_dict()
        learner.reference.load_state_dict(tensors("reference", other.get))
    optimizer = tensors("optimizer", partial(owner, learner.optimizer))
    unpack_optimizer(learner.optimizer, optimizer, state["optimizer"])
    whole = {**learner.schedule.state_dict(), **state["schedule"]}
    learner.schedule.load_state_dict(whole)
    if learner.critic is not None:
        named = {name: tensors(name, lambda _: None) for name in critic.GROUPS}
        learner.critic.unpack(named, state.get("critic"))
    learner.updates, learner.count = state["updates"], Count(**state["guard"])
    unpack_random(tensors("random", lambda name: None), state["random"])
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
            renew=lambda: replace(desk, sampler=_again(config, loaded)),
            ahead=train.max_lag,
            keep_cache=config.sampling.keep_cache,
            first=first,
            steps=steps,
        )
    return sources.Synchronous(desk, order)


def _again(config: Config, loaded: Loaded) -> Sampler:
    """A sampler in place of one that died; one whose policy is sharded by now reads it anew."""
    sharded = any(hasattr(one, "full_tensor") for one in loaded.policy.parameters())
    plain = replace(loaded, policy=_load(config, config.model.path).policy) if sharded else loaded
    return sampler_of(config, plain, config.model.path)


def _shadows(config: Config, estimator: Estimator) -> dict[str, Estimator]:
    """Entries beside the recipe, which may need of other policies what it needs itself."""
    asked = {name: recipe.ready(name, {}, config) for name in config.recipe.shadow}
    fields = ["versions", "current_version", "truncated", "elapsed"]
    fields += [need for need in ("proximal_logp", "reference_logp") if need in estimator.needs]
    fields += ["values"] if config.critic.kind else []
    if config.sampling.head:
        fields += ["head_ids", "head_behavior_logp", "head_logp"]
    return shadow.carried(asked, fields=fields, length=float(config.sampling.max_tokens))
