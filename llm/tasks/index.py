"""Tasks by name, and their settings from words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from windage.estimators.errors import BadInput, unknown
from windage.llm.tasks.arithmetic import arithmetic
from windage.llm.tasks.judgment import verifier
from windage.llm.tasks.protocol import Task
from windage.llm.tasks.reasoning import reasoning_gym
from windage.llm.tasks.word_problems import gsm8k, jsonl, math

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "math": math,
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
    "verifier": verifier,
}
KINDS = {"str": "text", "int": "a whole number", "float": "a number"}


def get(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """A task.

    Args:
        name: of the task.
        settings: its own, as values or as words.

    Raises:
        BadInput: an unknown task or setting, named with the nearest valid one, or a value of
            another kind.

    Example:
        >>> get("arithmetic", {"digits": "1", "operators": "*"}).name
        'arithmetic'
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    known = dict(inspect.signature(TASKS[name]).parameters)
    free = known.pop("settings", None) is not None
    found = {}
    for key, value in (settings or {}).items():
        if key in known:
            found[key] = _fitting(name, key, value, type(known[key].default).__name__)
        elif free:
            found[key] = guessed(value) if isinstance(value, str) else value
        else:
            raise unknown(f"setting of task {name}", key, known)
    return TASKS[name](**found)


def _fitting(task: str, key: str, value: Any, kind: str) -> Any:
    """A value as what its setting takes."""
    try:
        if isinstance(value, str) and kind != "str":
            return {"int": int, "float": float}[kind](value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "float" and number:
            return float(value)
        if type(value).__name__ == kind:
            return value
    except ValueError:
        pass
    raise BadInput(f"task {task}: {key} is {str(value)[:60]!r}; allowed: {KINDS[kind]}")


def guessed(text: str) -> Any:
    """A word as a number or a truth value where it is one.

    Example:
        >>> guessed("3"), guessed("0.5"), guessed("true"), guessed("+-")
        (3, 0.5, True, '+-')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """The name and settings of NAME:key=value,...

    Raises:
        BadInput: a part without a value, or a key that is there twice.

    Example:
        >>> parse("arithmetic:digits=2,operators=+-")
        ('arithmetic', {'digits': '2', 'operators': '+-'})
    """
    name, colon, rest = text.partition(":")
    found: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals or key in found:
            what = "is there twice" if equals else "has no value"
            raise BadInput(f"task {text!r}: {key!r} {what}; allowed: NAME:key=value,...")
        found[key] = value
    return name, found
