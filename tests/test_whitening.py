"""Whitened and decoupled advantages: means and spreads, relations, what they need."""

from dataclasses import replace

import pytest
import torch
from checks import assert_biased, assert_close, moments, refused
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, booleans, numbers

from windage.estimators.advantage import group_std
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.penalty import reward_k1
from windage.estimators.whitening import decoupled_std, whitened_group_mean, whitened_returns
from windage.toy.problems import token_tree

BATCH = ("batch_std", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
matrices = st.sampled_from([(1, 2), (2, 3), (3, 4)]).flatmap(
    lambda shape: st.tuples(numbers(*shape), booleans(*shape), numbers(*shape))
)


def spread_of(values):
    """Mean and standard deviation (ddof 1) of a flat list."""
    return float(values.mean()), float(values.std())


@given(batches(prompts=(1, 2, 3)))
def test_over_tokens_the_mean_is_0_and_the_spread_1(batch):
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        found = get(name, eps=0.0)(batch).terms.advantages
        kept = found.expand(batch.mask.shape)[batch.mask]
        if kept.any():
            assert_close(spread_of(kept), [0.0, 1.0], relative=1e-9)
        assert not found[~batch.mask].any()


@given(batches(prompts=(1, 2), tokens=(3,)), st.sampled_from([0.5, 1.0]))
def test_returns_are_whitened_by_hand(batch, gamma):
    values = {}
    for p, g in torch.nonzero(batch.mask.any(-1)).tolist():
        places = torch.nonzero(batch.mask[p, g])[:, 0].tolist()
        for rank, t in enumerate(reversed(places)):
            values[p, g, t] = float(batch.rewards[p, g]) * gamma**rank
    found = get("reinforce_plus_plus", gamma=gamma, eps=0.5)(batch).terms.advantages
    if not values:
        return
    flat = torch.tensor(list(values.values())).double()
    mean = float(flat.mean())
    std = float(flat.std()) if len(flat) > 1 else 0.0
    for place, value in values.items():
        want = 0.0 if std < 1e-12 else (value - mean) / (std + 0.5)
        assert_close(found[place], want, relative=1e-9)


def test_one_response_a_prompt_is_enough_for_returns_only():
    batch = Batch.from_rows(
        [1.0, 0.0], ["a", "b"], mask=[[1], [1, 1]], behavior_logp=[[-1], [-1, -1]]
    )
    batch = replace(batch, logp=batch.behavior_logp)
    found = get("reinforce_plus_plus")(batch)
    assert found.own.any() and not (found.terms.reason == 2).any()
    for name in ("batch_std", "reinforce_plus_plus_baseline"):
        with refused("size 1", "groups of at least 2"):
            get(name)(batch)


@given(matrices)
def test_one_component_is_the_group_std_up_to_a_factor(drawn):
    rewards, present, _ = drawn
    spoiled = torch.where(present, rewards, torch.nan)
    found = decoupled_std(spoiled.unsqueeze(-1), present, eps=0.0)
    one = group_std(spoiled, present, eps=0.0)
    kept = one[present]
    if not kept.any():
        assert not found.any()
        return
    scale = float(kept.std()) if len(kept) > 1 else 1.0
    assert_close(found, one / scale, relative=1e-9)


@given(matrices, st.sampled_from([0.01, 100.0]))
def test_the_scale_of_a_component_does_not_matter(drawn, scale):
    first, present, second = drawn
    plain = decoupled_std(torch.stack([first, second], -1), present, eps=0.0)
    scaled = decoupled_std(torch.stack([first, scale * second], -1), present, eps=0.0)
    assert_close(scaled, plain, relative=1e-9)
    swapped = decoupled_std(
        torch.stack([second, first], -1), present, component_weights=(3.0, 1.0), eps=0.0
    )
    weighed = decoupled_std(
        torch.stack([first, second], -1), present, component_weights=(1.0, 3.0), eps=0.0
    )
    assert_close(swapped, weighed, relative=1e-9)


def test_two_components_by_hand():
    parts = torch.tensor([[[1.0, 0.0], [0.0, 4.0], [0.0, 2.0]]]).double()
    z = [
        (2 / 3) / (1 / 3) ** 0.5 + (-2.0) / 2.0,
        (-1 / 3) / (1 / 3) ** 0.5 + 2.0 / 2.0,
        (-1 / 3) / (1 / 3) ** 0.5 + 0.0,
    ]
    values = torch.tensor(z, dtype=torch.float64)
    expected = (values - values.mean()) / values.std()
    assert_close(decoupled_std(parts, eps=0.0)[0], expected)
    with refused("component_weights", "2 numbers"):
        decoupled_std(parts, component_weights=(1.0,))


@pytest.mark.parametrize(
    "name", ["batch_std", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_the_batch_biases_the_mean(name):
    assert_biased(get(name), token_tree(2), 2, at_least=1e-2)
    assert moments(get(name), token_tree(2), 2, engine="tuples").variance > 0


def test_rewards_of_other_prompts_matter_in_these_and_only_these():
    rows = {"mask": [[1]] * 4, "components": [[1.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.0, 0.0]]}
    rows |= {"logp": [[-1.0]] * 4, "behavior_logp": [[-1.0]] * 4}
    near = Batch.from_rows([1.0, 0.0, 1.0, 0.0], "aabb", **rows)
    rows["components"] = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    far = Batch.from_rows([1.0, 0.0, 5.0, 0.0], "aabb", **rows)
    for name in (*BATCH, "grpo", "rloo"):
        moved = not torch.equal(get(name)(near).own[0], get(name)(far).own[0])
        assert moved == (name in BATCH), name


def test_a_penalty_in_the_reward_is_whitened_with_it():
    batch = Batch.from_rows(
        [1.0, 0.0],
        "aa",
        mask=[[1, 1], [1, 1]],
        logp=[[-1.0, -1.0], [-1.0, -1.0]],
        behavior_logp=[[-1.0, -1.0], [-1.0, -1.0]],
        reference_logp=[[-1.5, -1.0], [-1.0, -0.5]],
    )
    found = get("reinforce_plus_plus", coefficient=0.5)(batch).terms.advantages
    x = batch.logp - batch.reference_logp
    tokens = reward_k1(x, coefficient=0.5) + torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]).double()
    assert_close(found, whitened_returns(tokens, batch.mask))
    kept = found[batch.mask]
    assert_close(spread_of(kept), [0.0, 1.0], relative=1e-6)


def test_equal_groups_give_exactly_nothing_to_the_centered_form():
    rewards = torch.tensor([[0.7, 0.7], [0.1, 0.1]]).double()
    every, mask = torch.ones(2, 2).bool(), torch.ones(2, 2, 3).bool()
    assert not whitened_group_mean(rewards, every, mask).any()
    tokens = torch.zeros(2, 2, 3).double()
    tokens[..., -1] = 0.7
    assert not whitened_returns(tokens, mask).any()
