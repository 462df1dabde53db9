"""The vocabulary of the tests: what it means to be unbiased, parallel, invariant or refused.

Numbers come from enumeration in float64, so equal means a relative difference of 1e-10.  What must
differ must differ by far more than rounding.  `test_checks.py` plants a fault for every word here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Moments
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Edit, Responses, every_tuple, listed
from windage.toy.objective import objective
from windage.toy.problems import Problem

RELATIVE = 1e-10
ROUNDING = 1e-14
APART = 1e-6


def assert_close(actual: Any, expected: Any, *, relative: float = RELATIVE) -> None:
    """Equal shape, finite, and equal up to `relative` of the largest number."""
    a = torch.as_tensor(actual, dtype=torch.float64)
    e = torch.as_tensor(expected, dtype=torch.float64)
    assert a.shape == e.shape, f"shape {tuple(a.shape)}, expected {tuple(e.shape)}"
    assert a.isfinite().all(), f"not finite: {actual}"
    if a.numel() == 0:
        return
    gap = (a - e).abs().max()
    largest = torch.maximum(a.abs().max(), e.abs().max())
    assert gap <= relative * largest + ROUNDING, f"differ by {gap:.3e} of {largest:.3e}: {a} {e}"


def assert_apart(a: Any, b: Any, *, at_least: float = APART) -> None:
    """Differ by more than `at_least` of the largest number."""
    gap = (torch.as_tensor(a) - torch.as_tensor(b)).abs().max()
    largest = max(float(torch.as_tensor(x).abs().max()) for x in (a, b))
    assert gap > at_least * largest, f"differ by {gap:.3e} only, largest is {largest:.3e}"


def assert_zero(value: Tensor, *, beside: float = 1.0) -> None:
    """Zero up to rounding of numbers of the size `beside`."""
    assert value.isfinite().all()
    assert value.abs().max() <= RELATIVE * beside, f"largest is {value.abs().max():.3e}"


def sine(a: Tensor, b: Tensor) -> float:
    """Sine of the angle between two vectors."""
    rest = a - b * ((a * b).sum() / (b * b).sum())
    return float(rest.norm() / a.norm())


def assert_parallel(a: Tensor, b: Tensor, *, factor: float | None = None) -> float:
    """`a` is a positive multiple of `b`; gives the multiple, and checks it where one is named."""
    found = float((a * b).sum() / (b * b).sum())
    assert_close(a, found * b)
    assert found > 0, f"the factor is {found}"
    if factor is not None:
        assert abs(found - factor) <= RELATIVE * abs(factor), f"factor {found}, expected {factor}"
    return found


def assert_skew(a: Tensor, b: Tensor, *, at_least: float = APART) -> None:
    """The directions of two vectors differ."""
    assert sine(a, b) > at_least, f"the sine of the angle is {sine(a, b):.3e}"


def moments(
    estimator: Estimator, problem: Problem, group_size: int = 2, *, engine: str | None = None
) -> Moments:
    """Exact moments from a named engine, or from the planner's choice."""
    return exact(estimator, problem, group_size, engine)


def assert_unbiased(estimator: Estimator, problem: Problem, group_size: int = 2) -> None:
    """The mean of the estimate is the gradient of the objective."""
    assert_close(moments(estimator, problem, group_size).mean, objective(problem).gradient)


def assert_biased(
    estimator: Estimator, problem: Problem, group_size: int = 2, *, at_least: float = APART
) -> None:
    """The mean of the estimate differs from the gradient of the objective."""
    mean = moments(estimator, problem, group_size).mean
    assert_apart(mean, objective(problem).gradient, at_least=at_least)


def assert_invariant(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """The function gives the same numbers for every input; returns them."""
    assert len(inputs) > 1
    first, *others = [function(value) for value in inputs]
    for other in others:
        assert_close(other, first)
    return first


def find_any(strategy: SearchStrategy, condition: Callable[[Any], bool]) -> Any:
    """The smallest example that meets a condition; an error where there is none."""
    calm = hypothesis.settings(max_examples=500, derandomize=True, database=None, deadline=None)
    return hypothesis.find(strategy, condition, settings=calm)


@contextmanager
def refused(*words: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises an error of one line that holds every word."""
    with pytest.raises(error) as raised:
        yield
    message = str(raised.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def enumerated_mean(
    estimator: Estimator, problem: Problem, group_size: int = 1, edit: Edit | None = None
) -> Tensor:
    """Mean of the estimate over every tuple of responses, with fields that a problem has not.

    Args:
        edit: adds fields to a batch, given the numbers of its responses.
    """
    return listed(estimator, problem, every_tuple(problem, group_size), edit=edit).mean


def with_values(problem: Problem, values: Tensor) -> Edit:
    """Give each token the critic's value of its prefix, one a prefix."""
    prefix = Responses(problem).prefix.clamp(min=0)
    return lambda batch, index: replace(batch, values=values[prefix][index])


class Brute:
    """Laws of one prompt by brute force over its responses, for policy or sampler.

    Args:
        problem: of one prompt, with a sampler that covers every token.
        logp: log-probabilities at each prefix, of the policy or of the sampler.
    """

    def __init__(self, problem: Problem, logp: Tensor) -> None:
        prefixes, tokens = problem.tree.paths
        real = prefixes >= 0
        here = logp[0][prefixes.clamp(min=0), tokens.clamp(min=0)]
        self.response = torch.where(real, here, 0.0).sum(-1).exp()
        shape = problem.logits.shape[1:]
        self.flow = torch.zeros(shape, dtype=torch.float64)
        paid = torch.zeros(shape, dtype=torch.float64)
        for leaf in range(problem.tree.leaves):
            for n, v in zip(prefixes[leaf].tolist(), tokens[leaf].tolist(), strict=True):
                if n >= 0:
                    self.flow[n, v] += self.response[leaf]
                    paid[n, v] += self.response[leaf] * problem.rewards[0, leaf]
        self.reach = self.flow.sum(-1)
        self.token = logp[0].exp()
        self.action_value = paid / self.flow
        self.value = paid.sum(-1) / self.reach


def mixture(problem: Problem, prefixes: Brute, token: Brute, rest: Brute) -> Tensor:
    """Sum over prefixes and tokens of d(h) q(v|h) Q(h, v) score: each law from its own policy."""
    weight = prefixes.reach.unsqueeze(-1) * token.token * rest.action_value
    return pull(problem, weight)


def pull(problem: Problem, weight: Tensor) -> Tensor:
    """Sum of weight `[N V]` times the score of the token by the logits of its prefix."""
    onehot = torch.eye(problem.tree.vocab, dtype=torch.float64)
    score = onehot - problem.logp[0].exp().unsqueeze(-2)
    return torch.einsum("nv,nvw->nw", weight, score).unsqueeze(0)


def token_scores(problem: Problem) -> Tensor:
    """Score of each token of each response by all logits: `[M T N V]`, 0 after the end."""
    prefixes, tokens = problem.tree.paths
    out = torch.zeros((*prefixes.shape, *problem.logits.shape[1:]), dtype=torch.float64)
    policy = problem.logp[0].exp()
    for leaf, t in torch.nonzero(prefixes >= 0).tolist():
        n = prefixes[leaf, t]
        out[leaf, t, n] = -policy[n]
        out[leaf, t, n, tokens[leaf, t]] += 1
    return out
