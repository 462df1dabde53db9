"""When a reference moves, how far, and that what it becomes is kept."""

from __future__ import annotations

import pytest
import torch
from checks import refused

from windage.estimators.errors import BadInput
from windage.estimators.penalty import loss_k3
from windage.llm.checkpoint import load, save
from windage.llm.config import ReferenceSection
from windage.llm.reference import NAMES, NEVER, Schedule, due, mixed, refresh, schedule


def times(schedule: Schedule, *, steps: int = 12, an_epoch: int = 5) -> list[int]:
    """Updates after which a reference is refreshed."""
    return [
        step
        for step in range(1, steps + 1)
        if due(schedule, step=step, epoch=step // an_epoch, before=(step - 1) // an_epoch)
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("never", []), ("steps", [4, 8, 12]), ("ema", [4, 8, 12]), ("epoch", [5, 10])],
)
def test_a_schedule_is_due_when_its_name_says(name, wanted):
    assert times(schedule(name, every=4, alpha=0.6)) == wanted
    # A run that stopped and goes on asks the same questions: nothing else decides.
    assert not due(schedule(name, every=4), step=0, epoch=0, before=0)


def test_the_names_and_defaults_are_those_of_the_configuration():
    section = ReferenceSection.__dataclass_fields__["refresh"].type
    assert all(name in str(section) for name in NAMES)
    own = ReferenceSection()
    assert schedule(own.refresh, every=own.every, alpha=own.alpha) == NEVER
    assert schedule("ema", every=own.every, alpha=own.alpha) == schedule("ema")
    assert schedule("steps", every=7, alpha=0.6).alpha == 1 == schedule("epoch").alpha


def test_bad_settings_are_refused():
    with refused("'emma'", "ema", error=BadInput):
        schedule("emma")
    with refused("alpha", "1.5", error=BadInput):
        schedule("ema", alpha=1.5)
    with refused("every", error=BadInput):
        schedule("steps", every=0)
    for name in NAMES[1:]:
        with refused("adapters", "never", error=BadInput):
            schedule(name, adapters=True)
    assert schedule("never", adapters=True) == NEVER


def test_a_mix_up_is_the_recursion_unrolled():
    """After k mix-ups the weight alpha (1 - alpha)^(k - j) is on the policy of the j-th."""
    alpha, policies = 0.3, torch.randn(5, 7, dtype=torch.float64)
    found = torch.randn(7, dtype=torch.float64)
    weights = torch.tensor([alpha * (1 - alpha) ** (4 - j) for j in range(5)], dtype=torch.float64)
    wanted = (1 - alpha) ** 5 * found + weights @ policies
    for policy in policies:
        found = mixed(found, policy, alpha)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)


def test_a_hard_copy_is_bit_for_bit_the_policy_and_apart_from_it():
    policy = torch.tensor([-0.0, 0.1, 3e38, -1e-45])
    reference = torch.tensor([5.0, -0.0, -3e38, 1.0])
    found = mixed(reference, policy, 1.0)
    assert found.view(torch.int32).tolist() == policy.view(torch.int32).tolist()
    policy[0] = 9.0
    assert found[0] == 0 and torch.lerp(reference, policy, 1.0)[1] == policy[1]


def test_kinds_of_numbers_stay_those_of_the_reference():
    half = mixed(torch.ones(2).bfloat16(), torch.full((2,), 2.0), 0.5)
    assert half.dtype == torch.bfloat16 and half.tolist() == [1.5, 1.5]
    # Difference 3: a small alpha is lost in bfloat16.
    assert mixed(torch.ones(2).bfloat16(), torch.full((2,), 1.1), 0.01).tolist() == [1, 1]
    assert mixed(torch.tensor([1, 2]), torch.tensor([5, 6]), 0.5).tolist() == [5, 6]


def model(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_a_reference_moves_in_place_the_policy_does_not_and_a_checkpoint_keeps_it(alpha, tmp_path):
    policy, reference = model(0), model(1)
    policy(torch.randn(8, 3))
    before = {n: t.clone() for n, t in policy.state_dict().items()}
    old = {n: t.clone() for n, t in reference.state_dict().items()}
    refresh(reference, policy, alpha)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(policy.state_dict()[name], before[name])
        assert torch.equal(tensor, mixed(old[name], before[name], alpha))
    assert all(p.grad_fn is None for p in reference.parameters())
    kept = {"reference": reference.state_dict()}
    found = load(save(tmp_path, 1, tensors=kept, state={}, keep=1)).tensors["reference"]
    other = model(2)
    other.load_state_dict(found)
    for tree in (reference, other):
        refresh(tree, policy, 0.25)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_other_names_are_refused_before_anything_moves():
    kinds = ({"a": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)})
    reference, policy = (torch.nn.ParameterDict(kind) for kind in kinds)
    with refused("'b'"):
        refresh(reference, policy, 1.0)
    assert reference["a"] == 1


def test_a_matrix_of_two_names_is_mixed_once():
    """An embedding that is the output matrix as well."""
    reference, policy = (
        torch.nn.ParameterDict(
            {"a": (one := torch.nn.Parameter(torch.full((1,), value))), "b": one}
        )
        for value in (0.0, 1.0)
    )
    refresh(reference, policy, 0.25)
    assert reference["a"] == reference["b"] == 0.25


def test_refreshed_at_every_update_the_penalty_does_nothing():
    """What a person asked: a reference that is always the policy is no reference."""
    logp = torch.randn(6, dtype=torch.float64)
    assert due(schedule("steps", every=1), step=1, epoch=0, before=0)
    assert not loss_k3(logp - mixed(torch.zeros(6).double(), logp, 1.0), coefficient=1.0).any()


def test_rounds_with_a_refresh_end_where_one_round_with_a_weaker_penalty_does():
    """pi_k is proportional to ref exp(k R / beta): on the exact solution of each round."""
    rewards, beta, rounds = torch.randn(5).double(), 0.7, 4
    start = torch.randn(5).double().log_softmax(-1)
    reference = start
    for _ in range(rounds):
        solved = (reference + rewards / beta).log_softmax(-1)
        reference = mixed(reference, solved, 1.0)
    wanted = (start + rewards / (beta / rounds)).log_softmax(-1)
    torch.testing.assert_close(reference, wanted, rtol=1e-12, atol=1e-12)
