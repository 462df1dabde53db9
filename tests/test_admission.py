"""Admission: who is kept, why not, what it does to the mean, and how old a response is."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from checks import assert_apart, assert_close, assert_skew, enumerated_mean, moments, refused
from hypothesis import given, settings
from strategies import batches, problems

from windage.estimators.admission import (
    difficulty_band,
    lag,
    overlong,
    staleness_cap,
    time_out,
    veto,
    zero_variance,
)
from windage.estimators.batch import Batch, log_ratio
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.toy.exact.moments import Undefined
from windage.toy.objective import objective
from windage.toy.problems import difficulties, token_tree

# Relations to plain Python


@settings(max_examples=25)
@given(batches())
def test_zero_variance_and_band_by_their_definition(batch):
    outcomes = torch.where(batch.present, batch.rewards, float("nan"))
    kept = zero_variance(outcomes, batch.present)
    inside = difficulty_band(outcomes, batch.present, low=0.5, high=1.5)
    for p in range(len(outcomes)):
        here = outcomes[p, batch.present[p]]
        varies = len(set(here.tolist())) > 1
        banded = varies and 0.5 <= float(here.mean()) <= 1.5
        assert kept[p].tolist() == [bool(x) and varies for x in batch.present[p]]
        assert inside[p].tolist() == [bool(x) and banded for x in batch.present[p]]


@settings(max_examples=25)
@given(batches(prompts=(1, 2), tokens=(0, 1, 3), lead=(2,)))
def test_lag_by_its_definition(batch):
    found = lag(batch.versions, batch.mask, 4)
    for place in torch.cartesian_prod(*map(torch.arange, batch.rewards.shape)).tolist():
        ages = [
            4 - v
            for v, m in zip(
                batch.versions[tuple(place)].tolist(),
                batch.mask[tuple(place)].tolist(),
                strict=True,
            )
            if m
        ] or [0]
        assert found.oldest[tuple(place)] == max(ages)
        assert found.in_queue[tuple(place)] == min(ages)
        assert found.in_flight[tuple(place)] == max(ages) - min(ages)
        assert_close(found.mean[tuple(place)], sum(ages) / len(ages))
    for cap in (0, 1, 3):
        kept = staleness_cap(batch.versions, batch.mask, 4, max_lag=cap)
        assert torch.equal(kept, found.oldest <= cap)


@settings(max_examples=25)
@given(batches())
def test_veto_by_its_definition(batch):
    ratio = log_ratio(batch.logp, batch.behavior_logp, batch.mask)
    kept = veto(ratio, batch.mask, low=0.4)
    expected = ~((ratio.exp() < 0.4) & batch.mask).any(-1)
    assert torch.equal(kept, expected)
    assert veto(ratio, torch.zeros_like(batch.mask), low=0.4).all()


def test_limits():
    assert time_out(torch.tensor([[600.0, 600.1]])).tolist() == [[True, False]]
    assert overlong(torch.tensor([[True, False]])).tolist() == [[False, True]]
    inside = difficulty_band(torch.tensor([[0.0, 0.4], [0.6, 1.0]]), torch.ones(2, 2).bool())
    assert inside.all()
    nobody = torch.zeros(1, 2).bool()
    assert not zero_variance(torch.ones(1, 2), nobody).any()
    assert not difficulty_band(torch.ones(1, 2), nobody).any()


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (use(difficulty_band, low=0.9, high=0.1), ("low is 0.9",)),
        (use(staleness_cap, max_lag=-1), ("max_lag is -1",)),
        (use(time_out, limit=0.0), ("limit is 0",)),
        (use(veto, low=-1.0), ("low is -1",)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_settings_without_meaning_are_refused(member, words):
    batch = Batch(
        rewards=torch.tensor([[1.0, 0.0]]),
        mask=torch.ones(1, 2, 1).bool(),
        logp=torch.zeros(1, 2, 1),
        behavior_logp=torch.zeros(1, 2, 1),
        versions=torch.zeros(1, 2, 1).long(),
        current_version=1,
        elapsed=torch.ones(1, 2),
    )
    with refused(*words):
        replace(get("rloo"), admission=(member,))(batch)


# In an estimator


def test_reasons_are_named_and_counted():
    batch = Batch.from_rows(
        [1.0, 0.0, 1.0, 1.0, None, 2.0, 3.0, 0.0],
        "aabbccdd",
        mask=[[1]] * 8,
        logp=[[-1.0]] * 8,
        behavior_logp=[[-1.0]] * 7 + [[-1.0 + 10.0]],
        truncated=[False, True, False, False, False, False, False, False],
    )
    estimator = replace(get("rloo"), admission=(use(zero_variance), use(overlong), use(veto)))
    terms = estimator(batch).terms
    named = [[*terms.reasons, ""][i - 1] for i in batch.to_rows(terms.reason).tolist()]
    survivor = "single survivor of its group"
    assert named == [
        "",
        "overlong",
        "zero_variance",
        "zero_variance",
        "absent",
        survivor,
        "",
        "veto",
    ]
    assert {name: int(count) for name, count in terms.counts.items()} == {
        "absent": 1,
        survivor: 1,
        "zero_variance": 2,
        "overlong": 1,
        "veto": 1,
    }
    assert batch.missing.tolist() == [0, 0, 1, 0]


@settings(max_examples=25)
@given(batches(absent=False))
def test_a_rejected_sibling_stays_in_baseline_and_denominator(batch):
    plain = get("rloo")
    found = replace(plain, admission=(use(overlong),))(batch)
    kept = ~batch.truncated.unsqueeze(-1)
    assert_close(found.own, torch.where(kept, plain(batch).own, 0.0))


def test_the_outcome_before_shaping_decides():
    batch = Batch.from_rows(
        [0.0, -0.5],
        "aa",
        mask=[[1], [1]],
        logp=[[-1.0], [-1.0]],
        behavior_logp=[[-1.0], [-1.0]],
        outcomes=[0.0, 0.0],
    )
    assert not get("dapo")(batch).own.any()
    assert get("dapo")(replace(batch, outcomes=None)).own.any()


# Moments


@settings(max_examples=15)
@given(problems(prompts=(1,), rewards=("binary",), on_policy=True, leaves=7))
def test_dropping_silent_groups_only_rescales(problem):
    filtered = replace(get("group_mean"), admission=(use(zero_variance),))
    try:
        found = moments(filtered, problem, 3)
    except Undefined:
        return
    p = float(objective(problem).value)
    chance = 1 - p**3 - (1 - p) ** 3
    assert_close(found.mean * chance, moments(get("group_mean"), problem, 3).mean)


def test_a_difficulty_band_turns_the_direction_across_prompts():
    problem = difficulties((0.1, 0.5, 0.9))
    plain = moments(get("group_mean"), problem, 4).mean
    banded = replace(get("group_mean"), admission=(use(difficulty_band),))
    assert_skew(moments(banded, problem, 4).mean, plain, at_least=1e-3)


def test_a_cap_on_lag_only_rescales_unless_the_lag_depends_on_the_response():
    problem = token_tree(3)
    capped = replace(get("rloo"), admission=(use(staleness_cap, max_lag=1),))

    def mean(old):
        def edit(batch, index):
            lags = torch.where(old(batch), 2, 0).unsqueeze(-1).expand(batch.mask.shape)
            return replace(batch, versions=5 - lags, current_version=5)

        return enumerated_mean(capped, problem, 2, edit)

    whole = enumerated_mean(get("rloo"), problem, 2)
    drawn = {pair: torch.tensor(pair) for pair in product((False, True), repeat=2)}
    chance = {pair: 0.25 ** sum(pair) * 0.75 ** (2 - sum(pair)) for pair in drawn}
    blind = sum(chance[pair] * mean(lambda b, old=old: old) for pair, old in drawn.items())
    assert_close(blind, 0.75 * whole)
    assert_skew(mean(lambda batch: batch.lengths == 3), whole, at_least=1e-3)


def test_dropping_by_length_drifts_even_under_constant_reward():
    problem = token_tree(3)
    problem = replace(problem, rewards=torch.ones_like(problem.rewards))

    def cut(batch, index):
        return replace(batch, truncated=batch.lengths == 3)

    filtered = replace(get("reinforce"), admission=(use(overlong),))
    drift = enumerated_mean(filtered, problem, 1, cut)
    assert_apart(drift, torch.zeros_like(drift))
    assert drift.norm() > 0.1
