"""The pipeline against textbook queues, closed forms and its own ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest

from windage.estimators.errors import BadInput
from windage.toy.pipeline import Line, asynchronous, equal, exponential, lognormal, overlapped
from windage.toy.pipeline import synchronous as waiting


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


@pytest.mark.parametrize("update", [0.05, 0.5, 1.0])
def test_deterministic_service_waits_or_keeps_up(update):
    # D/D/1: 64 responses end together each unit of time; a step never outlasts the unit.
    line = Line(times=equal, update=update)
    run = waiting(line, 50, seeded(0))
    assert run.step_time == pytest.approx(1 + update, rel=1e-12)
    assert run.utilization == pytest.approx(1 / (1 + update), rel=1e-12)
    assert not run.lag.any()
    run = asynchronous(line, 50, seeded(0))
    assert np.allclose(run.commits, np.arange(1, 51) + update, rtol=1e-12)
    # Started one unit before its end, with exactly one commit since.
    assert set(run.lag[64:]) == {1}
    assert not run.lag[:64].any()
    assert run.utilization == pytest.approx(1.0, rel=1e-12)


def test_a_commit_comes_before_a_response_that_ends_at_the_same_time():
    run = asynchronous(Line(slots=1, batch=1, times=equal, update=1.0), 5, seeded(0))
    # The response started at time 2 sees version 1, committed at time 2, and is consumed at
    # time 3, where version 2 is committed first.
    assert run.lag.tolist() == [0, 1, 1, 1, 1]


def test_slow_trainer_with_a_capacity_rule_sets_the_pace():
    run = asynchronous(Line(times=equal, update=2.0), 50, seeded(0), cap=2)
    assert np.allclose(np.diff(run.commits), 2.0)
    assert run.lag[-64:].mean() == 2.0
    assert np.all(run.occupancy <= 3 * 64)


@pytest.mark.parametrize("slots", [1, 4])
def test_one_response_a_step_is_a_queue_with_poisson_arrivals(slots):
    # Slots with exponential times never stop: arrivals are Poisson with rate `slots`, service takes
    # `update`: M/D/1.  Left behind at a departure: rho + rho^2 / (2 (1 - rho)).
    rho = 0.5
    line = Line(slots=slots, batch=1, times=exponential, update=rho / slots)
    lags = [asynchronous(line, 20_000, seeded(s)).lag.mean() - slots for s in range(8)]
    expected = rho + rho**2 / (2 * (1 - rho))
    error = np.std(lags, ddof=1) / math.sqrt(len(lags))
    assert error < 0.02
    assert abs(np.mean(lags) - expected) < 5 * error


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_synchronous_step_waits_for_the_slowest_of_n_exponentials(batch):
    line = Line(slots=batch, batch=batch, update=0.5)
    run = waiting(line, 4000, seeded(1))
    variance = sum(1 / k**2 for k in range(1, batch + 1))
    assert abs(run.step_time - harmonic(batch) - 0.5) < 5 * math.sqrt(variance / 4000)
    assert run.utilization == pytest.approx(1 / (harmonic(batch) + 0.5), rel=0.03)


def test_synchronous_equals_its_closed_form_draw_by_draw():
    line = Line(slots=8, batch=8, times=lognormal, update=0.25)
    run = waiting(line, 100, seeded(2))
    drawn = lognormal(seeded(2), 8192)[:800].reshape(100, 8)
    assert np.allclose(run.commits, (drawn.max(axis=1) + 0.25).cumsum(), rtol=1e-12)
    assert run.busy == pytest.approx(drawn.sum(), rel=1e-12)


@pytest.mark.parametrize("times", [exponential, lognormal, equal])
@pytest.mark.parametrize("cap", [None, 0, 1, 2])
@pytest.mark.parametrize(("slots", "batch"), [(64, 64), (16, 64), (64, 16)])
def test_mean_lag_is_occupancy_over_batch(times, cap, slots, batch):
    # An update that keeps up with the slots, so that the queue is stationary.
    line = Line(slots=slots, batch=batch, times=times, update=0.4 * batch / slots)
    run = asynchronous(line, 1500, seeded(3), cap=cap)
    assert run.occupancy_residual == 0
    assert len(run.lag) == 1500 * batch
    if cap == 0:
        assert not run.lag.any()
    else:
        assert run.lag.mean() == pytest.approx(run.occupancy_lag, rel=5e-3)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_capacity_rule_bounds_what_is_inside(cap):
    run = asynchronous(Line(times=lognormal), 300, seeded(4), cap=cap)
    # At commit v, v batches are consumed and (cap + v) batches may have been started.
    assert run.occupancy.max() <= (cap + 1) * 64
    assert run.lag.mean() <= cap + 1e-12
    assert (run.lag.max() > cap) == (cap > 0)


@pytest.mark.parametrize("publish_every", [1, 3])
def test_lag_counts_from_the_weights_that_were_published(publish_every):
    run = asynchronous(Line(), 600, seeded(5), publish_every=publish_every)
    assert np.array_equal(run.weights, run.started - run.started % publish_every)
    extra = run.lag.mean() - (run.consumed - run.started).mean()
    assert extra == pytest.approx((publish_every - 1) / 2, abs=0.02)


def test_overlap_takes_the_longer_of_writing_and_updating():
    line = Line(slots=4, batch=4, times=lognormal, update=2.0)
    drawn = lognormal(seeded(6), 40).reshape(10, 4).max(axis=1)
    found = overlapped(line, 10, seeded(6))
    assert np.array_equal(found, np.maximum(drawn, 2.0))
    assert (found == 2.0).any() and (found > 2.0).any()


@pytest.mark.parametrize("times", [exponential, lognormal, equal])
def test_response_times_have_mean_one(times):
    drawn = times(seeded(7), 200_000)
    assert drawn.mean() == pytest.approx(1.0, abs=5 * drawn.std() / math.sqrt(200_000) + 1e-12)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Line(slots=0), "slots is 0"),
        (lambda: Line(batch=0), "batch is 0"),
        (lambda: Line(update=-1.0), "update is -1"),
        (lambda: Line(update=float("nan")), "update is nan"),
        (lambda: asynchronous(Line(), 0, seeded(0)), "steps is 0"),
        (lambda: asynchronous(Line(), 1, seeded(0), cap=-1), "cap is -1"),
        (lambda: asynchronous(Line(), 1, seeded(0), publish_every=0), "publish_every is 0"),
        (lambda: overlapped(Line(slots=2), 1, seeded(0)), "slots is 2"),
    ],
)
def test_bad_settings_are_refused_in_one_line(call, word):
    with pytest.raises(BadInput, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)
