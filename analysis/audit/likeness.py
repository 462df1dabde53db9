"""A loss against the correction and the aggregation of catalogue entries, gradient by gradient.

Advantages are given, so that these two stages alone are judged: an entry's coefficient is
A * weight * share.  Entries with centering see the sampler's head, which no loss of logp does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from windage.analysis.audit.loss import Loss
from windage.analysis.audit.samples import Sample, probe
from windage.estimators.batch import Batch
from windage.estimators.catalogue import ENTRIES, get
from windage.estimators.errors import BadInput
from windage.estimators.estimator import ABSENT, Estimator, Terms, token_coefficients

RELATIVE = 1e-5
OF_LARGEST = 1e-7
ROUNDING = 1e-14
Expected = Callable[[Sequence[Sample]], list[Tensor]]


def given(estimator: Estimator, samples: Sequence[Sample]) -> list[Tensor]:
    """Coefficients `[N T]` of an entry's correction and aggregation at given advantages.

    The samples go through the stages at once: replicates of one padded shape.

    Example:
        >>> from windage.analysis.audit.samples import sample
        >>> given(get("rloo"), [sample("two", [[0.0, 0.0], [0.0, 0.0]], [1.0, -2.0])])
        [tensor([[ 0.5000,  0.5000],
                [-1.0000, -1.0000]], dtype=torch.float64)]
    """
    if not samples:
        return []
    n = max(len(s.mask) for s in samples)
    t = max(s.mask.shape[1] for s in samples)

    def stacked(values: list[Tensor]) -> Tensor:
        return torch.stack([_padded_to(v, n, t) for v in values]).unsqueeze(1)

    mask = stacked([s.mask for s in samples])
    advantages = stacked([s.advantages.unsqueeze(-1).expand(s.mask.shape) for s in samples])
    present = stacked([torch.ones_like(s.mask) for s in samples]).any(-1)
    fields = {"lengths": mask.sum(-1), "present": present}
    terms = Terms(
        advantages=advantages,
        scale=estimator.aggregation(*(fields[k] for k in estimator.aggregation.traits.needs)),
        reason=(~present).long(),
        reasons=(ABSENT,),
    )
    batch = Batch(
        rewards=advantages[..., 0],
        mask=mask,
        present=present,
        logp=stacked([s.logp for s in samples]),
        behavior_logp=stacked([s.behavior_logp for s in samples]),
    )
    bare = replace(estimator, admission=(), penalties=())
    own = token_coefficients(bare, terms, batch).own
    return [own[k, 0, : len(s.mask), : s.mask.shape[1]] for k, s in enumerate(samples)]


def _padded_to(value: Tensor, n: int, t: int) -> Tensor:
    out = value.new_zeros((n, t))
    out[: value.shape[0], : value.shape[1]] = value
    return out


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Standard:
    """What a loss is held to: a name, coefficients, and what had to be assumed."""

    name: str
    expected: Expected
    note: str = ""


def _needs_length(estimator: Estimator) -> bool:
    settings = dict(estimator.aggregation.settings)
    return "length" in settings and settings["length"] is None


def _of_length(estimator: Estimator, length: float) -> Estimator:
    return replace(estimator, aggregation=estimator.aggregation.change(length=length))


def _padded(estimator: Estimator) -> Expected:
    """Coefficients with the constant length replaced by the width of the input."""
    unit = _of_length(estimator, 1.0)

    def expected(samples: Sequence[Sample]) -> list[Tensor]:
        found = given(unit, samples)
        return [f / max(1, s.mask.shape[1]) for f, s in zip(found, samples, strict=True)]

    return expected


def _proximal(estimator: Estimator) -> bool:
    """Whether a correction compares with a proximal policy."""
    return any("proximal_logp" in (c.numerator, c.denominator) for c in estimator.corrections)


def refuse(name: str, estimator: Estimator) -> None:
    """Refuse entries that need more than a loss of logp is given.

    Raises:
        BadInput: the entry centers scores, has a penalty, or reads a proximal policy.
    """
    allowed = ", ".join(e.name for e in ENTRIES if e.centering is None and not _proximal(e))
    if _proximal(estimator):
        raise BadInput(
            f"--like {name}: its ratio needs proximal log-probabilities, which a loss of logp does "
            f"not get; allowed: {allowed}"
        )
    if estimator.centering is not None:
        raise BadInput(
            f"--like {name}: score centering needs head log-probabilities, which a loss of logp "
            f"does not get; allowed: {allowed}"
        )
    if any(m.traits.place != "reward" for m in estimator.active_penalties):
        raise BadInput(
            f"--like {name}: a penalty needs reference log-probabilities, which a loss of logp "
            "does not get; allowed: coefficient=0"
        )


def standards(name: str, estimator: Estimator, loss: Loss) -> list[Standard]:
    """What a loss may be held to; more than one where the entry's constant length was not given."""
    if not _needs_length(estimator):
        return [Standard(name=name, expected=partial(given, estimator))]
    unit = _of_length(estimator, 1.0)
    (e,), f = given(unit, [probe()]), loss.coefficients(probe())
    along = float((e * f).sum())
    fitted = float((e * e).sum()) / along if along > 0 else 1.0
    fitted = round(fitted) if abs(fitted - round(fitted)) < 1e-6 * fitted else fitted
    constant = _of_length(estimator, max(fitted, 1e-300))
    return [
        Standard(
            name=name,
            expected=partial(given, constant),
            note=f"no length was given: the loss divides by the constant {fitted:g}",
        ),
        Standard(
            name=name,
            expected=_padded(estimator),
            note="no length was given: the loss divides by the padded width, which differs from "
            "batch to batch",
        ),
    ]


def departure(found: Tensor, expected: Tensor) -> float:
    """Largest difference in units of what is tolerated; above 1 two gradients differ.

    Each token may be off by 1e-5 of its own size plus 1e-7 of the input's largest: arithmetic in
    float32 passes.

    Example:
        >>> departure(torch.tensor([1.0]), torch.tensor([1.0]))
        0.0
    """
    if not bool(torch.isfinite(found).all()):
        return math.inf
    if expected.numel() == 0:
        return 0.0
    tolerated = RELATIVE * expected.abs() + OF_LARGEST * expected.abs().max() + ROUNDING
    return float(((found - expected).abs() / tolerated).max())


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite where one is not a number."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    return float((found - expected).abs().max()) if expected.numel() else 0.0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Closeness:
    """How a loss relates to one entry over all judged inputs.

    Args:
        names: entries with this correction and aggregation.
        words: the two in words.
        multiple: the best constant factor, loss over entry.
        residual: root mean square of what the multiple leaves, each input scaled to 1.
        length: constant length that the multiple stands for, where the entry divides by one.
        difference: largest difference without the multiple, where the largest coefficient is 1.
        estimator: the first of the entries.
    """

    names: tuple[str, ...]
    words: str
    multiple: float
    residual: float
    difference: float
    estimator: Estimator
    length: float | None = None

    @property
    def distance(self) -> tuple[float, float]:
        """For sorting: the residual first, then how far the multiple is from 1."""
        known = self.multiple > 0 and self.length is None
        away = abs(math.log(self.multiple)) if known else math.inf
        return (round(self.residual, 6), away)

    @property
    def equal(self) -> bool:
        """Whether loss and entry agree, multiple included."""
        same = abs(self.multiple - 1) <= RELATIVE or self.length is not None
        return self.residual <= RELATIVE and same

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "entries": list(self.names),
            "composition": self.words,
            "multiple": self.multiple,
            "residual": self.residual,
            "largest_difference": self.difference,
            "length": self.length,
            "equal": self.equal,
        }


def comparable() -> dict[str, tuple[str, ...]]:
    """Entries whose correction and aggregation a loss can be held to, those alike together."""
    groups: dict[str, list[str]] = {}
    for entry in ENTRIES:
        if entry.centering is None and not _proximal(entry):
            groups.setdefault(composition(entry), []).append(entry.name)
    return {words: tuple(names) for words, names in groups.items()}


def composition(estimator: Estimator) -> str:
    """Correction and aggregation in words."""
    parts = [*(c.describe() for c in estimator.corrections), estimator.aggregation.describe()]
    return " · ".join(parts)


def _relate(
    names: tuple[str, ...],
    expected: Expected,
    samples: Sequence[Sample],
    found: Sequence[Tensor],
) -> Closeness:
    """The best multiple of an entry's coefficients, and what it leaves."""
    pairs = []
    for s, f, entry in zip(samples, found, expected(samples), strict=True):
        e, own = torch.where(s.mask, entry, 0.0), torch.where(s.mask, f, 0.0)
        size = max(float(own.abs().max()), float(e.abs().max()))
        if size > 0:
            pairs.append((e / size, own / size))
    ef = sum(float((e * f).sum()) for e, f in pairs)
    ee = sum(float((e * e).sum()) for e, _ in pairs)
    multiple = ef / ee if ee > 0 else 0.0
    left = sum(float((f - multiple * e).square().sum()) for e, f in pairs)
    total = sum(float((f * f).sum()) for _, f in pairs)
    first = get(names[0])
    return Closeness(
        names=names,
        words=composition(first),
        multiple=multiple,
        residual=math.sqrt(left / total) if total > 0 else math.inf,
        difference=max((float((f - e).abs().max()) for e, f in pairs), default=0.0),
        estimator=first,
    )


def closeness(samples: Sequence[Sample], found: Sequence[Tensor]) -> list[Closeness]:
    """Relate a loss's coefficients to every comparable entry, the closest first.

    An entry that divides by a constant length is tried with one constant, whose multiple is then
    one over the length, and with the padded width.

    Args:
        samples: judged inputs.
        found: the loss's coefficients on each, all finite.
    """
    out = []
    for names in comparable().values():
        entry = get(names[0])
        if not _needs_length(entry):
            out.append(_relate(names, partial(given, entry), samples, found))
            continue
        unit = _of_length(entry, 1.0)
        constant = _relate(names, partial(given, unit), samples, found)
        if constant.multiple > 0:
            constant = replace(constant, length=1 / constant.multiple)
        padded = _relate(names, _padded(entry), samples, found)
        out.append(min(constant, padded, key=lambda c: c.residual))
    return sorted(out, key=lambda c: c.distance)
