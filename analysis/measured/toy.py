"""What the toy predicts for a measured study, entry by entry, and where it misleads.

The toy is the chain of `choose.merit` at the measured mean length and share of right answers, with
the measured divergence a token between sampler and policy.  Where the trainer does not know how was
drawn, its ratios are 1: every entry is the one without correction.

Order is compared by Spearman's correlation r over n entries, with Bonett and Wright's interval

    tanh(atanh r +- z sqrt((1 + r^2 / 2) / (n - 3)))

in which entries count as draws.  The toy misleads about two entries where it puts one before the
other by a tenth or more, and the measured merits are the other way round, told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from scipy.stats import norm, rankdata
from torch import Tensor

from windage.analysis.choose.merit import FREQUENCIES, Measured, samplers, served
from windage.analysis.choose.request import Request
from windage.analysis.studies.baselines import ENTRIES, by_lengths, shares
from windage.estimators.correction import Correction
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain
from windage.toy.exact.automata import sweep
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.objective import objective

Document = Mapping[str, Any]
Row = dict[str, Any]
FIGURES = ("merit", "relative_bias_rescaled", "variance_rescaled")
NARROWED = {"temperature": "t", "top_p": "p", "top_k": "k"}
SIGMAS, APART, SHOWN = 3.0, 1.1, 3
LEAST = 4
# Groups whose shares on the toy take no more than seconds.
LARGEST = 16


def compared(document: Document) -> Row:
    """The toy's figures, rank correlations with the measured ones, and pairs that it gets wrong."""
    rows = [row for about in document["samplers"] for row in _predicted(document, about)]
    places = [
        (about["sampler"], size)
        for about in document["samplers"]
        for size in document["group_sizes"]
    ]
    agreement = [row for at in places for row in _agreement(document["rows"], rows, at)]
    misled = [row for at in places for row in _misled(document["rows"], rows, at)]
    return {
        "rows": rows,
        "agreement": agreement,
        "misled": misled,
        "baselines": _shares(document.get("baselines", ())),
    }


def _shares(measured: Sequence[Document]) -> list[Row]:
    """Shares of the possible variance reduction on a toy whose lengths differ, where measured."""
    names = {row["baseline"] for row in measured}
    sizes = sorted({row["group_size"] for row in measured if row["group_size"] <= LARGEST})
    rows = shares(by_lengths(), sizes, [name for name in ENTRIES if name in names])
    return [
        {key: row[key] for key in ("problem", "baseline", "group_size", "share")}
        for row in rows
        if row["baseline"] in names
    ]


def _request(document: Document, about: Mapping[str, Any], size: int) -> tuple[Request, int]:
    """The toy's request for a sampler, and its lag."""
    divergence = min(1.0, max(0.0, about["divergence"]))
    steps = int(about["settings"].get("steps", 0)) if about["kind"] == "checkpoint" else 0
    narrowed = about["kind"] in NARROWED
    return Request(
        response_tokens=max(4.0, about["tokens"]),
        group_size=size,
        prompts=1,
        pass_rate=min(0.99, max(0.01, document["gradient"]["reward"])),
        mismatch=0.0 if steps or narrowed else divergence,
        drift=min(0.1, divergence / steps**2) if steps else 0.0,
    ), steps


def _chain(request: Request, steps: int, about: Mapping[str, Any]) -> Chain:
    """The toy under the measured sampler."""
    chain = samplers(request, (steps,))[0]
    if about["kind"] in NARROWED:
        key = NARROWED[about["kind"]]
        return with_behavior(chain, about["kind"], **{key: about["settings"][key]})
    return chain


def uncorrected(estimator: Estimator) -> Estimator:
    """The entry as it is where every ratio is 1.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> uncorrected(get("centered_tis")).describe()
        'group_mean · none · token_sum'
    """
    return replace(estimator, corrections=(Correction(),), centering=None)


def _predicted(document: Document, about: Mapping[str, Any]) -> Iterator[Row]:
    """The toy's figures under one sampler."""
    names = {row["estimator"] for row in document["rows"]}
    sizes = document["group_sizes"]
    request, steps = _request(document, about, min(sizes))
    entries = [e for e in served(request) if e.name in names]
    used = entries if about["told"] else [uncorrected(e) for e in entries]
    try:
        chain = _chain(request, steps, about)
        found = sweep([(e, chain) for e in used], list(sizes), FREQUENCIES)
    except (BadInput, Undefined, ValueError):
        return
    gradient = objective(chain).gradient.flatten()
    for entry, by_size in zip(entries, found, strict=True):
        for size, moments in zip(sizes, by_size, strict=True):
            figures = _figures(moments, gradient, chain.prompts)
            yield {
                "estimator": entry.name,
                "sampler": about["sampler"],
                "group_size": size,
            } | figures


def _figures(moments: Moments, gradient: Tensor, prompts: int) -> Row:
    """Of one group a step."""
    mean, variance = moments.mean.flatten(), moments.variance.view(1)
    one = Measured(gradient=gradient, prompts=prompts, means=mean.unsqueeze(0), variances=variance)
    direction, quiet = one.parts(variance.new_ones(1), 1)
    along = float(gradient @ mean)
    if along <= 0 or direction <= 0:
        return {"merit": 0.0, "relative_bias_rescaled": None, "variance_rescaled": None}
    scale = along / float(gradient.square().sum())
    return {
        "merit": direction * quiet,
        "relative_bias_rescaled": math.sqrt(max(0.0, 1 / direction - 1)),
        "variance_rescaled": float(variance) * prompts / scale**2,
    }


def _pairs(
    measured: Sequence[Document], toy: Sequence[Document], at: tuple[str, int], figure: str
) -> list[tuple[Document, Document]]:
    """Measured and predicted rows of the same entry at a place, where both have the figure."""
    own = {r["estimator"]: r for r in toy if (r["sampler"], r["group_size"]) == at}
    return [
        (row, own[row["estimator"]])
        for row in measured
        if (row["sampler"], row["group_size"]) == at
        and row["estimator"] in own
        and row[figure] is not None
        and own[row["estimator"]][figure] is not None
    ]


def _agreement(
    measured: Sequence[Document], toy: Sequence[Document], at: tuple[str, int]
) -> Iterator[Row]:
    """Rank correlations at a place."""
    for figure in FIGURES:
        pairs = _pairs(measured, toy, at, figure)
        correlation, low, high = spearman(
            [a[figure] for a, _ in pairs], [b[figure] for _, b in pairs]
        )
        yield {
            "sampler": at[0],
            "group_size": at[1],
            "figure": figure,
            "entries": len(pairs),
            "rank_correlation": correlation,
            "low": low,
            "high": high,
        }


def spearman(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    """Spearman's rank correlation and the limits of its interval at 95 %; None: no meaning.

    Example:
        >>> [round(x, 3) for x in spearman([1, 2, 3, 4, 5], [1, 2, 3, 5, 4])]
        [0.9, -0.169, 0.996]
    """
    if len(first) < LEAST:
        return None, None, None
    ranks = [rankdata([float(f"{v:.6g}") for v in values]) for values in (first, second)]
    away = [r - r.mean() for r in ranks]
    size = math.sqrt(float((away[0] ** 2).sum() * (away[1] ** 2).sum()))
    if size == 0:
        return None, None, None
    r = float((away[0] * away[1]).sum()) / size
    if abs(r) > 1 - 1e-12:
        return r, r, r
    half = float(norm.ppf(0.975)) * math.sqrt((1 + r * r / 2) / (len(first) - 3))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def _misled(
    measured: Sequence[Document], toy: Sequence[Document], at: tuple[str, int]
) -> list[Row]:
    """Pairs of entries whose order by merit the toy gets wrong, the worst first."""
    found = []
    for (a, toy_a), (b, toy_b) in permutations(_pairs(measured, toy, at, "merit"), 2):
        gap = b["merit"] - a["merit"]
        errors = [row["standard_error"]["merit"] for row in (a, b)]
        if None in errors or gap <= SIGMAS * math.hypot(*errors) or a["merit"] <= 0:
            continue
        if toy_a["merit"] > APART * toy_b["merit"] and toy_b["merit"] > 0:
            found.append(
                {
                    "sampler": at[0],
                    "group_size": at[1],
                    "toy_prefers": a["estimator"],
                    "measured_prefers": b["estimator"],
                    "toy_ratio": toy_a["merit"] / toy_b["merit"],
                    "measured_ratio": b["merit"] / a["merit"],
                }
            )
    return sorted(found, key=lambda row: -row["measured_ratio"] * row["toy_ratio"])[:SHOWN]
