"""The data of a saved file of torch, taken from its opcodes without running anything.

The opcodes build values on a stack.  Plain values are built as such.  A name of code is kept as a
`Name` and never looked up; what a call of a name would make is one of the few results listed in
`MADE`, or `Unread`, which says whose call it was and holds nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from windage.analysis.diagnose.readers.fields import Fault

FLOATS = re.compile(rb"(?:G.{8}){4,1000}", re.DOTALL)
KEYS = (str, int, float, bool, type(None))
BROKEN = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    TypeError,
    ValueError,
)
NUMPY = re.compile(r"[<>|=]?(b1|[iuf][1248])")


@final
@dataclass(frozen=True)
class Name:
    """A name of code, not looked up."""

    name: str


@final
@dataclass(frozen=True)
class Unread:
    """Stands where a call would have put its result."""

    name: str


@final
@dataclass(eq=False)
class Kind:
    """A numeric type of numpy, its byte order to come."""

    code: str


@final
@dataclass(eq=False)
class Array:
    """An array of numpy whose content is to come, and where it was noted."""

    places: list[int] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Storage:
    """Where a tensor's numbers lie in the file."""

    kind: str
    key: str
    size: int


class Machine:
    """A stack, its marks and its notes.

    Args:
        data: the opcodes.
        tensor: makes an array of a storage, an offset, a size and strides.
    """

    def __init__(self, data: bytes, tensor: Callable[..., np.ndarray]) -> None:
        self.data, self.tensor, self.at = data, tensor, 0
        self.room = 4 * len(data) + 2**16
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.notes: dict[int, Any] = {}

    def run(self) -> Any:
        """The value that the opcodes end with.

        Raises:
            Fault: opcodes that make no sense, or that are not read.
        """
        try:
            return self._run()
        except BROKEN:
            raise Fault("damaged", f"has damaged data near byte {self.at}") from None

    def _run(self) -> Any:
        data, stack = self.data, self.stack
        push = stack.append
        while (op := data[self.at]) != 0x2E:
            at = self.at + 1
            if op == 0x4B:
                push(data[at])
                self.at = at + 1
            elif op == 0x4D:
                push(data[at] | data[at + 1] << 8)
                self.at = at + 2
            elif op == 0x4A:
                push(struct.unpack_from("<i", data, at)[0])
                self.at = at + 4
            elif op == 0x47:
                self._floats()
            else:
                self.at = at
                step = STEPS.get(op)
                if step is None:
                    raise Fault("unsafe", f"has the opcode {op:#x}, which is not read")
                step(self)
        return stack.pop()

    def _floats(self) -> None:
        run = FLOATS.match(self.data, self.at)
        if run is None:
            self.stack.append(struct.unpack_from(">d", self.data, self.at + 1)[0])
            self.at += 9
            return
        cells = np.frombuffer(run[0], np.uint8).reshape(-1, 9)[:, 1:]
        self.stack.extend(np.ascontiguousarray(cells).view(">f8").ravel().tolist())
        self.at = run.end()

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise ValueError
        found, self.at = self.data[self.at : end], end
        return found

    def count(self, form: str) -> int:
        """The next whole number."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        """The next line."""
        end = self.data.index(b"\n", self.at)
        found, self.at = self.data[self.at : end], end + 1
        return found.decode()

    def since_mark(self) -> list[Any]:
        """What lies above the last mark."""
        mark = self.marks.pop()
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def note(self, place: int) -> None:
        """Remember the top."""
        top = self.stack[-1]
        if isinstance(top, Array):
            top.places.append(place)
        self.notes[place] = top

    def spend(self, size: int) -> None:
        """Count the bytes that calls make of what is there already.

        Raises:
            Fault: more than the file has room for.
        """
        self.room -= size
        if self.room < 0:
            raise Fault("damaged", "has calls that make more than the file has room for")

    def fill(self, pairs: Sequence[Any]) -> None:
        """Put pairs of key and value into the dictionary on top."""
        target = self.stack[-1]
        if isinstance(target, Unread):
            return
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(key, (Name, Unread)):
                raise Fault("unsafe", f"holds {key.name}, which is not read")
            if type(key) not in KEYS:
                raise ValueError
            target[key] = value

    def extend(self, entries: Sequence[Any]) -> None:
        """Put entries at the end of the list on top."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(entries)
        elif not isinstance(target, Unread):
            raise ValueError

    def call(self) -> None:
        """What calling a name would make, where that is known; else nothing."""
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, (Name, Unread)) or not isinstance(arguments, (tuple, Unread)):
            raise ValueError
        make = MADE.get(name.name) if isinstance(name, Name) else None
        if make is not None and isinstance(arguments, tuple):
            self.stack.append(make(self, *arguments))
        else:
            self.stack.append(Unread(name.name))

    def build(self) -> None:
        """Fill the array or the numeric type on top; what else would be filled stays unread."""
        state, top = self.stack.pop(), self.stack.pop()
        if isinstance(top, Kind):
            top.code = _numeric(f"{state[1]}{top.code.lstrip('<>|=')}")
        elif isinstance(top, Array):
            _, shape, kind, fortran, content = state
            if fortran or not isinstance(kind, Kind) or type(content) is not bytes:
                raise ValueError
            value = np.frombuffer(content, np.dtype(kind.code)).reshape(shape)
            for place in top.places:
                self.notes[place] = value
            top = value
        else:
            top = Unread(top.name if isinstance(top, (Name, Unread)) else type(top).__name__)
        self.stack.append(top)

    def stored(self) -> None:
        """A reference to numbers elsewhere in the file."""
        match self.stack.pop():
            case ("storage", Name(name=kind), str(key), str(), int(size)):
                self.stack.append(Storage(kind, key, size))
            case _:
                raise ValueError

    def named(self) -> None:
        """A name of code given by two texts on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError
        self.stack.append(_name(module, name))

    def object_of(self, parts: int) -> None:
        """An object of a class: never made."""
        del self.stack[-parts + 1 :]
        name = self.stack.pop()
        self.stack.append(Unread(name.name if isinstance(name, (Name, Unread)) else "an object"))


def _name(module: str, name: str) -> Name:
    whole = f"{module}.{name}"
    return Name(whole if whole.isascii() and whole.isprintable() else ascii(whole))


def _numeric(code: str) -> str:
    if not NUMPY.fullmatch(code):
        raise ValueError
    return code


def _tensor(machine: Machine, storage: Storage, offset: int, *rest: Any) -> np.ndarray:
    size, strides = rest[:2]
    if not isinstance(storage, Storage):
        raise ValueError
    return machine.tensor(storage, offset, size, strides)


def _scalar(machine: Machine, kind: Kind, content: bytes) -> float | int | bool:
    found: float | int | bool = np.frombuffer(content, np.dtype(kind.code))[0].item()
    return found


def _encode(machine: Machine, words: str, name: str) -> bytes:
    if name != "latin1":
        raise ValueError
    machine.spend(len(words))
    return words.encode("latin1")


def _size(machine: Machine, sizes: tuple[int, ...]) -> tuple[int, ...]:
    machine.spend(8 * len(sizes))
    return tuple(sizes)


def _array(machine: Machine, *rest: Any) -> Array:
    return Array()


ARRAYS: Mapping[str, Callable[..., Any]] = {"scalar": _scalar, "_reconstruct": _array}
MADE: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda machine: {},
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.Size": _size,
    "_codecs.encode": _encode,
    "numpy.dtype": lambda machine, code, *rest: Kind(_numeric(code)),
    **{f"numpy.core.multiarray.{name}": make for name, make in ARRAYS.items()},
    **{f"numpy._core.multiarray.{name}": make for name, make in ARRAYS.items()},
}


def _text(form: str) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(m.count(form)).decode(errors="surrogatepass"))


def _bytes(form: str) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(m.count(form)))


def _whole(form: str) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        size = m.count(form)
        if size > 16:
            raise ValueError
        m.stack.append(int.from_bytes(m.take(size), "little", signed=True))

    return push


def _plain(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _tuple(size: int) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        if len(m.stack) < size:
            raise ValueError
        m.stack[-size:] = [tuple(m.stack[-size:])]

    return push


def _two(m: Machine) -> list[Any]:
    found = m.stack[-2:]
    del m.stack[-2:]
    return found


STEPS: Mapping[int, Callable[[Machine], Any]] = {
    0x80: lambda m: m.take(1),
    0x95: lambda m: m.take(8),
    0x28: lambda m: m.marks.append(len(m.stack)),
    0x30: lambda m: m.stack.pop(),
    0x31: lambda m: m.since_mark(),
    0x32: lambda m: m.stack.append(m.stack[-1]),
    0x4E: _plain(None),
    0x88: _plain(True),
    0x89: _plain(False),
    0x8A: _whole("<B"),
    0x8B: _whole("<i"),
    0x58: _text("<I"),
    0x8C: _text("<B"),
    0x8D: _text("<Q"),
    0x42: _bytes("<I"),
    0x43: _bytes("<B"),
    0x8E: _bytes("<Q"),
    0x5D: lambda m: m.stack.append([]),
    0x7D: lambda m: m.stack.append({}),
    0x29: _plain(()),
    0x74: lambda m: m.stack.append(tuple(m.since_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x61: lambda m: m.extend([m.stack.pop()]),
    0x65: lambda m: m.extend(m.since_mark()),
    0x73: lambda m: m.fill(_two(m)),
    0x75: lambda m: m.fill(m.since_mark()),
    0x71: lambda m: m.note(m.count("<B")),
    0x72: lambda m: m.note(m.count("<I")),
    0x94: lambda m: m.note(len(m.notes)),
    0x68: lambda m: m.stack.append(m.notes[m.count("<B")]),
    0x6A: lambda m: m.stack.append(m.notes[m.count("<I")]),
    0x63: lambda m: m.stack.append(_name(m.line(), m.line())),
    0x93: lambda m: m.named(),
    0x52: lambda m: m.call(),
    0x62: lambda m: m.build(),
    0x51: lambda m: m.stored(),
    0x81: lambda m: m.object_of(2),
    0x92: lambda m: m.object_of(3),
}
