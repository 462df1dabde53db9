"""A journal: whole lines for every reader, kept through any error, back to a given step."""

from __future__ import annotations

import errno
import math
import os
import threading

import pytest
import torch
from checks import refused
from disk_faults import failing, short, tampered

from windage.estimators.errors import BadInput
from windage.llm import journal
from windage.llm.journal import Journal


def entry(step: int) -> dict:
    return {"step": step, "reward": 0.1 * step, "text": "é\n" * step, "norm": math.nan}


def test_a_journal_holds_records_and_what_is_not_finite_as_text(tmp_path):
    one = Journal(tmp_path / "metrics.jsonl")
    for step in range(3):
        one.write(entry(step))
    one.sync()
    one.close()
    found = journal.read(one.path)
    assert found == [entry(step) | {"norm": "nan"} for step in range(3)]
    assert journal.read(tmp_path / "none") == []
    with refused("record.x is a Tensor", error=BadInput):
        Journal(one.path).write({"x": torch.ones(1)})
    assert journal.read(one.path) == found


def test_a_journal_goes_back_to_the_step_of_a_checkpoint_whatever_was_torn(tmp_path):
    one = Journal(tmp_path / "metrics.jsonl")
    for step in (0, 1, 1, 2, 3):
        one.write(entry(step))
    content = one.path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(content) if byte == ord("\n")]
    near = {end + n for end in ends for n in (-1, 0, 1)} | set(range(0, len(content), 19))
    for size in sorted(near):
        one.path.write_bytes(content[:size])
        journal.rewind(one.path, 1)
        assert one.path.read_bytes() == content[: max([0, *(e for e in ends[:3] if e <= size)])]
        one.path.write_bytes(content[:size])
        Journal(one.path).close()
        assert one.path.read_bytes() == content[: max([0, *(e for e in ends if e <= size)])]
    journal.rewind(tmp_path / "none", 1)
    for line in (b"{\n", b"[1]\n", b'{"step": "1"}\n', b"[" * 10**5 + b"\n"):
        one.path.write_bytes(content + line)
        with refused("metrics.jsonl", "line 6", error=BadInput):
            journal.rewind(one.path, 9)


def test_a_long_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"x" * 200_000)
    Journal(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_at_any_call_leaves_the_journal_as_it_was(number, tmp_path):
    path = tmp_path / "metrics.jsonl"
    one = Journal(path)
    one.write(entry(1))
    before = path.read_bytes()
    with tampered(0, failing(number)), refused(str(path), os.strerror(number), error=BadInput):
        one.write(entry(2))
    with tampered(0, failing(number)), refused(str(path), os.strerror(number), error=BadInput):
        one.sync()
    with tampered(0, failing(number)), refused(str(path), os.strerror(number), error=BadInput):
        Journal(path)
    assert path.read_bytes() == before

    def half_and_no_more(name, real, descriptor, content):
        real(descriptor, content[:5])
        raise OSError(number, os.strerror(number))

    with tampered(0, half_and_no_more), refused(str(path), error=BadInput):
        one.write(entry(2))
    assert path.read_bytes() == before
    with tampered(0, short):
        one.write(entry(2))
    with tampered(0, lambda *a: 0), refused(str(path), os.strerror(errno.EIO), error=BadInput):
        one.write(entry(3))
    assert [record["step"] for record in journal.read(path)] == [1, 2]


def test_a_reader_sees_whole_records_while_they_are_written(tmp_path):
    one = Journal(tmp_path / "metrics.jsonl")
    done = threading.Event()

    def writes():
        for step in range(400):
            one.write({"step": step, "text": "x" * (step * 37 % 5000)})
        done.set()

    writer = threading.Thread(target=writes)
    writer.start()
    looks = 0
    while not done.is_set() or looks == 0:
        found = journal.read(one.path)
        assert [record["step"] for record in found] == list(range(len(found)))
        looks += 1
    writer.join()
    assert len(journal.read(one.path)) == 400
