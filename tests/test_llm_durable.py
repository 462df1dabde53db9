"""Faults and kills at every call that saves a step: the old state or the new one, and no litter."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
from checks import refused
from disk_faults import forked

from windage.estimators.errors import BadInput
from windage.llm import durable
from windage.llm.durable import SUFFIX, new_file, tidy
from windage.llm.rollouts import path_of, read, steps, write

FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CALLS = ("open", "write", "fsync", "rename")


def rows(count: int = 3, start: int = 0) -> list[dict]:
    return [
        {
            "group_id": "question",
            "sample_id": f"sample {start + n}",
            "prompt_ids": [1, 2],
            "response_ids": [3],
            "mask": [True],
            "behavior_logp": [-0.5],
            "versions": [0],
            "reward": 1.0,
            "outcome": 1.0,
            "finish_reason": "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "seed": None,
            "elapsed": 0.0,
            "rejected": None,
        }
        for n in range(count)
    ]


class Faulty:
    """`os`, one of whose calls goes wrong.

    Args:
        name: of the call.
        at: which of those calls; -1: none.
        fault: done instead of the call, with its arguments.
    """

    def __init__(self, name, at, fault):
        self.name, self.at, self.fault, self.counts = name, at, fault, dict.fromkeys(CALLS, 0)

    def __getattr__(self, name):
        if name not in CALLS:
            return getattr(os, name)

        def call(*arguments, **settings):
            self.counts[name] += 1
            if name == self.name and self.counts[name] - 1 == self.at:
                return self.fault(*arguments)
            return getattr(os, name)(*arguments, **settings)

        return call


def raising(number):
    def fault(*arguments):
        raise OSError(number, os.strerror(number))

    return fault


def half(descriptor, content):
    """A short write."""
    return os.write(descriptor, content[: max(1, len(content) // 2)])


def calls_of_a_save(folder, monkeypatch):
    """Every call that a save makes, by name and number."""
    watch = Faulty("", -1, None)
    write(folder, 1, rows(), tokenizer="t")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", watch)
        write(folder, 2, rows(start=3), tokenizer="t")
    return [(name, n) for name in CALLS for n in range(watch.counts[name])]


@pytest.fixture
def calls(tmp_path_factory, monkeypatch):
    """The calls of a save whose content goes out in several writes."""
    monkeypatch.setattr(durable, "BUFFER", 1200)
    found = calls_of_a_save(tmp_path_factory.mktemp("calls"), monkeypatch)
    assert {name for name, _ in found} == set(CALLS) and len(found) > 8
    return found


def assert_old_or_new(folder: Path, *, written: bool | None = None) -> bool:
    """Step 1 is whole; step 2 is whole or not there; nothing else lies in the folder."""
    found = steps(folder)
    assert found in ([1], [1, 2])
    assert sorted(path.name for path in folder.iterdir()) == [
        path_of(folder, step).name for step in found
    ]
    names = [one["sample_id"] for one in read(folder, tokenizer="t")]
    assert names == [f"sample {n}" for n in range(3 * len(found))]
    if written is not None:
        assert (found == [1, 2]) == written
    return found == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_fault_at_any_call_leaves_the_old_state_and_names_the_path(
    number, calls, tmp_path, monkeypatch
):
    for name, at in calls:
        folder = tmp_path / f"{name}-{at}"
        write(folder, 1, rows(), tokenizer="t")
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", Faulty(name, at, raising(number)))
            with refused(str(path_of(folder, 2)), os.strerror(number), error=BadInput):
                write(folder, 2, rows(start=3), tokenizer="t")
        last = name == "fsync" and (name, at + 1) not in calls
        assert_old_or_new(folder, written=last)


def test_short_writes_are_continued(calls, tmp_path, monkeypatch):
    for name, at in calls:
        if name == "write":
            folder = tmp_path / str(at)
            with monkeypatch.context() as patch:
                patch.setattr(durable, "os", Faulty(name, at, half))
                write(folder, 1, rows(), tokenizer="t")
            write(folder, 2, rows(start=3), tokenizer="t")
            assert_old_or_new(folder, written=True)


def test_a_write_of_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "os", Faulty("write", 0, lambda *a: 0))
    with refused("step-00000001", os.strerror(errno.EIO)):
        write(tmp_path, 1, rows(), tokenizer="t")
    assert list(tmp_path.iterdir()) == []


@FORKS
def test_a_kill_at_any_call_leaves_the_old_or_the_new_state(calls, tmp_path):
    after = []
    for name, at in calls:
        folder = tmp_path / f"{name}-{at}"
        write(folder, 1, rows(), tokenizer="t")

        def work(name=name, at=at, folder=folder):
            durable.os = Faulty(name, at, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
            write(folder, 2, rows(start=3), tokenizer="t")
            return 0

        assert forked(work) == -signal.SIGKILL
        after.append((name, at, assert_old_or_new(folder)))
    last = max(at for name, at in calls if name == "fsync")
    assert [(name, at) for name, at, there in after if there] == [("fsync", last)]


@FORKS
def test_a_full_disk_ends_in_one_line_that_names_the_path(tmp_path):
    folder, told = tmp_path / "store", tmp_path / "told"
    write(folder, 1, rows(), tokenizer="t")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        try:
            write(folder, 2, rows(start=3), tokenizer="t")
        except BadInput as problem:
            told.write_text(str(problem))
            return 2
        return 0

    assert forked(work) == 2
    assert str(path_of(folder, 2)) in told.read_text()
    assert os.strerror(errno.EFBIG) in told.read_text()
    assert_old_or_new(folder, written=False)


def test_what_a_dead_writer_left_is_taken_away_and_what_a_live_one_writes_is_not(tmp_path):
    dead = tmp_path / f"step-00000009.parquet.1{SUFFIX}"
    dead.write_bytes(b"half")
    with new_file(tmp_path / "live") as sink:
        sink.write(b"whole")
        assert not dead.exists()
        dead.write_bytes(b"half")
        tidy(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [f"live.{os.getpid()}{SUFFIX}"]
    assert [path.name for path in tmp_path.iterdir()] == ["live"]
    assert (tmp_path / "live").read_bytes() == b"whole"


def test_an_error_of_the_caller_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "file") as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_of_a_step_one_is_refused(tmp_path):
    write(tmp_path, 7, [], tokenizer="t")
    outcomes = []

    def one(start):
        try:
            write(tmp_path, 1, rows(3, start), tokenizer="t")
            outcomes.append(start)
        except BadInput as problem:
            assert "step-00000001" in str(problem)

    threads = [threading.Thread(target=one, args=(100 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1 and steps(tmp_path) == [1, 7]
    names = [one["sample_id"] for one in read(tmp_path, tokenizer="t")]
    assert names == [f"sample {outcomes[0] + n}" for n in range(3)]


def test_a_torn_file_under_the_final_name_would_be_noticed(tmp_path):
    whole = write(tmp_path, 1, rows(), tokenizer="t").read_bytes()
    path_of(tmp_path, 2).write_bytes(whole[: len(whole) // 2])
    with refused("step-00000002", "damaged"):
        assert_old_or_new(tmp_path)
