"""What a recorder costs a step, on TRL's own trainer.

    PYTHONPATH=.typing .venv-trl/bin/python benchmarks/record.py [--model FOLDER] [--device cpu]
    (after `make model dev .venv-trl/...`)

A GRPOTrainer trains on 16 replayed responses of 64 tokens, recorded.  Counted are the seconds that
the training thread spends in the recorder's own code, those that the writing thread spends, and all
of the step.  Then a pass of the trainer, forth and back over 4 responses, without and with sums of
squared probabilities, in turn, the least of three.  On a CPU seconds are the thread's processor
time, which other programs do not lengthen.  Last a batch of 262,144 tokens in eight columns, copied
and written.  The floor, written down before: 1 % of a step.  Writes
benchmarks/results/record.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from exact import machine
from step import GROUP, MICRO, PROMPT, TOKENS

from windage.llm import models
from windage.llm.record import record_trl, writer
from windage.llm.record import trl as recording

ROOT = Path(__file__).parents[1]
RESPONSES, FEW, TIMES, FLOOR = 2 * GROUP, 4, 3, 0.01
WIDE = 512


class Replay:
    """Responses drawn at random in the place of a sampler's."""

    def __init__(self, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = (RESPONSES, PROMPT + TOKENS)
        self.ids = torch.randint(10, vocabulary, shape, generator=draw).tolist()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        return {
            "prompt_ids": [row[:PROMPT] for row in self.ids],
            "completion_ids": [row[PROMPT:] for row in self.ids],
            "logprobs": [[-10.0] * TOKENS for _ in self.ids],
        }


def trainer_of(loaded: models.Loaded, folder: str) -> Any:
    """TRL's trainer around a model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO,
        num_generations=GROUP,
        gradient_accumulation_steps=RESPONSES // MICRO,
        max_completion_length=TOKENS,
        max_steps=1,
        learning_rate=1e-6,
        use_cpu=loaded.device.type == "cpu",
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=loaded.policy.model,
        args=settings,
        reward_funcs=lambda completions, **others: [float(n % 3) for n in range(len(completions))],
        train_dataset=Dataset.from_list([{"prompt": f"{n}"} for n in range(RESPONSES // GROUP)]),
        processing_class=loaded.tokenizer,
        rollout_func=Replay(min(2000, len(loaded.tokenizer))),
    )


def now_on(device: torch.device) -> Callable[[], float]:
    """Seconds: of the thread's processor, or of the wall where an accelerator works."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


class Clock:
    """Seconds inside the recorder, those inside what it wraps taken away."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.inside, self.written = now, 0.0, 0.0

    def around(self, inner: Any, wrapped: Any) -> Callable[..., Any]:
        """As the recorder's own wrapper, timed."""

        def call(*given: Any, **named: Any) -> Any:
            spent = 0.0

            def timed(*given: Any, **named: Any) -> Any:
                nonlocal spent
                start = self.now()
                try:
                    return inner(*given, **named)
                finally:
                    spent += self.now() - start

            start = self.now()
            found = wrapped(timed, *given, **named)
            self.inside += self.now() - start - spent
            return found

        return call

    def work(self, inner: Callable[[Any], None]) -> Callable[[Any], None]:
        """The writing thread, whose processor time is counted."""

        def work(recorder: Any) -> None:
            start = time.thread_time()
            inner(recorder)
            self.written += time.thread_time() - start

        return work


def steps(loaded: models.Loaded) -> dict[str, float]:
    """Seconds of a step and of what of it is the recorder's."""
    clock = Clock(now_on(loaded.device))
    plain, work = recording._Watch._around, writer.Recorder._work
    recording._Watch._around = staticmethod(clock.around)  # type: ignore[assignment]
    writer.Recorder._work = clock.work(work)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(loaded, folder)
            record_trl(trainer, f"{folder}/store")
            start = clock.now()
            trainer.train()
            seconds = clock.now() - start
            size = sum(file.stat().st_size for file in Path(folder, "store").glob("*.parquet"))
    finally:
        recording._Watch._around, writer.Recorder._work = plain, work  # type: ignore
    return {
        "step_seconds": seconds,
        "training_thread_seconds": clock.inside,
        "share_of_step": clock.inside / seconds,
        "share_with_writing": (clock.inside + clock.written) / seconds,
        "writing_thread_seconds": clock.written,
        "bytes_a_token": size / (RESPONSES * TOKENS),
    }


def passes(loaded: models.Loaded) -> dict[str, float]:
    """Seconds of a pass forth and back, as TRL makes it, without and with sums of squares."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(loaded, folder)
        ids = torch.tensor(Replay(min(2000, len(loaded.tokenizer))).ids[:FEW])
        ids = ids.to(loaded.device)

        def one() -> None:
            found = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), TOKENS, compute_entropy=True
            )
            found[0].sum().backward()
            trainer.model.zero_grad(set_to_none=True)

        now, plain = now_on(loaded.device), trainer.model.forward
        recording.Squares(trainer)
        squared = trainer.model.forward
        took: dict[str, list[float]] = {"pass": [], "pass_with_squares": []}
        for _ in range(TIMES):
            for name, forward in zip(took, (plain, squared), strict=True):
                trainer.model.forward = forward
                start = now()
                one()
                took[name].append(now() - start)
    return {name: min(times) for name, times in took.items()}


def large(now: Callable[[], float]) -> dict[str, float]:
    """Processor seconds a token of a large batch, of the training thread and of the other."""
    draw = torch.Generator().manual_seed(0)
    names = ("behavior_logp", "proximal_logp", "reference_logp", "logp", "advantages")
    numbers = {name: -torch.rand(WIDE, WIDE, generator=draw) for name in names}
    ids = torch.randint(0, 50_000, (WIDE, WIDE), generator=draw)
    given = {"response_ids": ids, "mask": ids > 100, "versions": ids % 7, **numbers}
    told = {
        "group_id": [f"{n // GROUP}" for n in range(WIDE)],
        "sample_id": [f"{n}" for n in range(WIDE)],
        "reward": [0.5] * WIDE,
        "outcome": [0.5] * WIDE,
        "finish_reason": ["stop"] * WIDE,
    }
    clock, work = Clock(now), writer.Recorder._work
    writer.Recorder._work = clock.work(work)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            recorder = writer.Recorder(Path(folder), tokenizer="none")
            start = now()
            kept = {name: writer.here(value) for name, value in given.items()}
            one = writer.Rectangle(
                prompts=[[1, 2]] * WIDE, lengths=[WIDE] * WIDE, tokens=kept, responses=told
            )
            recorder.put(lambda: one)
            copied = now() - start
            recorder.close()
    finally:
        writer.Recorder._work = work  # type: ignore[method-assign]
    return {
        "copied_seconds_a_token": copied / WIDE**2,
        "written_seconds_a_token": clock.written / WIDE**2,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What a recorder costs a step of TRL's.")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "record.json")
    words = parser.parse_args()
    if find_spec("trl") is None:
        print("TRL is not installed; allowed: PYTHONPATH=.typing .venv-trl/bin/python")
        return
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loaded = models.load(words.model, device=words.device)
    wide = [large(time.thread_time) for _ in range(TIMES)]
    found = {**steps(loaded), **passes(loaded), **{n: min(w[n] for w in wide) for n in wide[0]}}
    document = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "device": words.device,
        "model": Path(words.model).name,
        "tokens_a_step": RESPONSES * TOKENS,
        "floor": FLOOR,
        "squares_over_plain": found["pass_with_squares"] / found["pass"] - 1,
        **found,
    }
    print(json.dumps(document, indent=1))
    words.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
