"""What a step logs, what the progress line shows, and trackers that cannot stop a run."""

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import assert_close, refused

from windage.estimators.catalogue import get
from windage.estimators.errors import BadInput
from windage.estimators.estimator import coefficients
from windage.llm import console, trackers
from windage.llm.metrics import (
    by_verl,
    document,
    made_of,
    of_shadows,
    of_update,
    record,
    said,
    token_ids,
)
from windage.llm.rollouts import to_batch
from windage.llm.shadow import carried

ROOT = Path(__file__).parents[1]
WORDS = ("right", "wrong", "invalid", "format")


def row(group: int, member: int, length: int, *, reward: float | None = 1.0, head: int = 0) -> dict:
    made = {
        "group_id": f"g{group}",
        "sample_id": f"{group}:{member}",
        "prompt_ids": [1, 2],
        "response_ids": [10 + member + t for t in range(length)],
        "mask": [True] * length,
        "behavior_logp": [-1.0 - 0.1 * t for t in range(length)],
        "versions": [3] * length,
        "reward": reward,
        "outcome": reward,
        "finish_reason": "length" if length > 3 else "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "seed": None,
        "elapsed": 0.0,
        "rejected": None,
        "verdict": WORDS[(group + member) % 4],
    }
    if head:
        made["head_ids"] = np.array([[10 + member + t, 0][:head] for t in range(length)])
        made["head_behavior_logp"] = np.array(
            [[-1.0 - 0.1 * t, -3.0][:head] for t in range(length)]
        )
    return made


def rows(**settings) -> list[dict]:
    return [
        row(p, g, 1 + (p + g) % 4, reward=float((p + g) % 3 == 0), **settings)
        for p in range(3)
        for g in (0, 1)
    ]


def passed(made: list[dict], **others):
    batch = to_batch(made, group_size=2, current_version=5)
    logp = torch.where(batch.mask, batch.behavior_logp + 0.2, 0.0)
    return replace(batch, logp=logp, probability_square=(2 * logp).exp(), **others)


def test_a_record_holds_what_the_step_did():
    made = rows()
    batch = passed(made)
    entropy = torch.where(batch.mask, 0.5, 0.0).double()
    parts = [
        of_update(get("cispo"), batch, rows=made, entropy=entropy, update__gradient_norm=norm)
        for norm in (0.5, 2.0)
    ]
    asked = carried({"gspo": get("gspo")}, fields=())
    shadow = of_shadows(asked, get("cispo"), batch, made)
    found = record(7, parts, shadow=shadow, time__step=1.5)
    assert next(iter(found)) == "step" and found["step"] == 7
    assert list(found)[1:] == sorted(list(found)[1:])
    assert found["update/gradient_norm"] == 2.0 and found["time/step"] == 1.5
    assert_close(found["reward/invalid"], sum(r["verdict"] == "invalid" for r in made) / 6)
    assert_close(found["reward/format"], sum(r["verdict"] == "format" for r in made) / 6)
    assert_close(found["length/truncated"], sum(len(r["mask"]) > 3 for r in made) / 6)
    assert_close(found["policy/entropy"], 0.5)
    assert_close(found["mismatch/k1"], -0.2)
    assert found["lag/mean"] == 2 and "shadow/gspo/cosine" in found
    assert all(math.isfinite(value) for value in found.values())


def test_without_a_forward_pass_there_are_rewards_and_lengths():
    batch = to_batch(rows(), group_size=2, current_version=5)
    found = record(0, [of_update(get("grpo"), batch, rows=rows())])
    assert {"reward/mean", "length/mean", "lag/mean"} < set(found)
    assert not [name for name in found if name.startswith(("ratio/", "weight/", "update/"))]
    assert of_shadows({"rloo": get("rloo")}, get("grpo"), batch, rows()) == {}


def test_coefficients_are_those_of_the_update_with_and_without_a_head():
    made = rows(head=2)
    batch = passed(made)
    entry = get("starting_point", length=4)
    headless = made_of(entry, batch)
    with_head = replace(batch, head_logp=batch.head_behavior_logp - 0.1)
    whole = made_of(entry, with_head)
    assert headless.head is None and whole.head is not None
    assert torch.equal(headless.own, whole.own)
    assert torch.equal(whole.head, coefficients(entry, with_head).head)


def test_words_and_tokens_stand_where_the_record_has_them():
    made = rows()
    order = [3, 0, 5, 1, 4, 2]
    batch = passed([made[i] for i in order])
    shuffled = [made[i] for i in order]
    hits, ids = said(shuffled, batch, "invalid"), token_ids(shuffled, batch)
    for p in range(batch.rewards.shape[0]):
        for g in range(2):
            mine = shuffled[int(batch.row_index[p, g])]
            assert bool(hits[p, g]) == (mine["verdict"] == "invalid")
            assert ids[p, g][batch.mask[p, g]].tolist() == mine["response_ids"]
    assert said([{}] * 6, batch, "invalid") is None


def test_names_of_verl_are_kept_apart_from_ours():
    found = by_verl({"mismatch/k3": 1.0, "weight/ess": 0.5, "ratio/ess": 0.4, "step": 3})
    assert found == {
        "rollout_corr/k3_kl": 1.0,
        "rollout_corr/rollout_is_eff_sample_size": 0.5,
        "windage/ratio/ess": 0.4,
        "windage/step": 3,
    }


def test_the_page_of_metrics_is_current():
    assert (ROOT / "docs/metrics.md").read_text() == document()


def test_the_line_shows_what_is_there():
    figures = {
        "step": 12,
        "reward/mean": 0.5,
        "reward/invalid": 0.034,
        "lag/mean": 1.25,
        "mismatch/k3": 2.345e-4,
        "ratio/ess": 0.98765,
        "update/gradient_norm": 0.3123,
        "time/tokens_per_second": 12345.6,
    }
    assert console.line(figures, steps=200) == (
        "step  12/200  reward 0.500  invalid 3 %  lag 1.2  k3 2.3e-04  ess 0.988  grad 0.31  "
        "tok/s 12,346"
    )
    assert console.line({"step": 1, "reward/mean": "nan"}) == "step 1"
    out = io.StringIO()
    console.watcher(200, out)(figures)
    assert out.getvalue().count("\n") == 1
    out.close()
    console.watcher(200, out)(figures)


class Fake:
    """A tracker that fails when it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.logged, self.ended = fails, [], False

    def start(self) -> None:
        self._maybe("start")

    def log(self, values, step) -> None:
        self._maybe("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended = True
        self._maybe("finish")

    def _maybe(self, name: str) -> None:
        if self.fails == name:
            raise OSError("no\nnetwork")


@pytest.fixture
def fake(monkeypatch):
    def plant(tracker: Fake) -> Fake:
        monkeypatch.setattr(trackers, "_tracker", lambda name, folder, config: tracker)
        monkeypatch.setattr(trackers, "find_spec", lambda name: object())
        return tracker

    return plant


def test_records_reach_a_tracker_as_numbers(fake, tmp_path):
    tracker = fake(Fake())
    with trackers.tracking(["wandb"], tmp_path, {}) as track:
        track({"step": 3, "a": 1.5, "words": "no"})
    assert tracker.logged == [(3, {"a": 1.5})] and tracker.ended


@pytest.mark.parametrize("place", ["log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_left_alone(place, fake, tmp_path, capsys):
    fake(Fake(place))
    with trackers.tracking(["trackio"], tmp_path, {}) as track:
        for step in range(3):
            track({"step": step, "a": 1.0})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "trackio" in said and "no network" in said


def test_a_tracker_that_does_not_start_or_is_not_there_is_refused(fake, tmp_path, monkeypatch):
    fake(Fake("start"))
    with (
        refused("'wandb'", "no network", error=BadInput),
        trackers.tracking(["wandb"], tmp_path, {}),
    ):
        pass
    with refused("tensorbord", "tensorboard", error=BadInput):
        trackers.check(["tensorbord"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with refused("'tensorboard'", "pip install 'windage[tensorboard]'", error=BadInput):
        trackers.check(["tensorboard"])


def test_a_run_that_fails_still_ends_its_trackers(fake, tmp_path):
    tracker = fake(Fake())
    with pytest.raises(KeyError), trackers.tracking(["wandb"], tmp_path, {}):
        raise KeyError("step")
    assert tracker.ended


def test_no_tracker_costs_no_import(tmp_path):
    before = set(sys.modules)
    with trackers.tracking([], tmp_path, {}) as track:
        track({"step": 0})
    assert not [m for m in set(sys.modules) - before if m.startswith("accelerate")]
