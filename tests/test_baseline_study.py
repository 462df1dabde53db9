"""Shares of the possible variance reduction: bounds, siblings, the limit of large groups."""

from __future__ import annotations

import pytest
import torch
from checks import Brute, assert_close, assert_unbiased, moments

from windage.analysis.studies import baselines
from windage.analysis.studies.baselines import BEST, NONE, by_lengths, known, rescaled, shares
from windage.estimators.baselines import score_norm
from windage.estimators.catalogue import get
from windage.toy.exact.optimum import optimal_baseline
from windage.toy.objective import objective
from windage.toy.problems import Problem, bandit, difficulties, token_tree

APART = [name for name in baselines.ENTRIES if "leave_one_out" in name or name == "rloo"]


def test_the_bounds_are_no_baseline_and_the_best_of_each_prompt() -> None:
    problem = difficulties((0.1, 0.6))
    found = {row["baseline"]: row for row in shares(problem, (2,), ())}
    assert found[NONE]["share"] == 0 and found[BEST]["share"] == 1
    assert 0 < found["expected reward"]["share"] < 1
    assert_close(found[NONE]["variance"], moments(get("reinforce"), problem, 2).variance)
    best = found[BEST]["variance"]
    one = optimal_baseline(problem, get("reinforce"))
    assert best < moments(get("reinforce", baseline=one), problem, 2).variance

    def shifted(by: float) -> float:
        return known(problem, 2, lambda p: optimal_baseline(p, get("reinforce")) + by)

    assert best < min(shifted(-0.05), shifted(0.05))
    assert_close(known(problem, 4, lambda p: 0.3) * 2, known(problem, 2, lambda p: 0.3))


def test_two_responses_leave_one_other_whatever_its_weight() -> None:
    rows = {row["baseline"]: row for row in shares(by_lengths(), (2,), APART)}
    for name in APART:
        assert rows[name]["share"] == pytest.approx(rows["rloo"]["share"], rel=1e-9)
        assert rows[name]["scale"] == pytest.approx(1) and rows[name]["relative_bias"] < 1e-10
    assert_unbiased(get("score_weighted_leave_one_out"), by_lengths().on_policy(), 2)


def test_rescaling_undoes_a_scale() -> None:
    variance, scale, bias = rescaled(get("group_mean"), token_tree(2), 4)
    assert scale == pytest.approx(0.75) and bias < 1e-10
    assert variance == pytest.approx(float(moments(get("rloo"), token_tree(2), 4).variance))


@pytest.mark.parametrize("make", [lambda: token_tree(3), bandit], ids=("tree", "bandit"))
def test_weights_by_score_tend_to_the_best_constant(make: object) -> None:
    problem: Problem = make()  # type: ignore[operator]
    prefixes, tokens = problem.tree.paths
    mask, at = tokens >= 0, (prefixes.clamp(min=0), tokens.clamp(min=0))
    square = problem.logp[0].exp().square().sum(-1, keepdim=True).expand_as(problem.logp[0])
    weights = torch.where(mask, score_norm(problem.logp[0][at], square[at]), 0.0).sum(-1)
    chance = Brute(problem, problem.logp).response * weights
    limit = float((chance * problem.rewards[0]).sum() / chance.sum())
    assert limit == pytest.approx(optimal_baseline(problem, get("reinforce")), rel=1e-9)


def test_near_the_optimum_it_pays_to_have_many_siblings() -> None:
    # The price of estimating a baseline: at four responses the plain leave-one-out is ahead of the
    # weighted ones, whose weights are right in the limit; both gain with the group.
    entries = ("rloo", "score_weighted_leave_one_out")
    rows = shares(difficulties((0.2, 0.7)), (2, 4, 8), entries)
    table = {(r["baseline"], r["group_size"]): r["share"] for r in rows}
    for name in entries:
        assert table[name, 2] < 0 < table[name, 4] < table[name, 8] < 1
    assert table["score_weighted_leave_one_out", 4] < table["rloo", 4]
    lines = baselines.markdown(rows).splitlines()
    assert lines[0] == "| problem | baseline | G = 2 | G = 4 | G = 8 |" and len(lines) == 7


def test_the_gradient_of_prompts_is_that_of_the_problem() -> None:
    problem = difficulties((0.2, 0.7))
    parts = [objective(problem.select(p)).gradient.flatten() for p in range(2)]
    assert_close(torch.cat(parts) / 2, objective(problem).gradient.flatten())
