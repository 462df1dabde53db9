"""Advantages: exact means, relations between siblings, and groups at the edge."""

import math
from dataclasses import replace

import pytest
import torch
from checks import (
    Brute,
    assert_apart,
    assert_biased,
    assert_close,
    assert_parallel,
    assert_skew,
    assert_unbiased,
    assert_zero,
    enumerated_mean,
    moments,
    refused,
    with_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import booleans, numbers, problems

from windage.estimators.advantage import (
    batch_std,
    constant,
    gae,
    gae_by_length,
    group_mean,
    group_std,
    leave_one_out,
    returns_to_go,
    terminal_rewards,
    value_targets,
    whiten,
)
from windage.estimators.aggregation import token_sum
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.toy.objective import objective
from windage.toy.problems import Tree, make, token_tree

GROUP = (constant, group_mean, leave_one_out, group_std, batch_std)
NAN, INF = float("nan"), float("inf")
matrices = st.sampled_from([(1, 2), (2, 3), (3, 4), (2, 5)]).flatmap(
    lambda shape: st.tuples(numbers(*shape), booleans(*shape))
)


def critic(lam=0.95):
    """PPO's advantage alone: no clip, sum / N."""
    return replace(
        get("ppo", lam=lam), corrections=get("rloo").corrections, aggregation=use(token_sum)
    )


# Moments


@settings(max_examples=25)
@given(problems(prompts=(1,), on_policy=True), st.sampled_from([-1.0, 0.0, 0.75]))
def test_a_constant_is_unbiased_on_policy(problem, baseline):
    assert_unbiased(get("reinforce", baseline=baseline), problem, 1)


@settings(max_examples=20)
@given(problems(prompts=(1,), on_policy=True, leaves=9), st.sampled_from([2, 3]))
def test_leave_one_out_is_unbiased_and_group_mean_scales(problem, group_size):
    assert_unbiased(get("rloo"), problem, group_size)
    gradient = objective(problem).gradient
    share = (group_size - 1) / group_size
    assert_close(moments(get("group_mean"), problem, group_size).mean, share * gradient)


@settings(max_examples=20)
@given(problems(prompts=(1,), rewards=("binary",), on_policy=True, leaves=9))
def test_group_std_keeps_the_direction_of_a_binary_reward(problem):
    mean = moments(replace(get("rloo"), advantage=use(group_std)), problem, 3).mean
    gradient = objective(problem).gradient
    if gradient.abs().max() > 1e-12:
        assert_parallel(mean, gradient)


def test_group_std_turns_the_direction_of_a_real_reward():
    problem = token_tree(2)
    rewards = torch.tensor([[0.0, 0.1, 0.9, 0.3, 1.0, 0.2, 0.0]], dtype=torch.float64)
    problem = replace(problem, rewards=rewards)
    std = replace(get("rloo"), advantage=use(group_std))
    assert_skew(moments(std, problem, 3).mean, objective(problem).gradient, at_least=1e-2)


@settings(max_examples=15)
@given(problems(prompts=(1,), on_policy=True, leaves=8), st.data())
def test_gae_with_lambda_one_is_unbiased_for_any_critic(problem, data):
    values = data.draw(numbers(problem.tree.prefixes))
    mean = enumerated_mean(critic(1.0), problem, 1, with_values(problem, values))
    assert_close(mean, objective(problem).gradient)


@settings(max_examples=15)
@given(problems(prompts=(1,), on_policy=True, leaves=8), st.sampled_from([0.0, 0.5, 0.95]))
def test_gae_with_the_exact_critic_is_unbiased_for_every_lambda(problem, lam):
    values = Brute(problem, problem.logp).value
    mean = enumerated_mean(critic(lam), problem, 1, with_values(problem, values))
    assert_close(mean, objective(problem).gradient)


def test_a_wrong_critic_biases_lambda_below_one():
    problem = token_tree(3)
    values = Brute(problem, problem.logp).value
    values[1:] += 0.5
    mean = enumerated_mean(critic(0.0), problem, 1, with_values(problem, values))
    assert_apart(mean, objective(problem).gradient, at_least=1e-3)


def test_a_lambda_by_length_is_biased_with_the_exact_critic_and_only_where_lengths_vary():
    problem = token_tree(3)
    exact = with_values(problem, Brute(problem, problem.logp).value)
    by_length = replace(critic(), advantage=use(gae_by_length, alpha=0.5))
    mean = enumerated_mean(by_length, problem, 1, exact)
    assert_apart(mean, objective(problem).gradient, at_least=1e-2)
    tree = Tree(2, None, 3)
    fixed = make("fixed", tree, torch.linspace(-1, 1, 14).view(1, 7, 2), torch.eye(8)[:1])
    exact = with_values(fixed, Brute(fixed, fixed.logp).value)
    assert_close(enumerated_mean(by_length, fixed, 1, exact), objective(fixed).gradient)


# Relations


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data(), st.sampled_from([0.05, 0.4, 2]))
def test_a_lambda_by_length_is_gae_with_that_lambda(mask, data, alpha):
    mask = torch.tensor(mask)
    rewards, values = data.draw(numbers(len(mask))), data.draw(numbers(len(mask)))
    length = max(1, int(mask.sum()))
    lam = max(0.0, 1 - 1 / (alpha * length))
    found = gae_by_length(rewards, values, mask, gamma=0.9, alpha=alpha)
    assert_close(found, gae(rewards, values, mask, gamma=0.9, lam=lam))
    batch = torch.stack([mask, torch.zeros_like(mask)])
    both = gae_by_length(rewards.expand_as(batch), values.expand_as(batch), batch, alpha=alpha)
    assert_close(both[0], gae_by_length(rewards, values, mask, alpha=alpha))
    assert not both[1].any()


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.data(), st.sampled_from([0.0, 0.5, 1.0]))
def test_targets_of_a_critic_have_a_lambda_of_their_own(mask, data, lam):
    mask = torch.tensor(mask)
    rewards, values = data.draw(numbers(len(mask))), data.draw(numbers(len(mask)))
    found = value_targets(rewards, values, mask, gamma=0.5, lam=lam)
    advantages = gae(rewards, values, mask, gamma=0.5, lam=lam)
    assert_close(found, torch.where(mask, values + advantages, 0.0))
    whole = value_targets(rewards, values, mask, gamma=0.5)
    assert_close(whole, returns_to_go(rewards, mask, gamma=0.5))


def test_a_lambda_by_length_needs_an_alpha_above_0():
    tokens = torch.ones(1)
    for wrong, words in (({"alpha": 0.0}, "alpha is 0"), ({"gamma": 1.5}, "gamma is 1.5")):
        with refused(words):
            gae_by_length(tokens, tokens, tokens.bool(), **wrong)


@given(matrices)
def test_group_mean_is_a_share_of_leave_one_out(drawn):
    rewards, present = drawn
    count = present.sum(-1, keepdim=True).double()
    share = (count - 1).clamp(min=0) / count.clamp(min=1)
    assert_close(group_mean(rewards, present), share * leave_one_out(rewards, present))


@given(matrices)
def test_rows_sum_to_zero_and_ignore_a_shift(drawn):
    rewards, present = drawn
    for member in (group_mean, leave_one_out, group_std, batch_std):
        found = member(rewards, present)
        assert_zero(found.sum(-1), beside=10.0)
        assert_close(member(rewards + 3, present), found, relative=1e-8)
        assert_close(member(rewards.flip(-1), present.flip(-1)), found.flip(-1))


@given(matrices, st.sampled_from([NAN, INF, 7.0]))
def test_absent_rows_count_nowhere(drawn, held):
    rewards, present = drawn
    dirty = torch.where(present, rewards, held)
    for member in GROUP:
        found = member(dirty, present)
        assert_close(found, member(torch.where(present, rewards, 0.0), present))
        assert not found[~present].any()
    for p, row in enumerate(present):
        if row.sum() >= 2:
            for member in (group_mean, leave_one_out, group_std):
                alone = member(rewards[p : p + 1, row])
                assert_close(member(dirty, present)[p : p + 1, row], alone)


@given(matrices)
def test_standard_deviations_are_those_of_torch(drawn):
    rewards, _ = drawn
    centered = group_mean(rewards)
    for ddof in (0, 1):
        spread = rewards.std(-1, correction=ddof, keepdim=True)
        expected = torch.where(spread > 1e-9, centered / (spread + 0.1), 0.0)
        assert_close(group_std(rewards, ddof=ddof, eps=0.1), expected)
        whole = (centered.square().sum() / (centered.numel() - ddof)).sqrt()
        expected = centered / (whole + 0.1)
        assert_close(batch_std(rewards, ddof=ddof, eps=0.1), expected)


def test_the_ddof_defaults_to_one_and_eps_to_1e_6():
    rewards = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    spread = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    assert_close(group_std(rewards)[0, 0], (2 / 3) / (spread + 1e-6))
    assert_close(batch_std(rewards), group_std(rewards))


@given(matrices)
def test_whitening_gives_mean_zero_and_variance_one(drawn):
    values, mask = drawn
    found = whiten(torch.where(mask, values, NAN), mask, eps=0.0)
    assert not found[~mask].any()
    kept = found[mask]
    if kept.numel() > 1 and values[mask].std() > 1e-9:
        assert_zero(kept.mean())
        assert_close(kept.square().mean(), 1.0)
    else:
        assert not kept.any()


@given(
    st.integers(1, 5).flatmap(lambda t: st.tuples(numbers(2, t), numbers(2, t), booleans(2, t))),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_gae_runs_on_the_compressed_sequence(drawn, gamma, lam):
    rewards, values, mask = drawn
    found = gae(rewards, torch.where(mask, values, NAN), mask, gamma=gamma, lam=lam)
    for row in range(2):
        kept = mask[row]
        r, v = rewards[row, kept].tolist(), [*values[row, kept].tolist(), 0.0]
        expected, carry = [], 0.0
        for t in reversed(range(len(r))):
            carry = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * carry
            expected.insert(0, carry)
        assert_close(found[row, kept], torch.tensor(expected, dtype=torch.float64))
        assert not found[row, ~kept].any()


@given(st.integers(1, 4).flatmap(lambda t: st.tuples(numbers(2, t), numbers(2, t), booleans(2, t))))
def test_gae_of_lambda_one_is_return_minus_value(drawn):
    rewards, values, mask = drawn
    expected = torch.where(mask, returns_to_go(rewards, mask) - values, 0.0)
    assert_close(gae(rewards, values, mask, lam=1.0), expected)


@given(booleans(2, 3, 4), numbers(2, 3))
def test_terminal_rewards_stand_on_the_last_trainable_token(mask, rewards):
    placed = terminal_rewards(rewards, mask)
    assert_close(placed.sum(-1), torch.where(mask.any(-1), rewards, 0.0))
    assert not placed[~mask].any()
    going = returns_to_go(placed, mask)
    assert_close(going, torch.where(mask, rewards.unsqueeze(-1), 0.0))


# Boundaries


@pytest.mark.parametrize("value", [0.3, 0.1 + 0.2, 1e6 / 3, -7.7, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(value, size):
    rewards = torch.full((2, size), value, dtype=torch.float64)
    for member in (group_mean, leave_one_out):
        assert not member(rewards).any()
    for member in (group_std, batch_std):
        assert not member(rewards, eps=0.0).any()
    assert not whiten(rewards, rewards == rewards, eps=0.0).any()


def test_a_spread_that_rounding_made_is_none():
    rewards = torch.tensor([[0.1 + 0.2, 0.3]], dtype=torch.float64)
    assert rewards[0, 0] != rewards[0, 1]
    assert not group_std(rewards, eps=0.0).any()
    assert not batch_std(rewards, eps=0.0).any()
    assert group_std(rewards * 1e-30 + torch.tensor([[1e-30, 0.0]]).double(), eps=0.0).any()


@pytest.mark.parametrize("member", GROUP[1:])
def test_a_group_of_one_is_refused_and_a_survivor_gets_nothing(member):
    with refused("at least 2", "1"):
        member(torch.ones(2, 1))
    present = torch.tensor([[True, False], [True, True]])
    found = member(torch.tensor([[5.0, NAN], [1.0, 0.0]]), present)
    assert not found[0].any() and found[1].any()
    assert not member(torch.ones(1, 2), torch.zeros(1, 2).bool()).any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: group_std(r, ddof=2), ("ddof is 2",)),
        (lambda r: batch_std(r, ddof=-1), ("ddof is -1",)),
        (lambda r: group_std(r, eps=-1.0), ("eps is -1", "at least 0")),
        (lambda r: whiten(r, r == r, eps=NAN), ("eps is nan",)),
        (lambda r: gae(r, r, r == r, gamma=1.5), ("gamma is 1.5", "from 0 to 1")),
        (lambda r: gae(r, r, r == r, lam=-0.1), ("lam is -0.1",)),
    ],
)
def test_settings_without_meaning_are_refused(call, words):
    with refused(*words):
        call(torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types(dtype):
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=dtype)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    mask = torch.ones(1, 4).bool()
    found = [member(rewards) for member in GROUP]
    found += [gae(rewards, rewards, mask), whiten(rewards, mask), returns_to_go(rewards, mask)]
    assert {x.dtype for x in found} == {want}


def test_leave_one_out_keeps_every_digit_of_float64():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert_close(leave_one_out(rewards)[0, 1], -1 / 3, relative=1e-15)


def test_no_tokens():
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty.bool()).shape == (2, 0)


def test_leading_axes():
    rewards = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    for member in GROUP:
        each = [[member(rewards[i, j]) for j in range(3)] for i in range(2)]
        assert_close(member(rewards), torch.stack([torch.stack(row) for row in each]))


def test_group_mean_is_biased_as_it_says():
    assert_biased(get("group_mean"), token_tree(2), 2, at_least=0.1)
