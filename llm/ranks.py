"""Several processes that share one optimizer batch: whose part is whose, and what they tell.

Every process knows the whole batch (rewards, masks, recorded log-probabilities) and passes its own
parts through the model, so that what couples responses needs no message at all.  The first process
draws, writes and saves; what one process refuses, all refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput

Part = TypeVar("Part")


@final
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together.

    Args:
        index, count: its number, from 0, and how many there are.
        sharded: whether each holds a share of the parameters, so that the backward pass itself
            sums gradients over the processes; otherwise `reduce` does.
        device: where sums of tensors between processes may lie.
        group: of torch, for everything else, on the CPU: a process that waits for another's
            responses keeps no accelerator waiting.
    """

    index: int = 0
    count: int = 1
    sharded: bool = False
    device: str = "cpu"
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this process draws and writes the files."""
        return self.index == 0

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

    def own(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """Which of `size` responses are this process's to tell of; those in no part, the first's.

        Example:
            >>> parts = [torch.tensor([3, 1]), torch.tensor([0])]
            >>> [Ranks(index=n, count=2).own(parts, 4).tolist() for n in (0, 1)]
            [[False, True, True, True], [True, False, False, False]]
        """
        mine = torch.full((size,), self.first)
        for place, rows in enumerate(parts):
            mine[rows] = place % self.count == self.index
        return mine

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count == 1:
            return values
        there = values.to(self.device)
        torch.distributed.all_reduce(there)
        return there.to(values.device)

    def reduce(self, parameters: Iterable[Any]) -> None:
        """Add up the gradients of all processes, where the backward pass has not done it."""
        if self.count > 1 and not self.sharded:
            for parameter in parameters:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    torch.distributed.all_reduce(parameter.grad)

    def same(self, value: Any) -> Any:
        """What the first process says, for all."""
        return value if self.count == 1 else self._said_by(0, value)

    def _said_by(self, index: int, value: Any) -> Any:
        box = [value]
        torch.distributed.broadcast_object_list(box, src=index, group=self.group)
        return box[0]

    def everyone(self, values: list[Part]) -> list[Part]:
        """What all processes say, in their order; cheap where none says anything."""
        if self.count == 1 or self._last(bool(values)) < 0:
            return values
        found: list[list[Part]] = [[]] * self.count
        torch.distributed.all_gather_object(found, values, group=self.group)
        return [value for one in found for value in one]

    def agree(self, problem: ValueError | None) -> None:
        """Refuse on all processes what one of them refuses.

        Raises:
            BadInput: the same line everywhere; alone, the problem itself.
        """
        if self.count == 1:
            if problem is not None:
                raise problem
            return
        last = self._last(problem is not None)
        if last >= 0:
            raise BadInput(self._said_by(last, str(problem))) from problem

    def _last(self, here: bool) -> int:
        """The greatest number of a process where it is so; -1: it is nowhere."""
        number = torch.tensor(self.index if here else -1)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Refuse on all processes what one of them refuses inside; no messages inside."""
        problem = None
        try:
            yield
        except BadInput as refusal:
            problem = refusal
        self.agree(problem)

    def spread(self, named: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Named tensors of the first process, for all, one at a time, on the CPU.

        Args:
            named: read on the first process alone.
        """
        if self.count == 1:
            yield from (named or {}).items()
            return
        known = named if self.first and named is not None else {}
        for name, dtype, shape in self.same([(n, v.dtype, v.shape) for n, v in known.items()]):
            tensor = torch.empty(shape, dtype=dtype)
            if self.first:
                tensor.copy_(known[name].detach())
            torch.distributed.broadcast(tensor, 0, group=self.group)
            yield name, tensor

    @torch.no_grad()
    def begin(self, module: torch.nn.Module) -> None:
        """Give every process the first one's weights."""
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if self.count > 1:
            for name, value in self.spread(own):
                own[name].copy_(value)

    def gathered(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Named tensors, whole, at the first process; nothing at the others.

        Args:
            named: sharded or not; all processes go through it in step.
        """
        found = {}
        for name, value in named:
            one = whole(value)
            if self.first:
                found[name] = one.cpu() if self.sharded else one
        return found


ALONE = Ranks()


def whole(value: Tensor) -> Tensor:
    """A tensor of which every process holds a share, put together by all; others as they are."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shared_like(value: Tensor, own: Tensor | None) -> Tensor:
    """This process's share of a whole tensor, where another of the same shape is shared."""
    if not hasattr(own, "full_tensor") or own is None or value.shape != own.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    there = value.to(own.device)
    return distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)
