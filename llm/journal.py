"""Records as JSON lines: each is appended in one piece, and a reader sees whole lines.

A line without its end is one that is being written, or whose writer died: readers leave it out, the
next writer cuts it off.  Numbers that are not finite are the texts "nan", "inf" and "-inf".
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from windage.estimators.errors import BadInput
from windage.llm.durable import sync
from windage.llm.plain import document, plain


@final
class Journal:
    """A file of records that grows.

    Args:
        path: made where it is missing, in a folder that is there.

    Raises:
        BadInput: names the path that cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fresh = not path.exists()
            self._descriptor = os.open(path, flags, 0o666)
            try:
                _cut(self._descriptor, _whole(path))
                if fresh:
                    sync(path.parent)
            except OSError:
                os.close(self._descriptor)
                raise
        except OSError as problem:
            raise self._refusal(problem) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; an error leaves the file as it was.

        Raises:
            BadInput: names the path and why it was not written, or the value that does not fit.
        """
        rest = memoryview((document(plain(record, where="record")) + "\n").encode())
        try:
            before = os.fstat(self._descriptor).st_size
            try:
                while len(rest):
                    count = os.write(self._descriptor, rest)
                    if count == 0:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    rest = rest[count:]
            except OSError:
                with suppress(OSError):
                    _cut(self._descriptor, before)
                raise
        except OSError as problem:
            raise self._refusal(problem) from None

    def sync(self) -> None:
        """Wait until the disk has every record: before a checkpoint that counts on them.

        Raises:
            BadInput: names the path.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise self._refusal(problem) from None

    def close(self) -> None:
        """Give the file back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _refusal(self, problem: OSError) -> BadInput:
        return BadInput(
            f"{str(self.path)!r} is not written: {problem.strerror}; allowed: a file in a folder "
            "with room that can be written to"
        )


def _cut(descriptor: int, size: int) -> None:
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each whole line and where it begins."""
    begin = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield begin, line
            begin += len(line)


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - (1 << 16))
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file; none where there is no file.

    Raises:
        BadInput: names the file and the line that is no record.
    """
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return
    for number, (begin, line) in enumerate(_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise BadInput(f"{str(path)!r}, line {number} is damaged; allowed: a JSON object")
        yield begin, record


def rewind(path: Path, step: int) -> None:
    """Cut off a torn last line, and every record from the first one after a step on.

    A run that goes on from a checkpoint writes them again.

    Args:
        path: of records with `step`, in the order in which they were written.

    Raises:
        BadInput: names a line without a step, or the path that cannot be written to.
    """
    if not path.exists():
        return
    size = _whole(path)
    for number, (begin, record) in enumerate(_records(path), 1):
        found = record.get("step")
        if not isinstance(found, int):
            raise BadInput(f"{str(path)!r}, line {number} has no step; allowed: a whole number")
        if found > step:
            size = begin
            break
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _cut(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise BadInput(f"{str(path)!r} is not cut off: {problem.strerror}") from None
