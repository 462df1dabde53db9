"""A loss of another framework held to what it claims, and the rows of the table.

Measured are gradients: every loss is called with the log-probabilities of structured and random
inputs, and minus its gradient is compared with the coefficients that the claim writes down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from claimed import Expected
from torch import Tensor

from windage.analysis.audit.likeness import (
    Closeness,
    closeness,
    departure,
    largest_difference,
)
from windage.analysis.audit.loss import tried
from windage.analysis.audit.samples import Sample, judged_samples, sample, shrink
from windage.estimators.errors import BadInput

SEED = 0
SPARSE = 4


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Peer:
    """A loss and its claim.

    Args:
        name: in the framework, with the settings that are not its defaults.
        claims: in words.
        expected: the coefficients claimed.
        loss: (logp, behavior_logp, advantages, mask) -> loss of a whole batch.
        parts: loss of a batch in micro-batches, with the denominators that the trainer passes.
    """

    name: str
    claims: str
    expected: Expected
    loss: Callable[..., Tensor]
    parts: Callable[[Sequence[Sample]], Tensor]

    def coefficients(self, s: Sample) -> Tensor:
        """Minus the gradient of the loss."""
        return tried(self.name, self.loss, "plain").coefficients(s)


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a single call shows."""

    what: str
    claimed: str
    measured: str
    deviates: bool


@final
@dataclass(frozen=True, kw_only=True)
class Judged:
    """One row of the table.

    Args:
        name, claims: of the loss.
        holds: whether every gradient is as claimed.
        difference: the largest, where the largest coefficient of the input is 1; None: not finite.
        witness: the smallest input found that shows it; empty where the claim holds.
        closest: the catalogue entry with the nearest gradient, in words.
        partition: relative difference that two micro-batches of equal size make.
        padding: relative difference that arbitrary numbers in the padding make; None: NaN.
        repeatable: whether two calls on one input agree.
        raised: inputs on which it raises, of how many, and what; empty where none.
    """

    name: str
    claims: str
    holds: bool
    difference: float | None
    witness: str
    closest: str
    partition: float
    padding: float | None
    repeatable: bool
    raised: str


def _scaled(found: Tensor, expected: Tensor) -> float:
    """Largest difference where the largest coefficient is 1; infinite where one is not finite."""
    size = float(torch.maximum(found.abs().max(), expected.abs().max()))
    return 0.0 if size == 0 else largest_difference(found, expected) / min(size, 1e300)


def _on_mask(s: Sample, values: Tensor) -> Tensor:
    return torch.where(s.mask, values, 0.0)


def witness(s: Sample, found: Tensor, expected: Tensor) -> str:
    """The token of an input at which two gradients differ most."""
    n, t = divmod(int((found - expected).abs().nan_to_num(math.inf).argmax()), s.mask.shape[1])
    size = "one token" if s.mask.numel() == 1 else f"{len(s.mask)} x {s.mask.shape[1]} tokens"
    where = "" if s.mask.numel() == 1 else f" at response {n}, token {t}"
    ratio, advantage = float(s.log_ratio[n, t].exp()), float(s.advantages[n])
    return (
        f"{size}{where}: ratio {ratio:.4g}, A = {advantage:.4g}: coefficient "
        f"{float(found[n, t]):.4g} instead of {float(expected[n, t]):.4g}"
    )


def judge(peer: Peer) -> Judged:
    """Hold a loss to its claim on every input, and see what it is closest to.

    Trainers hand over the log-probabilities of padding tokens, so padding is 0 here; arbitrary
    numbers in it are tried beside.
    """
    loss = tried(peer.name, peer.loss, "plain")

    def departs(s: Sample) -> bool:
        try:
            found = loss.coefficients(s)
        except BadInput:
            return False
        return departure(_on_mask(s, found), _on_mask(s, peer.expected(s))) > 1

    raw, samples, found, errors = [], [], [], []
    for s in judged_samples(SEED):
        try:
            found.append(_on_mask(s, loss.coefficients(s.filled(0.0))))
        except BadInput as problem:
            errors.append(str(problem))
            continue
        raw.append(s)
        samples.append(s.filled(0.0))
    expected = [_on_mask(s, peer.expected(s)) for s in samples]
    again = [_on_mask(s, loss.coefficients(s)) for s in samples]
    padded = [_on_mask(s, loss.coefficients(s)) for s in raw]
    wrong = [s for s, f, e in zip(samples, found, expected, strict=True) if departure(f, e) > 1]
    words = ""
    if wrong:
        small = shrink(wrong[0], departs)
        words = witness(small, loss.coefficients(small), peer.expected(small))
    near = closeness(samples[::SPARSE], found[::SPARSE])[0]
    return Judged(
        name=peer.name,
        claims=peer.claims,
        holds=not wrong,
        difference=_finite(max(map(_scaled, found, expected))),
        witness=words,
        closest=_closest(near),
        partition=partition(peer),
        padding=_finite(max(map(_scaled, padded, found))),
        repeatable=all(map(_same, found, again)),
        raised=f"{len(errors)} of {len(errors) + len(raw)} inputs: {_reason(errors[0])}"
        if errors
        else "",
    )


def _closest(near: Closeness) -> str:
    words = near.words.replace("length=None", "the padded width")
    names = " = ".join(near.names)
    return f"{names} ({words}), times {near.multiple:.4g}, residual {near.residual:.1e}"


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _reason(message: str) -> str:
    """What was raised and where, without the name of the loss and the signature."""
    return message.partition(": raised ")[2].partition(", called ")[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def partition(peer: Peer) -> float:
    """Relative difference of the gradient between one batch and two micro-batches of two."""
    x = [[0.1, -0.1, 0.05], [0.0, 0.1, 0.0], [0.05, -0.05, 0.1], [-0.1, 0.0, 0.0]]
    whole = sample("four responses", x, [1.0, -0.5, 0.5, -1.0], lengths=[3, 1, 3, 2])
    leaf = whole.logp.clone().requires_grad_()
    halves = [_live(whole.rows(part), leaf[part]) for part in (slice(0, 2), slice(2, 4))]
    (split,) = torch.autograd.grad(peer.parts(halves), leaf)
    found = peer.coefficients(whole)
    return largest_difference(-split, found) / float(found.abs().max())


def _live(s: Sample, logp: Tensor) -> Sample:
    return Sample(
        name=s.name,
        logp=logp,
        behavior_logp=s.behavior_logp,
        advantages=s.advantages,
        mask=s.mask,
    )


def document(name: str, version: str, peers: list[Peer], findings: list[Finding]) -> dict[str, Any]:
    """The measured rows of a framework, as JSON."""
    return {
        "schema": "windage/peers/1",
        "peer": name,
        "version": version,
        "torch": torch.__version__,
        "losses": [asdict(judge(peer)) for peer in peers],
        "findings": [asdict(finding) for finding in findings],
    }
