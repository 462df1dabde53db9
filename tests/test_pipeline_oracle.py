"""The compiled event loop against SimPy, event for event, on pipelines with everything in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pipeline_oracle import Oracle, table

from windage.toy.pipeline import engine
from windage.toy.pipeline import run as running
from windage.toy.pipeline.laws import Empirical, Exponential, Lognormal, Observed
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import MODES, Pipeline

FREE = ("asynchronous", "in_flight", "in_flight_recompute")
SEEDS = 100
SEEN = Observed(*np.random.default_rng(3).lognormal(size=(3, 500)) * [[3.0], [3.0], [0.3]])


def drawn(seed: int) -> Pipeline:
    """A pipeline whose settings are drawn: every rule is on in some and off in others."""
    g = np.random.default_rng([7, seed])
    mode = list(MODES)[seed % len(MODES)]
    size = int(g.choice([1, 2, 4]))
    free = mode in FREE
    return Pipeline(
        mode=mode,
        slots=int(g.integers(1, 24)),
        batch=size * int(g.integers(1, 6)),
        group_size=size,
        tokens=[Exponential(3.0), Lognormal(3.0, 1.0), Empirical(np.array([0.7, 2.1, 5.3]))][
            seed // 5 % 3
        ],
        token_seconds=float(g.uniform(0.5, 1.5)),
        prompt_tokens=float(g.choice([0.0, 2.0])),
        read_seconds=float(g.uniform(0.01, 0.2)),
        verifier=Exponential(float(g.uniform(0.1, 1.0))),
        scoring_seconds=float(g.uniform(0.0, 0.5)),
        update=Exponential(float(g.uniform(0.1, 4.0))),
        sync_seconds=float(g.choice([0.0, g.uniform(0.1, 6.0)])),
        pause_seconds=float(g.uniform(0.0, 0.5)) if mode.startswith("in_flight") else 0.0,
        publish_every=int(g.choice([1, 3])) if free else 1,
        max_lag=[None, None, 3, 6][int(g.integers(4))],
        capacity=[None, 0.5, 2.0][int(g.integers(3))] if free else None,
        drop_after=float(g.choice([np.inf, 9.0])),
        fail_after=float(g.choice([np.inf, 7.0, 11.0])),
        refill=size > 1 and bool(g.integers(2)),
        pass_rate=float(g.uniform(0.2, 0.8)),
        stretch=float(g.choice([1.0, 3.0])),
        observed=SEEN if seed % 7 == 3 else None,
    )


def compare(p: Pipeline, steps: int, seed: int) -> Any:
    """Both ways of running a pipeline on the same numbers agree in every event."""
    run = simulate(p, steps, np.random.default_rng(seed))
    draws, _ = next(running._drawn(p, steps, np.random.default_rng(seed)))(2 * len(run.fate) + 64)
    oracle = Oracle(p, steps, draws)
    assert len(oracle.responses) == len(run.fate)
    columns = table(oracle)
    names = {"inside": engine.INSIDE, **{name: code for code, name in engine.FATES.items()}}
    fate = [names.get(f, f) for f in columns.pop("fate")]
    assert fate == run.fate.tolist()
    left = np.array(columns.pop("left"))
    gone = run.fate != engine.INSIDE
    assert np.array_equal(left[gone], run.responses["left"][gone])
    for name in ("version", "weights", "under", "reward"):
        assert columns[name] == run.responses[name].tolist(), name
    assert np.allclose(columns["tokens"], run.responses["tokens"], rtol=1e-9)
    for name in ("born", "ended", "scored"):
        assert np.allclose(columns[name], run.responses[name], rtol=1e-12, atol=1e-9), name
    for name, found in zip(
        ("taken", "commit", "occupancy", "queued"), zip(*oracle.records, strict=True), strict=True
    ):
        assert np.allclose(found, run.steps[name], rtol=1e-12, atol=1e-9), name
    pieces = sorted(
        (r.number, weights, tokens) for r in oracle.responses for weights, tokens in r.pieces
    )
    ours = sorted(run.pieces[["response", "weights", "tokens"]].tolist())
    assert len(ours) == len(pieces)
    assert np.allclose(
        np.array(ours).reshape(-1, 3), np.array(pieces).reshape(-1, 3), rtol=1e-8, atol=1e-8
    )
    return run


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_event_is_the_oracles(seed: int) -> None:
    compare(drawn(seed), 12, seed)
