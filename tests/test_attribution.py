"""Parts of the mismatch by cause: exact by enumeration on trees, covered by samples, and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import sqrt

import pytest
import torch
from checks import assert_apart, assert_close, refused
from torch import Tensor

from windage.estimators import attribution
from windage.estimators.attribution import MEASURES, averaged, every_order, extremes, k1, shares
from windage.toy import behavior
from windage.toy.problems import Problem, token_tree

CAUSES = ("lag", "precision", "temperature")


def applied(problem: Problem, causes: tuple[str, ...]) -> Tensor:
    """Log-probabilities of the policy with some causes of mismatch upon it, in a fixed order."""
    kinds: dict[str, Callable[[Problem], Tensor]] = {
        "lag": lambda p: behavior.stale(p, steps=2, rate=2.0),
        "precision": lambda p: behavior.bits(p, b=3),
        "temperature": lambda p: behavior.temperature(p, t=0.8),
        "top_p": lambda p: behavior.top_p(p, p=0.7),
    }
    for cause in causes:
        problem = replace(problem, logits=kinds[cause](problem))
    return problem.logp


@cache
def subsets() -> tuple[Problem, Tensor]:
    """A tree, and the policies in which each subset of the causes has been undone, in binary."""
    problem = token_tree(3)
    tables = [
        applied(problem, tuple(c for i, c in enumerate(CAUSES) if not number >> i & 1))
        for number in range(2 ** len(CAUSES))
    ]
    return problem, torch.stack(tables)


def on_responses(problem: Problem, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of every response's tokens, its mask, and its chance under the first."""
    prefixes, tokens = problem.tree.paths
    mask = tokens >= 0
    found = tables[:, 0][:, prefixes.clamp(min=0), tokens.clamp(min=0)]
    found = torch.where(mask, found, 0.0)
    return found, mask, found[0].sum(-1).exp()


def reached(problem: Problem, sampler: Tensor) -> Tensor:
    """Chance that the sampler comes to each prefix."""
    tree, mass = problem.tree, torch.ones(1, dtype=torch.float64)
    parts = [mass]
    for t in range(tree.horizon - 1):
        mass = tree.descend((mass.unsqueeze(-1) * sampler[0, tree.level(t)].exp()).unsqueeze(0))[0]
        parts.append(mass)
    return torch.cat(parts)


def by_nodes(problem: Problem, sampler: Tensor, policy: Tensor, measure: str) -> Tensor:
    """A divergence worked out prefix by prefix, or response by response, from whole tables."""
    mu, ratio = sampler[0].exp(), policy[0].exp() / sampler[0].exp()
    if measure == "chi_square_response":
        lines, _, chance = on_responses(problem, torch.stack([sampler, policy]))
        return (lines[1].sum(-1).exp().square() / chance).sum() - 1
    if measure == "chi_square":
        here = (mu * ratio.square()).sum(-1) - 1
    else:
        here = -(mu * ratio.log()).sum(-1)
    return (reached(problem, sampler) * here).sum()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_parts_are_the_exact_divergences_of_the_chain(measure: str, order: tuple[int, ...]) -> None:
    problem, tables = subsets()
    held = [sum(1 << cause for cause in order[:k]) for k in range(4)]
    lines, mask, chance = on_responses(problem, tables[held])
    found = shares(lines, mask, MEASURES[measure])
    whole = [by_nodes(problem, tables[0], tables[number], measure) for number in held]
    expected = torch.stack(whole).diff()
    assert_close((found * chance).sum(1), expected)
    assert_close(found.sum(0), MEASURES[measure](lines[-1] - lines[0], mask))


@pytest.mark.parametrize("measure", MEASURES)
def test_every_order_is_the_mean_of_all_chains_and_lies_between_them(measure: str) -> None:
    problem, tables = subsets()
    lines, mask, _ = on_responses(problem, tables)
    found = every_order(lines, mask, MEASURES[measure])
    chains = []
    for order in permutations(range(3)):
        held = [sum(1 << cause for cause in order[:k]) for k in range(4)]
        parts = shares(lines[held], mask, MEASURES[measure])
        chains.append(parts[torch.tensor(order).argsort()])
    assert_close(found, torch.stack(chains).mean(0))
    means = torch.stack(chains).mean(2)
    low, high = extremes(lines, mask, MEASURES[measure])
    assert_close(low, means.amin(0))
    assert_close(high, means.amax(0))
    assert (low <= found.mean(1) + 1e-12).all() and (found.mean(1) <= high + 1e-12).all()
    if measure != "k1":
        assert_apart(low, high)


@pytest.mark.parametrize("measure", MEASURES)
def test_causes_undone_before_all_orders_are_the_first_links_of_every_chain(measure: str) -> None:
    problem, tables = subsets()
    lines, mask, _ = on_responses(problem, tables)
    inner = lines[1::2]  # cause 0 has been undone
    found = every_order(inner, mask, MEASURES[measure], since=lines[0])
    chains = []
    for order in ((1, 2), (2, 1)):
        held = [0, 1, 1 + (1 << order[0]), 7]
        chains.append(shares(lines[held], mask, MEASURES[measure])[[0, *order]])
    assert_close(found, torch.stack(chains).mean(0)[1:])
    means = torch.stack(chains).mean(2)[:, 1:]
    low, high = extremes(inner, mask, MEASURES[measure], since=lines[0])
    assert_close(low, means.amin(0))
    assert_close(high, means.amax(0))
    if measure != "k1":
        assert_apart(found, every_order(inner, mask, MEASURES[measure]))


def test_a_change_of_one_cause_is_its_own_part_alone() -> None:
    problem, tables = subsets()
    lines, mask, _ = on_responses(problem, tables)
    same = torch.stack([lines[0], lines[0], lines[-1], lines[-1]])
    for measure in MEASURES.values():
        parts = shares(same, mask, measure)
        assert not parts[0].any() and not parts[2].any()
        assert_close(parts[1], measure(lines[-1] - lines[0], mask))


def test_top_p_leaves_k1_true_and_k3_short_of_what_is_never_drawn() -> None:
    problem = token_tree(3)
    cut = applied(problem, ("top_p",))
    tables = torch.stack([cut, problem.logp])
    lines, mask, chance = on_responses(problem, tables)
    drawn = chance > 0
    lines, mask, chance = lines[:, drawn], mask[drawn], chance[drawn]
    kept = torch.where(cut > -torch.inf, problem.logp.exp(), 0.0).sum(-1)[0]
    seen = reached(problem, cut)
    truth = -(seen * kept.log()).sum()
    assert_close((shares(lines, mask, k1)[0] * chance).sum(), truth)
    assert (seen * -kept.log()).max() <= -torch.tensor(0.7).log() + 1e-12
    short = (seen * (1 - kept)).sum()
    assert_close((shares(lines, mask, attribution.k3)[0] * chance).sum(), truth - short)
    with refused("policy 1 gives a sampled token no finite"):
        full, wide, _ = on_responses(problem, tables.flip(0))
        shares(full, wide, k1)


@pytest.mark.parametrize("measure", MEASURES)
def test_samples_cover_the_exact_parts(measure: str) -> None:
    # 95 % intervals of 3 parts in 400 sets of 300 responses: 380 expected, 356 or fewer once in
    # a million; errors that ignore clusters or divide by the wrong count are far off.
    problem, tables = subsets()
    lines, mask, chance = on_responses(problem, tables[[0, 1, 3, 7]])
    parts, tokens = shares(lines, mask, MEASURES[measure]), mask.sum(-1).double()
    exact = (parts * chance).sum(1) / (tokens * chance).sum()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(chance, 400 * 300, replacement=True, generator=generator)
    held = torch.zeros(3)
    for rows in drawn.view(400, 300):
        value, error = averaged(parts[:, rows], tokens[rows])
        held += (value - exact).abs() <= 1.96 * error
    assert (held > 356).all() and (held < 396).all(), held


def test_an_error_that_takes_tokens_for_independent_is_found_out() -> None:
    # A response's tokens all alike: the error is that of responses.
    parts = torch.tensor([[0.0, 8.0] * 8])
    value, error = averaged(parts, torch.full((16,), 8.0))
    assert float(value) == 0.5
    assert float(error) == pytest.approx(sqrt(0.25 / 15), rel=1e-6)


def test_what_is_no_chain_is_refused() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    with refused("1 policies"):
        shares(torch.zeros(1, 1, 2), mask, k1)
    with refused("3 policies", "2, 4, 8"):
        every_order(torch.zeros(3, 1, 2), mask, k1)
    with refused("1 responses", "two or more"):
        averaged(torch.zeros(1, 1), torch.ones(1))
    hidden = torch.tensor([[[0.0, -1.0]], [[torch.nan, -2.0]]])
    assert shares(hidden, torch.tensor([[False, True]]), k1).tolist() == [[1.0]]
