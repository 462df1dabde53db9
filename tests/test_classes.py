"""Counting classes: closed forms of textbooks, the token convolution, and its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close
from problem_strategies import drawn, entry, typical

from windage.estimators.aggregation import prompt_mean
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.toy.exact.classes import Groups, count_classes, small_table, tabulate
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Responses
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make


def binary(p: float, arms: int = 4) -> Problem:
    """A bandit in which arms of total probability p are right, sampled from the policy."""
    chance = torch.tensor([p / 2, p / 2, *[(1 - p) / (arms - 2)] * (arms - 2)], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 1.0, *[0.0] * (arms - 2)]])
    return make("binary", Tree(arms, None, 1), chance.log()[None, None], rewards)


def binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("group_size", [2, 5, 64])
def test_binary_grpo_is_the_mean_standard_deviation_times_the_gradient(
    p: float, group_size: int
) -> None:
    """E[GRPO] = E[std] / (p (1 - p)) grad p."""
    problem = binary(p)
    estimator = get("grpo", eps=0.0)
    deviations = [
        math.sqrt(k * (group_size - k) / group_size / (group_size - 1))
        for k in range(group_size + 1)
    ]
    mean = sum(binomial(group_size, k, p) * s for k, s in enumerate(deviations))
    # the last (G - 1) / G turns the sum over ddof-1 standardized members into a mean
    factor = mean * (group_size - 1) / group_size / (p * (1 - p))
    found = exact(estimator, problem, group_size, "classes")
    assert_close(found.mean, factor * objective(problem).gradient)


def test_binary_grpo_tends_to_the_gradient_of_arcsin() -> None:
    problem = binary(0.3)
    found = exact(get("grpo", eps=0.0), problem, 4096, "classes").mean
    limit = objective(problem).gradient / math.sqrt(0.3 * 0.7)
    assert 1e-6 < float((found - limit).norm() / limit.norm()) < 1e-3


@pytest.mark.parametrize("group_size", [2, 3, 6])
def test_dynamic_sampling_raises_the_mean_of_hard_prompts(group_size: int) -> None:
    """E[K / G | 0 < K < G] = (p - p^G) / (1 - p^G - (1 - p)^G)."""
    for p in (0.2, 0.7):
        kinds = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
        mass = torch.tensor([1 - p, p], dtype=torch.float64)
        group = Groups(get("dapo"), kinds, mass, group_size)
        share = group.counts[:, -1] / group_size
        expected = (p - p**group_size) / (1 - p**group_size - (1 - p) ** group_size)
        assert_close(group.probability @ share, expected)
        assert (expected > p) == (p < 0.5)
        assert_close(group.chance.sum(), 1.0)
        assert_close(group.probability.sum(), 1.0)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "icepop", "rloo"])
def test_two_million_groups_by_counting_equal_multisets(name: str) -> None:
    problem = typical(1, 2)
    other = exact(entry(name, problem), problem, 5, "compositions")
    found = exact(entry(name, problem), problem, 5, "classes")
    assert_close(found.mean, other.mean)
    assert_close(found.variance, other.variance)
    assert_close(found.drift, other.drift)


@pytest.mark.parametrize("name", ["dapo", "cispo", "icepop"])
@pytest.mark.parametrize("prompts", [2, 3])
def test_tokens_of_other_prompts_enter_by_convolution(name: str, prompts: int) -> None:
    tree = Tree(2, 1, 2)
    generator = torch.Generator().manual_seed(prompts)
    logits = torch.randn((prompts, 2, 2), generator=generator, dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])[:prompts]
    behavior = logits + 0.4 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    problem = make("p", tree, logits, rewards, behavior=behavior)
    found = exact(get(name), problem, 2, "classes")
    listed = exact(get(name), problem, 2, "compositions")
    assert_close(found.mean, listed.mean)
    assert_close(found.variance, listed.variance)
    assert_close(found.drift, listed.drift)


@pytest.mark.parametrize("number", [5, 11, 27, 60])
def test_a_denominator_of_the_group_is_counted_too(number: int) -> None:
    problem = drawn(number, leaves=9)
    estimator = replace(get("grpo"), aggregation=use(prompt_mean))
    found = exact(estimator, problem, 3, "classes")
    other = exact(estimator, problem, 3, "compositions")
    assert_close(found.mean, other.mean)
    assert_close(found.variance, other.variance)


def test_drift_is_that_of_advantage_one_without_admission() -> None:
    problem = typical(2)
    for name in ("grpo", "dapo", "cispo"):
        found = exact(entry(name, problem), problem, 3, "classes").drift
        ones = replace(problem, rewards=torch.ones_like(problem.rewards))
        plain = replace(entry(name, problem), advantage=get("reinforce").advantage, admission=())
        assert_close(found, exact(plain, ones, 3, "classes").mean)
        assert found.norm() > 1e-3


def test_classes_that_are_never_drawn_are_left_out() -> None:
    problem = binary(0.4)
    behavior = problem.behavior_logp.clone()
    behavior[..., :2] = -torch.inf
    cut = replace(problem, behavior_logp=behavior)
    moments = exact(get("grpo"), cut, 4, "classes")
    assert moments.mean.abs().max() == 0 and moments.variance == 0
    assert moments.drift.norm() > 0


def test_class_probabilities_may_be_tiny() -> None:
    """1e-300 of the mass in a class: finite, and its share of the mean is what it should be."""
    problem = binary(1e-300, arms=3)
    found = exact(get("grpo"), problem, 4, "classes")
    assert found.mean.isfinite().all() and found.variance >= 0
    expected = exact(get("grpo"), problem, 4, "tuples")
    assert_close(found.mean * 1e300, expected.mean * 1e300, relative=1e-9)


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_a_large_offset_costs_digits_in_proportion(offset: float) -> None:
    problem = typical(1, 2)
    moved = replace(problem, rewards=problem.rewards + offset)
    for engine in ("classes", "compositions"):
        here = exact(get("grpo"), problem, 3, engine)
        there = exact(get("grpo"), moved, 3, engine)
        assert_close(there.mean, here.mean, relative=max(1e-10, 1e-15 * offset))
        assert_close(there.variance, here.variance, relative=max(1e-10, 1e-15 * offset))


def test_tables_depend_on_reward_values_alone_and_small_ones_are_kept() -> None:
    estimator = get("grpo")
    small_table.cache_clear()
    for p in (0.2, 0.3, 0.9):
        exact(estimator, binary(p), 7, "classes")
    assert small_table.cache_info().misses == 1
    exact(get("grpo", ddof=0), binary(0.2), 7, "classes")
    assert small_table.cache_info().misses == 2
    one = tabulate(estimator.advantage, (), (0.0, 1.0), 7)
    other = tabulate(estimator.advantage, (), (0.0, 2.0), 7)
    assert_apart(one.advantages[3] * 1e6, other.advantages[3] * 1e6, at_least=1e-8)
    exact(estimator, binary(0.5), 1000, "classes")
    assert small_table.cache_info().misses == 2, "1,001 groups of 1,000 are too many to keep"


def test_counts_follow_the_classes_that_occur() -> None:
    problem = typical(2)
    assert count_classes(get("grpo"), problem, 4) == 2 * 5
    pairs = [len(k) for k in problem.kinds]
    expected = sum(math.comb(4 + n - 1, 4) for n in pairs)
    assert count_classes(get("cispo"), problem, 4) == expected


def test_a_hundred_thousand_responses_and_groups_of_64() -> None:
    """Against the closed form, where nothing could be listed."""
    arms = 100_000
    problem = binary(0.25, arms=arms)
    found = exact(get("grpo", eps=0.0), problem, 64, "classes")
    deviations = [math.sqrt(k * (64 - k) / 64 / 63) for k in range(65)]
    factor = (
        sum(binomial(64, k, 0.25) * s for k, s in enumerate(deviations)) * 63 / 64 / (0.25 * 0.75)
    )
    assert_close(found.mean, factor * objective(problem).gradient)
    assert Responses.__name__ == "Responses" and float(found.variance) > 0
