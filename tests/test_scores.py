"""Evaluation of toy policies: each figure against a plain count."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from windage.toy.network import Network
from windage.toy.scores import FIGURES, evaluate, majority_share, pass_at
from windage.toy.sums import Sums, generators


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_counts_the_subsets(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    subsets = list(combinations(samples, k))
    expected = sum(map(any, subsets)) / len(subsets)
    found = pass_at(torch.tensor([correct]), 5, k)
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_a_majority_needs_a_valid_vote_and_shares_ties() -> None:
    answers = torch.tensor([[0, 0, 1], [0, 1, 2], [-1, -1, 1], [-1, -1, -1], [0, 1, 1]])
    right = torch.tensor([0, 2, 1, 0, 0])
    found = majority_share(answers, right, 3)
    torch.testing.assert_close(found, torch.tensor([1.0, 1 / 3, 1.0, 0.0, 0.0]))


def test_an_evaluation_is_repeatable_and_its_figures_hang_together() -> None:
    task = Sums(modulus=2, terms=2)
    network = Network(task=task, hidden=8)
    start = network.initial(generators([0, 1]))
    prompts = task.prompts(torch.arange(4)).expand(2, -1, -1)
    found = evaluate(network, start, start, prompts, [3, 4], samples=32)
    again = evaluate(network, start, start, prompts, [3, 4], samples=32)
    assert {"pass_at_1", "pass_at_k", "maj_at_k", "invalid", "kl_start", "histogram"} <= set(found)
    assert set(found) - {"histogram"} <= set(FIGURES)
    for name, value in found.items():
        assert torch.equal(value, again[name])
    torch.testing.assert_close(found["kl_start"], torch.zeros(2))
    share = (found["histogram"] * torch.arange(33) / 32).sum(-1)
    torch.testing.assert_close(found["pass_at_1"], share)
    torch.testing.assert_close(found["never"], found["histogram"][:, 0])
    torch.testing.assert_close(found["confident"], found["histogram"][:, 29:].sum(-1))
    assert bool((found["pass_at_k"] >= found["pass_at_1"]).all())
    moved = evaluate(network, 1.1 * start, start, prompts, [3, 4], samples=32)
    assert bool((moved["kl_start"] > 0).all())
    before = network.forward(start, prompts[:, :1], torch.zeros((2, 1, task.horizon)).long()).logp
    assert float(found["entropy"].max()) < task.horizon * float(-before.min())
