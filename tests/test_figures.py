"""The figures of a row: their definitions, and null where a quotient has no meaning."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_close
from problem_strategies import drawn, typical

from windage.analysis.studies.figures import NAMES, from_moments, from_sample, tolerance
from windage.estimators.catalogue import get
from windage.toy.exact.moments import Moments
from windage.toy.exact.plan import exact
from windage.toy.objective import Objective, objective
from windage.toy.sampling import Sample

ONE = torch.ones(1, 1)


def moments(mean: list[float], variance: float = 1.0, drift: list[float] | None = None) -> Moments:
    as_table = lambda values: torch.tensor(values, dtype=torch.float64)[None, None]  # noqa: E731
    return Moments(
        mean=as_table(mean),
        variance=torch.tensor(variance, dtype=torch.float64),
        drift=as_table(drift or [0.0] * len(mean)),
    )


def goal(gradient: list[float]) -> Objective:
    zero = torch.zeros((), dtype=torch.float64)
    table = torch.tensor(gradient, dtype=torch.float64)[None, None]
    return Objective(value=zero, gradient=table, unsupported_mass=zero)


def test_worked_example() -> None:
    found = from_moments(moments([2.0, 2.0], 8.0, [3.0, 4.0]), goal([2.0, 0.0]), ONE)
    assert set(found) == set(NAMES)
    assert_close(found["scale"], 1.0)
    assert_close(found["cosine"], 1 / math.sqrt(2))
    assert_close(found["relative_bias"], 1.0)
    assert_close(found["relative_bias_rescaled"], 1.0)
    assert_close(found["variance"], 8.0)
    assert_close(found["variance_rescaled"], 8.0)
    assert_close(found["drift"], 5.0)


def test_multiples_of_the_gradient() -> None:
    """Scale s, bias |s - 1|, nothing left after rescaling."""
    for s in (0.25, 1.0, 3.0, -2.0):
        found = from_moments(moments([3 * s, -4 * s], 5.0), goal([3.0, -4.0]), ONE)
        assert_close(found["scale"], s)
        assert_close(found["cosine"], math.copysign(1.0, s))
        assert_close(found["relative_bias"], abs(s - 1))
        assert found["relative_bias_rescaled"] < 1e-15
        assert_close(found["variance_rescaled"], 5.0 / s**2)


def test_rescaled_bias_is_the_tangent_of_the_angle() -> None:
    for number in (3, 60, 127):
        problem = drawn(number)
        if float(objective(problem).gradient.norm()) < 1e-9:
            continue
        found = from_moments(
            exact(get("token_tis"), problem, 2, "prefix_tree"), objective(problem), problem.rewards
        )
        if found["cosine"] is not None and found["relative_bias_rescaled"] is not None:
            tangent = math.sqrt(max(0.0, 1 / found["cosine"] ** 2 - 1))
            assert abs(found["relative_bias_rescaled"] - tangent) < 1e-6 * (1 + tangent)


def test_an_unbiased_entry_shows_rounding_only() -> None:
    problem = typical(2)
    found = from_moments(
        exact(get("trajectory_is"), problem, 2, "prefix_tree"), objective(problem), problem.rewards
    )
    assert_close(found["scale"], 1.0)
    assert found["relative_bias"] < 1e-13 and found["relative_bias_rescaled"] < 1e-13
    assert found["drift"] < 1e-14


def test_no_gradient_no_quotients() -> None:
    found = from_moments(moments([1.0, 0.0], 2.0, [1.0, 0.0]), goal([1e-13, 0.0]), ONE)
    assert [n for n in NAMES if found[n] is not None] == ["variance", "drift"]
    assert found["variance"] == 2.0 and found["drift"] == 1.0


def test_limits_are_relative_to_the_rewards() -> None:
    assert tolerance(torch.tensor([[1.0, -1e6]])) == 1e-6
    found = from_moments(moments([1e-13, 0.0]), goal([1e-13, 0.0]), 1e-6 * ONE)
    assert_close(found["scale"], 1.0)
    zero = from_moments(moments([0.0, 0.0]), goal([0.0, 0.0]), 0 * ONE)
    assert zero["scale"] is None and zero["cosine"] is None


def test_no_mean_no_cosine_and_nothing_rescaled() -> None:
    found = from_moments(moments([0.0, 0.0], 2.0), goal([1.0, 0.0]), ONE)
    assert found["scale"] == 0.0 and found["relative_bias"] == 1.0
    for name in ("cosine", "relative_bias_rescaled", "variance_rescaled"):
        assert found[name] is None


def test_across_the_gradient_nothing_is_rescaled() -> None:
    found = from_moments(moments([0.0, 1.0], 2.0), goal([1.0, 0.0]), ONE)
    assert found["scale"] == 0.0 and found["cosine"] == 0.0
    assert found["relative_bias_rescaled"] is None and found["variance_rescaled"] is None


def test_cosine_never_leaves_its_range() -> None:
    third = 1 / 3
    found = from_moments(moments([third, third]), goal([third, third]), ONE)
    assert -1.0 <= found["cosine"] <= 1.0


def made(parts: torch.Tensor, truth: torch.Tensor) -> Sample:
    """A sample whose blocks are given."""
    square = torch.full((len(parts),), 10.0, dtype=torch.float64)
    blocks = (truth + parts)[:, None, None]
    return Sample(mean=blocks, square=square, drift=blocks, size=1)


def test_figures_of_a_sample_without_noise_are_the_exact_ones() -> None:
    truth = torch.tensor([2.0, 2.0], dtype=torch.float64)
    quiet = from_sample(made(torch.zeros(8, 2), truth), goal([2.0, 0.0]), ONE)
    exactly = from_moments(moments([2.0, 2.0], 2.0, [2.0, 2.0]), goal([2.0, 0.0]), ONE)
    for name in NAMES:
        assert_close(quiet[name], exactly[name])


def test_noise_is_taken_out_of_squared_norms() -> None:
    """Blocks of variance s^2 in each of two coordinates: |mean|^2 is s^2 / 4 too long."""
    parts = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = from_sample(made(parts, truth), goal([3.0, 4.0]), ONE)
    noise = 8 / (4 * 3)
    assert_close(found["drift"], math.sqrt(25 - noise))
    assert_close(found["variance"], 10 - (25 - noise))
    assert found["relative_bias"] == 0.0
    assert found["cosine"] == 1.0


def test_noise_is_taken_out_of_the_bias_and_of_what_stands_across() -> None:
    parts = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = from_sample(made(parts, truth), goal([3.0, 0.0]), ONE)
    noise = 8 / (4 * 3)
    assert_close(found["scale"], 1.0)
    assert_close(found["relative_bias"], math.sqrt(16 - noise) / 3)
    assert_close(found["relative_bias_rescaled"], math.sqrt(16 - noise) / 3)
    assert_close(found["cosine"], 3 / math.sqrt(25 - noise))


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo"])
def test_rows_hold_numbers_or_null(name: str) -> None:
    for number in range(0, 40, 4):
        problem = drawn(number, leaves=9, prompts=(1,))
        rewards = problem.rewards.clone()
        rewards[:, 0] += 1.0
        problem = replace(problem, rewards=rewards)
        if name == "dapo" and problem.tree.leaves == 1:
            continue
        try:
            found = from_moments(
                exact(get(name), problem, 2, "compositions"), objective(problem), problem.rewards
            )
        except ValueError:
            continue
        assert all(v is None or math.isfinite(v) for v in found.values())
