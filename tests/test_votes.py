"""The exact vote against listing every outcome."""

from itertools import product

import pytest
import torch

from windage.toy.votes import majority


def listed(right, wrong, votes):
    """Sum over all sequences of votes; the last answer stands for silence."""
    p = [right, *wrong, max(0.0, 1 - right - sum(wrong))]
    total = 0.0
    for draw in product(range(len(p)), repeat=votes):
        counts = [draw.count(answer) for answer in range(len(wrong) + 1)]
        best = max(counts)
        if best and counts[0] == best:
            chance = 1.0
            for answer in draw:
                chance *= p[answer]
            total += chance / counts.count(best)
    return total


@pytest.mark.parametrize("votes", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("right", "wrong"), [(0.3, (0.3, 0.2)), (0.5, (0.5,)), (0.2, (0.1, 0.1, 0.1)), (0.0, (0.4,))]
)
def test_the_vote_is_the_sum_over_all_outcomes(right, wrong, votes):
    p, others = (torch.tensor(x, dtype=torch.float64) for x in (right, wrong))
    found = majority(p, others, votes)
    assert found.item() == pytest.approx(listed(right, wrong, votes), abs=1e-13)


def test_one_vote_is_the_mass_of_the_right_answer():
    right = torch.tensor([0.1, 0.4]).double()
    wrong = torch.tensor([[0.2, 0.3], [0.1, 0.1]]).double()
    torch.testing.assert_close(majority(right, wrong, 1), right)


def test_without_a_wrong_answer_silence_alone_loses():
    found = majority(torch.tensor(0.25).double(), torch.zeros(0).double(), 4)
    assert found.item() == pytest.approx(1 - 0.75**4)
