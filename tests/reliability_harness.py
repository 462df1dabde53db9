"""A program of training runs that meet with something, each in a child of its own.

    python tests/reliability_harness.py FOLDER SEED WORD ...

    synchronous=4, offline=4, asynchronous=4    kills, and what resumed runs come to
    synchronous:optimizer=1                     the same with a fault planted in resuming
    deaths=8           of the engine, in asynchronous runs
    saves=1            kills at each call of a save; 3: at every third
    disk=37            faults of the disk at every 37th call of a run
    interrupts=5       Ctrl-C, once or twice
    together=40        steps of a run that is read while it writes, second runs in its folder
    skip=20            numbers that are not finite, by what the guard is told to do
    set-aside=20

It prints a JSON line a run: its name, what happened how often, what was wrong after it.  It is a
process of its own, because the shape checks of the suite draw from `random`.  Waits for the disk
are those of test_llm_power.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


def found(base: Path, seed: int, name: str, count: int) -> Iterator[dict]:
    """What a word stands for."""
    import run_faults
    import training_harness

    case, _, fault = name.partition(":")
    match case:
        case "deaths":
            return training_harness.deaths(base, count, seed)
        case "saves":
            return run_faults.saves(base, count)
        case "disk":
            return run_faults.disk(base, count)
        case "interrupts":
            return run_faults.interrupts(base, count, seed)
        case "together":
            return run_faults.together(base, count)
        case "skip" | "set-aside":
            return run_faults.spoiled(base, case.replace("-", " "), count)
    return training_harness.kills(base, case, count, seed, fault)


def main() -> None:
    """Do what the words say."""
    import torch
    import transformers

    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # no error and no kill shows whether a disk was waited for
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.utils.logging.disable_progress_bar()
    base, seed = Path(sys.argv[1]), int(sys.argv[2])
    for word in sys.argv[3:]:
        name, _, count = word.partition("=")
        for one in found(base, seed, name, int(count)):
            print(json.dumps({"name": name, **one}), flush=True)


if __name__ == "__main__":
    main()
