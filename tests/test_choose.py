"""`windage choose`: merits against their definition, paces, exclusions, decisions, bad input."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from windage.analysis import report
from windage.analysis.choose import choice
from windage.analysis.choose.choice import Cell, best, cells, choose, excluded, experiment, rival
from windage.analysis.choose.measured import measured
from windage.analysis.choose.merit import (
    Measured,
    error_of,
    measure,
    model,
    samplers,
    served,
    spread_over,
)
from windage.analysis.choose.pace import paces, ways
from windage.analysis.choose.request import PRECISIONS, Request
from windage.analysis.claims.measures import merit as merit_of_claims
from windage.cli import main
from windage.estimators.errors import BadInput
from windage.toy.exact.plan import exact
from windage.toy.exact.transfer import mismatch
from windage.toy.objective import objective

SHORT = Request(response_tokens=16, prompts=6, slots=4, mismatch=1e-3, drift=1e-4)


def cell(recipe: str, gain: float, steps: float = 10.0) -> Cell:
    return Cell(recipe=recipe, way="w", direction=1.0, signal=0.5, steps=steps, gain=gain, lag=1.0)


def test_merit_at_one_lag_is_that_of_the_exact_moments() -> None:
    """At lag 2, with twice the prompts of the model, against the claims' own formula."""
    entries = [e for e in served(SHORT) if e.name in ("rloo", "token_tis", "grpo")]
    found = measure(SHORT, entries, (0, 2))
    late = samplers(SHORT, (0, 2))[1]
    for entry in entries:
        moments = exact(entry, late, SHORT.group_size)
        direction, signal = found[entry.name].parts(spread_over({2: 1.0}, (0, 2)), 6)
        expected = merit_of_claims(moments, late, 2)
        assert direction * signal == pytest.approx(expected, rel=1e-6)


def test_a_mixture_of_lags_has_the_moments_of_groups_drawn_from_it() -> None:
    """One prompt a batch: the second moment of a mixture is the mixture of second moments."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    variances = torch.tensor([1.0, 4.0], dtype=torch.float64)
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    measured = Measured(gradient=means.sum(0), prompts=1, means=means, variances=variances)
    direction, signal = measured.parts(shares, 1)
    mean = 0.25 * means[0] + 0.75 * means[1]
    second = 0.25 * (1 + means[0].square().sum()) + 0.75 * (4 + means[1].square().sum())
    gradient = means.sum(0)
    expected = (gradient @ mean) ** 2 / (gradient.square().sum() * second)
    assert direction * signal == pytest.approx(float(expected))
    away = replace(measured, gradient=-gradient)
    assert away.parts(shares, 1) == (0.0, 0.0)


def test_lags_between_two_steps_of_the_ladder_are_split() -> None:
    shares = spread_over({0: 0.5, 3: 0.25, 9: 0.25}, (0, 2, 6))
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.1875, 0.3125]).double())
    assert float(shares.sum()) == 1


def test_the_samplers_have_the_mismatch_and_the_drift_that_were_stated() -> None:
    fresh = model(SHORT)
    sigma = error_of(fresh.on_policy(), 1e-3, 0)
    assert sigma > 0 and error_of(fresh, 0.0, 0) == 0
    late = samplers(SHORT, (0, 1))
    assert mismatch(late[0])["kl"] == pytest.approx(1e-3, rel=1e-3)
    alone = samplers(replace(SHORT, mismatch=0.0), (0, 1))
    assert mismatch(alone[0])["kl"] == pytest.approx(0, abs=1e-15)
    assert mismatch(alone[1])["kl"] == pytest.approx(1e-4, rel=1e-3)


def test_the_model_has_the_pass_rate_in_the_middle_and_the_mean_length() -> None:
    long = replace(SHORT, response_tokens=400, pass_rate=0.3)
    chain = model(long)
    assert mismatch(chain)["tokens"] == pytest.approx(400, rel=0.05)
    lower, higher = (float(objective(model(replace(long, pass_rate=p))).value) for p in (0.1, 0.6))
    assert lower < float(objective(chain).value) < higher


def test_paces_order_as_they_must() -> None:
    found = {p.name: p for p in paces(SHORT)}
    assert set(found) == set(ways(SHORT))
    for each in found.values():
        assert sum(each.lags.values()) == pytest.approx(1)
        assert 0 < each.generation <= 1 and 0 < each.training <= 1
    assert found["synchronous, GPUs apart"].lags == {0: 1.0}
    assert found["one step off"].lags == {1: 1.0}
    apart, off = found["synchronous, GPUs apart"], found["one step off"]
    assert off.step_seconds <= apart.step_seconds
    caps = [found[f"asynchronous, capacity {cap}"] for cap in (1, 2, 4, 8)]
    assert all(a.mean_lag <= b.mean_lag + 1e-9 for a, b in pairwise(caps))
    assert found["in-flight updates"].mean_lag <= found["asynchronous, capacity 2"].mean_lag
    refilled = {p.name: p for p in paces(replace(SHORT, pass_rate=0.05), refill=True)}
    slow = refilled["synchronous, GPUs apart"].step_seconds
    assert slow > apart.step_seconds


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, {"ppo"}),
        ({"logprobs": False}, {"ppo", "token_is", "centered", "grpo", "topr"}),
        ({"head": False}, {"centered", "centered_tis", "starting_point"}),
        ({"covered": False}, {"trajectory_is"}),
    ],
)
def test_what_data_cannot_support_is_excluded_with_the_reason(change, names) -> None:
    found = excluded(replace(SHORT, **change))
    assert names <= set(found)
    assert all(found.values())
    assert "rloo" not in found and "reinforce" not in found


def test_with_a_critic_ppo_is_excluded_for_another_reason_only() -> None:
    assert "critic" in excluded(SHORT)["ppo"]
    assert "not computed" in excluded(replace(SHORT, critic=True))["ppo"]


def test_gain_is_merit_times_updates_a_gpu() -> None:
    entries = [e for e in served(SHORT) if e.name == "rloo"]
    for each in cells(SHORT, entries):
        assert each.gain == pytest.approx(each.merit * each.steps / SHORT.gpus)
    order = best([cell("a", 1.0), cell("b", 3.0), cell("a", 2.0)])
    assert [(each.recipe, each.gain) for each in order] == [("b", 3.0), ("a", 2.0)]


def test_rivals_are_close_or_first_after_a_change() -> None:
    order = [cell("a", 1.0), cell("b", 0.99), cell("c", 0.5), cell("d", 0.4)]
    assert rival(order, [[cell("a", 1.0)]]) == ["a", "b"]
    assert rival(order, [[cell("d", 1.0)]]) == ["a", "b", "d"]


def test_an_experiment_costs_more_where_the_difference_is_smaller() -> None:
    near = experiment(SHORT, [cell("a", 1.0), cell("b", 0.9)])
    far = experiment(SHORT, [cell("a", 1.0), cell("b", 0.5)])
    assert near["gpu_hours"] > far["gpu_hours"] > 0
    assert near["difference"] == pytest.approx(0.01) and far["seeds"] >= 2
    noise = 2 * (choice.SEED_SPREAD**2 + 0.25 / choice.QUESTIONS)
    assert near["gpu_hours"] == pytest.approx(2 * SHORT.budget * noise * (2.8 / 0.01) ** 2)
    equal = experiment(SHORT, [cell("a", 1.0), cell("b", 1.0)])
    assert equal["gpu_hours"] is None


@pytest.fixture(scope="module")
def document() -> dict:
    return choose(SHORT)


def test_the_document_hangs_together(document: dict, tmp_path: Path) -> None:
    json.dumps(document, allow_nan=False)
    ranks = [row["gain"] for row in document["ranking"]]
    assert ranks == sorted(ranks, reverse=True)
    recipes = {row["recipe"] for row in document["rows"]}
    assert recipes == {row["recipe"] for row in document["ranking"]}
    assert not recipes & {row["recipe"] for row in document["excluded"]}
    assert len(document["sensitivity"]) == len(choice.CHANGES)
    assert all(isinstance(each["agrees"], bool) for each in document["conditions"])
    undecided = document["verdict"] == "undecided"
    assert undecided == (len(document["rivals"]) > 1) == (document["experiment"] is not None)
    files = {path.name for path in report.write(document, tmp_path)}
    assert {"choose.html", "choose.png", "choose.parquet"} <= files
    assert report.table(document).lines


def rows(path: Path, shift: float = 0.01, tokens: int = 10) -> Path:
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as out:
        for i in range(20):
            logp = (-torch.rand(tokens + i, generator=generator)).tolist()
            signs = [1 if j % 2 else -1 for j in range(len(logp))]
            behavior = [v - s * shift for v, s in zip(logp, signs, strict=True)]
            out.write(json.dumps({"logp": logp, "behavior_logp": behavior}) + "\n")
    return path


def test_lengths_and_mismatch_are_measured_from_rows(tmp_path: Path) -> None:
    found = measured(rows(tmp_path / "a.jsonl"))
    assert found["response_tokens"] == pytest.approx(19.5)
    assert found["mismatch"] == pytest.approx(0.5 * 0.01**2, rel=0.05)
    import pandas as pd

    table = pd.read_json(tmp_path / "a.jsonl", lines=True)
    table.to_parquet(tmp_path / "a.parquet")
    assert measured(tmp_path / "a.parquet") == pytest.approx(found)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no dump"),
        ("{\n", "line 1 is no JSON"),
        ("[1]\n", "line 1 is no object"),
        ('{"logp": [-1.0]}\n', "line 1 has no behavior_logp"),
        ('{"logp": [-1.0], "behavior_logp": [-1.0]}\n', "1 rows; allowed: at least 8"),
        ('{"logp": [-1.0], "behavior_logp": [-1.0, -2.0]}\n', "line 1 has 1 entries in logp"),
        ('{"logp": [NaN], "behavior_logp": [-1.0]}\n', "line 1 has logp nan at token 0"),
        ('{"logp": [-1.0], "behavior_logp": [-1000.0]}\n', "line 1 has the log-ratio 999"),
        ('{"logp": ["a"], "behavior_logp": [-1.0]}\n', "allowed: a list of numbers"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match=words):
        measured(path)


@pytest.mark.parametrize(
    "words",
    [
        ["--response-tokens", "many"],
        ["--response-tokens", "1"],
        ["--group-size", "1"],
        ["--precision", "fp7"],
        ["--precision", "fp8", "--mismatch", "0.1"],
        ["--from", "no-such-file.jsonl"],
        ["--prommpts", "3"],
    ],
)
def test_bad_flags_are_one_line(words, capsys) -> None:
    assert main.main(["choose", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_every_field_of_a_request_has_a_flag() -> None:
    from windage.cli.choose import HELP, SWITCHES

    assert {f.name for f in fields(Request)} == {*HELP, *SWITCHES, "seed"}
    assert PRECISIONS["bf16"] == Request().mismatch
