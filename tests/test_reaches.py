"""Ratios relative to a mean, and the farthest token: against plain sums over responses."""

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_close, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches

from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.reaches import farthest, over_batch, over_group, token_over_batch

MEANS = (over_group, over_batch, token_over_batch)


def ratios(batch):
    return torch.where(batch.mask, batch.logp - batch.behavior_logp, 0.0)


@settings(max_examples=25)
@given(batches(), st.sampled_from([math.inf, 2.0, 0.5]))
def test_ratios_over_a_mean_are_plain_quotients(batch, cap):
    x, mask = ratios(batch), batch.mask
    w = {
        (p, g): min(math.exp(float(x[p, g].sum())), cap)
        for p, g in torch.nonzero(mask.any(-1)).tolist()
    }
    tokens = [min(math.exp(v), cap) for v in x[mask].tolist()]
    found = {reach: reach(x, mask, cap=cap).exp() for reach in MEANS}
    for (p, g), mine in w.items():
        group = [v for (q, _), v in w.items() if q == p]
        t = int(mask[p, g].nonzero()[0])
        assert_close(found[over_group][p, g, t], mine / (sum(group) / len(group)))
        assert_close(found[over_batch][p, g, t], mine / (sum(w.values()) / len(w)))
        own = min(math.exp(float(x[p, g, t])), cap)
        assert_close(found[token_over_batch][p, g, t], own / (sum(tokens) / len(tokens)))


@settings(max_examples=25)
@given(batches())
def test_the_mean_is_1_and_an_offset_does_nothing(batch):
    x, mask = ratios(batch), batch.mask
    if not mask.any():
        return
    assert_close(token_over_batch(x, mask).exp()[mask].mean(), torch.tensor(1.0).double())
    alive = mask.any(-1)
    assert_close(over_batch(x, mask).exp()[..., 0][alive].mean(), torch.tensor(1.0).double())
    shifted = x + torch.where(mask, 3.0 / mask.sum(-1, keepdim=True).clamp(min=1), 0.0)
    assert_close(over_group(shifted, mask)[alive], over_group(x, mask)[alive])
    assert_close(token_over_batch(x + 3.0, mask)[mask], token_over_batch(x, mask)[mask])


@pytest.mark.parametrize("reach", MEANS)
def test_extreme_ratios_take_all_or_nothing(reach):
    x = torch.tensor([1e4, 0.0, -1e4]).double().view(1, 3, 1)
    mask = torch.ones_like(x).bool()
    assert_close(reach(x, mask).exp().flatten(), torch.tensor([3.0, 0.0, 0.0]).double())
    nothing = reach(x, torch.zeros_like(mask))
    assert not nothing.any()
    with refused("cap is 0"):
        reach(x, mask, cap=0.0)


def test_truncation_comes_before_the_mean():
    x = torch.tensor([9.0, 1.0]).double().log().view(1, 2, 1)
    mask = torch.ones_like(x).bool()
    for reach in MEANS:
        assert_close(reach(x, mask, cap=3.0).exp().flatten(), torch.tensor([1.5, 0.5]).double())


@settings(max_examples=25)
@given(batches())
def test_the_farthest_token_is_the_one_of_largest_size(batch):
    x, mask = ratios(batch), batch.mask
    found = farthest(x, mask)
    assert torch.equal(found.abs()[..., 0], x.abs().amax(-1))
    assert torch.equal((found == x).any(-1), torch.ones_like(mask[..., 0]))
    tie = torch.tensor([[0.5, -0.5]])
    assert farthest(tie, tie != 0).tolist() == [[0.5, 0.5]]


@settings(max_examples=10)
@given(batches(absent=False))
def test_responses_without_tokens_enter_no_mean(batch):
    """An empty response more in each group leaves the weights of the others."""
    x, mask = ratios(batch), batch.mask
    wide = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
    held = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1)
    for reach in MEANS:
        assert_close(reach(wide, held)[:, :-1], reach(x, mask))


def test_a_group_of_equal_ratios_is_not_corrected():
    entry = get("self_normalized")
    plain = replace(entry, corrections=get("rloo").corrections)
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand((2, 3, 2), generator=generator).double()
    batch = Batch(
        rewards=torch.rand((2, 3), generator=generator).double(),
        mask=torch.ones(2, 3, 2).bool(),
        logp=logp,
        behavior_logp=logp - 0.3,
    )
    assert_close(entry(batch).own, plain(batch).own)
