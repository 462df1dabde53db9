"""Faults and kills at the calls by which a process changes a disk.

Seen are the calls of `os`, those that Python's own files come down to, and files that libraries in
Rust write by themselves: each of these is one call, `native`, whose fault leaves half a file and is
told in the library's own words.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CALLS = (
    *("open", "mkdir", "write", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir"),
    "ftruncate",
)
Fault = Callable[..., object]


real_open = io.open


class Raw(io.FileIO):
    """A file of Python's whose writes are calls of `os`."""

    def write(self, content):
        return os.write(self.fileno(), content)


def as_calls(real):
    """Python's `open`, of which writing is calls of `os`."""

    def opened(
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        if isinstance(file, int) or opener is not None or not set(mode) & set("wax+"):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        kind = mode.replace("b", "").replace("t", "")
        raw = Raw(file, kind, opener=lambda path, flags: os.open(path, flags, 0o666))
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def natives() -> Iterator[tuple[object, str, Callable[..., Path], type[Exception]]]:
    """Functions of libraries in Rust that write a file: where, name, the file, what they raise."""
    if found := sys.modules.get("safetensors.torch"):
        from safetensors import SafetensorError

        yield found, "serialize_file", lambda named, path, **_: Path(path), SafetensorError
    if found := sys.modules.get("transformers.tokenization_utils_tokenizers"):
        name = "_save_pretrained"

        def file(self, save_directory, *arguments, **settings):
            return Path(save_directory) / "tokenizer.json"

        yield found.TokenizersBackend, name, file, Exception


@contextmanager
def seen_by(watch: Callable[..., object]) -> Iterator[None]:
    """Have something in place of every call: it is given the name, the call and the arguments."""
    real = {name: getattr(os, name) for name in CALLS}
    takes = os.supports_dir_fd  # shutil looks functions up among those

    def wrapped(name):
        return lambda *arguments, **settings: watch(name, real[name], *arguments, **settings)

    def native(inner, file, kind):
        def call(*arguments, **settings):
            try:
                return watch("native", inner, *arguments, **settings)
            except OSError as problem:
                file(*arguments, **settings).write_bytes(b"half")
                raise kind(f"{problem.strerror} (os error {problem.errno})") from None

        return call

    with ExitStack() as stack:

        def put(place, name, value):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)

        for name in CALLS:
            put(os, name, wrapped(name))
            if real[name] in takes:
                takes.add(getattr(os, name))
                stack.callback(takes.discard, getattr(os, name))
        for place in (io, builtins):
            put(place, "open", as_calls(real_open))
        for place, name, file, kind in natives():
            put(place, name, native(getattr(place, name), file, kind))
        yield


class Calls:
    """The calls seen so far: their names, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []


@contextmanager
def tampered(at: int = -1, fault: Fault | None = None, *, on: bool = False) -> Iterator[Calls]:
    """Count the calls that change a disk, and put something in place of one of them.

    Args:
        at: which call, counted over all names; -1: none.
        fault: takes the call's name, the real function and the arguments.
        on: in place of every later one as well.
    """
    seen = Calls()

    def watch(name, real, *arguments, **settings):
        seen.names.append(name)
        number = len(seen.names) - 1
        if number == at or (on and number > at >= 0):
            return fault(name, real, *arguments, **settings)
        return real(*arguments, **settings)

    with seen_by(watch):
        yield seen


def failing(number: int) -> Fault:
    """An error of the disk; it names the path where the real one would."""

    def fault(name, real, *arguments, **settings):
        path = arguments[:1] if isinstance(arguments[0], str | os.PathLike) else ()
        raise OSError(number, os.strerror(number), *map(os.fspath, path))

    return fault


def killed(name, real, *arguments, **settings):
    """`kill -9` instead of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


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
