"""Learning studies: what a row and a verdict are, that runs repeat, and that every study runs.

What the studies find is judged at full size by `windage learn`; the wide margins below are those
that lie outside the range of all seeds (shared/spec/learning.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from windage.analysis import report
from windage.analysis.learning import (
    admission,
    composition,
    document,
    offline,
    placebo,
    quantised,
    recorded,
    staleness,
)
from windage.analysis.learning.index import STUDIES
from windage.analysis.learning.iterated import first_right, half
from windage.analysis.learning.page import verdict
from windage.analysis.learning.recipes import effective, preference
from windage.analysis.learning.study import (
    Ordering,
    Point,
    Size,
    gathered,
    interval,
    judge,
    trained,
)
from windage.analysis.learning.world import World, streamed, world
from windage.cli import main
from windage.toy.network import batch_of
from windage.toy.scores import FIGURES

TINY = Size(seeds=2, fit=12, train=64, held=8, samples=4, length=0.01)


def place(train: int = 64) -> World:
    return world("mid", (0, 1), steps=30, train=train, held=8)


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_runs(name: str) -> None:
    study = document.study(name)
    assert study.name == name
    measured = [trained(arm, TINY, 3) for arm in study.arms(TINY)]
    rows, judged = gathered(study, TINY, measured)
    panels = {panel.name for panel in study.panels}
    assert {row["panel"] for row in rows} == panels
    for row in rows:
        assert set(row["values"]) <= set(FIGURES)
        assert all(len(values) == 2 for values in row["values"].values())
    assert len(judged) == len(study.orderings(TINY))
    for panel in study.panels:
        mine = [row for row in rows if row["panel"] == panel.name]
        assert all(row[figure] is not None for row in mine for figure in panel.figures)
        assert {row["arm"] for row in mine} >= set(panel.spread)


def test_a_run_repeats() -> None:
    arm = document.study("placebo").arms(TINY)[0]
    first, again = trained(arm, TINY, 3), trained(arm, TINY, 3)
    for step, figures in first.items():
        assert all(np.array_equal(value, again[step][name]) for name, value in figures.items())


@pytest.mark.long
def test_processes_change_no_number() -> None:
    alone = document.run(("passes",), quick=True, seeds=1, seed=5)
    shared = document.run(("passes",), quick=True, seeds=1, seed=5, processes=2)
    assert alone["rows"] == shared["rows"] and alone["orderings"] == shared["orderings"]


def test_a_document_is_a_page_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(document.study("placebo"), quick=TINY)
    monkeypatch.setattr(document, "study", lambda name: study)
    found = document.run(("placebo",), quick=True, seeds=None, seed=0)
    json.dumps(found, allow_nan=False)
    files = {path.name for path in report.write(found, tmp_path)}
    assert {"learn.html", "learn.csv", "learn.parquet", "learn-placebo-1.png"} <= files
    page = (tmp_path / "learn.html").read_text()
    assert "Judged at full size only" in page and study.title in page
    assert report.table(found).title == study.title


def test_an_interval_is_students() -> None:
    values = np.array([0.2, 0.5, 0.3, 0.9])
    low, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    mean, width = interval(values)
    assert mean == pytest.approx((low + high) / 2) and width == pytest.approx((high - low) / 2)
    assert interval(values[:1]) == (0.2, None)


@pytest.mark.parametrize(("wins", "holds"), [(8, True), (7, True), (6, False)])
def test_an_ordering_holds_in_seven_of_eight_seeds(wins: int, holds: bool) -> None:
    high = np.array([0.6] * wins + [0.4] * (8 - wins))
    found = {
        ("p", "a", None): {5: {"pass_at_1": high}},
        ("p", "b", None): {0: {"pass_at_1": np.zeros(8)}, 5: {"pass_at_1": np.full(8, 0.45)}},
    }
    ordering = Ordering(
        says="a beats b", source="", high=Point(panel="p", arm="a"), low=Point(panel="p", arm="b")
    )
    judged = judge(ordering, found)
    assert judged["wins"] == wins and judged["holds"] is holds
    assert judge(replace(ordering, margin=0.2), found)["wins"] == 0
    assert judge(replace(ordering, low=0.5), found)["wins"] == wins
    early = replace(ordering, low=Point(panel="p", arm="b", step=0))
    assert judge(early, found)["wins"] == 8


def test_a_failed_ordering_is_told_from_one_that_was_not_expected() -> None:
    assert verdict({"holds": False, "robust": True}) == "FAILS"
    assert verdict({"holds": False, "robust": False}) == "not shown here"


def test_seeds_have_streams_of_their_own() -> None:
    streams = [streamed((seed,), stream)[0] for seed in range(50) for stream in range(5)]
    assert len(set(streams)) == 250
    assert streamed((2**63 - 1,), 0)[0] < 2**63


def test_pairs_hold_a_right_response_and_another_of_the_same_prompt() -> None:
    found = recorded.pairs(place().record(64, 16), place())
    assert found.group_size == 2 and found.tokens.shape[1] == 64 * 16
    prompts = found.prompts.unflatten(1, (-1, 2))
    rewards = found.rewards.unflatten(1, (-1, 2))
    assert torch.equal(prompts[:, :, 0], prompts[:, :, 1])
    assert bool((rewards[..., 0] == 1).all() and (rewards[..., 1] == -1).all())


def test_composed_data_have_the_share_of_right_responses_asked_for() -> None:
    record = place().record(64, 16)
    found = composition.composed(record, 0.05, 100, place())
    assert bool(((found.rewards > 0).sum(1) == 5).all()) and found.tokens.shape[1] == 100


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_baseline_gives_positives_their_share_at_the_same_scale(p: float, share: float) -> None:
    c, factor = effective(share, p)
    positive, negative = p * (1 - c) * factor, (1 - p) * (1 + c) * factor
    assert positive == pytest.approx(share) and negative == pytest.approx(1 - share)


def test_curation_keeps_the_first_right_response_and_every_other() -> None:
    record = place().record(64, 16)
    found = first_right(record)
    assert found.present is not None
    kept = found.present.unflatten(1, (-1, 16))
    right = (record.rewards > 0).unflatten(1, (-1, 16))
    assert bool((kept | right).all())
    assert bool(((kept & right).sum(-1) == right.any(-1)).all())


def test_half_of_the_weight_is_the_positives_in_every_seed() -> None:
    record = place().record(64, 16)
    rewards = half(record).rewards
    positive = rewards.clamp(min=0).sum(1)
    torch.testing.assert_close(positive, -rewards.clamp(max=0).sum(1), rtol=1e-5, atol=0)


def test_preferences_are_the_gradient_of_their_loss() -> None:
    here = place()
    record = recorded.pairs(here.record(64, 16), here).take(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    network = here.network
    tape = network.forward(1.1 * here.start, record.prompts, record.tokens)
    batch = batch_of(tape, record.tokens, record.behavior_logp, record.rewards, 3, network.task)
    logp = batch.get("logp").double().requires_grad_()
    gap = torch.where(batch.mask, logp - batch.get("behavior_logp"), 0.0).sum(-1)
    loss = torch.nn.functional.logsigmoid(0.1 * (gap[..., 0] - gap[..., 1])).sum() / 3
    (expected,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(preference(batch).own.double(), expected, rtol=1e-4, atol=1e-8)


def test_dynamic_sampling_takes_groups_that_vary_first() -> None:
    record = here = place().record(64, 4)
    found = admission.varied(record)
    assert len(found) == admission.BATCH
    rewards = found.rewards.unflatten(1, (-1, 4))
    varies = rewards.amax(-1) > rewards.amin(-1)
    there = here.rewards.unflatten(1, (-1, 4))
    number = (there.amax(-1) > there.amin(-1)).sum(1).clamp(max=admission.BATCH)
    assert torch.equal(varies.sum(1), number)
    assert bool((varies.long().diff(dim=1) <= 0).all())


def test_the_command_refuses_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["learn", "ofline"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "offline" in captured.err
    assert main.main(["learn", "placebo", "--seeds", "0"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_quick_form_of_each_study(name: str) -> None:
    program = "import sys; from windage.cli.main import main; sys.exit(main(sys.argv[1:]))"
    answer = subprocess.run(
        [sys.executable, "-c", program, "learn", name, "--quick", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(answer.stdout)
    assert found["schema"] == "windage/learn/1" and found["quick"]
    assert {row["study"] for row in found["rows"]} == {name}


@cache
def ended(name: str, panel: str, arm: str, x: float | None = None) -> dict[str, float]:
    """The last figures of one arm of a study at full size, with one seed."""
    size = Size(seeds=1)
    every = document.study(name).arms(size)
    (chosen,) = [a for a in every if (a.panel, a.name, a.x) == (panel, arm, x)]
    found = trained(chosen, size, 11)
    return {figure: float(values[0].mean()) for figure, values in found[max(found)].items()}


RIGHT = "pass_at_1"
MARGINS = [
    ("offline", offline.AMPLE, "naive", RIGHT, 0, 0.05),
    ("offline", offline.AMPLE, "naive", "invalid", 0.9, 1),
    ("offline", offline.AMPLE, "PPO", RIGHT, 0, 0.45),
    ("offline", offline.AMPLE, "positives only", RIGHT, 0.55, 1),
    ("offline", offline.AMPLE, "TOPR", RIGHT, 0.55, 1),
    ("placebo", placebo.PANEL, "no correction", RIGHT, 0, 0.02),
    ("placebo", placebo.PANEL, "centered", RIGHT, 0.15, 1),
    ("staleness", staleness.LATE, "no correction", RIGHT, 0, 0.3),
    ("staleness", staleness.LATE, "centered", RIGHT, 0, 0.3),
    ("staleness", staleness.LATE, "token TIS", RIGHT, 0.6, 1),
    ("staleness", staleness.LATE, "centered + TIS", RIGHT, 0.6, 1),
    ("quantised", quantised.MILD, "PPO", RIGHT, 0, 0.25),
    ("quantised", quantised.MILD, "token TIS", RIGHT, 0.6, 1),
    ("quantised", quantised.NOISY, "no correction", RIGHT, 0, 0.1),
    ("quantised", quantised.NOISY, "token TIS", RIGHT, 0, 0.1),
    ("quantised", quantised.NOISY, "centered", RIGHT, 0.22, 1),
    ("quantised", quantised.NOISY, "centered + TIS", RIGHT, 0.22, 1),
]


@pytest.mark.long
@pytest.mark.parametrize(("study", "panel", "arm", "figure", "low", "high"), MARGINS)
def test_wide_margins_of_one_seed(
    study: str, panel: str, arm: str, figure: str, low: float, high: float
) -> None:
    assert low <= ended(study, panel, arm)[figure] <= high


@pytest.mark.long
def test_wide_margins_between_arms_of_one_seed() -> None:
    def right(*arm: Any) -> float:
        return ended(*arm)[RIGHT]

    few, half = (("composition", composition.PANEL, "TOPR, 10% of responses right", p)
                 for p in (0.1, 0.5))  # fmt: skip
    assert right(*half) - right(*few) > 0.25
    truncated = ("composition", composition.PANEL, "TIS, 10% of responses right", 0.1)
    assert right(*few) - right(*truncated) > 0.03
    late = ("offline", offline.AMPLE, "TOPR"), ("offline", offline.AMPLE, "positives only")
    assert right(*late[0]) > right(*late[1])


@pytest.mark.long
def test_a_frozen_sampler_is_approached_and_no_more() -> None:
    """Mean of 8 seeds between 0.1 and 0.3, above what a synced sampler leaves."""
    arms = {arm.name: arm for arm in document.study("placebo").arms(Size())}
    found = trained(arms["no correction, frozen sampler"], Size(), 11)
    assert 0.1 < found[max(found)][RIGHT].mean() < 0.3
