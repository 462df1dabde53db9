"""Checkpoints that are there as a whole or not at all, and the claim of a run on its folder.

    checkpoint-00000012/
        manifest.json          schema, step, groups of tensors, size and SHA-256 of every file
        state.json             plain values
        <group>.safetensors    named tensors: of the optimizer, of the reference, ...
        ...                    what a callback wrote: a model and its tokenizer, say

A checkpoint is written once and never again.  Older ones go once a newer one is in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from windage.estimators.errors import BadInput, within
from windage.llm import tensors as tensor_file
from windage.llm.durable import made, new_folder, part, remove, tidy
from windage.llm.plain import document, plain

SCHEMA = "windage/checkpoint/1"
MANIFEST, STATE, LOCK = "manifest.json", "state.json", "run.lock"
NAME = re.compile(r"checkpoint-(\d{8})")
GROUP = re.compile(r"[a-z][a-z_]*")
TAG = "$float"

_held: set[int] = set()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that was read.

    Args:
        path: its folder.
        step: its number.
        tensors: groups of named tensors, on the CPU.
        state: plain values; tuples came back as lists.
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def path_of(folder: Path, step: int) -> Path:
    """The folder of a checkpoint.

    Example:
        >>> path_of(Path("run"), 12).name
        'checkpoint-00000012'
    """
    return folder / f"checkpoint-{step:08d}"


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in ascending order."""
    tidy(folder)
    found = (NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def save(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint; it is there, on the disk, when this returns, and before it is not.

    Args:
        folder: made where it is missing.
        step: after that of every checkpoint there.
        tensors: groups by name; each is a file.
        state: text, numbers, lists and dictionaries of them; numbers that are not finite as well.
        keep: checkpoints that stay, this one included.
        also: writes more files into the folder that it is given.

    Raises:
        BadInput: names the path that is not written, or the value that does not fit.
    """
    within(0, 99_999_999, step=step)
    within(1, 99_999_999, keep=keep)
    for group in tensors:
        if not GROUP.fullmatch(group):
            raise BadInput(f"group {group!r}; allowed: small letters and _")
    text = document(plain(state, lambda value: {TAG: repr(value)}, where="state"))
    path = path_of(folder, step)
    if (there := steps(folder)) and there[-1] > step:
        raise BadInput(f"{str(path)!r} is before step {there[-1]}, which is there; allowed: after")
    try:
        made(folder)
    except OSError as problem:
        raise BadInput(
            f"{str(folder)!r}: {problem.strerror}; allowed: a folder that can be written to"
        ) from None
    with new_folder(path) as beside:
        if also is not None:
            _also(beside, also)
        for group, named in tensors.items():
            with part(beside / f"{group}.safetensors") as sink:
                tensor_file.write(sink, named)
        with part(beside / STATE) as sink:
            sink.write(text.encode())
        about = {"schema": SCHEMA, "step": step, "groups": list(tensors), "files": _files(beside)}
        with part(beside / MANIFEST) as sink:
            sink.write(json.dumps(about, indent=1).encode())
    prune(folder, keep)
    return path


def _also(folder: Path, write: Callable[[Path], None]) -> None:
    """Let others write; what libraries in Rust say of the disk is no OSError."""
    from safetensors import SafetensorError

    try:
        write(folder)
    except Exception as problem:
        if type(problem) not in (SafetensorError, Exception):
            raise
        raise OSError(f"{problem}") from None


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest: also what a run that died then did not come to remove.

    Raises:
        BadInput: names one that cannot be removed.
    """
    for old in steps(folder)[:-keep]:
        remove(path_of(folder, old))


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file, by its path inside the folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _hash(path)}
        for path in found
    }


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest.

    Returns:
        The manifest.

    Raises:
        BadInput: names the file that is missing or damaged.
    """
    about = _json(path / MANIFEST)
    match = NAME.fullmatch(path.name)
    try:
        groups, files, known = about["groups"], about["files"], about["schema"] == SCHEMA
        wanted = {n: (one["bytes"], one["sha256"]) for n, one in files.items()}
        named = {STATE, *(f"{group}.safetensors" for group in groups)}
        fits = match is None or about["step"] == int(match[1])
    except (KeyError, TypeError, AttributeError):
        raise damaged(path / MANIFEST, "entries are missing") from None
    if not known or not fits or not named <= set(wanted):
        raise damaged(path / MANIFEST, f"schema {about['schema']!r}, step {about['step']!r}")
    there = {one.relative_to(path).as_posix(): one for one in path.rglob("*") if one.is_file()}
    for name, (size, digest) in wanted.items():
        if name not in there:
            raise damaged(path / name, "it is missing")
        if there[name].stat().st_size != size or _hash(there[name]) != digest:
            raise damaged(path / name, "its content is not what was written")
    return about


def damaged(path: Path, what: str) -> BadInput:
    """The refusal of a file."""
    return BadInput(f"{str(path)!r} is damaged: {what}; allowed: a checkpoint that is whole")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_hook=_untagged, parse_constant=_refused)
    except OSError as problem:
        raise damaged(path, problem.strerror or "it cannot be read") from None
    except (ValueError, RecursionError) as problem:
        raise damaged(path, str(problem)) from None


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _untagged(entries: dict[str, Any]) -> Any:
    return float(entries[TAG]) if entries.keys() == {TAG} else entries


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        BadInput: names the file that is missing or damaged.
    """
    about = verify(path)
    found = {group: tensor_file.read(path / f"{group}.safetensors") for group in about["groups"]}
    return Checkpoint(path=path, step=about["step"], tensors=found, state=_json(path / STATE))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def latest(folder: Path, log: Callable[[str], None] = _say) -> Path | None:
    """The newest checkpoint that is whole; None where there is none at all.

    Args:
        log: told of each newer one that is damaged; standard error.

    Raises:
        BadInput: there are checkpoints and all are damaged; names the newest file that is.
    """
    problems = []
    for step in reversed(steps(folder)):
        path = path_of(folder, step)
        try:
            verify(path)
        except BadInput as problem:
            problems.append(problem)
            continue
        for one in problems:
            log(f"{one}; {path.name} is taken instead")
        return path
    if problems:
        raise problems[0]
    return None


def rewind(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, whole or damaged: a run that goes on writes them again.

    Raises:
        BadInput: names one that cannot be removed.
    """
    for later in steps(folder):
        if later > step:
            remove(path_of(folder, later))


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Have a run's folder for oneself; what a run that died there left unfinished is taken away.

    The lock is the kernel's: it goes with the process that holds it, however that ends, and its
    children do not inherit it.

    Args:
        folder: made where it is missing.

    Raises:
        BadInput: another run has it, or it cannot be written to.
    """
    path = folder / LOCK
    try:
        made(folder)
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as problem:
        raise BadInput(
            f"{str(path)!r}: {problem.strerror}; allowed: a folder that can be written to"
        ) from None
    _held.add(lock)
    try:
        _lock(folder, lock)
        tidy(folder)
        yield
    finally:
        if lock in _held:
            _held.discard(lock)
            os.close(lock)


def _lock(folder: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
        raise BadInput(
            f"{str(folder)!r} belongs to a run that goes on (process {owner}); "
            "allowed: another folder, or this one when that run has ended"
        ) from None
    except OSError as problem:
        raise BadInput(
            f"{str(folder / LOCK)!r} is not locked: {problem.strerror}; allowed: a folder with "
            "room, on a file system with locks"
        ) from None


def _let_go() -> None:
    """A child closes the locks that it would otherwise hold after its parent's death."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
