"""Behavior policies: each kind by what it is, how it relates to its siblings, and its limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from checks import assert_apart, assert_close, refused
from problem_strategies import drawn, typical

from windage.estimators.errors import BadInput
from windage.toy.behavior import KINDS, with_behavior
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make, normalize, token_tree

PROBLEMS = [drawn(n, leaves=12) for n in (2, 3, 8, 14, 27)] + [token_tree(3)]
IDENTITIES = {
    "stale": {"steps": 0},
    "noise": {"sigma": 0.0},
    "bits": {"b": 52},
    "temperature": {"t": 1.0},
    "top_k": {"k": 4},
    "top_p": {"p": 1.0},
    "mixed": {"steps": 0},
}
OTHERS = {
    "stale": {"steps": 3, "rate": 2.0},
    "noise": {"sigma": 0.5},
    "bits": {"b": 1},
    "temperature": {"t": 2.0},
    "top_k": {"k": 1},
    "top_p": {"p": 0.3},
    "mixed": {"steps": 3, "rate": 2.0},
}


def gap(problem: Problem, kind: str, **settings: float) -> float:
    """Largest difference of probabilities between sampler and policy."""
    behavior = with_behavior(problem, kind, **settings).behavior_logp.exp()
    return float((behavior - problem.logp.exp()).abs().max())


def coin(*logits: float) -> Problem:
    tree = Tree(len(logits), None, 1)
    return make(
        "coin",
        tree,
        torch.tensor([[logits]], dtype=torch.float64),
        torch.arange(len(logits)).double()[None],
    )


def test_tables_cover_every_kind() -> None:
    assert set(IDENTITIES) == set(OTHERS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_rows_are_distributions(problem: Problem, kind: str) -> None:
    behavior = with_behavior(problem, kind, **OTHERS[kind]).behavior_logp
    assert behavior.shape == problem.logits.shape
    assert not behavior.isnan().any()
    assert_close(behavior.exp().sum(-1), torch.ones(behavior.shape[:-1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_one_setting_of_each_kind_changes_nothing(problem: Problem, kind: str) -> None:
    assert gap(problem, kind, **IDENTITIES[kind]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings_change_something(kind: str) -> None:
    assert gap(token_tree(3), kind, **OTHERS[kind]) > 1e-3


def test_identity_holds_where_probabilities_underflow() -> None:
    problem = coin(800.0, 0.0, -800.0)
    for kind in ("top_p", "top_k", "temperature", "stale"):
        assert gap(problem, kind, **IDENTITIES[kind]) == 0.0


def test_stale_steps_back_down_the_gradient() -> None:
    problem = typical(3, 2)
    logits = problem.logits
    for _ in range(2):
        now = replace(problem, logits=logits)
        logits = logits - 0.5 * objective(now).gradient
    found = with_behavior(problem, "stale", steps=2, rate=0.5).behavior_logp
    assert_close(found, normalize(logits))


def test_stale_is_an_ascent_that_arrives_at_the_policy_up_to_second_order() -> None:
    """Ascending `steps` times from the stale logits misses the policy by O(rate^2)."""
    problem = token_tree(3)
    misses = []
    for rate in (0.2, 0.1, 0.05):
        behind = with_behavior(problem, "stale", steps=2, rate=rate)
        logits = problem.logits
        for _ in range(2):
            logits = logits - rate * objective(replace(problem, logits=logits)).gradient
        for _ in range(2):
            logits = logits + rate * objective(replace(problem, logits=logits)).gradient
        misses.append(float((logits - problem.logits).norm()))
        assert (
            objective(replace(problem, logits=behind.behavior_logp)).value
            < objective(problem).value
        )
    for wide, narrow in pairwise(misses):
        assert 3.5 < wide / narrow < 4.5


def test_stale_moves_in_proportion_to_steps_times_rate() -> None:
    problem = token_tree(3)
    one = gap(problem, "stale", steps=1, rate=1e-3)
    assert_close(gap(problem, "stale", steps=4, rate=1e-3) / one, 4.0, relative=1e-2)
    assert_close(gap(problem, "stale", steps=1, rate=4e-3) / one, 4.0, relative=1e-2)


def test_prompts_are_steps_of_their_own() -> None:
    """Each prompt is as far behind as alone, at its share of the mean over prompts."""
    problem = typical(3, 2)
    for kind in KINDS:
        if kind == "noise":
            continue
        whole = with_behavior(problem, kind, **OTHERS[kind]).behavior_logp
        own = {k: v / problem.prompts if k == "rate" else v for k, v in OTHERS[kind].items()}
        alone = with_behavior(problem.select(1), kind, **own).behavior_logp
        assert_close(whole[1:2].exp(), alone.exp())


def test_noise_is_normal_with_the_stated_deviation_and_reproducible() -> None:
    problem = coin(*([0.0] * 4000))
    drawn_ = with_behavior(problem, "noise", sigma=0.3, seed=1).behavior_logp
    again = with_behavior(problem, "noise", sigma=0.3, seed=1).behavior_logp
    other = with_behavior(problem, "noise", sigma=0.3, seed=2).behavior_logp
    assert torch.equal(drawn_, again)
    assert_apart(drawn_, other)
    # chi-squared of 3,999 degrees: 4.4 deviations, false alarm below 1e-5
    assert abs(float(drawn_.std()) / 0.3 - 1) < 0.05


def test_bits_round_to_levels_between_the_extremes() -> None:
    problem = coin(0.0, 0.4, 0.6, 1.0)
    one = with_behavior(problem, "bits", b=1).behavior_logp[0, 0]
    assert_close(one - one[0], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    for b in (1, 2, 4, 8, 12):
        levels = with_behavior(token_tree(3), "bits", b=b).behavior_logp
        step = float(token_tree(3).logits.max() - token_tree(3).logits.min()) / (2**b - 1)
        moved = levels - token_tree(3).logits
        assert (moved - moved.mean(-1, keepdim=True)).abs().max() <= step + 1e-12


def test_bits_keep_equal_logits_equal() -> None:
    assert gap(coin(2.0, 2.0, 2.0), "bits", b=1) < 1e-15


def test_temperature_multiplies_logits() -> None:
    problem = coin(0.0, 1.0, 3.0)
    hot = with_behavior(problem, "temperature", t=2.0).behavior_logp[0, 0]
    assert_close(hot - hot[0], torch.tensor([0.0, 0.5, 1.5]))
    cold = with_behavior(problem, "temperature", t=1e-3).behavior_logp.exp()[0, 0]
    assert_close(cold, torch.tensor([0.0, 0.0, 1.0]))


def test_top_k_keeps_the_likeliest_and_breaks_ties_by_id() -> None:
    problem = coin(0.0, 1.0, 1.0, -1.0)
    kept = [
        (with_behavior(problem, "top_k", k=k).behavior_logp[0, 0] > -torch.inf).nonzero().flatten()
        for k in (1, 2, 3, 9)
    ]
    assert [k.tolist() for k in kept] == [[1], [1, 2], [0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize(("kind", "settings"), [("top_k", {"k": 100}), ("top_p", {"p": 0.0999})])
def test_ties_go_to_the_lower_ids_of_a_long_vocabulary(
    kind: str, settings: dict[str, float]
) -> None:
    found = with_behavior(coin(*([0.0] * 1000)), kind, **settings).behavior_logp[0, 0]
    assert (found > -torch.inf).nonzero().flatten().tolist() == list(range(100))


def test_top_k_keeps_the_ratios_of_what_it_keeps() -> None:
    problem = coin(0.0, 1.0, 2.0)
    found = with_behavior(problem, "top_k", k=2).behavior_logp[0, 0]
    assert_close(found[2] - found[1], 1.0)


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (0.1, [0]),
        (0.49, [0]),
        (0.51, [0, 1]),
        (0.81, [0, 1]),
        (0.82, [0, 1, 2]),
        (1.0, [0, 1, 2]),
    ],
)
def test_top_p_keeps_up_to_the_token_that_reaches_the_mass(p: float, kept: list[int]) -> None:
    problem = coin(*torch.log(torch.tensor([8.0, 5.0, 3.0], dtype=torch.float64)).tolist())
    found = with_behavior(problem, "top_p", p=p).behavior_logp[0, 0]
    assert (found > -torch.inf).nonzero().flatten().tolist() == kept


def test_top_p_breaks_ties_by_id() -> None:
    found = with_behavior(coin(0.0, 0.0, 0.0, 0.0), "top_p", p=0.4).behavior_logp[0, 0]
    assert (found > -torch.inf).tolist() == [True, True, False, False]


def test_mixed_goes_from_the_oldest_version_to_the_current_one() -> None:
    problem = token_tree(3)
    found = with_behavior(problem, "mixed", steps=2, rate=1.0).behavior_logp
    for t, lag in enumerate((2, 1, 0)):
        level = problem.tree.level(t)
        behind = with_behavior(problem, "stale", steps=lag, rate=1.0).behavior_logp
        assert_close(found[:, level], behind[:, level])


def test_mixed_of_one_token_is_stale() -> None:
    problem = coin(0.0, 1.0)
    stale = with_behavior(problem, "stale", steps=3, rate=0.5).behavior_logp
    assert torch.equal(with_behavior(problem, "mixed", steps=3, rate=0.5).behavior_logp, stale)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("stale", {"steps": -1}, "steps is -1"),
        ("mixed", {"steps": -2}, "steps is -2"),
        ("noise", {"sigma": -0.1}, "sigma is -0.1"),
        ("bits", {"b": 0}, "b is 0"),
        ("bits", {"b": 53}, "b is 53"),
        ("temperature", {"t": 0.0}, "t is 0"),
        ("top_k", {"k": 0}, "k is 0"),
        ("top_p", {"p": 0.0}, "p is 0"),
        ("top_p", {"p": 1.1}, "p is 1.1"),
    ],
)
def test_settings_outside_their_range_are_bad_input(
    kind: str, settings: dict[str, float], words: str
) -> None:
    with refused(words, "allowed", error=BadInput):
        with_behavior(coin(0.0, 1.0), kind, **settings)


def test_unknown_kind_names_the_nearest() -> None:
    with refused("stael", "stale", error=BadInput):
        with_behavior(coin(0.0, 1.0), "stael")
