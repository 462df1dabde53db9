"""Tokens picked over the whole batch, against sorts and sums in plain Python."""

import math

import pytest
import torch
from checks import assert_close, assert_zero, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches

from windage.estimators.advantage import group_mean
from windage.estimators.batchwide import (
    covariance,
    covariance_clip,
    loss_kl_cov,
    second_moment,
)


def fields(batch):
    zero = torch.zeros_like(batch.logp)
    logp = torch.where(batch.mask, batch.logp, zero)
    x = torch.where(batch.mask, batch.logp - batch.behavior_logp, zero)
    return group_mean(batch.rewards, batch.present).unsqueeze(-1), x, logp


@settings(max_examples=25)
@given(batches())
def test_covariances_are_products_of_deviations(batch):
    a, _, logp = fields(batch)
    found = covariance(a, logp, batch.mask)
    wide = a.expand_as(logp)[batch.mask]
    if len(wide):
        expected = (wide - wide.mean()) * (logp[batch.mask] - logp[batch.mask].mean())
        assert_close(found[batch.mask], expected)


@settings(max_examples=40)
@given(batches(), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.4]))
def test_the_largest_covariances_of_the_band_lose_their_weight(batch, share, low):
    a, x, logp = fields(batch)
    kept = covariance_clip(x, a, logp, batch.mask, share=share, low=low, high=5.0)
    found = covariance(a, logp, batch.mask)
    ranked = sorted(found[batch.mask & (found > low) & (found < 5.0)].tolist(), reverse=True)
    count = max(1, int(share * int(batch.mask.sum())))
    limit = ranked[min(count, len(ranked)) - 1] - 1e-9 if ranked else math.inf
    expected = batch.mask & (found > low) & (found < 5.0) & (found >= limit)
    assert torch.equal(kept == 0, expected)


@settings(max_examples=25)
@given(batches())
def test_the_covariance_penalty_pulls_back_and_only_the_largest(batch):
    a, x, logp = fields(batch)
    found = covariance(a, logp, batch.mask)
    term = loss_kl_cov(a, x, logp, batch.mask, share=0.0, coefficient=2.0)
    assert ((term == 0) | (term == -2.0 * x.sign())).all()
    assert not term[~batch.mask].any()
    if batch.mask.any():
        top = found[batch.mask].max()
        assert not term[found < top - 1e-6].any()
    every = loss_kl_cov(a, x, logp, batch.mask, share=1.0)
    assert_close(every, torch.where(batch.mask, -x.sign(), 0.0))
    assert_zero(loss_kl_cov(a, torch.zeros_like(x), logp, batch.mask))


def test_equal_covariances_are_all_taken():
    logp = torch.tensor([-4.0, -1.0, -4.0, -1.0]).double().view(1, 4, 1)
    a = torch.tensor([-1.0, 1.0, -1.0, 1.0]).double().view(1, 4, 1)
    mask = torch.ones_like(logp).bool()
    assert covariance_clip(logp * 0, a, logp, mask).flatten().tolist() == [0.0] * 4


@settings(max_examples=40)
@given(batches(), st.sampled_from([0.04, 0.5, 4.0]))
def test_the_second_moment_keeps_the_nearest_tokens(batch, tau):
    a, x, _ = fields(batch)
    found = second_moment(x, a, batch.mask, tau=tau)
    total, limit = 0.0, math.inf
    squares = sorted(x[batch.mask].square().tolist())
    for count, square in enumerate(squares, start=1):
        total += square
        if total / count >= tau:
            limit = square
            break
    expected = torch.where(batch.mask & (x.square() < limit), x.exp(), 0.0)
    assert_close(torch.where(batch.mask, found, 0.0), expected)
    kept = x[batch.mask & (found > 0)]
    assert not len(kept) or float(kept.square().mean()) < tau


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_batch_without_tokens_is_left_alone(tokens):
    empty = torch.zeros(1, 2, tokens).double()
    mask = empty.bool()
    a = torch.ones(1, 2, 1).double()
    assert (covariance_clip(empty, a, empty, mask) == 1).all()
    assert not loss_kl_cov(a, empty, empty, mask).any()
    assert second_moment(empty, a, mask).shape == empty.shape


def test_limits_are_refused():
    x = torch.zeros(1, 1, 1).double()
    for share in (-0.1, 1.1):
        with refused("share is"):
            loss_kl_cov(x, x, x, x == 0, share=share)
    with refused("low is 2, high is 1"):
        covariance_clip(x, x, x, x == 0, low=2.0, high=1.0)
    with refused("tau is 0"):
        second_moment(x, x, x == 0, tau=0.0)
