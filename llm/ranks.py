"""Several processes that share one optimizer batch: whose part is whose, and sums over all.

Every process knows the whole batch (rewards, masks, recorded log-probabilities) and passes its own
parts through the model, so that what couples responses needs no message at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

Part = TypeVar("Part")


@final
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together.

    Args:
        index, count: its number, from 0, and how many there are.
        averaged: whether the backward pass itself averages gradients over the processes, as sharded
            parameters do; otherwise `reduce` sums them.
        device: where messages between processes may lie.
    """

    index: int = 0
    count: int = 1
    averaged: bool = False
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.index == 0

    @property
    def scale(self) -> float:
        """What a loss is multiplied by, so that the gradient comes out as the sum over all."""
        return float(self.count) if self.averaged else 1.0

    def share(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """This process's parts, and whether each counts.

        All processes get equally many, since sharded parameters are gathered by all together; what
        is repeated for that does not count.

        Example:
            >>> list(Ranks(index=1, count=2).share(["a", "b", "c"]))
            [('b', True), ('a', False)]
        """
        rounds = -(-len(parts) // self.count)
        for place in range(self.index, rounds * self.count, self.count):
            yield (parts[place], True) if place < len(parts) else (parts[0], False)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count == 1:
            return values
        there = values.to(self.device)
        torch.distributed.all_reduce(there)
        return there.to(values.device)

    def reduce(self, parameters: Iterable[Any]) -> None:
        """Add up the gradients of all processes, where the backward pass has not done it."""
        if self.count > 1 and not self.averaged:
            for parameter in parameters:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    torch.distributed.all_reduce(parameter.grad)

    def same(self, value: Any) -> Any:
        """What the first process says, for all."""
        if self.count == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box)
        return box[0]


ALONE = Ranks()
