"""A run's folder as data: records of steps, evaluations, samples, configuration.

A run may be going on while its folder is read: a last line without an end is left out, a record of
a step that is there twice counts as it was written last, and what cannot be read is counted and
named, never an end.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from windage.estimators.errors import BadInput

Record = Mapping[str, Any]
# Samples kept of the first step and of the last ones.
EARLY, LATE = 3, 6


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What a folder holds.

    Args:
        name: apart from those of the runs beside it.
        folder: where it was read.
        config: resolved; empty where it is missing.
        versions: of packages.
        inputs: SHA-256 of the files that the run read.
        card: of the recipe, from before the run; None: there is none.
        steps: a record a step, in order, of numbers alone.
        evaluations: likewise, of held-out questions.
        samples: some of the first step and of the last.
        hashes: SHA-256 of the files read.
        notes: what could not be read.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    inputs: dict[str, Any]
    card: dict[str, Any] | None
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    samples: list[dict[str, Any]]
    hashes: dict[str, str]
    notes: list[str]

    def series(self, figure: str) -> tuple[list[int], list[float]]:
        """Steps at which a figure was recorded, and its values."""
        return series(self.steps, figure)


def series(records: Sequence[Mapping[str, float]], figure: str) -> tuple[list[int], list[float]]:
    """Steps at which some records have a figure, and its values.

    Example:
        >>> series([{"step": 1, "a": 0.5}, {"step": 2}], "a")
        ([1], [0.5])
    """
    found = [(int(r["step"]), r[figure]) for r in records if figure in r]
    return [step for step, _ in found], [value for _, value in found]


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart.

    Example:
        >>> names([Path("/x/a/run"), Path("/x/b/run")])
        ['a/run', 'b/run']
    """
    parts = [folder.resolve().parts for folder in folders]
    for size in range(1, max((len(p) for p in parts), default=1)):
        found = ["/".join(p[-size:]) for p in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{n + 1}: {folder}" for n, folder in enumerate(folders)]


def lines(content: bytes, name: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Records of a file of JSON lines; what is none is counted in the notes."""
    whole, _, torn = content.rpartition(b"\n")
    if torn.strip():
        notes.append(f"{name}: a last line without its end is left out")
    bad: list[int] = []
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and _step(record) is not None:
            yield record
        else:
            bad.append(number)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        notes.append(f"{name}: line {bad[0]}{more} holds no record of a step and is left out")


def _step(record: Mapping[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _numbers(records: Iterator[dict[str, Any]]) -> list[dict[str, float]]:
    """Finite numbers by step, in order; a step that is there twice as it was written last."""
    found = {
        record["step"]: {
            key: value
            for key, value in record.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
        }
        for record in records
    }
    return [found[step] for step in sorted(found)]


def _some(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the first step's, and the last ones."""
    if len(samples) <= EARLY + LATE:
        return samples
    return [*samples[:EARLY], *samples[-LATE:]]


def finite(value: Any) -> Any:
    """The same with texts in place of what JSON does not have.

    Example:
        >>> finite({"a": [float("inf"), 1]})
        {'a': ['inf', 1]}
    """
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def read(folder: Path, name: str) -> Run:
    """Read a run's folder.

    Raises:
        BadInput: it holds no run, or one of its files cannot be opened.
    """
    notes: list[str] = []
    hashes: dict[str, str] = {}

    def content(file: str) -> bytes:
        try:
            found = (folder / file).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as problem:
            raise BadInput(
                f"{str(folder / file)!r} cannot be read: {problem.strerror}; allowed: a run's file"
            ) from None
        hashes[file] = hashlib.sha256(found).hexdigest()
        return found

    def json_of(file: str) -> Any:
        text = content(file)
        try:
            found = json.loads(text) if text else None
        except (ValueError, RecursionError):
            found = None
        if text and not isinstance(found, dict):
            notes.append(f"{file} holds no JSON object and is left out")
        return finite(found) if isinstance(found, dict) else None

    def records(file: str) -> Iterator[dict[str, Any]]:
        return lines(content(file), file, notes)

    try:
        config = finite(tomllib.loads(content("config.toml").decode()))
    except (ValueError, RecursionError):
        notes.append("config.toml holds no TOML and is left out")
        config = {}
    found = Run(
        name=name,
        folder=folder,
        config=config,
        versions=json_of("versions.json") or {},
        inputs=json_of("inputs.json") or {},
        card=json_of("card.json"),
        steps=_numbers(records("metrics.jsonl")),
        evaluations=_numbers(records("evaluate.jsonl")),
        samples=finite(_some(list(records("samples.jsonl")))),
        hashes=hashes,
        notes=notes,
    )
    if not {"config.toml", "metrics.jsonl"} & set(hashes):
        raise BadInput(f"{str(folder)!r} holds no run; allowed: a folder that windage train made")
    return found
