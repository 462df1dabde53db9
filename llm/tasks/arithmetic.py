"""The built-in task: sums to be worked out, with held-out questions that training never sees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import product

from windage.estimators.errors import BadInput, within
from windage.llm.tasks.checked import Checked
from windage.llm.tasks.places import belongs, endless, finite, none_of
from windage.llm.tasks.protocol import Question, Split

OPERATORS = "+-*"
# So many questions are listed, and each is asked once before any is asked again.
LISTED = 20_000


def arithmetic(
    *,
    operators: str = "+",
    operands: int = 2,
    digits: int = 2,
    held_out: float = 0.1,
    ask: str = "Answer with a number.",
    marker: str = "",
) -> Checked:
    """Sums, differences and products of whole numbers.

    Which split a question belongs to depends on its numbers and operators alone, not on the seed,
    nor on the order of numbers that are only added or only multiplied.

    Args:
        operators: to choose from, some of + - *; a product binds first.
        operands: numbers of a question.
        digits: of each number; 1 means 0 to 9, 2 means 10 to 99.
        held_out: share of all questions.
        ask: words after the question.
        marker: words that the answer must follow; empty: none.

    Raises:
        BadInput: a setting out of range.

    Example:
        >>> arithmetic().questions("held out", 0, 0, 1)[0].text
        'What is 48 + 48? Answer with a number.'
    """
    within(2, 20, operands=operands)
    within(1, 18, digits=digits)
    within(0, 1, held_out=held_out)
    if not operators or set(operators) - set(OPERATORS) or len(set(operators)) < len(operators):
        raise BadInput(f"operators is {operators!r}; allowed: some of {OPERATORS}, each once")
    numbers = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
    if len(numbers) ** operands * len(operators) ** (operands - 1) <= LISTED:

        @cache
        def load(split: Split) -> list[Question]:
            signs = list(product(operators, repeat=operands - 1))
            every = ((n, s) for n in product(numbers, repeat=operands) for s in signs)
            chosen = [
                _question(n, s, ask) for n, s in every if belongs(_name(n, s), split, held_out)
            ]
            if not chosen:
                raise none_of(split)
            return chosen

        return Checked("arithmetic", finite(load), "stated", marker=marker)

    def make(generator: random.Random) -> tuple[Question, str]:
        drawn = [generator.randint(numbers[0], numbers[-1]) for _ in range(operands)]
        signs = [generator.choice(operators) for _ in drawn[1:]]
        return _question(drawn, signs, ask), _name(drawn, signs)

    return Checked("arithmetic", endless(make, held_out), "stated", marker=marker)


def _question(numbers: Sequence[int], signs: Sequence[str], ask: str) -> Question:
    words = [str(numbers[0])]
    for sign, number in zip(signs, numbers[1:], strict=True):
        words += [sign, str(number)]
    text = f"What is {' '.join(words)}? {ask}".rstrip()
    return Question(id="".join(words), text=text, answer=str(value(numbers, signs)))


def _name(numbers: Sequence[int], signs: Sequence[str]) -> str:
    """The same for questions that differ in the order of numbers only added or only multiplied."""
    same = len(set(signs)) == 1 and signs[0] in "+*"
    return f"{sorted(numbers) if same else list(numbers)} {list(signs)}"


def value(numbers: Sequence[int], signs: Sequence[str]) -> int:
    """What the numbers come to, products first.

    Example:
        >>> value([2, 3, 4], ["+", "*"]), value([2, 3, 4], ["*", "-"])
        (14, 2)
    """
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)
