"""Files that appear whole or not at all, whatever interrupts their writing.

A file is written beside its name, synced, renamed, and its folder synced.  Whoever writes holds a
lock on the unfinished file; a file without a lock belongs to a process that died, and is taken away
when its folder is next opened.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from windage.estimators.errors import BadInput

SUFFIX = ".unfinished"
BUFFER = 1 << 20


@final
class Sink(io.RawIOBase):
    """A binary file that only grows; a short write is continued, a failed one raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._written = descriptor, 0
        self._waiting = bytearray()

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes taken."""
        return self._written + len(self._waiting)

    def write(self, content: object) -> int:
        """Take all of it."""
        taken = memoryview(content).cast("B")  # type: ignore[arg-type]
        self._waiting += taken
        if len(self._waiting) >= BUFFER:
            self._pour()
        return len(taken)

    def _pour(self) -> None:
        rest, self._waiting = memoryview(self._waiting), bytearray()
        while len(rest):
            count = os.write(self._descriptor, rest)
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._written += count
            rest = rest[count:]

    def sync(self) -> None:
        """Wait until the disk has it."""
        self._pour()
        os.fsync(self._descriptor)

    def lock(self) -> None:
        """Show that its writer lives."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def open(self) -> bool:
        """Whether it takes more."""
        return self._descriptor >= 0

    def abandon(self) -> None:
        """Give the descriptor back; a write that comes later fails."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; gives a descriptor by which it can be synced."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(at, fcntl.LOCK_EX)
        yield at
    finally:
        os.close(at)


def tidy(folder: Path) -> None:
    """Remove unfinished files whose writers died; a folder that is read-only stays as it is."""
    with suppress(OSError), locked(folder):
        _tidy(folder)


def _tidy(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[Sink]:
    """Write a file that must not exist yet; it has its name once the block ended and all is synced.

    Args:
        path: in a folder that exists.

    Raises:
        BadInput: names the path and why it was not written; nothing of it is left behind.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    sink = Sink(-1)
    try:
        with locked(path.parent):
            _tidy(path.parent)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            sink = Sink(os.open(beside, flags, 0o666))
            sink.lock()
        yield sink
        sink.sync()
        with locked(path.parent) as at:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(beside, path)
            os.fsync(at)
    except OSError as problem:
        raise BadInput(
            f"{str(path)!r} is not written: {problem.strerror or problem}; allowed: a new name in "
            "a folder with room that can be written to"
        ) from None
    finally:
        if sink.open:
            sink.abandon()
            with suppress(OSError):
                beside.unlink()
