"""Inputs on which losses are judged: structured ones at every bound, and random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

LIMIT = 5.0
NEAR = 1e-4
RANDOM = 320
BOUNDS = (0.5, 0.8, 0.9997, 1.0004, 1.2, 1.28, 2.0, 3.0, 5.0)
GARBAGE = (0.0, 7.0, -50.0, 1e4, 1e30)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """What a loss is given: N responses of T tokens.

    Args:
        name: in words.
        logp, behavior_logp: `[N T]`, in nats.
        advantages: `[N]`.
        mask: `[N T]`, True on trainable tokens.
    """

    name: str
    logp: Tensor
    behavior_logp: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Current over behavior, 0 where the mask is False."""
        return torch.where(self.mask, self.logp - self.behavior_logp, 0.0)

    def rows(self, index: Any) -> Sample:
        """Some rows."""
        return replace(
            self,
            logp=self.logp[index],
            behavior_logp=self.behavior_logp[index],
            advantages=self.advantages[index],
            mask=self.mask[index],
        )

    def tokens(self, index: Any) -> Sample:
        """Some columns."""
        return replace(
            self,
            logp=self.logp[:, index],
            behavior_logp=self.behavior_logp[:, index],
            mask=self.mask[:, index],
        )

    def with_ratio(self, log_ratio: Tensor) -> Sample:
        """Other log-ratios on the trainable tokens; the larger log-probability stays."""
        logp, behavior_logp = split(torch.maximum(self.logp, self.behavior_logp), log_ratio)
        return replace(
            self,
            logp=torch.where(self.mask, logp, self.logp),
            behavior_logp=torch.where(self.mask, behavior_logp, self.behavior_logp),
        )

    def filled(self, value: float) -> Sample:
        """Padding that holds `value` in logp and its negative in behavior_logp."""
        return replace(
            self,
            logp=torch.where(self.mask, self.logp, value),
            behavior_logp=torch.where(self.mask, self.behavior_logp, -value),
        )

    def widened(self, columns: int, value: float) -> Sample:
        """More columns of padding."""
        pad = (0, columns)
        wide = replace(
            self,
            logp=torch.nn.functional.pad(self.logp, pad),
            behavior_logp=torch.nn.functional.pad(self.behavior_logp, pad),
            mask=torch.nn.functional.pad(self.mask, pad, value=False),
        )
        fresh = torch.arange(wide.mask.shape[1]) >= self.mask.shape[1]
        return replace(
            wide,
            logp=torch.where(fresh, value, wide.logp),
            behavior_logp=torch.where(fresh, -value, wide.behavior_logp),
        )


def split(larger: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Current and behavior log-probabilities with a given log-ratio, neither above `larger`.

    Example:
        >>> split(torch.tensor([-1.0, -1.0]), torch.tensor([0.5, -0.5]))
        (tensor([-1.0000, -1.5000]), tensor([-1.5000, -1.0000]))
    """
    return larger + log_ratio.clamp(max=0), larger - log_ratio.clamp(min=0)


def sample(
    name: str,
    log_ratio: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
) -> Sample:
    """A sample from log-ratios, with the larger log-probability of every token at -0.7.

    Example:
        >>> sample("one", [[0.5]], [1.0]).behavior_logp
        tensor([[-1.2000]], dtype=torch.float64)
    """
    x = torch.tensor(log_ratio, dtype=torch.float64)
    logp, behavior_logp = split(torch.full_like(x, -0.7), x)
    size = torch.full((len(x),), x.shape[1]) if lengths is None else torch.tensor(lengths)
    mask = torch.arange(x.shape[1]) < size.unsqueeze(-1)
    return Sample(
        name=name,
        logp=logp,
        behavior_logp=behavior_logp,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=mask,
    )


def probe() -> Sample:
    """A harmless input with three responses of five tokens, on which a loss must work."""
    x = [[0.1, -0.1, 0.05, 0.0, 0.02], [0.0, 0.1, -0.1, 0.0, 0.0], [-0.05, 0.1, 0.1, 0.1, 0.0]]
    return sample("a harmless input of 3 responses and 5 tokens", x, [1.0, -0.5, 0.25])


def boundary(bounds: Iterable[float]) -> list[Sample]:
    """Single tokens on a grid and just beside each bound; responses whose mean stands beside it."""
    near = [math.log(b) + d for b in bounds for d in (-NEAR, NEAR) if b > 0]
    grid = [x / 2 for x in range(-10, 11)]
    points = [x for x in [*near, *grid] if abs(x) <= LIMIT]
    out = []
    for x in points:
        ratio = f"ratio {math.exp(x):.6g}"
        out.append(sample(f"single tokens, {ratio}", [[x], [x], [x]], [1.0, -1.0, 0.0]))
        spread = [[x + 0.3, x - 0.3, x], [x, x, 0.0]]
        if max(abs(v) for row in spread for v in row) <= LIMIT:
            name = f"responses of 3 and 2 tokens, geometric mean {ratio}"
            out.append(sample(name, spread, [1.0, -1.0], lengths=[3, 2]))
    return out


def _random(number: int, generator: torch.Generator) -> Sample:
    """One random sample: sizes, lengths, tool tokens, on- or off-policy, garbage in the padding."""

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    n, t = whole(1, 4), whole(1, 6)
    if number % 8 == 0:
        n = t = whole(2, 4)
    lengths = torch.randint(1, t + 1, (n, 1), generator=generator)
    mask = torch.arange(t) < lengths
    if number % 3 == 0:
        holes = torch.rand((n, t), generator=generator) < 0.3
        mask = mask & ~(holes & (torch.arange(t) > 0))
    spread = (0.0, 0.02, 0.2, 1.0, 3.0)[number % 5]
    x = (spread * normal(n, t)).clamp(-LIMIT, LIMIT)
    logp, behavior_logp = split(-normal(n, t).abs() - 0.1, x)
    advantages = normal(n) if number % 2 else normal(n).sign()
    if number % 7 == 0:
        advantages[0] = 0.0
    garbage = GARBAGE[number % len(GARBAGE)]
    plain = Sample(
        name=f"random input {number}, padding of {garbage:g}",
        logp=logp,
        behavior_logp=behavior_logp,
        advantages=advantages,
        mask=mask,
    )
    return plain.filled(garbage)


def judged_samples(
    seed: int, bounds: Iterable[float] = BOUNDS, random: int = RANDOM
) -> list[Sample]:
    """Every input on which gradients are judged: finite, |log-ratio| at most 5, no empty row."""
    generator = torch.Generator().manual_seed(seed)
    return boundary(bounds) + [_random(k, generator) for k in range(random)]


def extreme_samples() -> list[Sample]:
    """What no loss is judged on and every user meets one day."""
    x, far = 0.1, 1e4
    plain = sample("", [[x, -x], [x, x]], [1.0, -1.0])
    first = torch.tensor([[True, False], [True, False]])
    hot = replace(plain, behavior_logp=torch.where(first, -1.0 - far, plain.behavior_logp))
    cold = replace(plain, logp=torch.where(first, -1.0 - far, plain.logp))
    never = replace(plain, behavior_logp=torch.where(first, -math.inf, plain.behavior_logp))
    zero = replace(plain, logp=torch.where(first, -math.inf, plain.logp))
    equal = replace(plain, advantages=torch.zeros(2, dtype=torch.float64))
    nothing = replace(plain, mask=torch.zeros_like(plain.mask))
    hollow = sample("", [[x, x], [x, x]], [1.0, -1.0], lengths=[0, 2])
    named = {
        "ratio of e^10000": hot,
        "ratio of e^-10000": cold,
        "behavior_logp of -inf": never,
        "logp of -inf": zero,
        "NaN in the padding": sample("", [[x, x], [x, x]], [1.0, -1.0], lengths=[1, 2]).filled(
            math.nan
        ),
        "an empty response": hollow,
        "every response empty": nothing,
        "a group of one": plain.rows(slice(0, 1)),
        "equal rewards (all advantages 0)": equal,
    }
    return [replace(s, name=name) for name, s in named.items()]


def shrink(start: Sample, fails: Callable[[Sample], bool]) -> Sample:
    """The smallest and roundest input found that still fails.

    Rows and tokens are taken out one at a time, padding is cleared, advantages become signs,
    log-probabilities -1, and log-ratios are rounded, as long as the failure stays.
    """
    current = start
    while True:
        smaller = next((s for s in _smaller(current) if fails(s)), None)
        if smaller is None:
            return replace(current, name=f"shrunk from {start.name}")
        current = smaller


def _smaller(s: Sample) -> Iterable[Sample]:
    n, t = s.mask.shape
    if n > 1:
        yield from (s.rows([i for i in range(n) if i != k]) for k in range(n))
    if t > 1:
        for k in range(t):
            left = s.tokens([i for i in range(t) if i != k])
            if bool(left.mask.any(-1).all()):
                yield left
    changes: list[Sample] = [s.filled(0.0)]
    for k in range(n):
        signs = s.advantages.clone()
        signs[k] = signs[k].sign()
        changes.append(replace(s, advantages=signs))
    logp, behavior_logp = split(torch.full_like(s.logp, -1.0), s.log_ratio)
    changes.append(
        replace(
            s,
            logp=torch.where(s.mask, logp, s.logp),
            behavior_logp=torch.where(s.mask, behavior_logp, s.behavior_logp),
        )
    )
    for digits in (0, 1, 2, 3):
        for k, u in torch.nonzero(s.mask).tolist():
            x = s.log_ratio
            x[k, u] = round(float(x[k, u]), digits)
            rounder = len(f"{float(x[k, u]):g}") < len(f"{float(s.log_ratio[k, u]):.17g}")
            if rounder:
                changes.append(s.with_ratio(x))
    yield from (c for c in changes if not _same(c, s))


def _same(a: Sample, b: Sample) -> bool:
    """Whether two inputs agree but for rounding."""
    return all(
        torch.allclose(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)
        for x, y in (
            (a.logp, b.logp),
            (a.behavior_logp, b.behavior_logp),
            (a.advantages, b.advantages),
        )
    )
