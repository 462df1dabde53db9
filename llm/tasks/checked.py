"""A task made of two parts: where its questions come from, and how a response is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from windage.estimators.errors import within
from windage.llm.tasks.places import Draw
from windage.llm.tasks.protocol import Question, Split
from windage.llm.verify import Limits, Pool, Verdict, after_cut, check_kind
from windage.llm.verify_worker import BY_VALUE, DIGESTED

WHOLE = re.compile(r"-?\d+")


@final
class Checked:
    """Questions drawn by one function, responses checked in a pool of processes.

    The processes start with the first judgment.

    Args:
        name: of the task.
        draw: questions by split, seed and place.
        kind: of check.
        marker: words that the answer must follow; what stands after the last of them is checked,
            and a response without them is invalid.  Empty: the whole response is checked.
        workers: processes.
        limits: of each check.

    Raises:
        BadInput: an unknown kind, or one whose package is not installed.
    """

    def __init__(
        self,
        name: str,
        draw: Draw,
        kind: str,
        *,
        marker: str = "",
        workers: int = 2,
        limits: Limits | None = None,
    ) -> None:
        check_kind(kind)
        self.name, self._draw, self._kind, self._marker = name, draw, kind, marker
        self._workers, self._limits = workers, limits
        self._pool: Pool | None = None

    def questions(self, split: Split, seed: int, start: int, count: int) -> list[Question]:
        """Questions `start` to `start + count - 1` of a split in the order that the seed gives."""
        within(0, 2**62, start=start, count=count)
        return self._draw(split, seed, start, count)

    def judge(self, pairs: Sequence[tuple[Question, str]], cut: Sequence[bool]) -> list[Verdict]:
        """Verdicts on responses, in their order."""
        parts = [
            text.rpartition(self._marker) if self._marker else ("", " ", text) for _, text in pairs
        ]
        marked = [n for n, (_, found, _) in enumerate(parts) if found]
        checked = self._checked([(parts[n][2], pairs[n][0].answer) for n in marked])
        verdicts = [Verdict(word="invalid", stopped=None, seconds=0.0)] * len(pairs)
        for n, verdict in zip(marked, checked, strict=True):
            verdicts[n] = verdict
        return [after_cut(v) if c else v for v, c in zip(verdicts, cut, strict=True)]

    def alike(self, answers: Sequence[str]) -> list[int]:
        """For each answer the place of the first that is the same.

        A check that compares by value is asked, but for spellings that are equal and for two whole
        numbers; of other checks equal answers are spelled alike.
        """
        found: list[int] = []
        for n, answer in enumerate(answers):
            firsts = list(dict.fromkeys(found))
            same = self._same(answer, [answers[first] for first in firsts])
            found.append(next((k for k, yes in zip(firsts, same, strict=True) if yes), n))
        return found

    def _same(self, answer: str, others: Sequence[str]) -> list[bool]:
        """Whether an answer is each of the others."""
        found = [other == answer for other in others]
        if any(found) or self._kind not in BY_VALUE:
            return found
        asked = [n for n, other in enumerate(others) if not _plainly_apart(answer, other)]
        text = BY_VALUE[self._kind](answer)
        verdicts = self._checked([(text, others[n]) for n in asked])
        for n, verdict in zip(asked, verdicts, strict=True):
            found[n] = verdict.correct
        return found

    def _checked(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        if not pairs:
            return []
        if self._pool is None:
            self._pool = Pool(self._kind, workers=self._workers, limits=self._limits)
        return self._pool.check_all(pairs)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _plainly_apart(one: str, other: str) -> bool:
    """Whether two answers that are spelled differently need no check: whole numbers, or digests."""
    digested = any(answer.startswith(DIGESTED) for answer in (one, other))
    return digested or bool(WHOLE.fullmatch(one) and WHOLE.fullmatch(other))
