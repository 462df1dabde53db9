"""Steps of another engine as files of a rollout store, written in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.llm.rollouts import Row, fingerprint, steps, write

UNKNOWN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "seed": None,
    "elapsed": 0.0,
    "rejected": None,
}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangle:
    """Responses of one step, as an engine holds them.

    Args:
        prompts: tokens of each prompt, without padding.
        lengths: tokens of each response, tools' included.
        tokens: columns `[B T]`, padded at the end.
        responses: columns with one entry a response.
        constants: what all responses share.
        version: number of the weights that were trained; None: not known.
    """

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    tokens: Mapping[str, Tensor]
    responses: Mapping[str, Sequence[Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None

    def rows(self) -> Iterator[Row]:
        """Rows of the store."""
        columns = {name: value.numpy() for name, value in self.tokens.items()}
        for b, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            yield {
                **UNKNOWN,
                **self.constants,
                "prompt_ids": prompt,
                **{name: value[b, :length] for name, value in columns.items()},
                **{name: values[b] for name, values in self.responses.items()},
            }


class Recorder:
    """Writes steps to a store in a thread of its own.

    Args:
        folder: of the store; continues after the steps that it holds.
        tokenizer: its `fingerprint`.
    """

    def __init__(self, folder: Path, *, tokenizer: str) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.next = max(steps(folder), default=-1) + 1 if folder.exists() else 0
        self._queue: Queue[tuple[int, Callable[[], Rectangle]] | None] = Queue(maxsize=2)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, made: Callable[[], Rectangle]) -> int:
        """Have one more step made and written.

        Returns:
            The step's number in the store.

        Raises:
            BadInput: an earlier step could not be written.
        """
        self._raise()
        step, self.next = self.next, self.next + 1
        self._queue.put((step, made))
        return step

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            BadInput: a step could not be written.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._raise()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, made = item
            if self._problem is None:
                try:
                    found = made()
                    write(
                        self.folder,
                        step,
                        found.rows(),
                        tokenizer=self.tokenizer,
                        version=found.version,
                    )
                except Exception as problem:
                    self._problem = problem

    def _raise(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise BadInput(f"the recorder: {problem}") from problem


def vocabulary(tokenizer: Any) -> str:
    """The fingerprint of a transformers tokenizer, as a model that is loaded has it."""
    return fingerprint(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))


def here(value: Tensor) -> Tensor:
    """A copy that training cannot change any more; numbers in single precision or wider."""
    found = value.detach().to("cpu", copy=True)
    return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found


def turns(mask: Tensor) -> Tensor:
    """The number of each token's turn: one more whenever the policy goes on after a tool.

    Example:
        >>> turns(torch.tensor([[True, False, False, True]])).tolist()
        [[0, 0, 0, 1]]
    """
    begins = mask[:, 1:] & ~mask[:, :-1]
    return torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
