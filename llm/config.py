"""What a run is told: sections of a TOML file, each key with its meaning, default and range.

    [model] [task] [recipe] [sampling] [train] [critic] [reference] [evaluate] [run]

The same keys are flags, `--train.steps 20`.  A key that nothing knows is refused with the nearest
one that there is.  What each means stands at its section, which `--help` shows; those that the
field confuses (steps, passes, minibatches, epochs, micro-batches) at `TrainSection`.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, final, get_args, get_origin, get_type_hints

from windage.estimators.errors import BadInput, unknown, within

Mode = Literal["synchronous", "one step off", "asynchronous", "offline", "iterated"]
Number = int | float


@final
@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The policy: where it comes from and how it is held.

    Args:
        path: folder of the model, or its name on the hub.
        dtype: number format of the weights.
        autocast: number format of matrix products in training; empty: that of the weights.
        device: auto, cpu, cuda, ...
        lora_rank: rank of adapters, which then train in place of the weights; 0: none.
        lora_alpha: adapters are scaled by lora_alpha / lora_rank.
        lora_targets: layers that get adapters; none: all linear ones.
        gradient_checkpointing: compute activations twice rather than keep them.
        liger: fused kernels of liger-kernel in its layers; auto: on CUDA, where it is installed.
    """

    path: str = ""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    autocast: Literal["", "bfloat16"] = ""
    device: str = "auto"
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    liger: Literal["auto", "on", "off"] = "auto"


@final
@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Where questions come from and what answers earn.

    Args:
        name: task that asks and judges: arithmetic, gsm8k, math, jsonl, reasoning_gym, verifier.
        settings: the task's own, such as digits=2,operators=+-.
        low: reward of an answer that is not right.
        high: reward of a right answer.
        format: reward of a right answer with words after it.
    """

    name: str = "arithmetic"
    settings: dict[str, Any] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0
    format: float = 0.5


@final
@dataclass(frozen=True, kw_only=True)
class RecipeSection:
    """The estimator.

    Args:
        name: catalogue entry that the policy is trained by; `windage study` compares them.
        settings: replaced in the entry, such as cap=5,k=32.
        shadow: entries logged beside it, on the same forward pass.
    """

    name: str = "starting_point"
    settings: dict[str, Any] = field(default_factory=dict)
    shadow: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class SamplingSection:
    """How responses are drawn.

    Args:
        engine: what draws responses.
        dtype: number format of the sampler's own weights; empty: as the policy's.
        max_tokens: most tokens of a response; one that reaches them is cut.
        temperature: divides the logits; the trainer's log-probabilities take it too.
        top_k: likeliest tokens that stay; 0: all.
        top_p: probability of the likeliest tokens that stay; 1: all.
        head: likeliest tokens recorded at each position, for score centering; where the command
            line was not told: 64 if the recipe or a shadow of it centers.
        batch: responses drawn at a time.
        keep_cache: in-flight updates leave keys and values of the old weights in place.
        tolerance: largest difference of log-probabilities after a sync, in nats; 0: by the number
            formats.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["", "float32", "bfloat16"] = ""
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    head: int = 0
    batch: int = 64
    keep_cache: bool = False
    tolerance: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The loop.

    Args:
        mode: synchronous: each batch is drawn with the newest weights; one step off: while the
            batch before is trained on; asynchronous: without a pause, up to `max_lag` steps ahead;
            offline: read from `store`; iterated: as synchronous, for several epochs a round.
        steps: of the run; each draws (or reads) one rollout batch and trains on it; 0, offline:
            what `data_epochs` gives.
        prompts: groups of a rollout batch, one prompt each.
        group_size: responses to each prompt.
        passes: times a rollout batch is gone through (mu of GRPO; ppo_epochs in verl,
            num_iterations in TRL); the second time its data are off-policy.
        minibatches: optimizer updates that a pass is divided into, by whole groups (verl:
            ppo_mini_batch_size = prompts / minibatches).
        data_epochs: times the store (offline) or a round's data (iterated) are gone through, in a
            new order each time.
        micro_batch: responses in one forward pass; moves no number but by rounding.
        max_lag: steps that an asynchronous sampler may be ahead.
        store: folder of rollouts that offline trains on.
        positive_share: curating, offline and iterated: responses are left out at random until this
            share has a positive reward; 0: none is left out.
        refill: rounds of further prompts in place of groups that admission drops whole.
        optimizer: of the policy.
        learning_rate: of the optimizer, after warm-up.
        weight_decay: of the optimizer.
        beta1: of adamw, the mean gradient's memory.
        beta2: of adamw, the mean square's memory.
        schedule: of the learning rate, after warm-up.
        warmup: updates over which the learning rate rises from 0.
        max_grad_norm: gradients beyond are scaled down to it; 0: none is.
        on_nonfinite: at a number that is not finite: skip the update, set the samples aside, or
            stop.
        nonfinite_in_a_row: updates with such a fault, one after the other, that end the run.
    """

    mode: Mode = "synchronous"
    steps: int = 0
    prompts: int = 16
    group_size: int = 8
    passes: int = 1
    minibatches: int = 1
    data_epochs: int = 1
    micro_batch: int = 16
    max_lag: int = 1
    store: str = ""
    positive_share: float = 0.0
    refill: int = 0
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    max_grad_norm: float = 1.0
    on_nonfinite: Literal["skip", "set aside", "stop"] = "skip"
    nonfinite_in_a_row: int = 5


@final
@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The critic, for recipes that need values; `gamma` and `lam` of the policy are theirs.

    Args:
        kind: head (a linear layer on the policy's trunk), model (one with a trunk of its own), or
            empty: none.
        path: model, folder of the trunk; empty: that of the policy.
        trunk: head, what the gradient of its loss is multiplied by before it goes into the policy's
            trunk; 0: stopped.
        learning_rate: of it, by the optimizer that `train` names; 0: 1e-3 of a head, 1e-5 of a
            model.
        lam_value: lambda of what it is fitted to (the recipe's lam is the policy's).
        passes: times a rollout batch is gone through for it.
        minibatches: its updates in a pass.
        warmup: steps in which the critic alone learns, from whole returns (lambda 1).
        complete: a response cut at a limit earns the value after its last token.
        clip_value: farther from its old value than this a value earns no credit (verl:
            cliprange_value); 0: no limit.
    """

    kind: Literal["", "head", "model"] = ""
    path: str = ""
    trunk: float = 0.0
    learning_rate: float = 0.0
    lam_value: float = 1.0
    passes: int = 1
    minibatches: int = 1
    warmup: int = 0
    complete: bool = False
    clip_value: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The reference of a penalty.

    Args:
        refresh: when the reference becomes the policy: never; every so many steps; after each epoch
            (pass); ema: by a share.
        every: updates between two refreshes.
        alpha: share of the policy mixed into the reference at a refresh by ema.
    """

    refresh: Literal["never", "steps", "epoch", "ema"] = "never"
    every: int = 64
    alpha: float = 0.6


@final
@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """Held-out questions, asked before, between and after.

    Args:
        every: steps between two evaluations; 0: never.
        questions: held-out questions.
        samples: responses to each.
        temperature: of these responses.
    """

    every: int = 0
    questions: int = 100
    samples: int = 4
    temperature: float = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run's folder and what is kept there.

    Args:
        folder: made anew; a run that is there goes on by --resume.
        seed: of everything drawn.
        save_every: steps between checkpoints; 0: at the end alone.
        keep: newest checkpoints that stay.
        samples: responses written out for a person at each step.
        trackers: further places for the metrics: tensorboard, wandb, trackio.
        card: audit the recipe on toys first, and keep its card.
        report: write tables, figures and one HTML page into the folder's report at the end.
    """

    folder: str = ""
    seed: int = 0
    save_every: int = 0
    keep: int = 2
    samples: int = 2
    trackers: tuple[str, ...] = ()
    card: bool = True
    report: bool = True


@final
@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelSection = ModelSection()
    task: TaskSection = field(default_factory=TaskSection)
    recipe: RecipeSection = field(default_factory=RecipeSection)
    sampling: SamplingSection = SamplingSection()
    train: TrainSection = TrainSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    evaluate: EvaluateSection = EvaluateSection()
    run: RunSection = RunSection()


RANGES: dict[str, tuple[Number, Number]] = {
    "model.lora_rank": (0, 4096),
    "sampling.max_tokens": (1, 1 << 20),
    "sampling.temperature": (0.01, 100),
    "sampling.top_k": (0, 1 << 20),
    "sampling.top_p": (0, 1),
    "sampling.head": (0, 1024),
    "sampling.batch": (1, 1 << 16),
    "sampling.tolerance": (0, math.inf),
    "train.steps": (0, 10**7),
    "train.prompts": (1, 10**6),
    "train.group_size": (1, 10**5),
    "train.passes": (1, 1000),
    "train.minibatches": (1, 10**4),
    "train.data_epochs": (1, 10**4),
    "train.micro_batch": (1, 10**5),
    "train.max_lag": (0, 1000),
    "train.positive_share": (0, 1),
    "train.refill": (0, 100),
    "train.learning_rate": (0, 10),
    "train.weight_decay": (0, 10),
    "train.beta1": (0, 0.99999999),
    "train.beta2": (0, 0.99999999),
    "train.warmup": (0, 10**6),
    "train.max_grad_norm": (0, math.inf),
    "train.nonfinite_in_a_row": (1, 10**6),
    "critic.trunk": (0, 1000),
    "critic.learning_rate": (0, 10),
    "critic.lam_value": (0, 1),
    "critic.passes": (1, 1000),
    "critic.minibatches": (1, 10**4),
    "critic.warmup": (0, 10**6),
    "critic.clip_value": (0, math.inf),
    "reference.every": (1, 10**7),
    "reference.alpha": (0, 1),
    "evaluate.every": (0, 10**7),
    "evaluate.questions": (1, 10**6),
    "evaluate.samples": (1, 10**4),
    "evaluate.temperature": (0, 100),
    "run.seed": (0, 2**63 - 1),
    "run.save_every": (0, 10**7),
    "run.keep": (1, 10**4),
    "run.samples": (0, 1000),
}
SECTIONS: dict[str, type] = get_type_hints(Config)


def entries() -> Iterator[tuple[str, Any, Any]]:
    """Every key with its section, the type of its value, and its default."""
    for section, kind in SECTIONS.items():
        hints, plain = get_type_hints(kind), kind()
        for one in fields(kind):
            yield f"{section}.{one.name}", hints[one.name], getattr(plain, one.name)


def meanings() -> dict[str, str]:
    """What each key means, as its section's docstring says it.

    Example:
        >>> meanings()["run.keep"]
        'newest checkpoints that stay.'
    """
    found: dict[str, str] = {}
    for section, kind in SECTIONS.items():
        told = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
        for names, words in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", told, re.MULTILINE):
            plain = " ".join(words.replace("`", "").split())
            found |= {f"{section}.{name}": plain for name in names.split(", ")}
    return found


def read(path: Path, base: Config | None = None) -> Config:
    """A configuration from a TOML file, in place of the base's.

    Raises:
        BadInput: names the file and what is wrong in it.
    """
    try:
        told = tomllib.loads(path.read_text("utf-8"))
    except OSError as problem:
        raise BadInput(f"{str(path)!r}: {problem.strerror}; allowed: a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise BadInput(f"{str(path)!r} is no TOML: {problem}") from None
    try:
        return build(told, base)
    except BadInput as problem:
        raise BadInput(f"{str(path)!r}: {problem}") from None


def build(told: Mapping[str, Any], base: Config | None = None) -> Config:
    """A configuration from tables of values, each put in place of the base's.

    Raises:
        BadInput: an unknown section or key, with the nearest valid one, or a value of another kind
            or out of range.

    Example:
        >>> build({"run": {"seeds": 3}})
        Traceback (most recent call last):
        windage.estimators.errors.BadInput: unknown key 'run.seeds'; nearest valid name: run.seed; \
allowed: run.folder, run.seed, run.save_every, run.keep, run.samples, run.trackers, run.card, \
run.report
    """
    found = base or Config()
    types = {name: kind for name, kind, _ in entries()}
    for section, table in told.items():
        if section not in SECTIONS:
            raise unknown("section", section, SECTIONS)
        if not isinstance(table, Mapping):
            raise BadInput(f"{section} is {table!r}; allowed: a table, [{section}]")
        changes: dict[str, Any] = {}
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in types:
                raise unknown("key", name, [n for n in types if n.startswith(f"{section}.")])
            _without_nul(name, value)
            changes[key] = _fitting(name, types[name], value)
        found = replace(found, **{section: replace(getattr(found, section), **changes)})
    return found


def _without_nul(name: str, value: Any) -> None:
    """Refuse text that no path and no program takes.

    Raises:
        BadInput: names the key.
    """
    if isinstance(value, str) and "\0" in value:
        raise BadInput(f"{name} is {value!r}; allowed: text without a zero byte")


def _fitting(name: str, kind: Any, value: Any) -> Any:
    """The value as its key holds it, or a refusal."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise unknown(f"value of {name}", str(value), [str(v) for v in get_args(kind) if v])
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise BadInput(f"{name} is {value!r}; allowed: a list of words")
        return tuple(value)
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise BadInput(f"{name} is {value!r}; allowed: a table of settings")
        for key, entry in value.items():
            _without_nul(f"{name}.{key}", entry)
            listed = entry if isinstance(entry, list) else [entry]
            if not all(isinstance(one, bool | int | float | str) for one in listed):
                allowed = "numbers, texts, true or false, or a list of them"
                raise BadInput(f"{name}.{key} holds a {_word(listed)}; allowed: {allowed}")
        return dict(value)
    assert not isinstance(kind, UnionType)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise BadInput(f"{name} is {value!r}; allowed: {words[kind]}")
    if name in RANGES:
        within(*RANGES[name], **{name: value})
    return kind(value)


def _word(listed: list[Any]) -> str:
    """The kind of the first value that is no plain one."""
    plain = bool | int | float | str
    return next(type(one).__name__ for one in listed if not isinstance(one, plain))


def parse(name: str, kind: Any, text: str) -> Any:
    """A flag's text as the value of its key.

    Example:
        >>> parse("train.steps", int, "20"), parse("recipe.settings", dict[str, Any], "cap=5,k=32")
        (20, {'cap': 5, 'k': 32})
    """
    if get_origin(kind) is Literal or kind is str:
        value: Any = text
    elif get_origin(kind) is tuple:
        value = [word for word in text.split(",") if word]
    elif get_origin(kind) is dict:
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        value = {key: _plain(rest) for key, _, rest in pairs}
    else:
        value = _plain(text)
    return _fitting(name, kind, value)


def _plain(text: str) -> Any:
    """A number, true or false where the text reads as one, as TOML reads it; else the text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = found.get("value")
    return value if len(found) == 1 and isinstance(value, bool | int | float | str) else text


def plain(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as tables of plain values; `build` takes it back."""
    return {
        section: {key: list(v) if isinstance(v, tuple) else v for key, v in table.items()}
        for section, table in asdict(config).items()
    }


def toml(config: Config) -> str:
    """The configuration as TOML, every key there; `read` takes it back."""
    lines: list[str] = []
    for section, table in plain(config).items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_written(value)}" for key, value in table.items()]
    return "\n".join(lines[1:]) + "\n"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(_escaped(c) for c in value)
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_written(str(k))} = {_written(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    return repr(value)


def _escaped(c: str) -> str:
    if c in '"\\':
        return f"\\{c}"
    return c if c.isprintable() else f"\\U{ord(c):08x}"
