"""Diagnostics: averages over the mask, losses as frameworks log them, shares and sample sizes."""

import pytest
import torch
from checks import assert_close, refused
from hypothesis import given, settings
from strategies import batches, numbers

from windage.estimators.aggregation import sequence_mean, token_mean
from windage.estimators.correction import clip, dual_clip, truncate
from windage.estimators.diagnostics import (
    aggregate,
    changed_share,
    clip_objective,
    dual_clip_objective,
    effective_sample_size,
    masked_mean,
)

NAN = float("nan")


@settings(max_examples=25)
@given(batches(lead=(2,)))
def test_averages_are_those_of_the_kept_values(batch):
    dirty = torch.where(batch.mask, batch.logp, NAN)
    expected = batch.logp[batch.mask].mean() if batch.mask.any() else 0.0
    assert_close(masked_mean(dirty, batch.mask), expected)
    for member in (token_mean, sequence_mean):
        scale = member(batch.lengths, batch.present)
        found = aggregate(dirty, batch.mask, scale)
        assert_close(found, (batch.logp * scale.unsqueeze(-1)).sum((-3, -2, -1)))
    for i in range(2):
        scale = token_mean(batch.lengths[i], batch.present[i])
        assert_close(
            aggregate(dirty[i], batch.mask[i], scale), masked_mean(dirty[i], batch.mask[i])
        )


@given(numbers(8, low=-1.0, high=1.0), numbers(8))
def test_objectives_are_the_coefficients_inside_the_limits_and_flat_outside(e, a):
    value = clip_objective(e, a)
    flows = clip(e, a) != 0
    assert_close(value[flows], (clip(e, a) * a)[flows])
    assert_close(value[~flows], torch.where(a > 0, 1.2 * a, 0.8 * a)[~flows])
    both = dual_clip_objective(e, a, cap=1.5)
    stopped = (a < 0) & (e.exp() > 1.5)
    assert_close(both, torch.where(stopped, 1.5 * a, value))
    assert torch.equal(dual_clip(e, a, cap=1.5) == 0, ~flows | stopped)


def test_shares_count_changed_tokens_only():
    e = torch.tensor([0.0, 1.0, -1.0, 5.0])
    mask = torch.tensor([True, True, True, False])
    assert_close(changed_share(truncate(e, e, cap=2.0), e, mask), 1 / 3, relative=1e-6)
    assert changed_share(e.exp(), e, mask) == 0
    assert changed_share(torch.tensor([2.0]), torch.tensor([1e4]), torch.tensor([True])) == 1
    assert changed_share(e.exp(), e, torch.zeros(4).bool()) == 0


def test_effective_sample_size():
    mask = torch.ones(4).bool()
    assert_close(effective_sample_size(torch.full((4,), 3.0), mask), 4.0)
    huge = torch.tensor([1e300, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert_close(effective_sample_size(huge, mask), 1.0)
    assert effective_sample_size(torch.zeros(4), mask) == 0
    assert effective_sample_size(torch.full((2, 4), NAN), torch.zeros(2, 4).bool()).tolist() == [
        0,
        0,
    ]
    w = torch.tensor([[0.5, 1.5], [1.0, 1.0]]).double()
    assert_close(effective_sample_size(w, w > 0), torch.tensor([4 / 2.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize(
    "call",
    [
        lambda: clip_objective(torch.zeros(1), torch.zeros(1), clip_low=-1.0),
        lambda: dual_clip_objective(torch.zeros(1), torch.zeros(1), clip_high=-1.0),
        lambda: dual_clip_objective(torch.zeros(1), torch.zeros(1), cap=0.0),
    ],
)
def test_settings_without_meaning_are_refused(call):
    with refused("allowed"):
        call()
