"""What a run needs of memory, by arithmetic, beside what a run of the same configuration holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tiny_language_model import make
from torch import Tensor
from training_harness import Parity

from windage.llm import memory, run
from windage.llm.config import Config, build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "tiny", width=16, layers=1)


CASES = {
    "a reference": {"recipe": {"name": "grpo_k3"}},
    "a reference that adapters spare": {
        "recipe": {"name": "grpo_k3"},
        "model": {"lora_rank": 2},
        "train": {"optimizer": "sgd"},
    },
    "a sampler in half precision": {"model": {"autocast": "bfloat16"}},
    "all in double precision": {"model": {"dtype": "float64"}},
    "weights that wait": {"train": {"mode": "asynchronous"}},
    "a critic": {"recipe": {"name": "ppo"}, "critic": {"kind": "model"}},
}


def of(model, folder, /, **sections) -> Config:
    base = {
        "model": {"path": str(model), "device": "cpu"},
        "recipe": {"name": "rloo"},
        "sampling": {"max_tokens": 3},
        "train": {"steps": 1, "prompts": 2, "group_size": 2},
        "run": {"folder": str(folder)},
    }
    return build(sections, build(base))


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, single numbers left out."""
    return sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


def states(optimizer) -> int:
    return sum(size(state.values()) for state in optimizer.state.values())


@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_is_what_a_run_holds(name, model, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity())
    config = of(model, tmp_path / "run", **CASES[name])
    found = {k: round(v * 2**30) for k, v in memory.estimate(config).items() if k != "parameters"}
    ready = run.start(config)
    rows = [dict(one.row) for one in ready.source.rows(0)]
    ready.learner.prepare(rows)
    ready.learner.appraise(rows, 0)
    ready.learner.update(rows)
    named = ready.loaded.policy.named_parameters()
    held = {
        "weights": size(p for n, p in named if "lora" not in n),
        "gradients": size(ready.learner.trained),
        "optimizer": states(ready.learner.optimizer),
        "sampler": size(ready.desk.sampler.model.parameters()),
    }
    if config.train.mode == "asynchronous":
        held["waiting"] = size(value for _, value in ready.source._last.weights)
        ready.source.close()
    if ready.learner.reference is not None:
        held["reference"] = size(ready.learner.reference.parameters())
    if ready.learner.critic is not None:
        trunk = size(ready.learner.critic.trunk.parameters())
        own = states(ready.learner.critic.optimizer) - 2 * size(
            ready.learner.critic.head.parameters()
        )
        held["critic"] = 2 * trunk + own
    assert held == {name: value for name, value in found.items() if name in held}
    rest = found.keys() - held.keys()
    assert rest == {"activations", "logits", "total"}
    assert found["total"] == pytest.approx(sum(v for n, v in found.items() if n != "total"), abs=9)


def test_offline_there_is_a_sampler_only_where_it_is_asked(model, tmp_path):
    offline = {"mode": "offline", "store": "somewhere"}
    plain = memory.estimate(of(model, tmp_path, train=offline))
    asked = memory.estimate(of(model, tmp_path, train=offline, evaluate={"every": 1}))
    assert plain["sampler"] == 0 < asked["sampler"] == asked["weights"]
