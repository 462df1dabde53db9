"""What a study found, as a document: a row an entry, group size and sampler.

Errors and intervals are by prompt, of the averages in the study's folder.  Nothing is said of a
figure inside three standard errors: a bias is `resolved` or not, and an entry is told from the one
of most merit or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windage.llm.measure import baselines, limits, moments, store
from windage.llm.measure.behavior import Behavior
from windage.llm.measure.moments import SIGMAS, Averages, Jackknife
from windage.llm.measure.plan import UNBIASED
from windage.llm.measure.study import Ready

SCHEMA = "windage/measure/1"
# Share of responses that is left by their weights, below which weights make no control.
EFFECTIVE = 0.5
LENGTHS = {
    "relative_bias": "relative_bias_square",
    "relative_bias_rescaled": "relative_bias_rescaled_square",
    "drift": "drift_square",
}
PLAIN = (
    "scale",
    "cosine",
    "variance",
    "variance_within",
    "variance_rescaled",
    "signal_to_noise",
    "merit",
)
PAIRED = ("merit", "cosine", "scale", "relative_bias_square", "variance_rescaled")
Row = dict[str, Any]
Place = Sequence[Mapping[str, store.Row]]


def document(study: Ready, folder: Path, seconds: float) -> Row:
    """The figures of everything that the folder holds."""
    request = study.request
    rows: list[Row] = []
    samplers: list[Row] = []
    gradient: Row = {}
    for behavior in request.samplers:
        for size in request.group_sizes:
            place = [store.read(folder, p, behavior.name, size) for p in range(request.prompts)]
            about = _sampler(behavior, place)
            gradient = _gradient(place)
            rows += _rows(study, behavior, size, place, about)
        samplers.append(about)
    return {
        "schema": SCHEMA,
        "model": Path(request.model).name,
        "task": request.task,
        "prompts": request.prompts,
        "references": request.references,
        "responses": request.responses,
        "group_sizes": list(request.group_sizes),
        "parameters": {"which": request.parameters, "count": study.cost["parameters"]},
        "sketch": {
            "numbers": study.cost["sketch"],
            "error": study.cost["sketch_error"],
            "error_seen": study.cost.get("sketch_error_seen"),
        },
        "max_tokens": request.max_tokens,
        "error": request.error,
        "seed": request.seed,
        "level": moments.LEVEL,
        "gradient": gradient,
        "samplers": samplers,
        "rows": rows,
        "baselines": _baselines(study, folder, resolved=gradient["resolved"]),
        "cost": study.cost,
        "seconds": seconds,
    }


def _baselines(study: Ready, folder: Path, *, resolved: bool) -> list[Row]:
    """Shares of the possible variance reduction, on the policy's own responses."""
    found: list[Row] = []
    for size in study.request.group_sizes:
        if size <= study.request.references:
            prompts = range(study.request.prompts)
            place = [store.read(folder, p, baselines.SAMPLER, size) for p in prompts]
            found += baselines.rows(place, size, resolved=resolved)
    return found


def _mean(place: Place, name: str, key: str) -> float:
    return float(np.mean([one[name][key] for one in place]))


def _sampler(behavior: Behavior, place: Place) -> Row:
    """How far a sampler is from the policy."""
    square = _mean(place, "", "weight_square")
    return {
        "sampler": behavior.name,
        "kind": behavior.kind,
        "settings": behavior.settings,
        "told": behavior.told,
        "tokens": _mean(place, "", "tokens"),
        "reward": _mean(place, "", "reward"),
        "divergence": _mean(place, "", "gap"),
        "effective_share": _mean(place, "", "weight") ** 2 / square if square else None,
    }


def _vector(place: Place, name: str, key: str) -> torch.Tensor:
    """A vector a prompt."""
    return torch.from_numpy(np.stack([one[name][key] for one in place])).double()


def _gradient(place: Place) -> Row:
    """The gradient of J, from the policy's own responses."""
    vectors = [_vector(place, "reference", key) for key in ("mean", "drift")]
    ones = torch.ones(len(place)).double()
    found = moments.figures(
        Averages(
            vectors=torch.stack([vectors[0], vectors[0], vectors[0], vectors[1]], 1),
            square=ones,
            pair=ones,
            kept=ones,
        )
    )
    square, error = float(found.value("gradient_square")), float(found.error("gradient_square"))
    low, high = (float(x) for x in limits.interval(found, "gradient_square"))
    return {
        "norm": math.sqrt(max(0.0, square)),
        "interval": [math.sqrt(max(0.0, low)), math.sqrt(max(0.0, high))],
        "resolved": square > SIGMAS * error,
        "reward": _mean(place, "reference", "reward"),
        "tokens": _mean(place, "reference", "tokens"),
    }


def _rows(study: Ready, behavior: Behavior, size: int, place: Place, about: Row) -> list[Row]:
    """Every entry with one sampler and group size."""
    controlled = behavior.covers and (about["effective_share"] or 0) >= EFFECTIVE
    found = {name: _figures(place, name, controlled=controlled) for name in study.entries}
    shown = [n for n in found if n != UNBIASED or n in _asked(study)]
    made = {name: _row(found[name], study.request.error, size) for name in shown}
    merits = {n: made[n]["merit"] for n in shown if made[n]["merit"] is not None}
    best = max(merits, key=lambda n: merits[n], default=None)
    return [
        {"estimator": name, "sampler": behavior.name, "group_size": size}
        | {"groups": place[0][name]["groups"] * len(place), "kept": _mean(place, name, "kept")}
        | {"controls": 1 + controlled}
        | made[name]
        | {"paired": None if best in (None, name) else _paired(best, found[name], found[best])}
        for name in shown
    ]


def _asked(study: Ready) -> list[str]:
    given = [name for name, _ in study.request.estimators]
    return given or list(study.entries)


def _figures(place: Place, name: str, *, controlled: bool) -> Jackknife:
    """One entry's figures; controls are the mean score, and the weighted one of the data."""
    vectors = [
        _vector(place, name, "mean"),
        _vector(place, "reference", "mean"),
        _vector(place, name, "drift"),
        _vector(place, "reference", "drift"),
    ]
    if controlled:
        vectors.append(_vector(place, UNBIASED, "drift"))
    numbers = {
        key: torch.tensor(
            [math.nan if one[name][key] is None else one[name][key] for one in place]
        ).double()
        for key in ("square", "pair", "kept")
    }
    return moments.figures(Averages(vectors=torch.stack(vectors, 1), **numbers))


def _plain(value: Any) -> float | None:
    """A number, None where it has no meaning."""
    number = float(value)
    return number if math.isfinite(number) else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(max(0.0, value))


def _row(found: Jackknife, wanted: float, size: int) -> Row:
    """Figures, standard errors, intervals, and what they decide."""
    square = float(found.value("gradient_square"))
    told = square > SIGMAS * float(found.error("gradient_square"))
    row: Row = {"reason": None if told else "the gradient is not told from 0: more prompts"}
    errors: dict[str, float | None] = {}
    bounds: dict[str, list[float | None] | None] = {}
    for name in (*PLAIN, *LENGTHS):
        key = LENGTHS.get(name, name)
        absolute = key in ("variance", "variance_within", "drift_square")
        value = _plain(found.value(key)) if told or absolute else None
        if name == "cosine" and value is not None:
            value = max(-1.0, min(1.0, value))
        error = None if value is None else _plain(found.error(key))
        ends = None if value is None else [_plain(x) for x in limits.interval(found, key)]
        if ends and name not in LENGTHS and None in ends:  # its divisor is not told from 0
            value = error = None
        if name in LENGTHS:
            row[f"{name.replace('relative_', '')}_resolved"] = (
                None if value is None or error is None else value > SIGMAS * error
            )
            ends = None if ends is None else [_root(x) for x in ends]
            error = None if error is None or not value or value <= 0 else error / 2 / _root(value)  # type: ignore[operator]
            value = _root(value)
        row[name], errors[name], bounds[name] = value, error, ends
    return row | _needed(row, square, wanted, size) | {"standard_error": errors, "interval": bounds}


def _needed(row: Row, square: float, wanted: float, size: int) -> Row:
    """Fewest groups at which the root mean squared error is the share wanted.

    Prompts are drawn anew for every group, as in training.
    """
    out: Row = {"groups_needed": None, "responses_needed": None, "groups_needed_reason": None}
    bias = row["relative_bias"]
    if bias is None or row["variance"] is None or square <= 0:
        return out | {"groups_needed_reason": row["reason"]}
    room = wanted**2 - bias**2
    if room <= 0:
        why = f"the bias alone is {bias:.3g}, above {wanted:g}"
        if not row["bias_resolved"]:
            why = f"the bias is not told from 0 by sampling, but not from {wanted:g} either"
        return out | {"groups_needed_reason": why}
    groups = max(1, math.ceil(max(0.0, row["variance"]) / square / room))
    return out | {"groups_needed": groups, "responses_needed": groups * size}


def _paired(best: str, mine: Jackknife, other: Jackknife) -> Row:
    """Differences from the entry of most merit on the same responses."""
    apart = mine.minus(other)
    difference = {name: _plain(apart.value(name)) for name in PAIRED}
    errors = {name: _plain(apart.error(name)) for name in PAIRED}
    gap, error = difference["merit"], errors["merit"]
    told = None if gap is None or error is None else abs(gap) > SIGMAS * error
    return {
        "estimator": best,
        "difference": difference,
        "standard_error": errors,
        "told_apart": told,
    }
