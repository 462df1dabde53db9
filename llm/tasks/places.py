"""Which question stands at which place: fixed by the seed, so that a run can be resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

from windage.estimators.errors import BadInput
from windage.llm.tasks.protocol import Question, Split
from windage.llm.verify_worker import digest

TRIES = 10_000
Draw = Callable[[Split, int, int, int], list[Question]]
Make = Callable[[random.Random], tuple[Question, str]]


def share_of(name: str) -> float:
    """A number from 0 to 1 that stands for a name."""
    return int(digest(name), 16) / 2**64


@lru_cache(maxsize=4)
def order(size: int, seed: int, turn: int) -> tuple[int, ...]:
    """Numbers from 0 to size - 1, shuffled anew each turn.

    Example:
        >>> sorted(order(4, 0, 0)), order(9, 0, 0) == order(9, 0, 1)
        ([0, 1, 2, 3], False)
    """
    numbers = list(range(size))
    random.Random(f"{seed} {turn}").shuffle(numbers)
    return tuple(numbers)


def in_turns(listed: Sequence[Question], seed: int, start: int, count: int) -> list[Question]:
    """Questions by place in a list that goes round, in another order each turn."""
    size = len(listed)
    return [
        listed[order(size, seed, place // size)[place % size]]
        for place in range(start, start + count)
    ]


def finite(load: Callable[[Split], Sequence[Question]]) -> Draw:
    """Draw from lists.

    Args:
        load: gives the list of a split, not empty.
    """

    def draw(split: Split, seed: int, start: int, count: int) -> list[Question]:
        return in_turns(load(split), seed, start, count)

    return draw


def endless(make: Make, held_out: float) -> Draw:
    """Draw questions that are made as they are needed, each place for itself.

    Args:
        make: a question from a generator, and the name by which it is held out or not, whatever
            the seed.
        held_out: share of all names.
    """

    def draw(split: Split, seed: int, start: int, count: int) -> list[Question]:
        return [
            _first(make, random.Random(f"{seed} {split} {place}"), split, held_out)
            for place in range(start, start + count)
        ]

    return draw


def _first(make: Make, generator: random.Random, split: Split, held_out: float) -> Question:
    for _ in range(TRIES):
        question, name = make(generator)
        if belongs(name, split, held_out):
            return question
    raise none_of(split)


def belongs(name: str, split: Split, held_out: float) -> bool:
    """Whether a name lies in a split: by the name alone."""
    return (share_of(name) < held_out) == (split == "held out")


def none_of(split: Split) -> BadInput:
    """Say that a split has no question."""
    return BadInput(f"no question is {split}; allowed: a held_out share that leaves some")
