"""The built-in task: sums to be worked out, with held-out questions that training never sees."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from windage.estimators.errors import BadInput, within

OPERATORS = "+-*"
TRIES = 10_000
Split = Literal["train", "held out"]


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and its answer, both as text."""

    text: str
    answer: str


def questions(
    seed: int,
    split: Split,
    *,
    operators: str = "+",
    operands: int = 2,
    digits: int = 2,
    held_out: float = 0.1,
) -> Iterator[Question]:
    """Questions drawn without end.

    Which split a question belongs to depends on its numbers and operators alone, not on the seed,
    nor on the order of numbers that are only added or only multiplied.

    Args:
        seed: of the draws.
        split: `train` or `held out`.
        operators: to choose from, some of + - *; a product binds first.
        operands: numbers of a question.
        digits: of each number; 1 means 0 to 9, 2 means 10 to 99.
        held_out: share of all questions.

    Raises:
        BadInput: a setting out of range, or a split without questions.

    Example:
        >>> next(questions(0, "held out"))
        Question(text='What is 55 + 84? Answer with a number.', answer='139')
    """
    within(2, 20, operands=operands)
    within(1, 18, digits=digits)
    within(0, 1, held_out=held_out)
    if not operators or set(operators) - set(OPERATORS):
        raise BadInput(f"operators is {operators!r}; allowed: some of {OPERATORS}")
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    return _drawn(random.Random(seed), split, operators, operands, (low, high), held_out)


def _drawn(
    generator: random.Random,
    split: Split,
    operators: str,
    operands: int,
    bounds: tuple[int, int],
    held_out: float,
) -> Iterator[Question]:
    misses = 0
    while misses < TRIES:
        numbers = [generator.randint(*bounds) for _ in range(operands)]
        chosen = [generator.choice(operators) for _ in range(operands - 1)]
        if (_place(numbers, chosen) < held_out) != (split == "held out"):
            misses += 1
            continue
        misses = 0
        words = [str(numbers[0])]
        for operator, number in zip(chosen, numbers[1:], strict=True):
            words += [operator, str(number)]
        text = f"What is {' '.join(words)}? Answer with a number."
        yield Question(text=text, answer=str(value(numbers, chosen)))
    raise BadInput(f"no question is {split} in {TRIES} draws; allowed: a held_out share with some")


def _place(numbers: list[int], chosen: list[str]) -> float:
    """A number from 0 to 1 that stands for the question."""
    same = len(set(chosen)) == 1 and chosen[0] in "+*"
    name = f"{sorted(numbers) if same else numbers} {chosen}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def value(numbers: list[int], chosen: list[str]) -> int:
    """What the numbers come to, products first.

    Example:
        >>> value([2, 3, 4], ["+", "*"]), value([2, 3, 4], ["*", "-"])
        (14, 2)
    """
    terms = [numbers[0]]
    for operator, number in zip(chosen, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)
