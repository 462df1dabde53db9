"""The recursions on the prefix tree: measure, weights, moments, and advantages that are affine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close
from problem_strategies import drawn, entry, typical

from windage.estimators.admission import staleness_cap
from windage.estimators.advantage import constant, group_mean, group_std, leave_one_out
from windage.estimators.aggregation import sequence_mean, token_sum
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.correction import (
    Correction,
    clip,
    geometric,
    keep,
    prefix,
    ratio,
    token,
    trajectory,
    truncate,
)
from windage.estimators.member import Member, use
from windage.toy.behavior import with_behavior
from windage.toy.exact.affine import affine_coefficients
from windage.toy.exact.plan import exact
from windage.toy.exact.prefix_tree import response_moments, response_scale, tree_weights
from windage.toy.exact.tuples import Responses
from windage.toy.exact.walk import Walk, conditional, dot, pull_back
from windage.toy.objective import PLAIN, objective
from windage.toy.problems import Problem, Tree, make, token_tree

NUMBERS = (3, 11, 21, 27, 60, 95, 127)


def along_paths(problem: Problem, table: torch.Tensor) -> torch.Tensor:
    """Values at each step of each response, 0 after the end, `[P M T]`."""
    found = Responses(problem)
    return torch.where(found.real, table.flatten(1)[:, found.parameter], 0.0)


@pytest.mark.parametrize("number", NUMBERS)
def test_leaf_measures_are_products_along_paths(number: int) -> None:
    problem = drawn(number)
    walk, real = Walk(problem), Responses(problem).real
    for table, leaves in (
        (walk.behavior, walk.leaf_flow),
        (walk.probability, walk.leaf_probability),
    ):
        product = torch.where(real, along_paths(problem, table), 1.0).prod(-1)
        assert_close(leaves, product)
        assert_close(leaves.sum(-1), torch.ones(problem.prompts))


@pytest.mark.parametrize("number", NUMBERS)
def test_path_ratio_is_the_sum_of_log_ratios_where_the_path_is_drawn(number: int) -> None:
    problem = drawn(number)
    walk = Walk(problem)
    total = along_paths(problem, walk.log_ratio).sum(-1)
    assert_close(walk.at_leaves(walk.path_ratio), torch.where(walk.leaf_flow > 0, total, 0.0))
    assert walk.path_ratio.isfinite().all()


@pytest.mark.parametrize("number", NUMBERS)
def test_gather_sums_the_responses_that_pass_a_token(number: int) -> None:
    problem = drawn(number)
    walk, found = Walk(problem), Responses(problem)
    values = torch.arange(1.0, problem.tree.leaves + 1).double().expand(problem.prompts, -1)
    expected = torch.zeros(problem.prompts, problem.logits[0].numel(), dtype=torch.float64)
    for k in range(problem.tree.leaves):
        expected[:, found.parameter[k][found.real[k]]] += values[0, k]
    assert_close(walk.gather(values), expected.view_as(problem.logits))


@pytest.mark.parametrize("number", NUMBERS)
def test_visits_are_flow_times_the_conditional_mean(number: int) -> None:
    problem = drawn(number)
    walk = Walk(problem)
    at_token, at_prefix = conditional(walk, problem.rewards.unsqueeze(0))
    visits = walk.visits(problem.rewards)
    assert_close(visits, at_token[0] * walk.flow)
    assert walk.visits(problem.rewards) is visits
    assert_close(at_prefix[0, :, 0], dot(walk.leaf_flow, problem.rewards))
    assert walk.visits(None) is walk.flow


def test_score_norm_is_that_of_onehot_minus_policy() -> None:
    walk = Walk(token_tree(2))
    score = torch.eye(3, dtype=torch.float64) - walk.probability.unsqueeze(-2)
    assert_close(walk.score_norm, score.square().sum(-1))


def test_pull_back_is_the_transpose_of_log_softmax() -> None:
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4)
    _, transposed = torch.func.vjp(lambda z: z.log_softmax(-1), logits)
    assert_close(pull_back(c, logits.softmax(-1)), transposed(c)[0])


@pytest.mark.parametrize("number", NUMBERS)
def test_on_policy_moments_of_one_response(number: int) -> None:
    """E x = 0, E R x = gradient, E|x|^2 = expected sum of score norms."""
    problem = drawn(number).on_policy()
    walk = Walk(problem)
    x, q = response_moments(walk, PLAIN, 1.0, (None, problem.rewards), (None,))
    assert x[0].abs().max() < 1e-14
    assert_close(x[1] / problem.prompts, objective(problem).gradient)
    listed = along_paths(problem, walk.score_norm).sum(-1)
    assert_close(q[0], dot(walk.leaf_flow, listed))


def test_means_go_where_they_are_asked_to() -> None:
    problem = token_tree(2)
    walk = Walk(problem)
    plain, _ = response_moments(walk, PLAIN, 1.0, (problem.rewards,), ())
    out = torch.full_like(plain, torch.nan)
    put, _ = response_moments(walk, PLAIN, 1.0, (problem.rewards,), (), out=out)
    assert put is out and torch.equal(out, plain)


@pytest.mark.parametrize("member", [constant, group_mean, leave_one_out])
@pytest.mark.parametrize("center", [0.0, 0.3, 1e6])
def test_affine_coefficients_reproduce_the_advantage(member: object, center: float) -> None:
    advantage = use(member)  # type: ignore[arg-type]
    alpha, beta, gamma = affine_coefficients(advantage, 4, center)
    rewards = center + torch.tensor([[0.0, 0.25, -1.0, 2.0]], dtype=torch.float64)
    away = rewards - center
    expected = alpha * away + beta * (away.sum() - away) + gamma
    found = advantage(rewards, torch.ones_like(rewards, dtype=torch.bool))
    assert (found - expected).abs().max() < 1e-14 * max(1.0, center) * 10
    if member is not constant:
        assert gamma == 0.0


def test_scale_is_one_number_where_lengths_do_not_matter() -> None:
    problem = token_tree(3)
    assert response_scale(use(token_sum), problem, 4) == (0.25, None)
    scale, shares = response_scale(use(sequence_mean), problem, 4)
    assert scale == 0.25
    assert_close(shares, 1 / problem.lengths.double())
    fixed = make("fixed", Tree(2, None, 2), torch.zeros(1, 3, 2), torch.zeros(1, 4))
    assert response_scale(use(sequence_mean), fixed, 4) == (0.125, None)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_group_size_is_a_factor_of_every_denominator_by_length(name: str) -> None:
    """So that one response's moments serve every group size."""
    aggregation = CATALOGUE[name].aggregation
    if aggregation.traits.scope == "response":
        problem = token_tree(4)
        if dict(aggregation.settings).get("length", 0) is None:
            aggregation = aggregation.change(length=4)
        for size in (1, 2, 7):
            lengths = problem.lengths[0, :, None, None].expand(-1, 1, size)
            direct = aggregation(lengths, torch.ones_like(lengths, dtype=torch.bool))[:, 0, 0]
            scale, shares = response_scale(aggregation, problem, size)
            assert_close(scale * (1.0 if shares is None else shares[0]) + 0 * direct, direct)


def test_products_of_corrections_multiply() -> None:
    """A decoupled form: token ratio times a band on prefixes times the whole response's ratio."""
    problem = typical(2)
    walk = Walk(problem)
    factors = tuple(
        Correction(reach=use(reach), map=use(map_))
        for reach, map_ in ((token, ratio), (prefix, keep), (trajectory, ratio))
    )
    estimator = replace(get("reinforce"), corrections=factors)
    weights = tree_weights(estimator, walk, 1.0, None)
    band = use(keep)(walk.path_ratio, torch.ones(()))
    assert_close(weights.node, walk.log_ratio.exp() * band)
    assert_close(weights.leaf, walk.at_leaves(walk.path_ratio).exp())
    for group_size in (1, 2):
        tree = exact(estimator, problem, group_size, "prefix_tree")
        other = exact(estimator, problem, group_size, "compositions")
        assert_close(tree.mean, other.mean)
        assert_close(tree.variance, other.variance)


@pytest.mark.parametrize(
    "map_", [use(clip, clip_low=0.02, clip_high=0.03), use(truncate, cap=1.01)]
)
@pytest.mark.parametrize("stop", [None, 1])
def test_a_geometric_mean_is_exact_however_many_values_it_has(
    map_: Member, stop: int | None
) -> None:
    """Every response has its own reward and its own ratio; some are clipped and some are not."""
    tree = Tree(3, stop, 3)
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(1, tree.prefixes, 3, generator=random)
    rewards = torch.randn(1, tree.leaves, generator=random)
    problem = with_behavior(make("many", tree, logits, rewards), "noise", sigma=0.1)
    walk = Walk(problem)
    means = (walk.at_leaves(walk.path_ratio) / problem.lengths).exp()
    assert len(means.unique()) == tree.leaves and 0.2 < float((means < 1.01).double().mean()) < 0.8
    factors = (Correction(reach=use(geometric), map=map_),)
    own = replace(get("reinforce"), corrections=factors, aggregation=use(sequence_mean))
    for group_size in (1, 2):
        tree_, listed = (exact(own, problem, group_size, e) for e in ("prefix_tree", "tuples"))
        assert_close(tree_.mean, listed.mean)
        assert_close(tree_.variance, listed.variance)
    shared = replace(own, advantage=use(group_std))
    found, listed = (exact(shared, problem, 2, e) for e in ("classes", "tuples"))
    assert_close(found.mean, listed.mean)
    assert_close(found.variance, listed.variance)


@pytest.mark.parametrize("number", NUMBERS)
def test_sums_over_responses_are_the_transpose_of_gather(number: int) -> None:
    problem = drawn(number)
    walk = Walk(problem)
    random = torch.Generator().manual_seed(number)
    tokens = torch.rand(problem.logits.shape, generator=random, dtype=torch.float64)
    leaves = torch.rand(problem.rewards.shape, generator=random, dtype=torch.float64)
    kernel = torch.rand(problem.logits.shape, generator=random, dtype=torch.float64)
    for factor in (None, kernel):
        one = dot(walk.gather(leaves, factor), tokens)
        assert_close(dot(leaves, walk.ending(tokens, factor)), one)


def test_an_inert_admission_is_ignored() -> None:
    problem = token_tree(2)
    capped = replace(get("rloo"), admission=(use(staleness_cap),))
    assert_close(
        exact(capped, problem, 3, "prefix_tree").mean, exact(get("rloo"), problem, 3, "tuples").mean
    )


@pytest.mark.parametrize("name", ["rloo", "group_mean", "token_tis", "centered_tis", "suffix_is"])
@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_a_large_offset_of_rewards_costs_digits_in_proportion(name: str, offset: float) -> None:
    """Relative agreement is about 1e-16 times offset over spread: 1e-10 holds up to 1e5."""
    problem = typical(2)
    moved = replace(problem, rewards=problem.rewards + offset)
    here = exact(entry(name, problem), problem, 3, "prefix_tree")
    there = exact(entry(name, problem), moved, 3, "prefix_tree")
    allowed = 1e-15 * offset
    assert_close(there.mean, here.mean, relative=max(1e-10, allowed))
    assert_close(there.variance, here.variance, relative=max(1e-10, allowed))


def test_variance_falls_as_one_over_the_group_size_for_a_constant_baseline() -> None:
    problem = with_behavior(token_tree(3), "noise", sigma=0.5)
    variances = [exact(get("reinforce"), problem, g, "prefix_tree").variance for g in (1, 2, 8)]
    assert_close(torch.stack(variances) * torch.tensor([1, 2, 8]), variances[0].expand(3))


def test_a_baseline_subtracts_that_multiple_of_the_drift() -> None:
    problem = with_behavior(token_tree(3), "noise", sigma=0.5)
    plain = exact(get("reinforce"), problem, 2, "prefix_tree")
    based = exact(get("reinforce", baseline=0.7), problem, 2, "prefix_tree")
    assert_close(based.mean, plain.mean - 0.7 * plain.drift)
    assert_apart(based.mean, plain.mean)


def test_responses_that_are_never_drawn_leave_no_trace() -> None:
    """Whatever their reward, and finite however small the policy's probability of the others."""
    tree = Tree(3, 2, 3)
    base = token_tree(3)
    cut = with_behavior(base, "top_k", k=2)
    never = Walk(cut).leaf_flow == 0
    assert bool(never.any())
    wild = replace(cut, rewards=torch.where(never, 1e3, cut.rewards))
    for name in ("trajectory_is", "topr", "token_tis", "centered", "suffix_is"):
        plain = exact(entry(name, cut), cut, 2, "prefix_tree")
        other = exact(entry(name, wild), wild, 2, "prefix_tree")
        assert_close(other.mean, plain.mean)
        assert_close(other.variance, plain.variance)
    assert tree == base.tree


def test_whole_response_ratio_second_moment_grows_with_length() -> None:
    """E w^2 = (1 + chi2)^T for independent tokens: 0.04 a token here."""
    for horizon in (1, 4, 8):
        tree = Tree(2, None, horizon)
        p = math.log(0.6 / 0.4)
        logits = torch.tensor([0.0, p]).expand(1, tree.prefixes, 2)
        problem = make("iid", tree, logits, torch.ones(1, tree.leaves), behavior=0 * logits)
        walk = Walk(problem)
        square = dot(walk.leaf_flow, (2 * walk.at_leaves(walk.path_ratio)).exp())
        assert_close(square, torch.tensor([1.04**horizon]), relative=1e-6)
