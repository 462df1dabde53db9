"""The pipeline once more, with SimPy: a process a slot, one for the trainer, plain Python between.

It shares no code with the compiled event loop, only the settings and the random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import simpy

from windage.toy.pipeline.settings import Pipeline


@dataclass
class Response:
    """What happened to a response."""

    number: int
    born: float
    version: int
    weights: int
    under: int
    ended: float = inf
    scored: float = inf
    tokens: float = 0.0
    reward: int = 0
    left: int = -1
    fate: Any = "inside"
    judged: bool = False
    pieces: list[tuple[int, float]] = field(default_factory=list)


class Oracle:
    """Runs a pipeline until its last commit on the given random numbers."""

    def __init__(self, p: Pipeline, steps: int, draws: Any) -> None:
        self.p, self.steps = p, steps
        self.tokens, self.paces, self.verdicts = draws.tokens, draws.pace, draws.verifier
        self.rewards, self.updates = draws.reward, draws.update
        self.env = simpy.Environment()
        self.version = self.arrived = self.weights = self.given_up = self.taken = 0
        self.responses: list[Response] = []
        self.queue: list[list[Response]] = []
        self.running: dict[int, Any] = {}
        self.sleepers: list[Any] = []
        self.records: list[tuple[float, float, int, int]] = []
        self.call = self.env.event()
        self.done = self.env.event()
        self.env.process(self.trainer())
        for _ in range(p.slots):
            self.env.process(self.slot())
        self.env.run(self.done)

    def allowed(self) -> bool:
        """Whether another response may start."""
        if self.p.mode == "synchronous":
            batches: float = self.arrived + 1
        elif self.p.mode == "overlap":
            batches = min(self.taken, self.arrived + 1) + 1
        else:
            capacity = inf if self.p.capacity is None else self.p.capacity
            every = self.p.publish_every
            batches = (capacity + self.version // every + 1) * every
        return len(self.responses) - self.given_up < batches * self.p.batch

    def wake(self) -> None:
        """Slots that wait look again, in the order in which they went to sleep."""
        sleepers, self.sleepers = self.sleepers, []
        for sleeper in sleepers:
            sleeper.succeed()

    def slot(self) -> Iterator[Any]:
        """Write one response after the other."""
        process = self.env.active_process
        while True:
            while not self.allowed():
                sleeper = self.env.event()
                self.sleepers.append(sleeper)
                yield sleeper
            r = Response(
                len(self.responses), self.env.now, self.version, self.weights, self.weights
            )
            self.responses.append(r)
            self.running[r.number] = process
            complete = yield from self.write(r)
            del self.running[r.number]
            r.ended = self.env.now
            if complete or self.p.fail_after <= self.p.drop_after:
                self.env.process(self.verify(r, complete))
            else:
                r.fate, r.left = "slow", self.version
                self.close(r)

    def write(self, r: Response) -> Iterator[Any]:
        """Read the prompt, write to the end or until time is up; go on under new weights."""
        wait = self.p.prompt_tokens * self.p.read_seconds
        length, pace = self.tokens[r.number], self.paces[r.number]
        up = r.born + min(self.p.drop_after, self.p.fail_after)
        while True:
            begin = self.env.now
            rest = wait + (length - r.tokens) * pace
            try:
                yield self.env.timeout(min(rest, up - begin))
                if begin + rest <= up:
                    r.tokens = length
                    return True
                r.tokens += max(0.0, self.env.now - begin - wait) / pace
                return False
            except simpy.Interrupt:
                passed = self.env.now - begin
                written = max(0.0, passed - wait) / pace
                if written > 0:
                    r.pieces.append((r.under, written))
                r.tokens += written
                r.under = self.weights
                if self.p.mode == "in_flight_recompute":
                    again = (self.p.prompt_tokens + r.tokens) * self.p.read_seconds
                    wait = again + self.p.pause_seconds
                else:
                    wait = max(0.0, wait - passed) + self.p.pause_seconds

    def verify(self, r: Response, complete: bool) -> Iterator[Any]:
        """The verdict, a little later."""
        yield self.env.timeout(self.verdicts[r.number])
        r.scored, r.judged = self.env.now, True
        r.reward = int(self.rewards[r.number]) if complete else 0
        self.close(r)

    def close(self, r: Response) -> None:
        """When nobody of a group is missing any more, it queues or is given up."""
        size = self.p.group_size
        first = r.number // size * size
        group = self.responses[first : first + size]
        if len(group) < size or not all(m.judged or m.fate == "slow" for m in group):
            return
        there = [m for m in group if m.judged]
        if len(there) < min(2, size):
            self.give_up(group, "incomplete")
        elif self.p.refill and len({m.reward for m in there}) == 1:
            self.give_up(group, "zero_variance")
        elif self.too_old(there):
            self.give_up(group, "stale")
        else:
            self.queue.append(there)
            if not self.call.triggered:
                self.call.succeed()

    def too_old(self, group: list[Response]) -> bool:
        """Whether the oldest weights of a group are further behind than allowed."""
        lag = self.version - min(m.weights for m in group)
        return self.p.max_lag is not None and lag > self.p.max_lag

    def give_up(self, group: list[Response], why: str) -> None:
        """A whole group leaves and makes room for another."""
        for m in group:
            if m.fate == "inside":
                m.fate, m.left = why, self.version
        self.given_up += self.p.group_size
        self.wake()

    def trainer(self) -> Iterator[Any]:
        """Take a batch, train, commit."""
        need = self.p.batch // self.p.group_size
        while self.version < self.steps:
            while len(self.queue) < need:
                self.call = self.env.event()
                yield self.call
            batch, self.queue = self.queue[:need], self.queue[need:]
            for m in (m for group in batch for m in group):
                m.fate, m.left = self.version, self.version
            self.taken += 1
            self.wake()
            taken = self.env.now
            yield self.env.timeout(self.p.scoring_seconds + self.updates[self.version])
            inside = sum(m.fate == "inside" for m in self.responses)
            queued = self.p.group_size * len(self.queue)
            self.records.append((taken, self.env.now, inside, queued))
            self.version += 1
            for group in [g for g in self.queue if self.too_old(g)]:
                self.queue.remove(group)
                self.give_up(group, "stale")
            if self.p.sync_seconds == 0:
                self.arrive()
            else:
                self.env.process(self.deliver())
            if self.version < self.steps:
                self.wake()
        self.done.succeed()

    def deliver(self) -> Iterator[Any]:
        """Weights on their way."""
        yield self.env.timeout(self.p.sync_seconds)
        self.arrive()
        self.wake()

    def arrive(self) -> None:
        """Weights reach the slots."""
        self.arrived += 1
        before = self.weights
        self.weights = self.arrived - self.arrived % self.p.publish_every
        if self.p.mode.startswith("in_flight") and self.weights != before:
            for process in list(self.running.values()):
                process.interrupt()


def table(oracle: Oracle) -> dict[str, list[Any]]:
    """The oracle's responses, a column a field; what did not happen is not a number."""
    names = ("born", "ended", "scored", "version", "weights", "under", "tokens", "reward", "fate")
    columns = {name: [getattr(r, name) for r in oracle.responses] for name in names}
    columns["left"] = [nan if r.fate == "inside" else r.left for r in oracle.responses]
    return columns
