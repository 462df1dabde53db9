"""Synthetic curves of score by compute, and how often the intervals of a fit hold the truth."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from windage.analysis.pipeline.curve import Data, Floats, fit, interval, sigmoid

TRUTH = {"A": 0.7, "B": 1.1, "C_mid": 4.0}
BASE, NOISE = 0.1, 0.015
COMPUTE = np.geomspace(0.05, 200, 24)


def noisy(seed: int, compute: Floats = COMPUTE, *, base: float | None = None) -> Data:
    """A curve with the true parameters and normal errors; `base` is told to the fit, or not."""
    clean = sigmoid(compute, TRUTH["A"], TRUTH["B"], TRUTH["C_mid"], BASE)
    noise = NOISE * np.random.default_rng(seed).normal(size=len(compute))
    return Data(compute=compute, score=clean + noise, base=base)


def covered(seeds: Iterable[int], base: float | None) -> dict[str, int]:
    """In how many of the curves the interval of each parameter holds the truth."""
    hits = dict.fromkeys(TRUTH, 0)
    for seed in seeds:
        found = fit(noisy(seed, base=base))
        for name, truth in TRUTH.items():
            low, high = interval(found, name)
            hits[name] += low <= truth <= high
    return hits
