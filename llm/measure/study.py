"""Estimators on a language model: draw, differentiate, and say what was found.

draw        the policy's own responses for the gradient of J, and each sampler's for the data
measure     prompt by prompt: estimates of every entry, kept as averages
document    figures with errors and intervals by prompt
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator
from windage.llm import models, rollouts
from windage.llm.draw import Desk, Row, draw
from windage.llm.measure import baselines, plan, sketch, store
from windage.llm.measure.behavior import Behavior, available, sampler_of, sampling_of
from windage.llm.measure.estimates import Estimates, Passed, Probe, estimates, known, reference
from windage.llm.models import Loaded, Lora
from windage.llm.rollouts import to_batch
from windage.llm.samplers.protocol import Sampler, Sampling
from windage.llm.tasks.protocol import Question, Task
from windage.llm.verify import Scale

Advance = Callable[[int, int], None]
# Places of the policy's own questions are so far from those of the data: other random numbers.
APART = 1 << 20
CHECKED = 8
OWN = Behavior(name="reference", kind="policy", settings={})


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """A study whose model is loaded and whose request makes sense.

    Args:
        cost: by counting, with seconds where they were tried and the sketch's error as seen.
    """

    request: plan.Request
    loaded: Loaded
    task: Task
    entries: dict[str, Estimator]
    probe: Probe
    questions: tuple[Question, ...]
    cost: dict[str, Any]

    @property
    def sampling(self) -> Sampling:
        """How the policy itself draws."""
        return Sampling(max_tokens=self.request.max_tokens, head=self.request.head).check()

    def desk(self, behavior: Behavior, sampler: Sampler) -> Desk:
        """A sampler before the task."""
        return Desk(
            task=self.task,
            sampler=sampler,
            sampling=sampling_of(behavior, self.sampling),
            loaded=self.loaded,
            scale=Scale(),
        )

    def sampler(self, behavior: Behavior) -> Sampler:
        """An engine with a behavior's weights."""
        longest = self.request.max_tokens + max(
            len(models.encode(self.loaded, q.text)) for q in self.questions
        )
        return sampler_of(behavior, self.loaded, batch=self.request.batch, longest=longest)


def ready(request: plan.Request, task: Task) -> Ready:
    """Load the model, and refuse what cannot be had.

    Raises:
        BadInput: a model without the parameters, prompts that it cannot take, an entry that needs
            what is not recorded, too little memory for the sketch, a sampler that cannot be had.
    """
    entries = plan.entries(request.check())
    lora = Lora(rank=request.lora_rank) if request.parameters == "lora" else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)  # of new adapters
        loaded = models.load(request.model, dtype=request.dtype, device=request.device, lora=lora)
    named = sketch.select(loaded, request.parameters)
    count = sum(p.numel() for p in named.values())
    cost = plan.cost(request, len(entries), count)
    counts = {"prompts": request.prompts, "vectors": cost["vectors"], "rows": cost["rows"]}
    cost["memory"] = sketch.check_room(cost, sketch.free(), **counts)
    questions = tuple(task.questions("train", request.seed, 0, request.prompts))
    settings = loaded.policy.base.config.get_text_config()
    room = int(getattr(settings, "max_position_embeddings", 1 << 20)) - request.max_tokens
    plan.check_prompts(loaded, questions, room)
    for one in request.samplers:
        available(one, loaded)
    made = sketch.make(count, request.sketch, seed=request.seed, device=loaded.device)
    probe = Probe(
        policy=loaded.policy,
        parameters=list(named.values()),
        sketch=made,
        through=request.parameters in ("last", "lora"),
    )
    loaded.policy.eval()
    return Ready(
        request=request,
        loaded=loaded,
        task=task,
        entries=entries,
        probe=probe,
        questions=questions,
        cost=cost | {"sketch_error": made.error},
    )


def tried(study: Ready) -> dict[str, Any]:
    """The cost with seconds, from one group as if no two tokens had the same weight."""
    request = study.request
    sampler = study.sampler(OWN)
    start = time.perf_counter()
    drawn = draw(
        study.desk(OWN, sampler), study.questions[:1], request.largest, seed=request.seed, start=0
    )
    sampler.close()
    marks = [time.perf_counter()]
    generator = np.random.default_rng(0)
    rows = [one.row for one in drawn]
    for row in rows:
        noise = generator.normal(0, 0.01, len(row["behavior_logp"]))
        row["behavior_logp"] = row["behavior_logp"] + noise.astype(np.float32)
    batch, passes = passed(study.probe, rows, told=True)
    estimates(study.entries, batch, request.group_sizes, passes, study.probe)
    marks.append(time.perf_counter())
    _, again = passed(study.probe, rows, told=True)
    reference(batch, again, study.probe)
    marks.append(time.perf_counter())
    spent = dict(zip(("weigh", "score"), np.diff(marks).tolist(), strict=True))
    told = plan.seconds(request, {"draw": marks[0] - start, **spent})
    seen = deviation(study.probe, passes[:CHECKED])
    return study.cost | {"seconds": told, "sketch_error_seen": seen}


def passed(probe: Probe, rows: Sequence[Row], *, told: bool) -> tuple[Batch, list[Passed]]:
    """The record of one prompt's responses and their passes."""
    rows = [{**row, "group_id": "0"} for row in rows]
    passes = probe.passes(rows, to_batch(rows, current_version=0))
    return known(rows, passes, told=told), passes


def deviation(probe: Probe, passes: Sequence[Passed]) -> float:
    """Root mean square of |z|^2 / |g|^2 - 1 over the scores of some responses."""
    gaps = []
    for found, *_ in passes:
        parts = torch.autograd.grad(
            found.logp.sum(), list(probe.parameters), retain_graph=True, materialize_grads=True
        )
        exact = sum(float(part.double().square().sum()) for part in parts)
        kept = float(probe.sketch(parts).double().square().sum())
        gaps.append(kept / exact - 1 if exact else 0.0)
    return float(np.sqrt(np.mean(np.square(gaps))))


def run(study: Ready, folder: Path, advance: Advance = lambda done, total: None) -> None:
    """Draw and measure whatever the folder does not hold yet.

    Args:
        folder: of the study; it is gone on with.
        advance: told how many responses were drawn or differentiated, and their total.

    Raises:
        BadInput: the folder holds another study.
    """
    request = study.request
    store.opened(folder, request.told(study.loaded))
    done, total = 0, 2 * study.cost["responses"]

    def count(more: int) -> None:
        nonlocal done
        done += more
        advance(done, total)

    count(0)
    for behavior in (OWN, *request.samplers):
        drawn(study, behavior, place_of(folder, study, behavior), count)
    for prompt in range(request.prompts):
        if not store.path_of(folder, prompt).exists():
            store.write(folder, prompt, measured(study, folder, prompt))
        count(study.cost["responses"] // request.prompts)


def place_of(folder: Path, study: Ready, behavior: Behavior) -> Path:
    """The folder of a sampler's responses."""
    number = -1 if behavior is OWN else study.request.samplers.index(behavior)
    name = "reference" if number < 0 else f"{number:02d}-{behavior.kind}"
    return folder / "responses" / name


def drawn(study: Ready, behavior: Behavior, place: Path, count: Callable[[int], None]) -> None:
    """Draw a sampler's responses to the prompts that have none yet.

    Prompts are drawn together as without an interruption, since rounding sees who is in a batch.
    """
    request = study.request
    there = set(rollouts.steps(place)) if place.is_dir() else set()
    missing = set(range(request.prompts)) - there
    each = request.references if behavior is OWN else request.responses
    count(each * len(there))
    if not missing:
        return
    with closing(study.sampler(behavior)) as sampler:
        desk = study.desk(behavior, sampler)
        first = APART if behavior is OWN else 0
        most = max(1, request.batch // each)
        for start in range(0, request.prompts, most):
            part = range(start, min(start + most, request.prompts))
            if missing.isdisjoint(part):
                continue
            asked = [study.questions[n] for n in part]
            found = draw(desk, asked, each, seed=request.seed, start=first + start)
            for n, prompt in enumerate(part):
                if prompt in missing:
                    rows = [one.row for one in found[n * each : (n + 1) * each]]
                    rollouts.write(place, prompt, rows, tokenizer=study.loaded.fingerprint)
            count(each * len(missing.intersection(part)))


@contextmanager
def closing(sampler: Sampler) -> Iterator[Sampler]:
    """End an engine after its use."""
    try:
        yield sampler
    finally:
        sampler.close()


def measured(study: Ready, folder: Path, prompt: int) -> list[store.Row]:
    """What one prompt tells: the gradient's own estimate, and averages by sampler and entry."""
    tokenizer = study.loaded.fingerprint

    def rows_of(behavior: Behavior) -> list[Row]:
        place = place_of(folder, study, behavior)
        return list(rollouts.read(place, tokenizer=tokenizer, only=[prompt]))

    batch, passes = passed(study.probe, rows_of(OWN), told=True)
    gradient, score, scores = reference(batch, passes, study.probe)
    found: list[store.Row] = [
        {"sampler": "", "group_size": 0, "entry": ""}
        | _about(batch)
        | {"groups": 0, "mean": gradient.numpy(), "drift": score.numpy()}
    ]
    found += baselines.measured(batch, scores, study.request.group_sizes)
    del passes
    for behavior in study.request.samplers:
        found += _data(study, behavior, rows_of(behavior))
    return found


def _data(study: Ready, behavior: Behavior, rows: Sequence[Row]) -> list[store.Row]:
    """Averages over the groups of one prompt, drawn by one sampler."""
    request, blocks, about = study.request, list[Any](), list[dict[str, float]]()
    for start in range(0, len(rows), request.largest):
        part = rows[start : start + request.largest]
        batch, passes = passed(study.probe, part, told=behavior.told)
        about.append(_about(batch))
        blocks.append(estimates(study.entries, batch, request.group_sizes, passes, study.probe))
    whole = {key: float(np.mean([one[key] for one in about])) for key in about[0]}
    nothing = {"groups": 0, "mean": [], "drift": []}
    out = [{"sampler": behavior.name, "group_size": 0, "entry": ""} | whole | nothing]
    for size, name in blocks[0]:
        row = averaged([block[size, name] for block in blocks])
        out.append({"sampler": behavior.name, "group_size": size, "entry": name} | row)
    return out


def averaged(parts: Sequence[Estimates]) -> store.Row:
    """Averages over groups, and over pairs of groups."""
    groups = torch.cat([part.groups for part in parts])
    count = len(groups)
    squares = groups.square().sum(-1)
    total = groups.sum(0)
    pairs = float(total.square().sum() - squares.sum())
    return {
        "groups": count,
        "square": float(squares.mean()),
        "pair": pairs / (count * (count - 1)) if count > 1 else None,
        "kept": float(torch.cat([part.kept for part in parts]).mean()),
        "mean": (total / count).numpy(),
        "drift": torch.cat([part.drift for part in parts]).mean(0).numpy(),
    }


def _about(batch: Batch) -> dict[str, float]:
    """Averages over responses: tokens, reward, and how far the sampler is from the policy."""
    assert batch.behavior_logp is not None and batch.logp is not None
    gap = torch.where(batch.mask, batch.behavior_logp - batch.logp, 0.0)
    weight = (-gap.sum(-1)).clamp(max=50.0).exp()

    def mean(values: Tensor) -> float:
        return float(values.double().mean())

    return {
        "tokens": mean(batch.lengths),
        "reward": mean(batch.rewards),
        "weight": mean(weight),
        "weight_square": mean(weight.square()),
        "gap": float(gap.sum() / batch.mask.sum()),
    }
