"""The training loop: one, for every mode, readable from top to bottom.

for each step:
    rollouts    drawn or read, judged; groups that admission drops whole are drawn anew, if asked
    prepare     what the recipe needs of other policies, once
    appraise    what it needs of a critic, which then learns; while it warms up, it alone
    updates     passes x minibatches, each whole groups; the gradient of exactly the estimator
    publish     new weights to the sampler, and check that it has them
    record      store, metrics, samples; evaluate and save where they are due
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from windage.estimators.errors import BadInput
from windage.estimators.estimator import batch_terms
from windage.llm import checkpoint, guard, journal, metrics, reference, rollouts
from windage.llm.draw import Drawn
from windage.llm.evaluate import evaluate
from windage.llm.journal import Journal
from windage.llm.learner import Outcome, Row
from windage.llm.run import Run
from windage.llm.samplers.protocol import death
from windage.llm.sources import Synchronous, shuffled

Tell = Callable[[Mapping[str, Any]], None]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A rollout batch on its way through a step.

    Args:
        rows: all of them, those that are not trained on included.
        texts: of each row, where it was drawn here.
        faults: numbers of the rows that are not finite, by row.
        version: of the weights that it comes to.
    """

    rows: list[Row]
    texts: list[Drawn]
    faults: dict[int, guard.Fault]
    version: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Files:
    """What a run writes as it goes."""

    metrics: Journal
    samples: Journal
    nonfinite: Journal
    evaluate: Journal


def train(
    run: Run, tell: Tell = lambda record: None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Train until the last step.

    Args:
        run: as `run.start` makes it ready.
        tell: is given each step's metrics.
        stop: asked after each step whether to save and end early; the first process decides.

    Returns:
        Whether the last step was reached.

    Raises:
        BadInput: one line; everything up to the last checkpoint stays.
    """
    config, learner = run.config, run.learner
    with ExitStack() as stack:
        if run.desk is not None:
            stack.callback(run.desk.task.close)
            stack.callback(run.desk.sampler.close)
        stack.callback(run.source.close)
        files = None
        with run.ranks.together():
            if run.ranks.first:
                files = _opened(run, stack)
        if run.start == 0:
            _evaluate(run, files, 0)
        for step in range(run.start, run.steps):
            done, clock = step + 1, time.perf_counter()
            drawn = _rollouts(run, step)
            waited = time.perf_counter() - clock
            run.remember(drawn.rows)
            learner.prepare(drawn.rows)
            judged = learner.appraise(drawn.rows, step)
            outcomes = list(_outcomes(run, drawn, step))
            _mark(drawn.rows, outcomes)
            trained = time.perf_counter() - clock - waited
            run.publish()
            with run.ranks.together():
                if files is not None:
                    whole = time.perf_counter() - clock
                    seconds = {"time__sample": waited, "time__train": trained, "time__step": whole}
                    record = _measured(run, done, drawn, outcomes, **seconds, **judged)
                    _record(run, files, drawn, outcomes, record)
                    tell(record)
            for _, outcome in outcomes:
                guard.stop(learner.settings.guard, outcome.count, outcome.faults, done)
            if config.evaluate.every and (done % config.evaluate.every == 0 or done == run.steps):
                _evaluate(run, files, done)
            every = config.run.save_every
            last = run.ranks.same(done == run.steps or stop())
            if last or (every and done % every == 0):
                _save(run, files, done)
            if last:
                return done == run.steps
    return True


def _opened(run: Run, stack: ExitStack) -> Files:
    """The run's files, those of a resumed run cut back to its checkpoint."""
    names = {name: run.folder / f"{name}.jsonl" for name in Files.__dataclass_fields__}
    checkpoint.rewind(run.checkpoints, run.start)
    checkpoint.prune(run.checkpoints, run.config.run.keep)
    for path in names.values():
        journal.rewind(path, run.start or -1)
    store = run.folder / "rollouts"
    for step in rollouts.steps(store):
        if step > run.start:
            rollouts.path_of(store, step).unlink()
    found = {name: Journal(path) for name, path in names.items()}
    for one in found.values():
        stack.callback(one.close)
    return Files(**found)


def _rollouts(run: Run, step: int) -> Step:
    """The step's rollout batch, known to every process."""
    found = Step(rows=[], texts=[], faults={}, version=run.learner.updates)
    with run.ranks.together():
        if run.ranks.first:
            found = _drawn(run, step)
    rows, faults = run.ranks.same((found.rows, found.faults))
    rows = curated(rows, run.config.train.positive_share, seed=run.config.run.seed, step=step)
    return replace(found, rows=rows, faults=faults)


def _drawn(run: Run, step: int) -> Step:
    try:
        found = run.source.rows(step)
    except Exception as problem:
        why = death(problem)
        if not why:
            raise
        raise BadInput(
            f"the sampler died at step {step + 1}: {why}; allowed: an engine that runs; --resume "
            "goes on from the last checkpoint"
        ) from problem
    texts = [one for one in found if isinstance(one, Drawn)]
    rows = [dict(one.row) if isinstance(one, Drawn) else dict(one) for one in found]
    if isinstance(run.source, Synchronous):
        for again in range(1, run.config.train.refill + 1):
            dropped = dropped_groups(run, rows)
            if not dropped:
                break
            for row in rows:
                if row["group_id"] in dropped:
                    row["rejected"] = "group without signal, another was drawn"
            more = run.source.further(step, len(dropped), again)
            texts += more
            rows += [dict(one.row) for one in more]
    faults = {n: one.fault for n, one in enumerate(texts) if one.fault is not None}
    return Step(rows=rows, texts=texts, faults=faults, version=run.learner.updates)


def dropped_groups(run: Run, rows: Sequence[Row]) -> set[str]:
    """Groups of which the recipe's admission leaves nothing."""
    open_ = [row for row in rows if row["rejected"] is None]
    batch = rollouts.to_batch(
        open_, group_size=run.config.train.group_size, current_version=run.learner.updates
    )
    batch = replace(batch, values=torch.zeros_like(batch.mask, dtype=batch.rewards.dtype))
    kept = (batch_terms(run.learner.estimator, batch).reason == 0).any(-1).tolist()
    names = batch.group_ids or ()
    return {str(name) for name, some in zip(names, kept, strict=True) if not some}


def curated(rows: list[Row], share: float, *, seed: int, step: int) -> list[Row]:
    """Rows of which some were left out at random, so that a share of them has positive reward.

    Args:
        rows: those that are left out stay as rejected.
        share: wanted; 0: all stay.
    """
    if share == 0:
        return rows
    open_ = [n for n, row in enumerate(rows) if row["rejected"] is None]
    good = [n for n in open_ if (rows[n]["reward"] or 0) > 0]
    bad = [n for n in open_ if n not in set(good)]
    few, many, ratio = good, bad, (1 - share) / share
    if len(bad) < len(good) * ratio:
        few, many, ratio = bad, good, share / (1 - share) if share < 1 else float("inf")
    limit = len(many) if ratio == float("inf") else min(len(many), round(len(few) * ratio))
    out = set(random.Random(f"{seed} {step} curated").sample(many, len(many) - limit))
    return [row | {"rejected": "curated"} if n in out else row for n, row in enumerate(rows)]


def plan(run: Run, rows: Sequence[Row], step: int) -> Iterator[tuple[list[int], bool]]:
    """The rows of each update of a step, as whole groups, and whether a pass ends with it."""
    train = run.config.train
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row["group_id"], []).append(number)
    turns = train.passes * (train.data_epochs if train.mode == "iterated" else 1)
    parts = min(train.minibatches, len(groups))
    for turn in range(turns):
        names = shuffled(list(groups), run.config.run.seed, step, turn)
        for part in range(parts):
            chosen = names[part::parts]
            yield [n for name in chosen for n in groups[name]], part == parts - 1


def _outcomes(run: Run, drawn: Step, step: int) -> Iterator[tuple[list[int], Outcome]]:
    """The updates of a step; none is made while a critic warms up."""
    critic = run.learner.critic
    if critic is None or critic.ready(step):
        for numbers, ends in plan(run, drawn.rows, step):
            yield _update(run, drawn, numbers, ends)
        return
    known = [replace(fault, response=n) for n, fault in drawn.faults.items()]
    yield list(range(len(drawn.rows))), run.learner.watch(drawn.rows, known)


def _update(run: Run, drawn: Step, numbers: list[int], ends: bool) -> tuple[list[int], Outcome]:
    """One update, and the reference's after it; faults of the rows belong to their first update."""
    learner = run.learner
    before = learner.updates
    known = {place: drawn.faults.pop(n) for place, n in enumerate(numbers) if n in drawn.faults}
    outcome = learner.update(
        [drawn.rows[n] for n in numbers],
        [replace(fault, response=place) for place, fault in known.items()],
    )
    kept = learner.reference
    if kept is not None and learner.updates > before:
        due = reference.due(run.schedule, step=learner.updates, epoch=int(ends), before=0)
        if due:
            reference.refresh(kept, run.loaded.policy, run.schedule.alpha)
    return numbers, outcome


def _mark(rows: list[Row], outcomes: Sequence[tuple[list[int], Outcome]]) -> None:
    """Write into the rows why admission turned them away, as the first pass said."""
    seen: set[int] = set()
    for numbers, outcome in outcomes:
        for number, why in zip(numbers, outcome.rejected, strict=True):
            if number not in seen:
                rows[number]["rejected"] = why
                seen.add(number)


def _measured(
    run: Run,
    step: int,
    drawn: Step,
    outcomes: Sequence[tuple[list[int], Outcome]],
    **seconds: float,
) -> dict[str, Any]:
    """The step's record; shadows stand beside its first update."""
    learner = run.learner
    parts, beside = [], dict[str, float]()
    for numbers, outcome in outcomes:
        rows = [drawn.rows[n] for n in numbers]
        norm = {"update__gradient_norm": outcome.gradient_norm} if outcome.made else {}
        entry, batch = learner.estimator, outcome.batch
        parts.append(metrics.of_update(entry, batch, rows=rows, entropy=outcome.entropy, **norm))
        beside = beside or metrics.of_shadows(run.shadows, entry, batch, rows)
    tokens = sum(len(row["response_ids"]) for row in drawn.rows)
    found = metrics.record(
        step,
        parts,
        shadow=beside,
        update__learning_rate=learner.optimizer.param_groups[0]["lr"],
        update__skipped=learner.count.skipped,
        time__tokens_per_second=tokens / seconds["time__step"],
        **seconds,
    )
    others = {"updates": learner.updates, "set_aside": learner.count.set_aside}
    return {**found, **others, "deaths": getattr(run.source, "deaths", 0)}


def _record(
    run: Run,
    files: Files,
    drawn: Step,
    outcomes: Sequence[tuple[list[int], Outcome]],
    record: dict[str, Any],
) -> None:
    """Write a step down."""
    step = record["step"]
    if run.config.train.mode != "offline":
        rollouts.write(
            run.folder / "rollouts",
            step,
            drawn.rows,
            tokenizer=run.loaded.fingerprint,
            version=drawn.version,
        )
    for one in drawn.texts[: run.config.run.samples]:
        files.samples.write(
            {
                "step": step,
                "question": one.question.text,
                "response": one.text,
                "answer": one.question.answer,
                "verdict": one.row["verdict"],
                "reward": one.row["reward"],
            }
        )
    for numbers, outcome in outcomes:
        rows = [drawn.rows[n] for n in numbers]
        for fault in guard.records(step, outcome.faults, rows):
            files.nonfinite.write(fault)
    files.metrics.write(record)


def _evaluate(run: Run, files: Files | None, step: int) -> None:
    """Ask held-out questions, where that was asked for."""
    if not run.config.evaluate.every:
        return
    run.publish(asked=True)
    with run.ranks.together():
        if run.desk is not None and files is not None:
            with run.source.paused() as free:
                found = evaluate(free or run.desk, run.config, step)
            files.evaluate.write({"step": step, **found})


def _save(run: Run, files: Files | None, step: int) -> None:
    with run.ranks.together():
        if files is not None:
            for name in Files.__dataclass_fields__:
                getattr(files, name).sync()
    run.save(step)
