"""Where the rollout batch of a step comes from, in each mode of training.

    synchronous     drawn with the weights of this very step
    one step off    drawn, while the step before trains, with the weights that it started from
    asynchronous    drawn without a pause; groups are trained in the order of their questions, and
                    none is begun more than `max_lag` steps ahead, so none is ever too old or lost
    offline         read from a store, its groups in a new order each epoch
    iterated        as synchronous, a whole round at a time, gone through for several epochs

A batch depends on the seed, the step and the weights; a run that goes on needs no more than these.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Protocol, final, runtime_checkable

from torch import Tensor

from windage.estimators.errors import BadInput
from windage.llm import rollouts
from windage.llm.draw import Desk, Drawn, Row, draw
from windage.llm.samplers import probe
from windage.llm.samplers.protocol import Sampler, death

DEATHS = 3
# Of a store: its proximal policy and reference were those of the run that wrote it.
SAID_ANEW = ("proximal_logp", "reference_logp")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class News:
    """New weights, and how a sampler that took them can be told from one that did not.

    Args:
        weights: by the names of the trainer's model; read once, or a copy where they are kept.
        version: their number.
        check: raises where the sampler's log-probabilities are not these weights'.
    """

    weights: Iterable[tuple[str, Tensor]]
    version: int
    check: Callable[[Sampler], None]

    def kept(self) -> News:
        """The same with a copy of the weights, which go on being trained."""
        return replace(self, weights=[(name, weight.clone()) for name, weight in self.weights])


@runtime_checkable
class Source(Protocol):
    """Rollout batches by step."""

    def rows(self, step: int) -> list[Drawn] | list[Row]:
        """The rollout batch of a step, waiting for it where it must."""
        ...

    def publish(self, news: News) -> None:
        """Tell of new weights, to be taken when the mode allows."""
        ...

    def paused(self) -> AbstractContextManager[Desk | None]:
        """A time in which nothing is drawn, with the desk that is free then; None: it has none.

        Its sampler has the weights that were told of last, and was seen to have them.
        """
        ...

    def close(self) -> None:
        """Stop drawing."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Order:
    """Which questions a step asks.

    Args:
        prompts, group_size: of a step.
        seed: of the run.
    """

    prompts: int
    group_size: int
    seed: int

    def ask(
        self,
        desk: Desk,
        step: int,
        between: Callable[[], None] | None = None,
        *,
        count: int | None = None,
        again: int = 0,
    ) -> list[Drawn]:
        """Draw the groups of a step.

        Args:
            count: groups; None: all of a step.
            again: rounds of a step's questions in place of others; each has its own.
        """
        count, seed = count or self.prompts, self.seed + again
        start = step * self.prompts
        return draw(
            desk,
            desk.task.questions("train", seed, start, count),
            self.group_size,
            seed=seed,
            start=start,
            between=between,
            label=f"{again}-" if again else "",
        )


@final
class Elsewhere:
    """Another process draws, and tells this one."""

    def rows(self, step: int) -> list[Row]:
        """None of its own."""
        return []

    def publish(self, news: News) -> None:
        """Nobody to tell."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is drawn here."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to stop."""


@final
class Synchronous:
    """Each step is drawn when it is asked for, with the weights that were told of last."""

    def __init__(self, desk: Desk, order: Order) -> None:
        self._desk, self._order = desk, order

    def rows(self, step: int) -> list[Drawn]:
        """Draw."""
        return self._order.ask(self._desk, step)

    def further(self, step: int, count: int, again: int) -> list[Drawn]:
        """Groups in place of some that were dropped."""
        return self._order.ask(self._desk, step, count=count, again=again)

    def publish(self, news: News) -> None:
        """Give the sampler the weights at once."""
        load(self._desk, news)

    def paused(self) -> AbstractContextManager[Desk]:
        """Nothing is drawn between two steps."""
        return nullcontext(self._desk)

    def close(self) -> None:
        """Nothing to stop."""


@final
class OneStepOff:
    """While a step trains, the next is drawn with the weights that the training began with."""

    def __init__(self, desk: Desk, order: Order, steps: int) -> None:
        self._desk, self._order, self._steps = desk, order, steps
        self._thread = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[list[Drawn]]] | None = None
        self._told: News | None = None

    def _begin(self, step: int) -> Future[list[Drawn]]:
        self._take()
        return self._thread.submit(self._order.ask, self._desk, step)

    def _take(self) -> None:
        """Load what was kept, while nothing is drawn."""
        if self._told is not None:
            load(self._desk, self._told)
            self._told = None

    def rows(self, step: int) -> list[Drawn]:
        """Wait for the step; begin the one after it."""
        due = self._next[1] if self._next and self._next[0] == step else self._begin(step)
        found = due.result()
        self._next = (step + 1, self._begin(step + 1)) if step + 1 < self._steps else None
        return found

    def publish(self, news: News) -> None:
        """Keep a copy until the batch that is being drawn is done."""
        if self._next is None:
            load(self._desk, news)
        else:
            self._told = news.kept()

    def paused(self) -> AbstractContextManager[Desk]:
        """Once the batch that is being drawn is done."""
        if self._next is not None:
            wait([self._next[1]])
        self._take()
        return nullcontext(self._desk)

    def close(self) -> None:
        """Wait for what is being drawn."""
        self._thread.shutdown(cancel_futures=True)


@final
class Asynchronous:
    """A thread draws without a pause; new weights reach it between two tokens.

    An engine that dies is made again, and what it was drawing is asked again, with the same places
    and seeds: nothing is lost and nothing is trained twice.

    Args:
        desk: its sampler is the thread's alone.
        renew: makes the sampler again after its death.
        ahead: steps that the first group of a wave may be ahead of the training.
        first: step to begin with.
    """

    def __init__(
        self,
        desk: Desk,
        order: Order,
        *,
        renew: Callable[[], Desk],
        ahead: int,
        keep_cache: bool,
        first: int,
        steps: int,
    ) -> None:
        self._desk, self._order, self._renew = desk, order, renew
        self._ahead, self._keep, self._steps = ahead, keep_cache, steps
        self._changed = threading.Condition()
        self._done: dict[int, list[Drawn]] = {}
        self._step, self._stopped = first, False
        self._told: News | None = None
        self._last: News | None = None
        self._unchecked: News | None = None
        self._problem: BaseException | None = None
        self._drawing = threading.Lock()
        self.deaths = 0
        self._thread = threading.Thread(target=self._work, args=(first,), daemon=True)

    def rows(self, step: int) -> list[Drawn]:
        """Wait for the step's groups.

        Raises:
            BadInput: the engine died several times one after the other; says of what.
        """
        with self._changed:
            self._step = step
            self._changed.notify_all()
        if not self._thread.is_alive() and self._problem is None and step not in self._done:
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: step in self._done or self._problem is not None)
            if step not in self._done:
                raise self._problem or RuntimeError("the sampler stopped")
            return self._done.pop(step)

    def publish(self, news: News) -> None:
        """Leave a copy of the weights for the thread."""
        copy = news.kept()
        with self._changed:
            self._told = self._last = copy

    @contextmanager
    def paused(self) -> Iterator[Desk]:
        """Once the groups that are being drawn are done, before the next."""
        with self._drawing:
            self._settle()
            yield self._desk

    def _take(self) -> None:
        """Load what was left, between two tokens; it is checked when no response is open."""
        with self._changed:
            if self._stopped:
                raise _Stopped
            told, self._told = self._told, None
        if told is not None:
            self._desk.sampler.load(told.weights, told.version, keep_cache=self._keep)
            self._unchecked = told

    def _settle(self) -> None:
        """While no response is open: load what was left, and see that the sampler has it."""
        self._take()
        if self._unchecked is not None:
            self._unchecked.check(self._desk.sampler)
            self._unchecked = None

    def _work(self, first: int) -> None:
        with suppress(_Stopped):
            for step in range(first, self._steps):
                with self._changed:
                    while not self._stopped and step > self._step + self._ahead:
                        self._changed.wait()
                try:
                    with self._drawing:
                        drawn = self._drawn(step)
                except _Stopped:
                    raise
                except BaseException as problem:
                    with self._changed:
                        self._problem = problem
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._done[step] = drawn
                    self._changed.notify_all()

    def _drawn(self, step: int) -> list[Drawn]:
        for before in range(DEATHS + 1):
            try:
                self._settle()
                return self._order.ask(self._desk, step, self._take)
            except Exception as problem:
                why = death(problem)
                if not why:
                    raise
                self.deaths += 1
                if before == DEATHS:
                    raise BadInput(
                        f"the sampler died {DEATHS + 1} times in a row at step {step}: {why}; "
                        "allowed: an engine that runs"
                    ) from problem
                with suppress(Exception):
                    self._desk.sampler.close()
                self._desk = self._renew()
                with self._changed:
                    self._told = self._told or self._last
        raise AssertionError

    def close(self) -> None:
        """Stop between two tokens."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()


def load(desk: Desk, news: News) -> None:
    """Give a sampler new weights, and see that it has them."""
    probe.take(desk.sampler, news.weights, news.version)
    news.check(desk.sampler)


class _Stopped(BaseException):
    """The run is over; no engine takes it for an error of its own."""


@final
class Offline:
    """A recorded store, its groups in a new order each epoch.

    Args:
        folder: of a rollout store, made by anyone.
        tokenizer: fingerprint of the policy's.
        prompts: groups a step.
        seed: of the order.
        temperature: at which the trainer takes its log-probabilities.
        head: whether likeliest tokens must be there.

    Raises:
        BadInput: the store cannot be read, or holds nothing to train on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: str,
        prompts: int,
        seed: int,
        temperature: float,
        head: bool = False,
    ) -> None:
        self._groups: dict[str, list[Row]] = {}
        for row in rollouts.read(folder, tokenizer=tokenizer):
            self._groups.setdefault(row["group_id"], []).append(row)
        self._names, self._prompts, self._seed = sorted(self._groups), prompts, seed
        if not self._groups:
            raise BadInput(f"{str(folder)!r} holds no response; allowed: a store with some")
        kept = [row for row in self.everything() if row["rejected"] is None]
        if not kept:
            raise BadInput(
                f"{str(folder)!r} holds no response that was admitted; allowed: a store with some"
            )
        for found in sorted({row["temperature"] for row in kept}):
            if not isclose(found, temperature, rel_tol=1e-6):
                raise BadInput(
                    f"{str(folder)!r} has responses sampled at temperature {found:g}, and "
                    f"sampling.temperature is {temperature:g}; allowed: that of the store"
                )
        lacks = sum("head_ids" not in row for row in kept)
        if head and lacks:
            raise BadInput(
                f"{str(folder)!r} has {lacks} responses without head_ids, over which the recipe "
                "centers scores; allowed: a store that was sampled with sampling.head"
            )

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; the last one may have fewer groups."""
        return -(-len(self._names) // self._prompts)

    def rows(self, step: int) -> list[Row]:
        """The rows of some groups, without what a store says of policies that this run has too."""
        epoch, place = divmod(step, self.per_epoch)
        order = shuffled(self._names, self._seed, epoch)
        chosen = order[place * self._prompts : (place + 1) * self._prompts]
        return [
            {name: value for name, value in row.items() if name not in SAID_ANEW}
            for group in chosen
            for row in self._groups[group]
        ]

    def everything(self) -> Iterator[Row]:
        """All rows."""
        for name in self._names:
            yield from self._groups[name]

    def publish(self, news: News) -> None:
        """A store takes no weights."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is ever drawn."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to stop."""


def shuffled(names: Sequence[str], seed: int, *places: int) -> list[str]:
    """The names in an order that the seed and the places give.

    Example:
        >>> sorted(shuffled(["a", "b", "c"], 0, 1))
        ['a', 'b', 'c']
    """
    order = list(names)
    random.Random(f"{seed} {places}").shuffle(order)
    return order
