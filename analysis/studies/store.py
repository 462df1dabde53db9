"""Rows of a study on disk while it runs, so that a second call goes on where the first stopped.

A folder holds `rows.json`, what was asked for, and `rows-00001.parquet`, `rows-00002.parquet`, ...,
each written beside its name and then renamed, so that whatever has the name is whole.  The columns
are the figures; the last one, `row`, is the row as JSON, digit for digit, with settings and mean.
The files go when the study's own are written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any, final

from windage.analysis.tables import frame
from windage.estimators.errors import BadInput

REQUEST = "rows.json"
PARTS = "rows-[0-9][0-9][0-9][0-9][0-9].parquet"
WORDS = "rows-*.parquet"
SECONDS = 1.0


@final
class Rows:
    """Rows in a folder, by their number in the document.

    Args:
        folder: made where it is missing.
        request: what the study is of, as JSON holds it.
        count: rows of the whole study.

    Raises:
        BadInput: the folder holds unfinished rows of another request or a damaged file (named), or
            cannot be written to.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], count: int) -> None:
        self.folder, self.count = folder, count
        self._request = {**request, "windage": version("windage"), "torch": version("torch")}
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._written = time.monotonic()
        self.done = 0
        self._check()

    def read(self) -> dict[int, dict[str, Any]]:
        """Rows of earlier calls.

        Raises:
            BadInput: names a file that is damaged.
        """
        found: dict[int, dict[str, Any]] = {}
        for part in self._parts():
            found |= self._part(part)
        self.done = len(found)
        return found

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Keep a row; a part is written when the last one is a second old."""
        self._waiting[number] = row
        self.done += 1
        if time.monotonic() - self._written > SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write a part of the rows that wait, under the next free number."""
        if self._waiting:
            table = frame([_scalars(row) for row in self._waiting.values()])
            table.insert(0, "number", list(self._waiting))
            table["row"] = [json.dumps(row, allow_nan=False) for row in self._waiting.values()]
            last = max((int(part.stem.split("-")[1]) for part in self._parts()), default=0)
            path = self.folder / f"rows-{last + 1:05d}.parquet"
            self._replace(path, table.to_parquet(index=False, write_page_checksum=True))
            self._waiting.clear()
        self._written = time.monotonic()

    def remove(self) -> None:
        """Take the files away: the study's own tables hold their rows."""
        for path in (*self._parts(), self.folder / REQUEST, *self.folder.glob("rows*.unfinished")):
            path.unlink(missing_ok=True)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob(PARTS))

    def _replace(self, path: Path, content: bytes) -> None:
        beside = path.with_suffix(".unfinished")
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        except OSError as problem:
            with suppress(OSError):
                beside.unlink()
            raise BadInput(
                f"--out {str(self.folder)!r}: {problem.strerror}; allowed: a directory with room"
            ) from None

    def _check(self) -> None:
        """Compare with the request of an earlier call, or note this one's."""
        path = self.folder / REQUEST
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = path.read_text() if path.exists() else None
        except OSError as problem:
            raise BadInput(
                f"--out {str(self.folder)!r}: {problem.strerror}; allowed: a directory"
            ) from None
        if text is None:
            if parts := self._parts():
                raise BadInput(
                    f"--out {str(self.folder)!r}: {parts[0].name} without {REQUEST}, which says "
                    "what it is of; allowed: a folder without such files"
                )
            self._replace(path, json.dumps(self._request).encode())
            return
        try:
            before = json.loads(text)
            assert isinstance(before, dict)
        except (ValueError, AssertionError):
            raise _damaged(path, f"delete it and {WORDS}, to start again") from None
        if different := differences(before, self._request):
            raise BadInput(
                f"--out {str(self.folder)!r} holds unfinished rows of another request: "
                f"{different}; allowed: the same request, which goes on there, another folder, or "
                f"this one without {REQUEST} and {WORDS}"
            )

    def _part(self, path: Path) -> dict[int, dict[str, Any]]:
        """The rows of one file."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        columns = ["number", "row"]
        try:
            table = read_table(path, columns=columns, page_checksum_verification=True)
            numbers, texts = (table[key].to_pylist() for key in columns)
            found = {n: json.loads(text) for n, text in zip(numbers, texts, strict=True)}
            if all(0 <= n < self.count and isinstance(row, dict) for n, row in found.items()):
                return found
        except (ArrowException, OSError, ValueError, KeyError):
            pass
        raise _damaged(path, "delete it, and its rows are computed again")


def _scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    """What fits in a cell; settings stand in the row's JSON."""
    return {k: v for k, v in row.items() if not isinstance(v, (Mapping, list))}


def _damaged(path: Path, remedy: str) -> BadInput:
    return BadInput(f"{str(path)!r} is damaged; allowed: {remedy}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two requests do not share, in words; empty where they are the same.

    Example:
        >>> differences({"seed": 0, "engine": "auto"}, {"seed": 1, "engine": "auto"})
        'seed was 0, is 1'
    """
    words = []
    for key in dict.fromkeys((*before, *now)):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            words.append(f"{key}: {differences(a, b)}")
        elif a != b:
            a, b = (shorten(json.dumps(x), 60, placeholder=" ...") for x in (a, b))
            words.append(f"{key} was {a}, is {b}")
    return ", ".join(words)
