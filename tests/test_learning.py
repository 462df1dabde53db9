"""Learners: walks, mean updates against the exact engines, and the taper's objective."""

from dataclasses import replace

import pytest
import torch

from windage.estimators.advantage import constant
from windage.estimators.aggregation import token_sum
from windage.estimators.catalogue import get
from windage.estimators.correction import Correction, clip, taper, tapered, trajectory
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.toy import learning
from windage.toy.exact.affine import by_response
from windage.toy.learning import clip_norm, expected_update, first_step, flow, marks, path
from windage.toy.problems import Tree, make

ARMS = 5
PPO = Estimator(
    name="trajectory_ppo",
    advantage=use(constant),
    corrections=(Correction(reach=use(trajectory), map=use(clip)),),
    aggregation=use(token_sum),
)
ENTRIES = (
    get("reinforce", baseline=0.3),
    get("naive"),
    get("positives_only"),
    get("tis_both_signs"),
    get("topr", baseline=-0.4),
    get("topr", a_neg=0.1, b_pos=3.0),
    replace(get("trajectory_is"), advantage=use(constant)),
    PPO,
)


@pytest.fixture
def bandit():
    rng = torch.Generator().manual_seed(1)
    z, behavior = torch.randn((2, 1, 1, ARMS), generator=rng, dtype=torch.float64)
    rewards = torch.tensor([[1.0, -1.0, 0.5, -0.2, 0.0]])
    return make("bandit", Tree(ARMS, None, 1), z, rewards, behavior=behavior)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.describe())
def test_the_mean_update_is_that_of_the_exact_engine(entry, bandit):
    update = expected_update(entry, bandit.behavior_logp[0, 0], bandit.rewards[0])
    found = update(bandit.logits[0, 0], 0)
    torch.testing.assert_close(
        found, by_response(entry, bandit, 1).mean[0, 0], rtol=1e-13, atol=1e-15
    )


def test_a_lost_normalization_is_seen(bandit, monkeypatch):
    monkeypatch.setattr(learning, "pull_back", lambda visits, probability: visits)
    update = expected_update(get("topr"), bandit.behavior_logp[0, 0], bandit.rewards[0])
    exact = by_response(get("topr"), bandit, 1).mean[0, 0]
    assert (update(bandit.logits[0, 0], 0) - exact).abs().max() > 0.01


@pytest.mark.parametrize("name", ["rloo", "grpo", "centered", "starting_point"])
def test_the_mean_of_one_response_needs_an_advantage_of_its_own(name):
    with pytest.raises(ValueError, match=f"{name}: the mean of one response"):
        expected_update(get(name), torch.zeros(2), torch.zeros(2))


def test_replicates_walk_alone(bandit):
    rewards = torch.stack([bandit.rewards[0], -bandit.rewards[0]])
    start = torch.stack([bandit.logits[0, 0], 2 * bandit.logits[0, 0]])
    together = marks(
        path(start, expected_update(get("topr"), bandit.behavior_logp[0, 0], rewards), steps=20),
        [20],
    )[20]
    for row in range(2):
        update = expected_update(get("topr"), bandit.behavior_logp[0, 0], rewards[row])
        alone = marks(path(start[row], update, steps=20), [20])[20]
        assert torch.equal(together[row], alone)


def test_each_replicate_is_clipped_by_its_own_limit():
    gradient = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    clipped, norm = clip_norm(gradient, torch.tensor([1.0, 100.0, 1.0]))
    assert norm.tolist() == [5.0, 5.0, 0.0]
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.0, 0.0]]))


def test_a_step_is_limited_and_its_norm_told_before():
    states = list(
        path(torch.zeros(1, 2), lambda z, n: torch.tensor([[3.0, 4.0]]), steps=2, limit=1)
    )
    assert [s.norm.item() for s in states] == [0.0, 5.0, 5.0]
    torch.testing.assert_close(states[-1].parameters, torch.tensor([[1.2, 1.6]]))


def test_the_update_sees_the_number_of_the_step():
    seen = []

    def update(z, step):
        seen.append(step)
        return z

    list(path(torch.ones(1), update, steps=3))
    assert seen == [0, 1, 2]


def test_a_walk_ends_once_every_mark_is_passed():
    made = []
    states = path(torch.ones(1), lambda z, n: made.append(n) or z, steps=100)
    assert set(marks(states, [0, 2])) == {0, 2}
    assert made == [0, 1]


def test_a_condition_never_met_is_infinite():
    walk = path(torch.tensor([[1.0], [0.0]]), lambda z, n: z, steps=3)
    assert first_step(walk, lambda z: z[:, 0] >= 4) == (2.0, float("inf"))


def test_the_flow_is_the_limit_of_small_steps(bandit):
    update = expected_update(get("topr"), bandit.behavior_logp[0, 0], bandit.rewards[0])
    start = bandit.logits[0, 0]
    reached = flow(start, update, [1.0, 3.0])
    for step in (2e-2, 1e-2):
        near = marks(path(start, update, steps=round(3 / step), rate=step), [round(3 / step)])
        assert (next(iter(near.values())) - reached[1]).abs().max() < 0.2 * step


LIMITS = (
    {"a_pos": 1.0, "b_pos": 1.0, "a_neg": 0.0, "b_neg": 1.0},
    {"a_pos": 0.0, "b_pos": torch.inf, "a_neg": 0.5, "b_neg": 1.5},
    {"a_pos": 0.3, "b_pos": 2.0, "a_neg": 0.0, "b_neg": 0.0},
)


@pytest.mark.parametrize("limits", LIMITS)
def test_the_taper_is_the_derivative_of_its_objective(limits):
    effective = torch.linspace(-4, 3, 41, dtype=torch.float64).repeat(2, 1).requires_grad_()
    advantages = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    rho = tapered(effective, advantages, **limits)
    (slope,) = torch.autograd.grad(rho.sum(), effective)
    torch.testing.assert_close(slope, taper(effective.detach(), advantages, **limits))


@pytest.mark.parametrize("limits", LIMITS)
def test_the_objective_lies_below_the_ratio_and_touches_it_between_the_limits(limits):
    ratio = torch.linspace(0.01, 4, 400, dtype=torch.float64)
    for sign, low, high in (
        (1.0, limits["a_pos"], limits["b_pos"]),
        (-1.0, limits["a_neg"], limits["b_neg"]),
    ):
        rho = tapered(ratio.log(), ratio.new_tensor([sign]), **limits)
        inside = (ratio > low * (1 + 1e-9)) & (ratio < high * (1 - 1e-9))
        assert (rho[inside] - ratio[inside]).abs().le(1e-15).all()
        assert (rho[~inside] <= ratio[~inside] + 1e-15).all()
        assert rho.diff().diff().max() < 1e-12


def test_the_objective_is_finite_however_small_the_ratio():
    found = tapered(torch.tensor([-1e4, 1e4, -torch.inf]).double(), torch.tensor([-1.0]).double())
    assert found.tolist() == [0.0, 1 + 1e4, 0.0]
