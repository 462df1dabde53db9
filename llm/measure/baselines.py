"""How much of the possible variance reduction each baseline reaches on a language model.

From the policy's own responses to a prompt, their rewards r and the gradients s of their
log-probabilities.  Of groups of G responses of one prompt, with V the variance of the estimate,

    share = (V_none - V) / (V_none - V_best)
    V_none - V_best = mean over prompts of E[r |s|^2]^2 / E[|s|^2] / G

V_none is that without a baseline, V_best that with the best constant of each prompt,
b = E[r |s|^2] / E[|s|^2].  Entries whose mean is the gradient times a scale, or near it, are
compared after dividing by the scale.  A share is below 0 where estimating the baseline costs more
than it gains.

What is kept of a prompt are averages without bias: of |estimate|^2 over groups, and of the product
of the estimates of two groups that share no response.  Responses are grouped several times anew.
The best constant, fitted to the responses that it is tried on, gives too little by as much as one
fitted to all the others gives too much; the mean of the two is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.llm.measure import limits, moments
from windage.llm.measure.moments import SIGMAS, Averages, Jackknife, left_out

NONE, BEST, SAMPLER = "none", "best constant", "baselines"
# Whose mean is the gradient times a scale that is known, by group size.
UNBIASED = {
    "group_mean": lambda size: (size - 1) / size,
    "rloo": lambda size: 1.0,
    "opo_leave_one_out": lambda size: 1.0,
    "score_weighted_leave_one_out": lambda size: 1.0,
}
# Whose mean is turned: the baseline holds the response itself.
TURNED = ("opo", "score_weighted")
AGAIN = 8
Row = dict[str, Any]
Place = Sequence[Mapping[str, Row]]


def taken(batch: Batch, numbers: Int[Tensor, "M G"]) -> Batch:
    """Some responses of one prompt as M groups, each a batch of its own.

    Args:
        batch: of one prompt.
        numbers: of its responses.
    """
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.name not in ("requested", "row_index"):
            changes[field.name] = value[0, numbers].unsqueeze(1)
    return replace(batch, **changes)


def weights(batch: Batch, name: str, numbers: Int[Tensor, "M G"]) -> Float[Tensor, "M R"]:
    """By what an entry multiplies the gradient of each response, a row a group."""
    groups = taken(batch, numbers)
    own = get(name)(groups).own.double()
    each = own.sum(-1).squeeze(1) / groups.lengths.squeeze(1).clamp(min=1)
    return each.new_zeros((len(numbers), batch.mask.shape[1])).scatter(1, numbers, each)


def regrouped(count: int, size: int) -> Int[Tensor, "N M G"]:
    """Responses in groups, several times anew, always the same way."""
    generator = torch.Generator().manual_seed(count)
    whole = count // size * size
    orders = [torch.randperm(count, generator=generator)[:whole] for _ in range(AGAIN)]
    return torch.stack(orders).view(AGAIN, -1, size)


def measured(
    batch: Batch, scores: Float[Tensor, "R k"], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """What is kept of one prompt: rows of the store, of each group size and baseline.

    Args:
        batch: of the policy's own responses to the prompt.
        scores: sketch of the gradient of each response's log-probability.
        sizes: of groups; those of more responses than there are are left out.
    """
    rewards, products = batch.rewards[0].double(), scores @ scores.mT
    count, norms = len(rewards), products.diagonal()
    weighed = products * rewards * rewards.unsqueeze(1)
    pair = (weighed.sum() - weighed.trace()) / (count * (count - 1))
    found = []
    for size in (size for size in sizes if size <= count):
        plain = {"groups": count // size, "pair": float(pair), "kept": 1.0, "mean": [], "drift": []}
        for name, square in (
            (NONE, (rewards.square() * norms).mean()),
            (BEST, least(rewards, norms)),
        ):
            # |1/G sum r s|^2 has G - 1 products of two responses to each square
            row = plain | {"square": float(square / size + pair * (size - 1) / size)}
            found.append({"group_size": size, "entry": name} | row)
        numbers = regrouped(count, size)
        for name in (*UNBIASED, *TURNED):
            by = weights(batch, name, numbers.flatten(0, 1))
            squares = ((by @ products) * by).sum(-1).view(AGAIN, -1)
            row = plain | {"square": float(squares.mean())}
            if name in TURNED:
                row |= _turned(by.view(*squares.shape, -1), squares, products, scores)
            found.append({"group_size": size, "entry": name} | row)
    return [{"sampler": SAMPLER} | row for row in found]


def least(rewards: Float[Tensor, " R"], norms: Float[Tensor, " R"]) -> Float[Tensor, ""]:
    """Mean of (r - b)^2 |s|^2 at its least over b, nearly without bias."""
    paid, total = rewards * norms, norms.sum()
    fitted = paid.sum() / torch.where(total > 0, total, 1.0)
    rest = total - norms
    apart = torch.where(rest > 0, (paid.sum() - paid) / torch.where(rest > 0, rest, 1.0), fitted)
    ends = [((rewards - b).square() * norms).mean() for b in (fitted, apart)]
    return (ends[0] + ends[1]) / 2


def _turned(
    by: Float[Tensor, "N M R"],
    squares: Float[Tensor, "N M"],
    products: Float[Tensor, "R R"],
    scores: Float[Tensor, "R k"],
) -> Row:
    """Product of two groups' estimates, and the mean of all."""
    count, total = squares.shape[1], by.sum(1)
    whole = ((total @ products) * total).sum(-1)
    pair = (whole - squares.sum(1)) / (count * (count - 1)) if count > 1 else None
    mean = by.mean((0, 1)) @ scores
    return {"pair": None if pair is None else float(pair.mean()), "mean": mean.numpy()}


def figures(place: Place, size: int) -> dict[str, Jackknife]:
    """Figures by baseline.

    `share`, `variance` (within prompts, after dividing by the scale) and, where it is measured,
    `scale` and `relative_bias_rescaled_square`.

    Args:
        place: rows by entry, prompt by prompt, and the gradient's own as `reference`.
        size: of groups.
    """

    def numbers(name: str, key: str) -> Float[Tensor, " P"]:
        values = [one[name][key] for one in place]
        return torch.tensor([torch.nan if v is None else v for v in values], dtype=torch.float64)

    within = {n: left_out(numbers(n, "square") - numbers(n, "pair")) for n in (NONE, BEST)}
    out = {}
    for name in (NONE, BEST, *UNBIASED, *TURNED):
        also: dict[str, Tensor] = {}
        if name in UNBIASED:
            square = left_out(numbers(name, "square")) / UNBIASED[name](size) ** 2
            variance = square - left_out(numbers(name, "pair"))
        elif name in TURNED:
            known = _scaled(place, name, numbers)
            also = {
                key: torch.cat([known.whole[key].unsqueeze(0), known.left[key]])
                for key in ("scale", "relative_bias_rescaled_square")
            }
            variance = left_out(numbers(name, "square") - numbers(name, "pair"))
            variance = variance / also["scale"] ** 2
        else:
            variance = within[name]
        share = (within[NONE] - variance) / (within[NONE] - within[BEST])
        values = {"share": share, "variance": variance} | also
        out[name] = Jackknife(
            whole={key: value[0] for key, value in values.items()},
            left={key: value[1:] for key, value in values.items()},
        )
    return out


def _scaled(place: Place, name: str, numbers: Any) -> Jackknife:
    """By how much an entry's mean is longer than the gradient, and how far it is turned."""

    def vector(entry: str, key: str) -> Float[Tensor, "P k"]:
        return torch.from_numpy(np.stack([one[entry][key] for one in place])).double()

    score = vector("reference", "drift")
    vectors = torch.stack([vector(name, "mean"), vector("reference", "mean"), score, score], 1)
    ones = torch.ones(len(place), dtype=torch.float64)
    square, pair = (numbers(name, key) for key in ("square", "pair"))
    return moments.figures(Averages(vectors=vectors, square=square, pair=pair, kept=ones))


def rows(place: Place, size: int, *, resolved: bool) -> list[Row]:
    """A row a baseline, for the document.

    Args:
        place, size: as of `figures`.
        resolved: whether the gradient is told from 0, without which there is no scale.
    """
    found = figures(place, size)
    possible = found[NONE].minus(found[BEST])
    told = float(possible.value("variance")) > SIGMAS * float(possible.error("variance"))
    return [
        {"baseline": name, "group_size": size} | _row(name, one, told=told, resolved=resolved)
        for name, one in found.items()
    ]


def _row(name: str, found: Jackknife, *, told: bool, resolved: bool) -> Row:
    """Figures with standard errors, or why there are none."""
    row: Row = {"share": None, "standard_error": None, "interval": None, "variance": None,
                "scale": None, "relative_bias": None, "reason": None}  # fmt: skip
    if name in TURNED and not resolved:
        return row | {"reason": "the gradient is not told from 0, so the scale is not known"}
    variance = float(found.value("variance"))
    if not isfinite(variance):
        return row | {"reason": "there are fewer than two groups of a prompt"}
    row["variance"] = variance
    if name in TURNED:
        square = float(found.value("relative_bias_rescaled_square"))
        row |= {"scale": float(found.value("scale")), "relative_bias": max(0.0, square) ** 0.5}
    if not told:
        return row | {"reason": "no baseline is told to reduce the variance: more prompts"}
    low, high = limits.interval(found, "share")
    return row | {
        "share": float(found.value("share")),
        "standard_error": float(found.error("share")),
        "interval": [float(low), float(high)],
    }
