"""What every engine returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far moments may be from the truth, where an engine approximates with a proof.

    Args:
        mean: length of the error of the mean.
        variance: error of the variance.
        drift: length of the error of the drift.
    """

    mean: float
    variance: float
    drift: float


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Mean and variance of one batch estimate.

    Args:
        mean: E of the estimate, a block a prompt and prefix.
        variance: trace of its covariance.
        drift: the mean with advantage 1 for every response and no admission.
        bounds: on their errors; None: exact.
    """

    mean: Float[Tensor, "P N V"]
    variance: Float[Tensor, ""]
    drift: Float[Tensor, "P N V"]
    bounds: Bounds | None = None

    def shaped(self, shape: Sequence[int]) -> Moments:
        """The same moments with mean and drift in the shape of the parameters."""
        return replace(self, mean=self.mean.reshape(shape), drift=self.drift.reshape(shape))


class Undefined(ValueError):
    """The estimator has no meaning on this problem; the message says why."""
