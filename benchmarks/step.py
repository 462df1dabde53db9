"""One optimizer step of a language model: ours beside TRL's, and what coefficients and heads cost.

    .venv-trl/bin/python benchmarks/step.py [--model FOLDER] [--device cpu]      (after `make model`
                                                                      and `make .venv-trl/...`)

The same model, the same 32 responses of 64 tokens after 24-token prompts, the same micro-batches
of 8, AdamW, gradients clipped; both ways in one process, in turn, the least of three.  Without TRL
only ours is timed.  Writes benchmarks/results/step.json.  Floors, written down before: TRL's step;
1 % of the step for the coefficients, and for two shadows; 5 % for centering over 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact import machine

from windage.estimators.catalogue import get
from windage.estimators.centering import top_k
from windage.estimators.estimator import Estimator, batch_terms, token_coefficients
from windage.estimators.member import use
from windage.llm import metrics, models
from windage.llm.guard import Guard
from windage.llm.learner import Learner, Settings, optimizer_of, schedule_of
from windage.llm.ranks import ALONE
from windage.llm.rollouts import to_batch
from windage.llm.samplers.protocol import Request, Sampling
from windage.llm.samplers.transformers import TransformersSampler
from windage.llm.samplers.vllm import VllmSampler

ROOT = Path(__file__).parents[1]
RESPONSES, TOKENS, PROMPT, MICRO, HEAD, GROUP = 32, 64, 24, 8, 128, 8
DRAWN = 64
BESIDE = ("gspo", "cispo")
TIMES = 3
RATE = {"learning_rate": 1e-6, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999}


def rows(vocabulary: int, *, head: int) -> list[dict[str, Any]]:
    """Responses as the store holds them."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(RESPONSES):
        row = {
            "group_id": f"{n // GROUP}",
            "sample_id": f"{n}",
            "prompt_ids": rng.integers(0, vocabulary, PROMPT),
            "response_ids": rng.integers(0, vocabulary, TOKENS),
            "mask": np.ones(TOKENS, dtype=bool),
            "behavior_logp": np.full(TOKENS, -10.0),
            "versions": np.zeros(TOKENS, dtype=int),
            "reward": float(n % 3 == 0),
            "outcome": float(n % 3 == 0),
            "finish_reason": "length",
            "elapsed": 0.0,
            "rejected": None,
        }
        if head:
            row["head_ids"] = np.stack([rng.permutation(vocabulary)[:head] for _ in range(TOKENS)])
            row["head_behavior_logp"] = np.full((TOKENS, head), -10.0)
        found.append(row)
    return found


def learner(loaded: models.Loaded, estimator: Estimator) -> Learner:
    """One that trains all weights."""
    optimizer = optimizer_of("adamw", list(loaded.policy.parameters()), RATE)
    return Learner(
        loaded,
        estimator,
        policy=loaded.policy,
        optimizer=optimizer,
        schedule=schedule_of("constant", optimizer, warmup=0, total=100),
        reference=None,
        settings=Settings(
            group_size=GROUP,
            micro_batch=MICRO,
            temperature=1.0,
            max_grad_norm=1.0,
            guard=Guard(),
        ),
        ranks=ALONE,
    )


def trl_trainer(loaded: models.Loaded) -> Any:
    """TRL's trainer around the same model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir="/tmp/windage-step",
        per_device_train_batch_size=MICRO,
        num_generations=GROUP,
        gradient_accumulation_steps=RESPONSES // MICRO,
        max_completion_length=TOKENS,
        use_cpu=loaded.device.type == "cpu",
        bf16=False,
        loss_type="grpo",
        beta=0.0,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=loaded.policy.model,
        args=settings,
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * RESPONSES),
        processing_class=loaded.tokenizer,
    )
    trainer.current_gradient_accumulation_steps = RESPONSES // MICRO
    return trainer


def trl_step(loaded: models.Loaded, given: list[dict[str, Any]]) -> Callable[[], None] | None:
    """The same step by TRL's trainer; None where it is not installed."""
    if find_spec("trl") is None:
        return None
    trainer = trl_trainer(loaded)
    optimizer = optimizer_of("adamw", list(loaded.policy.parameters()), RATE)
    device = loaded.device

    def part(start: int) -> dict[str, Any]:
        chosen = given[start : start + MICRO]
        prompt = torch.tensor(np.stack([row["prompt_ids"] for row in chosen]), device=device)
        ids = torch.tensor(np.stack([row["response_ids"] for row in chosen]), device=device)
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": ids,
            "completion_mask": torch.ones_like(ids),
            "advantages": torch.linspace(-1, 1, MICRO, device=device),
            "old_per_token_logps": torch.full(ids.shape, -10.0, device=device),
            "num_items_in_batch": torch.tensor(RESPONSES * TOKENS, device=device),
        }

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for start in range(0, RESPONSES, MICRO):
            trainer._compute_loss(loaded.policy.model, part(start)).backward()
        torch.nn.utils.clip_grad_norm_(loaded.policy.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(ways: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The least time of each way, the ways in turn."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TIMES):
        for name, way in ways.items():
            wait(device)
            start = time.perf_counter()
            way()
            wait(device)
            took[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in took.items()}


def wait(device: torch.device) -> None:
    """Until what was asked of an accelerator is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def coefficients(estimator: Estimator, given: list[dict[str, Any]]) -> Callable[[], object]:
    """The coefficients of the batch, apart from any pass."""
    batch = to_batch(given, group_size=GROUP)
    filled = replace(batch, logp=batch.behavior_logp)

    def work() -> object:
        return token_coefficients(estimator, batch_terms(estimator, filled), filled)

    return work


def parity(loaded: models.Loaded) -> float:
    """Largest difference of log-probabilities from those of the model's own logits."""
    vocabulary = len(loaded.policy.base.get_output_embeddings().weight)
    ids = torch.randint(0, vocabulary, (4, 64), generator=torch.Generator().manual_seed(0))
    ids = ids.to(loaded.device)
    on = torch.ones_like(ids)
    places = torch.arange(63, device=ids.device)
    places = (torch.arange(4, device=ids.device).unsqueeze(1) * 64 + places).flatten()
    with torch.no_grad():
        found, _ = loaded.policy(ids, on, places, ids[:, 1:].flatten())
        logits = loaded.policy.model(input_ids=ids, attention_mask=on).logits[:, :-1]
    wanted = logits.float().log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).flatten()
    return float((found.logp - wanted).abs().max())


def drawing(model: str, loaded: models.Loaded, dtype: str) -> dict[str, float]:
    """Tokens a second that the samplers draw: 64 responses of 128 tokens."""
    engines: dict[str, Callable[[], Any]] = {
        "transformers": lambda: TransformersSampler(
            loaded.policy.base, stop_ids=(), batch=DRAWN, share=True
        )
    }
    if find_spec("vllm") is not None:
        engines["vllm"] = lambda: VllmSampler(
            model, dtype=dtype, stop_ids=(), batch=DRAWN, longest=1024, head=0
        )
    prompt = (2, 3) * (PROMPT // 2)
    asked = [Request(prompt_ids=prompt, count=DRAWN, seed=0)]
    found = {}
    for name, make in engines.items():
        engine = make()
        engine.sample(asked, Sampling(max_tokens=8))
        wait(loaded.device)
        start = time.perf_counter()
        drawn = engine.sample(asked, Sampling(max_tokens=2 * TOKENS))
        tokens = sum(len(response.ids) for response in drawn[0])
        found[name] = tokens / (time.perf_counter() - start)
        engine.close()
    return found


def fused(model: str, dtype: str, given: list[dict[str, Any]]) -> dict[str, float] | None:
    """The same step with Liger's kernels in the layers; None where they cannot run."""
    if find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    loaded = models.load(model, dtype=dtype, device="cuda", liger="on")
    ours = learner(loaded, get("grpo"))
    torch.cuda.reset_peak_memory_stats()
    return {
        "seconds": seconds({"liger": lambda: ours.update(given)}, loaded.device)["liger"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "log_probability_gap": parity(loaded),
    }


def shadows(estimator: Estimator, given: list[dict[str, Any]]) -> Callable[[], object]:
    """What two other recipes would have done, beside a batch whose passes were made."""
    batch = to_batch(given, group_size=GROUP)
    squares = torch.where(batch.mask, 0.5, 0.0).to(batch.rewards.dtype)
    filled = replace(batch, logp=batch.behavior_logp, probability_square=squares)
    asked = {name: get(name) for name in BESIDE}
    return lambda: metrics.of_shadows(asked, estimator, filled, given)


def measure(model: str, device: str, dtype: str, *, draw: bool) -> dict[str, Any]:
    """Every figure of one model on one device."""
    loaded = models.load(model, dtype=dtype, device=device)
    vocabulary = min(2000, len(loaded.policy.base.get_output_embeddings().weight))
    place, plain = loaded.device, rows(vocabulary, head=0)
    wide = rows(vocabulary, head=min(HEAD, vocabulary))
    entry = get("grpo")
    centered = replace(get("centered_tis"), centering=use(top_k))
    bare = replace(centered, centering=None)
    ours, with_head, without = (learner(loaded, e) for e in (entry, centered, bare))
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.update(plain),
        "centered": lambda: with_head.update(wide),
        "not_centered": lambda: without.update(plain),
        "coefficients": coefficients(entry, plain),
        "shadows": shadows(entry, plain),
    }
    theirs = trl_step(loaded, plain)
    if theirs is not None:
        ways["trl"] = theirs
    found = seconds(ways, place)
    document = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "device": str(place),
        "dtype": dtype,
        "model": Path(model).name,
        "tokens": RESPONSES * TOKENS,
        "seconds": found,
        "ours_over_trl": found["ours"] / found["trl"] if "trl" in found else None,
        "coefficients_share": found["coefficients"] / found["ours"],
        "shadows_share": found["shadows"] / found["ours"],
        "centering_overhead": found["centered"] / found["not_centered"] - 1,
        "tokens_per_second": RESPONSES * TOKENS / found["ours"],
        "log_probability_gap": parity(loaded),
        "drawn_tokens_per_second": drawing(model, loaded, dtype) if draw else None,
    }
    with suppress(RuntimeError, AssertionError):
        if place.type == "cuda":
            document["peak_bytes"] = torch.cuda.max_memory_allocated()
            document["liger"] = fused(model, dtype, plain)
    return document


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="One optimizer step, ours beside TRL's.")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draw", action="store_true", help="measure the samplers too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "step.json")
    words = parser.parse_args()
    document = measure(words.model, words.device, words.dtype, draw=words.draw)
    print(json.dumps(document, indent=1))
    words.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
