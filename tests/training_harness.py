"""Faults and kills at the calls by which a process changes a disk, counted over all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CALLS = ("open", "mkdir", "write", "pwrite", "fsync", "rename", "unlink", "rmdir", "ftruncate")
Fault = Callable[..., object]


class Crash(BaseException):
    """The end of a run at a call, in a process that goes on."""


class Calls:
    """The calls seen so far: their names, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []


@contextmanager
def tampered(at: int = -1, fault: Fault | None = None) -> Iterator[Calls]:
    """Count the calls of `os` that change a disk, and put something in place of one of them.

    Args:
        at: which call, counted over all names; -1: none.
        fault: takes the call's name, the real function and the arguments.
    """
    seen = Calls()
    real = {name: getattr(os, name) for name in CALLS}

    def wrapped(name):
        def call(*arguments, **settings):
            seen.names.append(name)
            if len(seen.names) - 1 == at:
                return fault(name, real[name], *arguments, **settings)
            return real[name](*arguments, **settings)

        return call

    # shutil looks functions up among those that take a folder's descriptor.
    takes = os.supports_dir_fd
    try:
        for name in CALLS:
            replaced = wrapped(name)
            setattr(os, name, replaced)
            if real[name] in takes:
                takes.add(replaced)
        yield seen
    finally:
        for name in CALLS:
            takes.discard(getattr(os, name))
            setattr(os, name, real[name])


def failing(number: int) -> Fault:
    """An error of the disk."""

    def fault(name, real, *arguments, **settings):
        raise OSError(number, os.strerror(number))

    return fault


def killed(name, real, *arguments, **settings):
    """`kill -9` instead of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def crashed(name, real, *arguments, **settings):
    """The run ends, the process does not."""
    raise Crash


def short(name, real, *arguments, **settings):
    """A short write; any other call is made."""
    if name == "write":
        descriptor, content = arguments
        return real(descriptor, content[: max(1, len(content) // 2)])
    return real(*arguments, **settings)


def forked(work: Callable[[], int]) -> int:
    """Do the work in a child; its exit status, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
