"""A recipe's card before a run: what it claims, audited, and what it would be at the run's length.

The claims are those of `windage audit`, decided now.  Bias and variance are exact, of the chain of
`windage choose` at the longest response, the group size and the lags of the run; where the
recursion over states does not serve the recipe, the card says so and why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from windage.analysis.audit.entry import audit
from windage.analysis.choose import merit
from windage.analysis.choose.request import Request
from windage.analysis.studies.study import bind
from windage.estimators.claims import PROPERTIES
from windage.estimators.estimator import Estimator
from windage.toy.exact.automata import refusal
from windage.toy.exact.plan import undefined

SCHEMA = "windage/card/1"


def card(
    estimator: Estimator,
    *,
    length: float,
    group_size: int,
    lag: int,
    mismatch: float,
    drift: float = 1e-6,
    seed: int = 0,
) -> dict[str, Any]:
    """The card of a recipe.

    Args:
        estimator: with its settings.
        length: mean tokens of a response.
        group_size: of the run.
        lag: updates between the weights that draw and those that are trained, at the most.
        mismatch: KL a token between trainer and sampler of the same weights, in nats.
        drift: KL a token between policies one update apart.
        seed: of the toys.
    """
    started = time.perf_counter()
    rows = [row.document() for row in audit(estimator, seed=seed, target=estimator.name)]
    request = Request(
        response_tokens=max(length, 4.0),
        group_size=max(group_size, 2),
        mismatch=mismatch,
        drift=drift,
        seed=seed,
    )
    return {
        "schema": SCHEMA,
        "recipe": estimator.name,
        "settings": {k: v for k, v in estimator.settings.items() if v is not None},
        "composition": estimator.describe(),
        "paper": estimator.paper,
        "differences": list(estimator.differences),
        "claims": [_claim(row) for row in rows],
        "failed": sum(row["ok"] is False for row in rows),
        "at": {
            "response_tokens": request.response_tokens,
            "group_size": request.group_size,
            "mismatch": mismatch,
            "drift": drift,
        },
        "lags": _lags(estimator, request, sorted({0, lag})),
        "seconds": time.perf_counter() - started,
    }


def _claim(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "property": row["property"],
        "claimed": row["claimed"],
        "measured": row["measured"],
        "verdict": row["verdict"],
        "ok": row["ok"],
        "means": PROPERTIES.get(row["property"], ""),
    }


def _lags(estimator: Estimator, request: Request, ladder: list[int]) -> list[dict[str, Any]]:
    """Exact figures at each lag, or why there are none."""
    chain = merit.model(request)
    reason = undefined(estimator, chain, request.group_size)
    if reason is not None or refusal(estimator, chain):
        return [{"lag": lag, "reason": reason or refusal(estimator, chain)} for lag in ladder]
    found = merit.measure(request, [bind(estimator, chain)], ladder)[estimator.name]
    goal = found.gradient
    square = goal.square().sum()
    out = []
    for place, lag in enumerate(ladder):
        mean = found.means[place]
        scale = float(goal @ mean / square)
        direction, quiet = found.parts(torch.eye(len(ladder), dtype=goal.dtype)[place], 1)
        out.append(
            {
                "lag": lag,
                "scale": scale,
                "cosine": float(goal @ mean / (square.sqrt() * mean.norm())),
                "relative_bias": float((mean - goal).norm() / square.sqrt()),
                "variance": float(found.variances[place]) * found.prompts,
                "merit_of_a_prompt": direction * quiet,
                "reason": None,
            }
        )
    return out


def lines(document: Mapping[str, Any]) -> list[str]:
    """The card as a person reads it."""
    out = [f"recipe {document['recipe']}: {document['composition']}"]
    for row in document["claims"]:
        if row["ok"] is False or row["property"] in PROPERTIES:
            word = "NOT AS CLAIMED" if row["ok"] is False else "as claimed"
            size = "" if row["measured"] is None else f", departs by {row['measured']:.2g}"
            out.append(f"  {row['property']}: {row['verdict']}, {word}{size}")
    rest = sum(
        row["ok"] is True and row["property"] not in PROPERTIES for row in document["claims"]
    )
    out.append(f"  {rest} further properties: as claimed")
    at = document["at"]
    words = f"{at['response_tokens']:g} tokens, groups of {at['group_size']}"
    for row in document["lags"]:
        where = f"  lag {row['lag']}, {words}: "
        if row["reason"] is not None:
            out.append(f"{where}not computed, {row['reason']}")
            continue
        out.append(
            f"{where}scale {row['scale']:.3g}, cosine {row['cosine']:.4f}, relative bias "
            f"{row['relative_bias']:.3g}, variance of one prompt {row['variance']:.3g}"
        )
    return out
