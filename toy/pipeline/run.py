"""A simulated run: a pure function of the settings and a generator, with its ledger checked.

    lag of a response = version when it is consumed - version of the weights it was started under

The ledger of every run balances exactly, for any law of times and any rule:

    sum over commits of responses inside = sum of versions passed by responses that left
                                         + sum of versions passed by those still inside

Divided by the responses consumed it is Little's law: where nothing is dropped and weights arrive at
once, mean lag = mean occupancy / batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from windage.estimators.errors import BadInput
from windage.toy.pipeline import engine
from windage.toy.pipeline.settings import Pipeline

MOST = 10_000_000

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What a pipeline did until its last commit.

    A response's `fate` is the step that consumed it (0 or more), -1 while it is inside, or why it
    was dropped (`engine.FATES`).

    Args:
        pipeline: the settings.
        steps: records of `engine.STEP`.
        responses: records of `engine.RESPONSE`, in the order of starts.
        pieces: records of `engine.PIECE`; in flight only.
        length: tokens of each response if nobody cuts it.
        difficulty: of its prompt, from 0 to 1.
        right: reward of each response if nobody cuts it.
    """

    pipeline: Pipeline
    steps: NDArray[Any]
    responses: NDArray[Any]
    pieces: NDArray[Any]
    length: Floats
    difficulty: Floats
    right: Integers

    @property
    def seconds(self) -> float:
        """Time of the last commit."""
        return float(self.steps["commit"][-1])

    @cached_property
    def fate(self) -> Integers:
        """What became of each response."""
        return self.responses["fate"].astype(np.int64)

    @cached_property
    def admitted(self) -> NDArray[np.bool_]:
        """Which responses were consumed."""
        return self.fate >= 0

    @property
    def throughput(self) -> float:
        """Responses consumed a second."""
        return int(self.admitted.sum()) / self.seconds

    @property
    def step_time(self) -> float:
        """Mean time between commits."""
        return self.seconds / len(self.steps)

    @property
    def utilization(self) -> float:
        """Share of the slots' time that held a response."""
        busy = np.fmin(self.responses["ended"], self.seconds) - self.responses["born"]
        return float(busy.sum()) / (self.pipeline.slots * self.seconds)

    @property
    def trainer_utilization(self) -> float:
        """Share of the trainer's time spent on steps."""
        return float((self.steps["commit"] - self.steps["taken"]).sum()) / self.seconds

    @cached_property
    def lag(self) -> Integers:
        """Versions between the oldest weights of each consumed response and its step."""
        return (self.fate - self.responses["weights"])[self.admitted]

    @cached_property
    def token_lag(self) -> tuple[Integers, Floats]:
        """Lags of consumed tokens, and how many tokens have each: one entry a piece."""
        of, early = self.pieces["response"], self.pieces["tokens"]
        before = np.bincount(of, early, minlength=len(self.fate))
        counted = self.fate[of] >= 0
        lags = (self.fate[of] - self.pieces["weights"])[counted]
        last = (self.fate - self.responses["under"])[self.admitted]
        rest = np.maximum(self.responses["tokens"] - before, 0.0)[self.admitted]
        return np.concatenate((lags, last)), np.concatenate((early[counted], rest))

    @property
    def occupancy_lag(self) -> float:
        """Mean occupancy at commits over the batch: the mean lag where nothing is dropped."""
        return float(self.steps["occupancy"].mean()) / self.pipeline.batch

    @property
    def ledger(self) -> int:
        """Left side minus right side of the ledger, in responses times versions; 0."""
        until = np.where(self.fate == engine.INSIDE, len(self.steps), self.responses["left"])
        passed = until - self.responses["version"]
        return int(self.steps["occupancy"].sum() - passed.sum())

    @property
    def occupancy_residual(self) -> float:
        """The ledger's gap as a share of its left side."""
        return self.ledger / max(1, int(self.steps["occupancy"].sum()))

    def dropped(self) -> dict[str, int]:
        """Responses dropped, by reason."""
        return {name: int((self.fate == code).sum()) for code, name in engine.FATES.items()}


def simulate(pipeline: Pipeline, steps: int, generator: np.random.Generator) -> Run:
    """Run a pipeline until the given number of commits.

    Lengths, verdicts, difficulties and rewards come from streams of their own, in the order of
    starts: pipelines that share laws and a seed see the same responses.

    Args:
        pipeline: its settings.
        steps: commits.
        generator: its children are drawn from.

    Raises:
        BadInput: ten million responses are not enough, since nearly all are dropped or queue up.
        ArithmeticError: the ledger does not balance, a fault of this module.

    Example:
        >>> from windage.toy.pipeline.laws import Equal
        >>> run = simulate(Pipeline(tokens=Equal(1.0)), 100, np.random.default_rng(0))
        >>> round(run.throughput, 3), int(run.lag.max()), run.ledger
        (63.682, 1, 0)
    """
    if steps < 1:
        raise BadInput(f"steps is {steps}; allowed: an integer from 1 on")
    rules = _rules(pipeline, steps)
    stream = _drawn(pipeline, steps, generator)
    size = -(-(steps * pipeline.batch + 2 * pipeline.slots) // pipeline.group_size)
    draws, difficulty = _more(None, next(stream)(size))
    state = _grown(None, rules, len(draws.tokens), 8 * pipeline.slots)
    while status := engine.loop(rules, draws, state):
        if status == 3:
            raise ArithmeticError("the pipeline stands still, a fault of this module")
        if status == 1:
            if len(draws.tokens) > MOST:
                raise BadInput(
                    f"{state.tally['version'][0]} of {steps} steps after {MOST:,} "
                    "responses: nearly all are dropped or queue up; allowed: a larger max_lag, "
                    "drop_after or capacity, or fewer steps"
                )
            draws, difficulty = _more((draws, difficulty), next(stream)(len(difficulty) // 2 + 1))
        pieces = len(state.pieces) * (2 if status == 2 else 1)
        state = _grown(state, rules, len(draws.tokens), pieces)
    return _finished(pipeline, draws, difficulty, state)


def _rules(p: Pipeline, steps: int) -> engine.Rules:
    return engine.Rules(
        steps=steps,
        slots=p.slots,
        groups=p.batch // p.group_size,
        group_size=p.group_size,
        barrier={"synchronous": engine.SYNCHRONOUS, "overlap": engine.OVERLAP}.get(p.mode, 0),
        read=float(p.read_seconds),
        prompt=float(p.prompt_tokens),
        scoring=float(p.scoring_seconds),
        sync=float(p.sync_seconds),
        pause=float(p.pause_seconds),
        in_flight=p.mode.startswith("in_flight"),
        reread=p.mode == "in_flight_recompute",
        publish_every=p.publish_every,
        max_lag=inf if p.max_lag is None else float(p.max_lag),
        capacity=inf if p.capacity is None else float(p.capacity),
        limit=float(min(p.drop_after, p.fail_after)),
        cut_fails=p.fail_after <= p.drop_after,
        refill=p.refill,
    )


def _drawn(p: Pipeline, steps: int, generator: np.random.Generator) -> Iterator[Any]:
    """Functions from a number of groups to the difficulties and draws of the next ones."""
    lengths, verdicts, prompts, coins, updates = generator.spawn(5)
    update = p.update.draw(updates, steps)

    def drawn(groups: int) -> tuple[engine.Draws, Floats]:
        size = groups * p.group_size
        hard = prompts.random(groups)
        right = np.repeat((1 - hard) ** (1 / p.pass_rate - 1), p.group_size)
        tokens, pace, verifier = _responses(p, lengths, verdicts, size)
        if p.stretch != 1:
            tokens = tokens * np.repeat(stretched(hard, p.stretch), p.group_size)
        reward = (coins.random(size) < right).astype(np.int64)
        return engine.Draws(tokens, pace, verifier, reward, update), hard

    while True:
        yield drawn


def _responses(
    p: Pipeline, lengths: np.random.Generator, verdicts: np.random.Generator, size: int
) -> tuple[Floats, Floats, Floats]:
    """Tokens, seconds a token and seconds of the verdict, each alone or together as observed."""
    if p.observed is not None:
        return p.observed.draw(lengths, size)
    tokens, verifier = p.tokens.draw(lengths, size), p.verifier.draw(verdicts, size)
    return tokens, np.full(size, float(p.token_seconds)), verifier


def stretched(difficulty: Floats, ratio: float) -> Floats:
    """Factor of mean 1 on the length of prompts: ratio^difficulty, normalized.

    Example:
        >>> stretched(np.array([0.0, 1.0]), 4.0).round(3)
        array([0.462, 1.848])
    """
    mean = (ratio - 1) / np.log(ratio) if ratio != 1 else 1.0
    return ratio**difficulty / mean


def _more(
    before: tuple[engine.Draws, Floats] | None, new: tuple[engine.Draws, Floats]
) -> tuple[engine.Draws, Floats]:
    if before is None:
        return new
    names = ("tokens", "pace", "verifier", "reward")
    rows = {n: np.concatenate((getattr(before[0], n), getattr(new[0], n))) for n in names}
    return engine.Draws(**rows, update=new[0].update), np.concatenate((before[1], new[1]))


def _grown(
    before: engine.State | None, rules: engine.Rules, responses: int, pieces: int
) -> engine.State:
    """Arrays with room for so many responses and pieces that start with what was there."""
    state = engine.State(
        tally=np.zeros(1, dtype=engine.TALLY),
        responses=np.empty(responses, dtype=engine.RESPONSE),
        groups=np.empty(responses // rules.group_size, dtype=engine.GROUP),
        steps=np.empty(rules.steps, dtype=engine.STEP),
        pieces=np.empty(pieces, dtype=engine.PIECE),
        queue=np.empty(responses // rules.group_size, dtype=np.int64),
        end_when=np.empty(rules.slots),
        end_what=np.empty(rules.slots, dtype=np.int64),
        verdict_when=np.empty(responses),
        verdict_what=np.empty(responses, dtype=np.int64),
    )
    if before is None:
        state.tally["commit"] = inf
        return state
    for old, new in zip(before, state, strict=True):
        if len(new) > len(old):
            new[: len(old)] = old
    return engine.State(
        *(new if len(new) > len(old) else old for old, new in zip(before, state, strict=True))
    )


def _finished(
    pipeline: Pipeline, draws: engine.Draws, difficulty: Floats, state: engine.State
) -> Run:
    """The record of a run, checked against its ledger."""
    tally = state.tally[0]
    responses, pieces = state.responses[: tally["started"]], state.pieces[: tally["pieces"]]
    run = Run(
        pipeline=pipeline,
        steps=state.steps,
        responses=responses,
        pieces=pieces,
        length=draws.tokens[: len(responses)],
        difficulty=np.repeat(difficulty, pipeline.group_size)[: len(responses)],
        right=draws.reward[: len(responses)],
    )
    if run.ledger:
        raise ArithmeticError(f"the ledger is off by {run.ledger} responses")
    return run
