"""Aggregations: what weight a token gets, that slices add up, and when directions change."""

from dataclasses import replace

import pytest
import torch
from checks import assert_close, assert_parallel, assert_skew, moments, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import booleans, problems

from windage.estimators.aggregation import (
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
)
from windage.estimators.catalogue import get
from windage.estimators.diagnostics import aggregate
from windage.estimators.member import use
from windage.toy.objective import objective
from windage.toy.problems import token_tree

MEMBERS = (
    use(token_sum),
    use(sequence_mean),
    use(constant_length, length=8),
    use(token_mean),
    use(prompt_mean),
)
shapes = st.sampled_from([(1, 2, 3), (2, 3, 2), (3, 2, 4)])
masks = shapes.flatmap(lambda shape: st.tuples(booleans(*shape), booleans(*shape[:-1])))


def split(drawn):
    mask, present = drawn
    mask = mask & present.unsqueeze(-1)
    return mask.sum(-1), present


@given(masks)
def test_weights_by_their_definition(drawn):
    lengths, present = split(drawn)
    n = max(1, int(present.sum()))
    tokens = max(1, int(lengths.sum()))
    prompts = max(1, int(present.any(-1).sum()))
    for p in range(lengths.shape[0]):
        group = max(1, int(lengths[p].sum()))
        for g in range(lengths.shape[1]):
            here = float(present[p, g])
            length = max(1, int(lengths[p, g]))
            expected = (n, n * length, n * 8, tokens, prompts * group)
            for member, total in zip(MEMBERS, expected, strict=True):
                assert_close(member(lengths, present)[p, g], here / total)


@given(masks)
def test_averages_of_a_constant_are_the_constant(drawn):
    lengths, present = split(drawn)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    ones = torch.ones(mask.shape)
    full = float(lengths.sum() > 0)
    assert_close(aggregate(ones, mask, token_mean(lengths, present)), full)
    filled = (present & (lengths > 0)).sum() / present.sum().clamp(min=1)
    assert_close(aggregate(ones, mask, sequence_mean(lengths, present)), filled, relative=1e-6)
    groups = (lengths.sum(-1) > 0).sum() / present.any(-1).sum().clamp(min=1)
    assert_close(aggregate(ones, mask, prompt_mean(lengths, present)), groups, relative=1e-6)


@given(masks)
def test_constant_length_is_a_share_of_the_sum_and_one_prompt_has_one_mean(drawn):
    lengths, present = split(drawn)
    total = token_sum(lengths, present)
    assert_close(constant_length(lengths, present, length=3.5), total / 3.5)
    one, here = lengths[:1], present[:1]
    assert_close(prompt_mean(one, here), token_mean(one, here))


@given(masks)
def test_absent_responses_count_nowhere(drawn):
    lengths, present = split(drawn)
    for member in MEMBERS:
        found = member(lengths, present)
        assert not found[~present].any()
        assert_close(member(lengths + 7 * ~present, present), found)
    count = int(present.sum())
    if count:
        for member in (token_sum, sequence_mean, token_mean):
            alone = member(lengths[present].view(1, -1), torch.ones(1, count).bool())
            assert_close(member(lengths, present)[present], alone.view(-1))


def test_an_empty_response_counts_as_a_response():
    lengths = torch.tensor([[0, 2]])
    here = torch.ones(1, 2).bool()
    assert token_sum(lengths, here).tolist() == [[0.5, 0.5]]
    assert sequence_mean(lengths, here).tolist() == [[0.5, 0.25]]
    assert token_mean(lengths, here).tolist() == [[0.5, 0.5]]
    nothing = torch.zeros(2, 2).long()
    for member in MEMBERS:
        assert member(nothing, nothing == 0).isfinite().all()
        assert not member(nothing, nothing > 0).any()


@settings(max_examples=15)
@given(problems(prompts=(1,), on_policy=True, fixed=True, leaves=9))
def test_equal_lengths_make_all_parallel_to_the_gradient(problem):
    gradient = objective(problem).gradient
    if gradient.abs().max() < 1e-9:
        return
    horizon = problem.tree.horizon
    for member, factor in zip(
        MEMBERS, (1, 1 / horizon, 1 / 8, 1 / horizon, 1 / horizon), strict=True
    ):
        mean = moments(replace(get("rloo"), aggregation=member), problem).mean
        assert_parallel(mean, gradient, factor=factor)


@pytest.mark.parametrize("member", [MEMBERS[1], MEMBERS[3], MEMBERS[4]], ids=lambda m: m.name)
def test_lengths_that_vary_turn_the_direction(member):
    problem = token_tree(3)
    mean = moments(replace(get("rloo"), aggregation=member), problem).mean
    assert_skew(mean, objective(problem).gradient, at_least=1e-3)


@pytest.mark.parametrize("length", [None, 0, -1.0, float("nan")])
def test_a_length_without_meaning_is_refused(length):
    with refused("length is"):
        constant_length(torch.ones(1, 2).long(), torch.ones(1, 2).bool(), length=length)


def test_leading_axes():
    lengths = torch.randint(0, 4, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    present = lengths < 3
    for member in MEMBERS:
        each = [member(lengths[i], present[i]) for i in range(3)]
        assert_close(member(lengths, present), torch.stack(each))
