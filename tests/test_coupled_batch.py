"""Statistics of the whole batch, by the law of the other prompts: against every batch listed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import assert_apart, assert_close
from problem_strategies import drawn, typical
from test_coupled_denominators import found, listable
from test_engines_agree import same

from windage.estimators.advantage import batch_std, group_mean
from windage.estimators.aggregation import sequence_mean, token_mean, token_sum
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.whitening import whitened_group_mean, whitened_returns
from windage.toy.exact.coupled import batch
from windage.toy.exact.coupled.batch import by_token_centered, squares
from windage.toy.exact.coupled.shared import Prompt
from windage.toy.exact.plan import consider, exact
from windage.toy.problems import difficulties


def over(entry: str, advantage: Any, aggregation: Any, **settings: Any) -> Estimator:
    return replace(get(entry), advantage=use(advantage, **settings), aggregation=use(aggregation))


BATCHES = {
    "std": over("token_tis", batch_std, token_sum),
    "std, clip": over("grpo", batch_std, sequence_mean, ddof=0),
    "std, token mean": over("cispo", batch_std, token_mean),
    "std, groups drawn again": over("dapo", batch_std, token_mean),
    "whitened group mean": over("grpo", whitened_group_mean, token_sum),
    "whitened group mean, token mean": over("cispo", whitened_group_mean, token_mean),
    "whitened returns": over("cispo", whitened_returns, sequence_mean),
}


@pytest.mark.parametrize("name", BATCHES)
def test_moments_equal_those_of_every_batch(name: str) -> None:
    for number in range(16):
        group_size = 2 + number % 2
        problem = listable(900 + number, group_size)
        expected = found(BATCHES[name], problem, group_size, "compositions")
        same(found(BATCHES[name], problem, group_size, "coupled"), expected)


def test_equal_sums_are_one_value() -> None:
    """Five prompts of binary groups of 8: sums of k (8 - k) / 8, not one a combination."""
    problem = difficulties()
    prompts = [
        Prompt(get("group_mean"), problem.select(p), 8, problem.select(p).lengths.double())
        for p in range(5)
    ]
    law = batch.law_of(prompts, squares, 8, torch.zeros(1).double())
    sums = {sum(c) for c in itertools.product((0, 7, 12, 15, 16), repeat=5)}
    assert len(law.keys) == len(sums) < 5**5
    assert_close(law.weight.sum(), 1.0)
    keys = torch.stack([squares(r, n).sum() for r, n in zip(law.rewards, law.lengths, strict=True)])
    assert_close(keys, law.keys.squeeze(1))


def test_many_prompts_divide_by_a_nearly_fixed_number() -> None:
    estimator = BATCHES["std"]
    assert consider("coupled", estimator, difficulties(), 16).refusal is None
    moments = exact(estimator, difficulties(), 16, "coupled")
    plain = exact(replace(get("token_tis"), advantage=use(group_mean)), difficulties(), 16)
    cosine = (moments.mean * plain.mean).sum() / moments.mean.norm() / plain.mean.norm()
    assert 0.999 < float(cosine) < 1 - 1e-9


@pytest.mark.parametrize("fault", ["key", "merge"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = typical(3, 2)
    expected = exact(BATCHES["std"], problem, 2, "compositions")
    same(exact(BATCHES["std"], problem, 2, "coupled"), expected)
    if fault == "key":
        monkeypatch.setitem(batch.KEYS, batch_std, lambda r, n: 0 * squares(r, n))
    else:
        monkeypatch.setattr(batch, "MERGED", 0.9)
    wrong = exact(BATCHES["std"], problem, 2, "coupled")
    assert_apart(wrong.variance, expected.variance)


def test_what_a_batch_is_merged_by() -> None:
    r, n = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[1.0, 2.0, 3.0]])
    assert_close(squares(r, n), torch.tensor([[0.5]]))
    assert_close(by_token_centered(r, n), torch.tensor([[6.0, -0.5, 0.75]]))


def test_a_discount_differs_by_token() -> None:
    estimator = over("cispo", whitened_returns, token_mean, gamma=0.9)
    why = consider("coupled", estimator, drawn(3), 2).refusal
    assert why == "whitened_returns differs by token where gamma is not 1"
