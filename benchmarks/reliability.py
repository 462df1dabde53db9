"""Promises about training runs, each counted: what happened how often, and how often it went wrong.

    python benchmarks/reliability.py                  # all, under 20 minutes on two quiet cores
    python benchmarks/reliability.py deaths disk      # some; the other rows stay as they are

Runs of a tiny model, in processes of their own, are killed, interrupted, left by their engine or
their disk, spoiled and repeated; `tests/reliability_harness.py` says what each must come to.
Writes benchmarks/results/reliability.json with a row a promise; R8 to R18 are rows of the
specification of reliability.  Exit status 1 where something went wrong, or happened too rarely.
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
from typing import Any, NamedTuple

from exact import machine

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
SEED = 7
REPEATS, PROCESSES, THREADS = 20, 4, (1, 2)


class Promise(NamedTuple):
    """A row.

    Args:
        row: of the specification.
        what: happens, and what then holds.
        least: times that it must happen.
        asked: number given to the harness; 0: the least.
    """

    row: str
    what: str
    least: int
    asked: int = 0


PROMISES = {
    "synchronous": Promise("R8", "kill -9 of a synchronous run; resumed, every file bitwise", 200),
    "offline": Promise("R8", "kill -9 of an offline run; resumed, every file bitwise", 200),
    "asynchronous": Promise(
        "R8", "kill -9 of an asynchronous run; resumed, every prompt once, lag bound kept", 200
    ),
    "saves": Promise(
        "R8", "kill -9 at every file-system call of a save; resumed, every file bitwise", 40, 1
    ),
    "disk": Promise(
        "R9", "the disk fails at every call of a run; a line with the path, resumed bitwise", 400, 1
    ),
    "deaths": Promise("R14", "the engine dies; every prompt once, lag bound kept", 100),
    "skip": Promise("R15", "a number is not finite; the update is skipped, weights bitwise", 100),
    "set-aside": Promise("R15", "a number is not finite; its response is set aside", 100),
    "interrupts": Promise("R16", "Ctrl-C, half of them twice; resumed, every file bitwise", 100),
    "study": Promise("R17", "the same seed again, 1 and 2 threads; tables bitwise", 40),
    "learn": Promise("R17", "the same seed again, 1 and 2 threads; tables bitwise", 40),
    "train": Promise("R17", "the same seed again, 1 and 2 threads; files bitwise", 40),
    "together": Promise(
        "R18", "a second run in a folder is refused, a reader sees whole records", 100, 250
    ),
}


def told(program: str, *words: str, **settings: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program of the tests prints."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        [sys.executable, str(TESTS / program), *words],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **quiet, "PYTHONPATH": paths, **settings},
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def repeated(verb: str) -> list[dict[str, Any]]:
    """Runs of a verb in several processes, which order their sets differently."""
    found: list[dict[str, Any]] = []
    for threads in THREADS:
        for place in range(PROCESSES):
            settings = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(place)}
            with tempfile.TemporaryDirectory() as folder:
                count = str(REPEATS // PROCESSES)
                lines = told("repeated_runs.py", folder, verb, count, **settings)
            found += [{**one, "threads": threads} for one in lines]
    for one in found:
        first = next(other for other in found if other["threads"] == one["threads"])
        one |= {"count": 1, "wrong": [] if one["digest"] == first["digest"] else ["other bits"]}
    return found


def row(name: str, promise: Promise) -> dict[str, Any]:
    """Make it happen, and count."""
    began = time.perf_counter()
    if promise.row == "R17":
        found = repeated(name)
    else:
        with tempfile.TemporaryDirectory() as folder:
            word = f"{name}={promise.asked or promise.least}"
            found = told("reliability_harness.py", folder, str(SEED), word)
    for one in found:
        if one["wrong"]:
            print(json.dumps(one), file=sys.stderr)
    told_by = {"calls": "call", "statuses": "status", "digests": "digest"}
    beside = {
        key: dict(Counter(str(one[of]) for one in found))
        for key, of in told_by.items()
        if of in found[0]
    }
    return {
        "name": name,
        "row": promise.row,
        "what": promise.what,
        "least": promise.least,
        "count": sum(one["count"] for one in found),
        "wrong": sum(bool(one["wrong"]) for one in found),
        "runs": len(found),
        "seconds": round(time.perf_counter() - began, 1),
        **beside,
    }


def main() -> None:
    """Count, print, write."""
    asked = sys.argv[1:] or list(PROMISES)
    if unknown := set(asked) - set(PROMISES):
        sys.exit(f"{sorted(unknown)}: allowed: {', '.join(PROMISES)}")
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows, failed = {one["name"]: one for one in kept if one.get("name") in PROMISES}, False
    for name in asked:
        rows[name] = one = row(name, PROMISES[name])
        print(json.dumps(one), flush=True)
        failed |= bool(one["wrong"]) or one["count"] < PROMISES[name].least
        ordered = [rows[name] for name in PROMISES if name in rows]
        document = {"machine": machine(), "seed": SEED, "rows": ordered}
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
