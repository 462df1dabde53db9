"""Bounds on the figures of a row whose moments are known up to a bound.

With e the bound on the length of the mean's error, eps = e / |grad J| the one on the scale c, and
v the variance with bound b,

    relative_bias            eps                 cosine             2 e / |E g|
    relative_bias_rescaled   (eps + |E g| eps / (|c| |grad J|)) / (|c| - eps)
    variance                 b
    variance_rescaled        (v + b) / (|c| - eps)^2 - v / c^2
    signal_to_noise          (|E g| + e)^2 / (v - b) - |E g|^2 / v
"""

from __future__ import annotations

from windage.toy.exact.moments import Moments
from windage.toy.objective import Objective
from windage.toy.sampling import Figures


def figure_bounds(moments: Moments, goal: Objective, figures: Figures) -> Figures | None:
    """How far each figure may be from the truth; None as a whole where the moments are exact.

    A figure that has no value has no bound, nor has one whose bound is no number: a quotient by a
    scale that may be 0.
    """
    known = moments.bounds
    if known is None:
        return None
    gradient, length = float(goal.gradient.norm()), float(moments.mean.norm())
    out: Figures = dict.fromkeys(figures)
    out["variance"], out["drift"] = known.variance, known.drift
    scale, variance = figures["scale"], figures["variance"]
    if scale is None or variance is None:
        return out
    if figures["signal_to_noise"] is not None and variance > known.variance:
        most = (length + known.mean) ** 2 / (variance - known.variance)
        out["signal_to_noise"] = most - length**2 / variance
    eps, size = known.mean / gradient, abs(scale)
    out["scale"] = out["relative_bias"] = eps
    if figures["cosine"] is not None:
        out["cosine"] = min(2.0, 2 * known.mean / length)
    if figures["relative_bias_rescaled"] is not None and size > eps:
        least = size - eps
        out["relative_bias_rescaled"] = eps * (1 + length / (size * gradient)) / least
        out["variance_rescaled"] = (variance + known.variance) / least**2 - variance / size**2
    return out
