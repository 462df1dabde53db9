"""Questions from files of JSON lines, or from a data set of the hub in the same fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windage.estimators.errors import BadInput
from windage.llm.tasks.protocol import Question, Split

Record = Mapping[str, Any]
# Records, each with the words that say where it stands.
Source = Callable[[], Iterable[tuple[str, Record]]]
# A question of a record, and the name that must not be in both splits.
Reading = Callable[[Record], tuple[Question, str]]


def lines_of(path: Path) -> Iterator[tuple[str, Record]]:
    """The objects of a file of JSON lines; empty lines are passed over.

    Raises:
        BadInput: no such file, or a line that is no JSON object; names file and line.
    """
    allowed = "a file of JSON objects, one a line"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{str(path)!r}, line {number}"
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as problem:
                    why = (str(problem).splitlines() or ["too deep"])[0]
                    raise BadInput(f"{where}: no JSON ({why}); allowed: {allowed}") from None
                if not isinstance(found, dict):
                    raise BadInput(f"{where}: {type(found).__name__}; allowed: {allowed}")
                yield where, found
    except OSError as problem:
        raise BadInput(f"{str(path)!r}: {problem.strerror}; allowed: {allowed}") from None


def hub(name: str, parts: Sequence[str | None], split: str) -> Iterator[tuple[str, Record]]:
    """The rows of a data set of the hub.

    Args:
        name: of the data set.
        parts: configurations, one after another; None: the only one.
        split: as the data set calls it.

    Raises:
        BadInput: the package is not installed, or the data set is not reached.
    """
    allowed = "train=FILE,held_out=FILE with JSON lines in the same fields"
    if find_spec("datasets") is None:
        raise BadInput(
            f"data set {name!r} needs the package datasets, which is not installed; "
            f"allowed: pip install 'windage[hub]', or {allowed}"
        )
    datasets = import_module("datasets")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a refusal is one line
    for part in parts:
        try:
            data = datasets.load_dataset(name, part, split=split)
        except Exception as problem:
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise BadInput(f"data set {name!r} is not reached: {why}; allowed: {allowed}") from None
        for number, row in enumerate(data):
            yield f"{name}{'/' * bool(part)}{part or ''}, {split} {number}", row


def text_of(record: Record, field: str, *, numbers: bool = False) -> str:
    """A field that holds text.

    Args:
        numbers: whether it may hold a number as well.

    Raises:
        BadInput: the field is missing or holds something else.
    """
    words = "text or a number" if numbers else "text"
    if field not in record:
        raise BadInput(f"no field {field!r} (there is: {', '.join(record)}); allowed: {words}")
    found = record[field]
    if numbers and isinstance(found, int | float) and not isinstance(found, bool):
        found = str(found)
    if not isinstance(found, str) or not found.strip():
        raise BadInput(f"{field} is {json.dumps(found)[:40]}; allowed: {words}")
    return found.strip()


def asked(question: str, ask: str) -> str:
    """A question with the words that say how to answer below it."""
    return f"{question}\n{ask}" if ask else question


def splits(
    task: str, sources: Mapping[Split, Source], reading: Reading
) -> Callable[[Split], list[Question]]:
    """Lists of the two splits, read when first asked for.

    A question that is there twice is asked once, and one that is held out is no question of
    training, whatever the files say.

    Args:
        task: its name.
        sources: of the splits that there are.
        reading: of a record.
    """

    def read(split: Split) -> dict[str, tuple[Question, str]]:
        found: dict[str, tuple[Question, str]] = {}
        for where, record in sources[split]():
            try:
                question, name = reading(record)
            except BadInput as problem:
                raise BadInput(f"{where}: {problem}") from None
            found.setdefault(question.id, (question, " ".join(name.casefold().split())))
        return found

    @cache
    def names_held_out() -> frozenset[str]:
        return frozenset(name for _, name in read("held out").values())

    @cache
    def load(split: Split) -> list[Question]:
        setting = split.replace(" ", "_")
        if split not in sources:
            raise BadInput(f"task {task} has no {split} questions; allowed: {setting}=FILE")
        taken = names_held_out() if split == "train" and "held out" in sources else frozenset()
        found = [question for question, name in read(split).values() if name not in taken]
        if not found:
            rest = " that is not held out as well" * bool(taken)
            raise BadInput(f"{setting} of task {task} has no question{rest}; allowed: one or more")
        return found

    return load


def from_files(train: str, held_out: str) -> dict[Split, Source]:
    """Sources of the splits whose file is named."""
    named: tuple[tuple[Split, str], ...] = (("train", train), ("held out", held_out))
    return {split: reader(path) for split, path in named if path}


def reader(path: str) -> Source:
    """The source that reads a file."""
    return lambda: lines_of(Path(path))
