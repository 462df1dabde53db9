"""R15 and R9 in the training loop: numbers that are not finite, and a disk that fails."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import refused
from tiny_language_model import make
from training_harness import Parity, configuration, failing, go, tampered

from windage.estimators.errors import BadInput
from windage.llm import checkpoint, draw, journal, passes, run
from windage.llm.train import train

PLACES = ("reward", "behavior_logp", "logp", "gradient_norm")
BAD = (math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "model", width=16, layers=1)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity())
    return tmp_path


class Planted:
    """Puts numbers that are not finite into a run, one place a step.

    Args:
        places: of each step; empty: none.
        values: of each step.
    """

    def __init__(self, places, values, patch) -> None:
        self.places, self.values, self.patch, self.step = places, values, patch, 0
        self.rewarded, self.passed = draw.reward, passes.Responses.through

    @property
    def here(self):
        return self.places[self.step] if self.step < len(self.places) else ""

    def into(self, ready) -> None:
        """Everywhere it may have to go; the second response of a step is at fault."""
        rewards, sampled = [0], ready.desk.sampler.sample

        def reward(verdict, scale):
            rewards[0] += 1
            bad = self.here == "reward" and rewards[0] % 6 == 2
            return self.values[self.step] if bad else self.rewarded(verdict, scale)

        def sample(requests, sampling, between=None):
            groups = sampled(requests, sampling, between)
            if self.here == "behavior_logp":
                logp = groups[0][1].behavior_logp.clone()
                logp[0] = self.values[self.step]
                groups[0][1] = replace(groups[0][1], behavior_logp=logp)
            return groups

        def through(responses, policy, *others):
            forward, spoil = self.passed(responses, policy, *others), self.here == "logp"

            def passed(numbers):
                found = forward(numbers)
                if spoil and 1 in numbers.tolist():
                    value = self.values[self.step]
                    spoiled = torch.zeros_like(found.logp)
                    spoiled[numbers.tolist().index(1), 0] = value
                    return replace(found, logp=found.logp + spoiled)
                return found

            return passed

        def hook(gradient):
            spoil = self.here == "gradient_norm"
            return torch.full_like(gradient, self.values[self.step]) if spoil else gradient

        self.patch.setattr(draw, "reward", reward)
        self.patch.setattr(ready.desk.sampler, "sample", sample)
        self.patch.setattr(passes.Responses, "through", through)
        next(p for p in ready.learner.trained).register_hook(hook)


def settings(steps: int, policy: str, limit: int = 1000) -> dict:
    return {
        "recipe": {"name": "reinforce", "settings": {}},
        "reference": {"refresh": "never"},
        "evaluate": {"every": 0},
        "run": {"save_every": 0},
        "train": {
            "passes": 1,
            "minibatches": 1,
            "steps": steps,
            "on_nonfinite": policy,
            "nonfinite_in_a_row": limit,
            "schedule": "constant",
            "warmup": 0,
        },
    }


def assert_guarded(model, policy, places, monkeypatch):
    """Weights stay bit for bit where an update is skipped; all is counted and written out."""
    values = [BAD[n % 3] for n in range(len(places))]
    config = configuration("synchronous", model, **settings(len(places), policy))
    ready = run.start(config)
    plant = Planted(places, values, monkeypatch)
    plant.into(ready)
    weights = dict(ready.loaded.policy.named_parameters())
    before = {name: one.detach().clone() for name, one in weights.items()}
    moved = []

    def tell(record):
        for one in weights.values():
            assert torch.isfinite(one).all()
        moved.append(any(not torch.equal(before[name], one) for name, one in weights.items()))
        before.update({name: one.detach().clone() for name, one in weights.items()})
        plant.step += 1

    train(ready, tell)
    aside = {"set aside": {"", "reward", "behavior_logp", "logp"}, "skip": {""}}[policy]
    assert moved == [place in aside for place in places]
    count = ready.learner.count
    assert count.skipped == moved.count(False)
    assert count.set_aside == sum(m and place != "" for m, place in zip(moved, places, strict=True))
    assert ready.learner.updates == moved.count(True)
    kept = journal.read(Path("run/nonfinite.jsonl"))
    for step, (place, value) in enumerate(zip(places, values, strict=True), 1):
        mine = [one for one in kept if one["step"] == step]
        if place in ("", "gradient_norm"):
            assert len(mine) == (6 if place else 0)
        else:
            (one,) = mine
            assert (one["what"], one["value"]) == (place, str(value))
            assert one["sample_id"].endswith(":1")
    last = checkpoint.load(checkpoint.latest(Path("run/checkpoints")))
    assert last.state["guard"] == vars(count)


@pytest.mark.parametrize("policy", ["skip", "set aside"])
def test_faults_skip_the_update_or_set_the_response_aside(policy, model, monkeypatch):
    assert_guarded(model, policy, [*PLACES, ""], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["skip", "set aside"])
def test_a_hundred_faults(policy, model, monkeypatch):
    """R15."""
    assert_guarded(model, policy, [*PLACES, ""] * 25, monkeypatch)


@pytest.mark.parametrize(("policy", "limit", "last"), [("skip", 2, 2), ("stop", 9, 1)])
def test_a_run_with_faults_at_every_step_ends_in_a_line(policy, limit, last, model, monkeypatch):
    config = configuration("synchronous", model, **settings(4, policy, limit))
    ready = run.start(config)
    plant = Planted(["logp"] * 4, [math.nan] * 4, monkeypatch)
    plant.into(ready)
    steps = []
    with refused(f"step {last}: logp of response 1 is nan", error=BadInput):
        train(ready, lambda record: steps.append(record["step"]))
    assert steps == list(range(1, last + 1))
    assert len(journal.read(Path("run/nonfinite.jsonl"))) == last


@pytest.mark.parametrize("place", ["reward", "behavior_logp"])
def test_what_was_drawn_with_a_fault_stops_a_run_that_is_told_to(place, model, monkeypatch):
    ready = run.start(configuration("synchronous", model, **settings(2, "stop")))
    Planted([place], [math.nan], monkeypatch).into(ready)
    with refused(place, "nan", error=BadInput):
        train(ready)


# A disk that fails.


def outcome(work) -> str:
    """The line in which it ends, empty where it does not."""
    try:
        work()
    except BadInput as problem:
        return str(problem)
    except OSError as problem:  # the command line prints it as one line, too
        assert problem.filename is not None or problem.strerror
        return str(problem)
    return ""


def assert_a_fault_of_the_disk_is_a_line_and_the_run_goes_on(config, at, number, wanted):
    with tampered(at, failing(number)):
        line = outcome(lambda: go(config, lucky=False))
    assert "\n" not in line
    if line:
        assert os.strerror(number) in line and "run" in line, line
    go(config, resume=True, lucky=False)
    assert not list(Path("run").rglob("*unfinished*"))
    found = [one["step"] for one in journal.read(Path("run/metrics.jsonl"))]
    assert found == list(range(1, config.train.steps + 1))
    last = checkpoint.load(checkpoint.latest(Path("run/checkpoints")))
    assert {
        name: bytes(t.numpy().tobytes()) for name, t in last.tensors["optimizer"].items()
    } == wanted
    return line


def faulty_disk(model, every: int, tmp_path, monkeypatch) -> tuple[int, int]:
    """Faults at every so many calls of a run; how many there were, and how many ended it."""
    config = configuration(
        "synchronous",
        model,
        **settings(2, "skip"),
    )
    monkeypatch.chdir(tmp_path)
    with tampered() as seen:
        go(config, lucky=False)
    kept = checkpoint.load(checkpoint.latest(Path("run/checkpoints"))).tensors["optimizer"]
    wanted = {name: bytes(t.numpy().tobytes()) for name, t in kept.items()}
    ended = count = 0
    for at in range(0, len(seen.names), every):
        place = tmp_path / str(at)
        place.mkdir()
        monkeypatch.chdir(place)
        number = (errno.ENOSPC, errno.EIO, errno.EACCES)[count % 3]
        line = assert_a_fault_of_the_disk_is_a_line_and_the_run_goes_on(config, at, number, wanted)
        ended, count = ended + bool(line), count + 1
    return count, ended


def test_a_failing_disk_ends_a_run_in_a_line_that_names_the_path(model, tmp_path, monkeypatch):
    count, ended = faulty_disk(model, 37, tmp_path, monkeypatch)
    assert count > 2 and ended > 1


@pytest.mark.long
def test_a_failing_disk_at_every_call(model, tmp_path, monkeypatch):
    """R9."""
    count, ended = faulty_disk(model, 1, tmp_path, monkeypatch)
    assert ended > count / 2
