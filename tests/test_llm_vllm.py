"""vLLM's engine draws and scores as transformers does, and takes weights while it runs.

Run by `.venv-vllm/bin/python -m pytest tests/test_llm_vllm.py` after `make vllm`.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_language_model
import torch
from checks import refused
from test_llm_samplers import (
    GRID,
    KINDS,
    REQUESTS,
    assert_drawn_from,
    kept_law,
    laws,
    loaded,
    other,
)
from training_harness import Parity

from windage.llm import models, run
from windage.llm.config import build, read
from windage.llm.samplers import probe, vllm
from windage.llm.samplers.protocol import EngineDied, Request, Sampler, SamplerFault, Sampling
from windage.llm.samplers.transformers import TransformersSampler
from windage.llm.train import train

absent = importlib.util.find_spec("vllm") is None
needs_vllm = pytest.mark.skipif(absent, reason="vllm is not installed here: run `make vllm`")
CLOSE = 1e-4


@pytest.mark.skipif(not absent, reason="vllm is installed")
def test_without_vllm_one_line_says_what_to_do():
    with refused("not installed", "make vllm", "transformers"):
        vllm.VllmSampler("nowhere", stop_ids=())


@pytest.fixture(scope="module", params=KINDS, ids=str)
def pair(request, tmp_path_factory):
    """An engine, and the model that it was read from; weights go back after each test."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    tiny_language_model.make(folder, *request.param, longest=1024, width=64)
    model = models.load(folder).policy.model
    narrow = {"max_num_batched_tokens": 1024}
    sampler = vllm.VllmSampler(
        str(folder),
        stop_ids=(1,),
        dtype="float32",
        batch=8,
        longest=1024,
        version=3,
        engine=narrow,
    )
    yield sampler, model
    sampler.close()


@pytest.fixture
def engine(pair):
    sampler, model = pair
    yield sampler, model
    sampler.load(model.named_parameters(), 3)


pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
LONG = tuple(5 + n * n % 20 for n in range(300))
PROBES = [(LONG, (8, 9, 15, 1)), ((2, 10), (11, 12)), ((2, 10, 7), (11,))]


def trainer_of(model):
    return TransformersSampler(model, stop_ids=(), share=True)


def rehearsed(sampler, model):
    trainer = trainer_of(model)
    return probe.rehearse(
        sampler,
        list(model.parameters()),
        model.named_parameters,
        lambda: trainer.score(PROBES),
        PROBES,
        probe.TOLERANCES["float32"],
    )


@needs_vllm
def test_every_log_probability_is_that_of_transformers(engine):
    sampler, model = engine
    assert isinstance(sampler, Sampler)
    for sampling in GRID:
        for request, responses in zip(REQUESTS, sampler.sample(REQUESTS, sampling), strict=True):
            assert [r.seed for r in responses] == list(
                range(request.seed, request.seed + request.count)
            )
            for response in responses:
                ids = response.ids.tolist()
                law = laws(model, request.prompt_ids, ids, sampling)
                assert_drawn_from(response, law, CLOSE)
                assert set(response.versions.tolist()) == {3}
                assert (1 in ids) == (ids[-1] == 1) == (response.finish_reason == "stop")
                assert response.finish_reason == "stop" or len(ids) == sampling.max_tokens
                assert (response.head_ids is None) == (sampling.head == 0)
    for ours, theirs in zip(sampler.score(PROBES), trainer_of(model).score(PROBES), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


@needs_vllm
def test_a_response_does_not_depend_on_its_neighbors(engine):
    sampler, _ = engine
    sampling = Sampling(max_tokens=12, temperature=0.9, top_p=0.95)
    many = [replace(r, count=9, seed=100 * r.seed) for r in REQUESTS]  # more than a batch
    for request, responses in zip(many, sampler.sample(many, sampling), strict=True):
        assert len({tuple(r.ids.tolist()) for r in responses}) > 4
        for response in responses[::4]:
            alone = replace(request, count=1, seed=response.seed)
            ((found,),) = sampler.sample([alone], sampling)
            assert torch.equal(found.ids, response.ids)
            torch.testing.assert_close(found.behavior_logp, response.behavior_logp)


@needs_vllm
def test_a_sync_reaches_every_weight(engine):
    sampler, model = engine
    assert rehearsed(sampler, model).largest < CLOSE


@needs_vllm
def test_an_output_layer_left_behind_is_caught(engine, monkeypatch):
    sampler, model = engine
    monkeypatch.setattr(vllm, "packed_again", lambda model: None)
    if model.config.tie_word_embeddings:
        with refused("stale", "version 3", error=probe.StaleWeights):
            rehearsed(sampler, model)
        monkeypatch.undo()
    else:
        rehearsed(sampler, model)


@needs_vllm
def test_prefixes_left_behind_are_caught(engine, monkeypatch):
    sampler, model = engine
    monkeypatch.setattr(sampler._engine, "reset_prefix_cache", lambda **given: True)
    with refused("stale", "version 3", error=probe.StaleWeights):
        rehearsed(sampler, model)


@needs_vllm
def test_prefixes_are_kept_by_version(engine, monkeypatch):
    """A cache that is not emptied serves no later version."""
    sampler, model = engine
    sampler.score(PROBES)
    monkeypatch.setattr(sampler._engine, "reset_prefix_cache", lambda **given: True)
    sampler.load(other(model), 8)
    wanted = trainer_of(loaded(model, other(model))).score(PROBES)
    for ours, theirs in zip(sampler.score(PROBES), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


@needs_vllm
@pytest.mark.parametrize("keep", [True, False])
def test_weights_that_come_between_tokens(engine, keep):
    """Those that started later see nothing of the old weights, though their prompt was kept."""
    sampler, model = engine
    swap, sampling = 3, Sampling(max_tokens=6)
    sampler.stop_ids = frozenset()
    calls = itertools.count(1)

    def between():
        if next(calls) == swap:
            sampler.load(other(model), 5, keep_cache=keep)

    new = loaded(model, other(model))
    request = Request(prompt_ids=LONG, count=12, seed=10)
    (found,) = sampler.sample([request], sampling, between)
    sampler.stop_ids = frozenset({1})
    assert [r.versions.tolist() for r in found] == [[3] * 3 + [5] * 3] * 8 + [[5] * 6] * 4
    for response in found:
        ids = response.ids.tolist()
        law = laws(new, LONG, ids, sampling)
        if response.versions[0] == 3:
            law[:swap] = laws(model, LONG, ids, sampling)[:swap]
            if keep:
                law[swap:] = kept_law(model, new, LONG, ids, swap)
        assert_drawn_from(response, law, CLOSE)


@needs_vllm
def test_many_long_prompts_are_read_whole(engine):
    """Together they are longer than a step takes; read in parts, they would end the engine."""
    sampler, model = engine
    prompts = [(2, 3 + n % 9, *LONG, *LONG, *LONG) for n in range(9)]
    requests = [Request(prompt_ids=p, count=1, seed=n) for n, p in enumerate(prompts)]
    found = sampler.sample(requests, Sampling(max_tokens=2))
    for request, (response,) in zip(requests, found, strict=True):
        law = laws(model, request.prompt_ids, response.ids.tolist(), Sampling())
        assert_drawn_from(response, law, CLOSE)


@needs_vllm
def test_what_is_not_finite_or_ends_the_engine_is_one_line(engine, monkeypatch):
    sampler, model = engine
    broken = [(n, p * float("nan") if "norm" in n else p) for n, p in model.named_parameters()]
    sampler.load(broken, 4)
    with refused("not finite", "request 0", "version 4", error=SamplerFault):
        sampler.sample(REQUESTS, Sampling())
    with refused("given response", "not finite", error=SamplerFault):
        sampler.score(PROBES)
    sampler.load(model.named_parameters(), 5)
    assert sampler.sample(REQUESTS, Sampling())  # nothing was left behind
    assert rehearsed(sampler, model).largest < CLOSE
    with refused("did not take", "version 6", error=EngineDied):
        sampler.load([("no.such.weight", torch.zeros(1))], 6)

    def end():
        raise RuntimeError("the core is gone\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(sampler._engine, "step", end)
        with refused("vLLM failed", "RuntimeError: the core is gone", error=EngineDied):
            sampler.sample(REQUESTS, Sampling())


@needs_vllm
def test_what_the_caller_raises_between_tokens_is_its_own(engine):
    sampler, _ = engine

    def between():
        raise LookupError("of the trainer")

    with refused("of the trainer", error=LookupError):
        sampler.sample(REQUESTS, Sampling(), between)
    assert not sampler._engine.has_unfinished_requests()
    with refused("a token of a prompt is 999"):
        sampler.sample([replace(REQUESTS[0], prompt_ids=(2, 999))], Sampling())


@needs_vllm
def test_a_run_with_adapters_gives_the_engine_their_merged_weights(tmp_path, monkeypatch):
    """After each step; it goes on from a checkpoint in an engine that reads the merged model."""
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    tiny_language_model.make(tmp_path / "model", longest=2048, width=64)
    text = '[model]\nlora_rank = 2\n[sampling]\nengine = "vllm"\ndtype = "float32"\nbatch = 8'
    (tmp_path / "told.toml").write_text(text)
    base = build(
        {
            "model": {"path": str(tmp_path / "model"), "device": "cpu"},
            "recipe": {"name": "reinforce"},
            "sampling": {"max_tokens": 4},
            "train": {"steps": 2, "prompts": 4, "group_size": 2, "learning_rate": 0.05},
            "run": {"folder": str(tmp_path / "run"), "save_every": 1},
        }
    )
    config = read(tmp_path / "told.toml", base)
    gaps = []

    def tell(record):
        ours = run.score(ready.loaded, PROBES)
        with models.reference_pass(ready.loaded.policy):
            bare = run.score(ready.loaded, PROBES)
        gaps.append([probe.gap(ready.desk.sampler, PROBES, p).largest for p in (ours, bare)])

    for resume in (False, True):
        config = build({"train": {"steps": 3 if resume else 2}}, config)
        ready = run.start(config, resume=resume)
        assert ready.start == (2 if resume else 0)
        train(ready, tell)
    assert len(gaps) == 3
    for near, far in gaps:
        assert near < CLOSE < 1e-2 < far


@needs_vllm
def test_an_asynchronous_run_goes_on_with_another_engine(tmp_path, monkeypatch):
    folder = tiny_language_model.make(tmp_path / "model", width=64, longest=2048)
    told = {
        "model": {"path": str(folder), "device": "cpu"},
        "sampling": {"engine": "vllm", "dtype": "float32", "max_tokens": 6, "batch": 8},
        "recipe": {"name": "reinforce"},
        "train": {"mode": "asynchronous", "steps": 2, "prompts": 2, "group_size": 2},
        "run": {"folder": str(tmp_path / "run"), "card": False, "save_every": 0},
    }
    ready, records = run.start(build(told)), []

    def end():
        raise RuntimeError("the core is gone")

    monkeypatch.setattr(ready.desk.sampler._engine, "step", end)
    train(ready, records.append)
    assert [(one["step"], one["deaths"]) for one in records] == [(1, 1), (2, 1)]


SMOL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.long
@needs_vllm
@pytest.mark.skipif(not SMOL.exists(), reason="no SmolLM2 here: run `make model`")
def test_a_real_model_is_that_of_transformers_token_by_token(monkeypatch):
    loaded = models.load(SMOL)
    trainer = TransformersSampler(loaded.policy.model, stop_ids=(), share=True)
    sampler = vllm.VllmSampler(str(SMOL), stop_ids=loaded.stop_ids, dtype="float32", longest=512)
    asked = Request(prompt_ids=models.encode(loaded, "What is 17 + 25?"), count=8, seed=0)
    (found,) = sampler.sample([asked], Sampling(max_tokens=24))
    sequences = [(asked.prompt_ids, r.ids.tolist()) for r in found]
    for ours, theirs in zip(found, trainer.score(sequences), strict=True):
        torch.testing.assert_close(ours.behavior_logp, theirs, rtol=0, atol=CLOSE)
    monkeypatch.setattr(vllm, "packed_again", lambda model: None)
    with refused("stale", error=probe.StaleWeights):
        probe.rehearse(
            sampler,
            list(loaded.policy.parameters()),
            lambda: models.weights(loaded.policy),
            lambda: trainer.score(sequences),
            sequences,
            probe.TOLERANCES["bfloat16"],
        )
    sampler.close()
