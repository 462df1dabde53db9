"""Pictures of claims: figures of a row as curves, where a curve says more than a list.

A picture is data: which figures of the row, found by their names, lie on which curve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from windage.analysis.plots import DASHES, Figure, Later, draw

COLORS = ("#0072b2", "#d55e00", "#009e73", "#e69f00")
MARKERS = ("o", "s", "^", "D")
NUMBER = r"([-−]?\d[\d.,_]*(?:e-?\d+)?)"


@final
@dataclass(frozen=True, kw_only=True)
class Picture:
    """Curves of a row's figures.

    Args:
        x, y: what the axes are.
        curves: label of each curve and the name of its figures, {} where the number stands.
        log: axes in powers of ten.
        level: a line to compare with, and its label.
    """

    x: str
    y: str
    curves: Mapping[str, str]
    log: str = ""
    level: tuple[float, str] | None = None


PICTURES = {
    "B-05": Picture(x="group size", y="variance", curves={
        "rloo": "var, rloo, G = {}", "no baseline, mean reward 0": "var, none at E R = 0, G = {}"}),
    "B-09": Picture(x="group size, 48 responses in all", y="variance of the update × 10³",
                    curves={"rloo": "variance of the update ×10³, G = {}"}, log="x"),
    "B-11": Picture(x="λ", y="bias and variance", curves={
        "bias, wavy critic": "bias, wavy, λ = {}", "variance": "var, wavy, λ = {}"}),
    "B-15": Picture(x="policy", y="expected length, tokens", log="x", curves={
        "failing responses": "E[T | fail], policy {}",
        "correct responses": "E[T | success], policy {}"}, level=(4.99934, "at the start")),
    "B-24": Picture(x="length T, tokens", y="weight on the heaviest 1 % of responses",
                    curves={"product of ratios": "weight on 1 %, T = {}"}),
    "B-26": Picture(x="cap", y="bias and variance", log="x", curves={
        "bias": "bias, C = {}", "variance": "var, C = {}"}),
    "B-29": Picture(x="clipped steps", y="ratio of arm 0", log="x",
                    curves={"clip 0.2": "ratio after {} steps"}, level=(1.2, "1 + ε")),
    "B-36": Picture(x="steps", y="entropy of the trainer, nats", log="x",
                    curves={"sampler synced": "entropy, n = {}"}, level=(2.9957, "at the start")),
    "B-39": Picture(x="head tokens k", y="residual", log="xy", curves={
        "unweighted": "residual, k = {}", "capped at 2": "residual, capped, k = {}"}),
    "B-48": Picture(x="responses N", y="share of the best gain of one step", log="x", curves={
        "whole-response ratio": "merit({}), trajectory_is", "token ratio": "merit({}), token_is",
        "capped at 2": "merit({}), sequence_tis"}),
    "T-07": Picture(x="μ₊", y="steps to one half", log="xy", curves={
        "importance sampling": "IS, μ₊ = {}", "positives only": "positives only, μ₊ = {}",
        "truncated": "TIS, μ₊ = {}", "topr": "topr, μ₊ = {}"}),
    "T-08": Picture(x="π₀", y="steps to one half", log="xy", curves={
        "importance sampling": "IS, π₀ = {}", "positives only": "positives only, π₀ = {}",
        "truncated": "TIS, π₀ = {}", "topr": "topr, π₀ = {}"}),
    "G-01": Picture(x="steps between refreshes", y="J after 40 steps", log="x", curves={
        "β = 0.1": "J, β = 0.1, refresh every {}", "β = 1": "J, β = 1, refresh every {}"}),
    "G-05": Picture(x="β", y="reward at the optimum", log="x", curves={
        "proxy": "proxy reward, β = {}", "true": "true reward, β = {}",
        "true, optimized itself": "true reward optimized itself, β = {}"}),
    "G-08": Picture(x="pass over the batch", y="bias and share", log="x", curves={
        "bias": "bias at pass {}", "share clipped": "share clipped at pass {}"}),
}  # fmt: skip


def points(row: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """Numbers in the names of the figures that match, and their values.

    Example:
        >>> points({"figures": [{"name": "bias, C = 1.5", "value": 0.2}]}, "bias, C = {}")
        [(1.5, 0.2)]
    """
    pattern = re.compile(re.escape(name).replace(r"\{\}", NUMBER))
    found = []
    for figure in row["figures"]:
        match = pattern.fullmatch(figure["name"])
        if match and figure["value"] is not None:
            number = match[1].replace(",", "").replace("_", "").replace("−", "-")
            found.append((float(number), figure["value"]))
    return sorted(found)


def picture(row: Mapping[str, Any]) -> Figure | None:
    """The picture of a row, or None where its list says as much."""
    wanted = PICTURES.get(row["id"])
    if wanted is None:
        return None
    curves = {label: points(row, name) for label, name in wanted.curves.items()}

    def paint(canvas: Any) -> Iterable[Later]:
        axes = canvas.subplots()
        for i, (label, curve) in enumerate(curves.items()):
            axes.plot(
                *zip(*curve, strict=True),
                color=COLORS[i],
                marker=MARKERS[i],
                ls=DASHES[i],
                ms=5,
                label=label,
            )
        if wanted.level is not None:
            axes.axhline(wanted.level[0], color="#6b6b6b", lw=0.8, label=wanted.level[1])
        for side in wanted.log:
            axes.set(**{f"{side}scale": "log"})
        axes.set(xlabel=wanted.x, ylabel=wanted.y)
        places = sorted({x for curve in curves.values() for x, _ in curve})
        axes.set_xticks(places, [f"{x:,g}" for x in places])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.legend(frameon=False, fontsize=8)
        return ()

    return draw(
        row["id"].lower(),
        paint,
        size=(6.0, 3.2),
        caption=f"{row['id']}: {wanted.y} by {wanted.x}, the figures of the table below.",
        alt=f"{wanted.y} by {wanted.x}: {', '.join(curves)}.",
    )
