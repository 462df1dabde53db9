"""TRL 1.16 itself, on a tiny random model: the gradient of a step is that of our own path.

Run by `make check-trl`; skipped where TRL is not installed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
from adapter_cases import NAMES, entry, largest, words
from checks import refused
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator
from windage.llm.adapters.carry import refusal
from windage.llm.update import Forward, accumulate, micro_batches

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("default")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from windage.llm.adapters import trl  # noqa: E402
from windage.llm.adapters.hosts import BOUND, carried  # noqa: E402
from windage.llm.record import record_trl  # noqa: E402
from windage.llm.record.trl import METHODS  # noqa: E402
from windage.llm.record.writer import vocabulary  # noqa: E402
from windage.llm.rollouts import read, steps  # noqa: E402

VOCAB, PROMPTS, GENERATIONS, LONGEST = 16, 3, 4, 6
ROWS = PROMPTS * GENERATIONS
CARRIED = [name for name in NAMES if refusal(entry(name), trl.HOST) is None]


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, VOCAB)}}
    inner = Tokenizer(WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).double()


def reference() -> LlamaForCausalLM:
    """Another policy near the model."""
    found = model()
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(1.1)
    return found


class Replay:
    """Recorded responses in the place of a sampler, with its log-probabilities and rewards."""

    def __init__(self, source: LlamaForCausalLM) -> None:
        g = torch.Generator().manual_seed(3)
        self.prompts = [[2 + p, 5] for p in range(PROMPTS) for _ in range(GENERATIONS)]
        lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=g)
        lengths[5] = LONGEST
        self.ids = [torch.randint(2, VOCAB, (int(n),), generator=g).tolist() for n in lengths]
        self.mask = [[n % 7 != 3 or t != 0 or len(ids) == 1 for t in range(len(ids))]
                     for n, ids in enumerate(self.ids)]  # fmt: skip
        self.rewards = torch.randn(ROWS, generator=g).abs().round(decimals=1).tolist()
        self.logprobs = []
        for n, (prompt, ids) in enumerate(zip(self.prompts, self.ids, strict=True)):
            with torch.no_grad():
                now = logp_of(source, prompt, ids)
            noise = torch.randn(len(ids), generator=g, dtype=torch.float64)
            self.logprobs.append((now + (0.004 if n % 3 == 0 else 0.4) * noise).tolist())

    def __call__(self, prompts: list[str], _: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: one row a prompt that TRL asks for."""
        return {
            "prompt_ids": self.prompts,
            "completion_ids": self.ids,
            "logprobs": self.logprobs,
            "env_mask": [[int(x) for x in row] for row in self.mask],
            "score": self.rewards,
            "other": [float(n % 2) for n in range(ROWS)],
        }


def logp_of(source: LlamaForCausalLM, prompt: list[int], ids: list[int]) -> Tensor:
    logits = source(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)


def reward(completions: list[Any], score: list[float], **_: Any) -> list[float]:
    return score


def other(completions: list[Any], other: list[float], **_: Any) -> list[float]:
    return other


class Spy(trl.WindageTrainer):
    """Keeps the gradient of each optimizer step."""

    kept: list[Tensor]

    def training_step(self, *given: Any) -> Tensor:
        found = super().training_step(*given)
        if self._step % self.args.gradient_accumulation_steps == 0:
            grads = [p.grad.flatten().clone() for p in self.model.parameters()]
            self.kept = [*getattr(self, "kept", []), torch.cat(grads)]
        return found


def config(folder: Any, name: str, size: int, **more: Any) -> trl.WindageConfig:
    beta = entry(name).settings.get("coefficient", 0.0)
    return trl.WindageConfig(
        output_dir=str(folder),
        **{
            "estimator": words(name),
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": ROWS // size,
            "num_generations": GENERATIONS,
            "max_completion_length": LONGEST,
            "max_steps": 1,
            "learning_rate": 0.0,
            "max_grad_norm": math.inf,
            "beta": beta if "reference_logp" in entry(name).needs else 0.0,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
            **more,
        },
    )


def trained(folder: Any, name: str, size: int, replay: Any = None, **more: Any) -> Spy:
    source = model()
    if "reference_logp" in entry(name).needs:
        # TRL loads the reference from where the model came from.
        source.config._name_or_path = str(folder / "reference")
        reference().float().save_pretrained(folder / "reference")
    rows = Dataset.from_dict({"prompt": [f"w{2 + p} w5" for p in range(PROMPTS)]})
    functions = [reward, other] if name == "gdpo" else reward
    trainer = Spy(
        model=source,
        reward_funcs=functions,
        args=config(folder, name, size, **more),
        train_dataset=rows,
        processing_class=tokenizer(),
        rollout_func=replay or Replay(source),
    )
    trainer.train()
    return trainer


def ours(estimator: Estimator, source: LlamaForCausalLM, told: Replay, *, gdpo: bool) -> Tensor:
    """The gradient of our own path, one response a pass."""
    extra = [[r, float(n % 2)] for n, r in enumerate(told.rewards)]

    @torch.no_grad()
    def under(policy: LlamaForCausalLM) -> list[list[float]]:
        pairs = zip(told.prompts, told.ids, strict=True)
        return [logp_of(policy, prompt, ids).tolist() for prompt, ids in pairs]

    rewards = [sum(parts) for parts in extra] if gdpo else told.rewards
    batch = Batch.from_rows(
        rewards,
        [n // GENERATIONS for n in range(ROWS)],
        mask=told.mask,
        behavior_logp=told.logprobs,
        proximal_logp=under(source),
        reference_logp=under(reference()),
        components=extra,
    )
    width = batch.mask.shape[-1]

    def forward(which: Tensor) -> Forward:
        found = [
            torch.nn.functional.pad(row, (0, width - len(row)))
            for n in which.tolist()
            for row in [logp_of(source, told.prompts[n], told.ids[n])]
        ]
        return Forward(logp=torch.stack(found))

    source.zero_grad()
    accumulate(estimator, batch, forward, micro_batches(batch, 5))
    grads = torch.cat([p.grad.flatten().clone() for p in source.parameters()])
    source.zero_grad()
    return grads


@pytest.mark.parametrize("name", CARRIED)
def test_the_gradient_of_a_step_is_ours(name, tmp_path, record_property):
    source = model()
    expected = ours(entry(name), source, Replay(source), gdpo=name == "gdpo")
    apart = []
    for size in (12, 4, 1) if name in ("dapo", "gspo", "prompt_mean", "decoupled_tis") else (3,):
        (found,) = trained(tmp_path, name, size).kept
        apart.append(largest(found, expected))
    record_property("largest", max(apart))
    print(f"{name} {max(apart):.2e}")
    assert max(apart) < BOUND


def test_every_entry_that_the_hook_can_carry_is_tried():
    assert {*CARRIED} == carried(trl.HOST)


@pytest.mark.parametrize("size", [2, 6])
def test_a_generation_batch_of_several_steps_divides_each_by_its_own_tokens(size, tmp_path):
    """Two optimizer steps a generation; with weights at rest their gradients add up."""
    steps = ROWS // size // 2
    trainer = trained(
        tmp_path,
        "rloo",
        size,
        gradient_accumulation_steps=steps,
        steps_per_generation=2 * steps,
        max_steps=2,
    )
    source = model()
    expected = ours(entry("rloo"), source, Replay(source), gdpo=False)
    first, second = trainer.kept
    # TRL clears gradients after each step; each is a mean over half of the responses.
    assert largest((first + second) / 2, expected) < 1e-5


def test_without_a_rollout_function_the_sampler_is_the_trainer(tmp_path):
    """TRL's own generation: ratios are 1, so cispo with a cap of 1 and rloo-like weights agree."""
    source = model()
    rows = Dataset.from_dict({"prompt": [f"w{2 + p} w5" for p in range(PROMPTS)]})

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    kept = []
    for name in ("token_tis", "rloo"):
        torch.manual_seed(5)
        trainer = Spy(
            model=source,
            reward_funcs=lengths,
            args=config(tmp_path, name, 4),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
        trainer.train()
        kept += trainer.kept
        source.zero_grad()
    assert largest(kept[0], kept[1]) < 1e-5


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("centered", {}, "head"),
        ("m2po", {}, "one micro-batch"),
        ("cispo", {"loss_type": "grpo"}, "loss_type is 'grpo'"),
        ("cispo", {"epsilon_high": 0.28}, "epsilon_high"),
        ("cispo", {"beta": 0.1}, "beta is 0.1"),
        ("grpo_k3", {"beta": 0.5}, "beta is 0.5; allowed with grpo_k3: 0.001"),
        ("cispo", {"use_vllm": True}, "vllm_importance_sampling_correction"),
        ("batch_std", {"steps_per_generation": 6}, "steps_per_generation is 6"),
        ("rloo", {"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "a multiple of"),
    ],
)
def test_what_would_be_ignored_is_refused_at_configuration(name, settings, said, tmp_path):
    with refused(said, "allowed"):
        trl.check(config(tmp_path, name, 4, **settings))


def plain(tmp_path: Any, size: int, source: Any, told: Any, **given: Any) -> GRPOTrainer:
    """A trainer of TRL's own."""
    ours = vars(config(tmp_path, "cispo", size))
    settings = {k: ours[k] for k in ("output_dir", "num_generations", "max_completion_length")}
    args = GRPOConfig(
        **settings,
        **{"max_steps": 2, "learning_rate": 0.0, **steps_of(size)} | given,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=source,
        reward_funcs=reward if told is not None else of_ids,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w5", "w3 w5", "w4 w5"]}),
        processing_class=tokenizer(),
        rollout_func=told,
    )


def steps_of(size: int) -> dict[str, int]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": ROWS // size}


def stored(trainer: GRPOTrainer, folder: Any, **asked: Any) -> list[Any]:
    """What a trainer leaves in a store."""
    recorder = record_trl(trainer, folder, **asked)
    trainer.train()
    return list(read(folder, tokenizer=recorder.tokenizer))


def recorded(tmp_path: Any, size: int, source: Any, told: Replay, **given: Any) -> list[Any]:
    return stored(plain(tmp_path, size, source, told, **given), tmp_path / "store")


@pytest.mark.parametrize("size", [4, 12])
def test_a_plain_grpo_trainer_is_recorded_with_one_line(size, tmp_path):
    """Tokens, masks, log-probabilities and rewards, whatever order TRL trains in."""
    source = model()
    told = Replay(source)
    told.logprobs = [[min(x, 0.0) for x in row] for row in told.logprobs]
    found = recorded(tmp_path, size, source, told)
    assert steps(tmp_path / "store") == [0, 1] and len(found) == 2 * ROWS
    for n, row in enumerate(found[:ROWS]):
        real = torch.tensor(told.mask[n])
        assert row["response_ids"].tolist() == told.ids[n]
        assert row["prompt_ids"].tolist() == told.prompts[n]
        assert row["mask"].tolist() == told.mask[n]
        assert row["reward"] == pytest.approx(told.rewards[n])
        assert row["group_id"] == f"0/{n // GENERATIONS}"
        expected = torch.where(real, torch.tensor(told.logprobs[n]), 0.0)
        assert torch.allclose(torch.tensor(row["behavior_logp"]), expected, atol=1e-5)
        now = torch.where(real, logp_of(model(), told.prompts[n], told.ids[n]), 0.0).float()
        assert torch.allclose(torch.tensor(row["logp"]), now.detach(), atol=1e-5)
        assert (row["versions"] == 0).all() and len(row["advantages"]) == len(told.ids[n])
        assert row["rejected"] is None and (row["top_p"], row["top_k"]) == (1.0, None)


def test_what_trl_masks_for_its_length_keeps_its_tokens_and_the_reason(tmp_path):
    source = model()
    told = Replay(source)
    told.logprobs = [[min(x, 0.0) for x in row] for row in told.logprobs]
    for n in range(0, ROWS, 2):
        told.ids[n][-1] = 1  # the end
    given = {"mask_truncated_completions": True, "top_p": 0.9, "top_k": 5}
    found = recorded(tmp_path, 12, source, told, **given)
    for n, row in enumerate(found[:ROWS]):
        assert row["response_ids"].tolist() == told.ids[n]
        assert row["rejected"] == (None if n % 2 == 0 else "truncated")
        assert row["finish_reason"] == ("stop" if n % 2 == 0 else "length")
        assert row["mask"].any() == (n % 2 == 0)
        assert (round(row["top_p"], 6), row["top_k"]) == (0.9, 5)


def capped(source: Any) -> Replay:
    """Recorded responses whose log-probabilities a sampler could tell."""
    told = Replay(source)
    told.logprobs = [[min(x, 0.0) for x in row] for row in told.logprobs]
    return told


def test_sums_of_squares_are_recorded_if_asked_for_and_change_nothing_else(tmp_path):
    source, asked = model(), {"temperature": 0.7}
    told = capped(source)
    without = stored(plain(tmp_path, 4, model(), told, **asked), tmp_path / "without")
    found = stored(plain(tmp_path, 4, model(), told, **asked), tmp_path / "with", square=True)
    assert "probability_square" not in without[0]
    for n, (row, other) in enumerate(zip(found, without, strict=True)):
        assert row["logp"].tolist() == other["logp"].tolist()
        prompt, ids = told.prompts[n % ROWS], told.ids[n % ROWS]
        with torch.no_grad():
            logits = source(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, 1:-1]
        expected = (logits / 0.7).softmax(-1).square().sum(-1).float()
        assert torch.allclose(torch.tensor(row["probability_square"]), expected, atol=1e-5)


def test_the_log_probabilities_of_a_generation_are_those_of_its_first_pass(tmp_path):
    """Two iterations over each generation: the second has moved weights and is not recorded."""
    source = model()
    moving = {"num_iterations": 2, "learning_rate": 0.05, "max_steps": 2}
    found = stored(plain(tmp_path, 12, source, capped(source), **moving), tmp_path / "store")
    told = capped(model())
    for n, row in enumerate(found):
        expected = logp_of(model(), told.prompts[n], told.ids[n]).float().detach()
        real = torch.tensor(told.mask[n])
        assert torch.allclose(torch.tensor(row["logp"])[real], expected[real], atol=1e-5)
    assert {r.current_version for r in store_rows(tmp_path / "store")} == {0}


def store_rows(folder: Any) -> list[Any]:
    from windage.analysis.diagnose.readers.index import read as dump

    return list(dump(folder, refuse=lambda fault: None))


class Engine:
    """A stand-in of TRL's `VLLMGeneration`: responses of each prompt, with as much as is asked."""

    logprobs = 0

    def __init__(self, source: LlamaForCausalLM) -> None:
        self.source, self.told, self.synced = source, capped(source), 0
        self.told.mask = [[True] * len(ids) for ids in self.told.ids]
        self.told.rewards = of_ids(None, self.told.ids)

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        asked = [prompt[0] - 2 for prompt in prompts]
        rows = [p * GENERATIONS + n % GENERATIONS for n, p in enumerate(asked)]
        completions = [self.told.ids[n] for n in rows]
        ids, logprobs = [], []
        for n in rows:
            tops = self.top(n)
            told = zip(self.told.ids[n], self.told.logprobs[n], strict=True)
            pairs = [
                [
                    *top[: self.logprobs],
                    *([own] if own[0] not in dict(top[: self.logprobs]) else []),
                ]
                for top, own in zip(tops, told, strict=True)
            ]
            ids.append([[token for token, _ in pair] for pair in pairs])
            logprobs.append([[value for _, value in pair] for pair in pairs])
        return prompts, completions, logprobs, ids

    def top(self, n: int) -> list[list[tuple[int, float]]]:
        """The likeliest tokens before each of a response; the sampled one as the sampler says."""
        prompt, ids = self.told.prompts[n], self.told.ids[n]
        with torch.no_grad():
            found = self.source(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, 1:-1]
        best = found.log_softmax(-1).topk(5)
        own = list(zip(ids, self.told.logprobs[n], strict=True))
        return [
            [(own[t] if i == ids[t] else (i, v)) for i, v in zip(*pair, strict=True)]
            for t, pair in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        ]


def of_ids(completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) * 7 + len(ids)) % 11 / 10 for ids in completion_ids]


def with_engine(trainer: Any, source: LlamaForCausalLM) -> Engine:
    """The trainer as TRL makes it with `use_vllm`, which here no process serves."""
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = Engine(source)
    trainer.vllm_importance_sampling_correction = False
    return trainer.vllm_generation


@pytest.mark.parametrize("name", ["cispo", "token_is", "gspo"])
def test_the_sampler_of_vllm_is_the_behavior(name, tmp_path):
    """The path that TRL takes with `use_vllm`: its log-probabilities reach the estimator."""
    source = model()
    trainer = Spy(
        model=source,
        reward_funcs=of_ids,
        args=config(tmp_path, name, 4),
        train_dataset=Dataset.from_dict({"prompt": [f"w{2 + p} w5" for p in range(PROMPTS)]}),
        processing_class=tokenizer(),
    )
    engine = with_engine(trainer, source)
    trainer.train()
    assert engine.synced == 1
    (found,) = trainer.kept
    source.zero_grad()
    assert largest(found, ours(entry(name), source, engine.told, gdpo=False)) < BOUND


@pytest.mark.parametrize("head", [0, 1, 3])
def test_a_head_of_vllm_is_recorded_and_training_stays_what_it_was(head, tmp_path):
    source = model()
    trainer = plain(tmp_path, 4, source, None)
    engine = with_engine(trainer, source)
    found = stored(trainer, tmp_path / "store", head=head)
    by_ids = {(engine.told.prompts[n][0], *ids): n for n, ids in enumerate(engine.told.ids)}
    for row in found:
        n = by_ids[(row["prompt_ids"][0], *row["response_ids"])]
        expected = torch.tensor(engine.told.logprobs[n]).float()
        assert torch.allclose(torch.tensor(row["behavior_logp"]), expected, atol=1e-6)
        assert ("head_ids" in row) == bool(head)
        if head:
            top = [pairs[:head] for pairs in engine.top(n)]
            assert row["head_ids"].tolist() == [[i for i, _ in pairs] for pairs in top]
            logp = torch.tensor([[v for _, v in pairs] for pairs in top]).float()
            assert torch.allclose(torch.tensor(row["head_behavior_logp"]), logp, atol=1e-6)


def test_a_head_that_nothing_tells_is_refused(tmp_path):
    source = model()
    with refused("head is 3", "only vLLM", "allowed"):
        record_trl(plain(tmp_path, 4, source, capped(source)), tmp_path / "store", head=3)
    trainer = plain(tmp_path, 4, source, None)
    with_engine(trainer, source).llm = Named(llm_engine=Named(model_config=Named(max_logprobs=20)))
    with refused("head is 21", "20"):
        record_trl(trainer, tmp_path / "store", head=21)
    with refused("_compute_loss", "TRL 1.16"):
        record_trl(Named(**{name: None for name in METHODS[:-1]}), tmp_path / "store")


# Several processes, as accelerate and TRL run them.

RANKS = 2


class Share:
    """The part of recorded responses that a process asks for."""

    def __init__(self, source: LlamaForCausalLM, rank: int) -> None:
        self.whole, self.rank = capped(source), rank

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        size = ROWS // RANKS
        part = slice(self.rank * size, (self.rank + 1) * size)
        return {name: value[part] for name, value in self.whole(prompts, trainer).items()}


def child(folder: str, name: str) -> None:
    """One of the processes; the first leaves its gradient, each its store."""
    rank = int(os.environ["RANK"])
    source = model()
    trainer = Spy(
        model=source,
        reward_funcs=reward,
        args=config(folder, name, 3, gradient_accumulation_steps=ROWS // RANKS // 3),
        train_dataset=Dataset.from_dict({"prompt": [f"w{2 + p} w5" for p in range(PROMPTS)]}),
        processing_class=tokenizer(),
        rollout_func=Share(source, rank),
    )
    record_trl(trainer, f"{folder}/store")
    trainer.train()
    if rank == 0:
        Path(folder, "gradient.json").write_text(json.dumps(trainer.kept[0].tolist()))


@pytest.mark.parametrize("name", ["dapo", "gspo", "batch_std"])
def test_two_processes_make_the_gradient_of_one(name, tmp_path):
    """A group lies on both, so that advantages and denominators must be of the whole batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = f"import test_adapter_trl as t; t.child({str(tmp_path)!r}, {name!r})"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1"},
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * RANKS, said[0][-2000:]
    source = model()
    found = torch.tensor(json.loads((tmp_path / "gradient.json").read_text()), dtype=torch.float64)
    assert largest(found, ours(entry(name), source, capped(source), gdpo=False)) < BOUND
    kept = [list(read(tmp_path / f"store/rank-0000{r}", tokenizer=vocabulary(tokenizer())))
            for r in range(RANKS)]  # fmt: skip
    told = capped(source)
    assert [row["response_ids"].tolist() for rows in kept for row in rows] == told.ids
    assert [row["group_id"] for rows in kept for row in rows] == [
        f"0/{n // GENERATIONS}" for n in range(ROWS)
    ]
