"""An asynchronous pipeline of slots that write responses and a trainer that consumes them.

Events are ordered by time; a commit comes before a response that ends at the same instant, so a
slot that becomes free then already starts under the new version.  Versions, counts and lags are
integers.  Times are in units of the mean response unless a caller chooses another.

    lag of a response = version when it is consumed - version of the weights it was started under

The ledger of every run balances exactly, for any law of times and any capacity rule:

    sum over commits of (in flight + queued) = sum of versions passed by the responses consumed
                                             + sum of versions passed by those still inside

Divided by the responses consumed it is Little's law: mean lag = mean occupancy / batch.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import final

import numpy as np
from numpy.typing import NDArray

from windage.estimators.errors import BadInput

Times = Callable[[np.random.Generator, int], NDArray[np.float64]]
CHUNK = 8192


def exponential(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Response times of mean 1 with an exponential law."""
    return generator.exponential(size=size)


def lognormal(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Response times of mean 1 with a lognormal law, sigma 1."""
    return np.exp(generator.normal(size=size) - 0.5)


def equal(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Response times all equal to 1."""
    return np.ones(size)


@final
@dataclass(frozen=True, kw_only=True)
class Line:
    """The fixed parts of a pipeline.

    Args:
        slots: responses that can be written at the same time.
        batch: responses a trainer's step consumes, first in first out.
        update: time of a step, from taking the batch to the commit of the next version.
        times: law of the time that a response takes.
    """

    slots: int = 64
    batch: int = 64
    update: float = 0.5
    times: Times = exponential

    def __post_init__(self) -> None:
        for name in ("slots", "batch"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: an integer above 0")
        if not 0 <= self.update < float("inf"):
            raise BadInput(f"update is {self.update}; allowed: a finite time, 0 or more")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What a pipeline did until its last commit.

    Args:
        line: the pipeline.
        commits: time of each commit.
        occupancy: responses in flight and queued at each commit.
        started: version of the trainer when each consumed response was started.
        weights: version of the weights that each consumed response was started under.
        consumed: version of the trainer when it was consumed.
        inside: versions passed by each response still in flight or queued at the end.
        busy: time that slots spent on responses, over all slots.
    """

    line: Line
    commits: NDArray[np.float64]
    occupancy: NDArray[np.int64]
    started: NDArray[np.int64]
    weights: NDArray[np.int64]
    consumed: NDArray[np.int64]
    inside: NDArray[np.int64]
    busy: float

    @property
    def throughput(self) -> float:
        """Responses consumed a unit of time."""
        return len(self.consumed) / float(self.commits[-1])

    @property
    def step_time(self) -> float:
        """Mean time between commits."""
        return float(self.commits[-1]) / len(self.commits)

    @property
    def utilization(self) -> float:
        """Share of the slots' time spent on responses."""
        return self.busy / (self.line.slots * float(self.commits[-1]))

    @property
    def lag(self) -> NDArray[np.int64]:
        """Versions between the weights of each response and the step that consumed it."""
        return self.consumed - self.weights

    @property
    def occupancy_residual(self) -> int:
        """Left side minus right side of the ledger; 0."""
        passed = self.consumed - self.started
        return int(self.occupancy.sum() - passed.sum() - self.inside.sum())

    @property
    def occupancy_lag(self) -> float:
        """Mean occupancy at commits divided by the batch: the mean lag where stationary."""
        return float(self.occupancy.mean()) / self.line.batch


def _stream(line: Line, generator: np.random.Generator) -> Iterator[float]:
    return (t for _ in count() for t in line.times(generator, CHUNK).tolist())


def asynchronous(
    line: Line,
    steps: int,
    generator: np.random.Generator,
    *,
    cap: int | None = None,
    publish_every: int = 1,
) -> Run:
    """Run until the given number of commits; a free slot starts at once under the newest weights.

    Args:
        line: the pipeline.
        steps: commits.
        generator: of the response times, drawn in the order of starts.
        cap: start only while started < (cap + version + 1) * batch; None: no rule.
        publish_every: commits from one publication of weights to the slots to the next.

    Raises:
        ArithmeticError: the ledger does not balance, a fault of this module.

    Example:
        >>> run = asynchronous(Line(times=equal), 100, np.random.default_rng(0))
        >>> round(run.throughput, 3), int(run.lag.max())
        (63.682, 1)
    """
    for name, value, least in (
        ("steps", steps, 1),
        ("cap", 0 if cap is None else cap, 0),
        ("publish_every", publish_every, 1),
    ):
        if value < least:
            raise BadInput(f"{name} is {value}; allowed: an integer from {least} on")
    times = _stream(line, generator)
    flights: list[tuple[float, int, int, int]] = []
    queue: deque[tuple[int, int]] = deque()
    taken: list[tuple[int, int]] = []
    commits: list[float] = []
    occupancy: list[int] = []
    now, begun, commit_at = 0.0, 0.0, float("inf")
    version = weights = started = 0
    while version < steps:
        while len(flights) < line.slots and (
            cap is None or started < (cap + version + 1) * line.batch
        ):
            time = next(times)
            heapq.heappush(flights, (now + time, started, version, weights))
            begun, started = begun + time, started + 1
        if commit_at == float("inf") and len(queue) >= line.batch:
            taken.extend(queue.popleft() for _ in range(line.batch))
            commit_at = now + line.update
        if flights and flights[0][0] < commit_at:
            now, _, born, under = heapq.heappop(flights)
            queue.append((born, under))
        else:
            now, commit_at = commit_at, float("inf")
            version += 1
            weights = version - version % publish_every
            commits.append(now)
            occupancy.append(len(flights) + len(queue))
    origin = np.array(taken)
    left = [flight[2] for flight in flights] + [item[0] for item in queue]
    run = Run(
        line=line,
        commits=np.array(commits),
        occupancy=np.array(occupancy),
        started=origin[:, 0],
        weights=origin[:, 1],
        consumed=np.repeat(np.arange(steps), line.batch),
        inside=version - np.array(left, dtype=np.int64),
        busy=begun - sum(flight[0] - now for flight in flights),
    )
    if run.occupancy_residual:
        raise ArithmeticError(f"the ledger is off by {run.occupancy_residual} responses")
    return run


def synchronous(line: Line, steps: int, generator: np.random.Generator) -> Run:
    """Write one batch, wait for all of it, update, begin again: the capacity rule with cap 0.

    Example:
        >>> synchronous(Line(times=equal), 100, np.random.default_rng(0)).step_time
        1.5
    """
    return asynchronous(line, steps, generator, cap=0)


def overlapped(line: Line, steps: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Durations of steps that train on one batch while the next is written, with a barrier after.

        duration = max(slowest response of the next batch, update)

    Needs as many slots as responses in a batch.

    Example:
        >>> overlapped(Line(times=equal, update=4.0), 2, np.random.default_rng(0))
        array([4., 4.])
    """
    if line.slots != line.batch:
        raise BadInput(f"slots is {line.slots}; allowed here: the batch, {line.batch}")
    slowest = line.times(generator, steps * line.batch).reshape(steps, line.batch).max(axis=1)
    return np.maximum(slowest, line.update)
