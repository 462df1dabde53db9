"""Penalties in recursions over trees and in classes, against every group written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import assert_apart, assert_close, assert_zero
from problem_strategies import drawn, entry, typical

from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.correction import Correction, ratio, suffix, truncate
from windage.estimators.estimator import Estimator
from windage.estimators.member import declare, use
from windage.estimators.penalty import (
    entropy,
    loss_k1,
    loss_k2,
    loss_k3,
    loss_k3_weighted,
    overlong_shaping,
    positive_nll,
    reward_k1,
    reward_k2,
    reward_k3,
)
from windage.toy.behavior import with_behavior
from windage.toy.exact import prefix_tree
from windage.toy.exact.moments import Undefined
from windage.toy.exact.penalties import refusal
from windage.toy.exact.plan import exact, options, undefined
from windage.toy.objective import objective
from windage.toy.problems import Problem, normalize, token_tree, trajectories

IN_REWARDS = tuple(use(k, coefficient=0.3) for k in (reward_k1, reward_k2, reward_k3))
IN_LOSS = tuple(
    use(k, coefficient=0.3) for k in (loss_k1, loss_k2, loss_k3, loss_k3_weighted, entropy)
)
SHAPING = use(overlong_shaping, length=3, margin=2)
CORRECT = use(positive_nll, coefficient=0.2)
SETS = (
    *((p,) for p in (*IN_REWARDS, *IN_LOSS, SHAPING, CORRECT)),
    (IN_REWARDS[0], IN_LOSS[1], SHAPING),
    (IN_REWARDS[2], IN_LOSS[4], IN_LOSS[2]),
    (CORRECT, SHAPING, IN_REWARDS[1]),
)
NAMES = [
    name for name in CATALOGUE if CATALOGUE[name].advantage.traits.scope in ("response", "group")
]
SWEEPS, EACH = 5, 60


def with_reference(problem: Problem, seed: int) -> Problem:
    """The problem with a reference policy near its policy."""
    rng = np.random.default_rng(seed)
    moved = problem.logits + torch.from_numpy(rng.normal(size=problem.logits.shape))
    return replace(problem, reference_logp=normalize(moved))


def penalized(name: str, problem: Problem, number: int) -> Estimator:
    """An entry with one of the sets of penalties."""
    return replace(entry(name, problem), penalties=SETS[number % len(SETS)])


def outcome(estimator: Estimator, problem: Problem, group_size: int, engine: str) -> object:
    try:
        return exact(estimator, problem, group_size, engine)
    except Undefined as why:
        return str(why)


def compared(estimator: Estimator, problem: Problem, group_size: int) -> set[str]:
    """Engines of trees and classes that serve an estimator, each compared with the list."""
    listed = outcome(estimator, problem, group_size, "tuples")
    found = [o.engine for o in options(estimator, problem, group_size) if o.refusal is None]
    served = {"prefix_tree", "classes"} & set(found)
    for engine in served:
        moments = outcome(estimator, problem, group_size, engine)
        if isinstance(listed, str):
            assert moments == listed
            continue
        size = float((listed.variance + listed.mean.square().sum()).sqrt()) + 1e-3
        assert_zero(moments.mean - listed.mean, beside=size)
        assert_zero(moments.drift - listed.drift, beside=size + float(listed.drift.abs().max()))
        gap = float((moments.variance - listed.variance).abs())
        assert gap <= 1e-10 * float(listed.variance) + 1e-13 * size**2, f"{engine}: {gap}"
    return served


@pytest.mark.parametrize("sweep", range(SWEEPS))
def test_penalties_agree_with_the_list_on_generated_problems(sweep: int) -> None:
    """300 problems, every entry and every set of penalties."""
    served: dict[str, int] = {"prefix_tree": 0, "classes": 0}
    for number in range(sweep * EACH, (sweep + 1) * EACH):
        problem = with_reference(drawn(20_000 + number, leaves=9, prompts=(1, 1, 2)), number)
        group_size = 2 if problem.tree.leaves ** (2 * problem.prompts) <= 1000 else 1
        estimator = penalized(NAMES[number % len(NAMES)], problem, number)
        if undefined(estimator, problem, group_size):
            continue
        try:
            for engine in compared(estimator, problem, group_size):
                served[engine] += 1
        except AssertionError as why:
            raise AssertionError(f"{number}: {estimator.describe()}: {why}") from None
    assert min(served.values()) >= 8, served


@pytest.mark.parametrize("penalties", SETS, ids=lambda s: "+".join(p.name for p in s))
@pytest.mark.parametrize("name", ["rloo", "token_tis", "suffix_is", "centered_tis", "topr", "dapo"])
def test_each_penalty_moves_the_mean_and_both_engines_say_by_how_much(
    name: str, penalties: tuple[object, ...]
) -> None:
    problem = with_reference(typical(1, 3), 7)
    plain = replace(entry(name, problem), penalties=())
    estimator = replace(plain, penalties=penalties)  # type: ignore[arg-type]
    why = refusal(estimator)
    if why is None:
        served = compared(estimator, problem, 3)
        assert served == {"classes"} if name == "dapo" else {"classes", "prefix_tree"}
        moved = exact(estimator, problem, 3, "classes")
        unmoved = exact(plain, problem, 3, "classes")
        assert_apart(moved.variance, unmoved.variance, at_least=1e-4)
        assert_close(moved.drift, unmoved.drift)
    else:
        assert name in ("topr", "dapo") and "sign of the advantage" in why


@pytest.mark.parametrize("cap", [None, 1.2])
def test_a_suffix_ratio_collects_penalties_by_either_route(cap: float | None) -> None:
    """By factors a token where the map is the ratio, by pairs where it is truncated."""
    map_ = use(ratio) if cap is None else use(truncate, cap=cap)
    estimator = replace(
        get("rloo"),
        corrections=(Correction(reach=use(suffix), map=map_),),
        penalties=(IN_REWARDS[2], IN_LOSS[3]),
    )
    assert compared(estimator, with_reference(typical(1, 3), 3), 2) == {"classes", "prefix_tree"}


@pytest.mark.parametrize("penalties", [(), (IN_REWARDS[2], IN_LOSS[3])])
def test_a_suffix_ratio_by_pairs_equals_a_factor_a_token(
    monkeypatch: pytest.MonkeyPatch, penalties: tuple[object, ...]
) -> None:
    """Where products might leave float64 the pairs are taken; both give the same."""
    problem = with_reference(typical(2, 3), 3)
    estimator = replace(get("suffix_is"), penalties=penalties)  # type: ignore[arg-type]
    by_factor = exact(estimator, problem, 3, "prefix_tree")
    monkeypatch.setattr(prefix_tree, "MODERATE", -1.0)
    by_pairs = exact(estimator, replace(problem), 3, "prefix_tree")
    assert_close(by_pairs.mean, by_factor.mean)
    assert_close(by_pairs.variance, by_factor.variance)


def test_k1_in_the_reward_is_the_gradient_of_the_divergence() -> None:
    """On-policy the penalty's part of the mean is minus the gradient of KL(pi, ref)."""
    problem = with_reference(token_tree(4), 1)
    logits = problem.logits.clone().requires_grad_()
    on = problem.on_policy()
    table = torch.autograd.functional.jacobian(lambda z: divergence(z, on), logits)
    estimator = replace(get("rloo"), penalties=(use(reward_k1, coefficient=0.5),))
    found = exact(estimator, on, 4, "prefix_tree").mean
    assert_close(found, objective(on).gradient - 0.5 * table)


def divergence(logits: torch.Tensor, problem: Problem) -> torch.Tensor:
    """KL of whole responses from the policy to the reference."""
    assert problem.reference_logp is not None
    logp = logits.log_softmax(-1)
    prefixes, tokens = problem.tree.paths
    real = prefixes >= 0
    at, y = prefixes.clamp(min=0), tokens.clamp(min=0)
    ours = torch.where(real, logp[0][at, y], 0.0).sum(-1)
    theirs = torch.where(real, problem.reference_logp[0][at, y], 0.0).sum(-1)
    return (ours.exp() * (ours - theirs)).sum()


@declare("token", "mask", place="token_reward")
def toll(mask: torch.Tensor, *, coefficient: float = 0.1) -> torch.Tensor:
    """A price for every token."""
    return -coefficient * mask.double()


def test_forced_tokens_earn_as_well() -> None:
    problem = trajectories()
    estimator = replace(get("rloo"), penalties=(use(toll),))
    assert compared(estimator, problem, 2) == {"classes", "prefix_tree"}
    priced = replace(problem, rewards=problem.rewards - 0.1 * problem.lengths.double())
    first = exact(get("reinforce"), priced, 1, "prefix_tree").mean
    assert_close(
        exact(replace(estimator, advantage=get("reinforce").advantage), problem, 1).mean, first
    )


def test_shaping_merges_classes_and_outcomes_still_decide_which_groups_vary() -> None:
    problem = with_behavior(token_tree(4), "noise", sigma=0.4)
    shaped = get("dapo", length=4, margin=3)
    assert compared(replace(shaped, aggregation=get("rloo").aggregation), problem, 2) == {"classes"}
    other = replace(get("group_mean"), penalties=shaped.penalties)
    found = exact(other, problem, 8, "classes")
    assert_close(found.mean, exact(other, problem, 8, "prefix_tree").mean)
    assert_close(found.variance, exact(other, problem, 8, "prefix_tree").variance)


@declare("batch", "reference_ratio")
def wide(reference_ratio: torch.Tensor, *, coefficient: float = 0.1) -> torch.Tensor:
    return coefficient * (reference_ratio - reference_ratio.mean())


@declare("token", "advantages")
def paid(advantages: torch.Tensor, *, coefficient: float = 0.1) -> torch.Tensor:
    return coefficient * advantages


@pytest.mark.parametrize(
    ("penalties", "words"),
    [
        ((use(wide),), "looks beyond its own response"),
        ((use(paid),), "looks at more than its own token or response"),
        ((CORRECT, IN_LOSS[0]), "by token and by response"),
    ],
)
def test_what_no_recursion_holds_is_refused_with_the_reason(
    penalties: tuple[object, ...], words: str
) -> None:
    estimator = replace(get("rloo"), penalties=penalties)  # type: ignore[arg-type]
    problem = with_reference(typical(1, 2), 0)
    found = {o.engine: str(o.refusal) for o in options(estimator, problem, 2)}
    assert words in found["prefix_tree"] and words in found["classes"]


def test_of_two_responses_penalties_meet_the_siblings_rewards() -> None:
    """The cross term of two responses is in the variance: it vanishes for a constant baseline."""
    problem = with_reference(typical(2, 2), 5)
    loss = (IN_LOSS[0],)
    for name in ("rloo", "group_mean", "reinforce"):
        estimator = replace(get(name), penalties=loss)
        for group_size in (2, 3):
            tree = exact(estimator, problem, group_size, "prefix_tree")
            listed = exact(estimator, problem, group_size, "compositions")
            assert_close(tree.variance, listed.variance)
            assert_close(tree.mean, listed.mean)
