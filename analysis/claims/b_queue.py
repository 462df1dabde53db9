"""Document 002: what asynchronous running costs and saves, on a queue of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from windage.analysis.claims.claim import Figure, Outcome, around, band, claim, series
from windage.analysis.claims.measures import alone, mean_reward, merit, moments
from windage.analysis.claims.problems import octet, response_mass
from windage.toy.pipeline.laws import Equal, Exponential, Lognormal
from windage.toy.pipeline.run import Run, simulate
from windage.toy.pipeline.settings import Pipeline

RECIPE = "Choosing the whole recipe"
STEPS = 2000
RUNS = 4
QUEUE = "QUEUE: 64 slots, batches of 64, response times of mean 1, update 0.5"


def repeated(
    line: Pipeline, seed: int, *, steps: int = STEPS, runs: int = RUNS, **rules: Any
) -> list[Run]:
    """Independent runs under some rules, each with a generator of its own."""
    ruled = replace(line, **rules)
    return [simulate(ruled, steps, np.random.default_rng([seed, k])) for k in range(runs)]


def average(runs: Sequence[Run], value: Callable[[Run], float]) -> tuple[float, float]:
    """Mean over runs of a figure, and its standard error."""
    values = np.array([value(run) for run in runs])
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def near(
    name: str,
    runs: Sequence[Run],
    value: Callable[[Run], float],
    printed: float,
    margin: float | None = None,
) -> Figure:
    """A figure averaged over runs, within `margin` (default 3 %) of the printed number."""
    mean, error = average(runs, value)
    allowed = 0.03 * printed if margin is None else margin
    return around(name, mean, printed, allowed, standard_error=error)


def throughput(run: Run) -> float:
    """Responses a unit of time."""
    return run.throughput


def utilization(run: Run) -> float:
    """Share of the slots' time spent on responses."""
    return run.utilization


def mean_lag(run: Run) -> float:
    """Mean lag of a response, in versions."""
    return float(run.lag.mean())


def largest_lag(run: Run) -> float:
    """Largest lag of a response, in versions."""
    return float(run.lag.max())


def growth(run: Run) -> float:
    """Responses inside at the end over those at step 250."""
    return float(run.steps["occupancy"][-1] / run.steps["occupancy"][250])


@claim(
    "B-01",
    section="Opening section",
    statement="A generator that waits for the slowest response of each batch stands idle most of "
    "the time; training on older responses keeps it busy.",
    kind="simulated",
    problem=f"{QUEUE}; synchronous: 64 responses, wait for all, update; asynchronous: a free slot "
    "starts at once under the newest version; 2,000 steps.",
    formula="utilization = time spent on responses / (slots × time); throughput = responses / time",
)
def b_01(*, seed: int = 0) -> Outcome:
    printed = {Exponential: (0.190, 12.2, 64.2), Lognormal: (0.131, 8.4, 64.0)}
    figures, gains = [], []
    for law, (used, slow, fast) in printed.items():
        line, name = Pipeline(tokens=law()), law.__name__.lower()
        wait, run = repeated(line, seed, mode="synchronous"), repeated(line, seed)
        figures += [
            near(f"utilization, synchronous, {name}", wait, utilization, used),
            near(f"utilization, asynchronous, {name}", run, utilization, 1.0, 0.005),
            near(f"throughput, synchronous, {name}", wait, throughput, slow),
            near(f"throughput, asynchronous, {name}", run, throughput, fast),
        ]
        gains.append(average(run, utilization)[0] / average(wait, utilization)[0])
    return Outcome(figures=figures, stands=min(gains) > 2, seeds=(seed,))


def _capacity(seed: int) -> tuple[list[Figure], dict[int | None, list[Run]]]:
    """Throughput and mean lag under a capacity rule, lognormal times."""
    figures, kept = [], {}
    line = Pipeline(tokens=Lognormal())
    for cap, rate, lag in ((1, 57.5, 1.0), (2, 63.9, 1.5), (None, 63.9, 1.5)):
        runs = repeated(line, seed, capacity=cap)
        figures += [
            near(f"throughput, cap {cap or 'none'}", runs, throughput, rate),
            near(f"mean lag, cap {cap or 'none'}", runs, mean_lag, lag),
        ]
        kept[cap] = runs
    return figures, kept


def _slow_trainer(seed: int) -> tuple[list[Figure], bool]:
    """With updates that take longer than a batch: a rule holds the lag, none lets it grow."""
    line, figures = Pipeline(tokens=Lognormal(), update=Equal(1.2)), []
    ruled = repeated(line, seed, steps=500, runs=8, capacity=2)
    free = repeated(line, seed, steps=500, runs=8)
    for name, runs in (("cap 2", ruled), ("no cap", free)):
        figures.append(near(f"throughput, slow trainer, {name}", runs, throughput, 53.3))
    # The printed number is of one run, whose mean lag has a standard deviation of 1.4.
    figures += [
        near("mean lag, slow trainer, cap 2", ruled, mean_lag, 2.0),
        near("mean lag over 500 steps, slow trainer, no cap", free, mean_lag, 45.0, 4.0),
    ]
    grows = average(free, growth)[0]
    figures.append(band("occupancy, step 500 over step 250, no cap", grows, 1.8, 2.2))
    return figures, grows > 1.5


def _laws_of_lag(runs: Sequence[Run], free: Sequence[Run], seed: int) -> list[Figure]:
    """Little's law where stationary, and how old a single response gets under cap 1."""
    gaps = [abs(mean_lag(r) / r.occupancy_lag - 1) for r in (*runs, *free)]
    shorter = repeated(Pipeline(tokens=Exponential()), seed, capacity=1)
    return [
        band("mean lag over occupancy/batch, largest distance from 1", max(gaps), 0, 0.005),
        band("largest lag of a run, cap 1, exponential", average(shorter, largest_lag)[0], 8, None),
        band("largest lag of a run, cap 1, lognormal", average(runs, largest_lag)[0], 30, None),
    ]


def _equal_lengths(update: float, printed: str) -> tuple[list[Figure], float]:
    """Throughput of responses that take equally long, and what asynchrony gains."""
    line = Pipeline(tokens=Equal(), update=Equal(update))
    runs = [repeated(line, 0, runs=1, mode=mode)[0] for mode in ("synchronous", "asynchronous")]
    found = [run.throughput for run in runs]
    name = f"throughput, equal lengths, update {update}, {{}}"
    return series(name, ("synchronous", "asynchronous"), found, printed), found[1] / found[0]


@claim(
    "B-49",
    section=RECIPE,
    statement="Asynchronous running cuts waiting; publishing weights often and bounding what is "
    "started keep the lag in check.",
    note="Bounding what is started bounds the lag on average only; for each single response it "
    "takes a rule that drops. With even lengths and a short update asynchrony gains 5 %.",
    kind="simulated",
    problem=f"{QUEUE} (slow trainer 1.2); capacity rule: start only while started < (cap + "
    "version + 1)·64.",
    formula="lag = version when consumed − version when started; mean lag = occupancy/64",
)
def b_49(*, seed: int = 0) -> Outcome:
    capacity, runs = _capacity(seed)
    slow, grows = _slow_trainer(seed)
    short, little = _equal_lengths(0.05, "61.0, 64.0")
    long, much = _equal_lengths(0.5, "42.7, 64.0")
    bounded = average(runs[1], mean_lag)[0] <= 1.0 < average(runs[None], mean_lag)[0]
    return Outcome(
        figures=[*capacity, *slow, *_laws_of_lag(runs[1], runs[None], seed), *short, *long],
        stands=bounded and grows and 1 < little < much,
        seeds=(seed,),
    )


@claim(
    "B-50",
    section=RECIPE,
    statement="Where the lag is large, send weights more often: no correction makes data of any "
    "age useful.",
    kind="simulated",
    problem="OCTET(0.3, 0.6, 1) with baseline E_μR; QUEUE, exponential times, weights published "
    "every k updates.",
    formula="best merit(64) of trajectory_is, token_is, sequence_tis; ESS/N = 1/E_μ w²; "
    "mean lag = 1.5 + (k − 1)/2",
)
def b_50(*, seed: int = 0) -> Outcome:
    drifts, every = (0.3, 0.6, 1.0), (1, 2, 4, 8)
    best, sizes = [], []
    for drift in drifts:
        problem = octet(drift)
        names = ("trajectory_is", "token_is", "sequence_tis")
        entries = [alone(name, baseline=mean_reward(problem)) for name in names]
        best.append(max(merit(moments(entry, problem), problem, 64) for entry in entries))
        policy, sampler = response_mass(problem)
        sizes.append(float(1 / (policy.square() / sampler).sum()))
    lags = {k: repeated(Pipeline(tokens=Exponential()), seed, publish_every=k) for k in every}
    means = [average(lags[k], mean_lag)[0] for k in every]
    worse = best == sorted(best, reverse=True) and best[-1] < best[0] / 2
    return Outcome(
        figures=[
            *series("best merit(64), OCTET({})", drifts, best, "0.5328, 0.4013, 0.2320"),
            *series("ESS/N, OCTET({})", drifts, sizes, "0.7183, 0.2558, 0.0232"),
            *(
                near(f"mean lag, published every {k}", lags[k], mean_lag, stated, 0.05)
                for k, stated in zip(every, (1.50, 2.00, 2.99, 4.99), strict=True)
            ),
        ],
        stands=worse and means == sorted(means),
        seeds=(seed,),
    )
