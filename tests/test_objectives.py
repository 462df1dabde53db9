"""Advantages of other objectives: exact means, brute force over subsets, groups at the edge."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, assert_skew, moments, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import booleans, numbers, problems

from windage.analysis.audit.objectives import defined, other_gradient
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.objectives import (
    best_over_second,
    relative_mean,
    subset_gain,
    subset_max,
    success_average,
)
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import exact
from windage.toy.objective import objective
from windage.toy.problems import difficulties, token_tree, trajectories

LARGEST = "largest of k rewards"
on = problems(prompts=(1, 2), on_policy=True, leaves=9)
binary = problems(prompts=(1, 2), on_policy=True, leaves=9, rewards=("binary",))
groups = st.integers(2, 5).flatmap(lambda g: st.tuples(numbers(1, g), booleans(1, g)))


# Moments


@settings(max_examples=20)
@given(on, st.sampled_from([(2, 2), (2, 3), (3, 3), (1, 2)]))
def test_subsets_climb_the_largest_of_k(problem, sizes):
    k, group_size = sizes
    expected = other_gradient(LARGEST, problem, group_size, {"k": k})
    for name in ("pass_at_k", "pkpo") if k > 1 else ("pass_at_k",):
        assert_close(moments(get(name, k=k), problem, group_size).mean, expected)


@settings(max_examples=20)
@given(on, st.sampled_from([2, 3]))
def test_the_lead_of_the_best_climbs_the_largest_of_the_group(problem, group_size):
    expected = other_gradient("largest of G rewards", problem, group_size, {})
    assert_close(moments(get("max_minus_second"), problem, group_size).mean, expected)


@settings(max_examples=20)
@given(binary, st.sampled_from([2, 3, 4]))
def test_shares_of_the_mean_climb_the_series_of_the_logarithm(problem, group_size):
    for name, order in (("success_average", group_size), ("maxrl", group_size - 1)):
        found = moments(get(name), problem, group_size).mean
        p = torch.stack([objective(problem.select(i)).value for i in range(problem.prompts)])
        slope = sum((1 - p) ** (j - 1) for j in range(1, order + 1))
        gradients = [objective(problem.select(i)).gradient[0] for i in range(problem.prompts)]
        parts = [s * g for s, g in zip(slope, gradients, strict=True)]
        assert_close(found, torch.stack(parts) / problem.prompts)
        words = "log p, series to order G" + ("" if order == group_size else " - 1")
        assert_close(found, other_gradient(words, problem, group_size, {}))


def test_across_prompts_the_direction_is_not_that_of_the_expected_reward():
    for name in ("maxrl", "success_average", "pkpo", "max_minus_second"):
        found = moments(get(name), difficulties(), 3).mean
        assert_skew(found, objective(difficulties()).gradient, at_least=1e-2)


def test_dividing_the_lead_by_a_spread_turns_its_direction():
    """What verl's grpo_passk does by default."""
    problem = token_tree(2)
    rewards = torch.tensor([[0.0, 0.1, 0.9, 0.3, 1.0, 0.2, 0.0]], dtype=torch.float64)
    problem = replace(problem, rewards=rewards)

    def over_std(rewards, present):
        lead = best_over_second(rewards, present)
        return lead / (rewards.std(-1, keepdim=True) + 1e-6)

    over_std.traits = best_over_second.traits
    base = get("max_minus_second")
    wrong = replace(base, advantage=replace(base.advantage, function=over_std))
    expected = other_gradient("largest of G rewards", problem, 3, {})
    assert_close(moments(base, problem, 3).mean, expected)
    assert_skew(moments(wrong, problem, 3).mean, expected, at_least=1e-2)


# Relations


def by_subsets(rewards, k, *, gain):
    """The definition: every subset of k members, one member at a time."""
    g = len(rewards)
    found = [0.0] * g
    for subset in itertools.combinations(range(g), k):
        for i in subset:
            others = [rewards[j] for j in subset if j != i]
            best = max(rewards[j] for j in subset)
            found[i] += best - (max(others) if gain else 0.0)
    return [g * x / math.comb(g, k) for x in found]


@given(groups, st.integers(1, 5))
def test_subsets_are_those_of_the_definition(drawn, k):
    rewards, present = drawn
    size = rewards.shape[-1]
    for member, gain in ((subset_max, False), (subset_gain, True)):
        if not (1 + gain) <= k <= size:
            with refused(f"k is {k}", f"from {1 + gain} to the group's size"):
                member(rewards, present, k=k)
            continue
        kept = rewards[present].tolist()
        expected = by_subsets(kept, k, gain=gain) if k <= len(kept) else [0.0] * len(kept)
        spoiled = torch.where(present, rewards, torch.nan)
        found = member(spoiled, present, k=k)
        assert_close(found[present], torch.tensor(expected, dtype=torch.float64), relative=1e-12)
        assert not found[~present].any()


@given(groups)
def test_of_the_whole_group_the_gain_is_the_lead_of_the_best(drawn):
    rewards, present = drawn
    size = rewards.shape[-1]
    assert_close(subset_gain(rewards, k=size), best_over_second(rewards))
    spoiled = torch.where(present, rewards, torch.nan)
    kept = rewards[present].unsqueeze(0)
    found = best_over_second(spoiled, present)
    if kept.shape[-1] > 1:
        assert_close(found[present], best_over_second(kept)[0])
    assert not found[~present].any() and (kept.shape[-1] > 1 or not found.any())


@given(groups)
def test_the_centered_form_is_the_share_minus_one(drawn):
    rewards, present = drawn[0].abs(), drawn[1]
    spoiled = torch.where(present, rewards, torch.nan)
    share, centered = (member(spoiled, present) for member in (success_average, relative_mean))
    alive = present & (torch.where(present, rewards, 0.0).sum(-1, keepdim=True) > 0)
    varied = torch.where(alive, share - 1, 0.0)
    assert_close(centered, varied)
    count = present.sum(-1)
    assert_close(share.sum(-1), torch.where(alive.any(-1), count, 0).double())


@given(st.integers(1, 6), st.integers(2, 7), st.data())
def test_pass_at_k_by_the_formula_of_counts(k, size, data):
    if k > size:
        return
    successes = data.draw(st.integers(0, size))
    rewards = (torch.arange(size) < successes).double().unsqueeze(0)
    found = subset_max(rewards, k=k)[0].tolist()
    fail = 1 - math.comb(max(0, size - 1 - successes), k - 1) / math.comb(size - 1, k - 1)
    assert_close(found, [float(k)] * successes + [k * fail] * (size - successes))


# The edge


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_nothing(value):
    rewards = torch.full((1, 5), value).double()
    for found in (
        subset_gain(rewards, k=2),
        subset_gain(rewards, k=5),
        best_over_second(rewards),
        relative_mean(rewards),
    ):
        assert not found.any()
    assert not success_average(0 * rewards).any() and not relative_mean(0 * rewards).any()


def test_large_groups_stay_finite_in_half_precision_and_single():
    for dtype in (torch.float32, torch.bfloat16):
        rewards = (torch.arange(2048) % 7 == 0).to(dtype).unsqueeze(0)
        for member in (subset_max, subset_gain):
            found = member(rewards, k=1024)
            assert found.isfinite().all() and found.dtype == torch.float32


def test_a_group_of_one_is_refused():
    for member in (success_average, relative_mean, best_over_second):
        with refused("at least 2", "size 1"):
            member(torch.ones(1, 1))


def test_rewards_below_zero_are_refused_where_they_mean_nothing():
    batch = Batch.from_rows([1.0, -0.5], ["q", "q"], mask=[[1], [1]])
    for name in ("maxrl", "success_average"):
        with refused("rewards is -0.5", "row 1", "group q", f"allowed by {name}"):
            get(name)(batch)
        with refused(f"{name} needs rewards of at least 0", error=Undefined):
            exact(get(name), trajectories(), 2)
    assert get("pkpo")(batch).own.any()


def test_a_subset_larger_than_the_group_leaves_a_row_undefined():
    with refused("k is 3", "a group of 2", error=Undefined):
        exact(get("pkpo", k=3), token_tree(2), 2)


def test_an_objective_has_a_meaning_or_not():
    assert defined("log p, series to order G", token_tree(2))
    assert not defined("log p, series to order G", trajectories())
    assert defined(LARGEST, trajectories())
    assert_apart(
        other_gradient(LARGEST, token_tree(2), 3, {"k": 2}),
        other_gradient(LARGEST, token_tree(2), 3, {"k": 3}),
        at_least=1e-2,
    )
