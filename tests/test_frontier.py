"""The frontier over own-token weights: its forms against listed groups, its points against search.

A table of weights becomes a correction by looking up each token's ratio, which is another at every
token of these problems: so the engines that know nothing of the frontier can be asked about it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from checks import assert_close
from problem_strategies import drawn, typical
from test_transfer import listed, stale, unrolled
from torch import Tensor

from windage.estimators.advantage import constant, group_mean, leave_one_out
from windage.estimators.catalogue import get
from windage.estimators.correction import Correction, token
from windage.estimators.estimator import Estimator
from windage.estimators.member import declare, use
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import automaton
from windage.toy.exact.frontier import attainable, counts, forms, nonnegative
from windage.toy.exact.plan import Site, exact
from windage.toy.exact.tuples import tuples
from windage.toy.exact.walk import Walk
from windage.toy.objective import objective
from windage.toy.problems import Tree, difficulties, make, trajectories

ADVANTAGES = (use(leave_one_out), use(group_mean), use(constant, baseline=0.3))
PRICES = torch.tensor([1e-6, 1e-3, 0.03, 0.3, 1.0, 30.0], dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(shape: torch.Size, seed: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator(seed))


def tabled(weights: Tensor, site: Site, advantage=ADVANTAGES[0]) -> Estimator:
    """The estimator whose token weights stand in a table."""
    ratio, order = (site.logp - site.behavior_logp).flatten().sort()
    assert float(ratio.diff().min()) > 1e-9
    values = weights.flatten()[order]
    borders = (ratio[1:] + ratio[:-1]) / 2

    @declare("token")
    def lookup(effective: Tensor, advantages: Tensor) -> Tensor:
        return values[torch.searchsorted(borders, effective.contiguous())]

    corrections = (Correction(reach=use(token), map=use(lookup)),)
    return replace(get("rloo"), advantage=advantage, corrections=corrections)


def sites() -> list[Site]:
    return [
        typical(2, 2),
        with_behavior(difficulties((0.2, 0.7)), "noise", sigma=0.4),
        stale(reasoning(9)),
    ]


# The forms.


@pytest.mark.parametrize("advantage", ADVANTAGES, ids=lambda member: member.name)
@pytest.mark.parametrize("group_size", [2, 3])
def test_forms_are_the_moments_of_listed_groups(advantage, group_size):
    problem = typical(2, 2)
    form = forms(advantage, problem, group_size)
    weights = uniform(problem.logits.shape, group_size)
    found = tuples(tabled(weights, problem, advantage), problem, group_size)
    assert_close(form.mean(weights), found.mean)
    assert_close(form.variance(weights), found.variance)
    gap = found.mean - objective(problem).gradient
    assert_close(form.bias(weights), gap.square().sum())


def test_a_group_of_one_has_no_pairs():
    problem = typical(1, 2)
    form = forms(ADVANTAGES[2], problem, 1)
    weights = uniform(problem.logits.shape, 5)
    found = tuples(tabled(weights, problem, ADVANTAGES[2]), problem, 1)
    assert_close(form.variance(weights), found.variance)


def test_a_state_that_is_met_often_counts_with_its_products():
    """On a chain the same weights serve at every time: against all groups of all responses."""
    chain = stale(reasoning(3, (0.4,)))
    problem, state = unrolled(chain)
    weights = uniform(chain.logits.shape, 7)
    spread = weights[:, state]
    form = forms(ADVANTAGES[0], chain, 2)
    mean, variance = listed(spread_out(spread, problem), problem, state, 2)
    assert_close(form.mean(weights), mean)
    assert_close(form.variance(weights), variance)


def spread_out(weights: Tensor, problem) -> Estimator:
    """`tabled` where one ratio stands at several places, always with one weight."""
    ratio, first = np.unique(
        (problem.logp - problem.behavior_logp).flatten().numpy().round(9), return_index=True
    )
    values = weights.flatten()[torch.from_numpy(first)]
    borders = torch.from_numpy((ratio[1:] + ratio[:-1]) / 2)

    @declare("token")
    def lookup(effective: Tensor, advantages: Tensor) -> Tensor:
        return values[torch.searchsorted(borders, effective.contiguous())]

    return replace(get("rloo"), corrections=(Correction(reach=use(token), map=use(lookup)),))


@pytest.mark.parametrize("horizon", [40, 4096])
def test_a_long_chain_agrees_with_its_engine(horizon):
    chain = stale(reasoning(horizon))
    weights = uniform(chain.logits.shape, horizon)
    form = forms(ADVANTAGES[0], chain, 4)
    found = automaton(tabled(weights, chain), chain, 4)
    assert_close(form.mean(weights), found.mean)
    assert_close(form.variance(weights), found.variance)


def test_counts_of_a_chain_are_those_of_its_tree():
    chain = stale(reasoning(4, (0.3, 0.6)))
    problem, state = unrolled(chain)
    tree, folded = counts(problem), counts(chain)
    fold = torch.zeros_like(folded.once).index_add(2, state, tree.once)
    assert_close(folded.once, fold)
    assert_close(folded.law[1], tree.law[1])
    assert_close(folded.twice.sum((-1, -2))[0].sum(), squared_visits(problem, state))


def squared_visits(problem, state: Tensor) -> Tensor:
    """Sum over states of the expected square of the visits, from every response."""
    prefixes, _ = problem.tree.paths
    where = torch.where(prefixes >= 0, state[prefixes.clamp(min=0)], -1)
    visits = torch.stack([(where == s).sum(1) for s in range(4)], 1).double()
    return (Walk(problem).leaf_flow @ visits.square().sum(1)).sum()


# The points.


@pytest.mark.parametrize("site", sites(), ids=lambda site: site.name)
def test_engines_give_the_best_weights_the_figures_of_the_curve(site):
    form = forms(ADVANTAGES[0], site, 3)
    curve = form.curve(PRICES)
    weights, residual = form.best(PRICES)
    assert float(residual.max()) < 1e-9 and bool((weights >= 0).all())
    for k, table in enumerate(weights):
        found = exact(tabled(table, site), site, 3)
        gap = found.mean - form.gradient
        assert_close(curve.bias[k], gap.square().sum())
        assert_close(curve.variance[k], found.variance)
        scale = (found.mean * form.gradient).sum() / form.gradient.square().sum()
        assert_close(curve.scale[k], scale)
        assert_close(curve.bias_rescaled[k], (found.mean / scale - form.gradient).square().sum())
        assert_close(curve.variance_rescaled[k], found.variance / scale**2)


@pytest.mark.parametrize("site", sites(), ids=lambda site: site.name)
def test_no_feasible_weights_lie_below(site):
    """Neither near the best weights nor anywhere else, for any price; before and after scaling."""
    form = forms(ADVANTAGES[0], site, 4)
    curve, (best, _) = form.curve(PRICES), form.best(PRICES)
    random = generator(3)
    for price, least, wide, middle in zip(
        PRICES,
        curve.bias + PRICES * curve.variance,
        curve.bias_rescaled + PRICES * curve.variance_rescaled,
        best,
        strict=True,
    ):
        for step in (1e-3, 1e-2, 0.1, 1.0, 10.0):
            noise = torch.randn((50, *middle.shape), dtype=torch.float64, generator=random)
            tried = (middle * (1 + step * noise)).clamp(min=0)
            tried = torch.cat([tried, (middle + step * middle.mean() * noise).clamp(min=0)])
            value = form.bias(tried) + price * form.variance(tried)
            assert bool((value >= least * (1 - 1e-10)).all())
            along = (form.mean(tried) * form.gradient).sum((-3, -2, -1))
            tried = tried[along > 0] / along[along > 0][:, None, None, None]
            tried = tried * form.gradient.square().sum()
            value = form.bias(tried) + price * form.variance(tried)
            assert bool((value >= wide * (1 - 1e-10)).all())


@pytest.mark.parametrize("site", sites(), ids=lambda site: site.name)
def test_slopes_at_the_best_weights(site):
    """No gain by raising what is 0, nor by moving what is not: slopes by autograd."""
    form = forms(ADVANTAGES[0], site, 4)
    for price in PRICES:
        weights = form.best(price[None])[0].requires_grad_()
        (form.bias(weights) + price * form.variance(weights)).sum().backward()
        start = 2 * form.slope.abs().max()
        assert bool((weights.grad > -1e-8 * start).all())
        assert float((weights.grad * weights.detach()).abs().max()) < 1e-8 * float(start)


def test_the_curve_falls_and_is_convex():
    form = forms(ADVANTAGES[0], typical(2, 3), 4)
    curve = form.curve(torch.logspace(-6, 2, 60, dtype=torch.float64))
    assert bool((curve.bias.diff() >= 0).all()) and bool((curve.variance.diff() <= 0).all())
    slope = -curve.bias.diff() / curve.variance.diff()
    assert bool((slope.diff() > -1e-9).all())
    inside = (slope > curve.price[:-1] * (1 - 1e-9)) & (slope < curve.price[1:] * (1 + 1e-9))
    assert bool(inside.all())


def smallest(form: np.ndarray, slope: np.ndarray) -> float:
    """The least of w' H w - 2 b' w over w >= 0, over every set of unknowns that are not 0."""
    values = [0.0]
    for kept in product((False, True), repeat=len(slope)):
        mine = np.flatnonzero(kept)
        w = np.linalg.lstsq(form[np.ix_(mine, mine)], slope[mine], rcond=None)[0]
        if (w >= 0).all() and np.allclose(form[np.ix_(mine, mine)] @ w, slope[mine]):
            values.append(-slope[mine] @ w)
    return min(values)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nonnegative_least_squares_against_every_set(size):
    random = np.random.default_rng(size)
    forms_, slopes = [], []
    for _ in range(200):
        rank = random.integers(1, size + 1)
        root = random.normal(size=(size, rank)) * 10.0 ** random.integers(-3, 4)
        forms_.append(root @ root.T)
        slopes.append(forms_[-1] @ random.normal(size=size))
    form, slope = torch.from_numpy(np.array(forms_)), torch.from_numpy(np.array(slopes))
    found, residual = nonnegative(form, slope)
    assert bool((found >= 0).all()) and float(residual.max()) < 1e-8
    value = torch.einsum("bv,bvu,bu->b", found, form, found) - 2 * (slope * found).sum(-1)
    expected = [smallest(*pair) for pair in zip(forms_, slopes, strict=True)]
    assert np.allclose(value.numpy(), expected, rtol=1e-8, atol=1e-12)


def test_many_unknowns():
    root = torch.randn((4, 120, 150), dtype=torch.float64, generator=generator(0))
    slope = torch.randn((4, 120), dtype=torch.float64, generator=generator(1))
    found, residual = nonnegative(root @ root.mT, slope)
    assert float(residual.max()) < 1e-9 and 20 < int((found > 0).sum()) < 460


# What is attainable.


def own(site: Site, group_size: int, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Squared bias and variance of catalogue entries."""
    found = [exact(get(name), site, group_size) for name in names]
    gradient = objective(site).gradient
    bias = torch.stack([(m.mean - gradient).square().sum() for m in found])
    return bias, torch.stack([m.variance for m in found])


def test_entries_of_the_class_never_lie_beyond():
    names, tried = ("rloo", "group_mean", "token_is", "prefix_is", "token_tis"), 0
    for number in range(24):
        problem = drawn(number)
        size = objective(problem).gradient.square().sum()
        bias, variance = own(problem, 4, names)
        if size < 1e-12 or not bool((variance < 1e6 * size).all()):
            continue
        best = attainable(forms(ADVANTAGES[0], problem, 4), bias, variance, rescaled=False)
        assert bool((best.bias <= bias + 1e-9 * size).all()), number
        assert not bool((best.variance > variance * (1 + 1e-6)).any()), number
        tried += 1
    assert tried > 8


@pytest.mark.parametrize("rescaled", [False, True])
def test_points_of_the_curve_attain_themselves(rescaled):
    form = forms(ADVANTAGES[0], typical(2, 3), 4)
    curve = form.curve(torch.logspace(-5, 1, 13, dtype=torch.float64))
    pair = (
        (curve.bias_rescaled, curve.variance_rescaled) if rescaled else (curve.bias, curve.variance)
    )
    best = attainable(form, *pair, rescaled=rescaled)
    assert_close(best.bias, pair[0], relative=1e-10)
    assert_close(best.variance, pair[1], relative=1e-9)
    away = attainable(form, pair[0] * 1.1, pair[1] * 1.1, rescaled=rescaled)
    assert bool((away.bias < pair[0]).all()) and bool((away.variance < pair[1]).all())


def test_what_no_weight_reaches_is_not_a_number():
    """A sampler that leaves out right answers: own-token weights cannot make up for them."""
    form = forms(ADVANTAGES[0], trajectories(), 4)
    floor = form.curve(torch.tensor([1e-8], dtype=torch.float64)).bias
    asked = torch.stack([0 * floor, 0.9 * floor, 1.1 * floor]).flatten()
    best = attainable(form, asked, torch.full((3,), 1e9, dtype=torch.float64), rescaled=False)
    assert best.variance.isnan().tolist() == [True, True, False]
    assert_close(best.bias, floor.expand(3), relative=1e-5)


def test_a_noisy_estimator_has_a_rival_without_bias():
    """Where the sampler covers the policy some own-token weights have no bias at all."""
    for site in (typical(2, 2), stale(reasoning(2048))):
        loud = torch.full((1,), 1e6, dtype=torch.float64)
        form = forms(ADVANTAGES[0], site, 4)
        assert float(form.curve(torch.full_like(loud, 1e-8)).bias) > 0
        for rescaled in (False, True):
            assert attainable(form, 0 * loud, loud, rescaled=rescaled).bias.tolist() == [0.0]


def test_nothing_to_learn_nothing_to_weigh():
    equal = make("equal", Tree(2, None, 2), torch.zeros(1, 3, 2), torch.ones(1, 4))
    weights, residual = forms(ADVANTAGES[0], equal, 4).best(PRICES)
    assert float(weights.abs().max()) == 0.0 and float(residual.max()) == 0.0


def test_more_responses_in_a_group_never_hurt():
    problem = typical(2, 2)
    one = torch.ones(1, dtype=torch.float64)
    errors = []
    for group_size in (2, 4, 8, 16):
        curve = forms(ADVANTAGES[0], problem, group_size).curve(one)
        errors.append(float(curve.bias + curve.variance))
    assert errors == sorted(errors, reverse=True)


def test_a_chain_of_one_token_is_a_tree():
    chain = stale(reasoning(1, (0.4,)))
    assert isinstance(chain, Chain)
    problem, _ = unrolled(chain)
    found = forms(ADVANTAGES[0], chain, 3).curve(PRICES)
    expected = forms(ADVANTAGES[0], problem, 3).curve(PRICES)
    assert_close(found.bias, expected.bias)
    assert_close(found.variance, expected.variance)
