"""Published step times beside ours: constants calibrated on some rows, the others predicted.

One run on 128 GPUs at four staleness thresholds (verl's page on fully asynchronous training); two
runs one step off (verl's page on its one-step-off trainer); generation of 512 responses on one
H100.  A threshold s is the capacity rule: responses start while
started < (s + version + 1) * batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from windage.toy.pipeline.laws import Equal, Lognormal
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import Pipeline

Row = dict[str, Any]
WITHIN = 0.10
BATCH, STEPS, SETTLED, SEED = 512, 150, 25, 0

# Threshold: seconds of a step, waiting for generation, of an update.
THRESHOLDS = {
    0.0: (231.3, 128.5, 98.8),
    0.1: (171.3, 58.2, 109.1),
    0.3: (146.1, 38.9, 103.2),
    0.5: (150.6, 33.1, 113.2),
}
# A step, its wait, log-probabilities and update, seconds.
ONE_STEP_OFF = {"first": (520.0, 45.0, 108.0, 337.0), "second": (566.0, 59.0, 120.0, 347.0)}
# Colocated: a step, and what it is made of.
COLOCATED = (356.3, 177.9, 53.9, 113.8)
# Minutes by thousands of tokens.
GENERATION = {"7B": {2: 3.0, 8: 11.0, 32: 45.0}, "32B": {2: 14.0, 8: 56.0, 32: 222.0}}


def wait(capacity: float, update: float, mean: float, sigma: float) -> float:
    """Mean seconds from a commit to the next batch: as many slots as responses in a batch."""
    pipeline = Pipeline(
        slots=BATCH,
        batch=BATCH,
        tokens=Lognormal(mean, sigma),
        update=Equal(update),
        capacity=capacity,
    )
    steps = simulate(pipeline, STEPS, np.random.default_rng(SEED)).steps[SETTLED - 1 :]
    return float((steps["taken"][1:] - steps["commit"][:-1]).mean())


@cache
def constants() -> tuple[float, float]:
    """Mean and spread of the time of a response that give the waits at thresholds 0 and 0.1."""
    from scipy.optimize import brentq

    (_, slow, first), (_, fast, second) = THRESHOLDS[0.0], THRESHOLDS[0.1]

    def mean(sigma: float) -> float:
        return slow / wait(0.0, first, 1.0, sigma)

    sigma = brentq(lambda s: wait(0.1, second, mean(s), s) - fast, 0.2, 1.0, xtol=1e-3, maxiter=30)
    return mean(sigma), sigma


def compared(table: str, row: str, what: str, ours: float, published: float, role: str) -> Row:
    """A row of the comparison; `holds` only where something was predicted."""
    gap = ours / published - 1
    return {
        "table": table,
        "row": row,
        "figure": what,
        "ours": ours,
        "published": published,
        "gap": gap,
        "role": role,
        "holds": None if role == "calibrated" else abs(gap) <= WITHIN,
    }


def thresholds() -> list[Row]:
    """Steps at four thresholds from the two constants; what else a step takes is row 0's."""
    mean, sigma = constants()
    step, waited, update = THRESHOLDS[0.0]
    other = step - waited - update
    rows = []
    for threshold, (published, _, trained) in THRESHOLDS.items():
        ours = wait(threshold, trained, mean, sigma) + trained + other
        role = "calibrated" if threshold <= 0.1 else "predicted"
        name = f"staleness threshold {threshold:g}"
        rows.append(compared("fully asynchronous", name, "step, s", ours, published, role))
    return rows


def step(mode: str, generation: float, scoring: float, update: float) -> float:
    """Seconds of a settled step with responses of equal length."""
    pipeline = Pipeline(
        mode=mode,
        tokens=Equal(generation),
        scoring_seconds=scoring,
        update=Equal(update),
    )
    return float(np.diff(simulate(pipeline, 6, np.random.default_rng(SEED)).steps["commit"])[-1])


def one_step_off() -> list[Row]:
    """Steps from their parts, and the second run from the generation time of the first."""
    whole, generation, scoring, update = COLOCATED
    ours = step("synchronous", generation, scoring, update)
    rows = [compared("colocated", "128 GPUs", "step, s", ours, whole, "sum of parts")]
    first = sum(ONE_STEP_OFF["first"][1:])
    for name, (published, waited, scored, trained) in ONE_STEP_OFF.items():
        own = step("overlap", waited + scored + trained, scored, trained)
        rows.append(
            compared("one step off", f"{name} run", "step, s", own, published, "sum of parts")
        )
    published, _, scored, trained = ONE_STEP_OFF["second"]
    ours = step("overlap", first, scored, trained)
    name = "second run, generation of the first"
    return [*rows, compared("one step off", name, "step, s", ours, published, "predicted")]


def generation() -> list[Row]:
    """Minutes to write 512 responses of equal length; seconds a token are those at 8k."""
    rows = []
    for model, minutes in GENERATION.items():
        for thousands, published in minutes.items():
            pipeline = Pipeline(
                mode="synchronous",
                slots=512,
                batch=512,
                tokens=Equal(1000.0 * thousands),
                token_seconds=60 * minutes[8] / 8000,
                update=Equal(0.0),
            )
            ours = simulate(pipeline, 1, np.random.default_rng(SEED)).seconds / 60
            role = "calibrated" if thousands == 8 else "predicted"
            name = f"{model}, {thousands}k tokens"
            rows.append(compared("512 responses, one H100", name, "minutes", ours, published, role))
    return rows


def run() -> Row:
    """Every published figure beside ours, and the constants that were calibrated."""
    mean, sigma = constants()
    rows = [*thresholds(), *one_step_off(), *generation()]
    return {"rows": rows, "mean_seconds": mean, "sigma": sigma, "within": WITHIN}
