"""What every training loop shares: optimizers, versions of the sampler, batches and passes.

A run is a start, an optimizer and three functions: one draws a batch, one makes an update of it,
one takes note of the new parameters.  A leading axis S of the parameters holds seeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.errors import BadInput, unknown
from windage.estimators.penalty import ema
from windage.toy.learning import State, clip_norm
from windage.toy.sums import Generators

Unpack = Callable[[Tensor], Mapping[str, Tensor]]
Batch_ = TypeVar("Batch_")
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adafactor": torch.optim.Adafactor,
}


@final
@dataclass(frozen=True, kw_only=True)
class Ascent:
    """An optimizer, its rate and the clip of the gradient's norm.

    Args:
        optimizer: sgd, adam or adafactor, as torch has them.
        rate: at the first step.
        last_rate: at the last step, linear in between; None: the same throughout.
        limit: greatest norm of a gradient, a seed; inf: no clip.
        settings: of the optimizer.
    """

    optimizer: str = "adam"
    rate: float = 1e-3
    last_rate: float | None = None
    limit: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    def rate_at(self, step: int, steps: int) -> float:
        """Step size of one step of so many."""
        if self.last_rate is None or steps < 2:
            return self.rate
        return self.rate + (self.last_rate - self.rate) * step / (steps - 1)


@final
class Climber:
    """Parameters and the state of their optimizer; `step` moves both.

    Adafactor looks at whole matrices, so each seed's matrices are parameters of their own; the
    others work number by number on all seeds at once.
    """

    def __init__(self, unpack: Unpack, start: Float[Tensor, "S D"], ascent: Ascent) -> None:
        self.ascent = ascent
        self.parameters = start.clone()
        self._gradient = torch.zeros_like(start)
        pairs = [(self.parameters, self._gradient)]
        if ascent.optimizer == "adafactor":
            views = unpack(self.parameters).values(), unpack(self._gradient).values()
            pairs = [
                (value[s], slope[s])
                for value, slope in zip(*views, strict=True)
                for s in range(len(start))
            ]
        for parameter, gradient in pairs:
            parameter.grad = gradient
        self._optimizer = OPTIMIZERS[ascent.optimizer](
            [parameter for parameter, _ in pairs], lr=ascent.rate, maximize=True, **ascent.settings
        )

    def start(self) -> State:
        """Where it stands before any step."""
        return self.state(0, self.parameters.new_zeros(len(self.parameters)))

    def state(self, step: int, norm: Float[Tensor, " S"]) -> State:
        """Where it stands now."""
        return State(step=step, parameters=self.parameters.clone(), norm=norm)

    def step(self, gradient: Float[Tensor, "S D"], rate: float) -> Float[Tensor, " S"]:
        """Move along the gradient; its norm before clipping, a seed."""
        clipped, norm = clip_norm(gradient, self.ascent.limit)
        self._gradient.copy_(clipped)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm


@final
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Which weights draw the responses, and how far they are from those they stand for.

    Args:
        lag: updates between the weights that draw and the newest.
        every: updates from one refresh of the sampler to the next.
        frozen: the sampler keeps the weights of the start.
        mixed: a batch is drawn by so many versions, the newest first, each `lag` updates older
            than the one before; 1: by the one that lags.
        sigma: size of a fixed Gaussian direction added to the weights, in units of the starting
            root mean square of each matrix; 0: none.
        bits: weights of the matrices are rounded to so many bits; 0: not rounded.
        top_p: mass of the nucleus that tokens are drawn from.
    """

    lag: int = 0
    every: int = 1
    frozen: bool = False
    mixed: int = 1
    sigma: float = 0.0
    bits: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("lag", 0), ("every", 1), ("mixed", 1), ("sigma", 0), ("bits", 0)):
            if not getattr(self, name) >= least:
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        if self.bits == 1 or not 0 < self.top_p <= 1:
            raise BadInput(
                f"bits is {self.bits}, top_p is {self.top_p}; allowed: 0 or at least 2 bits, and a "
                "mass above 0 and at most 1"
            )


@final
class Versions:
    """The past weights that a sampler's rule may still need, and the direction of its noise."""

    def __init__(
        self, unpack: Unpack, start: Float[Tensor, "S D"], sampler: Sampler, among: Generators
    ) -> None:
        self.sampler = sampler
        deepest = sampler.lag * sampler.mixed + sampler.every
        self._past: deque[Tensor] = deque([start.clone()], maxlen=deepest)
        self._offset = sampler.sigma * direction(unpack, start, among) if sampler.sigma else None
        self._step = 0

    def learn(self, parameters: Float[Tensor, "S D"]) -> None:
        """Take note of new weights; they are used when the sampler's rule lets them in."""
        if not self.sampler.frozen:
            self._step += 1
            self._past.append(parameters.clone())

    def due(self, version: int = 0) -> Float[Tensor, "S D"]:
        """The weights that a version of the sampler stands for now, with noise."""
        back = self.sampler.lag * (version + (self.sampler.mixed == 1))
        back += self._step % self.sampler.every
        found = self._past[max(0, len(self._past) - 1 - back)]
        return found if self._offset is None else found + self._offset


def direction(
    unpack: Unpack, start: Float[Tensor, "S D"], among: Generators
) -> Float[Tensor, "S D"]:
    """A Gaussian direction, each parameter's share scaled by its root mean square at the start."""
    draws = torch.stack([torch.randn(start.shape[1], generator=g) for g in among]).to(start.dtype)
    for value, share in zip(unpack(start).values(), unpack(draws).values(), strict=True):
        dims = tuple(range(1, value.dim()))
        share.mul_(value.square().mean(dims, keepdim=True).sqrt())
    return draws


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """When the policy of a penalty is refreshed.

    Args:
        every: updates from one hard copy to the next; None: never.  An epoch of the prompts is a
            number of updates too.
        share: of the policy in each refresh; 1 is a hard copy, less a mix-up (EMA).
    """

    every: int | None = None
    share: float = 1.0

    def due(self, step: int) -> bool:
        """Whether it is refreshed after so many batches."""
        return self.every is not None and step % self.every == 0


class Others(NamedTuple):
    """Parameters beside those that are trained.

    Args:
        reference: of a penalty; None: there is none.
        proximal: when the batch was drawn; they anchor decoupled clips.
    """

    reference: Float[Tensor, "S D"] | None
    proximal: Float[Tensor, "S D"]


def rounds(
    climber: Climber,
    draw: Callable[[], Batch_],
    update: Callable[[Tensor, Batch_, Others], Tensor],
    learn: Callable[[Tensor], None],
    *,
    steps: int,
    passes: int = 1,
    reference: Reference | None = None,
) -> Iterator[State]:
    """Draw a batch, make some passes over it, tell the sampler; a state a batch.

    Args:
        climber: moves the parameters.
        draw: the next batch.
        update: at parameters, from a batch.
        learn: takes note of new parameters.
        steps: batches.
        passes: updates made with each batch.
        reference: of a penalty; None: the rule has none.
    """
    anchor = None if reference is None else climber.parameters.clone()
    yield climber.start()
    for step in range(steps):
        batch = draw()
        others = Others(reference=anchor, proximal=climber.parameters.clone())
        for _ in range(passes):
            found = update(climber.parameters, batch, others)
            norm = climber.step(found, climber.ascent.rate_at(step, steps))
            learn(climber.parameters)
        if reference is not None and anchor is not None and reference.due(step + 1):
            anchor = ema(anchor, climber.parameters, coefficient=reference.share)
        yield climber.state(step + 1, norm)
