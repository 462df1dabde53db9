"""What other recipes would have done with the same forward pass.

An estimator is only a coefficient: the update by the logits before token t is

    d_t = C_t (e_y - pi) + sum over head tokens v of H_tv (e_v - pi)

so inner products of two recipes' updates need their coefficients, log pi of sampled and head tokens
and sum(pi^2), nothing else:  <d, d'> = <a, a'> - m' <a, pi> - m <a', pi> + m m' sum(pi^2)  with
a = C e_y + H and m its sum.  Without a head that is C C' (1 - 2 pi(y) + sum(pi^2)).

Differences:
    1. Logits of different tokens are told apart, so a cosine here is that of the parameters'
       gradients only where those do not mix tokens; it is exact for the logits themselves.
    2. `signal_to_noise` takes tokens of one kind together: the halves are the groups of even and of
       odd number, and a coordinate is the sum of d_t[y] over the tokens y of one id.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.diagnostics import effective_log_ratio
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Coefficients, Estimator, coefficients
from windage.estimators.metrics import exp
from windage.estimators.moments import clipped

# Name, formula, unit, better, truncation; each is logged as shadow/<entry>/<name>.
FIGURES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "cosine",
        "<d, d'> / (|d| |d'|): its update beside the real one, by the logits",
        "-",
        "none",
        "after",
    ),
    ("norm_ratio", "|d'| / |d|: its update beside the real one", "ratio", "none", "after"),
    (
        "clipped_mass",
        "sum(|A| c where w is below the ratio of its reach) / sum(|A| c)",
        "share",
        "down",
        "after",
    ),
    ("weight", "sum(|w|) / N", "ratio", "none", "after"),
    (
        "signal_to_noise",
        "<b1, b2> / ((|b1|^2 + |b2|^2) / 2 - <b1, b2>), b the updates of alternate groups by token",
        "ratio",
        "up",
        "after",
    ),
    (
        "overflow",
        "tokens whose coefficient is not finite; then nothing else",
        "tokens",
        "down",
        "-",
    ),
)
# What an optimizer batch has once the policy's forward pass was made, whatever the run.
ALWAYS = (
    "rewards",
    "present",
    "mask",
    "lengths",
    "outcomes",
    "logp",
    "behavior_logp",
    "probability_square",
    "requested",
)


def carried(
    asked: Mapping[str, Estimator], *, fields: Container[str], **settings: Any
) -> dict[str, Estimator]:
    """The shadows that a run can carry, with what it knows filled in.

    Args:
        asked: estimators by the name to log them under.
        fields: of the batch, that this run has beside `ALWAYS`.
        settings: of the run, such as `length`, for those that an entry leaves open (None).

    Raises:
        BadInput: a shadow needs what the run does not have, or has a setting that is still open.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> found = carried({"dr_grpo": get("dr_grpo")}, fields=(), length=64)
        >>> found["dr_grpo"].settings["length"]
        64
    """
    found = {}
    for name, entry in asked.items():
        open_ = [key for key, value in entry.settings.items() if value is None]
        entry = entry.change(**{key: settings[key] for key in open_ if key in settings})
        for need in entry.needs:
            if need not in ALWAYS and need not in fields:
                raise BadInput(
                    f"shadow {name!r} needs {need}, which this run does not have; allowed: entries "
                    "that need what the run records"
                )
        if entry.aggregation.name == "constant_length" and entry.settings["length"] is None:
            raise BadInput(f"shadow {name!r} has no length; allowed: one in tokens")
        found[name] = entry
    return found


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """What the policy says at each trainable token.

    Args:
        probability: of the sampled token.
        square: sum of squared probabilities.
        ids: the sampled tokens, numbered from 0; None: not known.
        half: whether the group's number is even.
        head_probability: of the head tokens; None: no head.
        sampled: where a head token is the sampled one.
    """

    probability: Float[Tensor, " N"]
    square: Float[Tensor, " N"]
    ids: Int[Tensor, " N"] | None
    half: Bool[Tensor, " N"]
    head_probability: Float[Tensor, "N K"] | None
    sampled: Bool[Tensor, "N K"] | None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Direction:
    """An update by the logits of each token, divided by `scale`.

    Args:
        own, head: coefficients.
        at_sampled: of the sampled token where it is in the head.
        mass: sum of own and head.
        seen: <a, pi>.
        scale: largest coefficient.
    """

    own: Float[Tensor, " N"]
    head: Float[Tensor, "N K"] | None
    at_sampled: Float[Tensor, " N"]
    mass: Float[Tensor, " N"]
    seen: Float[Tensor, " N"]
    scale: float


def space(batch: Batch, ids: Int[Tensor, "P G T"] | None) -> Space:
    """The geometry that all recipes of a batch share.

    Raises:
        ValueError: the batch has a head and the sampled tokens are not known.
    """
    mask = batch.mask
    groups = torch.arange(mask.shape[0], device=mask.device).view(-1, 1, 1).expand_as(mask)
    head, sampled = None, None
    if batch.head_logp is not None:
        if ids is None:
            raise ValueError("a head of tokens needs the ids of the sampled tokens as well")
        head = batch.head_logp[mask].double().exp()
        sampled = batch.get("head_ids")[mask] == ids[mask].unsqueeze(-1)
    return Space(
        probability=batch.get("logp")[mask].double().exp(),
        square=batch.get("probability_square")[mask].double(),
        ids=None if ids is None else torch.unique(ids[mask], return_inverse=True)[1],
        half=groups[mask] % 2 == 0,
        head_probability=head,
        sampled=sampled,
    )


def direction(made: Coefficients, batch: Batch, at: Space) -> Direction:
    """The update that coefficients make by the logits."""
    own = made.own[batch.mask].double()
    head = None if made.head is None else made.head[batch.mask].double()
    scale = own.abs().amax() if len(own) else own.new_zeros(())
    if head is not None and head.numel():
        scale = torch.maximum(scale, head.abs().amax())
    size = torch.where(scale > 0, scale, 1.0)
    own = own / size
    if head is None:
        return Direction(
            own=own,
            head=None,
            at_sampled=torch.zeros_like(own),
            mass=own,
            seen=own * at.probability,
            scale=float(scale),
        )
    assert at.head_probability is not None and at.sampled is not None
    head = head / size
    return Direction(
        own=own,
        head=head,
        at_sampled=torch.where(at.sampled, head, 0.0).sum(-1),
        mass=own + head.sum(-1),
        seen=own * at.probability + (head * at.head_probability).sum(-1),
        scale=float(scale),
    )


def inner(a: Direction, b: Direction, at: Space) -> Float[Tensor, ""]:
    """Inner product of two updates by the logits of all tokens, each divided by its scale."""
    product = a.own * b.own + a.own * b.at_sampled + b.own * a.at_sampled
    if a.head is not None and b.head is not None:
        product = product + (a.head * b.head).sum(-1)
    product = product - b.mass * a.seen - a.mass * b.seen + a.mass * b.mass * at.square
    return product.sum()


def signal_to_noise(a: Direction, at: Space) -> float | None:
    """How much the updates of alternate groups agree, beside how much they differ.

    Returns:
        None without ids, or where the halves do not differ.
    """
    if at.ids is None or not len(at.ids):
        return None
    here = a.own + a.at_sampled - a.mass * at.probability
    halves = here.new_zeros((2, int(at.ids.max()) + 1))
    for number, chosen in enumerate((at.half, ~at.half)):
        halves[number].index_add_(0, at.ids[chosen], here[chosen])
    signal = float(halves[0] @ halves[1])
    noise = float(halves.square().sum() / 2) - signal
    return signal / noise if noise > 1e-12 * float(halves.square().sum()) else None


@torch.no_grad()
def shadows(
    estimators: Mapping[str, Estimator],
    batch: Batch,
    own: Coefficients,
    *,
    ids: Int[Tensor, "P G T"] | None = None,
) -> dict[str, float]:
    """What each recipe would have done, beside what was done.

    Args:
        estimators: by the name to log them under, as `carried` gives them.
        batch: of the whole update, with `logp` and `probability_square` of its forward pass.
        own: what was done.
        ids: the sampled tokens; needed by heads and by `signal_to_noise`.

    Returns:
        Figures by `shadow/<name>/<figure>`, and the real recipe's as `shadow/real/...`; one without
        meaning is left out.
    """
    at = space(batch, ids)
    real = direction(own, batch, at)
    length = math.sqrt(max(float(inner(real, real, at)), 0.0))
    ratio = signal_to_noise(real, at)
    found = {} if ratio is None else {"shadow/real/signal_to_noise": ratio}
    for name, entry in estimators.items():
        made = coefficients(entry, batch)
        said = _shadow(entry, batch, made, real, length, at)
        found |= {f"shadow/{name}/{key}": value for key, value in said.items()}
    return found


def _shadow(
    entry: Estimator, batch: Batch, made: Coefficients, real: Direction, length: float, at: Space
) -> dict[str, float]:
    """Figures of one recipe."""
    bad = ~made.own.isfinite()
    if made.head is not None:
        bad = bad | ~made.head.isfinite().all(-1)
    if bad.any():
        return {"overflow": float(bad.sum())}
    mine = direction(made, batch, at)
    size = math.sqrt(max(float(inner(mine, mine, at)), 0.0))
    found: dict[str, float] = {}
    if size > 0 and length > 0:
        cosine = float(inner(real, mine, at)) / (size * length)
        found["cosine"] = max(-1.0, min(cosine, 1.0))
    if length > 0:
        logs = [
            math.log(x * y) if x * y > 0 else -math.inf
            for x, y in ((size, mine.scale), (length, real.scale))
        ]
        found["norm_ratio"] = exp(logs[0] - logs[1])
    found |= _bounded(entry, batch, made)
    ratio = signal_to_noise(mine, at)
    return found if ratio is None else {**found, "signal_to_noise": ratio}


def _bounded(entry: Estimator, batch: Batch, made: Coefficients) -> dict[str, float]:
    """Mean weight, and the share of the advantages' mass whose tokens were clipped."""
    terms, mask = made.terms, batch.mask
    admitted = ((terms.reason == 0) & (terms.scale > 0)).unsqueeze(-1) & mask
    mass = torch.where(admitted, (terms.advantages * terms.scale.unsqueeze(-1)).abs(), 0.0)
    found, total = {}, float(mass.sum())
    if total > 0:
        less = clipped(made.weights, effective_log_ratio(entry, batch, terms.advantages))
        found["clipped_mass"] = float(torch.where(less, mass, 0.0).sum()) / total
    count = int(mask.sum())
    mean = float(made.weights.abs()[mask].double().sum()) / count if count else math.inf
    return {**found, "weight": mean} if math.isfinite(mean) else found
