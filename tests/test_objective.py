"""The objective: J, its gradient, and the mass that a sampler leaves out."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close
from problem_strategies import drawn
from torch import Tensor

from windage.toy.behavior import with_behavior
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make


def value(problem: Problem, logits: Tensor) -> Tensor:
    """J by summing over the listed paths, differentiable."""
    prefixes, tokens = problem.tree.paths
    real = tokens >= 0
    logp = logits.log_softmax(-1)[:, prefixes.clamp(min=0), tokens.clamp(min=0)]
    chance = torch.where(real, logp, 0.0).sum(-1).exp()
    return (chance * problem.rewards).sum(-1).mean()


@pytest.mark.parametrize("number", range(0, 400, 8))
def test_gradient_equals_autograd_of_the_listed_expectation(number: int) -> None:
    problem = drawn(number)
    found = objective(problem)
    logits = problem.logits.clone().requires_grad_()
    listed = value(problem, logits)
    (gradient,) = torch.autograd.grad(listed, logits)
    assert_close(found.value, listed.detach())
    assert_close(found.gradient, gradient, relative=1e-9)


@pytest.mark.parametrize("number", (1, 5, 12, 33))
def test_gradient_equals_central_differences(number: int) -> None:
    problem = drawn(number, leaves=9)
    step = 1e-5
    flat = problem.logits.flatten()
    slopes = torch.empty_like(flat)
    for i in range(len(flat)):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[i] += sign * step
            ends.append(value(problem, moved.view_as(problem.logits)))
        slopes[i] = (ends[0] - ends[1]) / (2 * step)
    found = objective(problem).gradient.flatten()
    assert (found - slopes).abs().max() <= 1e-8 * max(1.0, float(problem.rewards.abs().max()))


def test_gradient_does_not_look_at_the_sampler() -> None:
    problem = drawn(3)
    other = with_behavior(problem, "noise", sigma=1.0)
    assert torch.equal(objective(problem).gradient, objective(other).gradient)
    assert torch.equal(objective(problem).value, objective(other).value)


def test_rows_of_the_gradient_sum_to_zero_and_an_offset_moves_only_the_value() -> None:
    problem = drawn(21)
    found = objective(problem)
    assert found.gradient.sum(-1).abs().max() < 1e-15
    shifted = objective(make("shifted", problem.tree, problem.logits, problem.rewards + 1e6))
    assert (shifted.gradient - found.gradient).abs().max() < 1e-9
    assert_close(shifted.value, found.value + 1e6)


def test_unsupported_mass_is_the_policys_chance_of_what_is_never_drawn() -> None:
    tree = Tree(3, None, 1)
    logits = torch.log(torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64))
    problem = make("cut", tree, logits, torch.zeros(1, 3))
    assert float(objective(problem).unsupported_mass) == 0.0
    for k, mass in ((1, 0.5), (2, 0.2), (3, 0.0)):
        assert_close(objective(with_behavior(problem, "top_k", k=k)).unsupported_mass, mass)
    # exp(-800) is 0 in float64, exp(-700) is not
    for gap, mass in ((800.0, 0.2), (700.0, 0.0)):
        behavior = torch.tensor([[[0.0, 0.0, -gap]]])
        far = make("far", tree, logits, torch.zeros(1, 3), behavior=behavior)
        assert_close(objective(far).unsupported_mass, mass)


def test_unsupported_mass_is_a_mean_over_prompts() -> None:
    tree = Tree(2, None, 1)
    behavior = torch.tensor([[[0.0, 0.0]], [[0.0, -torch.inf]]])
    problem = make("two", tree, torch.zeros(2, 1, 2), torch.ones(2, 2), behavior=behavior)
    assert_close(objective(problem).unsupported_mass, 0.25)
