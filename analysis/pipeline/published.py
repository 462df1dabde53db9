"""Published step times beside ours: constants calibrated on one row of a table, others predicted.

One run on 128 GPUs at four staleness thresholds (verl's page on fully asynchronous training); two
runs one step off (verl's page on its one-step-off trainer); generation of 512 responses on one
H100.  A threshold s is the capacity rule: prompts start while
started < (s + published + 1) * 512.

The threshold runs as their page and script describe them: 64 GPUs write on 16 engines, each 16
prompts at a time; a prompt's slot is free when the slowest of its 16 responses is complete; the
trainer takes 128 prompts, trains, takes the next; after four updates weights are published.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from windage.toy.pipeline.laws import Empirical, Equal
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import Pipeline

Row = dict[str, Any]
WITHIN = 0.10
SLOTS, TAKEN, UPDATES, GROUP = 256, 128, 4, 16
VERSIONS, SETTLED, SEED = 60, 10, 0
# Spread of the logarithm of a response's time: the default of `windage pipeline`; a row states one
# waiting time, so it calibrates the mean alone.  Others show how far that choice matters.
SIGMA, SIGMAS = 0.6, (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

# Threshold: seconds of a step, waiting for generation, of an update.
THRESHOLDS = {
    0.0: (231.3, 128.5, 98.8),
    0.1: (171.3, 58.2, 109.1),
    0.3: (146.1, 38.9, 103.2),
    0.5: (150.6, 33.1, 113.2),
}
# Seconds to fetch a step's samples, which no writing hides: all that the trainer waits for as many
# samples on 32 GPUs, where it trains for 269.8 of 294.8 s and lets 256 prompts run ahead.
FETCH = 21.3
# A step, its wait, generation, log-probabilities and update, seconds.
ONE_STEP_OFF = {
    "FSDP2": (520.0, 45.0, 458.0, 108.0, 337.0),
    "Megatron": (566.0, 59.0, 501.0, 120.0, 347.0),
}
# Colocated, by GPUs: a step, its generation, log-probabilities and update.
COLOCATED = {
    32: (790.1, 357.4, 107.7, 313.8),
    64: (365.3, 150.7, 70.3, 133.4),
    128: (356.3, 177.9, 53.9, 113.8),
}
# Minutes by thousands of tokens.
GENERATION = {"7B": {2: 3.0, 8: 11.0, 32: 45.0}, "32B": {2: 14.0, 8: 56.0, 32: 222.0}}


@cache
def slowest(sigma: float) -> Empirical:
    """Times of the slowest of a group of lognormal responses of mean 1."""
    normal = np.random.default_rng(SEED).normal(size=(16_384, GROUP)).max(axis=1)
    return Empirical(np.exp(sigma * normal - sigma**2 / 2))


def threshold_step(threshold: float, update: float, other: float, mean: float, s: float) -> float:
    """Mean seconds from a publication to the next."""
    pipeline = Pipeline(
        slots=SLOTS,
        batch=TAKEN,
        publish_every=UPDATES,
        capacity=threshold,
        tokens=slowest(s),
        token_seconds=mean,
        scoring_seconds=other / UPDATES,
        update=Equal(update / UPDATES),
    )
    steps = simulate(pipeline, UPDATES * VERSIONS, np.random.default_rng(SEED)).steps
    published = steps["commit"][UPDATES - 1 :: UPDATES]
    return float(published[-1] - published[SETTLED]) / (VERSIONS - 1 - SETTLED)


def steps_at(sigma: float, fetch: float = FETCH) -> tuple[float, dict[float, float]]:
    """Mean time of a response that gives the step at threshold 0, and the steps at all four."""
    from scipy.optimize import brentq

    step, waited, update = THRESHOLDS[0.0]
    other = fetch + step - waited - update

    def excess(mean: float) -> float:
        return threshold_step(0.0, update, other, mean, sigma) - step

    mean = brentq(excess, 1.0, step, xtol=1e-2, maxiter=40)
    return mean, {
        threshold: threshold_step(threshold, trained, other, mean, sigma)
        for threshold, (_, _, trained) in THRESHOLDS.items()
    }


def worst(steps: dict[float, float]) -> float:
    """Largest gap among the predicted thresholds, as a share."""
    return max(abs(ours / THRESHOLDS[at][0] - 1) for at, ours in steps.items() if at > 0)


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


def thresholds(steps: dict[float, float]) -> list[Row]:
    """Steps at four thresholds, beside the published ones."""
    return [
        compared(
            "fully asynchronous",
            f"staleness threshold {threshold:g}",
            "step, s",
            ours,
            THRESHOLDS[threshold][0],
            "predicted" if threshold else "calibrated",
        )
        for threshold, ours in steps.items()
    ]


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
    """Steps from their parts; and steps as the longer of writing and training.

    What writing takes besides generation (sending weights, gathering a batch) is what is left of
    the first run's step; the second is predicted from its own generation and training.
    """
    rows = []
    for gpus, (whole, *parts) in COLOCATED.items():
        ours = step("synchronous", *parts)
        rows.append(compared("colocated", f"{gpus} GPUs", "step, s", ours, whole, "sum of parts"))
    for name, (published, waited, _, scored, trained) in ONE_STEP_OFF.items():
        ours = step("synchronous", waited, scored, trained)
        rows.append(compared("one step off", name, "step, s", ours, published, "sum of parts"))
    whole, _, written, _, _ = ONE_STEP_OFF["FSDP2"]
    other = whole - written
    for name, (published, _, generated, scored, trained) in ONE_STEP_OFF.items():
        ours = step("overlap", generated + other, scored, trained)
        role = "calibrated" if name == "FSDP2" else "predicted"
        what = f"{name}, longer of two"
        rows.append(compared("one step off", what, "step, s", ours, published, role))
    return rows


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
    """Every published figure beside ours, and what was calibrated."""
    found = {sigma: steps_at(sigma) for sigma in SIGMAS}
    mean, steps = found[SIGMA]
    spreads = [{"sigma": sigma, "gap": worst(at)} for sigma, (_, at) in found.items()]
    rows = [*thresholds(steps), *one_step_off(), *generation()]
    return {
        "rows": rows,
        "mean_seconds": mean,
        "sigma": SIGMA,
        "fetch_seconds": FETCH,
        "spreads": spreads,
        "gap_without_fetch": worst(steps_at(SIGMA, 0.0)[1]),
        "within": WITHIN,
    }
