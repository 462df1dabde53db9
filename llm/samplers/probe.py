"""Whether a sampler has the weights that the trainer thinks it has.

    gap[n, t] = | log-probability by the sampler - by the trainer |     of probe tokens

`check` compares after each sync. In half precision, rounding is as large as what a small step
changes, so `rehearse` compares once, at the start, after a change of every weight that no rounding
hides: one high bit of each is flipped, and flipped back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from windage.estimators.errors import positive
from windage.llm.samplers.protocol import Sampler, SamplerFault, Weights, alive

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
# The third highest bit of a mantissa: 6 to 13 % of the number.
BITS = {
    torch.float64: (torch.int64, 1 << 49),
    torch.float32: (torch.int32, 1 << 20),
    torch.bfloat16: (torch.int16, 1 << 4),
    torch.float16: (torch.int16, 1 << 7),
}


class StaleWeights(SamplerFault):
    """The sampler's weights are not those of the trainer."""


@final
@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far log-probabilities may lie apart, in nats.

    Args:
        mean: of the gaps of all probe tokens.
        largest: of the gaps.
    """

    mean: float
    largest: float

    def __post_init__(self) -> None:
        positive(mean=self.mean, largest=self.largest)


# SmolLM2-135M in vLLM and in transformers: 6e-6 in the mean and 5e-5 at most in float32, 0.04 and
# 0.5 in bfloat16, where the limit of one token is wide because an unlikely one may be farther off.
TOLERANCES = {
    "float32": Tolerance(mean=1e-3, largest=1e-3),
    "bfloat16": Tolerance(mean=0.2, largest=5.0),
}
# How the mean gap may grow when all weights are changed: there 0.040 became 0.055 after a sync that
# took, and 0.66 after one that left the output layer behind.
GROWTH, ROOM = 3.0, 1e-3


@final
@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far they lie apart, in nats."""

    mean: float
    largest: float


def gap(sampler: Sampler, sequences: Sequences, logp: Sequence[Tensor]) -> Gap:
    """Mean and largest difference of log-probabilities.

    Args:
        sequences: prompts and responses.
        logp: of the responses' tokens at temperature 1, by the trainer.
    """
    ours = torch.cat([value.detach().double().cpu() for value in logp])
    with alive():
        theirs = torch.cat([value.double() for value in sampler.score(sequences)])
    apart = (ours - theirs).abs()
    return Gap(mean=float(apart.mean()), largest=float(apart.max()))


def check(
    sampler: Sampler, sequences: Sequences, logp: Sequence[Tensor], tolerance: Tolerance
) -> Gap:
    """Refuse to go on where the sampler's log-probabilities are not the trainer's.

    Raises:
        StaleWeights: names the version and the differences.
    """
    found = gap(sampler, sequences, logp)
    # Not a number is not within.
    if not (found.mean <= tolerance.mean and found.largest <= tolerance.largest):
        raise StaleWeights(
            f"the weights of the sampler are stale: at version {sampler.version} the "
            f"log-probabilities of {len(sequences)} probes differ from the trainer's by up to "
            f"{found.largest:.3g} nats, {found.mean:.3g} in the mean; allowed: "
            f"{tolerance.largest:g} and {tolerance.mean:g}"
        )
    return found


def take(sampler: Sampler, weights: Weights, version: int) -> None:
    """Give a sampler new weights.

    Raises:
        SamplerFault: it does not take them; `EngineDied` where it ended by itself.
    """
    with alive():
        sampler.load(weights, version)


def rehearse(
    sampler: Sampler,
    parameters: Iterable[Tensor],
    weights: Callable[[], Weights],
    score: Callable[[], Sequence[Tensor]],
    sequences: Sequences,
    tolerance: Tolerance,
) -> Gap:
    """Sync with every weight changed by 6 to 13 %, and back, and check both.

    The trainer's weights come out bit by bit as they went in.

    Args:
        parameters: of the trainer's model; those that are trained and those that are not.
        weights: gives them by name, as for `load`.
        score: the trainer's log-probabilities of the probes.
        tolerance: of the weights as they are; changed, the mean gap is measured by theirs.

    Returns:
        The gap of the last sync.

    Raises:
        StaleWeights: a sync that did not reach every weight, or left something that the old ones
            computed.
    """
    version = sampler.version
    take(sampler, weights(), version)
    # Scoring fills what an engine keeps of prefixes, too.
    before = check(sampler, sequences, score(), tolerance)
    with changed(parameters):
        take(sampler, weights(), version)
        mean = GROWTH * before.mean + ROOM
        check(sampler, sequences, score(), replace(tolerance, mean=mean))
    take(sampler, weights(), version)
    return check(sampler, sequences, score(), tolerance)


@contextmanager
def changed(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Flip one high bit of each number, and flip it back at the end."""
    kept = list(parameters)
    _flip(kept)
    try:
        yield
    finally:
        _flip(kept)


@torch.no_grad()
def _flip(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        kind, bit = BITS[local.dtype]
        local.detach().view(kind).bitwise_xor_(torch.tensor(bit, dtype=kind))
