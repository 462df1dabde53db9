"""Training of tabular problems: exact walks, sampled walks, and the one as the other's mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_close
from torch import Tensor

from windage.estimators.catalogue import get
from windage.estimators.errors import BadInput
from windage.estimators.member import use
from windage.estimators.penalty import loss_k2
from windage.toy import tabular
from windage.toy.ascent import Ascent, Others, Reference, Sampler, Versions
from windage.toy.behavior import with_behavior
from windage.toy.exact.plan import exact
from windage.toy.learning import path
from windage.toy.objective import objective
from windage.toy.problems import Problem, bandit, difficulties, token_tree, trajectories
from windage.toy.sums import generators, uniform
from windage.toy.tabular import (
    Group,
    Table,
    along_means,
    along_samples,
    drawn,
    sampled_update,
)

FREE = Ascent(optimizer="sgd", rate=0.1, limit=float("inf"))


def two_trees() -> Table:
    """Two trees that differ, one a seed."""
    tree = token_tree(horizon=3)
    return Table.joined([tree, replace(tree, logits=-tree.logits, rewards=1 - tree.rewards)])


def one_group(table: Table, law: Tensor, among: list[torch.Generator], size: int) -> Group:
    u = uniform(among, table.problem.prompts // table.seeds, size).flatten(0, 1).double()
    return drawn(table.problem, law, u, head=True)


@pytest.mark.parametrize("make", [bandit, token_tree, difficulties])
def test_small_exact_steps_climb(make: object) -> None:
    table = Table.repeated(make(), 1)  # type: ignore[operator]
    walk = along_means(table, get("rloo"), FREE, Sampler(), generators([0]), steps=12)
    values = torch.stack([table.figures(state.parameters)["value"] for state in walk])
    assert bool((values.diff(dim=0) > 0).all())
    assert_close(values[0, 0], objective(table.problem).value)


def test_an_exact_walk_is_plain_ascent_on_the_objective() -> None:
    problem = token_tree()
    table = Table.repeated(problem, 1)

    def update(parameters: Tensor, step: int) -> Tensor:
        logits = parameters.view_as(problem.logits)
        return objective(replace(problem, logits=logits)).gradient.reshape(1, -1)

    plain = list(path(table.start, update, steps=8, rate=0.1))
    for state, expected in zip(
        along_means(table, get("rloo"), FREE, Sampler(), generators([0]), steps=8),
        plain,
        strict=True,
    ):
        assert_close(state.parameters, expected.parameters)


@pytest.mark.parametrize("name", ["rloo", "topr", "grpo", "dapo", "centered_tis"])
def test_seeds_of_an_exact_walk_do_not_mix(name: str) -> None:
    table = two_trees()
    problem = with_behavior(table.problem, "noise", sigma=0.5)
    found = table.mean(get(name), problem, 2, table.engine(get(name), 2))
    for s in range(2):
        assert_close(found[s], exact(get(name), problem.select(s), 2).mean.flatten())


@pytest.mark.parametrize("name", ["rloo", "token_tis", "topr", "centered_tis", "dapo"])
def test_the_mean_of_sampled_updates_is_the_exact_mean(name: str) -> None:
    """3,000 seeds: the distance of their mean from the exact one, in its own standard errors.

    For each of D numbers |z| stays under 5.2 with chance above 1 - 2e-7 D.
    """
    seeds, size = 3_000, 3
    tree = difficulties((0.3, 0.6))
    table = Table.repeated(tree, seeds)
    weights = table.start * 0.7
    law = table.law(weights, Sampler())
    group = one_group(table, law, generators(range(seeds)), size)
    estimator = replace(get(name), admission=())
    if estimator.centering is None:
        group = replace(group, head_behavior_logp=None)
    found = sampled_update(table, estimator, table.start, group)
    behavior = Table.repeated(tree, 1).law(weights[:1], Sampler())
    problem = replace(tree, behavior_logp=behavior)
    expected = exact(estimator, problem, size).mean.flatten()
    error = found.std(0) / seeds**0.5
    moved = error > 1e-12
    assert int(moved.sum()) >= 10
    assert float(((found.mean(0) - expected)[moved] / error[moved]).abs().max()) < 5.2
    assert_close(found.mean(0)[~moved], expected[~moved])


def test_many_seeds_on_policy_average_to_the_exact_path() -> None:
    table = Table.repeated(bandit(), 2_000)
    ascent = replace(FREE, rate=0.02)
    *_, last = along_samples(
        table, get("rloo"), ascent, Sampler(), generators(range(2_000)), steps=10, group_size=4
    )
    single = Table.repeated(bandit(), 1)
    *_, exactly = along_means(single, get("rloo"), ascent, Sampler(), generators([0]), steps=10)
    error = last.parameters.std(0) / 2_000**0.5
    gap = (last.parameters.mean(0) - exactly.parameters[0]) / error
    moved = (exactly.parameters - single.start)[0] / error
    assert float(gap.abs().max()) < 5.2 < float(moved.abs().max())


def test_a_sampled_walk_repeats_and_its_seeds_do_not_mix() -> None:
    def run(seeds: list[int]) -> Tensor:
        table = Table.repeated(trajectories().on_policy(), len(seeds))
        walk = along_samples(
            table, get("topr"), FREE, Sampler(lag=2, sigma=0.1), generators(seeds), steps=5
        )
        return list(walk)[-1].parameters

    assert torch.equal(run([0, 1]), run([0, 1]))
    assert_close(run([0, 1, 2])[1:2], run([1]))
    assert not torch.equal(run([0]), run([1]))


@pytest.mark.parametrize(
    ("sampler", "kind", "settings"),
    [(Sampler(bits=2), "bits", {"b": 2}), (Sampler(top_p=0.6), "top_p", {"p": 0.6})],
)
def test_a_sampler_has_the_law_of_the_behavior_of_its_name(
    sampler: Sampler, kind: str, settings: dict[str, float]
) -> None:
    table = two_trees()
    expected = with_behavior(table.problem, kind, **settings).behavior_logp
    assert torch.equal(table.law(table.start, sampler), expected)


def test_noise_is_one_direction_a_seed_in_units_of_the_start() -> None:
    """A standard deviation of 200 x 45 normal numbers is within 5 % with chance 1 - 1e-10."""
    table = Table.repeated(token_tree(), 200)
    versions = Versions(table.unpack, table.start, Sampler(sigma=0.5), generators(range(200)))
    gap = versions.due() - table.start
    assert torch.equal(versions.due() - table.start, gap)
    assert_close(gap.std(), 0.5 * table.start.square().mean().sqrt(), relative=0.05)


def test_members_of_a_group_come_from_the_versions_that_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, seen = Table.repeated(bandit(), 1), []

    def noted(problem: Problem, law: Tensor, u: Tensor, *, head: bool) -> Group:
        seen.append((law, u.shape[1]))
        return drawn(problem, law, u, head=head)

    monkeypatch.setattr(tabular, "drawn", noted)
    walk = along_samples(
        table, get("rloo"), FREE, Sampler(mixed=2, lag=1), generators([3]), steps=2, group_size=6
    )
    places = [state.parameters for state in walk]
    assert [number for _, number in seen] == [3, 3, 3, 3]
    for (law, _), weights in zip(seen[2:], [places[1], places[0]], strict=True):
        assert torch.equal(law, table.law(weights, Sampler()))


def test_a_mean_over_several_versions_is_refused() -> None:
    with pytest.raises(BadInput, match="mixed is 2; allowed: 1"):
        along_means(
            Table.repeated(bandit(), 1),
            get("rloo"),
            FREE,
            Sampler(mixed=2),
            generators([0]),
            steps=1,
        )


def test_a_reference_holds_an_exact_walk_back() -> None:
    table = Table.repeated(token_tree(), 1)
    held = replace(get("group_mean"), penalties=(use(loss_k2, coefficient=0.5),))

    def divergence(reference: Reference) -> float:
        *_, last = along_means(
            table, held, FREE, Sampler(), generators([0]), steps=12, reference=reference
        )
        return float(table.figures(last.parameters)["kl_start"][0])

    assert 0 < divergence(Reference()) < divergence(Reference(every=1))


def test_a_decoupled_clip_is_anchored_where_the_batch_was_drawn() -> None:
    table = Table.repeated(token_tree(horizon=2), 1)
    others = Others(reference=None, proximal=1.5 * table.start)
    problem: Problem = table.at(table.start, None, others)
    assert problem.proximal_logp is not None
    assert_close(problem.proximal_logp, (1.5 * table.problem.logits).log_softmax(-1))
