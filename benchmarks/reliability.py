"""Training runs that are killed, and engines that die: how many go on as if nothing had happened.

    python benchmarks/reliability.py [KILLS]

Kills runs of a tiny model with `kill -9` at file-system calls drawn at random, every third by the
clock, half of the resumed runs once more, and resumes them; synchronous and offline runs must come
out bit for bit, asynchronous ones with every prompt trained once and the lag bound kept.  Writes
benchmarks/results/reliability.json.  Promise: at least 200 kills of each kind and 100 deaths, none
lost (rows R8 and R14 of the reliability figures).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from exact import machine

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
SEED = 7


def harness(words: list[str], folder: str) -> list[dict[str, Any]]:
    """What the harness of the tests says of each kill or death."""
    program = [sys.executable, str(ROOT / "tests" / "training_harness.py"), folder, str(SEED)]
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        [*program, *words],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def main() -> None:
    """Kill, count, write."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 210
    started, rows = time.perf_counter(), []
    for name, count in (
        ("synchronous", kills),
        ("offline", kills),
        ("asynchronous", kills),
        ("deaths", max(3, kills // 2)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            found = harness([f"{name}={count}"], folder)
        happened = sum(one.get("deaths", len(one.get("statuses", [])) - 1) for one in found)
        rows.append(
            {
                "what": name,
                "runs": len(found),
                "kills_or_deaths": happened,
                "wrong": sum(bool(one["wrong"]) for one in found),
                "calls": dict(Counter(one["call"] for one in found if "call" in one)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "machine": machine(),
        "seed": SEED,
        "seconds": time.perf_counter() - started,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
