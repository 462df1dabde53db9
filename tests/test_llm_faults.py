"""R15 in the training loop: numbers that are not finite.

A hundred faults of each kind, and the other things that happen to a run, are counted by
benchmarks/reliability.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from checks import refused
from spoiled_numbers import PLACES, Planted, assert_guarded, settings
from tiny_language_model import make
from training_harness import Parity, configuration

from windage.estimators.errors import BadInput
from windage.llm import journal, run
from windage.llm.train import train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "model", width=16, layers=1)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity())
    return tmp_path


@pytest.mark.parametrize("policy", ["skip", "set aside"])
def test_faults_skip_the_update_or_set_the_response_aside(policy, model, monkeypatch):
    assert_guarded(model, policy, [*PLACES, ""], monkeypatch)


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


def test_faults_in_a_row_are_counted_over_a_resume(model, monkeypatch):
    """One before, one after: that is two."""
    config = configuration("synchronous", model, **settings(4, "skip", 2))
    steps = []
    for resume, last in ((False, lambda: True), (True, lambda: False)):
        ready = run.start(config, resume=resume)
        Planted(["logp"] * 4, [math.nan] * 4, monkeypatch).into(ready)
        if not resume:
            assert not train(ready, lambda record: steps.append(record["update/skipped"]), last)
            continue
        with refused("step 2: logp", "2 updates in a row", error=BadInput):
            train(ready, lambda record: steps.append(record["update/skipped"]))
    assert steps == [1, 2]
