"""Processes that share work: the same results, and an end with the one that started them."""

import os
import signal
import subprocess
import sys
import time

import pytest
from shared_work import squares

from windage.analysis import workers
from windage.analysis.studies import study
from windage.analysis.studies.grid import Settings
from windage.analysis.workers import processors, side_by_side
from windage.estimators.errors import BadInput

SETTINGS = Settings(
    problem=("token_tree", {"horizon": 2}),
    estimators=(("rloo", {}), ("grpo", {}), ("dapo", {}), ("ppo", {})),
    behavior=("stale", {"rate": 2.0}),
    sweep={"steps": (0, 3), "group_size": (2, 5), "horizon": (1, 2)},
)


def test_results_are_those_of_the_work(monkeypatch):
    batches = [list(range(k, k + 3)) for k in range(20, 50, 3)]
    found = list(side_by_side(squares, batches, 2))
    assert sorted(n for n, _, _ in found) == list(range(20, 50))
    assert all(square == n * n for n, square, _ in found)
    pids = {pid for _, _, pid in found}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    with pytest.raises(BadInput, match="13 is no number"):
        list(side_by_side(squares, [[1], [13], [2]], 2))
    with pytest.raises(OSError, match="ended before its work"):
        list(side_by_side(squares, [[1], [17], [2]], 1))


def test_parcels_hold_what_a_tenth_of_a_second_brings(monkeypatch):
    clock = iter([0.0, 0.05, 0.12, 0.12, 0.2, 0.3, 0.3, 0.31])
    monkeypatch.setattr(workers.time, "monotonic", lambda: next(clock))
    assert list(workers._parcels("abcde")) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_study_in_two_processes_is_the_study_in_one(monkeypatch):
    alone = study.run(SETTINGS)
    monkeypatch.setattr(study, "MUCH", -1.0)
    told = []
    shared = study.run(SETTINGS, lambda done, total: told.append((done, total)), processes=2)
    assert {**shared, "seconds": 0} == {**alone, "seconds": 0}
    assert told == [(n, 32) for n in range(1, 33)]


def test_little_work_starts_no_process(monkeypatch):
    monkeypatch.setattr(study, "side_by_side", None)
    assert len(study.run(SETTINGS, processes=8)["rows"]) == 32
    assert processors() >= 1


PARENT = """
import sys
sys.path.insert(0, {here!r})
from shared_work import forever
from windage.analysis.workers import side_by_side

if __name__ == "__main__":
    for _ in side_by_side(forever, [[{folder!r}], [{folder!r}]], 2):
        pass
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(sent, tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "main.py"
    script.write_text(PARENT.format(here=os.path.dirname(__file__), folder=str(folder)))
    running = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(os.listdir(folder)) < 2:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)
    if sent == signal.SIGINT:
        for name in os.listdir(folder):
            os.kill(int(name), sent)
        time.sleep(0.5)
        assert all(alive(int(name)) for name in os.listdir(folder)), "the parent ends them"
        os.killpg(running.pid, sent)  # as a terminal does
    else:
        running.kill()
    for _ in range(20):  # an interrupt that arrives in a destructor is lost: press again
        try:
            _, errors = running.communicate(timeout=6)
            break
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, sent)
    assert errors.count("Traceback") == (sent == signal.SIGINT), errors
    deadline = time.monotonic() + 10
    pids = [int(name) for name in os.listdir(folder)]
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
