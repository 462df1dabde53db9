"""What every task gives: questions without end, as a prompt to ask and a verdict on a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

from windage.llm.verify import Verdict

Split = Literal["train", "held out"]


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and its answer, both as text.

    Args:
        id: the same wherever the question is drawn again, and of no other question of the task;
            a group's name is made of it.
        text: what is asked; the chat template, where there is one, goes around it.
        answer: the right one, as the task's verifier takes it.
    """

    id: str
    text: str
    answer: str


@runtime_checkable
class Task(Protocol):
    """Questions by their place, so that a run can go on where it stopped."""

    name: str

    def questions(self, split: Split, seed: int, start: int, count: int) -> list[Question]:
        """Questions `start` to `start + count - 1` of a split in the order that the seed gives.

        A finite split goes round, newly shuffled each time; held-out questions never occur in
        training.
        """
        ...

    def judge(self, pairs: Sequence[tuple[Question, str]], cut: Sequence[bool]) -> list[Verdict]:
        """Verdicts on responses, which are never trusted.

        Args:
            pairs: a question and the text of a response to it.
            cut: whether a limit ended the response; its answer has at best a fault of format.
        """
        ...

    def alike(self, answers: Sequence[str]) -> list[int]:
        """Which of the answers that verdicts tell of are the same answer, spelled in two ways.

        Returns:
            For each the place of the first that is the same.
        """
        ...

    def close(self) -> None:
        """End the verifier's processes."""
        ...
