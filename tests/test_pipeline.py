"""The pipeline against textbook queues, closed forms, hard bounds and its own ledger."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from checks import refused
from scipy import stats
from scipy.integrate import quad

from windage.estimators.errors import BadInput
from windage.toy.pipeline import engine
from windage.toy.pipeline.laws import Empirical, Equal, Exponential, Law, Lognormal
from windage.toy.pipeline.run import Run, simulate, stretched
from windage.toy.pipeline.settings import MODES, Pipeline

LAWS = [Exponential(), Lognormal(), Equal(), Empirical(np.array([0.2, 0.5, 2.3]))]
SIGMAS = 5  # a false alarm in two million


def run(steps: int = 50, seed: int = 0, **settings: Any) -> Run:
    return simulate(Pipeline(**settings), steps, np.random.default_rng(seed))


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def assert_mean(values: Any, expected: float, *, within: float) -> None:
    """The mean of independent values is as expected; the test sees a gap of `within`."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert SIGMAS * error < within, f"sees gaps above {SIGMAS * error:.3g} only"
    assert abs(values.mean() - expected) < SIGMAS * error, (values.mean(), expected, error)


@pytest.mark.parametrize("update", [0.05, 0.5, 1.0])
def test_deterministic_service_waits_or_keeps_up(update: float) -> None:
    # D/D/1: 64 responses end together each unit of time; a step never outlasts the unit.
    found = run(mode="synchronous", tokens=Equal(), update=Equal(update))
    assert found.step_time == pytest.approx(1 + update, rel=1e-12)
    assert found.utilization == pytest.approx(1 / (1 + update), rel=1e-12)
    assert found.trainer_utilization == pytest.approx(update / (1 + update), rel=1e-12)
    assert not found.lag.any()
    found = run(tokens=Equal(), update=Equal(update))
    assert np.allclose(found.steps["commit"], np.arange(1, 51) + update, rtol=1e-12)
    # Started one unit before its end, with exactly one commit since.
    assert set(found.lag[64:]) == {1}
    assert not found.lag[:64].any()
    assert found.utilization == pytest.approx(1.0, rel=1e-12)


def test_a_commit_comes_before_a_response_that_ends_at_the_same_time() -> None:
    found = run(5, slots=1, batch=1, tokens=Equal(), update=Equal(1.0))
    # The response started at time 2 sees version 1, committed at time 2, and is consumed at
    # time 3, where version 2 is committed first.
    assert found.lag.tolist() == [0, 1, 1, 1, 1]


def test_slow_trainer_with_a_capacity_rule_sets_the_pace() -> None:
    found = run(tokens=Equal(), update=Equal(2.0), capacity=2)
    assert np.allclose(np.diff(found.steps["commit"]), 2.0)
    assert found.lag[-64:].mean() == 2.0
    assert np.all(found.steps["occupancy"] <= 3 * 64)


@pytest.mark.parametrize("slots", [1, 4])
def test_one_response_a_step_is_a_queue_with_poisson_arrivals(slots: int) -> None:
    # Slots with exponential times never stop: arrivals are Poisson with rate `slots`, service takes
    # `update`: M/D/1.  Left behind at a departure: rho + rho^2 / (2 (1 - rho)).
    rho = 0.5
    settings = {"slots": slots, "batch": 1, "tokens": Exponential(), "update": Equal(rho / slots)}
    lags = [run(20_000, s, **settings).lag.mean() - slots for s in range(8)]
    assert_mean(lags, rho + rho**2 / (2 * (1 - rho)), within=0.1)


@pytest.mark.parametrize(("rho", "places"), [(0.5, 1), (0.5, 3), (1.6, 4)])
def test_a_full_house_is_the_queue_m_m_1_k(rho: float, places: int) -> None:
    # One slot writes at rate rho while at most `places` are inside, the trainer's included; the
    # trainer serves at rate 1.  Lost arrivals are those that a full house keeps from starting.
    settings = {"slots": 1, "batch": 1, "capacity": places - 1, "update": Exponential()}
    rates = [run(20_000, s, tokens=Exponential(1 / rho), **settings).throughput for s in range(8)]
    full = rho**places / sum(rho**n for n in range(places + 1))
    assert_mean(rates, rho * (1 - full), within=0.03)


def test_verdicts_while_at_most_k_are_judged_are_erlangs_loss() -> None:
    # One slot, exponential verdicts, an update at once: M/M/K/K.
    places, load = 3, 2.0
    settings = {"slots": 1, "batch": 1, "capacity": places - 1, "update": Equal(0.0)}
    rates = [
        run(20_000, s, tokens=Exponential(), verifier=Exponential(load), **settings).throughput
        for s in range(8)
    ]
    terms = [load**n / math.factorial(n) for n in range(places + 1)]
    assert_mean(rates, 1 - terms[-1] / sum(terms), within=0.02)


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_synchronous_step_waits_for_the_slowest_of_n_exponentials(batch: int) -> None:
    found = run(4000, 1, mode="synchronous", slots=batch, batch=batch, tokens=Exponential())
    variance = sum(1 / k**2 for k in range(1, batch + 1))
    expected = harmonic(batch) + 0.5
    assert abs(found.step_time - expected) < SIGMAS * math.sqrt(variance / 4000)
    assert found.utilization == pytest.approx(1 / expected, rel=0.03)


def test_a_group_waits_for_the_slowest_member() -> None:
    # All start together, so a group is complete after the largest of its G exponentials.
    found = run(500, mode="synchronous", group_size=8, tokens=Exponential())
    groups = found.responses[: 500 * 64].reshape(-1, 8)
    assert_mean(groups["scored"].max(axis=1) - groups["born"][:, 0], harmonic(8), within=0.1)
    shuffled = run(500, slots=8, batch=8, group_size=8, tokens=Exponential(), update=Equal(0.0))
    whole = shuffled.fate[: 500 * 8].reshape(-1, 8)
    assert np.all(whole == whole[:, :1])


def test_synchronous_step_is_slowest_and_scoring_and_update_and_sync() -> None:
    settings: dict[str, Any] = {
        "mode": "synchronous", "slots": 8, "batch": 8, "scoring_seconds": 0.5, "sync_seconds": 0.125
    }  # fmt: skip
    found = run(100, 2, token_seconds=2.0, prompt_tokens=3, read_seconds=0.1, **settings)
    drawn = 2.0 * found.length[:800].reshape(100, 8) + 0.3
    steps = drawn.max(axis=1) + 0.5 + 0.5 + 0.125
    assert np.allclose(found.steps["commit"], steps.cumsum() - 0.125, rtol=1e-12)
    busy = found.utilization * 8 * found.seconds
    assert busy == pytest.approx(drawn.sum(), rel=1e-12)


def test_overlap_takes_the_longer_of_writing_and_updating() -> None:
    found = run(400, 6, mode="overlap", slots=4, batch=4, update=Equal(2.0))
    slowest = found.length[4:1600].reshape(399, 4).max(axis=1)
    taken = np.diff(found.steps["taken"])
    assert np.allclose(taken, np.maximum(slowest, 2.0), rtol=1e-9)
    assert (slowest < 2.0).any() and (slowest > 2.0).any()
    assert set(found.lag[4:]) == {1}


def test_overlap_waits_for_the_weights_too() -> None:
    found = run(200, 6, mode="overlap", slots=4, batch=4, update=Equal(2.0), sync_seconds=0.75)
    slowest = found.length[:800].reshape(200, 4).max(axis=1)
    free, written = 0.0, slowest[0]
    for k in range(200):
        taken = max(written, free)
        arrived = free + 0.75 if k else 0.0
        free = taken + 2.0
        assert found.steps["taken"][k] == pytest.approx(taken, rel=1e-9)
        written = max(taken, arrived) + slowest[min(k + 1, 199)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("capacity", [None, 0.5, 1, 2])
@pytest.mark.parametrize(("slots", "batch"), [(64, 64), (16, 64), (64, 16)])
def test_mean_lag_is_occupancy_over_batch(
    law: Law, capacity: float | None, slots: int, batch: int
) -> None:
    # An update that keeps up with the slots, so that the queue is stationary.
    update = Equal(0.4 * batch / slots)
    found = run(1500, 3, slots=slots, batch=batch, tokens=law, update=update, capacity=capacity)
    assert found.ledger == 0 and found.occupancy_residual == 0.0
    assert len(found.lag) == 1500 * batch
    assert found.lag.mean() == pytest.approx(found.occupancy_lag, rel=5e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_balances_under_every_rule(mode: str, seed: int) -> None:
    settings: dict[str, Any] = {
        "mode": mode, "group_size": 4, "max_lag": 3, "drop_after": 2.5, "refill": True,
        "verifier": Exponential(0.3), "sync_seconds": 0.2, "slots": 100, "update": Exponential(0.6),
    }  # fmt: skip
    found = run(200, seed, **settings)
    dropped = found.dropped()
    assert dropped["slow"] and dropped["zero_variance"]
    assert found.ledger == 0
    r = found.responses
    for k in (0, 20, 100, 199):
        gone = (found.fate >= 0) & (found.fate <= k) | (found.fate < -1) & (r["left"] <= k)
        started = (r["born"] <= found.steps["commit"][k]) & (r["version"] <= k)
        assert (started & ~gone).sum() == found.steps["occupancy"][k]


def test_a_ledger_that_is_off_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from windage.toy.pipeline import run as module

    honest = engine.loop

    def miscounts(rules: Any, draws: Any, state: Any) -> int:
        status = honest(rules, draws, state)
        state.steps["occupancy"][3] += 1
        return status

    monkeypatch.setattr(module.engine, "loop", miscounts)
    with pytest.raises(ArithmeticError, match="off by 1 responses"):
        run(10)


@pytest.mark.parametrize("capacity", [0, 0.5, 1, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_capacity_rule_bounds_what_is_inside(capacity: float, size: int) -> None:
    settings: dict[str, Any] = {"capacity": capacity, "group_size": size, "refill": size > 1}
    found = run(300, 4, **settings)
    # accepted + running <= (capacity + version + 1) * batch at every start.
    r = found.responses
    starts = np.arange(len(r)) + 1
    codes = found.fate < -1
    # Dropped groups whose departure came in an earlier version made room for sure.
    room = np.array([(codes & (r["left"] <= v)).sum() for v in range(301)])
    assert np.all(starts - room[r["version"]] <= (capacity + r["version"] + 1) * 64)
    assert found.steps["occupancy"].max() <= (capacity + 1) * 64
    assert found.lag.mean() <= capacity + 1e-12 or size > 1
    assert (found.lag.max() > capacity) == (capacity > 0)


@pytest.mark.parametrize("capacity", [0, 0.5, 1])
def test_capacity_counts_in_versions_that_were_published(capacity: float) -> None:
    found = run(400, 4, slots=300, publish_every=4, capacity=capacity)
    r = found.responses
    bound = (capacity + r["version"] // 4 + 1) * 4 * 64
    assert np.all(np.arange(len(r)) + 1 <= bound)
    # The bound is reached just before a publication, and not before.
    full = [(r["version"] <= v).sum() == (capacity + v // 4 + 1) * 4 * 64 for v in range(3, 399, 4)]
    assert np.mean(full) > 0.9


@pytest.mark.parametrize("mode", ["asynchronous", "in_flight", "in_flight_recompute"])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_maximum_lag_holds_for_every_response_and_wastes_the_rest(mode: str, max_lag: int) -> None:
    free = run(200, 4, mode=mode, group_size=4)
    held = run(200, 4, mode=mode, group_size=4, max_lag=max_lag)
    assert free.lag.max() > max_lag >= held.lag.max()
    stale = held.dropped()["stale"]
    assert stale > 0 and held.dropped() == {**dict.fromkeys(held.dropped(), 0), "stale": stale}
    assert held.throughput < free.throughput
    assert len(held.lag) == 200 * 64


@pytest.mark.parametrize("publish_every", [1, 3])
def test_lag_counts_from_the_weights_that_were_published(publish_every: int) -> None:
    found = run(600, 5, tokens=Exponential(), publish_every=publish_every)
    r = found.responses
    assert np.array_equal(r["weights"], r["version"] - r["version"] % publish_every)
    extra = found.lag.mean() - (found.fate - r["version"])[found.admitted].mean()
    assert extra == pytest.approx((publish_every - 1) / 2, abs=0.02)


def test_weights_arrive_after_the_sync_time() -> None:
    found = run(300, 5, sync_seconds=2.5)
    arrivals = found.steps["commit"] + 2.5
    expected = np.searchsorted(arrivals, found.responses["born"], side="right")
    assert np.array_equal(found.responses["weights"], expected)
    assert (found.responses["version"] > expected).any()


def test_in_flight_a_token_is_younger_than_its_response() -> None:
    still = run(300, 8, mode="asynchronous")
    moving = run(300, 8, mode="in_flight")
    # No pause: the same events, and every response is as old; only its later tokens are not.
    assert np.array_equal(still.lag, moving.lag)
    lags, tokens = moving.token_lag
    assert tokens.sum() == pytest.approx(moving.responses["tokens"][moving.admitted].sum())
    assert lags.min() == 0 and lags.max() <= moving.lag.max()
    old = np.average(*still.token_lag[:1], weights=still.token_lag[1])
    young = np.average(lags, weights=tokens)
    assert young < old - 1
    # By hand: a token written at time t is under the weights of the last commit before t.
    i = int(np.argmax(moving.responses["tokens"] * moving.admitted))
    r, commits = moving.responses[i], moving.steps["commit"]
    edges = commits[(commits > r["born"]) & (commits < r["ended"])]
    spans = np.diff([r["born"], *edges, r["ended"]])
    mine = moving.pieces[moving.pieces["response"] == i]
    assert np.allclose([*mine["tokens"], r["tokens"] - mine["tokens"].sum()], spans)
    assert mine["weights"].tolist() == list(range(r["weights"], r["weights"] + len(edges)))


def test_reading_again_costs_what_was_written() -> None:
    kept = run(300, 9, mode="in_flight", read_seconds=0.05, prompt_tokens=1)
    reread = run(300, 9, mode="in_flight_recompute", read_seconds=0.05, prompt_tokens=1)
    r = reread.responses
    done = np.isfinite(r["ended"])
    extra = (r["ended"] - r["born"])[done] - (0.05 + reread.length[done])
    passed = r["under"] - r["weights"]
    assert np.allclose(extra[passed[done] == 0], 0, atol=1e-9)
    assert (extra[passed[done] > 0] > 0).all()
    assert reread.throughput < kept.throughput


def parts(law: Law, limit: float) -> tuple[float, float]:
    """P(T <= limit) and E[T; T <= limit] of a length."""
    if isinstance(law, Exponential):
        return 1 - math.exp(-limit), 1 - math.exp(-limit) * (1 + limit)
    assert isinstance(law, Lognormal)
    mu = -(law.sigma**2) / 2
    below = stats.norm.cdf((math.log(limit) - mu) / law.sigma)
    return below, stats.norm.cdf((math.log(limit) - mu - law.sigma**2) / law.sigma)


@pytest.mark.parametrize("law", [Exponential(), Lognormal()], ids=("exponential", "lognormal"))
@pytest.mark.parametrize("limit", [0.8, 2.0])
def test_drops_and_time_outs_have_closed_forms(law: Law, limit: float) -> None:
    # Each end commits at once: the lag of a response that took T is what the other slots, renewal
    # processes with ends each E[min(T, limit)], commit meanwhile.
    slots = 9
    below, inside = parts(law, limit)
    cut = inside + limit * (1 - below)
    settings: dict[str, Any] = {"slots": slots, "batch": 1, "tokens": law, "update": Equal(0.0)}
    runs = [run(8000, s, drop_after=limit, **settings) for s in range(8)]
    expected = (slots - 1) * below / cut * inside / below
    assert_mean([r.lag[200:].mean() for r in runs], expected, within=0.05 * expected)
    means = [r.responses["tokens"][r.admitted].mean() for r in runs]
    assert_mean(means, inside / below, within=0.05)
    shares = [(r.fate[:8000] == engine.SLOW).mean() for r in runs]
    assert_mean(shares, 1 - below, within=0.05)
    runs = [run(8000, s, fail_after=limit, pass_rate=0.7, **settings) for s in range(8)]
    assert_mean([r.lag[200:-100].mean() for r in runs], slots - 1, within=0.05)
    assert_mean([r.responses["tokens"][r.admitted].mean() for r in runs], cut, within=0.05)
    rewards = [r.responses["reward"][r.admitted].mean() for r in runs]
    assert_mean(rewards, 0.7 * below, within=0.05)


def test_refilling_keeps_the_prompts_that_teach() -> None:
    size, rate = 4, 0.5
    found = run(400, 3, group_size=size, refill=True, pass_rate=rate, update=Equal(0.0))
    # Difficulty d is uniform and the pass rate 1 - d: the chance that a group is not of one kind.
    useful = 1 - 2 / (size + 1)
    kept = found.admitted[: 400 * 64 : size]
    assert_mean(kept[:6000], useful, within=0.05)
    rewards = found.responses["reward"][found.admitted].reshape(-1, size).sum(axis=1)
    assert rewards.min() == 1 and rewards.max() == size - 1

    def density(d: float) -> float:
        return (1 - d**size - (1 - d) ** size) / useful

    spread = quad(lambda d: (d - 0.5) ** 2 * density(d), 0, 1)[0]
    admitted = found.difficulty[found.admitted][::size]
    assert_mean((admitted - 0.5) ** 2, spread, within=0.01)
    assert spread < 1 / 12 - 0.02


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_laws_have_their_mean_and_continue(law: Law) -> None:
    drawn = law.draw(np.random.default_rng(7), 200_000)
    assert drawn.mean() == pytest.approx(law.mean, abs=5 * drawn.std() / math.sqrt(2e5) + 1e-12)
    generator = np.random.default_rng(7)
    halves = [law.draw(generator, 50), law.draw(generator, 150)]
    assert np.array_equal(np.concatenate(halves), drawn[:200])


def test_hard_prompts_are_longer_by_the_stretch_and_the_mean_stays() -> None:
    assert quad(lambda d: stretched(np.array([d]), 5.0)[0], 0, 1)[0] == pytest.approx(1, rel=1e-9)
    ends = stretched(np.array([0.0, 1.0]), 5.0)
    assert ends[1] / ends[0] == pytest.approx(5)
    found = run(300, 2, tokens=Equal(), stretch=5.0, group_size=4)
    assert np.allclose(found.length, stretched(found.difficulty, 5.0))


@pytest.mark.parametrize("steps", [3, 40])
def test_growing_arrays_changes_nothing(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    settings: dict[str, Any] = {"mode": "in_flight", "group_size": 4, "update": Equal(9.0)}
    found = run(steps, 1, **settings)
    assert len(found.fate) > steps * 64 + 2 * 64  # the first arrays were too small
    short = run(steps - 1, 1, **settings)
    same = short.fate >= 0
    assert np.array_equal(found.fate[: len(short.fate)][same], short.fate[same])


def test_equal_seeds_give_equal_runs_and_common_responses() -> None:
    assert np.array_equal(run().responses["ended"], run().responses["ended"])
    waiting, free = run(mode="synchronous"), run()
    assert np.array_equal(waiting.length, free.length[: len(waiting.length)])
    assert not np.array_equal(run(seed=1).length[:100], free.length[:100])


def test_a_pipeline_that_drops_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from windage.toy.pipeline import run as module

    monkeypatch.setattr(module, "MOST", 10_000)
    with refused("0 of 5 steps", "nearly all are dropped", error=BadInput):
        run(5, tokens=Equal(2.0), drop_after=1.0)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 10, "group_size": 4}, "multiple of group_size, 4"),
        ({"mode": "asynchronus"}, "nearest valid name: asynchronous"),
        ({"sync_seconds": -1.0}, "sync_seconds is -1"),
        ({"scoring_seconds": math.nan}, "scoring_seconds is nan"),
        ({"max_lag": -1}, "max_lag is -1"),
        ({"capacity": -0.5}, "capacity is -0.5"),
        ({"drop_after": 0.0}, "drop_after is 0"),
        ({"refill": True}, "groups of 2 or more"),
        ({"mode": "synchronous", "capacity": 1}, "capacity in mode synchronous"),
        ({"mode": "overlap", "max_lag": 0}, "max_lag is 0 in mode overlap"),
        ({"pause_seconds": 1.0}, "pause_seconds in mode asynchronous"),
        ({"pass_rate": 1.0}, "pass_rate is 1"),
        ({"token_seconds": 0.0}, "take no time"),
        ({"publish_every": 0}, "publish_every is 0"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], word: str) -> None:
    with refused(word, error=BadInput):
        Pipeline(**settings)


def test_bad_steps_and_laws_are_refused() -> None:
    with refused("steps is 0", error=BadInput):
        run(0)
    with refused("mean is 0", error=BadInput):
        Exponential(0.0)
    with refused("value 1 is nan", error=BadInput):
        Empirical(np.array([1.0, math.nan]))
