"""The planner: the cheapest valid engine, and a reason a reader can use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, refused
from problem_strategies import typical

from windage.estimators.admission import veto, zero_variance
from windage.estimators.advantage import batch_std
from windage.estimators.catalogue import CATALOGUE, FIRST, get
from windage.estimators.correction import Correction, ratio, token, trajectory, truncate
from windage.estimators.member import Member, use
from windage.estimators.penalty import entropy, overlong_shaping
from windage.toy.behavior import with_behavior
from windage.toy.chains import reasoning
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import (
    BUDGET,
    FIRST_PASS,
    OPTIONS,
    consider,
    exact,
    options,
    plan,
    seeded,
    undefined,
)
from windage.toy.problems import Problem, Tree, make

SERVES = {
    "prefix_tree": {
        "reinforce",
        "topr",
        "positives_only",
        "naive",
        "tis_both_signs",
        "rloo",
        "group_mean",
        "trajectory_is",
        "token_is",
        "prefix_is",
        "suffix_is",
        "token_tis",
        "sequence_tis",
        "centered",
        "centered_tis",
        "centered_mask",
        "starting_point",
    },
    "classes": {"grpo", "gspo", "dr_grpo", "cispo", "icepop", "dapo"},
}


def many(arms: int = 60, group: int = 1) -> Problem:
    """A bandit whose rewards are all distinct."""
    tree = Tree(arms, None, 1)
    rewards = torch.arange(arms).double()[None]
    return make("many", tree, torch.zeros(1, 1, arms), rewards)


@pytest.mark.parametrize("engine", SERVES)
def test_each_entry_gets_the_engine_of_the_specification(engine: str) -> None:
    problem = typical(2)
    for name in SERVES[engine]:
        assert plan(get(name), problem, 4).engine == engine, name
    assert set().union(*SERVES.values()) == {e.name for e in FIRST} - {"ppo"}


def test_the_choice_is_the_cheapest_that_is_valid() -> None:
    for name in CATALOGUE:
        if name == "ppo":
            continue
        valid = [o for o in options(get(name), typical(), 3) if o.refusal is None]
        assert plan(get(name), typical(), 3).engine == min(valid, key=lambda o: o.cost).engine


def test_costs_grow_with_group_size_only_where_groups_are_listed() -> None:
    def costs(group_size: int) -> dict[str, float]:
        return {o.engine: o.cost for o in options(get("rloo"), typical(), group_size)}

    small, large = costs(2), costs(6)
    assert small["prefix_tree"] == large["prefix_tree"]
    for engine in ("classes", "compositions", "tuples"):
        assert small[engine] < large[engine]


def test_many_distinct_rewards_are_refused_with_the_size_and_the_limit() -> None:
    problem = many()
    found = {o.engine: o.refusal for o in options(get("grpo"), problem, 64)}
    assert "would touch" in found["classes"] and f"{BUDGET:.0e}" in found["classes"]
    assert "would touch" in found["tuples"] and "e+116" in found["tuples"]
    huge = {o.engine: o.refusal for o in options(get("grpo"), many(), 10_000)}
    assert "would touch inf numbers" in huge["tuples"]
    assert plan(get("grpo"), problem, 64).engine == "coupled"
    chosen = plan(get("dapo"), problem, 64)
    assert chosen.engine == "sampling"
    found = {o.engine: o.refusal for o in options(get("dapo"), problem, 64)}
    assert set(found) == set(OPTIONS) - {"transfer"}
    for engine, why in found.items():
        assert f"{engine}: {why}" in chosen.reason
    with refused("engine classes is not valid", "would touch", error=Undefined):
        exact(get("grpo"), problem, 64, "classes")


def test_many_distinct_rewards_are_no_trouble_where_the_advantage_is_affine() -> None:
    assert plan(get("rloo"), many(), 64).engine == "prefix_tree"
    assert exact(get("rloo"), many(), 64, "prefix_tree").variance > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grpo", "group_std is not affine in the rewards"),
        ("dr_grpo", "clip looks at the sign of a group advantage"),
        ("cispo", "token_mean couples responses"),
        ("dapo", "token_mean couples responses"),
    ],
)
def test_reasons_name_the_member_that_stands_in_the_way(name: str, words: str) -> None:
    found = {o.engine: o.refusal for o in options(get(name), typical(), 3)}
    assert found["prefix_tree"] == words
    assert found["tuples"] is None


def test_refilled_groups_are_refused_by_the_tree() -> None:
    filtered = replace(get("rloo"), admission=(use(zero_variance),))
    found = {o.engine: o.refusal for o in options(filtered, typical(), 3)}
    assert found["prefix_tree"] == "admission is by group"
    assert_close(
        exact(filtered, typical(1, 2), 3, "classes").mean,
        exact(filtered, typical(1, 2), 3, "tuples").mean,
    )


def test_what_recursions_would_leave_out_is_listed_instead() -> None:
    estimator = replace(get("rloo"), admission=(use(veto, low=0.8),))
    problem = typical(1, 2)
    found = {o.engine: o.refusal for o in options(estimator, problem, 2)}
    assert found["prefix_tree"] is not None and found["classes"] is not None
    assert plan(estimator, problem, 2).engine == "compositions"


@pytest.mark.parametrize(
    "penalty", [use(entropy, coefficient=0.1), use(overlong_shaping, length=3)]
)
def test_the_automaton_knows_no_penalties(penalty: Member) -> None:
    chain = reasoning(8)
    found = consider("transfer", replace(get("rloo"), penalties=(penalty,)), chain, 2).refusal
    assert f"{penalty.name} changes rewards or coefficients" in str(found)


def test_statistics_of_the_batch_are_listed() -> None:
    """No recursion knows them: prompts are coupled through the deviation."""
    estimator = replace(get("group_mean"), advantage=use(batch_std))
    problem = typical(2, 1)
    assert "couples prompts" in str({o.engine: o.refusal for o in options(estimator, problem, 2)})
    assert plan(estimator, problem, 2).engine == "compositions"
    assert_close(
        exact(estimator, problem, 2, "compositions").variance,
        exact(estimator, problem, 2, "tuples").variance,
    )


@pytest.mark.parametrize(
    ("estimator", "group_size", "words"),
    [
        (get("ppo"), 4, "needs values"),
        (get("grpo", coefficient=0.04), 4, "needs a reference policy"),
        (get("rloo"), 1, "group 0 has size 1; rloo needs groups of at least 2"),
    ],
)
def test_what_has_no_meaning_is_undefined_with_the_reason(
    estimator: object, group_size: int, words: str
) -> None:
    assert words in str(undefined(estimator, typical(), group_size))  # type: ignore[arg-type]
    with refused(words, error=Undefined):
        exact(estimator, typical(), group_size, "tuples")  # type: ignore[arg-type]


def test_without_a_proximal_policy_the_policy_stands_in_and_the_plan_says_so() -> None:
    decoupled = replace(
        get("rloo"),
        corrections=(Correction(reach=use(token), map=use(ratio), numerator="proximal_logp"),),
    )
    problem = typical()
    assert undefined(decoupled, problem, 2) is None
    assert FIRST_PASS in plan(decoupled, problem, 2).reason
    assert FIRST_PASS not in plan(get("token_is"), problem, 2).reason
    given = replace(problem, proximal_logp=problem.behavior_logp)
    assert FIRST_PASS not in plan(decoupled, given, 2).reason
    for engine in ("prefix_tree", "tuples"):
        found = exact(decoupled, problem, 2, engine)
        assert_close(found.mean, exact(get("token_is"), problem, 2, engine).mean)
        assert_close(
            exact(decoupled, given, 2, engine).mean, exact(get("rloo"), problem, 2, engine).mean
        )
        assert_apart(found.mean, exact(decoupled, given, 2, engine).mean)


def test_a_chain_is_its_own_proximal_policy() -> None:
    chain = with_behavior(reasoning(8), "noise", sigma=0.3)
    decoupled = tuple(
        Correction(reach=use(token), map=use(truncate, cap=1.1), numerator=n, denominator=d)
        for n, d in (("proximal_logp", "behavior_logp"), ("logp", "proximal_logp"))
    )
    found = exact(replace(get("rloo"), corrections=decoupled), chain, 4)
    same = exact(get("token_tis", cap=1.1), chain, 4)
    assert_close(found.mean, same.mean)
    assert_close(found.variance, same.variance)


@pytest.mark.parametrize("name", ["reinforce", "topr", "positives_only", "naive", "tis_both_signs"])
def test_groups_of_one_are_fine_where_responses_are_not_compared(name: str) -> None:
    problem = typical(1, 2)
    one = exact(get(name), problem, 1, "prefix_tree")
    assert_close(one.mean, exact(get(name), problem, 1, "tuples").mean)
    assert_close(one.variance, exact(get(name), problem, 1, "compositions").variance)


def test_an_engine_that_does_not_exist_is_undefined() -> None:
    with refused("engine sampling does not serve rloo", error=Undefined):
        exact(get("rloo"), typical(), 2, "sampling")
    with refused("engine coupled is not valid: no ratio couples", error=Undefined):
        exact(get("rloo"), typical(), 2, "coupled")


@pytest.mark.parametrize("engine", ["prefix_tree", "compositions"])
def test_a_ratio_beyond_float64_is_undefined_not_nan(engine: str) -> None:
    """A sampler's probability of 1e-320 against 1/2: the ratio is e^736, which overflows."""
    tree = Tree(2, None, 1)
    behavior = torch.tensor([[[0.0, -736.0]]])
    problem = make("far", tree, torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]]), behavior=behavior)
    ratio_ = replace(
        get("reinforce"), corrections=(Correction(reach=use(trajectory), map=use(ratio)),)
    )
    with refused("overflows float64", error=Undefined):
        exact(ratio_, problem, 1, engine)
    for name in ("topr", "token_tis", "naive"):
        assert exact(get(name), problem, 2, engine).variance.isfinite()


@pytest.mark.parametrize("engine", ["prefix_tree", "compositions"])
@pytest.mark.parametrize(("gap", "fits"), [(350.0, True), (360.0, False)])
def test_second_moments_hold_ratios_up_to_1e154(engine: str, gap: float, fits: bool) -> None:
    """The square of e^350 fits in float64, that of e^360 does not."""
    tree = Tree(2, None, 1)
    behavior = torch.tensor([[[0.0, -gap]]])
    problem = make("far", tree, torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]]), behavior=behavior)
    weighted = replace(get("reinforce"), corrections=get("token_is").corrections)
    if fits:
        found = exact(weighted, problem, 1, engine)
        assert_close(found.mean, torch.tensor([[[-0.25, 0.25]]]))
        assert 1e140 < float(found.variance) < 1e160
    else:
        with refused("overflows float64", error=Undefined):
            exact(weighted, problem, 1, engine)


def test_variance_is_never_negative() -> None:
    problem = make("flat", Tree(3, 1, 3), torch.zeros(1, 7, 3), torch.full((1, 15), 0.1))
    for name in SERVES["prefix_tree"] | SERVES["classes"] - {"dapo"}:
        estimator = get(name)
        if "length" in estimator.settings and name != "dapo":
            estimator = estimator.change(length=3.0)
        assert exact(estimator, problem, 3, plan(estimator, problem, 3).engine).variance >= 0


def test_generators_of_equal_seeds_draw_the_same() -> None:
    a, b = (torch.rand(3, generator=seeded(7)) for _ in range(2))
    assert torch.equal(a, b)
