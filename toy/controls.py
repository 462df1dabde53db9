"""Control variates: estimators with exactly known moments, on the draws of one that is sampled.

With x[b] block averages of the estimate, y[b, k] those of the controls and m[k] their known means,

    x[b] - sum over k of c[k] (y[b, k] - m[k])      c = argmin of the sum over b of |x - c y|^2

has the mean of x, whatever c is, and less noise (inside the norm: differences from averages over
blocks).  The same is done to the squared norm, which is known as variance + |mean|^2, and to the
drift.  A coefficient that is fitted to the blocks it is used on is fitted again wherever the
jackknife leaves one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.advantage import leave_one_out
from windage.estimators.aggregation import token_sum
from windage.estimators.correction import Correction
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member, declare, use
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.plan import Site, compute, options, undefined
from windage.toy.sampling import Sample

# Numbers that the exact engine of a control may touch.
CHEAP = 1e7
SINGULAR = 1e-10


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """An estimator's sample and its exact moments."""

    sample: Sample
    moments: Moments

    def select(self, blocks: Tensor) -> Control:
        """The control of some blocks only."""
        return replace(self, sample=self.sample.select(blocks))


def controlled(drawn: Sample, controls: Sequence[Control]) -> Sample:
    """A sample with the noise that it shares with controls on the same draws taken out."""
    if not controls:
        return drawn
    known = [c.moments for c in controls]
    squares = [m.variance + m.mean.square().sum() for m in known]
    return replace(
        drawn,
        mean=_without(drawn.mean, [c.sample.mean - c.moments.mean for c in controls]),
        square=_without(
            drawn.square, [c.sample.square - s for c, s in zip(controls, squares, strict=True)]
        ),
        drift=_without(drawn.drift, [c.sample.drift - c.moments.drift for c in controls]),
    )


def _without(
    parts: Float[Tensor, "B ..."], noises: Sequence[Float[Tensor, "B ..."]]
) -> Float[Tensor, "B ..."]:
    """Blocks less their regression on noises whose mean is 0; noises that repeat others add none.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        >>> bool(torch.allclose(_without(x, [x - 3.0, x - 3.0]), torch.tensor([3.0]).double()))
        True
    """
    flat = torch.stack([noise.flatten() for noise in noises])
    spread = torch.stack([(noise - noise.mean(0)).flatten() for noise in noises])
    gram = spread @ spread.T
    size = gram.diagonal().sqrt().clamp(min=1e-300)
    along = spread @ parts.flatten() / size
    inverse = torch.linalg.pinv(gram / torch.outer(size, size), rtol=SINGULAR, hermitian=True)
    return parts - (inverse @ along / size @ flat).view(parts.shape)


@declare("token")
def as_if(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    map: Member,
    sign: float,
) -> Float[Tensor, "*shape"]:
    """Another map's weight for one sign of the advantage, whatever the advantage.

    Example:
        >>> from windage.estimators.correction import clip
        >>> as_if(torch.tensor([1.0]), torch.tensor([-1.0]), map=use(clip), sign=1.0)
        tensor([0.])
    """
    return map(effective, torch.full_like(advantages, sign))


def siblings(estimator: Estimator, group_size: int) -> list[Estimator]:
    """Estimators much like this one whose responses are apart, which exact engines like.

    A leave-one-out advantage takes the place of its own, and a sum over tokens that of a
    denominator which couples responses; weights are those of either sign of the advantage, or 1.
    """
    aggregation = estimator.aggregation
    if aggregation.traits.scope != "response":
        aggregation = use(token_sum)
    plain = replace(
        estimator,
        advantage=use(leave_one_out) if group_size > 1 else estimator.advantage,
        aggregation=aggregation,
        admission=(),
        penalties=(),
    )
    found = [
        replace(plain, corrections=tuple(_signed(c, sign) for c in estimator.corrections))
        for sign in (1.0, -1.0)
    ]
    found.append(replace(plain, corrections=(Correction(),), centering=None))
    return list(dict.fromkeys(found))


def _signed(correction: Correction, sign: float) -> Correction:
    """The correction with its map for one sign of the advantage; none where that is not enough."""
    if correction.idle or correction.reads == "nothing":
        return correction if correction.scope in ("token", "response") else Correction()
    if correction.reads == "value" or correction.map.traits.needs:
        return Correction()
    before = correction.before and use(as_if, map=correction.before, sign=sign)
    return replace(correction, map=use(as_if, map=correction.map, sign=sign), before=before)


def known(estimator: Estimator, problem: Site, group_size: int) -> Moments | None:
    """Exact moments, where an engine that touches few numbers is valid."""
    if undefined(estimator, problem, group_size):
        return None
    valid = [o for o in options(estimator, problem, group_size) if o.refusal is None]
    best = min(valid, key=lambda o: o.cost, default=None)
    if best is None or best.cost > CHEAP:
        return None
    try:
        found = compute(estimator, problem, group_size, best.engine)
    except Undefined:
        return None
    return found if found.bounds is None else None
