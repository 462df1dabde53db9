"""Sampling: unbiased figures, errors that cover, and the exact engines inside them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from checks import assert_close
from problem_strategies import entry, typical
from scipy import stats

from windage.analysis.studies.figures import from_moments, from_sample
from windage.estimators.catalogue import get
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import exact, plan, seeded
from windage.toy.exact.tuples import Responses
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make
from windage.toy.sampling import BLOCKS, Draws, Leaves, Sample, draw, jackknife, sample

REPLICATES = 60
# Every test of chance below fails by accident with at most this probability.
FALSE_FAIL = 1e-6


def alarm(tests: int) -> float:
    """Standard errors beyond which one of so many normal figures is an alarm."""
    return float(stats.norm.isf(FALSE_FAIL / tests / 2))


def test_draws_follow_the_sampler() -> None:
    """Chi-squared of the counts; sixteen cells at most."""
    problem = typical(2, 2)
    table = Responses(problem)
    index = draw(table, 3_000, 4, seeded(0))
    assert index.shape == (3_000, 2, 4)
    for p in range(2):
        counts = torch.bincount(index[:, p].flatten(), minlength=problem.tree.leaves).double()
        expected = 12_000 * table.walk.leaf_flow[p]
        surprise = float(((counts - expected).square() / expected).sum())
        assert stats.chi2.sf(surprise, problem.tree.leaves - 1) > FALSE_FAIL / 2


def test_responses_of_probability_zero_are_never_drawn() -> None:
    tree = Tree(4, None, 1)
    behavior = torch.tensor([[[-torch.inf, 0.0, -torch.inf, -torch.inf]]])
    problem = make("one", tree, torch.zeros(1, 1, 4), torch.zeros(1, 4), behavior=behavior)
    assert draw(Responses(problem), 100, 3, seeded(0)).unique().tolist() == [1]


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_seed_draws_the_same_for_all_estimators_and_for_any_number(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drifts of one weight are equal digit for digit: centering's larger tables move no draw."""
    problem, drifts = typical(prompts, 2), []
    for name, at_once in (("rloo", 1_000), ("group_mean", 10**7), ("dapo", 333)):
        monkeypatch.setattr(Leaves, "at_once", at_once)
        estimator = replace(get(name), aggregation=get("rloo").aggregation, corrections=())
        drifts.append(Draws(problem, 3, seeded(5), [estimator]).upto(90 * BLOCKS)[0].drift)
    assert torch.allclose(drifts[0], drifts[1], rtol=0, atol=1e-14)
    assert torch.allclose(drifts[0], drifts[2], rtol=0, atol=1e-14)


def test_more_batches_go_on_where_fewer_ended() -> None:
    """A block's first batches are the same; the sums go on, they do not start again."""
    problem, names = typical(2, 2), ("grpo", "centered_tis")
    draws = Draws(problem, 3, seeded(5), [get(name) for name in names])
    few, _ = draws.upto(10 * BLOCKS)
    grown = draws.upto(35 * BLOCKS)
    for name, more in zip(names, grown, strict=True):
        anew = sample(get(name), problem, 3, batches=35 * BLOCKS, generator=seeded(5))
        assert torch.allclose(more.mean, anew.mean, rtol=0, atol=1e-14)
        assert torch.allclose(more.square, anew.square, rtol=0, atol=1e-14)
        assert more.size == anew.size == 35
    # 10 of 35 batches are common: the correlation of block averages is sqrt(10 / 35)
    pair = torch.stack([few.square, grown[0].square])
    assert 0.15 < float(torch.corrcoef(pair)[0, 1]) < 0.9


def test_equal_seeds_draw_the_same_and_block_size_is_as_asked() -> None:
    problem = typical(1, 2)
    one, two = (
        sample(get("rloo"), problem, 3, batches=100 * BLOCKS, generator=seeded(3)) for _ in "ab"
    )
    assert torch.equal(one.mean, two.mean) and torch.equal(one.square, two.square)
    assert (len(one.mean), one.size) == (BLOCKS, 100)
    other = sample(get("rloo"), problem, 3, batches=100 * BLOCKS, generator=seeded(4))
    assert not torch.equal(one.mean, other.mean)


@pytest.mark.parametrize(
    "name", ["rloo", "grpo", "dapo", "cispo", "topr", "suffix_is", "centered_tis", "gspo"]
)
@pytest.mark.parametrize("prompts", [1, 2])
def test_samples_agree_with_the_exact_engines(name: str, prompts: int) -> None:
    """Mean, drift and second moment within their standard errors, all coordinates together."""
    problem, group_size = typical(prompts, 2), 3
    estimator = entry(name, problem)
    moments = exact(estimator, problem, group_size, plan(estimator, problem, group_size).engine)
    drawn = sample(estimator, problem, group_size, batches=60 * BLOCKS, generator=seeded(11))
    square = moments.variance + moments.mean.square().sum()
    for parts, truth in (
        (drawn.mean.flatten(1), moments.mean.flatten()),
        (drawn.drift.flatten(1), moments.drift.flatten()),
        (drawn.square.unsqueeze(1), square.unsqueeze(0)),
    ):
        error = parts.std(0) / math.sqrt(BLOCKS)
        away = (parts.mean(0) - truth).abs()
        # Student's t of 31 degrees has wider tails than the normal
        limit = float(stats.t.isf(FALSE_FAIL / 16 / 2 / len(truth), BLOCKS - 1))
        assert (away <= limit * error + 1e-12).all()
        assert (error < 0.2 * (truth.abs().max() + square.sqrt())).all()


@cache
def replicates() -> tuple[dict[str, float], list[tuple[dict[str, float], dict[str, float]]]]:
    """Exact figures of one entry, and figures with errors of many independent samples."""
    problem, group_size = typical(1, 2), 3
    goal, estimator = objective(problem), get("grpo")
    exactly = exact(estimator, problem, group_size, "classes")
    truth = from_moments(exactly, goal, problem.rewards)
    found = []
    for seed in range(REPLICATES):
        drawn = sample(estimator, problem, group_size, batches=10 * BLOCKS, generator=seeded(seed))
        made = jackknife(BLOCKS, lambda b, s=drawn: from_sample(s.select(b), goal, problem.rewards))
        found.append((made.whole, made.errors))
    return truth, found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "name", ["scale", "cosine", "relative_bias", "variance", "variance_rescaled", "drift"]
)
def test_errors_cover_as_often_as_they_say(name: str) -> None:
    """95 % intervals of 60 samples: a count below its binomial limit is an alarm.

    Errors half as large as they should be cover 67 %, and would be noticed with probability 0.9.
    """
    truth, found = replicates()
    reach = float(stats.t.isf(0.025, BLOCKS - 1))
    covered = sum(
        abs(figures[name] - truth[name]) <= reach * errors[name] for figures, errors in found
    )
    least = int(stats.binom.ppf(FALSE_FAIL / 6, REPLICATES, 0.95))
    assert covered >= least, f"{covered} of {REPLICATES}, expected {0.95 * REPLICATES:.0f}"
    assert stats.binom.cdf(least - 1, REPLICATES, 0.67) > 0.5


@pytest.mark.parametrize("name", ["scale", "relative_bias", "variance", "drift"])
def test_figures_have_no_bias_that_sixty_samples_show(name: str) -> None:
    """Their average against the exact figure: noise in a mean would lengthen its norm."""
    truth, found = replicates()
    values = torch.tensor([figures[name] for figures, _ in found], dtype=torch.float64)
    error = float(values.std()) / math.sqrt(REPLICATES)
    assert abs(float(values.mean()) - truth[name]) <= alarm(4) * error + 0.02 * abs(truth[name])


def test_squared_norms_are_free_of_noise() -> None:
    """An on-policy drift is exactly 0: its squared norm averages to 0, not to the noise."""
    problem = typical(1, 2).on_policy()
    squares, noises = [], []
    for seed in range(REPLICATES // 2):
        drawn = sample(get("rloo"), problem, 2, batches=4 * BLOCKS, generator=seeded(seed))
        m = drawn.drift.mean(0)
        noise = float((drawn.drift - m).square().sum()) / BLOCKS / (BLOCKS - 1)
        squares.append(float(m.square().sum()) - noise)
        noises.append(noise)
    mean = sum(squares) / len(squares)
    error = torch.tensor(squares).std().item() / math.sqrt(len(squares))
    assert abs(mean) <= alarm(1) * error
    assert mean < 0.5 * sum(noises) / len(noises), "noise left in would be noticed"


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    parts = torch.arange(32.0, dtype=torch.float64)
    empty = torch.zeros(32, 1, 1, 1, dtype=torch.float64)
    made = Sample(mean=empty, square=parts, drift=empty, size=1)
    found = jackknife(BLOCKS, lambda b: {"mean": float(made.select(b).square.mean()), "none": None})
    assert found.whole == {"mean": 15.5, "none": None}
    assert_close(found.errors["mean"], float(parts.std()) / math.sqrt(32))
    assert "none" not in found.errors


def test_groups_that_never_vary_are_undefined() -> None:
    problem: Problem = typical(1, 2)
    flat = replace(problem, rewards=torch.ones_like(problem.rewards))
    with pytest.raises(Undefined, match="vary"):
        sample(get("dapo"), flat, 3, batches=BLOCKS, generator=seeded(0))
