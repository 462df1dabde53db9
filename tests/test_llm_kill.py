"""R8 and R14: a run is killed anywhere and goes on as if nothing had happened; so do its engines.

Counts are those of the default suite; the full ones run with `make check-long`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("training_harness.py")
FAULTS = ("optimizer", "random", "schedule", "reference", "journal", "store")


def harness(folder: Path, seed: int, *words: str) -> list[dict]:
    """What became of every kill."""
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HARNESS), str(folder), str(seed), *words],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_as_if_nothing_had_happened(found: list[dict], **counts: int) -> None:
    for one in found:
        assert one["wrong"] == [], one
        assert "statuses" not in one or one["statuses"][-1] == 0
    killed = Counter(one["name"] for one in found if one.get("statuses", [0])[0] == -9)
    for name, count in counts.items():
        if name == "deaths":
            assert sum(one["deaths"] for one in found if one["name"] == name) >= count
        else:
            assert killed[name] >= count


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Synchronous and offline bit for bit; asynchronous with every prompt once and in time.

    A fault that is planted in resuming is found.
    """
    words = "synchronous=3", "synchronous:optimizer=1", "offline=1", "asynchronous=1", "deaths=3"
    found = harness(tmp_path, 0, *words)
    (planted,) = [one for one in found if ":" in one["name"]]
    assert any("optimizer.safetensors" in name for name in planted["wrong"])
    found.remove(planted)
    assert_as_if_nothing_had_happened(found, synchronous=2, offline=1, asynchronous=1, deaths=3)


@pytest.mark.long
def test_every_fault_planted_in_resuming_is_found(tmp_path):
    found = harness(tmp_path, 1, *(f"synchronous:{fault}=1" for fault in FAULTS))
    assert [one["name"].partition(":")[2] for one in found if one["wrong"]] == list(FAULTS)


@pytest.mark.long
@pytest.mark.parametrize("case", ["synchronous", "offline", "asynchronous"])
def test_two_hundred_kills_of_each_kind_of_run(case, tmp_path):
    """R8: at least 200 kill points."""
    found = harness(tmp_path, 2, f"{case}=210")
    assert_as_if_nothing_had_happened(found, **{case: 200})


@pytest.mark.long
def test_a_hundred_deaths_of_the_engine(tmp_path):
    """R14."""
    found = harness(tmp_path, 3, "deaths=108")
    assert_as_if_nothing_had_happened(found, deaths=100)
