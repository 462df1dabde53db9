"""A task made of two parts: where its questions come from, and how a response is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from windage.estimators.errors import within
from windage.llm.tasks.places import Draw
from windage.llm.tasks.protocol import Question, Split
from windage.llm.verify import Limits, Pool, Verdict, after_cut, check_kind


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
        if self._pool is None:
            self._pool = Pool(self._kind, workers=self._workers, limits=self._limits)
        parts = [
            text.rpartition(self._marker) if self._marker else ("", " ", text) for _, text in pairs
        ]
        marked = [n for n, (_, found, _) in enumerate(parts) if found]
        checked = self._pool.check_all([(parts[n][2], pairs[n][0].answer) for n in marked])
        verdicts = [Verdict(word="invalid", stopped=None, seconds=0.0)] * len(pairs)
        for n, verdict in zip(marked, checked, strict=True):
            verdicts[n] = verdict
        return [after_cut(v) if c else v for v, c in zip(verdicts, cut, strict=True)]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
