"""Control variates: exact means, regressions that leave nothing of what repeats, less noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problem_strategies import typical
from scipy import stats

from windage.estimators.catalogue import get
from windage.estimators.correction import clip
from windage.estimators.member import use
from windage.toy.behavior import with_behavior
from windage.toy.controls import Control, as_if, controlled, known, siblings
from windage.toy.exact.plan import exact, seeded
from windage.toy.problems import Problem, bandit
from windage.toy.sampling import BLOCKS, Draws, Sample

# Each test of chance fails by accident with at most this probability.
FALSE_FAIL = 1e-6


def large() -> Problem:
    return with_behavior(bandit(200), "noise", sigma=0.1)


def drawn(
    name: str, problem: Problem, group_size: int, batches: int
) -> tuple[Sample, list[Control]]:
    """A sample of an entry, and its siblings on the same draws."""
    estimator = get(name)
    beside = siblings(estimator, group_size)
    draws = Draws(problem, group_size, seeded(7), [estimator, *beside])
    own, *others = draws.upto(batches)
    exactly = [known(e, problem, group_size) for e in beside]
    pairs = zip(others, exactly, strict=True)
    return own, [Control(sample=s, moments=m) for s, m in pairs if m is not None]


def noise(parts: torch.Tensor) -> float:
    """Variance of the average over blocks."""
    return float((parts - parts.mean(0)).square().sum()) / BLOCKS / (BLOCKS - 1)


@pytest.mark.parametrize("name", ["grpo", "dapo", "topr"])
def test_less_noise_and_the_same_mean(name: str) -> None:
    """Against the exact engine, in the direction of each control's own noise and everywhere."""
    problem, group_size = large(), 8
    own, controls = drawn(name, problem, group_size, 32 * BLOCKS)
    assert len(controls) == 3
    quiet, truth = controlled(own, controls), exact(get(name), problem, group_size)
    assert noise(quiet.mean) < 0.5 * noise(own.mean)
    assert noise(quiet.square) < noise(own.square)
    square = (truth.variance + truth.mean.square().sum()).view(1)
    for parts, wanted in (
        (quiet.mean.flatten(1), truth.mean.flatten()),
        (quiet.drift.flatten(1), truth.drift.flatten()),
        (quiet.square.unsqueeze(1), square),
    ):
        error = parts.std(0) / math.sqrt(BLOCKS)
        # three regression coefficients leave fewer degrees of freedom
        limit = float(stats.t.isf(FALSE_FAIL / 18 / len(wanted), BLOCKS - 4))
        assert ((parts.mean(0) - wanted).abs() <= limit * error + 1e-12).all()


def test_a_wrong_mean_would_be_noticed() -> None:
    """The control's mean taken at the policy itself: the estimate moves with it, far beyond."""
    problem, group_size = large(), 8
    own, controls = drawn("grpo", problem, group_size, 32 * BLOCKS)
    truth = exact(get("grpo"), problem, group_size).mean
    wrong = [
        replace(c, moments=replace(c.moments, mean=0.5 * c.moments.mean)) for c in controls[:1]
    ]
    for chosen, far in ((controls[:1], False), (wrong, True)):
        parts = controlled(own, chosen).mean
        away = float((parts.mean(0) - truth).square().sum())
        assert (away > 9 * noise(parts)) == far


def test_an_estimator_is_its_own_best_control() -> None:
    """Nothing but its exact moments is left, in every block, however often it is given."""
    problem = typical(2, 2)
    estimator = get("token_tis")
    (own,) = Draws(problem, 3, seeded(0), [estimator]).upto(4 * BLOCKS)
    moments = exact(estimator, problem, 3)
    for count in (1, 2):
        made = controlled(own, [Control(sample=own, moments=moments)] * count)
        assert torch.allclose(made.mean, moments.mean.expand_as(made.mean), rtol=0, atol=1e-11)
        assert torch.allclose(made.drift, moments.drift.expand_as(made.drift), rtol=0, atol=1e-11)
        square = moments.variance + moments.mean.square().sum()
        assert torch.allclose(made.square, square.expand_as(made.square), rtol=1e-9, atol=0)
    assert controlled(own, []) is own


def test_siblings_have_weights_of_either_sign_and_exact_moments() -> None:
    problem = typical(2, 2)
    found = siblings(get("grpo"), 4)
    assert [s.corrections[0].map.name for s in found] == ["as_if", "as_if", "none"]
    assert [dict(s.corrections[0].map.settings)["sign"] for s in found[:2]] == [1.0, -1.0]
    assert all(known(s, problem, 4) is not None for s in found)
    assert all(s.admission == s.penalties == () for s in siblings(get("dapo"), 4))
    (alone,) = siblings(get("rloo"), 4)
    assert alone.advantage.name == "leave_one_out"
    x = torch.linspace(-1, 1, 9)
    for sign in (1.0, -1.0):
        ours = as_if(x, torch.zeros(9), map=use(clip), sign=sign)
        assert torch.equal(ours, clip(x, torch.full((9,), sign)))


def test_what_an_exact_engine_only_bounds_or_cannot_do_is_no_control() -> None:
    problem = typical(1, 2)
    assert known(get("ppo"), problem, 4) is None
    assert known(get("rloo"), problem, 1) is None
    assert known(get("rloo"), problem, 4) is not None
