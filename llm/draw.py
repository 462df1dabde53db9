"""Questions in, judged responses out: rows of the rollout store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from windage.estimators.errors import BadInput
from windage.llm.guard import Fault, in_rows
from windage.llm.models import Loaded, decode, encode
from windage.llm.samplers.protocol import Between, Request, Response, Sampler, Sampling, alive
from windage.llm.tasks.protocol import Question, Task
from windage.llm.verify import Scale, Verdict, reward

Row = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Desk:
    """What it takes to put questions to a policy and to judge what it says.

    Args:
        task: its questions and verdicts.
        sampler: the engine.
        sampling: how it draws.
        loaded: tokenizer and stop tokens.
        scale: what verdicts earn.
        strict: stop at a log-probability that is not finite, rather than set its response aside.
    """

    task: Task
    sampler: Sampler
    sampling: Sampling
    loaded: Loaded
    scale: Scale
    strict: bool = True


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """A response as a row, and as a person reads it.

    Args:
        fault: a number of it that is not finite; the row is then set aside.
    """

    row: Row
    question: Question
    text: str
    verdict: Verdict
    fault: Fault | None = None


def seed_of(seed: int, place: int) -> int:
    """Seed of the responses to the question at a place; places have nothing in common.

    Example:
        >>> seed_of(0, 1) != seed_of(0, 2) != seed_of(1, 2)
        True
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {place}".encode()).digest()[:6], "big")


def draw(
    desk: Desk,
    questions: Sequence[Question],
    count: int,
    *,
    seed: int,
    start: int,
    between: Between | None = None,
    label: str = "",
) -> list[Drawn]:
    """Responses to questions, judged, group by group.

    Args:
        questions: one a group.
        count: responses a group.
        seed: of the run.
        start: place of the first question among all that the run asks; names and seeds are made
            of it, so that what is drawn depends on the place and the weights alone.
        between: called between tokens.
        label: put before the names.

    Raises:
        BadInput: a reward or a log-probability is not finite; names the response.
        EngineDied: the engine ended by itself.
    """
    requests = [
        Request(prompt_ids=encode(desk.loaded, q.text), count=count, seed=seed_of(seed, start + n))
        for n, q in enumerate(questions)
    ]
    with alive():
        groups = desk.sampler.sample(requests, desk.sampling, between)
    found = [
        (start + n, g, question, request, response, decode(desk.loaded, response.ids))
        for n, (question, request, group) in enumerate(
            zip(questions, requests, groups, strict=True)
        )
        for g, response in enumerate(group)
    ]
    pairs = [(question, text) for _, _, question, _, _, text in found]
    cut = [response.finish_reason == "length" for _, _, _, _, response, _ in found]
    verdicts = desk.task.judge(pairs, cut)
    drawn = []
    for (place, g, question, request, response, text), verdict in zip(found, verdicts, strict=True):
        names = {
            "group_id": f"{label}{place}:{question.id}",
            "sample_id": f"{label}{place}:{g}",
        }
        row = (
            names | _told(request, response, desk.sampling) | _judged(verdict, response, desk.scale)
        )
        fault = next(iter(in_rows([row])), None)
        if fault is not None:
            if desk.strict:
                raise BadInput(
                    f"{fault.what} of the response with seed {response.seed} is {fault.value}; "
                    "allowed: finite numbers"
                )
            row |= _aside(row)
        drawn.append(Drawn(row=row, question=question, text=text, verdict=verdict, fault=fault))
    return drawn


def _judged(verdict: Verdict, response: Response, scale: Scale) -> Row:
    earned = reward(verdict, scale)
    outcome = scale.high if verdict.correct else scale.low
    return {
        "reward": earned,
        "outcome": outcome,
        "verdict": verdict.word,
        "elapsed": response.elapsed + verdict.seconds,
        "rejected": None,
    }


def _told(request: Request, response: Response, sampling: Sampling) -> Row:
    """What the engine said of a response."""
    row: Row = {
        "prompt_ids": list(request.prompt_ids),
        "response_ids": response.ids.numpy(),
        "mask": torch.ones_like(response.ids, dtype=torch.bool).numpy(),
        "behavior_logp": response.behavior_logp.numpy(),
        "versions": response.versions.numpy(),
        "finish_reason": response.finish_reason,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": response.seed,
    }
    if response.head_ids is not None and response.head_behavior_logp is not None:
        row["head_ids"] = response.head_ids.numpy()
        row["head_behavior_logp"] = response.head_behavior_logp.numpy()
    return row


def _aside(row: Row) -> Row:
    """A response that cannot be trained on, as the store keeps it: nothing of it is trusted."""
    tokens = len(row["response_ids"])
    changes: Row = {
        "behavior_logp": np.zeros(tokens, dtype=np.float32),
        "mask": np.zeros(tokens, dtype=bool),
        "reward": None,
        "outcome": None,
        "rejected": "not finite",
    }
    if "head_ids" in row:
        shape = np.shape(row["head_ids"])
        changes["head_ids"] = np.full(shape, -1)
        changes["head_behavior_logp"] = np.full(shape, -np.inf, dtype=np.float32)
    return changes
