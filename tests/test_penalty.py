"""Penalties: values, coefficients as gradients of what they say, and place in the estimator."""

from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, assert_zero, enumerated_mean, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches, numbers

from windage.estimators.advantage import constant, returns_to_go
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.estimators.penalty import (
    LIMIT,
    adapted,
    ema,
    entropy,
    k1,
    k2,
    k3,
    loss_k1,
    loss_k2,
    loss_k3,
    loss_k3_weighted,
    overlong_shaping,
    positive_nll,
    reward_k1,
    reward_k2,
    reward_k3,
    timeout_failure,
)
from windage.toy.objective import objective
from windage.toy.problems import token_tree

VALUES = {reward_k1: k1, reward_k2: k2, reward_k3: k3}
LOSSES = {loss_k1: k1, loss_k2: k2, loss_k3: k3}
vectors = numbers(6, low=-3.0, high=3.0)


# Relations


@given(vectors)
def test_values_under_the_policy(logits):
    p, ref = logits[:3].log_softmax(-1), logits[3:].log_softmax(-1)
    x = p - ref
    divergence = (p.exp() * x).sum()
    for value in (k1, k3):
        assert_close((p.exp() * value(x)).sum(), divergence)
    assert (k3(x) >= 0).all()


def test_k2_is_biased_in_value():
    p, ref = torch.tensor([0.9, 0.1]).double().log(), torch.tensor([0.5, 0.5]).double().log()
    assert_apart((p.exp() * k2(p - ref)).sum(), (p.exp() * (p - ref)).sum(), at_least=1e-2)


@given(vectors, st.sampled_from([0.001, 0.5]))
def test_in_the_loss_a_penalty_is_the_descent_of_its_value(x, coefficient):
    for member, value in LOSSES.items():
        along = x.clone().requires_grad_()
        (coefficient * value(along)).sum().backward()
        assert_close(member(x, coefficient=coefficient), -along.grad)


@given(vectors, vectors)
def test_the_weighted_k3_is_the_descent_through_its_ratio(x, e):
    both = torch.stack([x, e]).requires_grad_()
    (both[1].exp() * k3(both[0])).sum().backward()
    # x and e move together with log pi.
    assert_close(loss_k3_weighted(x, e, coefficient=1.0), -both.grad.sum(0))
    assert_close(
        loss_k3_weighted(x, torch.zeros_like(e), coefficient=1.0), loss_k2(x, coefficient=1.0)
    )


@given(vectors)
def test_in_the_reward_a_penalty_is_its_value_with_a_minus(x):
    for member, value in VALUES.items():
        assert_close(member(x, coefficient=0.25), -0.25 * value(x))


def test_no_pull_where_policy_and_reference_agree():
    zero = torch.zeros(3).double()
    for member in (*VALUES, loss_k2, loss_k3):
        assert not member(zero).any()
    assert not loss_k3_weighted(zero, zero + 1).any()


@given(numbers(4))
def test_entropy_is_raised_on_average(logits):
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    (-(logp.exp() * logp).sum()).backward()
    p = logp.detach()
    score = torch.eye(4).double() - p.exp()
    assert_close((p.exp() * entropy(p, coefficient=1.0)) @ score, logits.grad)


def test_coefficients_default_to_a_thousandth():
    for member in (*VALUES, *LOSSES, loss_k3_weighted, entropy):
        assert dict(use(member).settings)["coefficient"] == 0.001


# Boundaries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_that_the_policy_forgot_keeps_a_finite_pull(dtype):
    x = torch.tensor([-1e4, -LIMIT, 1e4], dtype=dtype)
    assert k3(x).isfinite().all() and (k3(x) >= 0).all()
    assert k3(x)[0] == k3(x)[1]
    found = loss_k3(x, coefficient=1.0)
    assert found.isfinite().all() and found[0] == found[1] > 1e8
    assert_close(found[2].item(), -1.0)


def test_shaping_ramps_from_zero_to_minus_one():
    lengths = torch.tensor([[0, 10, 12, 13, 20, 99]])
    found = overlong_shaping(lengths, length=16, margin=6)
    assert_close(
        found, torch.tensor([[0.0, 0.0, -1 / 3, -0.5, -1.0, -1.0]]).double(), relative=1e-7
    )
    assert_close(found[0, 2].item(), -1 / 3, relative=1e-15)
    assert not overlong_shaping(lengths).any()


def test_a_late_answer_is_a_failure():
    rewards, elapsed = torch.tensor([[1.0, 1.0, -2.0]]), torch.tensor([[600.0, 601.0, 700.0]])
    assert (rewards + timeout_failure(rewards, elapsed)).tolist() == [[1.0, 0.0, 0.0]]
    assert (rewards + timeout_failure(rewards, elapsed, failure=-1.0)).tolist() == [
        [1.0, -1.0, -1.0]
    ]


def test_the_reference_moves():
    ref, policy = torch.tensor([0.0, 2.0]).double(), torch.tensor([1.0, 0.1]).double()
    assert ema(ref, policy, coefficient=1.0).tolist() == policy.tolist()
    assert ema(ref, policy, coefficient=0.0).tolist() == ref.tolist()
    assert_close(ema(ref, policy), 0.6 * policy + 0.4 * ref)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: overlong_shaping(torch.ones(1, 1).long(), length=0), ("length is 0",)),
        (lambda: overlong_shaping(torch.ones(1, 1).long(), length=9, margin=0), ("margin is 0",)),
        (lambda: ema(torch.ones(1), torch.ones(1), coefficient=1.1), ("coefficient is 1.1",)),
    ],
)
def test_settings_without_meaning_are_refused(call, words):
    with refused(*words):
        call()


# In an estimator


@settings(max_examples=25)
@given(batches())
def test_in_the_loss_it_is_aggregated_like_the_rest_and_rejected_with_the_row(batch):
    silent = replace(get("reinforce"), advantage=use(constant, baseline=0.0))
    batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
    found = replace(silent, penalties=(use(loss_k2, coefficient=2.0),))(batch)
    x = torch.where(batch.mask, batch.logp - batch.reference_logp, 0.0)
    n = batch.present.sum().clamp(min=1)
    assert_close(found.own, -2.0 * x / n)
    lonely = replace(get("rloo"), penalties=(use(loss_k2),))(batch)
    alone = batch.present & (batch.present.sum(-1, keepdim=True) < 2)
    assert not lonely.own[alone].any()


@settings(max_examples=25)
@given(batches())
def test_in_the_reward_it_is_collected_from_each_token_on(batch):
    batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
    found = replace(get("reinforce"), penalties=(use(reward_k1, coefficient=2.0),))(batch)
    x = torch.where(batch.mask, batch.logp - batch.reference_logp, 0.0)
    expected = returns_to_go(-2.0 * x, batch.mask) / batch.present.sum().clamp(min=1)
    assert_close(found.own, expected)


@settings(max_examples=25)
@given(batches())
def test_a_critic_sees_the_penalty_in_its_rewards(batch):
    plain = replace(get("ppo", gamma=0.5), corrections=get("rloo").corrections)
    found = replace(plain, penalties=(use(reward_k1, coefficient=2.0),))(batch)
    x = torch.where(batch.mask, batch.logp - batch.reference_logp, 0.0)
    alone = replace(batch, values=torch.zeros_like(batch.values), rewards=batch.rewards * 0)
    share = replace(plain, penalties=(use(reward_k1, coefficient=2.0),))(alone)
    assert_close(found.own, plain(batch).own + share.own)
    expected = returns_to_go(-2.0 * x, batch.mask, gamma=0.5)
    alone = replace(plain.change(lam=1.0), penalties=(use(reward_k1, coefficient=2.0),))(alone)
    assert_close(alone.terms.advantages, expected)


def test_a_coefficient_of_zero_needs_no_reference():
    batch = Batch.from_rows(
        [1.0, 0.0], "aa", mask=[[1], [1]], logp=[[-1.0]] * 2, behavior_logp=[[-1.0]] * 2
    )
    assert get("grpo")(batch).own.any()
    with refused("reference_logp"):
        get("grpo", coefficient=0.1)(batch)


def test_shaping_reaches_the_rewards_of_dapo():
    batch = Batch.from_rows(
        [1.0, 0.0, 1.0],
        "aaa",
        mask=[[1] * 4, [1] * 4, [1] * 8],
        logp=[[-1.0] * 4] * 2 + [[-1.0] * 8],
        behavior_logp=[[-1.0] * 4] * 2 + [[-1.0] * 8],
    )
    shaped = get("dapo", length=8, margin=4)(batch).terms.advantages[0, :, 0]
    plain = get("dapo")(batch).terms.advantages[0, :, 0]
    assert plain[0] == plain[2] and shaped[0] > shaped[2]
    assert_close(shaped[2], shaped[1])


def test_timeout_as_failure_is_the_gradient_of_the_time_limited_objective():
    problem = token_tree(3)
    late = problem.lengths > 2
    limited = replace(problem, rewards=torch.where(late, 0.0, problem.rewards))

    def clock(batch, index):
        return replace(batch, elapsed=batch.lengths.double())

    estimator = replace(get("reinforce"), penalties=(use(timeout_failure, limit=2.0),))
    found = enumerated_mean(estimator, problem, 1, clock)
    assert_close(found, objective(limited).gradient)
    assert_apart(found, objective(problem).gradient, at_least=1e-3)


def test_k1_in_the_loss_pulls_nowhere_on_average():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    x = p.log() - torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    assert_zero((p * loss_k1(x, coefficient=1.0)) @ (torch.eye(3).double() - p))
    assert (p * loss_k2(x, coefficient=1.0)) @ (torch.eye(3).double() - p)[:, 0] < -0.1


def test_the_likelihood_of_correct_responses_climbs_their_probability():
    """In one step; over several tokens the same, for all tokens of a response have one weight."""
    problem = token_tree(3)
    alone = replace(get("reinforce"), penalties=(use(positive_nll, coefficient=0.3),))
    with_it, without = (
        enumerated_mean(e, problem, 1) for e in (alone, replace(alone, penalties=()))
    )
    right = replace(problem, rewards=(problem.rewards > 0).double())
    assert_close(with_it - without, 0.3 * objective(right).gradient)


def test_the_likelihood_looks_at_outcomes_before_shaping():
    batch = Batch.from_rows(
        [-0.5, 0.5], "aa", mask=[[1], [1]], logp=[[-1.0]] * 2, outcomes=[1.0, 0.0]
    )
    with_it = replace(get("group_mean"), penalties=(use(positive_nll),))
    added = with_it(batch).own - get("group_mean")(batch).own
    assert_close(added, [[[0.05], [0.0]]])


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.005, 0.3]))
def test_the_coefficient_moves_towards_the_target_entropy_within_bounds(last, entropy_, step):
    found = adapted(last, entropy_, target=0.4, step=step, low=0.1, high=0.8)
    assert 0.1 <= found <= 0.8
    if 0.1 + step <= last <= 0.8 - step:
        assert_close(found - last, step if entropy_ <= 0.4 else -step)


def test_a_coefficient_without_bounds_in_order_is_refused():
    with refused("low is 0.5, high is 0.1"):
        adapted(0.2, 0.1, low=0.5, high=0.1)
    with refused("step is -1"):
        adapted(0.2, 0.1, step=-1.0)
