"""Every word of the checking vocabulary refuses a fault that is planted for it."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from checks import (
    Brute,
    assert_apart,
    assert_biased,
    assert_close,
    assert_invariant,
    assert_parallel,
    assert_skew,
    assert_unbiased,
    assert_zero,
    enumerated_mean,
    find_any,
    mixture,
    moments,
    refused,
    token_scores,
    with_values,
)
from hypothesis import strategies as st

from windage.estimators.advantage import leave_one_out
from windage.estimators.catalogue import get
from windage.estimators.member import declare, use
from windage.toy.behavior import with_behavior
from windage.toy.objective import objective
from windage.toy.problems import token_tree

ONE = torch.ones(3, dtype=torch.float64)
TREE = token_tree(2)


@pytest.mark.parametrize(
    "actual",
    [
        ONE * (1 + 1e-9),
        torch.tensor([1.0, 1.0]),
        torch.tensor([1.0, float("nan"), 1.0]),
        torch.tensor([1.0, float("inf"), 1.0]),
    ],
    ids=["off", "shape", "nan", "inf"],
)
def test_assert_close_refuses(actual):
    assert_close(ONE * (1 + 1e-11), ONE)
    with pytest.raises(AssertionError):
        assert_close(actual, ONE)


def test_assert_close_is_relative_to_small_numbers():
    with pytest.raises(AssertionError):
        assert_close(ONE * 1.001e-6, ONE * 1e-6)


def test_assert_apart_refuses_rounding():
    assert_apart(ONE, ONE + 1e-3)
    with pytest.raises(AssertionError):
        assert_apart(ONE, ONE + 1e-8)


def test_assert_zero_refuses_a_small_number():
    assert_zero(ONE * 1e-12)
    with pytest.raises(AssertionError):
        assert_zero(ONE * 1e-9)
    with pytest.raises(AssertionError):
        assert_zero(ONE * float("nan"))


def test_directions():
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert assert_parallel(3 * a, a) == 3.0
    assert_skew(a, a.flip(0))
    for fault in (-a, a + torch.tensor([1e-8, 0.0])):
        with pytest.raises(AssertionError):
            assert_parallel(fault, a)
    with pytest.raises(AssertionError):
        assert_parallel(a * (1 + 1e-8), a, factor=1.0)
    with pytest.raises(AssertionError):
        assert_skew(a * 7, a)


def test_unbiased_and_biased_refuse_each_other():
    assert_unbiased(get("rloo"), TREE)
    assert_biased(get("group_mean"), TREE)
    with pytest.raises(AssertionError):
        assert_unbiased(get("group_mean"), TREE)
    with pytest.raises(AssertionError):
        assert_biased(get("rloo"), TREE)


@declare("group", "rewards", "present", linear=True)
def divided_by_all(rewards, present):
    """A planted fault: leave-one-out whose baseline is divided by G."""
    return leave_one_out(rewards, present) + (rewards.sum(-1, keepdim=True) - rewards) * (
        1 / (rewards.shape[-1] - 1) - 1 / rewards.shape[-1]
    )


def test_only_the_relation_catches_a_baseline_divided_by_all():
    fault = replace(get("rloo"), advantage=use(divided_by_all))
    assert_unbiased(fault, TREE, 3)
    rewards = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_zero(divided_by_all(rewards, rewards == rewards).sum(-1))


def test_assert_invariant_refuses_a_change_and_a_single_input():
    assert_close(assert_invariant(torch.sum, ONE, ONE.flip(0)), 3.0)
    with pytest.raises(AssertionError):
        assert_invariant(torch.sum, ONE, ONE + 1e-9)
    with pytest.raises(AssertionError):
        assert_invariant(torch.sum, ONE)


def test_find_any_finds_the_smallest_or_fails():
    assert find_any(st.integers(0, 50), lambda n: n > 7) == 8
    with pytest.raises(hypothesis.errors.NoSuchExample):
        find_any(st.integers(0, 50), lambda n: n > 50)


def test_refused_wants_the_error_its_words_and_one_line():
    with refused("row 3"):
        raise ValueError("row 3 is nan")
    with pytest.raises(pytest.fail.Exception), refused("row 3"):
        pass
    with pytest.raises(AssertionError), refused("row 3"):
        raise ValueError("row 2 is nan")
    with pytest.raises(AssertionError), refused("row 3"):
        raise ValueError("row 3\nis nan")
    with pytest.raises(TypeError), refused("row 3"):
        raise TypeError("row 3")


def test_enumerated_mean_agrees_with_the_engines_and_feels_the_values():
    problem = with_behavior(TREE, "noise", sigma=0.5)
    assert_close(enumerated_mean(get("rloo"), problem, 2), moments(get("rloo"), problem, 2).mean)
    plain = replace(get("ppo", lam=0.0), aggregation=get("rloo").aggregation)
    prefixes = problem.tree.prefixes
    found = [
        enumerated_mean(plain, problem, 1, with_values(problem, v * torch.ones(prefixes).double()))
        for v in (0.0, 1.0)
    ]
    assert_apart(*found)


def test_brute_force_laws():
    problem = with_behavior(TREE, "noise", sigma=0.5)
    pi, mu = Brute(problem, problem.logp), Brute(problem, problem.behavior_logp)
    assert_close(pi.response.sum(), 1.0)
    assert_close((pi.reach * (pi.token * pi.action_value).sum(-1))[0], objective(problem).value)
    assert_close(mixture(problem, pi, pi, pi), objective(problem).gradient)
    assert_apart(mixture(problem, mu, pi, pi), objective(problem).gradient)
    mean = torch.einsum("m,mtnv->tnv", pi.response, token_scores(problem))
    assert_zero(mean)
