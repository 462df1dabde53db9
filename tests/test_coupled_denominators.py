"""Denominators that responses share: against listing, against closed forms, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import assert_apart, assert_close, assert_unbiased
from problem_strategies import drawn, typical
from test_engines_agree import same
from torch import Tensor

from windage.estimators.advantage import (
    constant,
    group_mean,
    group_std,
    leave_one_out,
)
from windage.estimators.aggregation import (
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
)
from windage.estimators.baselines import length_weighted, length_weighted_apart
from windage.estimators.catalogue import get
from windage.estimators.correction import Correction, band, clip, ratio, token, trajectory, truncate
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.reaches import over_batch, over_group, token_over_batch
from windage.toy.behavior import with_behavior
from windage.toy.exact.coupled import apart, siblings, tilted, tokens
from windage.toy.exact.coupled.engine import NOTHING, option
from windage.toy.exact.coupled.quadrature import laplace
from windage.toy.exact.coupled.shared import Powers, Prompt, nodes_of
from windage.toy.exact.coupled.siblings import Siblings, Sums
from windage.toy.exact.coupled.tilted import Tilt
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.plan import consider, exact, plan
from windage.toy.exact.tuples import count_multisets
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem, Tree, bandit, make, token_tree

EACH = 24


def composed(advantage: Any, aggregation: Any, *corrections: Correction, **of: Any) -> Estimator:
    return replace(
        get("rloo"),
        advantage=use(advantage),
        aggregation=use(aggregation, **of),
        corrections=corrections or (Correction(reach=use(token), map=use(truncate)),),
    )


def relative(reach: Any, *rest: Correction, **settings: Any) -> tuple[Correction, ...]:
    return Correction(reach=use(reach, **settings), map=use(ratio)), *rest


CLIP = Correction(reach=use(token), map=use(clip))
KEPT = Correction(reach=use(token), map=use(band))
COUPLED: dict[str, Estimator] = {
    "cispo": get("cispo"),
    "icepop": get("icepop"),
    "dapo": get("dapo"),
    "own advantage, sign read, token mean": composed(constant, token_mean, CLIP),
    "many rewards, prompt mean": composed(leave_one_out, prompt_mean),
    "clip, prompt mean": composed(group_mean, prompt_mean, CLIP),
    "weights over the group": composed(leave_one_out, token_sum, *relative(over_group)),
    "capped weights over the batch": composed(
        group_mean, sequence_mean, *relative(over_batch, KEPT, cap=1.5)
    ),
    "weights and group std": composed(group_std, token_sum, *relative(over_group, cap=3.0)),
    "weights and a clip": composed(
        group_mean, constant_length, *relative(over_batch, CLIP), length=7.0
    ),
    "own advantage over weights": composed(constant, token_sum, *relative(over_batch, CLIP)),
    "weights of tokens": composed(leave_one_out, token_mean, *relative(token_over_batch, cap=2.0)),
    "by length": composed(length_weighted, token_sum),
    "by length, sequence mean": composed(length_weighted, sequence_mean),
    "by length, token mean": composed(length_weighted, token_mean),
    "by length, prompt mean": composed(length_weighted, prompt_mean),
    "by the others' length": composed(length_weighted_apart, token_sum),
    "by the others' length, sequence mean": composed(
        length_weighted_apart, sequence_mean, Correction(reach=use(trajectory), map=use(truncate))
    ),
}


def found(estimator: Estimator, problem: Problem, group_size: int, engine: str) -> Moments | None:
    """What an engine says; None where every group is degenerate."""
    try:
        return exact(estimator, problem, group_size, engine)
    except Undefined as why:
        assert "degenerate" in str(why), why
        return None


def underflows(problem: Problem) -> bool:
    """Whether a ratio of policy to sampler is 0 in float64."""
    walk = Walk(problem)
    return bool((walk.at_leaves(walk.path_ratio).exp() == 0).any())


def listable(number: int, group_size: int) -> Problem:
    """A generated problem of which every batch can be listed."""
    for leaves in (8, 5, 4):
        problem = drawn(number, leaves=leaves, prompts=(1, 2, 3))
        if underflows(problem):
            problem = problem.on_policy()
        if count_multisets(problem, group_size, joint=True) < 3e3:
            return problem
    return problem.select(0)


@pytest.mark.parametrize("name", COUPLED)
def test_moments_equal_those_of_every_batch(name: str) -> None:
    """Mean, variance and drift on generated problems: any stop token, sampler and rewards."""
    several = 0
    for number in range(EACH):
        group_size = 2 + number % 3
        problem = listable(700 + number, group_size)
        several += problem.prompts > 1
        expected = found(COUPLED[name], problem, group_size, "compositions")
        try:
            same(found(COUPLED[name], problem, group_size, "coupled"), expected)
        except AssertionError as why:
            raise AssertionError(f"{number}, G={group_size}, P={problem.prompts}: {why}") from None
    assert several > EACH // 4


@pytest.mark.parametrize("name", ["icepop", "cispo", "weights over the group", "by length"])
def test_the_cost_does_not_know_the_group_size(name: str) -> None:
    """At 1,024 responses a mean over them is nearly fixed: the variance falls as 1 / G."""
    problem = with_behavior(token_tree(5), "noise", sigma=0.3)
    small, large = (exact(COUPLED[name], problem, g, "coupled") for g in (512, 1024))
    assert float(small.variance / large.variance) == pytest.approx(2.0, rel=0.02)
    assert_close(small.mean, large.mean, relative=0.01)
    assert_apart(small.mean, large.mean, at_least=1e-5)
    costs = [consider("coupled", COUPLED[name], problem, g).cost for g in (4, 1024)]
    assert costs[1] < 50 * costs[0]


def test_equal_weights_and_equal_lengths_couple_nothing() -> None:
    problem = bandit(12)
    rloo = exact(get("rloo"), problem, 5)
    for name in ("weights over the group", "by the others' length"):
        same(exact(COUPLED[name], problem, 5, "coupled"), rloo)
    mean = exact(get("group_mean"), problem, 5)
    for estimator in (COUPLED["by length"], COUPLED["icepop"], composed(group_mean, prompt_mean)):
        same(exact(estimator, problem, 5, "coupled"), mean)


def test_two_responses_by_hand() -> None:
    """G = 2 of a bandit: the estimate is (w1 A1 z1 + w2 A2 z2) / (w1 + w2)."""
    problem = with_behavior(bandit(5), "noise", sigma=0.8, seed=3)
    p, q = problem.logp[0, 0].exp(), problem.behavior_logp[0, 0].exp()
    w, z, r = p / q, torch.eye(5).double() - p, problem.rewards[0]
    first, second = torch.zeros(5).double(), 0.0
    for i in range(5):
        for j in range(5):
            gap = r[i] - r[j]
            estimate = gap * (w[i] * z[i] - w[j] * z[j]) / (w[i] + w[j])
            first += q[i] * q[j] * estimate
            second += float(q[i] * q[j] * estimate @ estimate)
    moments = exact(COUPLED["weights over the group"], problem, 2, "coupled")
    assert_close(moments.mean.flatten(), first)
    assert_close(moments.variance, second - float(first @ first))


def test_the_siblings_baseline_is_unbiased_and_the_groups_is_not() -> None:
    problem = typical(1, 3).on_policy()
    for advantage, check in ((length_weighted_apart, True), (length_weighted, False)):
        estimator = replace(get("rloo"), advantage=use(advantage), corrections=())
        assert plan(estimator, problem, 16).engine == "coupled"
        if check:
            assert_unbiased(estimator, problem, 16)
        else:
            with pytest.raises(AssertionError):
                assert_unbiased(estimator, problem, 16)


def test_weights_far_apart_lose_no_node() -> None:
    """Ratios over thirty decades, where the largest kernel sits where nothing contributes."""
    logits = torch.tensor([[0.0, -30.0, -50.0, 1.0]])
    behavior = torch.tensor([[0.5, 0.0, -1.0, 0.3]])
    problem = make(
        "far",
        Tree(4, None, 1),
        logits[None],
        torch.tensor([[1.0, -0.5, 0.25, 0.5]]),
        behavior=behavior[None],
    )
    for name in ("weights over the group", "weights and group std", "weights and a clip"):
        expected = exact(COUPLED[name], problem, 3, "tuples")
        same(exact(COUPLED[name], problem, 3, "coupled"), expected)


@pytest.mark.parametrize("few", [0, 10**9])
def test_values_of_the_denominator_and_nodes_are_one_basis_each(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = with_behavior(token_tree(4), "noise", sigma=0.4)
    names = ("icepop", "cispo", "by length", "by the others' length")
    expected = [exact(COUPLED[name], problem, 6, "coupled") for name in names]
    monkeypatch.setattr(tilted, "FEWER", few)
    for name, moments in zip(names, expected, strict=True):
        same(exact(COUPLED[name], problem, 6, "coupled"), moments)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (get("rloo"), NOTHING),
        (composed(group_mean, token_sum, Correction(reach=use(over_group), map=use(truncate))),
         "truncate looks at a self-normalized ratio"),
        (composed(group_mean, token_sum, *relative(over_group), *relative(over_batch)),
         "two self-normalized ratios"),
        (composed(group_mean, token_mean, *relative(over_group)),
         "token_mean has another denominator than over_group"),
        (composed(group_mean, token_sum, *relative(token_over_batch)),
         "token_over_batch has a random numerator except under token_mean"),
        (composed(length_weighted, token_sum, CLIP), "sign of an advantage of length_weighted"),
        (composed(length_weighted, token_sum, *relative(over_group)),
         "length_weighted has another denominator than the weights"),
        (replace(composed(length_weighted, token_sum), admission=get("dapo").admission),
         "admission is by group under length_weighted"),
        (composed(length_weighted_apart, token_mean),
         "length_weighted_apart has another denominator than token_mean"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_one_sentence(estimator: Estimator, words: str) -> None:
    why, _ = option(estimator, typical(), 4, lambda rest: None)
    assert why is not None and words in why and "\n" not in why and len(why) < 100


def test_a_ratio_that_underflows_is_left_to_others() -> None:
    problem = next(p for p in map(drawn, range(200)) if underflows(p))
    for name in ("weights over the group", "weights of tokens"):
        why = consider("coupled", COUPLED[name], problem, 2).refusal
        assert why == "a ratio of policy to sampler underflows or overflows float64"


def test_two_denominators_of_one_batch_and_of_several() -> None:
    assert Powers(group=1, batch=1).merged(1) == Powers(group=2, batch=0)
    problem = drawn(712, prompts=(2,))
    prompts = [
        Prompt(get("rloo"), problem.select(p), 3, problem.select(p).lengths.double())
        for p in range(2)
    ]
    nodes = nodes_of(prompts, 0, Powers(group=1, batch=1))
    for own, rest in ((3.0, 4.0), (5.0, 3.0)):
        weight = torch.exp(-nodes.own * own - nodes.others * rest)
        assert_close((nodes.first * weight).sum(), 1 / (own * (own + rest)))
        assert_close((nodes.second * weight).sum(), 1 / (own * (own + rest)) ** 2)


def test_sums_over_siblings_under_a_tilt() -> None:
    """E[H] and E[H H'] of two siblings, each pair written out."""
    problem = typical(1, 2)
    walk, s = Walk(problem), problem.lengths[0].double()
    sums = Sums(
        own=torch.ones(2, len(s)).double(),
        sibling=torch.stack([problem.rewards[0], s]),
        fixed=torch.tensor([0.5, 0.0]).double(),
        sign=torch.zeros(2, dtype=torch.long),
    )
    t = torch.tensor([0.7]).double()
    law = walk.leaf_flow[0] * torch.exp(-t * s)
    law = law / law.sum()
    both = torch.outer(law, law).flatten()
    pair = sums.sibling.unsqueeze(2) + sums.sibling.unsqueeze(1)
    pair = (pair + sums.fixed[:, None, None]).flatten(1)
    found_ = Siblings(Tilt(walk, s, t), sums)
    assert_close(found_.mean(2).squeeze(1), pair @ both)
    assert_close(found_.product(2).squeeze(2), (pair * both) @ pair.T)


Break = Callable[[pytest.MonkeyPatch], None]


def _scaled(module: Any, name: str, place: int, factor: float) -> Break:
    """A fault: one of the numbers that a function returns is off by a factor."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)

        def wrong(*given: Any, **more: Any) -> Any:
            parts = list(original(*given, **more))
            parts[place] = parts[place] * factor
            return tuple(parts)

        patch.setattr(module, name, wrong)

    return plant


def _term(attribute: str, change: Callable[[Tensor], Tensor], name: str) -> Break:
    """A fault: one part of the expansion of a group is another."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from windage.toy.exact.coupled import ratios

        original = getattr(ratios, name)

        def wrong(*given: Any, **more: Any) -> Any:
            terms = original(*given, **more)
            return replace(terms, **{attribute: change(getattr(terms, attribute))})

        patch.setattr(ratios, name, wrong)

    return plant


def _siblings_less(method: str) -> Break:
    """A fault: one sibling too few."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(siblings.Siblings, method)
        patch.setattr(siblings.Siblings, method, lambda self, n: original(self, max(n - 1, 0)))

    return plant


def _others_left_out(patch: pytest.MonkeyPatch) -> None:
    from windage.toy.exact.coupled import ratios

    patch.setattr(ratios, "others", lambda prompts, p, u, *, conditioned: torch.ones_like(u))


def _never_conditioned(patch: pytest.MonkeyPatch) -> None:
    original = Prompt.laplace

    def wrong(self: Prompt, u: Tensor, *, conditioned: bool) -> Tensor:
        return original(self, u, conditioned=False)

    patch.setattr(Prompt, "laplace", wrong)


def _shorter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(apart, "laplace", lambda low, high: laplace(low / 2, high, step=0.7))


FAULTS: dict[str, tuple[Break, str]] = {
    "pairs of siblings": (_term("kernel", lambda k: 1.01 * k, "by_siblings"), "icepop"),
    "squares of siblings": (_term("square", lambda q: 1.01 * q, "by_siblings"), "icepop"),
    "mean of siblings": (_term("mean", lambda m: 1.01 * m, "by_siblings"), "by length"),
    "pairs by counts": (_term("kernel", lambda k: 1.01 * k, "by_counts"), "cispo"),
    "squares by counts": (_term("square", lambda q: 1.01 * q, "by_counts"), "cispo"),
    "mean by counts": (_term("mean", lambda m: 1.01 * m, "by_counts"), "dapo"),
    "one sibling less in the mean": (_siblings_less("mean"), "by length"),
    "one sibling less in the product": (_siblings_less("product"), "many rewards, prompt mean"),
    "one less beside the own": (_siblings_less("product"), "by the others' length"),
    "the other prompts": (_others_left_out, "capped weights over the batch"),
    "the other prompts' admission": (_never_conditioned, "dapo"),
    "coarse nodes": (_shorter, "by the others' length"),
    "the numerator": (
        _scaled(tokens, "response_scale", 0, 1.01), "by length, sequence mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, victim = FAULTS[name]
    problem, group_size = typical(2, 2), 3
    expected = exact(COUPLED[victim], problem, group_size, "compositions")
    same(exact(COUPLED[victim], problem, group_size, "coupled"), expected)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        same(exact(COUPLED[victim], problem, group_size, "coupled"), expected)


def test_it_is_chosen_where_counting_is_long() -> None:
    problem = with_behavior(token_tree(6), "noise", sigma=0.3)
    for name in ("cispo", "icepop", "dapo"):
        assert plan(get(name), problem, 16).engine == "coupled"
        assert consider("classes", get(name), problem, 16).cost > 1e4
    assert math.isfinite(consider("coupled", get("cispo"), problem, 4096).cost)


def test_it_is_chosen_where_tokens_are_thousands() -> None:
    """Counting convolves the other prompts' tokens: minutes at these lengths."""
    lengths = torch.tensor([1500, 3000, 900, 4000])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(3, 4)
    logits = torch.linspace(-1, 1, 12).view(3, 1, 4)
    problem = make("long", Tree(4, None, 1), logits, rewards, lengths=lengths)
    for name in ("cispo", "icepop", "dapo"):
        assert plan(get(name), problem, 4).engine == "coupled"
