"""Lines of JSON, one at a time, whatever the file holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windage.analysis.diagnose.readers.fields import Fault, Refuse, shown
from windage.analysis.diagnose.rows import Rejected

# A line of 128 thousand tokens with fifteen numbers a token has 40 MiB.
LONGEST = 64 * 2**20
CONTAINERS = 2_000_000
BLOCK = 2**20


def objects(path: Path, refuse: Refuse, *, longest: int = LONGEST) -> Iterator[tuple[str, Any]]:
    """Each line's value and where it stands; blank lines are none.

    No more than one line is in memory: what is longer is skipped unread.

    Args:
        path: UTF-8, with or without a mark at its start, with either line end.
        refuse: told of each line without a value.
        longest: bytes of a line.
    """
    name = shown(path)
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, longest):
                where = f"{name}: line {number}"
                try:
                    if line is None:
                        raise Fault("line too long", f"has more than {longest} bytes; skipped")
                    if line.strip():
                        yield where, _value(line)
                except Fault as fault:
                    refuse(Rejected(where=where, reason=fault.reason, what=fault.what))
    except OSError as problem:
        what = f"cannot be read: {problem.strerror}"
        refuse(Rejected(where=name, reason="unreadable", what=what))


def _lines(file: Any, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None: too long."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > longest and not line.endswith(b"\n"):
            while (rest := file.readline(BLOCK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line


def _value(line: bytes) -> Any:
    """A line's value.

    Raises:
        Fault: no UTF-8, no JSON, too deep or too many parts.
    """
    if line.count(b"[") + line.count(b"{") > CONTAINERS:
        raise Fault("too many parts", f"has more than {CONTAINERS} lists and objects; not read")
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as problem:
        raise Fault("no UTF-8", f"is no UTF-8 at byte {problem.start}") from None
    except RecursionError:
        raise Fault("too deep", "is nested too deeply; allowed: some hundred levels") from None
    except ValueError as problem:
        raise Fault("no JSON", f"is no JSON: {problem}") from None


def records(path: Path, refuse: Refuse, *, many: bool = False) -> Iterator[tuple[str, Any]]:
    """Each line's object.

    Args:
        path: a file of lines.
        refuse: told of each line, or part of a line, that is no object.
        many: a line may hold a list of objects instead.
    """
    for where, value in objects(path, refuse):
        parts = value if many and isinstance(value, list) else [value]
        for number, part in enumerate(parts):
            place = where if parts is not value else f"{where}, entry {number}"
            if isinstance(part, dict):
                yield place, part
            else:
                what = f"is no object but {type(part).__name__}; allowed: an object a line"
                refuse(Rejected(where=place, reason="no object", what=what))
