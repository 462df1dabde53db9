"""Work shared by several processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

A = TypeVar("A")
R = TypeVar("R")
SECONDS = 0.1
SOON = 2.0


def processors() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def side_by_side(
    work: Callable[[A], Iterable[R]], batches: Sequence[A], processes: int
) -> Iterator[R]:
    """Results of work(batch) for every batch, as they come.

    Args:
        work: a function of a module, so that another process finds it.
        batches: handed out in this order, one at a time.
        processes: started anew, which takes as long as the imports of `work`.

    Raises:
        OSError: a process ended before its work; whatever `work` raises is raised here.
    """
    waiting = list(reversed(batches))
    workers = []
    try:
        with _uninterrupted():
            workers = [_start(work) for _ in range(min(processes, len(batches)))]
        busy = [connection for _, connection in workers]
        for connection in busy:
            connection.send(waiting.pop())
        while busy:
            for ready in wait(busy):
                connection = cast(Connection, ready)
                found, problem = _receive(connection)
                if problem is not None:
                    raise problem
                if found is not None:
                    yield from found
                elif waiting:
                    connection.send(waiting.pop())
                else:
                    busy.remove(connection)
    finally:
        for process, connection in workers:
            connection.close()
            process.terminate()
            process.join(SOON)
            process.kill()
            process.join()


def _start(work: Callable[..., Any]) -> tuple[Any, Connection]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, work), daemon=True)
    process.start()
    there.close()
    return process, here


def _receive(connection: Connection) -> tuple[list[Any] | None, Exception | None]:
    """Results, or None at the end of a batch; or what went wrong."""
    try:
        found: tuple[list[Any] | None, Exception | None] = connection.recv()
    except (EOFError, ConnectionError):
        return None, OSError("a worker process ended before its work was done")
    return found


def _serve(connection: Connection, work: Callable[[Any], Iterable[Any]]) -> None:
    """Answer batches until the other end closes or its process is gone."""
    with suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            try:
                for found in _parcels(work(batch)):
                    connection.send((found, None))
            except Exception as problem:
                connection.send((None, problem))
            connection.send((None, None))


def _parcels(results: Iterable[Any]) -> Iterator[list[Any]]:
    """Results in lists, one each tenth of a second: a message costs as much as a small result."""
    parcel, sent = [], time.monotonic()
    for result in results:
        parcel.append(result)
        if time.monotonic() - sent > SECONDS:
            yield parcel
            parcel, sent = [], time.monotonic()
    if parcel:
        yield parcel


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all: this one ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
