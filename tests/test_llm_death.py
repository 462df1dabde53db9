"""An engine that ends by itself: another one goes on, or the command ends in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import refused
from test_cli_train import TINY, words
from tiny_language_model import make
from training_harness import Parity

from windage.cli.main import main
from windage.llm import run
from windage.llm.config import build
from windage.llm.samplers.protocol import EngineDied, SamplerFault
from windage.llm.train import train

CALLS = ("sample", "load", "score")
# As any engine does it, and as vLLM tells it.
WAYS = [RuntimeError("gone\nand more"), EngineDied("the engine vLLM failed at version 0: gone")]


class Mortal:
    """A sampler that dies at a call.

    Args:
        inner: the sampler.
        fate: the call, how many of them it survives, and what it raises; emptied by the death.
    """

    def __init__(self, inner, fate: list) -> None:
        self.inner, self.fate = inner, fate

    @property
    def version(self):
        return self.inner.version

    def _meet(self, name: str) -> None:
        if self.fate and self.fate[0] == name:
            self.fate[1] -= 1
            if self.fate[1] < 0:
                _, _, problem = self.fate
                self.fate.clear()
                raise problem

    def sample(self, *arguments, **settings):
        self._meet("sample")
        return self.inner.sample(*arguments, **settings)

    def load(self, *arguments, **settings):
        self._meet("load")
        return self.inner.load(*arguments, **settings)

    def score(self, *arguments):
        self._meet("score")
        return self.inner.score(*arguments)

    def close(self):
        self.inner.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "tiny", width=16, layers=1)


@pytest.fixture
def fate(monkeypatch):
    """What becomes of every sampler that is made."""
    found: list = []
    real = run.sampler_of
    monkeypatch.setattr(run, "sampler_of", lambda *a: Mortal(real(*a), found))
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    return found


def asynchronous(model: Path, folder: Path):
    told = {
        "model": {"path": str(model), "device": "cpu"},
        "recipe": {"name": "reinforce"},
        "sampling": {"max_tokens": 4},
        "train": {"mode": "asynchronous", "steps": 2, "prompts": 2, "group_size": 2},
        "run": {"folder": str(folder)},
    }
    return run.start(build(told))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("problem", WAYS, ids=["any", "vLLM"])
def test_an_asynchronous_run_goes_on_with_another_engine(name, problem, model, tmp_path, fate):
    ready, records = asynchronous(model, tmp_path / "run"), []
    fate[:] = [name, 0, problem]
    train(ready, records.append)
    assert fate == [] and [one["deaths"] for one in records][-1] == 1
    assert [one["step"] for one in records] == [1, 2]


def test_a_refusal_is_no_death(model, tmp_path, fate):
    ready = asynchronous(model, tmp_path / "run")
    fate[:] = ["sample", 0, SamplerFault("the response is not finite")]
    with refused("the response is not finite", error=SamplerFault):
        train(ready)
    assert ready.source.deaths == 0


def flags(model: Path, place: str, folder: Path) -> list[str]:
    return words({**TINY, "--model.path": model, place: folder})


@pytest.mark.parametrize("name", CALLS)
def test_wherever_an_engine_dies_a_run_ends_in_a_line_and_goes_on(
    name, model, tmp_path, fate, capsys
):
    """At the start, in a step, in a sync and in an evaluation."""
    evaluating = ["--evaluate.every", "1", "--evaluate.questions", "2", "--train.steps", "1"]
    for survived in range(0, 10, 2):
        fate[:] = [name, survived, RuntimeError("gone\nand more")]
        folder = tmp_path / f"{survived}"
        capsys.readouterr()
        status = main(["train", "--quiet", *flags(model, "--run.folder", folder), *evaluating])
        out, err = capsys.readouterr()
        if fate:
            assert status == 0 and survived > 2
            break
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("windage train: the sampler died") and "RuntimeError: gone;" in err
        if (folder / "config.toml").exists():
            assert main(["train", "--quiet", "--resume", str(folder)]) == 0
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == [1]


def test_sample_and_evaluate_end_in_a_line(model, tmp_path, fate, capsys):
    evaluation = ["evaluate", str(model), "--task", "arithmetic", "--questions", "2"]
    sampling = ["sample", *flags(model, "--store", tmp_path / "store")]
    for command in (evaluation, sampling):
        fate[:] = ["sample", 0, RuntimeError("gone")]
        capsys.readouterr()
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert (out, fate) == ("", [])
        assert err.splitlines()[-1].startswith(f"windage {command[0]}: the sampler died")
        assert "Traceback" not in err
