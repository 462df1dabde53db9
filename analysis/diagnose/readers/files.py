"""What a dump's folder holds, by content: regular files only, no link is followed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from windage.analysis.diagnose.readers.fields import Refuse, shown
from windage.analysis.diagnose.rows import Rejected
from windage.estimators.errors import BadInput

MAGIC = {b"PAR1": "parquet", b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@final
@dataclass(frozen=True, kw_only=True)
class Dump:
    """The files of one dump.

    Args:
        root: file or folder as given.
        files: those that hold the format's rows, in natural order.
        beside: those that the format keeps beside them, such as traces.
    """

    root: Path
    files: Sequence[Path]
    beside: Sequence[Path] = ()


def natural(path: Path) -> list[tuple[int, str]]:
    """A key that puts `step_2` before `step_10`.

    Example:
        >>> sorted([Path("a10"), Path("a9")], key=natural)[0].name
        'a9'
    """
    parts = re.split(r"(\d+)", str(path))
    return [(int(p), "") if i % 2 else (-1, p) for i, p in enumerate(parts)]


def regular(root: Path, refuse: Refuse) -> list[Path]:
    """The files of a folder and of the folders in it, in natural order; a file: itself.

    Args:
        root: given by the user; a link here is followed.
        refuse: told of each link and device inside.

    Raises:
        BadInput: neither a file nor a folder.
    """
    if root.is_file():
        return [root] if root.stat().st_size else []
    if not root.is_dir():
        raise BadInput(f"{shown(root)} is no file and no folder; allowed: a dump")
    found = []

    def closed(problem: OSError) -> None:
        _skip(Path(str(problem.filename)), refuse, f"a closed folder: {problem.strerror}")

    for place, folders, names in os.walk(root, onerror=closed):
        for name in (*folders, *names):
            path = Path(place, name)
            if path.is_symlink():
                _skip(path, refuse, "a link; links are not followed")
            elif name in names and not path.is_file():
                _skip(path, refuse, "no regular file")
            elif name in names and path.stat().st_size:
                found.append(path)
    return sorted(found, key=natural)


def _skip(path: Path, refuse: Refuse, what: str) -> None:
    refuse(Rejected(where=shown(path), reason="no dump file", what=f"is {what}", rows=0))


def container(path: Path) -> str:
    """`parquet`, `zip`, `pickle`, `gzip`, `zstd`, or `lines` where nothing says otherwise."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return "lines"
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "lines")
