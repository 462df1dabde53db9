"""Verifiers: what counts as right, and that no answer costs more than its limit."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from checks import refused

from windage.llm import verify, verify_worker
from windage.llm.arithmetic import questions
from windage.llm.verify import Limits, Pool, Verdict, reward
from windage.llm.verify_worker import integer

HOSTILE = Path(__file__).with_name("hostile_checker.py")
LIMITS = Limits(wall=0.5, cpu=0.1, memory=1 << 28)
JOBS = (
    *("sleep", "spin", "memory", "memory bit by bit", "fork", "write", "files", "exit", "abort"),
    *("stop", "deaf", "dumb", "garbage", "list", "lie", "flood", "recursion", "system exit"),
)
ANSWERS = (
    *(f"{a}^{a}^{a}^{a}" for a in range(4, 10)),
    *("10^10^10", "2^99999999999", "7^(7^77)", "(99^99999)*(99^99999)*9^999999999"),
    *(f"{n}!" for n in ("100000000", "30000000", "9999999999", "9" * 5000, "-1", "")),
    *("(" * n + "1" + ")" * n for n in (150, 3_000, 100_000, 1_000_000)),
    *("-" * n + "1" for n in (3_000, 200_000)),
    *("1+" * n + "1" for n in (5_000, 200_000)),
    *("9" * n for n in (4_000, 5_000, 2_000_000)),
    *("[" * 3_000, "\x00", "\ud800", "", "\n" * 1000, "٣٤", "1 ^", "__import__('os')", '"' * 9_999),
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("42", "right"),
        ("3 + 39 = 42", "right"),
        ("The answer is 42.", "right"),
        ("\\boxed{42}", "right"),
        ("**42**\n", "right"),
        ("042", "right"),
        ("42.0", "right"),
        ("42 is the answer", "format"),
        ("42. Now let us talk about cats", "format"),
        ("42 and 43", "wrong"),
        ("-42", "wrong"),
        ("4.2", "wrong"),
        ("42.5", "wrong"),
        ("142", "wrong"),
        ("forty-two", "invalid"),
        ("", "invalid"),
    ],
)
def test_the_last_number_decides(text, word):
    assert integer(text, "42") == word


@pytest.mark.parametrize(
    ("text", "answer", "word"),
    [
        ("it is -7", "-7", "right"),
        ("it is −7", "-7", "right"),
        ("10-7", "7", "right"),
        ("1,234,567", "1234567", "right"),
        ("1, 2", "2", "right"),
        ("-0", "0", "right"),
        ("9" * 100_000, "9" * 100_000, "right"),
        ("9" * 100_000, "8", "wrong"),
    ],
)
def test_signs_commas_and_length(text, answer, word):
    assert integer(text, answer) == word


def test_rewards_have_two_levels():
    found = {w: Verdict(word=w, stopped=None, seconds=0.0) for w in verify.WORDS}
    assert [reward(v) for v in found.values()] == [1.0, 1.0, 0.0, 0.0]
    assert [reward(v, low=-1.0) for v in found.values()] == [1.0, 1.0, -1.0, -1.0]


def test_the_list_of_hostile_answers_is_long():
    assert len(JOBS) + len(ANSWERS) >= 50 and len(set(ANSWERS)) == len(ANSWERS)


def members(group: int) -> list[int]:
    """Processes of a group that live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its = entry.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(its) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_hostile_answers_to_a_credulous_checker_end_in_time(monkeypatch):
    started, original = [], subprocess.Popen

    def noted(*words, **settings):
        started.append(original(*words, **settings))
        return started[-1]

    monkeypatch.setattr(verify.subprocess, "Popen", noted)
    with Pool("integer", workers=1, limits=LIMITS, program=HOSTILE) as pool:
        found = {text: pool.check(text, "42") for text in ANSWERS}
        for job in JOBS:
            found[job] = pool.check(job, "42")
            assert pool.check("6*7", "42").word == "right", job
        last = started[-1].pid
        assert members(last) == [last]
    assert {text[:20]: v for text, v in found.items() if v.seconds > LIMITS.wall + 0.5} == {}
    assert {text[:20]: v for text, v in found.items() if v.correct} == {}
    why = {text: verdict.stopped for text, verdict in found.items()}
    assert why["sleep"] == why["stop"] == "time"
    assert why["spin"] in ("processor time", "time")
    assert why["memory"] == "memory"
    assert why["memory bit by bit"] in ("memory", "processor time", "time")
    assert why["write"] == "OSError" and why["files"] == "OSError"
    assert why["exit"] == "the worker ended with 0"
    assert why["garbage"] == why["list"] == "a reply that is none"
    assert not list(Path("/tmp").glob("hostile-*[0-9]")) or clean()
    deadline = time.monotonic() + 5
    while left := [pid for process in started for pid in members(process.pid)]:
        assert time.monotonic() < deadline, left


def clean() -> bool:
    """Files that were made but could not be written are empty; take them away."""
    sizes = []
    for path in Path("/tmp").glob("hostile-*[0-9]"):
        sizes.append(path.stat().st_size)
        path.unlink()
    return not any(sizes)


def test_hostile_answers_to_the_real_checker_end_in_time():
    with Pool("integer", limits=LIMITS) as pool:
        found = pool.check_all([(text, "42") for text in (*ANSWERS, "1" * 3_000_000)])
        assert max(v.seconds for v in found) < LIMITS.wall + 0.5
        assert not any(v.correct for v in found)
        assert pool.check("42", "42").word == "right"


def test_honest_answers_are_quick_and_several_at_a_time_keep_their_order():
    drawn = list(islice(questions(0, "train"), 300))
    with Pool("integer", workers=2) as pool:
        pool.check_all([("0", "0")] * 4)
        found = pool.check_all(
            [(f"{q.text} It is {q.answer if n % 3 else 0}.", q.answer) for n, q in enumerate(drawn)]
        )
    assert [v.word for v in found] == ["right" if n % 3 else "wrong" for n in range(300)]
    assert statistics.median(v.seconds for v in found) <= 0.002


def test_processor_time_is_counted_for_each_check_alone():
    with Pool("integer", workers=1, limits=Limits(wall=5, cpu=0.2)) as pool:
        found = [pool.check("1 " * 100_000, "1") for _ in range(12)]
    assert {v.word for v in found} == {"right"} and sum(v.seconds for v in found) > 0.2


def test_a_worker_does_not_outlive_its_owner():
    words = [sys.executable, "-I", verify_worker.__file__]
    worker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker.communicate(
        b'{"kind": "integer", "memory": 1000000000, "files": 64, "cpu": 1}\n', timeout=20
    )
    assert worker.returncode == 0


def test_a_worker_that_cannot_start_is_said_to():
    with Pool("integer", workers=1, program=Path("/nonexistent/program")) as pool:
        found = pool.check("42", "42")
    assert found.word == "invalid" and "did not start" in found.stopped


def test_a_kind_that_is_not_there_is_refused(monkeypatch):
    with refused("unknown kind of answer 'integers'", "nearest valid name: integer"):
        Pool("integers")
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    with refused("math-verify", "not installed", "allowed"):
        Pool("mathematics")
    with refused("workers is 0"):
        Pool("integer", workers=0)


@pytest.mark.skipif(verify.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_mathematics_is_compared_by_value():
    with Pool("mathematics", workers=1, limits=Limits(wall=30, cpu=30)) as pool:
        pairs = [("\\frac{1}{2}", "0.5"), ("3 + 5 = 8", "8"), ("\\boxed{12}", "13"), ("none", "1")]
        words = [v.word for v in pool.check_all(pairs)]
    assert words == ["right", "right", "wrong", "invalid"]


# The task.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"operators": "+-*", "operands": 4, "digits": 1},
        {"operators": "-", "digits": 3},
        {"operators": "*", "operands": 3},
    ],
)
def test_answers_are_right(settings):
    for question in islice(questions(3, "train", **settings), 50):
        body = question.text.removeprefix("What is ").removesuffix("? Answer with a number.")
        words = body.split()
        assert len(words) == 2 * settings.get("operands", 2) - 1
        assert set(words[1::2]) <= set(settings.get("operators", "+"))
        assert {len(w) for w in words[::2]} == {settings.get("digits", 2)}
        assert by_hand(words) == int(question.answer)


def by_hand(words: list[str]) -> int:
    """Products first, then sums from the left."""
    words = list(words)
    while "*" in words:
        at = words.index("*")
        words[at - 1 : at + 2] = [str(int(words[at - 1]) * int(words[at + 1]))]
    total = int(words[0])
    for operator, number in zip(words[1::2], words[2::2], strict=True):
        total += int(number) if operator == "+" else -int(number)
    return total


def test_splits_never_meet_whatever_the_seed_and_the_order_of_numbers():
    def pairs(seed, split):
        for q in islice(questions(seed, split, held_out=0.3), 2000):
            a, _, b = q.text.split()[2:5]
            yield tuple(sorted((int(a), int(b.rstrip("?")))))

    train, held_out = set(pairs(0, "train")), set(pairs(1, "held out"))
    assert not train & held_out and len(held_out) > 500
    share = len({p for p in held_out}) / (4095 * 0.3)
    assert 0.6 < share <= 1.15


def test_draws_follow_the_seed():
    first, again, other = ([q.text for q in islice(questions(s, "train"), 20)] for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"operators": "/"}, ("operators is '/'", "+-*")),
        ({"operators": ""}, ("operators is ''",)),
        ({"operands": 1}, ("operands is 1",)),
        ({"digits": 0}, ("digits is 0",)),
        ({"held_out": 1.5}, ("held_out is 1.5",)),
        ({"held_out": 0.0}, ("no question is held out",)),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with refused(*words):
        next(questions(0, "held out", **settings))
