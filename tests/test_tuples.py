"""Listing groups: what is listed, with which probability, and what a batch of it holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from checks import assert_close
from problem_strategies import drawn, entry, typical

from windage.estimators.catalogue import get
from windage.toy.exact import tuples as module
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import (
    Responses,
    by_prompt,
    compositions,
    count_multisets,
    count_tuples,
    every_multiset,
    every_tuple,
    multinomial,
    power,
    spread,
    ways,
)
from windage.toy.problems import Problem, Tree, make, token_tree


def three(prompts: int = 1) -> Problem:
    """Three responses a prompt."""
    problem = token_tree(2).select(0)
    tree = Tree(3, None, 1)
    logits = problem.logits[:, :1].repeat(prompts, 1, 1)
    return make("three", tree, logits, torch.tensor([[0.0, 1.0, 3.0]]).repeat(prompts, 1))


@pytest.mark.parametrize(("parts", "total"), [(1, 4), (2, 3), (3, 3), (4, 2), (3, 0)])
def test_compositions_are_all_there_once(parts: int, total: int) -> None:
    found = [tuple(row) for row in compositions(parts, total).tolist()]
    expected = [c for c in itertools.product(range(total + 1), repeat=parts) if sum(c) == total]
    assert sorted(found) == sorted(expected)
    assert len(found) == ways(parts, total) == math.comb(parts + total - 1, total)


def test_multinomial_sums_to_one_and_takes_a_class_that_never_comes() -> None:
    counts = compositions(3, 4)
    chance = multinomial(counts, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    assert_close(chance.sum(), 1.0)
    assert chance[counts[:, 2] > 0].abs().max() == 0
    assert_close(chance[(counts == torch.tensor([2, 2, 0])).all(1)], [6 / 16])


def test_spread_lists_members_by_class() -> None:
    counts = compositions(3, 2)
    members = spread(counts, 2)
    for row, group in zip(counts.tolist(), members.tolist(), strict=True):
        assert [group.count(c) for c in range(3)] == row
        assert group == sorted(group)


@pytest.mark.parametrize("draw", [every_tuple, every_multiset])
@pytest.mark.parametrize("prompts", [1, 2])
def test_listed_probabilities_sum_to_one(draw: object, prompts: int) -> None:
    pieces = list(draw(three(prompts), 2))  # type: ignore[operator]
    assert_close(sum(float(chance.sum()) for _, chance in pieces), 1.0)
    rows = torch.cat([index for index, _ in pieces])
    assert len({tuple(r.flatten().tolist()) for r in rows}) == len(rows)


def test_counts_are_the_numbers_of_rows() -> None:
    for prompts in (1, 2):
        problem = three(prompts)
        for draw, count in ((every_tuple, count_tuples), (every_multiset, count_multisets)):
            rows = sum(len(chance) for _, chance in draw(problem, 2))
            assert count(problem, 2, joint=True) == rows
            alone = sum(len(chance) for _, chance in draw(problem.select(0), 2))
            assert count(problem, 2, joint=False) == prompts * alone


def test_counts_that_overflow_are_infinite() -> None:
    assert power(10, 400) == math.inf and ways(1000, 1000) == math.inf
    assert power(1, 1e9) == 1.0
    assert ways(50, 3) == math.comb(52, 3)


def test_pieces_do_not_change_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = typical(2, 2)
    whole = exact(get("grpo"), problem, 2, "tuples")
    monkeypatch.setattr(module, "CELLS", 200)
    assert sum(1 for _ in every_tuple(problem.select(0), 2)) > 3
    parts = exact(get("grpo"), problem, 2, "tuples")
    assert_close(parts.mean, whole.mean)
    assert_close(parts.variance, whole.variance)
    assert_close(parts.drift, whole.drift)


def test_batches_hold_the_fields_of_their_responses() -> None:
    problem = drawn(3, leaves=12)
    table = Responses(problem)
    index = torch.arange(problem.tree.leaves).expand(problem.prompts, -1).unsqueeze(0)
    batch = table.batch(index, head=True)
    assert torch.equal(batch.rewards[0], problem.rewards)
    assert torch.equal(batch.lengths[0], problem.lengths)
    chance = torch.where(batch.mask, batch.behavior_logp, 0.0).sum(-1).exp()[0]
    assert_close(chance * (table.walk.leaf_flow > 0), table.walk.leaf_flow)
    assert batch.head_logp.shape[-1] == problem.tree.vocab
    batch.validate()


def test_forced_tokens_count_in_lengths_and_move_nothing() -> None:
    problem = three()
    longer = replace(problem, lengths=torch.tensor([[1, 4, 2]]))
    short = exact(get("rloo"), problem, 2, "tuples")
    long = exact(get("rloo"), longer, 2, "tuples")
    assert_close(long.mean, short.mean)
    assert Responses(longer).mask.sum(-1).tolist() == [[1, 4, 2]]
    grpo = exact(get("grpo"), longer, 2, "tuples")
    assert_close(exact(get("grpo"), longer, 2, "classes").mean, grpo.mean)


def test_prompts_add_without_cross_terms() -> None:
    problem = typical(2, 2)
    joint = exact(get("cispo"), problem, 2, "tuples")
    apart = by_prompt(problem, lambda part: exact(get("rloo"), part, 2, "tuples"))
    assert_close(apart.mean, exact(get("rloo"), problem, 2, "prefix_tree").mean)
    assert_close(apart.variance, exact(get("rloo"), problem, 2, "prefix_tree").variance)
    assert_close(joint.variance, exact(get("cispo"), problem, 2, "compositions").variance)


@pytest.mark.parametrize("engine", ["tuples", "compositions", "classes"])
def test_degenerate_groups_only_are_undefined(engine: str) -> None:
    problem = replace(three(), rewards=torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(Undefined, match="degenerate"):
        exact(get("dapo"), problem, 2, engine)


def test_one_degenerate_prompt_of_two_is_undefined_as_well() -> None:
    problem = replace(three(2), rewards=torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]]).double())
    for engine in ("tuples", "compositions", "classes"):
        with pytest.raises(Undefined, match="degenerate"):
            exact(get("dapo"), problem, 2, engine)


def test_refilled_groups_are_a_condition() -> None:
    """E[g | accepted] P(accepted) + E[g | refused] P(refused) = E[g]; refused groups give 0."""
    problem = typical(1, 2)
    problem = replace(problem, rewards=(torch.arange(problem.tree.leaves) % 2).double()[None])
    free = replace(entry("dapo", problem), admission=())
    flow = Responses(problem).walk.leaf_flow[0]
    p = float(flow[problem.rewards[0] == 1].sum())
    accepted = 1 - p**3 - (1 - p) ** 3
    whole = exact(free, problem, 3, "classes").mean
    assert_close(exact(get("dapo"), problem, 3, "classes").mean * accepted, whole)
