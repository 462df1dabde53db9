"""Trees and problems: what is listed, in what order, and the problems that come built in."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import assert_close
from problem_strategies import drawn, trees, typical

from windage.estimators.catalogue import get
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Responses
from windage.toy.objective import objective
from windage.toy.problems import (
    BUILT_IN,
    Tree,
    bandit,
    difficulties,
    distinct,
    make,
    normalize,
    token_tree,
    trajectories,
)

TREES = trees(90)


def listed(tree: Tree) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prefixes and responses by length and then by ids, in plain Python."""
    going = [v for v in range(tree.vocab) if v != tree.stop]
    prefixes = [p for t in range(tree.horizon) for p in itertools.product(going, repeat=t)]
    responses = [
        (*p, v)
        for p in prefixes
        for v in range(tree.vocab)
        if v == tree.stop or len(p) == tree.horizon - 1
    ]
    return prefixes, sorted(responses, key=lambda r: (len(r), r))


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_paths_list_every_response_in_order(tree: Tree) -> None:
    prefixes, responses = listed(tree)
    place = {p: n for n, p in enumerate(prefixes)}
    rows, tokens = tree.paths
    assert (tree.prefixes, tree.leaves) == (len(prefixes), len(responses))
    for k, response in enumerate(responses):
        end = len(response)
        assert tokens[k].tolist() == [*response, *[-1] * (tree.horizon - end)]
        expected = [place[response[:t]] for t in range(end)]
        assert rows[k].tolist() == [*expected, *[-1] * (tree.horizon - end)]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_levels_partition_prefixes_and_responses(tree: Tree) -> None:
    prefixes, responses = listed(tree)
    for t in range(tree.horizon):
        assert {len(p) for p in prefixes[tree.level(t)]} <= {t}
        assert {len(r) for r in responses[tree.leaf_level(t)]} <= {t + 1}
    assert tree.level(tree.horizon - 1).stop == tree.prefixes
    assert tree.leaf_level(tree.horizon - 1).stop == tree.leaves


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_join_undoes_split_and_descend_reaches_the_children_in_order(tree: Tree) -> None:
    tokens = torch.arange(2 * 3 * tree.vocab).view(2, 3, tree.vocab)
    going, stopping = tree.split(tokens)
    assert (stopping is None) == (tree.stop is None)
    assert going.shape[-1] == tree.going
    assert torch.equal(tree.join(going, stopping), tokens)
    prefixes, _ = listed(tree)
    if tree.horizon > 1:
        names = [[(*p, v) for v in range(tree.vocab)] for p in prefixes[tree.level(0)]]
        codes = torch.tensor([[v for (*_, v) in row] for row in names])
        assert tree.descend(codes).tolist() == [p[0] for p in prefixes[tree.level(1)]]


def test_stop_in_the_middle() -> None:
    tree = Tree(3, 1, 2)
    assert tree.paths[1].tolist() == [[1, -1], [0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2]]


def test_vocabulary_of_one() -> None:
    assert (Tree(1, 0, 3).leaves, Tree(1, 0, 3).prefixes) == (1, 1)
    assert (Tree(1, None, 3).leaves, Tree(1, None, 3).prefixes) == (1, 3)
    for tree in (Tree(1, 0, 3), Tree(1, None, 3)):
        problem = make("one", tree, torch.zeros(1, tree.prefixes, 1), torch.ones(1, 1))
        assert objective(problem).gradient.abs().max() == 0
        for engine in ("prefix_tree", "classes", "compositions", "tuples"):
            moments = exact(get("rloo"), problem, 2, engine)
            assert moments.variance == 0 and moments.mean.abs().max() == 0


@pytest.mark.parametrize("number", range(0, 60, 6))
def test_log_probabilities_are_those_of_softmax(number: int) -> None:
    problem = drawn(number)
    assert_close(problem.logp.exp(), problem.logits.softmax(-1))
    assert (problem.logp - problem.logits.log_softmax(-1)).abs().max() < 1e-12


def test_normalize_takes_rows_of_any_size_and_tokens_that_never_come() -> None:
    logits = torch.tensor([[1e8, 1e8 - 1], [-800.0, 800.0], [0.0, -torch.inf]]).double()
    assert torch.equal(normalize(logits), logits.log_softmax(-1))
    assert torch.equal(normalize(logits) + 0, normalize(normalize(logits)))


def test_the_sampler_is_the_policy_to_the_last_bit_unless_said() -> None:
    problem = bandit()
    assert torch.equal(problem.logp, problem.behavior_logp)
    assert torch.equal(problem.on_policy().behavior_logp, problem.logp)


def test_distinct_values_are_sorted_few_or_many() -> None:
    for count in (1, 2, 3, 16, 17, 18, 40):
        values = torch.arange(count).double().flip(0).repeat(3)
        assert distinct(values).tolist() == list(range(count))


def test_kinds_pair_the_rewards_with_the_lengths_that_occur() -> None:
    problem = make("p", Tree(2, 1, 2), torch.zeros(1, 2, 2), torch.tensor([[1.0, 0.0, 1.0]]))
    assert problem.kinds[0].tolist() == [[1.0, 1.0], [0.0, 2.0], [1.0, 2.0]]
    assert problem.sizes.tolist() == [1, 2]


def test_selected_prompts_add_up_to_the_whole() -> None:
    problem = typical(3)
    parts = [objective(problem.select(p)) for p in range(3)]
    assert_close(sum(p.value for p in parts) / 3, objective(problem).value)
    assert_close(torch.cat([p.gradient for p in parts]) / 3, objective(problem).gradient)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_problems_are_whole(name: str) -> None:
    problem = BUILT_IN[name]()
    assert problem.name == name
    for table in (problem.logits, problem.rewards, problem.logp):
        assert table.isfinite().all()
    assert problem.lengths.min() >= 1
    assert float(objective(problem).gradient.norm()) > 0.01


def test_difficulties_are_the_success_rates() -> None:
    problem = difficulties((0.2, 0.7))
    rates = [float(objective(problem.select(p)).value) for p in range(2)]
    assert_close(rates, [0.2 * 0.9, 0.7 * 0.9])


def test_token_tree_rewards_more_ones_than_zeros() -> None:
    problem = token_tree(3)
    _, responses = listed(problem.tree)
    expected = [float(r.count(1) > r.count(0)) for r in responses]
    assert problem.rewards[0].tolist() == expected


def test_trajectories_separate_as_in_topr_appendix_b1() -> None:
    """Equation (13) for the class totals, and the general pair, under the canonical limits."""
    problem = trajectories()
    pi, mu = problem.logp[0, 0].exp(), problem.behavior_logp[0, 0].exp()
    rewards = problem.rewards[0]
    ratio = torch.where(mu > 0, pi / mu, 0.0)
    weight = torch.where(rewards > 0, 1.0, ratio.clamp(0, 1))
    g = mu * weight * rewards
    gradient = exact(get("topr"), problem, 1, "prefix_tree").mean[0, 0]
    pairs = g[:, None] - g - (pi[:, None] - pi) * g.sum()
    assert_close(gradient[:, None] - gradient, pairs)
    positive = rewards > 0
    up, down = pi[positive].sum(), pi[~positive].sum()
    g_up, g_down = g[positive].sum(), g[~positive].sum()
    apart = gradient[positive].sum() - gradient[~positive].sum()
    assert_close(apart, g_up * (1 - up + down) - g_down * (1 + up - down))
    supervised = exact(get("positives_only"), problem, 1, "prefix_tree").mean[0, 0]
    assert supervised[positive].sum() - supervised[~positive].sum() < apart


def test_trajectories_of_a_batch_move_as_in_topr_appendix_b2() -> None:
    """Equation (14): one positive, one negative, and what was not sampled."""
    problem = trajectories()
    table, topr = Responses(problem), get("topr")
    index = torch.tensor([[[0, 1]]])
    gradient = table.gradients(index, topr, table.batch(index, head=False))[0, 0, 0]
    pi, mu = problem.logp[0, 0].exp(), problem.behavior_logp[0, 0].exp()
    up = 0.5
    down = -0.5 * float((pi[1] / mu[1]).clamp(0, 1))
    assert_close(gradient[0], (1 - pi[0]) * up - pi[0] * down)
    assert_close(gradient[1], (1 - pi[1]) * down - pi[1] * up)
    assert_close(gradient[2:], -pi[2:] * (up + down))
    assert abs(float(gradient.sum())) < 1e-15
