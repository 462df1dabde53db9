"""Windows of bits: exact chance, draws and the update of a minibatch."""

from itertools import product

import numpy as np
import pytest
import torch

from windage.estimators.catalogue import get
from windage.toy.bits import Window, flip, flipped_update
from windage.toy.learning import path

SMALL = Window(low=4, high=6, bits=8)


def flips(*seeds, count=20, steps=6):
    return flip(SMALL, count, 5, steps, [np.random.default_rng(seed) for seed in seeds])


def test_the_chance_is_a_sum_over_all_responses():
    theta = torch.linspace(-1, 2, 8, dtype=torch.float64)
    p = theta.sigmoid()
    total = 0.0
    for bits in product((0, 1), repeat=8):
        if 4 <= sum(bits) <= 6:
            row = torch.tensor(bits)
            total += float(torch.where(row > 0, p, 1 - p).prod())
    assert SMALL.chance(theta).item() == pytest.approx(total, rel=1e-13)


@pytest.mark.parametrize(
    ("low", "high", "chance"), [(24, 28, 0.131), (26, 30, 0.0400), (27, 31, 0.0191)]
)
def test_fair_coins_are_right_as_often_as_stated(low, high, chance):
    found = Window(low=low, high=high).chance(torch.zeros(40, dtype=torch.float64))
    assert found.item() == pytest.approx(chance, abs=5e-4)


def test_rewards_include_both_ends():
    assert SMALL.rewards(torch.tensor([3, 4, 6, 7])).tolist() == [-1, 1, 1, -1]


def test_draws_are_a_function_of_the_seed_alone():
    one, two, alone = flips(3, 4), flips(3, 4), flips(4)
    assert torch.equal(one.bits, two.bits) and torch.equal(one.picked, two.picked)
    assert torch.equal(one.bits[1:], alone.bits) and torch.equal(one.picked[1:], alone.picked)


@pytest.mark.parametrize("name", ["naive", "topr", "tis_both_signs"])
def test_the_update_is_the_gradient_of_the_surrogate(name):
    drawn = flips(3, 4)
    theta = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8).requires_grad_()
    limits = dict(get(name).corrections[0].map.settings)
    for step in (0, 5):
        loss = theta.new_zeros(())
        for s in range(2):
            for row in drawn.picked[s, step]:
                bits, reward = drawn.bits[s, row], float(drawn.rewards[s, row])
                logp = (bits * theta[s] - torch.nn.functional.softplus(theta[s])).sum()
                side = "pos" if reward > 0 else "neg"
                ratio = float((logp.detach() + 8 * np.log(2)).exp())
                weight = min(max(ratio, limits[f"a_{side}"]), limits[f"b_{side}"])
                loss = loss + weight * reward * logp / 5
        (wanted,) = torch.autograd.grad(loss, theta)
        torch.testing.assert_close(flipped_update(drawn, get(name))(theta.detach(), step), wanted)


def test_a_run_is_bitwise_reproducible_and_settings_in_front_share_the_data():
    start = torch.zeros(2, 8, dtype=torch.float64)
    ends = []
    for limits in ([0.1], [100.0], [0.1, 100.0]):
        limit = torch.tensor(limits, dtype=torch.float64).unsqueeze(-1)
        first = start.expand(len(limits), 2, 8)
        walk = path(first, flipped_update(flips(3, 4), get("topr")), steps=6, limit=limit)
        ends.append(list(walk)[-1].parameters)
    assert torch.equal(torch.cat(ends[:2]), ends[2])
    assert not torch.equal(ends[0], ends[1])
