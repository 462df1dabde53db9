"""Maps of the second tier against the slopes of their losses and the sets that they drop."""

import math

import pytest
import torch
from checks import assert_close, refused
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers

from windage.estimators.correction import dual_clip, ratio
from windage.estimators.maps import (
    gamma_weight,
    inverse_positive,
    kl_mask,
    mask_negative,
    one_sided,
    soft_gate,
    tv_mask,
    unclipped,
)

SIGNED = (mask_negative, soft_gate, gamma_weight, inverse_positive, unclipped)
effective = numbers(12, low=-3.0, high=3.0)
advantages = numbers(12)
chances = numbers(12, low=-4.0, high=-0.01)


def slope(loss, e):
    live = e.clone().requires_grad_()
    loss(live).sum().backward()
    return live.grad


@given(effective, advantages, st.floats(0.2, 4.0), st.floats(0.2, 4.0))
def test_a_soft_gate_is_the_slope_of_a_sigmoid(e, a, pos, neg):
    tau = torch.where(a > 0, torch.full_like(a, pos), torch.full_like(a, neg))
    expected = slope(lambda x: 4 / tau * torch.sigmoid(tau * (x.exp() - 1)), e)
    found = soft_gate(e, a, tau_pos=pos, tau_neg=neg)
    assert_close(found, expected)
    assert (found > 0).all()


@given(effective, advantages)
def test_a_gamma_weight_is_a_power_times_an_exponential(e, a):
    up, down = e.exp() ** 2 * (3 - 3 * e.exp()).exp(), e.exp() ** 3 * (2 - 2 * e.exp()).exp()
    assert_close(gamma_weight(e, a), torch.where(a >= 0, up, down))


@given(effective, advantages, st.sampled_from([0.0, 0.1, 0.5]))
def test_far_failures_are_dropped_and_nothing_else(e, a, delta):
    found = mask_negative(e, a, delta=delta)
    far = (a < 0) & (-e > delta + 1e-9)
    near = ~((a < 0) & (-e > delta - 1e-9))
    assert not found[far].any() and (found[near] == 1).all()


@given(effective, advantages)
def test_the_inverse_serves_positive_advantages_and_the_dual_clip_the_rest(e, a):
    found, r = inverse_positive(e, a), e.exp()
    assert_close(found[a <= 0], dual_clip(e, a)[a <= 0])
    up = a > 0
    expected = torch.where(r > 1.2, 0.0, (1 / r).clamp(max=3.0))
    fine = (r - 1.2).abs() > 1e-9
    assert_close(found[up & fine], expected[up & fine])


@given(chances, chances, advantages, st.sampled_from([0.05, 0.15, 0.4]))
def test_total_variation_drops_what_the_advantage_pushes_on(logp, behavior, a, limit):
    p, q = logp.exp(), behavior.exp()
    found = tv_mask(logp - behavior, a, logp, behavior, limit=limit)
    moved = torch.where(a > 0, p - q, torch.where(a < 0, q - p, torch.zeros_like(p)))
    fine = (moved - limit).abs() > 1e-9
    expected = torch.where(moved > limit, 0.0, (p / q).clamp(max=20.0))
    assert_close(found[fine], expected[fine])


@given(chances, chances, advantages, st.sampled_from([0.01, 0.05, 0.3]))
def test_binary_divergence_drops_what_the_advantage_pushes_on(logp, behavior, a, limit):
    p, q = logp.exp(), behavior.exp()
    two = [torch.stack([x, 1 - x]) for x in (p, q)]
    divergence = (two[1] * (two[1] / two[0]).log()).sum(0)
    assert (divergence >= -1e-12).all()
    away = torch.where(a > 0, p > q, (a < 0) & (p < q))
    fine = (divergence - limit).abs() > 1e-9
    found = kl_mask(logp - behavior, a, logp, behavior, limit=limit)
    expected = torch.where(away & (divergence > limit), 0.0, (p / q).clamp(max=20.0))
    assert_close(found[fine], expected[fine])


@pytest.mark.parametrize("map_", [tv_mask, kl_mask])
def test_unlikely_tokens_are_kept_whatever_their_ratio_and_certain_ones_are_judged(map_):
    rare = torch.tensor([1e-4]).double().log()
    rarer, up = rare - 5.0, torch.ones(1).double()
    assert_close(map_(rare - rarer, up, rare, rarer), torch.tensor([20.0]).double())
    assert_close(map_(rare - rarer, up, rare, rarer, cap=math.inf), (rare - rarer).exp())
    sure, half = torch.zeros(1).double(), torch.tensor([0.5]).double().log()
    assert map_(sure - half, up, sure, half).tolist() == [0.0]
    assert map_(half - sure, -up, half, sure).tolist() == [0.0]
    assert map_(half - sure, up, half, sure).tolist() == [0.5]
    assert map_(sure, up, sure, sure).tolist() == [1.0]


@given(effective, advantages, st.sampled_from([(0.4, 0.4), (0.1, 0.7)]))
def test_one_sided_bounds_and_what_they_leave(e, a, limits):
    low, high = limits
    found = one_sided(e, a, log_low=low, log_high=high)
    expected = torch.where(a > 0, e.clamp(max=high), torch.where(a < 0, e.clamp(min=-low), e))
    assert torch.equal(found, expected)
    kept = unclipped(e, a, log_low=low, log_high=high)
    clear = ((e - high).abs() > 1e-9) & ((e + low).abs() > 1e-9)
    assert torch.equal(kept[clear] == 1, (found == e)[clear])


def test_the_surrogate_of_gmpo_has_this_slope():
    """Where a token is clipped the clamp cuts its own slope and leaves the mean's value."""
    x = torch.tensor([0.1, 0.9, -0.7], dtype=torch.float64)
    for sign in (1.0, -1.0):
        a = torch.tensor(sign).double()
        slope_ = slope(lambda v: a * one_sided(v, a).mean().exp(), x)  # noqa: B023
        mean = one_sided(x, a).mean()
        assert_close(slope_, a * ratio(mean, a) * unclipped(x, a) / 3)


@pytest.mark.parametrize("map_", SIGNED)
def test_ratios_beyond_any_float_give_numbers(map_):
    far = torch.tensor([-1e4, 1e4, 0.0]).double()
    for a in (1.0, -1.0, 0.0):
        found = map_(far, torch.full((3,), a).double())
        bounded = map_ is not inverse_positive or a != 0
        assert torch.isfinite(found).all() or not bounded


def test_limits_are_refused():
    e, a = torch.zeros(1), torch.ones(1)
    with refused("delta is -0.1"):
        mask_negative(e, a, delta=-0.1)
    with refused("tau_pos is 0"):
        soft_gate(e, a, tau_pos=0.0)
    with refused("lambda_neg is -1"):
        gamma_weight(e, a, lambda_neg=-1.0)
    with refused("cap is 0"):
        inverse_positive(e, a, cap=0.0)
    for map_ in (tv_mask, kl_mask):
        with refused("limit is -0.1"):
            map_(e, a, e, e, limit=-0.1)
        with refused("cap is 0"):
            map_(e, a, e, e, cap=0.0)
    for map_ in (one_sided, unclipped):
        with refused("log_low is -1"):
            map_(e, a, log_low=-1.0)
