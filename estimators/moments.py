"""Sums and maxima of a batch that add up over its parts, for `metrics` to finish.

A part is a micro-batch, a rank, or a chunk of a dump; groups stay whole where something of a group
is asked for.  Everything is float64.  A name tells how two parts are merged:

    sum/...   added          max/...   the larger          log/...   log(exp(a) + exp(b))

so that sums of ratios are exact in log space, where no ratio overflows.  A ratio in a plain sum
counts as at most exp(300), and a weight that overflowed as the largest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.admission import lag, zero_variance
from windage.estimators.batch import Batch
from windage.estimators.estimator import Coefficients

Moments = dict[str, Tensor]
LARGEST = 300.0
OVERFLOW = torch.finfo(torch.float64).max
LAGS = 256
JOIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "log": torch.logaddexp,
}
EDGE = 64 * torch.finfo(torch.float64).eps


def merge(*parts: Mapping[str, Tensor]) -> Moments:
    """Moments of the whole from those of its parts; what one part lacks comes from the others.

    Example:
        >>> merge({"sum/n": torch.tensor(2.0)}, {"sum/n": torch.tensor(3.0)})
        {'sum/n': tensor(5.)}
    """
    return reduce(_two, parts, {})


def _two(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Moments:
    return {**b, **{k: JOIN[k[:3]](v, b[k]) if k in b else v for k, v in a.items()}}


def _most(x: Tensor) -> Tensor:
    """The largest, or -inf of nothing."""
    return torch.cat([x.new_full((1,), -math.inf), x]).amax()


def _spread(name: str, x: Tensor) -> Moments:
    """Count, sum, sum of squares and extremes of some numbers."""
    return {
        f"sum/{name}.count": x.new_tensor(len(x)),
        f"sum/{name}": x.sum(),
        f"sum/{name}.square": x.square().sum(),
        f"max/{name}": _most(x),
        f"max/-{name}": _most(-x),
    }


def _ratios(name: str, x: Float[Tensor, " N"]) -> Moments:
    """Of ratios exp(x): their excess over 1 in plain sums, themselves in log space."""
    excess = torch.expm1(x.clamp(max=LARGEST))
    return {
        f"sum/{name}.count": x.new_tensor(len(x)),
        f"sum/{name}.excess": excess.sum(),
        f"sum/{name}.excess_square": excess.square().sum(),
        f"log/{name}": x.logsumexp(0) if len(x) else x.new_tensor(-math.inf),
        f"log/{name}.square": (2 * x).logsumexp(0) if len(x) else x.new_tensor(-math.inf),
        f"max/{name}": _most(x),
        f"max/-{name}": _most(-x),
    }


def _divergence(name: str, x: Float[Tensor, " N"], low: float, high: float) -> Moments:
    """Of log-ratios: divergences, and how many ratios lie beyond two limits."""
    edges = [math.log(limit) if limit > 0 else -math.inf for limit in (low, high)]
    return {
        **_ratios(name, x),
        f"sum/{name}.log": x.sum(),
        f"sum/{name}.abs_log": x.abs().sum(),
        f"sum/{name}.log_square": x.square().sum(),
        f"sum/{name}.k3": (torch.expm1(x.clamp(max=LARGEST)) - x).clamp(min=0).sum(),
        f"sum/{name}.below": (x < edges[0] - EDGE).double().sum(),
        f"sum/{name}.above": (x > edges[1] + EDGE).double().sum(),
    }


def of_ratios(batch: Batch, *, low: float = 0.5, high: float = 2.0) -> Moments:
    """What policy and sampler say of the same tokens, each token and each whole response.

    Args:
        batch: validated, with `logp` and `behavior_logp`; without either: nothing.
        low, high: ratios beyond which tokens and responses are counted.
    """
    if batch.logp is None or batch.behavior_logp is None:
        return {}
    mask, lengths = batch.mask, batch.lengths
    logp, behavior = (
        torch.where(mask, value.double(), 0.0) for value in (batch.logp, batch.behavior_logp)
    )
    x, real = logp - behavior, lengths > 0
    n = lengths[real]
    mine, theirs = logp.sum(-1)[real] / n, behavior.sum(-1)[real] / n
    p, q = logp[mask].exp(), behavior[mask].exp()
    difference = (p - q).abs()
    shift = theirs - mine
    return {
        **_divergence("token", x[mask], low, high),
        **_divergence("response", x.sum(-1)[real], low, high),
        **_spread("log_perplexity.difference", shift),
        "sum/log_perplexity": -mine.sum(),
        "sum/log_perplexity.sampler": -theirs.sum(),
        "sum/log_perplexity.distance": shift.abs().sum(),
        "sum/perplexity": (-mine).clamp(max=LARGEST).exp().sum(),
        "sum/perplexity.sampler": (-theirs).clamp(max=LARGEST).exp().sum(),
        "sum/perplexity.ratio": shift.clamp(max=LARGEST).exp().sum(),
        **_spread("probability.difference", difference),
        "sum/probability": p.sum(),
        "sum/probability.sampler": q.sum(),
        "sum/probability.square": p.square().sum(),
        "sum/probability.sampler_square": q.square().sum(),
        "sum/probability.product": (p * q).sum(),
    }


def of_weights(
    batch: Batch,
    coefficients: Coefficients,
    effective: Float[Tensor, "*batch P G T"] | None = None,
) -> Moments:
    """What a correction made of the ratios, and the coefficients that came of it.

    Args:
        batch: validated; its `logp` and `probability_square` give the power, where there are both.
        coefficients: of this part, with the terms of this part.
        effective: log-ratio that each weight stands for without its bound, from
            `diagnostics.effective_log_ratio`; absent: nothing is said of what was clipped.

    Raises:
        ValueError: a coefficient that is not finite, or a weight without a value, by row.
    """
    coefficients.validate(batch)
    mask, terms = batch.mask, coefficients.terms
    weights = torch.where(mask, coefficients.weights.double(), 0.0).clamp(max=OVERFLOW)
    bad = torch.nonzero(weights.isnan())
    if len(bad):
        raise ValueError(
            f"the weight is nan at {batch.row_name(bad[0].tolist())}; allowed: numbers"
        )
    real = batch.lengths > 0
    own = torch.where(mask, coefficients.own.double(), 0.0)
    means = (weights / batch.lengths.clamp(min=1).unsqueeze(-1)).sum(-1)[real]
    found = {
        **_ratios("weight", weights[mask].log()),
        **_ratios("weight.response", means.log()),
        "sum/coefficient": own.abs().sum(),
    }
    if batch.logp is not None and batch.probability_square is not None:
        norms = score_norms(batch)
        found["sum/power"] = (own.square() * norms).sum()
    if effective is not None:
        found |= _clipped(batch, coefficients, torch.where(mask, effective.double(), 0.0))
    admitted = (terms.reason == 0) & batch.get("present")
    found["sum/admission.present"] = batch.get("present").double().sum()
    found["sum/admission.admitted"] = admitted.double().sum()
    for name, count in terms.counts.items():
        if name != "absent":
            found[f"sum/admission.rejected.{name}"] = count.double().sum()
    return found


def score_norms(batch: Batch) -> Float[Tensor, "*batch P G T"]:
    """Squared norm of each token's score by the logits, 0 where the mask is False.

        |e_y - pi|^2 = 1 - 2 pi(y) + sum pi^2

    Args:
        batch: with `logp` and `probability_square`.
    """
    square = batch.get("probability_square").double()
    norms = (1 - 2 * batch.get("logp").double().exp() + square).clamp(min=0)
    return torch.where(batch.mask, norms, 0.0)


def clipped(
    weights: Float[Tensor, "*batch T"], effective: Float[Tensor, "*batch T"]
) -> Bool[Tensor, "*batch T"]:
    """Where a weight is below the ratio that it stands for, by more than rounding.

    Example:
        >>> clipped(torch.tensor([2.0, 1.0]), torch.log(torch.tensor([9.0, 1.0])))
        tensor([ True, False])
    """
    edge = 256 * torch.finfo(weights.dtype).eps
    return weights.log() < effective - edge * (1 + effective.abs())


def _clipped(batch: Batch, coefficients: Coefficients, effective: Tensor) -> Moments:
    """Mass of the advantages, and of those whose tokens were clipped, by sign."""
    terms = coefficients.terms
    admitted = ((terms.reason == 0) & (terms.scale > 0)).unsqueeze(-1) & batch.mask
    mass = torch.where(admitted, (terms.advantages * terms.scale.unsqueeze(-1)).double(), 0.0)
    less = clipped(coefficients.weights, effective) & admitted
    hit = torch.where(less, mass, 0.0)
    return {
        "sum/mass": mass.abs().sum(),
        "sum/mass.clipped_positive": hit.clamp(min=0).sum(),
        "sum/mass.clipped_negative": (-hit).clamp(min=0).sum(),
        "sum/clipped.count": batch.mask.double().sum(),
        "sum/clipped": less.double().sum(),
    }


def of_policy(batch: Batch, entropy: Float[Tensor, "*batch P G T"] | None = None) -> Moments:
    """What the policy's distributions look like before each token."""
    given = {"entropy": entropy, "probability_square": batch.probability_square}
    return {
        key: value
        for name, field in given.items()
        if field is not None
        for key, value in _spread(name, field.double()[batch.mask]).items()
    }


def of_responses(
    batch: Batch,
    *,
    invalid: Bool[Tensor, "*batch P G"] | None = None,
    format: Bool[Tensor, "*batch P G"] | None = None,
) -> Moments:
    """Rewards, verdicts and lengths of the responses that are present.

    Args:
        batch: validated.
        invalid: there was no answer, or none that could be checked.
        format: the answer was right, in a format that was not asked for.
    """
    present = batch.get("present")
    shares = {"truncated": batch.truncated, "invalid": invalid, "format": format}
    found = {
        **_spread("reward", batch.rewards.double()[present]),
        **_spread("outcome", batch.get("outcomes").double()[present]),
        **_spread("length", batch.lengths.double()[present]),
    }
    for name, said in shares.items():
        if said is not None:
            found[f"sum/{name}.count"] = present.double().sum()
            found[f"sum/{name}"] = (said & present).double().sum()
    return found


def of_groups(batch: Batch) -> Moments:
    """Groups in which nothing can be learned, and responses that did not arrive."""
    present = batch.get("present")
    there = present.sum(-1) > 1
    varied = zero_variance(batch.get("outcomes"), present).any(-1)
    asked = batch.missing + present.sum(-1)
    return {
        "sum/groups": there.double().sum(),
        "sum/groups.constant": (there & ~varied).double().sum(),
        "sum/asked": asked.double().sum(),
        "sum/missing": batch.missing.double().sum(),
    }


def of_lags(batch: Batch) -> Moments:
    """How old the responses are that have trainable tokens, as a histogram and by token.

    Returns:
        Nothing where the batch has no versions or does not know its own.
    """
    if batch.versions is None or batch.current_version is None:
        return {}
    real = batch.lengths > 0
    found = lag(batch.versions, batch.mask, batch.current_version)
    oldest = found.oldest[real]
    by_token = (batch.current_version - batch.versions)[batch.mask].double()
    return {
        **_spread("lag", oldest.double()),
        **_spread("lag.token", by_token),
        "sum/lag.in_flight": found.in_flight[real].double().sum(),
        "sum/lag.in_queue": found.in_queue[real].double().sum(),
        "sum/lag.histogram": torch.bincount(
            oldest.clamp(min=0, max=LAGS - 1), minlength=LAGS
        ).double(),
    }
