"""Files and folders that appear whole or not at all, whatever interrupts their writing.

A file or a folder is written beside its name, synced, renamed, and the folder around it synced.
Whoever writes holds a lock on what is unfinished; what has no lock belongs to a process that died,
and is taken away when the folder around it is next opened.  What is removed is renamed first, so
that no half of a folder ever has its name.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
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
    """Remove what writers that died left unfinished; a read-only folder stays as it is."""
    with suppress(OSError), locked(folder):
        _tidy(folder)


def _tidy(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            whole = path.is_dir() and not path.is_symlink()
            flags = os.O_RDONLY | os.O_DIRECTORY if whole else os.O_RDWR
            descriptor = os.open(path, flags | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if whole:
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def _beside(path: Path) -> Path:
    """The name of what is unfinished."""
    return path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")


def _name(beside: Path, path: Path) -> None:
    """Give what was unfinished its name, which must be free, and wait until the disk knows."""
    with locked(path.parent) as at:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(beside, path)
        os.fsync(at)


def _not_written(path: Path, problem: OSError) -> BadInput:
    return BadInput(
        f"{str(path)!r} is not written: {problem.strerror or problem}; allowed: a new name in "
        "a folder with room that can be written to"
    )


@contextmanager
def new_file(path: Path) -> Iterator[Sink]:
    """Write a file that must not exist yet; it has its name once the block ended and all is synced.

    Args:
        path: in a folder that exists.

    Raises:
        BadInput: names the path and why it was not written; nothing of it is left behind.
    """
    beside = _beside(path)
    sink = Sink(-1)
    try:
        with locked(path.parent):
            _tidy(path.parent)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            sink = Sink(os.open(beside, flags, 0o666))
            sink.lock()
        yield sink
        sink.sync()
        _name(beside, path)
    except OSError as problem:
        raise _not_written(path, problem) from None
    finally:
        if sink.open:
            sink.abandon()
            with suppress(OSError):
                beside.unlink()


@contextmanager
def part(path: Path) -> Iterator[Sink]:
    """Write a file inside a new folder, which does not have its own name yet."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    sink = Sink(os.open(path, flags, 0o666))
    try:
        yield sink
        sink.sync()
    finally:
        sink.abandon()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that must not exist yet; it has its name once the block ended and all is there.

    Gives the unfinished folder, in which files may be written by any means.

    Args:
        path: in a folder that exists.

    Raises:
        BadInput: names the path and why it was not written; nothing of it is left behind.
    """
    beside = _beside(path)
    made, lock = False, -1
    try:
        with locked(path.parent):
            _tidy(path.parent)
            os.mkdir(beside)
            made = True
            lock = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield beside
        for place, _, names in os.walk(beside, topdown=False):
            for name in (*names, "."):
                sync(os.path.join(place, name))
        _name(beside, path)
    except OSError as problem:
        raise _not_written(path, problem) from None
    finally:
        if made:
            shutil.rmtree(beside, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def made(folder: Path) -> None:
    """Make a folder and those around it that are missing; the disk knows of each.

    Raises:
        OSError: names what is not made.
    """
    around = [one for one in folder.parents if not one.exists()]
    for one in (*reversed(around), folder):
        if not one.is_dir():
            one.mkdir(exist_ok=True)
            sync(one.parent)


def sync(path: str | Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Take a file or a folder away, as a whole: a crash leaves all of it or nothing.

    Raises:
        BadInput: names the path and why it is still there.
    """
    beside = _beside(path)
    try:
        with locked(path.parent) as at:
            os.rename(path, beside)
            os.fsync(at)
            if beside.is_dir() and not beside.is_symlink():
                shutil.rmtree(beside)
            else:
                beside.unlink()
    except OSError as problem:
        raise BadInput(
            f"{str(path)!r} is not removed: {problem.strerror or problem}; allowed: a file or "
            "folder inside one that can be written to"
        ) from None
    finally:  # interrupted
        shutil.rmtree(beside, ignore_errors=True)
