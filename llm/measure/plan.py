"""What is asked of a study, whether it makes sense, and what it costs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, final

from windage.estimators.errors import BadInput, within
from windage.estimators.index import FIRST
from windage.llm.measure.behavior import Behavior

if TYPE_CHECKING:
    from windage.estimators.estimator import Estimator
    from windage.llm.models import Loaded
    from windage.llm.tasks.protocol import Question

Named = tuple[str, dict[str, float]]
# What only a run with more than one policy records.
ABSENT = ("proximal_logp", "reference_logp")
# Shown beside every sampler: it is unbiased where the sampler covers the policy.
UNBIASED = "trajectory_is"


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """A study of estimators on a language model.

    Args:
        model: folder.
        task: its name and settings, as in NAME:key=value,...
        samplers: who draws the data.
        estimators: of the catalogue, with settings; empty: the first tier.
        group_sizes: each divides the largest.
        prompts: questions of the task; the independent draws of every standard error.
        references: responses to a prompt by the policy itself, for the gradient of J.
        responses: to a prompt by each sampler; a multiple of the largest group.
        parameters: last, head, lora or all.
        lora_rank: of adapters that `lora` makes.
        sketch: numbers kept of a gradient; 0: all.
        max_tokens: of a response.
        head: likeliest tokens recorded, for score centering.
        error: of which the groups needed are told, as a share of the gradient's length.
        seed: of questions, responses and sketch.
        batch: responses drawn at a time.
        dtype, device: of the model.
    """

    model: str
    task: str = "arithmetic"
    samplers: tuple[Behavior, ...] = ()
    estimators: tuple[Named, ...] = ()
    group_sizes: tuple[int, ...] = (4,)
    prompts: int = 32
    references: int = 16
    responses: int = 16
    parameters: str = "last"
    lora_rank: int = 8
    sketch: int = 4096
    max_tokens: int = 64
    head: int = 32
    error: float = 0.1
    seed: int = 0
    batch: int = 64
    dtype: str = "float32"
    device: str = "auto"

    @property
    def largest(self) -> int:
        """The largest group."""
        return max(self.group_sizes)

    def check(self) -> Request:
        """Refuse numbers that do not go together.

        Raises:
            BadInput: names the flag and what is allowed.
        """
        within(3, 1 << 20, prompts=self.prompts)
        within(2, 1 << 16, references=self.references)
        within(1, 1 << 16, responses=self.responses)
        within(1, 1 << 16, max_tokens=self.max_tokens)
        within(0, 1024, head=self.head)
        within(0, 1 << 30, sketch=self.sketch)
        if not self.group_sizes or min(self.group_sizes) < 2:
            raise BadInput(f"group sizes are {list(self.group_sizes)}; allowed: from 2 on")
        for size in self.group_sizes:
            if self.largest % size:
                raise BadInput(
                    f"group size {size} does not divide {self.largest}; allowed: sizes that divide "
                    "the largest"
                )
        if self.responses % self.largest:
            raise BadInput(
                f"responses is {self.responses}; allowed: a multiple of the largest group, "
                f"{self.largest}"
            )
        names = [sampler.name for sampler in self.samplers]
        if not names or len(set(names)) < len(names):
            raise BadInput("samplers are missing or repeated; allowed: each once")
        return self

    def told(self, loaded: Loaded) -> dict[str, Any]:
        """Everything that figures depend on, as JSON holds it."""
        plain = asdict(self)
        del plain["batch"], plain["device"], plain["error"]
        plain["samplers"] = [sampler.name for sampler in self.samplers]
        plain["estimators"] = [[name, settings] for name, settings in self.estimators]
        plain["group_sizes"] = list(self.group_sizes)
        return plain | {"tokenizer": loaded.fingerprint, "weights": mark(loaded)}


def mark(loaded: Loaded) -> str:
    """A fingerprint of the weights: names, shapes and some numbers of each."""
    found = hashlib.sha256()
    for name, value in loaded.policy.named_parameters():
        some = value.detach().flatten()[:: max(1, value.numel() // 64)].double().cpu()
        found.update(f"{name} {tuple(value.shape)}".encode() + some.numpy().tobytes())
    return found.hexdigest()


def entries(request: Request) -> dict[str, Estimator]:
    """The estimators by the name that they were given, made ready for what is recorded.

    Raises:
        BadInput: one that needs what a study of a model does not have.
    """
    from windage.llm.config import Config, SamplingSection, TrainSection
    from windage.llm.recipe import ready

    config = Config(
        sampling=SamplingSection(max_tokens=request.max_tokens, head=request.head),
        train=TrainSection(group_size=min(request.group_sizes)),
    )
    asked = request.estimators or tuple((name, {}) for name in FIRST)
    found: dict[str, Estimator] = {}
    for name, settings in asked:
        try:
            entry = ready(name, dict(settings), config)
            lacking = [need for need in ABSENT if need in entry.needs]
            if lacking:
                raise BadInput(f"{name} needs {lacking[0]}, which a study of a model does not have")
        except BadInput as problem:
            if request.estimators:
                raise BadInput(f"--estimators {name}: {problem}") from None
            continue
        words = ",".join(f"{key}={value:g}" for key, value in settings.items())
        found[f"{name}:{words}" if words else name] = replace(entry, claims=())
    found.setdefault(UNBIASED, ready(UNBIASED, {}, config))
    return found


def check_prompts(loaded: Loaded, questions: Sequence[Question], longest: int) -> None:
    """Refuse questions that the tokenizer loses parts of, or that are too long.

    Args:
        longest: tokens of a prompt.

    Raises:
        BadInput: names the question and what is lost.
    """
    from collections import Counter

    from windage.llm.models import encode

    for question in questions:
        ids = loaded.tokenizer(question.text, add_special_tokens=False)["input_ids"]
        again = loaded.tokenizer.decode(ids)
        before, after = (Counter("".join(t.casefold().split())) for t in (question.text, again))
        lost = before - after
        if lost or not ids:
            what = f"{next(iter(lost))!r}" if lost else "all of it"
            raise BadInput(
                f"the tokenizer cannot encode {what} in the prompt {question.text[:40]!r}; "
                "allowed: text that it gives back"
            )
        if len(encode(loaded, question.text)) > longest:
            raise BadInput(
                f"the prompt {question.text[:40]!r} has more than {longest} tokens; allowed: "
                "prompts that fit in the model with a response"
            )


def cost(request: Request, count: int, parameters: int) -> dict[str, Any]:
    """What a study does, by counting.

    Args:
        count: of estimators.
        parameters: by which gradients are taken.
    """
    drawn = request.prompts * len(request.samplers) * request.responses
    own = request.prompts * request.references
    tables = 2 * count * len(request.group_sizes)
    most = min(tables, request.max_tokens + 4)
    numbers = request.sketch if 0 < request.sketch < parameters else parameters
    return {
        "responses": drawn + own,
        "tokens_at_most": (drawn + own) * request.max_tokens,
        "forward_passes": drawn + own,
        "backward_passes_at_most": drawn * most + own,
        "parameters": parameters,
        "sketch": numbers,
        "vectors": 2 * count + 14,
        "disk": 4 * numbers * request.prompts * (tables * len(request.samplers) + 2)
        + 8 * numbers * request.prompts * len(request.group_sizes),
        "rows": tables * (1 + request.largest // min(request.group_sizes)) + most,
    }


def seconds(request: Request, trial: Mapping[str, float]) -> dict[str, float]:
    """Seconds that a study takes, from those of one group of the largest size.

    Args:
        trial: `draw`, `score` (one backward pass a response) and `weigh` (all directions) seconds.
    """
    drawn = request.prompts * len(request.samplers) * request.responses / request.largest
    own = request.prompts * request.references / request.largest
    found = {
        "draw": (drawn + own) * trial["draw"],
        "differentiate": drawn * trial["weigh"] + own * trial["score"],
    }
    return found | {"total": sum(found.values())}
