"""Compiled functions, and a queue of events kept as a binary heap in two arrays."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any, TypeVar, cast

import numba
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile on the first call and keep the result beside the module for later processes.

    Checks of shapes that tests wrap around a function are taken off: a compiler cannot read them.
    The cache looks at the file of a function only: after a change here, touch engine.py as well.
    """
    bare = unwrap(function)
    # Nothing is allocated here, so arrays need no counts of references: half the time of the loop.
    settings: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
    try:
        made: Any = numba.njit(cache=True, **settings)(bare)
    except RuntimeError:  # no folder for the cache can be written to
        made = numba.njit(**settings)(bare)
    return cast(F, made)


@compiled
def push(when: NDArray[Any], what: NDArray[Any], size: int, time: float, item: int) -> None:
    """Add an event to a heap that holds `size` of them; earlier first, then smaller."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if when[parent] < time or (when[parent] == time and what[parent] < item):
            break
        when[child], what[child] = when[parent], what[parent]
        child = parent
    when[child], what[child] = time, item


@compiled
def pop(when: NDArray[Any], what: NDArray[Any], size: int) -> None:
    """Take the first event off a heap that holds `size` of them."""
    settle(when, what, size - 1, 0, when[size - 1], what[size - 1])


@compiled
def settle(
    when: NDArray[Any], what: NDArray[Any], size: int, place: int, time: float, item: int
) -> None:
    """Put an event at a place of a heap of `size`, or as far below it as it belongs."""
    parent = place
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            when[right] < when[child] or (when[right] == when[child] and what[right] < what[child])
        ):
            child = right
        if time < when[child] or (time == when[child] and item < what[child]):
            break
        when[parent], what[parent] = when[child], what[child]
        parent = child
    when[parent], what[parent] = time, item


@compiled
def heapify(when: NDArray[Any], what: NDArray[Any], size: int) -> None:
    """Make a heap of the first `size` events."""
    for place in range(size // 2 - 1, -1, -1):
        settle(when, what, size, place, when[place], what[place])
