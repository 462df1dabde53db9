"""How fast each way to run the pipeline is, and how late its data come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import numpy as np

from windage.analysis.choose.request import Request
from windage.toy.pipeline.laws import Equal, Lognormal
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import Pipeline

STEPS, WARM = 120, 20
CAPS = (1, 2, 4, 8)


@final
@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a way to run comes to.

    Args:
        name: of the way.
        step_seconds: from one update to the next.
        lags: probability of each lag, in updates, of a response that is trained on.
        generation, training: share of the time that slots and trainer are busy.
    """

    name: str
    step_seconds: float
    lags: Mapping[int, float]
    generation: float
    training: float

    @property
    def mean_lag(self) -> float:
        """Mean over responses."""
        return sum(lag * share for lag, share in self.lags.items())


def ways(request: Request, *, refill: bool = False) -> dict[str, Pipeline]:
    """Ways to run: in step on all GPUs or apart, one step off, and with a bound on the lag.

    Args:
        request: sizes and times.
        refill: groups of equal rewards are drawn anew.
    """
    own = Pipeline(
        mode="synchronous",
        slots=request.generation_gpus * request.slots,
        batch=request.prompts * request.group_size,
        group_size=request.group_size,
        tokens=Lognormal(request.response_tokens, request.spread),
        token_seconds=request.token_seconds,
        verifier=Equal(request.verifier_seconds),
        update=Equal(request.update_seconds),
        sync_seconds=request.sync_seconds,
        pass_rate=request.pass_rate,
        refill=refill,
    )
    share = request.gpus / request.generation_gpus
    together = replace(
        own,
        slots=round(own.slots * share),
        update=Equal(request.update_seconds * request.training_gpus / request.gpus),
    )
    bounded = {
        f"asynchronous, capacity {cap}": replace(own, mode="asynchronous", capacity=float(cap))
        for cap in CAPS
    }
    return {
        "synchronous, shared GPUs": together,
        "synchronous, GPUs apart": own,
        "one step off": replace(own, mode="overlap"),
        **bounded,
        "in-flight updates": replace(own, mode="in_flight", capacity=float(CAPS[1])),
    }


@lru_cache(maxsize=256)
def pace(name: str, pipeline: Pipeline, seed: int) -> Pace:
    """Simulate a way to run; the first steps, while it fills, are left out of the lags."""
    run = simulate(pipeline, STEPS, np.random.default_rng(seed))
    consumed = run.fate[run.admitted]
    commits = run.steps["commit"]
    warm = consumed >= WARM
    if name == "in-flight updates":
        lag, weight = run.token_lag
    else:
        lag, weight = run.lag[warm], np.ones(int(warm.sum()))
    total = float(weight.sum())
    shares = {int(n): float(weight[lag == n].sum()) / total for n in np.unique(lag)}
    return Pace(
        name=name,
        step_seconds=float(commits[-1] - commits[WARM - 1]) / (STEPS - WARM),
        lags=shares,
        generation=run.utilization,
        training=run.trainer_utilization,
    )


def paces(request: Request, *, refill: bool = False) -> list[Pace]:
    """Every way to run, at the request's sizes and times."""
    found = ways(request, refill=refill)
    return [pace(name, pipeline, request.seed) for name, pipeline in found.items()]
