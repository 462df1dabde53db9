"""Files that torch saved, read as plain values and arrays; nothing in them runs.

Such a file is an archive without compression: the opcodes of its data, and the numbers of each
tensor as bytes.  See `opcodes` for what is built of them.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import Fault
from windage.analysis.diagnose.readers.opcodes import Machine, Name, Storage, Unread

STORAGES = {
    "torch.FloatStorage": "<f4",
    "torch.DoubleStorage": "<f8",
    "torch.HalfStorage": "<f2",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "<i8",
    "torch.IntStorage": "<i4",
    "torch.ShortStorage": "<i2",
    "torch.CharStorage": "<i1",
    "torch.ByteStorage": "<u1",
    "torch.BoolStorage": "|b1",
}
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    OverflowError,
    NotImplementedError,
    OSError,
    RuntimeError,
    UnicodeError,
    ValueError,
)


def load(path: Path) -> Any:
    """The value that was saved: plain values, arrays, and `Unread` where a call would be.

    Raises:
        Fault: damaged, compressed, or of opcodes that are not read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            main = [name for name in names if name.endswith("/data.pkl")]
            if len(main) != 1 or len(set(names)) < len(names):
                raise Fault("damaged", "is no file saved by torch: it needs one data.pkl")
            if any(member.compress_type or member.flag_bits & 1 for member in members):
                raise Fault("unsafe", "has compressed or encrypted members; torch writes none")
            folder = main[0].removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in names and archive.read(order) != b"little":
                raise Fault("wrong type", "has its numbers in big-endian order; not read")
            room = path.stat().st_size
            return Machine(archive.read(main[0]), Tensors(archive, folder, room).make).run()
    except BROKEN as problem:
        raise Fault("damaged", f"is damaged: {type(problem).__name__}") from None


class Tensors:
    """Arrays of the numbers in an archive.

    Args:
        archive: open.
        folder: of its members.
        room: bytes that all arrays together may take; twice as many where they are widened.
    """

    def __init__(self, archive: zipfile.ZipFile, folder: str, room: int) -> None:
        self.archive, self.folder, self.room = archive, folder, 2 * room
        self.read: dict[str, np.ndarray] = {}

    def make(self, storage: Storage, offset: Any, size: Any, strides: Any) -> np.ndarray:
        """A tensor; only whole ones in row-major order.

        Raises:
            Fault: a kind that is not read, or more numbers than there are.
        """
        kind = STORAGES.get(storage.kind)
        if kind is None:
            raise Fault("wrong type", f"has tensors of {storage.kind}, which are not read")
        parts = (offset, *size, *strides)
        if any(type(part) is not int or part < 0 for part in parts) or len(size) != len(strides):
            raise ValueError
        total = 1
        for length, stride in zip(size[::-1], strides[::-1], strict=True):
            if length > 1 and stride != total:
                raise Fault("wrong type", "has a tensor in another order than row-major; not read")
            total *= length
        values = self._numbers(storage, kind)
        if offset + total > len(values) or total > len(values):
            raise Fault("damaged", f"has a tensor of {total} numbers in {len(values)}")
        found = values[offset : offset + total].reshape(size)
        return self._wide(found) if kind == "bfloat16" else found

    def _numbers(self, storage: Storage, kind: str) -> np.ndarray:
        if storage.key not in self.read:
            if not (storage.key.isascii() and storage.key.isdecimal()):
                raise Fault("unsafe", f"has a tensor in the member {storage.key[:40]!r}")
            content = self.archive.read(f"{self.folder}data/{storage.key}")
            self.read[storage.key] = np.frombuffer(content, np.uint8)
        code = "<u2" if kind == "bfloat16" else kind
        numbers, width = self.read[storage.key], np.dtype(code).itemsize
        return numbers[: len(numbers) // width * width].view(code)

    def _wide(self, found: np.ndarray) -> np.ndarray:
        """The upper half of a float32 each."""
        self.room -= 4 * found.size
        if self.room < 0:
            raise Fault("damaged", "has more numbers than the file has room for")
        return (found.astype(np.uint32) << 16).view(np.float32)


def children(value: Any) -> Iterator[Any]:
    """The parts of a container that may hold other things than numbers and text."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        simple = {float, int, bool, str, type(None)}
        if not set(map(type, value)) <= simple:
            yield from value


def tainted(root: Any) -> Mapping[int, str]:
    """By `id`, the containers from which something unread can be reached, and its name."""
    parents: dict[int, list[int]] = {}
    seen = {id(root)}
    queue: deque[Any] = deque([root])
    found: deque[tuple[int, str]] = deque()
    while queue:
        value = queue.popleft()
        if isinstance(value, (Unread, Name)):
            found.append((id(value), value.name))
        for part in children(value):
            if isinstance(part, (dict, list, tuple, Unread, Name)):
                parents.setdefault(id(part), []).append(id(value))
                if id(part) not in seen:
                    seen.add(id(part))
                    queue.append(part)
    names: dict[int, str] = {}
    while found:
        place, name = found.popleft()
        if place not in names:
            names[place] = name
            found.extend((parent, name) for parent in parents.get(place, ()))
    return names
