"""Estimators measured on SmolLM2-135M-Instruct: addition, after a short training run of its own.

    make model
    python benchmarks/measure.py            # under 40 minutes on two quiet cores
    python benchmarks/measure.py --quick    # some minutes: that it works, no figures to keep

The policy is the model after `--steps` optimizer steps of `rloo`; samplers are its own weights of
0, 1, 4 and 16 steps ago, its weights in bfloat16 and rounded to 8 and 4 bits a row, and its own
distribution at temperature 0.7 and top-p 0.9 that the trainer does not know of.  The learning rate
leaves it half way: one that answers everything has no gradient to tell from 0.  Writes
benchmarks/results/measure.json, and figures beside it; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windage.analysis import report
from windage.analysis.measured import page, toy
from windage.llm import run as runs
from windage.llm.config import (
    Config,
    ModelSection,
    RecipeSection,
    RunSection,
    SamplingSection,
    TaskSection,
    TrainSection,
)
from windage.llm.measure import document, study
from windage.llm.measure.behavior import parse
from windage.llm.measure.plan import Request
from windage.llm.tasks import index
from windage.llm.train import train

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
LAGS = (0, 1, 4, 16)
SIZES = (4, 8, 16)
# What a reader of the committed file needs; each entry's differences and counts stay in the folder.
LEFT_OUT = ("paired", "controls", "groups_needed_reason")


def flags() -> argparse.Namespace:
    """What may be changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/measure"))
    parser.add_argument("--digits", type=int, default=1)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--references", type=int, default=24)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--sketch", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--quick", action="store_true")
    found = parser.parse_args()
    if found.quick:
        found.steps, found.prompts, found.references, found.responses = 2, 3, 4, 4
        found.max_tokens, found.sketch, found.folder = 6, 512, found.folder / "quick"
    return found


def task_of(told: argparse.Namespace) -> dict[str, Any]:
    """Settings of the task."""
    return {"digits": told.digits, "operators": "+"}


def trained(told: argparse.Namespace, lags: tuple[int, ...]) -> list[float]:
    """The policy and its lagging forms as model folders; gives the mean reward by step."""
    done = told.folder / "rewards.json"
    if done.exists():
        return list(json.loads(done.read_text()))
    shutil.rmtree(told.folder / "train", ignore_errors=True)
    quick = told.quick
    config = Config(
        model=ModelSection(path=str(MODEL)),
        task=TaskSection(name="arithmetic", settings=task_of(told)),
        recipe=RecipeSection(name="rloo"),
        sampling=SamplingSection(max_tokens=told.max_tokens),
        train=TrainSection(
            steps=told.steps,
            prompts=2 if quick else 8,
            group_size=4 if quick else 8,
            micro_batch=32,
            learning_rate=told.learning_rate,
        ),
        run=RunSection(folder=str(told.folder / "train"), keep=1, card=False),
    )
    made = runs.start(config)
    rewards: list[float] = []

    def keep(step: int) -> None:
        if told.steps - step in lags:
            place = at_step(told, step)
            made.loaded.policy.base.save_pretrained(place)
            made.loaded.tokenizer.save_pretrained(place)

    def tell(record: Mapping[str, Any]) -> None:
        rewards.append(float(record["reward/mean"]))
        keep(len(rewards))
        print(f"step {len(rewards)}: reward {rewards[-1]:.3f}", file=sys.stderr)

    keep(0)
    train(made, tell)
    shutil.rmtree(told.folder / "train" / "checkpoints", ignore_errors=True)
    done.write_text(json.dumps(rewards))
    return rewards


def at_step(told: argparse.Namespace, step: int) -> Path:
    """The model folder of a step."""
    return Path(told.folder / f"step-{step:03d}")


def request(told: argparse.Namespace, lags: tuple[int, ...]) -> Request:
    """The study."""
    late = [f"checkpoint:path={at_step(told, told.steps - lag)},steps={lag}" for lag in lags if lag]
    coarse = ["bfloat16", "rounded:bits=8", "rounded:bits=4"]
    narrowed = ["temperature:t=0.7", "top_p:p=0.9"]
    if told.quick:
        coarse, narrowed = coarse[2:], narrowed[1:]
    sizes = (2, 4) if told.quick else SIZES
    return Request(
        model=str(at_step(told, told.steps)),
        task="arithmetic:" + ",".join(f"{k}={v}" for k, v in task_of(told).items()),
        samplers=tuple(map(parse, ["policy", *late, *coarse, *narrowed])),
        group_sizes=sizes,
        prompts=told.prompts,
        references=told.references,
        responses=max(told.responses, max(sizes)),
        sketch=told.sketch,
        max_tokens=told.max_tokens,
        head=32,
    ).check()


def measured(told: argparse.Namespace, lags: tuple[int, ...]) -> dict[str, Any]:
    """The study's document, with the toy's prediction."""
    asked = request(told, lags)
    task = index.get(*index.parse(asked.task))
    start, last = time.perf_counter(), 0.0

    def advance(done: int, total: int) -> None:
        nonlocal last
        if time.perf_counter() - last > 30:
            last = time.perf_counter()
            print(f"{done:,} of {total:,} responses, {last - start:.0f} s", file=sys.stderr)

    try:
        made = study.ready(asked, task)
        made = replace(made, cost=study.tried(made))
        print(json.dumps(made.cost), file=sys.stderr)
        study.run(made, told.folder / "study", advance)
        found = document.document(made, told.folder / "study", time.perf_counter() - start)
    finally:
        task.close()
    return found | {"model": "SmolLM2-135M-Instruct", "toy": toy.compared(found)}


def kept(found: Mapping[str, Any]) -> dict[str, Any]:
    """The document as it is committed: six digits, one row a line by whoever reads it."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, Mapping):
            return {k: short(v) for k, v in value.items()}
        return [short(v) for v in value] if isinstance(value, list) else value

    rows = [{k: v for k, v in row.items() if k not in LEFT_OUT} for row in found["rows"]]
    return short({**found, "rows": rows})


def main() -> None:
    """Train, measure, write."""
    told = flags()
    lags = (0, 1, 2) if told.quick else LAGS
    told.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rewards = trained(told, lags)
    found = measured(told, lags) | {"training_rewards": rewards}
    report.write(found, told.folder / "report")
    if not told.quick:
        text = json.dumps(kept(found)).replace('{"estimator"', '\n{"estimator"')
        (RESULTS / "measure.json").write_text(text + "\n")
        for name in ("measured", "toy"):
            for ending in ("png", "svg"):
                place = told.folder / "report" / f"{name}.{ending}"
                shutil.copy(place, RESULTS / f"measure-{name}.{ending}")
    print(page.verdict(found))
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes; {told.folder}/report/measure.html")


if __name__ == "__main__":
    main()
