"""Values as strict JSON: numbers that are not finite in a form of the caller's choice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from windage.estimators.errors import BadInput


def spelled(value: float) -> str:
    """A number that is not finite, as a person writes it.

    Example:
        >>> spelled(float("-inf"))
        '-inf'
    """
    return repr(float(value))


def plain(value: object, nonfinite: Callable[[float], Any] = spelled, *, where: str = "it") -> Any:
    """Dictionaries by string, lists, strings, whole numbers, floats and nothing else.

    Args:
        value: tuples become lists.
        nonfinite: what stands for NaN and the infinities.
        where: the value's name in a refusal.

    Raises:
        BadInput: names the place of what is something else.

    Example:
        >>> plain({"a": (1, float("nan"))})
        {'a': [1, 'nan']}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else nonfinite(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise BadInput(f"{where} has the key {name!r}; allowed: text")
        return {n: plain(v, nonfinite, where=f"{where}.{n}") for n, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, nonfinite, where=f"{where}[{n}]") for n, v in enumerate(value)]
    kind = type(value).__name__
    raise BadInput(f"{where} is a {kind}; allowed: text, numbers, true, false, null, lists of them")


def document(value: Any) -> str:
    """JSON of what `plain` gave; floats are read back bit for bit.

    Example:
        >>> document({"a": 0.1})
        '{"a": 0.1}'
    """
    return json.dumps(value, allow_nan=False)
