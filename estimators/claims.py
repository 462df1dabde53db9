"""What an entry of the catalogue claims about itself; the toy side decides each claim exactly.

A claim is declared in both directions: what is claimed must hold to 1e-10 on generated problems, and
what is claimed not to hold must show it on a named witness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

PROPERTIES = {
    "unbiased_on_policy": "the mean is the gradient when sampler and policy agree",
    "parallel_on_policy": "the mean is a positive multiple of the gradient on one prompt, on-policy",
    "unbiased_off_policy": "the mean is the gradient when the sampler covers the policy",
    "zero_drift_on_policy": "advantage 1 moves nothing on average, on-policy",
    "zero_drift": "advantage 1 moves nothing on average, off-policy",
    "shift_invariant": "a constant added to all rewards leaves the mean unchanged, off-policy",
    "zero_when_equal": "a group of equal rewards gives no update at all",
    "bounded": "no coefficient exceeds a number fixed in advance, whatever the ratio",
}


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """One property of one entry, claimed to hold or claimed not to."""

    property: str
    holds: bool

    def __post_init__(self) -> None:
        if self.property not in PROPERTIES:
            raise ValueError(f"no property {self.property!r}; there are: {', '.join(PROPERTIES)}")


def claims(*held: str) -> tuple[Claim, ...]:
    """Claims on every property: those named hold, the others do not.

    Example:
        >>> [c.property for c in claims("zero_drift") if c.holds]
        ['zero_drift']
    """
    for name in held:
        Claim(property=name, holds=True)
    return tuple(Claim(property=name, holds=name in held) for name in PROPERTIES)
