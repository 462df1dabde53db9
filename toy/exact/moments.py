"""What every engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Mean and variance of one batch estimate.

    Args:
        mean: E of the estimate, a block a prompt and prefix.
        variance: trace of its covariance.
        drift: the mean with advantage 1 for every response and no admission.
        standard_error: empty where the engine is exact.
    """

    mean: Float[Tensor, "P N V"]
    variance: Float[Tensor, ""]
    drift: Float[Tensor, "P N V"]
    standard_error: dict[str, float] = field(default_factory=dict)


class Undefined(ValueError):
    """The estimator has no meaning on this problem; the message says why."""
