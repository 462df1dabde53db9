"""Deviations and gates by sign over many rewards: against enumeration, classes and other laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, refused
from problem_strategies import drawn, entry

from windage.estimators.admission import zero_variance
from windage.estimators.advantage import group_mean, leave_one_out
from windage.estimators.aggregation import token_sum
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.toy.exact.coupled import gated, spread
from windage.toy.exact.coupled.by_reward import ByReward
from windage.toy.exact.coupled.quadrature import laplace, root_density, square_density
from windage.toy.exact.coupled.sums import Lattice, Listed, Tilted, Waves, common
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.plan import consider, exact, plan
from windage.toy.problems import Problem, Tree, make

AGREE = 1e-9


def arms(count: int, *, seed: int = 0, decimals: int | None = None, kinds: int = 0) -> Problem:
    """A bandit with a noisy sampler and normal rewards, rounded or repeated if so wished."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise, rewards = torch.randn((3, 1, count), generator=generator, dtype=torch.float64)
    if decimals is not None:
        rewards = (rewards * 10**decimals).round() / 10**decimals
    if kinds:
        rewards = rewards[:, torch.arange(count) % kinds]
    behavior = (logits + 0.5 * noise).unsqueeze(0)
    return make("arms", Tree(count, None, 1), logits.unsqueeze(0), rewards, behavior=behavior)


def ungated(**settings: float) -> Estimator:
    """A group deviation under a weight that does not look at the sign."""
    plain = replace(get("grpo"), corrections=get("token_tis").corrections)
    return plain.change(**settings)


def same(found: Moments, other: Moments, *, relative: float = AGREE) -> None:
    assert_close(found.mean, other.mean, relative=relative)
    assert_close(found.variance, other.variance, relative=relative)
    assert_close(found.drift, other.drift, relative=relative)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-4, 0.1, 50.0])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_deviations_equal_enumeration(eps: float, ddof: int, group_size: int) -> None:
    problem = arms(6)
    for estimator in (ungated(eps=eps, ddof=ddof), get("grpo", eps=eps, ddof=ddof)):
        other = exact(estimator, problem, group_size, "compositions")
        found = exact(estimator, problem, group_size, "coupled")
        same(found, other, relative=1e-11 if eps < 1 else AGREE)
        changed = exact(estimator.change(ddof=1 - ddof), problem, group_size, "coupled")
        assert_apart(changed.mean, other.mean) if eps < 1 else None


@pytest.mark.parametrize("number", range(0, 60, 3))
def test_generated_problems_equal_enumeration(number: int) -> None:
    """Trees and bandits, several prompts, every kind of sampler; own corrections of every reach."""
    problem = drawn(number, leaves=8)
    reaches = ("suffix_is", "trajectory_is", "gspo", "centered_tis", "icepop", "topr")
    other = replace(
        ungated(),
        corrections=get(reaches[number % 6]).corrections,
        centering=get(reaches[number % 6]).centering,
        aggregation=(get("grpo").aggregation, use(token_sum))[number % 2],
    )
    gate = replace(entry("dr_grpo", problem), advantage=use(leave_one_out))
    for estimator in (other, entry("grpo", problem), entry("dr_grpo", problem), gate):
        listed = exact(estimator, problem, 3, "classes")
        same(exact(estimator, problem, 3, "coupled"), listed)


@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "ungated"])
def test_large_groups_of_few_rewards_equal_classes(name: str, group_size: int) -> None:
    problem = arms(30, kinds=3)
    estimator = ungated() if name == "ungated" else entry(name, problem)
    same(
        exact(estimator, problem, group_size, "coupled"),
        exact(estimator, problem, group_size, "classes"),
    )


def test_rare_groups_that_vary_keep_their_digits() -> None:
    """All but 1e-9 of the mass on one reward: what varies is not lost beside what does not."""
    logits = torch.tensor([[[0.0, -21.0, -22.0]]])
    problem = make("rare", Tree(3, None, 1), logits, torch.tensor([[0.3, 1.0, -0.5]]))
    for estimator in (ungated(), get("grpo")):
        found = exact(estimator, problem, 4, "coupled")
        other = exact(estimator, problem, 4, "classes")
        assert_close(found.mean * 1e9, other.mean * 1e9, relative=1e-9)
        assert_close(found.variance * 1e9, other.variance * 1e9, relative=1e-6)


def test_rewards_that_differ_by_rounding_are_one() -> None:
    logits = torch.zeros(1, 1, 3)
    apart = make("sum", Tree(3, None, 1), logits, torch.tensor([[0.3, 0.1 + 0.2, 1.0]]).double())
    rewards = torch.tensor([[0.3, 0.3, 1.0]], dtype=torch.float64)
    rewards[0, 1] += 6e-17
    noisy = replace(apart, rewards=rewards)
    one = replace(apart, rewards=torch.tensor([[0.3, 0.3, 1.0]], dtype=torch.float64))
    same(exact(ungated(), noisy, 3, "coupled"), exact(ungated(), one, 3, "classes"))


def test_equal_rewards_give_nothing_but_drift() -> None:
    problem = replace(arms(5), rewards=torch.full((1, 5), 0.7, dtype=torch.float64))
    for estimator in (ungated(), get("grpo"), get("dr_grpo", length=1.0)):
        found = exact(estimator, problem, 4, "coupled")
        assert found.mean.abs().max() == 0 and found.variance == 0 and found.drift.norm() > 0
    refill = replace(ungated(), admission=(use(zero_variance),))
    with refused("degenerate", error=Undefined):
        exact(refill, problem, 4, "coupled")


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_degenerate_groups_drawn_again(group_size: int) -> None:
    problem = arms(12, kinds=3)
    for plain in (ungated(), get("grpo")):
        estimator = replace(plain, admission=(use(zero_variance),))
        found = exact(estimator, problem, group_size, "coupled")
        same(found, exact(estimator, problem, group_size, "classes"))


def test_a_thousand_rewards_in_groups_of_64_settle_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No listing reaches this: nodes twice as dense give the same digits."""
    problem = arms(1000)
    found = exact(ungated(), problem, 64, "coupled")
    monkeypatch.setattr(spread, "PITCH", 0.3)
    monkeypatch.setattr(spread, "laplace", lambda low, high: laplace(low, high, step=0.12))
    same(exact(ungated(), problem, 64, "coupled"), found, relative=1e-11)


def test_pairs_of_many_rewards_equal_the_list_of_pairs() -> None:
    """G = 2: the advantage is plus or minus 1 / (sqrt 2 + eps / |gap|) whatever the rewards."""
    problem = arms(40)
    for estimator in (ungated(), get("grpo")):
        same(exact(estimator, problem, 2, "coupled"), exact(estimator, problem, 2, "classes"))


@pytest.mark.parametrize("unit", [0.1, 1 / 3, 2.0])
def test_lattices_are_found_and_others_are_not(unit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 1000, (30,), generator=generator).unique().double()
    found = common(0.7 + unit * places)
    assert found is not None and abs(found / unit - 1) < 1e-12
    assert common(torch.randn(30, generator=generator, dtype=torch.float64).sort().values) is None


def tilted(problem: Problem, siblings: int) -> tuple[torch.Tensor, Tilted]:
    prompt = ByReward(get("grpo"), problem, None)
    r, generator = prompt.rewards, torch.Generator().manual_seed(1)
    own = torch.rand((3, len(r)), generator=generator, dtype=torch.float64)
    weights = torch.rand((2, 3), generator=generator, dtype=torch.float64)
    law = prompt.mass * own
    return r, Tilted(law=law, own=own, weights=weights, siblings=siblings)


@pytest.mark.parametrize("siblings", [0, 1, 2, 4])
def test_lattice_and_list_are_the_same_law(siblings: int) -> None:
    r, nodes = tilted(arms(12, decimals=1), siblings)
    unit = common(r)
    assert unit is not None
    every = slice(0, len(r))
    one = Lattice(rewards=r, unit=unit).tables(nodes, every)
    other = Listed(rewards=r).tables(nodes, every)
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, relative=1e-12)


def test_waves_tend_to_the_same_law_and_say_how_near_they_are() -> None:
    r, nodes = tilted(arms(60), 4)
    every, half = slice(0, len(r)), 12 * float(r[-1] - r[0])
    listed = Listed(rewards=r).tables(nodes, every)
    gaps, cuts = [], []
    for modes in (512, 16384):
        waves = Waves(rewards=r, half=half, modes=2 * torch.arange(modes) + 1)
        gaps.append(float((waves.tables(nodes, every) - listed).abs().max() / listed.abs().max()))
        cuts.append(float(waves.sizes(nodes)[modes // 2 :].norm()) / half)
    assert gaps[1] < 1e-8 and gaps[1] < gaps[0] / 30
    assert cuts[1] < 1e-8 and cuts[1] < cuts[0] / 30


def test_gates_over_many_rewards_agree_between_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 rewards to two digits in groups of 16: a lattice against waves that do not know it."""
    problem = arms(120, decimals=2)
    estimator = get("dr_grpo", length=1.0)
    found = exact(estimator, problem, 16, "coupled")
    monkeypatch.setattr(gated, "common", lambda rewards: None)
    same(exact(estimator, problem, 16, "coupled"), found, relative=3e-8)
    same(
        exact(replace(estimator, advantage=use(group_mean)), problem, 16, "coupled"),
        found,
        relative=3e-8,
    )


@pytest.mark.parametrize(("count", "group_size"), [(40, 24), (30, 64)])
def test_a_gate_that_never_closes_is_no_gate(count: int, group_size: int) -> None:
    """By waves and lists over signs against one integral without them."""
    problem = arms(count)
    open_ = get("grpo", clip_low=1.0, clip_high=1e6)
    plain = replace(open_, corrections=get("token_is").corrections)
    found = exact(open_, problem, group_size, "coupled")
    same(found, exact(plain, problem, group_size, "coupled"))
    closed = exact(get("grpo", clip_low=0.1), problem, group_size, "coupled")
    assert_apart(closed.mean, found.mean)


def test_a_lattice_with_noise_is_no_smooth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its characteristic function comes back far behind the first modes."""
    problem = arms(60, decimals=2)
    monkeypatch.setattr(gated, "common", lambda rewards: None)
    with refused("multiples of one number", error=Undefined):
        exact(get("grpo"), problem, 16, "coupled")


def test_a_sum_that_is_neither_listed_nor_smooth_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gated, "LIST", 0.0)
    monkeypatch.setattr(gated, "WORK", 0.0)
    monkeypatch.setattr(gated, "MODES", 64)
    with refused("not smooth", "leave an error of about", error=Undefined):
        exact(get("dr_grpo", length=1.0), arms(5), 9, "coupled")


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1, 3.0])
def test_quotients_by_a_root_are_mixtures(eps: float) -> None:
    values = torch.logspace(-8, 0, 100, dtype=torch.float64)
    t, weights = laplace(1e-8, max(1.0, eps**2))
    table = torch.exp(-values.unsqueeze(1) * t)
    expected = 1 / (values.sqrt() + eps)
    assert_close(
        table @ (weights * root_density(t, eps)) / expected, torch.ones(100), relative=1e-12
    )
    squares = table @ (weights * square_density(t, eps)) / expected.square()
    assert_close(squares, torch.ones(100), relative=1e-12)


def test_the_planner_takes_it_where_classes_are_too_many() -> None:
    problem = arms(200)
    assert plan(ungated(), problem, 16).engine == "coupled"
    assert plan(get("dr_grpo", length=1.0), problem, 16).engine == "coupled"
    assert plan(get("grpo"), arms(200, kinds=2), 16).engine == "classes"
    cost = [consider("coupled", ungated(), problem, g).cost for g in (16, 64, 1024)]
    assert max(cost) < 4 * min(cost), "the cost is free of the group size up to logarithms"
    why = consider("coupled", get("rloo"), problem, 16).refusal
    assert why == "no ratio couples the responses"
