"""Claims that any loss can be held to by name, each decided input by input.

A claim says what coefficients an input should have, given those of another: the two tensors are
compared, and the first input on which they differ is shrunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from windage.analysis.audit.likeness import departure, given
from windage.analysis.audit.loss import Loss
from windage.analysis.audit.samples import Sample, extreme_samples
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator

Pair = tuple[Tensor, Tensor]
Decide = Callable[[Loss, Sample, Estimator], Pair | None]
FINITE = (
    "ratio of e^10000",
    "ratio of e^-10000",
    "an empty response",
    "every response empty",
    "a group of one",
)


@final
@dataclass(frozen=True, kw_only=True)
class LossClaim:
    """How a claim of `words.LOSS_CLAIMS` is decided.

    Args:
        decide: found and expected coefficients on one input; None where the claim is silent.
        extreme: decided on extreme inputs instead of ordinary ones.
        garbage: the padding holds garbage; else it holds 0.
    """

    decide: Decide
    extreme: bool = False
    garbage: bool = False

    def departure(self, loss: Loss, s: Sample, like: Estimator) -> float:
        """Difference on one input in units of what is tolerated; 0 where the claim is silent."""
        pair = self.decide(loss, s, like)
        return 0.0 if pair is None else departure(*pair)


def _row_order(loss: Loss, s: Sample, like: Estimator) -> Pair:
    order = list(range(len(s.mask)))[::-1]
    return loss.coefficients(s.rows(order)), loss.coefficients(s)[order]


def _padding(loss: Loss, s: Sample, like: Estimator) -> Pair:
    return loss.coefficients(s), loss.coefficients(s.filled(0.0))


def _padding_nan(loss: Loss, s: Sample, like: Estimator) -> Pair:
    return loss.coefficients(s.filled(math.nan)), loss.coefficients(s.filled(0.0))


def _width(loss: Loss, s: Sample, like: Estimator) -> Pair:
    clean = s.filled(0.0)
    wide = loss.coefficients(clean.widened(2, 0.0))
    return wide, torch.nn.functional.pad(loss.coefficients(clean), (0, 2))


def _partition(loss: Loss, s: Sample, like: Estimator) -> Pair | None:
    n = len(s.mask)
    if n % 2:
        return None
    halves = [s.rows(slice(0, n // 2)), s.rows(slice(n // 2, n))]
    return torch.cat([loss.coefficients(h) for h in halves]) / 2, loss.coefficients(s)


def _linear(loss: Loss, s: Sample, like: Estimator) -> Pair:
    return loss.coefficients(replace(s, advantages=2.5 * s.advantages)), 2.5 * loss.coefficients(s)


def _zero_advantage(loss: Loss, s: Sample, like: Estimator) -> Pair:
    found = loss.coefficients(replace(s, advantages=torch.zeros_like(s.advantages)))
    return found, torch.zeros_like(found)


def _detached(loss: Loss, s: Sample, like: Estimator) -> Pair:
    shift = -0.1 - 0.7 * torch.arange(s.mask.shape[1], dtype=s.logp.dtype)
    moved = replace(
        s,
        logp=torch.where(s.mask, s.logp + shift, s.logp),
        behavior_logp=torch.where(s.mask, s.behavior_logp + shift, s.behavior_logp),
    )
    return loss.coefficients(moved), loss.coefficients(s)


def _ascends(loss: Loss, s: Sample, like: Estimator) -> Pair:
    found = loss.coefficients(s)
    sign = s.advantages.sign().unsqueeze(-1)
    return found, torch.where(s.mask, found.abs() * sign, found)


def _zero_region(loss: Loss, s: Sample, like: Estimator) -> Pair:
    found = loss.coefficients(s)
    (want,) = given(like, [s])
    zero = want == 0
    return (found != 0).double(), torch.where(zero, 0.0, 1.0)


def _never_zero(loss: Loss, s: Sample, like: Estimator) -> Pair:
    found = loss.coefficients(s)
    live = s.mask & (s.advantages != 0).unsqueeze(-1)
    return (found != 0).double(), live.double()


def _bounded(loss: Loss, s: Sample, like: Estimator) -> Pair:
    ends = [loss.coefficients(s.with_ratio(torch.full_like(s.logp, x))).abs() for x in (10, 20)]
    return torch.maximum(ends[1], ends[0]), ends[0]


def _own_token(loss: Loss, s: Sample, like: Estimator) -> Pair:
    first = torch.arange(s.mask.shape[1]) == s.mask.int().argmax(-1, keepdim=True)
    x = torch.where(first & s.mask, s.log_ratio, 0.1)
    kept = first & s.mask
    a, b = loss.coefficients(s.with_ratio(x)), loss.coefficients(s)
    return torch.where(kept, a, 0.0), torch.where(kept, b, 0.0)


def _finite(loss: Loss, s: Sample, like: Estimator) -> Pair | None:
    found = loss.coefficients(s)
    return found, torch.where(torch.isfinite(found), found, 0.0)


CLAIMS: Mapping[str, LossClaim] = {
    "row_order": LossClaim(decide=_row_order),
    "padding": LossClaim(decide=_padding, garbage=True),
    "padding_nan": LossClaim(decide=_padding_nan),
    "padding_width": LossClaim(decide=_width),
    "partition": LossClaim(decide=_partition),
    "linear_in_advantage": LossClaim(decide=_linear),
    "zero_when_equal": LossClaim(decide=_zero_advantage),
    "detached": LossClaim(decide=_detached),
    "ascends": LossClaim(decide=_ascends),
    "zero_region": LossClaim(decide=_zero_region),
    "never_zero": LossClaim(decide=_never_zero),
    "bounded": LossClaim(decide=_bounded),
    "own_token": LossClaim(decide=_own_token),
    "finite_at_extremes": LossClaim(decide=_finite, extreme=True),
}
DEFAULT_REGION = "grpo"


def region(like: Estimator | None) -> Estimator:
    """The entry that says where `zero_region` expects zeros."""
    return get(DEFAULT_REGION) if like is None else like


def claim_samples(claim: LossClaim, samples: list[Sample]) -> list[Sample]:
    """Inputs on which a claim is decided: every second one, or the extreme ones."""
    if claim.extreme:
        return [s for s in extreme_samples() if s.name in FINITE]
    return [s if claim.garbage else s.filled(0.0) for s in samples[::2]]
