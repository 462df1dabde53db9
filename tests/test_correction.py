"""Corrections: reaches against their sums, maps against autograd of the losses they come from."""

import math

import pytest
import torch
from checks import assert_close, assert_zero, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import booleans, numbers

from windage.estimators.correction import (
    Correction,
    band,
    clip,
    dual_clip,
    geometric,
    keep,
    none,
    prefix,
    ratio,
    suffix,
    taper,
    tapered,
    token,
    trajectory,
    truncate,
)
from windage.estimators.diagnostics import clip_objective, dual_clip_objective
from windage.estimators.errors import BadInput
from windage.estimators.member import use

REACHES = (token, prefix, suffix, trajectory, geometric)
MAPS = (none, ratio, truncate, band, keep, clip, dual_clip, taper)
BOUNDED = (none, truncate, band, keep, taper)
NAN, INF = float("nan"), float("inf")
rows = st.sampled_from([(1, 1), (2, 3), (3, 5)]).flatmap(
    lambda shape: st.tuples(numbers(*shape), booleans(*shape), numbers(shape[0], 1))
)
effective = numbers(12, low=-3.0, high=3.0)
advantages = numbers(12)


def weights(reach, map_, log_ratio, mask, advantage, **settings):
    correction = Correction(reach=use(reach), map=use(map_, **settings))
    return correction.weights(log_ratio, mask, advantage)


# Reaches


@given(rows)
def test_reaches_are_sums_over_trainable_tokens(drawn):
    x, mask, _ = drawn
    x = torch.where(mask, x, 0.0)
    for row, kept in zip(x, mask, strict=True):
        for t in range(len(row)):
            assert_close(prefix(row, kept)[t], row[: t + 1].sum())
            assert_close(suffix(row, kept)[t], row[t:].sum())
            assert_close(trajectory(row, kept)[t], row.sum())
            assert_close(geometric(row, kept)[t], row.sum() / max(1, int(kept.sum())))
            assert_close(token(row, kept)[t], row[t])
    assert_close(prefix(x, mask) + suffix(x, mask) - x, trajectory(x, mask))


@settings(max_examples=25)
@given(rows, st.sampled_from([NAN, INF, -INF, 1e4]))
def test_what_is_masked_reaches_no_weight(drawn, held):
    x, mask, advantage = drawn
    dirty = torch.where(mask, x, held)
    for reach in REACHES:
        for map_ in MAPS:
            found = weights(reach, map_, dirty, mask, advantage)
            assert_close(found, weights(reach, map_, torch.where(mask, x, 0.0), mask, advantage))
            assert not found[~mask].any()


@given(rows)
def test_one_token_makes_all_reaches_equal(drawn):
    x, _, advantage = drawn
    x, mask = x[:, :1], torch.ones_like(x[:, :1]).bool()
    for reach in REACHES:
        assert_close(weights(reach, ratio, x, mask, advantage), x.exp())


# Maps against the losses whose gradients they are


def slope(loss, e, a, **settings):
    e = e.clone().requires_grad_()
    loss(e, a, **settings).sum().backward()
    return e.grad


def off_the_kinks(e, *limits):
    return torch.stack([(e - math.log(x)).abs() > 1e-6 for x in limits if x > 0]).all(0)


@given(effective, advantages, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.5, 9.0), (1.5, 0.1)]))
def test_clip_is_the_gradient_of_ppo(e, a, margins):
    low, high = margins
    settings = {"clip_low": low, "clip_high": high}
    fine = off_the_kinks(e, 1 - low, 1 + high)
    expected = slope(clip_objective, e, a, **settings)
    assert_close((clip(e, a, **settings) * a)[fine], expected[fine])
    zero = ((a > 0) & (e.exp() > 1 + high)) | ((a < 0) & (e.exp() < 1 - low))
    assert torch.equal(clip(e, a, **settings) == 0, zero)


@given(effective, advantages, st.sampled_from([1.5, 3.0, 10.0]))
def test_dual_clip_is_the_gradient_of_its_loss_and_clip_elsewhere(e, a, cap):
    fine = off_the_kinks(e, 0.8, 1.2, cap)
    expected = slope(dual_clip_objective, e, a, cap=cap)
    found = dual_clip(e, a, cap=cap)
    assert_close((found * a)[fine], expected[fine])
    second = (a < 0) & (e.exp() > cap)
    assert not found[second].any()
    assert_close(found[~second], clip(e, a)[~second])


def rho(e, low, high):
    """The concave function that is x on [a, b] and goes on along its tangent in log x."""
    inside = e.clamp(min=math.log(low) if low > 0 else -50.0, max=math.log(high))
    return inside.exp() * (1 + e - inside)


@given(effective, advantages, st.sampled_from([(1.0, 1.0, 0.5, 1.0), (0.5, 2.0, 0.1, 3.0)]))
def test_taper_is_the_gradient_of_the_surrogate(e, a, limits):
    a_pos, b_pos, a_neg, b_neg = limits

    named = {"a_pos": a_pos, "b_pos": b_pos, "a_neg": a_neg, "b_neg": b_neg}

    def loss(e, a):
        return a * torch.where(a >= 0, rho(e, a_pos, b_pos), rho(e, a_neg, b_neg))

    found = taper(e, a, **named)
    assert_close(tapered(e, a, **named) * a, loss(e, a))
    fine = off_the_kinks(e, *limits)
    assert_close((found * a)[fine], slope(loss, e, a)[fine])
    for low, high in ((a_pos, b_pos), (a_neg, b_neg)):
        assert (rho(e, low, high) <= e.exp() + 1e-12).all()


@given(effective, advantages, st.sampled_from([0.5, 2.0, 5.0]))
def test_truncate_is_the_gradient_of_a_lower_bound_of_the_ratio(e, a, cap):
    def potential(e, a):
        return a * torch.where(e <= math.log(cap), e.exp(), cap * (1 + e - math.log(cap)))

    fine = off_the_kinks(e, cap)
    assert_close((truncate(e, a, cap=cap) * a)[fine], slope(potential, e, a)[fine])
    assert (potential(e, torch.ones_like(a)) <= e.exp() + 1e-12).all()


# Relations between maps


@given(effective, advantages)
def test_the_table_of_topr(e, a):
    def limited(a_pos, b_pos, a_neg, b_neg):
        return taper(e, a, a_pos=a_pos, b_pos=b_pos, a_neg=a_neg, b_neg=b_neg)

    assert_close(limited(1.0, 1.0, 1.0, 1.0), none(e, a))
    assert_close(limited(0.0, INF, 0.0, INF), ratio(e, a))
    assert_close(limited(0.0, 2.0, 0.0, 2.0), truncate(e, a, cap=2.0))
    assert_close(limited(1.0, 1.0, 0.0, 0.0), (a >= 0).double())
    canonical = taper(e, a)
    assert_close(canonical[a >= 0], torch.ones_like(canonical[a >= 0]))
    assert_close(canonical[a < 0], e.exp().clamp(max=1.0)[a < 0])


@given(effective, advantages, st.sampled_from([(0.5, 2.0), (0.0, 5.0), (0.5, INF)]))
def test_band_is_the_ratio_kept(e, a, limits):
    low, high = limits
    kept = keep(e, a, low=low, high=high)
    assert set(kept.tolist()) <= {0.0, 1.0}
    assert_close(band(e, a, low=low, high=high), kept * ratio(e, a))
    dropped = ratio(e, a) - band(e, a, low=low, high=high)
    assert_close(dropped, torch.where((e.exp() < low) | (e.exp() > high), e.exp(), 0.0))


@given(effective, advantages)
def test_limits_out_of_the_way_leave_the_ratio(e, a):
    r = ratio(e, a)
    assert_close(truncate(e, a, cap=100.0), r)
    assert_close(clip(e, a, clip_low=1.0, clip_high=100.0), r)
    assert_close(dual_clip(e, a, clip_low=1.0, clip_high=100.0, cap=100.0), r)
    assert_close(band(e, a, low=0.0, high=100.0), r)


def test_on_policy_every_map_is_one():
    zero, a = torch.zeros(3).double(), torch.tensor([-1.0, 0.0, 1.0]).double()
    for map_ in MAPS:
        assert map_(zero, a).tolist() == [1.0, 1.0, 1.0]


# Boundaries


@pytest.mark.parametrize(
    ("pi", "mu"), [(0.25, 0.5), (0.4, 0.5), (0.6, 0.5), (0.5, 0.1), (0.3, 0.1)]
)
def test_a_ratio_at_a_limit_is_inside_whatever_its_last_digit(pi, mu):
    log_pi, log_mu = (torch.tensor([x], dtype=torch.float64).log() for x in (pi, mu))
    e, limit = log_pi - log_mu, pi / mu
    plus = torch.ones(1).double()
    assert keep(e, plus, low=limit, high=limit).item() == 1.0
    assert_close(band(e, plus, low=limit, high=limit).item(), limit)
    assert not keep(e, plus, low=limit * 1.0001, high=INF).any()
    assert not band(e, plus, low=0.0, high=limit * 0.9999).any()
    if limit > 1:
        assert clip(e, plus, clip_high=limit - 1).item() > 0
        assert clip(e, plus, clip_high=limit * 0.9999 - 1).item() == 0
    else:
        assert clip(e, -plus, clip_low=1 - limit).item() > 0
        assert clip(e, -plus, clip_low=1 - limit * 1.0001).item() == 0
    assert dual_clip(e, -plus, clip_low=1.0, cap=limit).item() > 0
    assert dual_clip(e, -plus, clip_low=1.0, cap=limit * 0.9999).item() == 0


def test_defaults():
    assert use(clip).settings == (("clip_low", 0.2), ("clip_high", 0.2))
    assert use(band).settings == (("low", 0.5), ("high", 5.0))
    assert dict(use(dual_clip).settings)["cap"] == 3.0
    assert dict(use(truncate).settings)["cap"] == 2.0
    assert use(taper).settings == (("a_pos", 1.0), ("b_pos", 1.0), ("a_neg", 0.0), ("b_neg", 1.0))


@pytest.mark.parametrize("extreme", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_stay_finite_where_a_bound_is_promised(extreme, dtype):
    e = torch.tensor([[extreme, 0.0]], dtype=dtype)
    mask = torch.ones(1, 2).bool()
    for sign in (1.0, -1.0):
        a = torch.tensor([[sign]], dtype=dtype)
        for map_ in BOUNDED:
            for reach in REACHES:
                found = weights(reach, map_, e, mask, a)
                assert found.isfinite().all() and found.dtype == dtype
                assert found.max() <= 5.0
        assert clip(e, a)[0, 0] == (0.0 if sign * extreme > 0 else extreme > 0 and INF)
        assert dual_clip(e, a)[0, 0] == 0.0 or extreme < 0


def test_the_objective_of_the_taper_at_its_limits():
    e, plus = torch.tensor([-1e4, 0.0, 1e4]).double(), torch.ones(3).double()
    assert_close(tapered(e, plus), torch.tensor([1 - 1e4, 1.0, 1 + 1e4]))
    assert_close(tapered(e, -plus)[:2], torch.tensor([0.0, 1.0]))
    assert not tapered(e, -plus, b_neg=0.0).any()
    with refused("a_pos is 2"):
        tapered(e, plus, a_pos=2.0)


def test_a_truncated_token_keeps_its_weight():
    e = torch.tensor([1e4, math.log(2.0), -1e4]).double()
    assert_close(truncate(e, e, cap=2.0), torch.tensor([2.0, 2.0, 0.0]))
    assert_zero(band(e, e)[[0, 2]])


@pytest.mark.parametrize(
    ("map_", "settings", "words"),
    [
        (truncate, {"cap": 0.0}, ("cap is 0", "above 0")),
        (truncate, {"cap": NAN}, ("cap is nan",)),
        (dual_clip, {"cap": -3.0}, ("cap is -3",)),
        (band, {"low": 2.0, "high": 1.0}, ("low is 2", "high is 1", "0 <= low <= high")),
        (keep, {"low": -1.0}, ("low is -1",)),
        (clip, {"clip_low": -0.2}, ("clip_low is -0.2", "at least 0")),
        (dual_clip, {"clip_high": NAN}, ("clip_high is nan",)),
        (taper, {"a_pos": 2.0}, ("a_pos is 2", "b_pos is 1")),
        (taper, {"a_neg": 0.5, "b_neg": 0.25}, ("a_neg is 0.5", "b_neg is 0.25")),
    ],
)
def test_settings_without_meaning_are_refused(map_, settings, words):
    with refused(*words, error=BadInput):
        use(map_, **settings)(torch.zeros(1), torch.ones(1))


def test_an_unknown_setting_is_refused_by_name():
    with refused("clip_ratio_c", "cap", error=TypeError):
        use(dual_clip, clip_ratio_c=3.0)


def test_descriptions_name_the_policies_where_they_are_unusual():
    plain = Correction(reach=use(token), map=use(truncate))
    assert plain.describe() == "token truncate(cap=2)"
    odd = Correction(reach=use(token), map=use(truncate), numerator="proximal_logp")
    assert odd.describe() == "token truncate(cap=2) of proximal_logp/behavior_logp"
    assert Correction().describe() == "none" and Correction().idle


def test_leading_axes():
    e = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    a = torch.randn(2, 3, 4, 1, generator=torch.Generator().manual_seed(1)).double()
    mask = e > -0.5
    for reach in REACHES:
        for map_ in MAPS:
            whole = weights(reach, map_, e, mask, a)
            parts = [weights(reach, map_, e[i], mask[i], a[i]) for i in range(2)]
            assert_close(whole, torch.stack(parts))
