"""A run is killed, interrupted, left by its disk or its engine, and goes on as if nothing had been.

Counts are those of the default suite; the full ones are those of benchmarks/reliability.py, which
`make check-long` runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("reliability_harness.py")
FAULTS = ("optimizer", "random", "schedule", "reference", "journal", "store")


def harness(folder: Path, seed: int, *words: str) -> list[dict]:
    """What became of every run."""
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HARNESS), str(folder), str(seed), *words],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Synchronous and offline bit for bit; asynchronous with every prompt once and in time.

    A fault that is planted in resuming is found.
    """
    kills = {"synchronous": 2, "offline": 1, "asynchronous": 1, "deaths": 3}
    others = {"saves": 50, "disk": 150, "interrupts": 1}
    words = [f"{name}={count}" for name, count in {**kills, **others}.items()]
    found = harness(tmp_path, 0, "synchronous:optimizer=1", *words)
    planted, *found = found
    assert any("optimizer.safetensors" in name for name in planted["wrong"])
    for one in found:
        assert one["wrong"] == [], one
    happened = Counter()
    for one in found:
        happened[one["name"]] += one["count"]
    assert all(happened[name] >= count for name, count in kills.items()), happened
    assert all(happened[name] > 0 for name in others), happened
    assert {one.get("status", 2) for one in found} <= {0, 2}


def test_the_figures_that_are_kept_hold_what_is_promised():
    kept = Path(__file__).parents[1] / "benchmarks" / "results" / "reliability.json"
    rows = json.loads(kept.read_text())["rows"]
    assert {one["row"] for one in rows} == {"R8", "R9", "R14", "R15", "R16", "R17", "R18"}
    for one in rows:
        assert one["wrong"] == 0 and one["count"] >= one["least"] > 0, one
    told = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    words = {"R8": "kills", "R9": "faults of the disk", "R16": "interrupts"}
    words |= {"R14": "deaths of an engine", "R15": "numbers that are not finite"}
    for row, word in words.items():
        assert f" {sum(one['count'] for one in rows if one['row'] == row)} {word}" in told, row


@pytest.mark.long
def test_every_fault_planted_in_resuming_is_found(tmp_path):
    found = harness(tmp_path, 1, *(f"synchronous:{fault}=1" for fault in FAULTS))
    assert [one["name"].partition(":")[2] for one in found if one["wrong"]] == list(FAULTS)
