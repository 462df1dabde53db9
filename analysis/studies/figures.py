"""The figures of a study's row, from exact moments or from a sample.

    scale = <E g, grad J> / <grad J, grad J>        relative_bias = |E g - grad J| / |grad J|
    cosine = <E g, grad J> / (|E g| |grad J|)       variance = trace of Cov g
    relative_bias_rescaled and variance_rescaled: after dividing the estimate by scale
    drift = |E g| with advantage 1          signal_to_noise = |E g|^2 / variance

A quotient without meaning is None.
"""

from __future__ import annotations

import math

from torch import Tensor

from windage.toy.exact.moments import Moments
from windage.toy.objective import Objective
from windage.toy.sampling import Figures, Sample

NAMES = (
    "scale",
    "cosine",
    "relative_bias",
    "relative_bias_rescaled",
    "variance",
    "variance_rescaled",
    "drift",
    "signal_to_noise",
)
TINY = 1e-12


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def _figures(
    along: float,
    squared: float,
    gradient_squared: float,
    variance: float,
    drift: float,
    tiny: float,
    noise: float = 0.0,
) -> Figures:
    """Figures from <E g, grad J>, |E g|^2 (noise included) and |grad J|^2."""
    norm = math.sqrt(gradient_squared)
    out: Figures = dict.fromkeys(NAMES)
    out["variance"], out["drift"] = variance, drift
    if norm <= tiny:
        return out
    scale = along / gradient_squared
    length = math.sqrt(max(0.0, squared - noise))
    away = squared - 2 * along + gradient_squared - noise
    out["scale"] = scale
    if variance > tiny**2:
        out["signal_to_noise"] = max(0.0, squared - noise) / variance
    out["relative_bias"] = math.sqrt(max(0.0, away)) / norm
    if length > tiny:
        out["cosine"] = max(-1.0, min(1.0, along / (length * norm)))
    if abs(scale) * norm > tiny:
        across = squared - along**2 / gradient_squared - noise
        out["relative_bias_rescaled"] = math.sqrt(max(0.0, across)) / (abs(scale) * norm)
        out["variance_rescaled"] = variance / scale**2
    return out


def tolerance(rewards: Tensor) -> float:
    """The length of a gradient below which quotients by it have no meaning."""
    return TINY * float(rewards.abs().max())


def from_moments(moments: Moments, objective: Objective, rewards: Tensor) -> Figures:
    """Figures of exact moments; differences are taken before norms, so that 0 is 0."""
    tiny = tolerance(rewards)
    g, m = objective.gradient, moments.mean
    out = _figures(
        _dot(m, g),
        _dot(m, m),
        _dot(g, g),
        float(moments.variance),
        float(moments.drift.norm()),
        tiny,
    )
    if out["scale"] is not None:
        norm = float(g.norm())
        out["relative_bias"] = float((m - g).norm()) / norm
        if out["relative_bias_rescaled"] is not None:
            out["relative_bias_rescaled"] = float((m / out["scale"] - g).norm()) / norm
    return out


def from_sample(sample: Sample, objective: Objective, rewards: Tensor) -> Figures:
    """Figures of a sample, with the noise of the average taken out of squared norms."""
    blocks = len(sample.mean)

    def average(parts: Tensor) -> tuple[Tensor, float]:
        mean = parts.mean(0)
        return mean, _dot(parts - mean, parts - mean) / (blocks * (blocks - 1))

    m, noise = average(sample.mean)
    drift, drift_noise = average(sample.drift)
    g = objective.gradient
    squared = _dot(m, m)
    variance = float(sample.square.mean()) - (squared - noise)
    drifted = math.sqrt(max(0.0, _dot(drift, drift) - drift_noise))
    return _figures(_dot(m, g), squared, _dot(g, g), variance, drifted, tolerance(rewards), noise)
