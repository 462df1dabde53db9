"""The loop on tiny models: it learns in every mode, and sizes that should not matter do not."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checks import assert_close, refused
from safetensors.torch import load_file
from tiny_language_model import make
from training_harness import Parity

from windage.analysis.diagnose.readers import index as dump
from windage.llm import config, journal, run, sources
from windage.llm import train as loop
from windage.llm.draw import Drawn
from windage.llm.rollouts import read, steps
from windage.llm.samplers.transformers import TransformersSampler
from windage.llm.tasks.protocol import Question
from windage.llm.train import curated, plan, train
from windage.llm.verify import Verdict


class Sevens:
    """Right is a response that begins with a 7."""

    name = "sevens"

    def questions(self, split, seed, start, count):
        return [
            Question(id=f"{n}", text=f"{n % 3}", answer="7") for n in range(start, start + count)
        ]

    def judge(self, pairs, cut):
        words = ["right" if text.startswith("7") else "wrong" for _, text in pairs]
        return [Verdict(word=word, stopped=None, seconds=0.0) for word in words]

    def alike(self, answers):
        return list(range(len(answers)))

    def close(self):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", width=16, layers=1)


@pytest.fixture(autouse=True)
def sevens(monkeypatch):
    monkeypatch.setattr(run, "task_of", lambda name, settings: Sevens())


def of(base_model: Path, folder: Path, /, **sections: dict) -> config.Config:
    base = config.build(
        {
            "model": {"path": str(base_model), "device": "cpu"},
            "recipe": {"name": "rloo"},
            "sampling": {"max_tokens": 3},
            "train": {"steps": 2, "prompts": 4, "group_size": 4, "learning_rate": 0.02},
            "run": {"folder": str(folder), "card": False},
        }
    )
    return config.build(sections, base)


def trained(base_model: Path, folder: Path, /, **sections: dict) -> list[dict]:
    """The records of a run."""
    records: list[dict] = []
    train(run.start(of(base_model, folder, **sections)), records.append)
    return records


def weights(folder: Path, step: int = 2) -> torch.Tensor:
    named = load_file(folder / "checkpoints" / f"checkpoint-{step:08d}" / "model.safetensors")
    return torch.cat([named[name].flatten() for name in sorted(named)])


MODES = {
    "synchronous": {"mode": "synchronous"},
    "one step off": {"mode": "one step off"},
    "asynchronous": {"mode": "asynchronous", "max_lag": 2},
    "iterated": {"mode": "iterated", "steps": 3, "prompts": 12, "minibatches": 3, "data_epochs": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_it_learns_in_every_mode(mode, model, tmp_path):
    told = {"steps": 12, "prompts": 6, "learning_rate": 0.06, **MODES[mode]}
    found = trained(model, tmp_path / "run", train=told, recipe={"name": "token_tis"})
    assert found[0]["reward/mean"] < 0.35
    assert found[-1]["reward/mean"] > 0.7
    limit = {"synchronous": 0, "one step off": 1, "asynchronous": 2, "iterated": 5}[mode]
    assert max(record["lag/max"] for record in found) <= limit
    if mode in ("one step off", "asynchronous"):
        assert max(record["lag/max"] for record in found) >= 1
        rows = list(dump.read(tmp_path / "run" / "rollouts"))
        lags = {(row.step, int((row.current_version - row.versions).max())) for row in rows}
        wanted = [record["lag/max"] for record in found]
        assert [max(lag for at, lag in lags if at == n + 1) for n in range(12)] == wanted


def test_it_learns_from_a_store_alone(model, tmp_path):
    trained(model, tmp_path / "made", train={"prompts": 40, "learning_rate": 0.0})
    told = {"mode": "offline", "store": str(tmp_path / "made" / "rollouts"), "data_epochs": 3}
    before = {"every": 1, "questions": 12, "samples": 4}
    trained(
        model,
        tmp_path / "run",
        train={**told, "steps": 0, "prompts": 8},
        recipe={"name": "topr"},
        task={"low": -1.0},
        evaluate=before,
    )
    told = journal.read(tmp_path / "run" / "evaluate.jsonl")
    assert told[0]["pass_at_1"] < 0.35 < 0.6 < told[-1]["pass_at_1"]
    assert not (tmp_path / "run" / "rollouts").exists()


@pytest.mark.parametrize("name", ["grpo_k3", "decoupled_ppo"])
def test_what_a_store_says_of_other_policies_is_said_anew(name, model, tmp_path, monkeypatch):
    """At its first step a run's reference and proximal policy are its policy, whoever recorded."""
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    trained(model, tmp_path / "made", recipe={"name": name}, train={"learning_rate": 0.2})
    moved = tmp_path / "made" / "checkpoints" / "checkpoint-00000002"
    store = {"mode": "offline", "store": str(tmp_path / "made" / "rollouts"), "steps": 0}
    ready = run.start(of(moved, tmp_path / "run", train=store, recipe={"name": name}))
    rows = ready.source.rows(0)
    ready.learner.prepare(rows)
    found = ready.learner.update(rows).batch
    field = {"grpo_k3": "reference_logp", "decoupled_ppo": "proximal_logp"}[name]
    assert_close(getattr(found, field), found.logp, relative=1e-5)
    assert float((found.behavior_logp - found.logp).abs().max()) > 0.01


def test_the_size_of_micro_batches_moves_no_weight(model, tmp_path):
    for size in (1, 3, 16):
        trained(model, tmp_path / f"{size}", train={"micro_batch": size, "optimizer": "sgd"})
    for size in (1, 3):
        assert_close(weights(tmp_path / f"{size}"), weights(tmp_path / "16"), relative=1e-6)


def test_the_store_holds_every_response_with_its_reason(model, tmp_path):
    recipe = {"name": "dapo"}
    found = trained(model, tmp_path / "run", recipe=recipe, train={"refill": 2, "group_size": 2})
    folder = tmp_path / "run" / "rollouts"
    assert steps(folder) == [1, 2]
    fingerprint = run.models.load(model).fingerprint
    rows = list(read(folder, tokenizer=fingerprint))
    reasons = Counter(row["rejected"] for row in rows)
    assert reasons["group without signal, another was drawn"] > 0
    assert len(rows) > 2 * 4 * 2
    assert {row["group_id"][:2] for row in rows} >= {"0:", "1-"}
    assert all(row["verdict"] in ("right", "wrong") for row in rows)
    assert found[-1]["updates"] == 2


def test_minibatches_and_passes_are_updates_of_whole_groups(model, tmp_path):
    told = {"passes": 2, "minibatches": 2, "steps": 1}
    assert trained(model, tmp_path / "run", train=told)[0]["updates"] == 4
    made = run.start(of(model, tmp_path / "other", train=told))
    rows = [{"group_id": f"{n // 4}"} for n in range(16)]
    parts = list(plan(made, rows, 0))
    assert [ends for _, ends in parts] == [False, True, False, True]
    for first, second in (parts[:2], parts[2:]):
        assert sorted(first[0] + second[0]) == list(range(16))
        assert {n // 4 for n in first[0]}.isdisjoint(n // 4 for n in second[0])
    assert parts[0] != parts[2]


def test_curating_leaves_a_share_of_positives_and_says_so():
    rows = [{"rejected": None, "reward": float(n < 30)} for n in range(200)]
    for share in (0.1, 0.5, 0.9, 1.0):
        kept = [row for row in curated(rows, share, seed=0, step=1) if row["rejected"] is None]
        good = sum(row["reward"] for row in kept)
        assert good / len(kept) == pytest.approx(share, abs=0.01)
    assert curated(rows, 0, seed=0, step=1) is rows
    out = curated(rows, 0.5, seed=0, step=1)
    assert sum(row["rejected"] == "curated" for row in out) == 140
    assert out != curated(rows, 0.5, seed=0, step=2)


def test_adapters_train_and_the_checkpoint_holds_the_merged_model(model, tmp_path):
    trained(model, tmp_path / "run", model={"lora_rank": 2}, train={"learning_rate": 0.1})
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/checkpoint-00000002/model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("proj" in name for name in moved)
    run.models.load(tmp_path / "run/checkpoints/checkpoint-00000002")
    index = tmp_path / "run/checkpoints/checkpoint-00000002/model.safetensors.index.json"
    assert json.loads(index.read_text())["weight_map"] == dict.fromkeys(after, run.WEIGHTS)


# What a file may ask for.


def told(base_model: Path, folder: Path, text: str, /, **sections: dict) -> config.Config:
    """A configuration read from a file."""
    file = folder / "told.toml"
    file.write_text(text)
    return config.read(file, of(base_model, folder / "run", **sections))


def flat(named) -> torch.Tensor:
    return torch.cat([value.detach().flatten().clone() for value in dict(named).values()])


REFRESHED = {
    'refresh = "never"': lambda p: [p[0], p[0], p[0], p[0]],
    'refresh = "steps"\nevery = 3': lambda p: [p[0], p[0], p[3], p[3]],
    'refresh = "epoch"': lambda p: [p[0], p[2], p[2], p[4]],
    'refresh = "ema"\nevery = 2\nalpha = 0.25': lambda p: [
        p[0],
        half := 0.25 * p[2] + 0.75 * p[0],
        half,
        0.25 * p[4] + 0.75 * half,
    ],
}


@pytest.mark.parametrize("text", REFRESHED)
def test_a_reference_moves_when_the_file_says(text, model, tmp_path, monkeypatch):
    """Two steps of two updates, each a pass: after which updates it is which policy."""
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    made = told(
        model, tmp_path, f"[reference]\n{text}\n[train]\nminibatches = 2",
        recipe={"name": "grpo", "settings": {"coefficient": 0.1}},
    )  # fmt: skip
    ready, real = run.start(made), loop._update
    policies, references = [flat(ready.loaded.policy.named_parameters())], []

    def update(*arguments):
        found = real(*arguments)
        policies.append(flat(ready.loaded.policy.named_parameters()))
        references.append(flat(ready.learner.reference.named_parameters()))
        return found

    monkeypatch.setattr(loop, "_update", update)
    train(ready)
    assert all(not torch.equal(a, b) for a, b in pairwise(policies))
    assert_close(torch.stack(references), torch.stack(REFRESHED[text](policies)), relative=1e-6)


RATES = {
    "constant": [0, 1, 1, 1],
    "linear": [0, 1, 2 / 3, 1 / 3],
    "cosine": [0, 1, 3 / 4, 1 / 4],
}


@pytest.mark.parametrize("name", RATES)
def test_a_plain_step_is_as_long_as_schedule_and_clip_say(name, model, tmp_path, monkeypatch):
    """Every gradient is longer than the limit; the rate rises in one update."""
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    text = f'[train]\nschedule = "{name}"\nwarmup = 1\nsteps = 4\nmax_grad_norm = 0.01'
    made = told(
        model, tmp_path, f'{text}\noptimizer = "sgd"',
        train={"learning_rate": 3.0}, model={"dtype": "float64"},
    )  # fmt: skip
    ready, records = run.start(made), []
    places = [flat(ready.loaded.policy.named_parameters())]

    def tell(record):
        places.append(flat(ready.loaded.policy.named_parameters()))
        records.append(record)

    train(ready, tell)
    assert all(record["update/gradient_norm"] > 0.01 for record in records)
    steps = [float((after - before).norm()) for before, after in pairwise(places)]
    assert steps == pytest.approx([0.03 * share for share in RATES[name]], rel=1e-3)


@pytest.mark.parametrize("text", ['dtype = "bfloat16"', 'autocast = "bfloat16"'])
def test_half_precision_trains_and_its_sampler_follows(text, model, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    ready = run.start(told(model, tmp_path, f"[model]\n{text}"))
    before = flat(ready.loaded.policy.named_parameters())
    wanted = torch.bfloat16 if "dtype" in text else torch.float32
    ours = dict(ready.loaded.policy.base.named_parameters())
    assert {p.dtype for p in ours.values()} == {wanted}
    theirs = dict(ready.desk.sampler.model.named_parameters())
    assert {p.dtype for p in theirs.values()} == {torch.bfloat16}
    train(ready)
    assert not torch.equal(flat(ours), before)
    assert ready.learner.updates == 2
    for name, value in theirs.items():
        assert torch.equal(value, ours[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("name", ["grpo_k3", "decoupled_ppo"])
def test_a_recipe_that_looks_at_another_policy_can_have_itself_as_a_shadow(
    name, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    (record,) = trained(
        model, tmp_path / "run", recipe={"name": name, "shadow": [name]}, train={"steps": 1}
    )
    assert record[f"shadow/{name}/cosine"] == pytest.approx(1.0)
    assert record[f"shadow/{name}/norm_ratio"] == pytest.approx(1.0)


def test_adafactor_and_activations_that_are_computed_again(model, tmp_path):
    """The step that Adafactor makes of the gradient that a plain step shows."""
    text = '[train]\noptimizer = "adafactor"\nsteps = 1\n[model]\ngradient_checkpointing = true'
    (tmp_path / "plain").mkdir()
    plain = told(
        model, tmp_path / "plain", "[train]\nsteps = 1",
        train={"optimizer": "sgd", "learning_rate": 1.0},
    )  # fmt: skip
    found, read = [], []
    for made in (plain, told(model, tmp_path, text)):
        ready, passes = run.start(made), []
        layer = ready.loaded.policy.base.get_decoder().layers[0].self_attn
        layer.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        before = {n: p.detach().clone() for n, p in ready.loaded.policy.named_parameters()}
        train(ready)
        found.append({n: p.detach() for n, p in ready.loaded.policy.named_parameters()})
        read.append(len(passes))
    wanted = {name: value.clone().requires_grad_() for name, value in before.items()}
    for name, value in wanted.items():
        value.grad = before[name] - found[0][name]
    torch.optim.Adafactor(list(wanted.values()), lr=0.02).step()
    assert_close(flat(found[1]), flat(wanted), relative=1e-4)
    moved = (flat(found[1]) - flat(before)).abs().max()
    assert float((flat(found[1]) - flat(wanted)).abs().max()) < 1e-3 * float(moved)
    # Those without a gradient, of the probes after the step, are made once.
    assert read[1] == 2 * (read[0] - run.PROBES) + run.PROBES


@pytest.mark.parametrize("keep", [False, True])
def test_weights_in_flight_keep_the_cache_where_the_file_says(keep, model, tmp_path, monkeypatch):
    text = f"[sampling]\nkeep_cache = {str(keep).lower()}"
    loads, real = [], TransformersSampler.load

    def loading(self, weights, version, *, keep_cache=False):
        loads.append(keep_cache)
        real(self, weights, version, keep_cache=keep_cache)

    monkeypatch.setattr(TransformersSampler, "load", loading)
    ready = run.start(told(model, tmp_path, text, train={"mode": "asynchronous"}))
    del loads[:]
    train(ready)
    assert loads and set(loads) == {keep}


def test_a_sampler_without_the_new_weights_stops_the_run(model, tmp_path, monkeypatch):
    real = TransformersSampler.load

    def stale(self, weights, version, **settings):
        real(self, ((n, w) for n, w in weights) if version == 0 else (), version, **settings)

    monkeypatch.setattr(
        TransformersSampler,
        "load",
        lambda s, w, v, **k: real(s, w, v, **k) if v == 0 else setattr(s, "version", v),
    )
    with refused("the weights of the sampler are stale: at version 1"):
        trained(model, tmp_path / "run")


@pytest.mark.parametrize("mode", [*MODES, "offline"])
def test_weights_are_given_once_and_held_out_questions_meet_the_newest(
    mode, model, tmp_path, monkeypatch
):
    """The rehearsal leaves the first ones; a thread is given them, to keep."""
    told = {"mode": mode, "max_lag": 2, "learning_rate": 0.02}
    if mode == "offline":
        trained(model, tmp_path / "made")
        told |= {"store": str(tmp_path / "made" / "rollouts")}
    loads, passes, asked = [], [], []
    load, score, evaluate = TransformersSampler.load, run.score, loop.evaluate

    def loading(self, weights, version, **settings):
        loads.append(version)
        load(self, weights, version, **settings)

    def scoring(*arguments):
        passes.append(ready.learner.updates if ready else 0)
        return score(*arguments)

    def asking(desk, *arguments):
        probes = run._probes(ready.config, ready.loaded, desk)
        gap = run.probe.gap(desk.sampler, probes, score(ready.loaded, probes))
        asked.append((desk.sampler.version, ready.learner.updates, gap.largest < 1e-4))
        return evaluate(desk, *arguments)

    monkeypatch.setattr(TransformersSampler, "load", loading)
    monkeypatch.setattr(run, "score", scoring)
    monkeypatch.setattr(loop, "evaluate", asking)
    ready = None
    ready = run.start(of(model, tmp_path / "run", train=told, evaluate={"every": 1}))
    train(ready)
    ready.publish()
    wanted = [0, 0, 0] + [0] * (mode == "asynchronous") + [1, 2]
    assert loads == passes == wanted
    assert asked == [(n, n, True) for n in range(3)]


def test_a_folder_with_a_run_and_a_foreign_store_are_refused(model, tmp_path):
    trained(model, tmp_path / "run")
    with refused("holds a run; allowed: another folder, or --resume"):
        run.start(of(model, tmp_path / "run"))
    other = make(tmp_path / "other", vocab=("a", "b", "7"))
    told = {"mode": "offline", "store": str(tmp_path / "run" / "rollouts"), "steps": 0}
    with refused("was written with another tokenizer"):
        run.start(of(other, tmp_path / "new", train=told))
    colder = {"temperature": 0.5}
    with refused("sampled at temperature 1, and sampling.temperature is 0.5; allowed: that of the"):
        run.start(of(model, tmp_path / "new", train=told, sampling=colder))
    told["store"] = str(tmp_path / "nothing")
    with refused("is no folder"):
        run.start(of(model, tmp_path / "new", train=told))


class Dying:
    """A sampler that dies now and then."""

    left = 3

    def __init__(self, inner):
        self.inner, self.version = inner, inner.version

    def sample(self, requests, sampling, between=None):
        if Dying.left and requests[0].prompt_ids:
            Dying.left -= 1
            raise RuntimeError("the engine is gone")
        return self.inner.sample(requests, sampling, between)

    def load(self, weights, version, *, keep_cache=False):
        self.inner.load(weights, version, keep_cache=keep_cache)
        self.version = version

    def score(self, sequences):
        return self.inner.score(sequences)

    def close(self):
        pass


def test_an_engine_that_dies_is_made_again(model, tmp_path, monkeypatch):
    real = run.sampler_of
    monkeypatch.setattr(run, "sampler_of", lambda *a: Dying(real(*a)))
    Dying.left = 3
    found = trained(model, tmp_path / "run", train={"mode": "asynchronous"})
    assert found[-1]["deaths"] == 3
    Dying.left = 99
    with refused("the sampler died 4 times in a row at step 0: RuntimeError: the engine is gone"):
        trained(model, tmp_path / "more", train={"mode": "asynchronous"})
    with refused("the sampler died at step 1: RuntimeError: the engine is gone; allowed"):
        trained(model, tmp_path / "once")


def test_order_and_seeds_depend_on_the_place_alone(model, tmp_path):
    made = run.start(of(model, tmp_path / "run"))
    order = sources.Order(prompts=2, group_size=2, seed=0)
    both = order.ask(made.desk, 0, count=4)
    second = order.ask(made.desk, 1)
    assert all(isinstance(one, Drawn) for one in both)
    for ours, theirs in zip(both[4:], second, strict=True):
        assert ours.row["sample_id"] == theirs.row["sample_id"]
        assert ours.row["response_ids"].tolist() == theirs.row["response_ids"].tolist()
