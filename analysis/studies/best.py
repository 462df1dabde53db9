"""Each row of a study beside the best that own-token weights attain on the same problem.

Rows are held against the class of their own advantage where that is a constant, and against that of
the leave-one-out advantage otherwise, so that every one of them could be replaced by a member of
the class without another advantage.  A row outside the class may lie beyond its frontier: weights
of the whole response, advantages over the group's spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from windage.analysis.studies.grid import Cell, Settings, cells, sites
from windage.estimators.advantage import constant, leave_one_out
from windage.estimators.catalogue import get
from windage.estimators.member import Member, use
from windage.toy.exact.frontier import Forms, attainable, forms

PRICES = tuple(10 ** (k / 4) for k in range(-24, 9))
LARGEST = 1e6
TOO_LARGE = "the frontier takes V^2 numbers a prefix: {:.1e} here; at most {:.0e}"
NO_GRADIENT = "no gradient, so that nothing is relative to it"
HUGE = 1e100
FORMS = ("", "_rescaled")
NAMES = tuple(f"excess_{x}{form}" for x in ("bias", "variance", "error") for form in FORMS)

Row = dict[str, Any]


def beside_frontier(
    settings: Settings, rows: Iterable[Mapping[str, Any]], batches: float = 1.0
) -> dict[str, Any]:
    """The frontier of every point, and the rows with their distance from it.

    excess_bias: relative bias minus the least with no more variance.
    excess_variance: variance over the least with no more bias, minus 1; None where own-token
        weights have no such bias.
    excess_error: mean squared error of so many batches over the least, minus 1.

    Args:
        settings: of the study.
        rows: its rows, in order.
        batches: at which errors are compared.

    Returns:
        `frontier`, one entry a point, advantage and price; `rows`; `frontier_reason` where a
        problem is too large.
    """
    out: list[Row] = [{**row, **dict.fromkeys(NAMES), "frontier_advantage": None} for row in rows]
    points: list[Row] = []
    reasons: dict[str, None] = {}
    for site, here in sites(settings, cells(settings)):
        size = float(site.logits.numel() * site.logits.shape[-1])
        if size > LARGEST:
            reasons[TOO_LARGE.format(size, LARGEST)] = None
            continue
        groups: dict[tuple[Member, int], list[Cell]] = {}
        for cell in here:
            if cell.group_size > 1 or _advantage(cell).function is constant:
                groups.setdefault((_advantage(cell), cell.group_size), []).append(cell)
        for (advantage, group_size), mine in groups.items():
            form = forms(advantage, site, group_size)
            if not float(form.gradient.norm()) > 0:
                reasons[NO_GRADIENT] = None
                continue
            place = {**dict(mine[0].problem), **dict(mine[0].behavior)}
            at = {key: place[key] for key in settings.sweep if key in place}
            points += _points(form, {**at, "group_size": group_size}, advantage, site.prompts)
            _excess(form, [out[cell.number] for cell in mine], advantage, batches)
    found = {"frontier": points, "rows": out, "frontier_batches": batches}
    return {**found, "frontier_reason": "; ".join(reasons)} if reasons else found


def _advantage(cell: Cell) -> Member:
    """The advantage of the class that a row is held against."""
    name, given = cell.estimator
    own = get(name, **dict(given)).advantage
    return own if own.function is constant else use(leave_one_out)


def _points(form: Forms, place: Row, advantage: Member, prompts: int) -> list[Row]:
    """The curve, from the largest price of variance to the least."""
    curve = form.curve(torch.tensor(PRICES[::-1], dtype=torch.float64))
    size = float(form.gradient.norm())
    error = (curve.bias + curve.price * curve.variance).sqrt() / size
    columns = {
        "price": curve.price,
        "batches": 1 / curve.price,
        "groups": prompts / curve.price,
        "relative_bias": curve.bias.sqrt() / size,
        "variance": curve.variance,
        "relative_error": error,
        "scale": curve.scale,
        "relative_bias_rescaled": curve.bias_rescaled.sqrt() / size,
        "variance_rescaled": curve.variance_rescaled,
        "residual": curve.residual,
    }
    table = {key: values.tolist() for key, values in columns.items()}
    return [
        {**place, "advantage": advantage.describe(), **{key: v[k] for key, v in table.items()}}
        for k in range(len(PRICES))
    ]


def _excess(form: Forms, rows: list[Row], advantage: Member, batches: float) -> None:
    """Write into rows how far they are from the frontier."""
    size = float(form.gradient.norm())
    least = form.curve(torch.tensor([1 / batches], dtype=torch.float64))
    for kind in FORMS:
        mine = [row for row in rows if _comparable(row, kind)]
        if not mine:
            continue
        bias = torch.tensor([row[f"relative_bias{kind}"] for row in mine], dtype=torch.float64)
        variance = torch.tensor([row[f"variance{kind}"] for row in mine], dtype=torch.float64)
        best = attainable(form, (bias * size).square(), variance, rescaled=bool(kind))
        floor = (
            least.bias_rescaled + least.variance_rescaled / batches
            if kind
            else least.bias + least.variance / batches
        )
        error = (bias * size).square() + variance / batches
        columns = {
            "excess_bias": bias - best.bias.sqrt() / size,
            "excess_variance": variance / best.variance - 1,
            "excess_error": error / floor - 1,
        }
        for name, values in columns.items():
            for row, value in zip(mine, values.tolist(), strict=True):
                row[f"{name}{kind}"] = value if math.isfinite(value) else None
                row["frontier_advantage"] = advantage.describe()


def _comparable(row: Row, kind: str) -> bool:
    """Whether a row has the figures, all of a size that can be squared."""
    figures = row[f"relative_bias{kind}"], row[f"variance{kind}"]
    if None in figures or (kind and row["scale"] <= 0):
        return False
    return all(abs(value) < HUGE for value in figures)
