"""`windage sample`: responses of a model, judged and recorded, as a store to train on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from windage.cli import run_flags
from windage.cli.output import deliver, progress
from windage.estimators.errors import BadInput
from windage.llm.config import Config, build, plain


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the configuration and the store."""
    run_flags.add(parser)
    parser.add_argument("--store", type=Path, metavar="DIR", help="folder of the rollout store")


def run(arguments: argparse.Namespace) -> int:
    """Draw `train.steps` rollout batches, each a file of the store."""
    config = run_flags.resolve(arguments)
    if arguments.store is None:
        raise BadInput("--store is missing; allowed: a folder for the rollout store")
    if config.train.mode == "offline":
        config = build({"train": {"mode": "synchronous", "positive_share": 0.0}}, config)
    config = run_flags.check(config)
    with progress("batches") as advance:
        rows = _drawn(config, arguments.store, advance)
    from windage.llm import folder

    about = {"versions": folder.versions(), "inputs": folder.inputs(config)}
    found = {"schema": "windage/sample/1", "store": str(arguments.store), "config": plain(config)}
    deliver({**found, **about, "rows": rows}, arguments)
    return 0


def _drawn(config: Config, store: Path, advance: Any) -> list[dict[str, Any]]:
    from windage.llm import models, rollouts, sources
    from windage.llm.run import desk_of

    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            f"--store {str(store)!r}: {problem.strerror}; allowed: a folder that can be written to"
        ) from None
    loaded = models.load(config.model.path, dtype=config.model.dtype, device=config.model.device)
    there = rollouts.steps(store)
    for _ in rollouts.read(store, tokenizer=loaded.fingerprint, only=there[-1:]):
        break  # its last step is of this tokenizer
    desk = desk_of(config, loaded, config.model.path)
    train = config.train
    order = sources.Order(prompts=train.prompts, group_size=train.group_size, seed=config.run.seed)
    first = max(there, default=0)
    told = []
    try:
        for done in range(train.steps):
            started = time.perf_counter()
            drawn = [one.row for one in order.ask(desk, first + done)]
            rollouts.write(store, first + done + 1, drawn, tokenizer=loaded.fingerprint)
            told.append(_summary(first + done + 1, drawn, time.perf_counter() - started))
            advance(done + 1, train.steps)
    finally:
        desk.task.close()
        desk.sampler.close()
    return told


def _summary(step: int, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    tokens = sum(len(row["response_ids"]) for row in rows)
    words = [row["verdict"] for row in rows]
    return {
        "step": step,
        "responses": len(rows),
        "reward": sum(scored) / len(scored) if scored else None,
        "correct": sum(w in ("right", "format") for w in words) / len(rows),
        "format": words.count("format") / len(rows),
        "invalid": words.count("invalid") / len(rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "length": tokens / len(rows),
        "tokens_per_second": tokens / seconds,
    }
