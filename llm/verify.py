"""Answers checked in processes that can be killed: no answer takes longer than its limit.

A pool holds some workers (`verify_worker`).  A request goes out and a verdict comes back as a line
of JSON; a worker that is late, fails, dies or says anything else is killed with all it started, and
another takes its place, so that no answer meets what an earlier one left behind.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, final

from windage.estimators.errors import BadInput, positive, unknown
from windage.llm import verify_worker

WORDS = ("right", "format", "wrong", "invalid")
START = 60.0
REPLY = 4096
# Packages that a kind of check needs, and the extra that brings them.
NEEDS = {"mathematics": "math-verify", "reasoning": "reasoning-gym"}
EXTRAS = {"math-verify": "mathematics", "reasoning-gym": "reasoning-gym"}


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a check may use.

    Args:
        wall, cpu: seconds.
        memory: bytes of address space of a worker.
        files: open at a time, pipes included; none may be written to.
    """

    wall: float = 2.0
    cpu: float = 2.0
    memory: int = 1 << 30
    files: int = 64


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a check.

    Args:
        word: `right`; `format`: right, but words go on after the answer, or a limit cut the
            response; `wrong`; `invalid`: there is no answer, or none that could be checked.
        stopped: why the check came to no end, or None.
        seconds: it took.
        answer: what was read as the answer, the same for all that are right; None: nothing.
    """

    word: str
    stopped: str | None
    seconds: float
    answer: str | None = None

    @property
    def correct(self) -> bool:
        """Whether the answer is the right one, in whatever format."""
        return self.word in ("right", "format")


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """What verdicts earn.

    A model that earns as much by going on after its answer never learns to end.

    Args:
        low: wrong or invalid.
        high: right.
        format: the right answer with a fault of format.

    Raises:
        BadInput: not low <= format <= high, or low as high.
    """

    low: float = 0.0
    high: float = 1.0
    format: float = 0.5

    def __post_init__(self) -> None:
        if not (-inf < self.low <= self.format <= self.high < inf and self.low < self.high):
            raise BadInput(
                f"low is {self.low:g}, format {self.format:g}, high {self.high:g}; "
                "allowed: low <= format <= high, and low < high"
            )


PLUS_MINUS = Scale(low=-1.0, high=1.0, format=0.0)


def reward(verdict: Verdict, scale: Scale) -> float:
    """What a verdict earns.

    Example:
        >>> [
        ...     reward(Verdict(word=word, stopped=None, seconds=0.0), PLUS_MINUS)
        ...     for word in ("right", "format", "wrong", "invalid")
        ... ]
        [1.0, 0.0, -1.0, -1.0]
    """
    return {"right": scale.high, "format": scale.format}.get(verdict.word, scale.low)


def after_cut(verdict: Verdict) -> Verdict:
    """The verdict on a response that a limit cut: the right answer did not end by itself.

    Example:
        >>> after_cut(Verdict(word="right", stopped=None, seconds=0.0)).word
        'format'
    """
    return replace(verdict, word="format") if verdict.word == "right" else verdict


@final
class Pool:
    """Workers that check answers, several at a time.

    Args:
        kind: a check of `verify_worker`.
        workers: processes.
        limits: of each check.
        program: of the workers.

    Raises:
        BadInput: an unknown kind, or one whose package is not installed.
    """

    def __init__(
        self,
        kind: str,
        *,
        workers: int = 2,
        limits: Limits | None = None,
        program: Path = Path(verify_worker.__file__),
    ) -> None:
        check_kind(kind)
        self.kind, self.limits, self._program = kind, limits or Limits(), program
        positive(workers=workers, wall=self.limits.wall, cpu=self.limits.cpu)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._count = workers
        for _ in range(workers):
            self._idle.put(_Worker(program, self.limits, kind))

    def check(self, text: str, answer: str) -> Verdict:
        """Check one answer; waits for an idle worker.

        Args:
            text: the response.
            answer: the right one.
        """
        worker = self._idle.get()
        request = {"kind": self.kind, "text": text, "answer": answer}
        reply, seconds = worker.ask(request, self.limits.wall)
        word = reply.get("word")
        if word in WORDS:
            self._idle.put(worker)
            read = reply.get("answer")
            said = None if read is None else str(read)
            return Verdict(word=str(word), stopped=None, seconds=seconds, answer=said)
        worker.kill()
        self._idle.put(_Worker(self._program, self.limits, self.kind))
        stopped = str(reply.get("stopped", "a reply that is none"))
        return Verdict(word="invalid", stopped=stopped, seconds=seconds)

    def check_all(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Check pairs of text and answer, as many at a time as there are workers."""
        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(lambda pair: self.check(*pair), pairs))

    def close(self) -> None:
        """End the workers."""
        for _ in range(self._count):
            self._idle.get().kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_kind(kind: str) -> None:
    """Refuse a kind of check that there is not, or not here.

    Raises:
        BadInput: names the kind and what is missing.
    """
    if kind not in verify_worker.CHECKS:
        raise unknown("kind of answer", kind, verify_worker.CHECKS)
    package = NEEDS.get(kind)
    if package is not None and find_spec(package.replace("-", "_")) is None:
        raise BadInput(
            f"answers of kind {kind!r} need the package {package}, which is not installed; "
            f"allowed: pip install 'windage[{EXTRAS[package]}]', or another kind"
        )


@final
class _Worker:
    """One process, in a session of its own so that it is killed with what it started."""

    def __init__(self, program: Path, limits: Limits, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._ready = False
        self._first = {
            "kind": kind,
            "memory": limits.memory,
            "files": limits.files,
            "cpu": limits.cpu,
        }

    def ask(self, request: dict[str, Any], wall: float) -> tuple[dict[str, Any], float]:
        """The reply, or why there is none, and the seconds it took."""
        if not self._ready:
            reply = self._exchange(self._first, time.monotonic() + START)
            if "stopped" in reply:
                return {"stopped": f"the worker did not start: {reply['stopped']}"}, 0.0
            self._ready = True
        start = time.monotonic()
        reply = self._exchange(request, start + wall)
        return reply, time.monotonic() - start

    def _exchange(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Write a line and read one; kills the process where that comes to nothing."""
        rest, answer = memoryview(json.dumps(message).encode() + b"\n"), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(self._output, selectors.EVENT_READ)
            ready.register(self._input, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    return self._stopped("time")
                for key, _ in ready.select(left):
                    try:
                        if key.fd == self._output:
                            some = os.read(self._output, REPLY)
                            answer += some
                            if not some or len(answer) > REPLY:
                                return self._stopped("too long a reply" if some else None)
                        elif rest:
                            rest = rest[os.write(self._input, rest) :]
                        else:
                            ready.unregister(self._input)
                    except BlockingIOError:
                        continue
                    except OSError:
                        return self._stopped(None)
        try:
            found = json.loads(answer)
            assert isinstance(found, dict)
        except (ValueError, AssertionError):
            return self._stopped("a reply that is none")
        return found

    def _stopped(self, why: str | None) -> dict[str, Any]:
        """Kill the process; None: it ended by itself, and how says why."""
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        self.kill()
        if why is None:
            code = self._process.returncode
            why = "processor time" if code == -signal.SIGPROF else f"the worker ended with {code}"
        return {"stopped": why}

    def kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
