"""Baselines of least variance: means, relations to their siblings, positions, the optimum."""

from dataclasses import replace

import pytest
import torch
from checks import (
    Brute,
    assert_biased,
    assert_close,
    assert_unbiased,
    moments,
    refused,
    token_scores,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import batches, booleans, numbers, problems

from windage.estimators.advantage import leave_one_out
from windage.estimators.baselines import (
    length_weighted,
    length_weighted_apart,
    score_norm,
    score_weighted,
    score_weighted_apart,
    token_weighted,
    token_weighted_apart,
)
from windage.estimators.catalogue import get
from windage.toy.exact.moments import Undefined
from windage.toy.exact.optimum import optimal_baseline
from windage.toy.problems import difficulties, token_tree

LENGTHS = (
    "opo_leave_one_out",
    "optimal_token_baseline_leave_one_out",
    "score_weighted_leave_one_out",
)
groups = st.integers(2, 5).flatmap(
    lambda g: st.tuples(numbers(1, g), booleans(1, g), numbers(1, g, low=0.0, high=3.0))
)


# Moments


@settings(max_examples=15)
@given(problems(prompts=(1, 2), on_policy=True, leaves=8), st.sampled_from([2, 3]))
def test_what_leaves_the_response_out_is_unbiased(problem, group_size):
    for name in LENGTHS:
        assert_unbiased(get(name), problem, group_size)


@pytest.mark.parametrize("name", ["opo", "score_weighted", "optimal_token_baseline"])
def test_what_holds_the_response_is_biased_in_direction(name):
    assert_biased(get(name), token_tree(3), 2, at_least=1e-2)
    mean = moments(get(name), token_tree(3), 2).mean
    best = mean / (mean.norm() / moments(get("rloo"), token_tree(3), 2).mean.norm())
    assert (best - moments(get("rloo"), token_tree(3), 2).mean).norm() > 1e-2 * best.norm()


# Relations


@given(groups)
def test_by_length_by_hand(drawn):
    rewards, present, length = drawn[0], drawn[1], (4 * drawn[2]).long()
    spoiled = torch.where(present, rewards, torch.nan)
    whole = length_weighted(spoiled, present, length)[0].tolist()
    apart = length_weighted_apart(spoiled, present, length)[0].tolist()
    here = [i for i, there in enumerate(present[0].tolist()) if there]
    r, t = rewards[0].tolist(), length[0].tolist()
    for i in range(len(r)):
        others = [j for j in here if j != i]
        if i not in here or not others:
            assert whole[i] == apart[i] == 0
            continue
        total, rest = sum(t[j] for j in here), sum(t[j] for j in others)
        mean = sum(r[j] for j in here) / len(here)
        b = sum(t[j] * r[j] for j in here) / total if total else mean
        assert_close(whole[i], r[i] - b, relative=1e-9)
        plain = sum(r[j] for j in others) / len(others)
        b = sum(t[j] * r[j] for j in others) / rest if rest else plain
        assert_close(apart[i], r[i] - b, relative=1e-9)


@given(numbers(2, 4), st.integers(1, 5))
def test_equal_lengths_give_leave_one_out(rewards, length):
    present, lengths = torch.ones(2, 4).bool(), torch.full((2, 4), length)
    assert_close(length_weighted_apart(rewards, present, lengths), leave_one_out(rewards))
    assert_close(length_weighted(rewards, present, lengths), 0.75 * leave_one_out(rewards))


@settings(max_examples=30)
@given(batches(prompts=(1, 2), sizes=(2, 4)))
def test_by_score_by_hand(batch):
    for name, own in (("score_weighted", True), (LENGTHS[2], False)):
        found = get(name)(batch).terms.advantages
        for p, g in torch.cartesian_prod(*map(torch.arange, batch.rewards.shape)).tolist():
            there = [h for h in range(batch.rewards.shape[1]) if batch.present[p, h]]
            if g not in there or len(there) < 2:
                assert not found[p, g].any()
                continue
            keep = batch.mask[p].nonzero().tolist()
            norms = {h: 0.0 for h in there}
            for h, t in keep:
                if h in norms:
                    pi = float(batch.logp[p, h, t].exp())
                    norms[h] += max(0.0, 1 - 2 * pi + float(batch.probability_square[p, h, t]))
            others = [h for h in there if own or h != g]
            total = sum(norms[h] for h in others)
            r = {h: float(batch.rewards[p, h]) for h in there}
            if total > 1e-6:
                b = sum(norms[h] * r[h] for h in others) / total
                assert_close(found[p, g].flatten()[0], r[g] - b, relative=1e-8)


def test_scores_of_equal_size_give_leave_one_out():
    rewards = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    present = torch.ones(2, 4).bool()
    mask = torch.tensor([True, True, False]).expand(2, 4, 3)
    logp, square = torch.full((2, 4, 3), -0.7), torch.full((2, 4, 3), 0.4)
    whole = leave_one_out(rewards)
    assert_close(score_weighted_apart(rewards, present, logp, square, mask), whole, relative=1e-6)
    assert_close(score_weighted(rewards, present, logp, square, mask), 0.75 * whole, relative=1e-6)
    certain = torch.zeros_like(logp)
    found = score_weighted_apart(rewards, present, certain, torch.ones_like(logp), mask)
    assert_close(found, whole)


def test_the_score_norm_is_that_of_the_scores():
    problem = token_tree(3)
    one = torch.nn.functional.one_hot(torch.arange(3), 3).double()
    pi = problem.logp[0].exp().unsqueeze(1)
    truth = (one - pi).square().sum(-1)
    square = problem.logp[0].exp().square().sum(-1, keepdim=True).expand(-1, 3)
    assert_close(score_norm(problem.logp[0], square), truth)


def by_token(batch, p, g, *, own):
    """The definition, in plain Python, at the trainable tokens of one response."""
    size = batch.rewards.shape[1]
    rows = []
    for h in range(size):
        keep = batch.mask[p, h]
        energy = 1 - 2 * batch.logp[p, h].exp() + batch.probability_square[p, h]
        rows.append((float(batch.rewards[p, h]), energy[keep].cumsum(0).tolist()))
    reward, energies = rows[g]
    found = []
    for t in range(len(energies)):
        there = [h for h in range(size) if len(rows[h][1]) > t and (own or h != g)]
        total = sum(rows[h][1][t] for h in there)
        paid = sum(rows[h][1][t] * rows[h][0] for h in there)
        found.append(reward - paid / total if there else reward)
    return found


@settings(max_examples=30)
@given(batches(prompts=(1, 2), sizes=(2, 3), absent=False))
def test_by_token_by_hand(batch):
    assume(bool(batch.mask.any(-1).all()))
    for name, own in (("optimal_token_baseline", True), (LENGTHS[1], False)):
        found = get(name)(batch).terms.advantages
        for p, g in torch.cartesian_prod(*map(torch.arange, batch.rewards.shape)).tolist():
            expected = torch.tensor(by_token(batch, p, g, own=own), dtype=torch.float64)
            assert_close(found[p, g][batch.mask[p, g]], expected, relative=1e-9)
            assert not found[p, g][~batch.mask[p, g]].any()


# The edge


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_nothing(value):
    rewards, present = torch.full((1, 3), value).double(), torch.ones(1, 3).bool()
    lengths = torch.tensor([[1, 3, 2]])
    assert not length_weighted(rewards, present, lengths).any()
    assert not length_weighted_apart(rewards, present, lengths).any()
    mask = torch.ones(1, 3, 2).bool()
    tokens = torch.stack([0 * rewards, rewards], -1)
    logp = torch.tensor([[[-0.1, -2.0], [-1.0, -0.3], [-0.7, -0.7]]]).double()
    square = (2 * logp).exp() + 0.1
    assert not token_weighted(tokens, logp, square, mask).any()
    assert not token_weighted_apart(tokens, logp, square, mask).any()


def test_a_position_that_one_response_reaches():
    mask = torch.tensor([[[True, True], [True, False]]])
    tokens = torch.tensor([[[0.0, 1.0], [0.5, 0.0]]])
    logp = torch.full((1, 2, 2), 0.5).log()
    square = torch.full((1, 2, 2), 0.5)
    whole = token_weighted(tokens, logp, square, mask)
    apart = token_weighted_apart(tokens, logp, square, mask)
    assert_close(whole, [[[0.25, 0.0], [-0.25, 0.0]]])
    assert_close(apart, [[[0.5, 1.0], [-0.5, 0.0]]])


# The optimum


def by_hand(problem, prompt, weight):
    """E[w^2 S2 R] and E[w^2 S2] under the sampler, by enumeration."""
    one = problem.select(prompt)
    mu, pi = (Brute(one, logp).response for logp in (one.behavior_logp, one.logp))
    size = token_scores(one).sum(1).flatten(1).square().sum(-1)
    second = mu * size * ((pi / mu).square() if weight else 1.0)
    return float((second * one.rewards[0]).sum()), float(second.sum())


@settings(max_examples=15)
@given(problems(prompts=(1, 2), on_policy=False, leaves=9))
def test_the_optimum_is_the_quotient_of_moments(problem):
    for name, where in (("reinforce", problem.on_policy()), ("off_policy_reinforce", problem)):
        parts = [by_hand(where, p, name != "reinforce") for p in range(where.prompts)]
        paid, total = (sum(column) for column in zip(*parts, strict=True))
        found = optimal_baseline(where, get(name))
        assert_close(found, paid / total, relative=1e-8)
        best = moments(get(name, baseline=found), where, 2).variance
        for shift in (-0.5, 0.5):
            assert moments(get(name, baseline=found + shift), where, 2).variance > best


def test_the_optimum_is_not_the_expected_reward():
    problem = token_tree(3)
    mean = Brute(problem, problem.logp)
    expected = float((mean.response * problem.rewards[0]).sum())
    assert abs(optimal_baseline(problem, get("reinforce")) - expected) > 1e-2


def test_the_optimum_of_what_has_no_baseline_is_refused():
    with refused("rloo has no constant baseline", error=Undefined):
        optimal_baseline(difficulties(), get("rloo"))
    with refused("topr's weight reads the sign", error=Undefined):
        optimal_baseline(difficulties(), get("topr"))
    still = replace(token_tree(1), logits=torch.tensor([[[0.0, -800.0, -800.0]]]).double())
    with refused("does not depend on the baseline", error=Undefined):
        optimal_baseline(still.on_policy(), get("reinforce"))
