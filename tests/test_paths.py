"""Responses drawn from an automaton, against the exact recursion and the same policy as a tree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from test_transfer import bound, fold, listed, stale, unrolled

from windage.analysis.studies.grid import Settings
from windage.analysis.studies.sampled import too_long
from windage.analysis.studies.study import run
from windage.estimators.catalogue import get
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import automaton
from windage.toy.exact.kernels import sampled as kernel
from windage.toy.exact.plan import seeded
from windage.toy.exact.transfer import transfer
from windage.toy.paths import Paths
from windage.toy.sampling import BLOCKS, Draws, Leaves, Sample, sample

# Each test of chance below fails by accident with at most this probability.
FALSE_FAIL = 1e-6


def agrees(drawn: Sample, mean: torch.Tensor, variance: torch.Tensor, tests: int) -> None:
    """Mean and second moment within standard errors, by Student's t of 31 degrees."""
    square = (variance + mean.square().sum()).view(1)
    for parts, truth in (
        (drawn.mean.flatten(1), mean.flatten()),
        (drawn.square.unsqueeze(1), square),
    ):
        error = parts.std(0) / math.sqrt(BLOCKS)
        limit = float(stats.t.isf(FALSE_FAIL / tests / 4 / len(truth), BLOCKS - 1))
        assert ((parts.mean(0) - truth).abs() <= limit * error + 1e-13).all()
        # a discrepancy that would be noticed
        assert (error < 0.2 * (truth.abs().max() + square.sqrt())).all()


NAMES = ("rloo", "grpo", "token_tis", "prefix_is", "centered", "dapo", "cispo", "topr")


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_recursion_over_states(name: str) -> None:
    horizon = 24
    chain, estimator = stale(reasoning(horizon, (0.3, 0.6)), 0.1), bound(name, horizon)
    exactly = automaton(estimator, chain, 3)
    drawn = sample(estimator, chain, 3, batches=100 * BLOCKS, generator=seeded(2))
    agrees(drawn, exactly.mean, exactly.variance, len(NAMES))
    parts, truth = drawn.drift.flatten(1), exactly.drift.flatten()
    error = parts.std(0) / math.sqrt(BLOCKS)
    limit = float(stats.t.isf(FALSE_FAIL / len(NAMES) / 4 / len(truth), BLOCKS - 1))
    assert ((parts.mean(0) - truth).abs() <= limit * error + 1e-13).all()


@pytest.mark.parametrize("name", ["self_normalized", "opsm", "kimi"])
def test_entries_without_an_engine_agree_with_listing(name: str) -> None:
    chain = stale(reasoning(2, (0.3,)))
    problem, state = unrolled(chain)
    estimator = bound(name, 2)
    mean, variance = listed(estimator, problem, state, 2)
    drawn = sample(estimator, chain, 2, batches=200 * BLOCKS, generator=seeded(3))
    agrees(drawn, mean, variance, 3)


def test_a_long_horizon_agrees_too() -> None:
    chain, estimator = stale(reasoning(512, (0.3, 0.6)), 0.02), bound("token_tis", 512)
    exactly = automaton(estimator, chain, 2)
    drawn = sample(estimator, chain, 2, batches=8 * BLOCKS, generator=seeded(4))
    agrees(drawn, exactly.mean, exactly.variance, 1)


def test_ends_are_drawn_as_often_as_they_come() -> None:
    """Chi-squared of where responses stopped or were cut, with the recursion's masses."""
    chain = stale(reasoning(6, (0.3, 0.6)))
    mass = transfer(kernel(chain), chain.successor, chain.start).mass
    drawn = Paths(chain).draw(4_000, 3, seeded(0))
    for p in range(2):
        counts = torch.bincount(drawn.end[:, p].flatten(), minlength=8).double()
        expected = 12_000 * mass[p]
        surprise = float(((counts - expected).square() / expected.clamp(min=1e-9)).sum())
        assert stats.chi2.sf(surprise, int((mass[p] > 0).sum()) - 1) > FALSE_FAIL / 2


def test_the_same_batch_has_the_same_estimate_as_on_the_tree() -> None:
    """Digit for digit, with several prompts, admission and centering."""
    chain = stale(reasoning(3, (0.3, 0.6)))
    problem, state = unrolled(chain)
    leaves, paths = Leaves(problem), Paths(chain)
    drawn = paths.draw(50, 3, seeded(1))
    prefixes, tokens = problem.tree.paths
    width = drawn.parameter.shape[-1]
    wanted = torch.where(prefixes >= 0, state[prefixes.clamp(min=0)] * 4 + tokens, -1)[:, :width]
    mine = torch.where(drawn.mask, drawn.parameter, -1)
    index = (mine.unsqueeze(-2) == wanted).all(-1).long()
    assert (index.sum(-1) == 1).all()
    number = index.argmax(-1)
    for name in ("grpo", "cispo", "centered_tis", "starting_point", "vespo"):
        estimator = bound(name, 3)
        head = estimator.centering is not None
        ours = paths.gradients(drawn, estimator, paths.batch(drawn, head=head))
        theirs = leaves.gradients(number, estimator, leaves.batch(number, head=head))
        assert torch.allclose(ours, fold(theirs, state), rtol=0, atol=1e-14)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    chain = reasoning(16, (0.5,))
    logits = chain.behavior_logp.clone()
    logits[..., 1] = logits[..., 3] = -torch.inf
    drawn = Paths(replace(chain, behavior_logp=logits.log_softmax(-1))).draw(50, 2, seeded(0))
    assert set((drawn.parameter % 4).unique().tolist()) == {0, 2}
    assert bool((drawn.lengths == 16).all()) and bool((drawn.end >= 4).all())


def test_draws_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, found = stale(reasoning(12, (0.3, 0.6))), []
    for at_once in (100, 10**6):
        monkeypatch.setattr(Paths, "at_once", at_once)
        found.append(Draws(chain, 2, seeded(5), [get("rloo")]).upto(7 * BLOCKS)[0])
    assert torch.allclose(found[0].mean, found[1].mean, rtol=0, atol=1e-14)
    assert torch.allclose(found[0].square, found[1].square, rtol=0, atol=1e-14)


def test_a_study_samples_what_no_recursion_serves_and_refuses_what_is_too_long() -> None:
    settings = Settings(
        problem=("reasoning", {"horizon": 16}),
        estimators=(("batch_std", {}), ("rloo", {})),
        behavior=("stale", {"steps": 1, "rate": 1.0}),
        samples=512,
    )
    sampled, exact = run(settings)["rows"]
    assert (sampled["engine"], exact["engine"]) == ("sampling", "transfer")
    assert "512 batches" in sampled["why"] and sampled["standard_error"]["variance"] > 0
    long: Chain = reasoning(32_768)
    why = too_long(long, 4)
    assert why is not None and "\n" not in why and "128 sampled batches would touch" in why
    settings = replace(
        settings, problem=("reasoning", {"horizon": 32_768}), samples=None, behavior=None
    )
    (row,) = run(replace(settings, estimators=(("batch_std", {}),)))["rows"]
    assert row["variance"] is None and row["reason"].endswith(why)
    assert "couples prompts" in row["reason"]
