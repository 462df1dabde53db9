"""Covariance blocks against outer products of every listed batch; their trace is the variance."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, refused
from problem_strategies import drawn, entry, typical
from test_tree_penalties import CORRECT, IN_LOSS, IN_REWARDS, SHAPING, with_reference

from windage.analysis.studies.grid import Settings
from windage.analysis.studies.spread import covariances
from windage.analysis.studies.study import bind
from windage.cli.main import main
from windage.estimators.advantage import batch_std
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.toy.exact import covariance
from windage.toy.exact.covariance import covariance_blocks
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Responses, accepted, every_tuple
from windage.toy.problems import Problem, Tree, make

NAMES = [n for n, e in CATALOGUE.items() if e.tier == 1 and n != "ppo"]


def listed_blocks(estimator: Estimator, problem: Problem, group_size: int) -> torch.Tensor:
    """Second moments of every batch, all prompts together, less the square of the mean."""
    table = Responses(problem)
    total, mean, square = 0.0, 0.0, 0.0
    for index, probability in every_tuple(problem, group_size):
        batch = table.batch(index, head=estimator.centering is not None)
        keep = accepted(estimator, batch)
        weight = probability if keep is None else probability * keep
        found = table.gradients(index, estimator, batch)
        total = total + weight.sum()
        mean = mean + torch.einsum("m,mpnv->pnv", weight, found)
        square = square + torch.einsum("m,mpnv,mpnw->pnvw", weight, found, found)
    mean = mean / total
    return square / total - mean.unsqueeze(-1) * mean.unsqueeze(-2)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_those_of_every_batch_and_their_trace_is_the_variance(name: str) -> None:
    problem = typical(2, 2)
    estimator = entry(name, problem)
    group_size = 1 if name in ("reinforce", "topr") else 2
    found = covariance_blocks(estimator, problem, group_size)
    assert_close(found, listed_blocks(estimator, problem, group_size))
    trace = found.diagonal(dim1=-2, dim2=-1).sum()
    assert_close(trace, exact(estimator, problem, group_size).variance)
    off = found - torch.diag_embed(found.diagonal(dim1=-2, dim2=-1))
    assert_apart(off, torch.zeros_like(off))


@pytest.mark.parametrize(
    "penalties",
    [(IN_REWARDS[2],), (IN_LOSS[1],), (IN_REWARDS[0], IN_LOSS[4], SHAPING), (CORRECT,)],
    ids=["reward", "loss", "all", "correct"],
)
@pytest.mark.parametrize("name", ["rloo", "suffix_is", "centered_tis", "reinforce", "topr", "grpo"])
def test_blocks_hold_the_penalties(name: str, penalties: tuple[object, ...]) -> None:
    problem = with_reference(typical(1, 2), 3)
    estimator = replace(entry(name, problem), penalties=penalties)  # type: ignore[arg-type]
    if name in ("topr", "grpo") and any(p in IN_REWARDS for p in penalties):
        with refused("sign of the advantage", error=Undefined):
            covariance_blocks(estimator, problem, 2)
        return
    found = covariance_blocks(estimator, problem, 3)
    assert_close(found, listed_blocks(estimator, problem, 3))


@pytest.mark.parametrize("number", range(60))
def test_blocks_on_generated_problems(number: int) -> None:
    problem = drawn(30_000 + number, leaves=6, prompts=(1, 1, 2))
    estimator = entry(NAMES[number % len(NAMES)], problem)
    group_size = 2 if problem.tree.leaves ** (2 * problem.prompts) <= 1500 else 1
    if group_size == 1 and estimator.compares:
        return
    try:
        found = covariance_blocks(estimator, problem, group_size)
    except Undefined as why:
        assert "degenerate" in str(why) or "overflows" in str(why)
        return
    expected = listed_blocks(estimator, problem, group_size)
    assert (found - expected).abs().max() <= 1e-10 * float(expected.abs().max()) + 1e-13
    assert_close(found, found.mT)


def test_what_is_too_large_or_has_no_recursion_is_refused_in_a_line() -> None:
    tree = Tree(3000, None, 1)
    wide = make("wide", tree, torch.zeros(1, 1, 3000), torch.arange(3000.0)[None])
    with refused("covariance blocks hold 9.0e+06 numbers", error=Undefined):
        covariance_blocks(get("rloo"), wide, 2)
    coupled = replace(get("group_mean"), advantage=use(batch_std))
    with refused("rloo needs groups of at least 2", error=Undefined):
        covariance_blocks(get("rloo"), typical(2, 1), 1)
    with refused("no covariance blocks", "couples prompts", error=Undefined):
        covariance_blocks(coupled, typical(2, 1), 2)
    assert covariance.BUDGET < 9e6


def test_a_study_adds_the_blocks_or_the_reason_for_each_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--problem", "bandit:arms=4", "--estimators", "rloo", "ppo", "--covariance", "--json"]
    assert main(["study", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["covariance"]
    blocks = torch.tensor(first["blocks"], dtype=torch.float64)
    assert first["row"] == 0 and blocks.shape == (1, 1, 4, 4)
    assert_close(blocks[0, 0].trace(), document["rows"][0]["variance"])
    assert "values" in second["reason"] and "blocks" not in second
    assert main(["study", "--problem", "bandit:arms=400", *flags[2:]]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "1.6e+05 numbers; allowed: 1e+05" in document["covariance"][0]["reason"]
    assert main(["study", *flags[:4], "--json"]) == 0
    assert "covariance" not in json.loads(capsys.readouterr().out)


def test_chains_have_no_blocks() -> None:
    settings = Settings(problem=("reasoning", {"horizon": 4}), estimators=(("rloo", {}),))
    (found,) = covariances(settings, bind)
    assert found == {"row": 0, "reason": "covariance blocks are of trees of prefixes"}
