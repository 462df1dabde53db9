"""What other recipes would have done with the same forward pass.

The geometry is that of `estimators.agreement`: by the logits of each token.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from windage.estimators.agreement import (
    Direction,
    Space,
    direction,
    inner,
    signal_to_noise,
    space,
)
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
