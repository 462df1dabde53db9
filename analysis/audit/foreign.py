"""The audit of any loss: what it is closest to, what it is held to, and how it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from windage.analysis.audit.likeness import (
    Closeness,
    Standard,
    closeness,
    departure,
    largest_difference,
    refuse,
    standards,
)
from windage.analysis.audit.loss import Loss
from windage.analysis.audit.loss_claims import CLAIMS, claim_samples, region
from windage.analysis.audit.rows import Row
from windage.analysis.audit.samples import (
    BOUNDS,
    Sample,
    extreme_samples,
    judged_samples,
    shrink,
)
from windage.analysis.audit.words import LOSS_CLAIMS
from windage.estimators.errors import BadInput, unknown
from windage.estimators.estimator import Estimator


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CounterExample:
    """The smallest input found on which a loss is not what it is held to."""

    target: str
    property: str
    sample: Sample
    found: Tensor
    expected: Tensor

    def document(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite become words."""
        s = self.sample
        return {
            "target": self.target,
            "property": self.property,
            "input": s.name,
            "logp": _plain(s.logp),
            "behavior_logp": _plain(s.behavior_logp),
            "advantages": _plain(s.advantages),
            "mask": s.mask.tolist(),
            "found": _plain(self.found),
            "expected": _plain(self.expected),
            "python": self.python(),
        }

    def python(self) -> str:
        """Lines that rebuild the input."""
        s = self.sample
        lines = ["import torch"]
        for name, value in (
            ("logp", s.logp),
            ("behavior_logp", s.behavior_logp),
            ("advantages", s.advantages),
        ):
            grad = ", requires_grad=True" if name == "logp" else ""
            lines.append(f"{name} = torch.tensor({_literal(value)}, dtype=torch.float64{grad})")
        lines.append(f"mask = torch.tensor({s.mask.tolist()})")
        lines.append(f"# -d loss / d logp is       {_literal(self.found)}")
        lines.append(f"# it should be              {_literal(self.expected)}")
        return "\n".join(lines)


def _plain(value: Tensor) -> Any:
    """Nested lists in which what is not finite is a word."""
    if value.dim() == 0:
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return [_plain(v) for v in value]


def _literal(value: Tensor) -> str:
    """Python text of a tensor's numbers, no longer than they need to be."""
    if value.dim() == 0:
        number = float(value)
        if not math.isfinite(number):
            return f'float("{number}")'
        short = f"{number:.12g}"
        return short if any(c in short for c in ".e") else f"{short}.0"
    return f"[{', '.join(_literal(v) for v in value)}]"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Verdicts:
    """What an audit of a loss found."""

    loss: Loss
    rows: list[Row]
    closest: list[Closeness]
    counter_examples: list[CounterExample] = field(default_factory=list)
    inputs: int = 0


def audit_loss(
    loss: Loss,
    *,
    like: tuple[str, Estimator] | None = None,
    claimed: Iterable[str] = (),
    seed: int = 0,
) -> Verdicts:
    """Judge a loss: by one entry, by named claims, or, with neither, by reporting everything.

    Args:
        loss: as `tried` returned it.
        like: an entry as named, whose correction and aggregation the loss must have.
        claimed: names of `LOSS_CLAIMS` to hold it to.
        seed: of the random inputs.

    Raises:
        BadInput: an unknown claim, an entry that cannot be compared, or a loss that raises.
    """
    names = list(claimed)
    for name in names:
        if name not in CLAIMS:
            raise unknown("claim", name, CLAIMS)
    if like is not None:
        refuse(*like)
    samples = judged_samples(seed, bounds(like))
    rows, examples, found = judge(loss, samples, like=like, required=names)
    if not names and like is None:
        rows += [_claimed(loss, name, samples, None, required=False)[0] for name in CLAIMS]
    rows += [_extreme(loss, s) for s in extreme_samples()]
    pairs = list(zip(samples, found, strict=True))[::2]
    finite = [(s, f) for s, f in pairs if bool(torch.isfinite(f).all())]
    closest = closeness([s for s, _ in finite], [f for _, f in finite])
    if like is None and not closest[0].equal:
        examples += _nearest_example(loss, closest[0], [s for s, _ in finite])
    return Verdicts(
        loss=loss, rows=rows, closest=closest, counter_examples=examples, inputs=len(samples)
    )


def judge(
    loss: Loss,
    samples: list[Sample],
    *,
    like: tuple[str, Estimator] | None,
    required: Iterable[str],
) -> tuple[list[Row], list[CounterExample], list[Tensor]]:
    """Hold a loss to an entry and to named claims on given inputs.

    Returns:
        A row each, an example for each that fails, and the loss's coefficients on every input.
    """
    found = [loss.coefficients(s) for s in samples]
    results = [] if like is None else [_held_to(loss, like, samples, found)]
    results += [_claimed(loss, name, samples, like, required=True) for name in required]
    examples = [example for _, example in results if example is not None]
    return [row for row, _ in results], examples, found


def bounds(like: tuple[str, Estimator] | None) -> list[float]:
    """Ratios at which the catalogue's defaults, or the entry's own settings, change something."""
    return [*BOUNDS, *(_own_bounds(like[1]) if like is not None else ())]


def _own_bounds(like: Estimator) -> list[float]:
    """Ratios at which the entry's own settings change something."""
    s = like.settings
    own = [1 + s["clip_high"]] if "clip_high" in s else []
    own += [1 - s["clip_low"]] if "clip_low" in s else []
    names = ("cap", "low", "high", "a_pos", "b_pos", "a_neg", "b_neg")
    return [b for b in [*own, *(s[n] for n in names if n in s)] if 0 < b < math.inf]


def _worst(sizes: list[float]) -> int:
    return max(range(len(sizes)), key=lambda k: math.inf if math.isnan(sizes[k]) else sizes[k])


def _verdict(size: float) -> str:
    return "holds" if size <= 1 else "does not hold"


def _example(
    loss: Loss,
    property: str,
    samples: list[Sample],
    sizes: list[float],
    pair: Callable[[Sample], tuple[Tensor, Tensor] | None],
) -> CounterExample:
    """Shrink the simplest failing input; the loss may raise on the way, which is no failure."""

    def fails(s: Sample) -> bool:
        try:
            both = pair(s)
        except BadInput:
            return False
        return both is not None and departure(*both) > 1

    bad = [s for s, size in zip(samples, sizes, strict=True) if not size <= 1]
    small = shrink(min(bad, key=lambda s: s.mask.numel()), fails)
    both = pair(small)
    assert both is not None
    return CounterExample(
        target=loss.name, property=property, sample=small, found=both[0], expected=both[1]
    )


def _held_to(
    loss: Loss, like: tuple[str, Estimator], samples: list[Sample], found: list[Tensor]
) -> tuple[Row, CounterExample | None]:
    """Hold a loss to one entry, by the reading of its length that fits best."""
    name, estimator = like
    best: tuple[float, list[float], Standard, list[Tensor]] | None = None
    for standard in standards(name, estimator, loss):
        expected = standard.expected(samples)
        sizes = [departure(f, e) for f, e in zip(found, expected, strict=True)]
        if best is None or max(sizes) < best[0]:
            best = (max(sizes), sizes, standard, expected)
    assert best is not None
    size, sizes, standard, expected = best
    apart = [largest_difference(f, e) for f, e in zip(found, expected, strict=True)]
    place = _worst(apart if size > 1 else sizes)
    row = Row(
        target=loss.name,
        property=f"like {name}",
        claimed="gradient of its correction and aggregation",
        measured=apart[place],
        verdict=_verdict(size),
        ok=size <= 1,
        witness=samples[place].name,
        found=standard.note,
    )
    if size <= 1:
        return row, None
    example = _example(
        loss,
        row.property,
        samples,
        sizes,
        lambda s: (loss.coefficients(s), standard.expected([s])[0]),
    )
    return row, example


def _claimed(
    loss: Loss,
    name: str,
    samples: list[Sample],
    like: tuple[str, Estimator] | None,
    required: bool,
) -> tuple[Row, CounterExample | None]:
    """Decide one claim on all its inputs."""
    claim = CLAIMS[name]
    entry = region(None if like is None else like[1])
    chosen = claim_samples(claim, samples)
    try:
        sizes = [claim.departure(loss, s, entry) for s in chosen]
    except BadInput as problem:
        if required:
            raise
        return _reported(loss, name, LOSS_CLAIMS[name], "undefined", str(problem)), None
    place = _worst(sizes)
    size = sizes[place]
    pair = claim.decide(loss, chosen[place], entry)
    row = Row(
        target=loss.name,
        property=name,
        claimed=LOSS_CLAIMS[name],
        measured=0.0 if pair is None else largest_difference(*pair),
        verdict=_verdict(size),
        ok=size <= 1 if required else None,
        witness=chosen[place].name,
    )
    if size <= 1 or not required:
        return row, None
    return row, _example(loss, name, chosen, sizes, lambda s: claim.decide(loss, s, entry))


def _reported(loss: Loss, property: str, claimed: str, verdict: str, found: str) -> Row:
    return Row(
        target=loss.name,
        property=property,
        claimed=claimed,
        measured=None,
        verdict=verdict,
        ok=None,
        witness="",
        found=found,
    )


def _extreme(loss: Loss, s: Sample) -> Row:
    """What a loss makes of an extreme input: reported, never judged."""
    property = f"at {s.name}"
    try:
        found = loss.coefficients(s)
    except BadInput as problem:
        words = str(problem).removeprefix(f"{loss.name}: ")
        return _reported(loss, property, "", "fails", words)
    if not bool(torch.isfinite(found).all()):
        return _reported(loss, property, "", "not finite", "NaN or infinite coefficients")
    largest = f"largest coefficient {float(found.abs().max()):.4g}"
    return _reported(loss, property, "", "finite", largest)


def _nearest_example(loss: Loss, best: Closeness, samples: list[Sample]) -> list[CounterExample]:
    """The smallest input that tells a loss from the entry it is closest to, multiple included."""
    if not math.isfinite(best.residual) or best.multiple <= 0:
        return []
    name = best.names[0]
    same_up_to_scale = best.residual <= 1e-5
    for standard in standards(name, best.estimator, loss):
        times = 1.0 if same_up_to_scale else best.multiple

        def expected(s: Sample, standard: Standard = standard, times: float = times) -> Tensor:
            return times * standard.expected([s])[0]

        sizes = [departure(loss.coefficients(s), expected(s)) for s in samples]
        if max(sizes) > 1:
            words = f"closest: {name}"
            words += "" if same_up_to_scale else f" × {best.multiple:.6g}"
            return [
                _example(loss, words, samples, sizes, lambda s: (loss.coefficients(s), expected(s)))
            ]
    return []
