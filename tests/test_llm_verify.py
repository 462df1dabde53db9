"""Verifiers: what counts as right, and that no answer costs more than its limit."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checks import refused

from windage.llm import verify, verify_worker
from windage.llm.verify import PLUS_MINUS, Limits, Pool, Scale, Verdict, after_cut, reward
from windage.llm.verify_worker import boxed, integer, judgment, mathematics, plain, stated

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
    assert integer(text, "42").word == word


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
    assert integer(text, answer).word == word


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("42", "right"),
        ("40 + 2 = 42", "right"),
        ("40 + 2 = 42.", "right"),
        ("40 + 2 = 42. To add, write", "format"),
        ("40 + 2 = 42. Then 42 + 3 = 45", "format"),
        ("42\n3 + 4", "format"),
        ("Of course! It is 42! Now 7.", "format"),
        ("Let me see.\nIt is 42.\nThe next is 4", "format"),
        ("41, 42, 43", "wrong"),
        ("41\n42\n43", "wrong"),
        ("What is 40 + 2? It is 42. And 7", "wrong"),
        ("42.5 is it. 7", "wrong"),
        ("none", "invalid"),
    ],
)
def test_rambling_is_told_apart_from_a_wrong_answer(text, word):
    found = stated(text, "42")
    assert found.word == word
    assert found.answer == {"right": "42", "format": "42"}.get(word, found.answer)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{7}", ("7", 9)),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", (r"\frac{1}{2}", 33)),
        (r"\fbox{\{1, 2\}}.", (r"\{1, 2\}", 15)),
        (r"\boxed 7 apples", ("7", 8)),
        (r"\boxed{7", None),
        (r"\boxed", None),
        ("7", None),
    ],
)
def test_the_last_box_is_read_to_its_own_brace(text, found):
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("check", "text", "answer", "word"),
    [
        (plain, "Paris.", "Paris", "right"),
        (plain, "  PARIS ", "Paris", "right"),
        (plain, "Paris\n\nIt is a city.", "Paris", "format"),
        (plain, "Paris, France", "Paris", "wrong"),
        (plain, "\n", "Paris", "invalid"),
        (judgment, "yes", "yes", "right"),
        (judgment, "**Correct.**", "yes", "right"),
        (judgment, "incorrect", "no", "right"),
        (judgment, "not correct", "no", "right"),
        (judgment, "not correct", "yes", "wrong"),
        (judgment, "No, there is an error", "no", "format"),
        (judgment, "correctly put, nothing yesterday", "yes", "invalid"),
    ],
)
def test_words_and_judgments(check, text, answer, word):
    assert check(text, answer).word == word


def test_a_scale_says_what_a_fault_of_format_earns():
    found = [Verdict(word=w, stopped=None, seconds=0.0) for w in verify.WORDS]
    assert [reward(v, Scale()) for v in found] == [1.0, 0.5, 0.0, 0.0]
    assert [reward(v, PLUS_MINUS) for v in found] == [1.0, 0.0, -1.0, -1.0]
    assert [reward(v, Scale(low=-2, high=3, format=-2)) for v in found] == [3, -2, -2, -2]
    assert [after_cut(v).word for v in found] == ["format", "format", "wrong", "invalid"]


@pytest.mark.parametrize(
    "settings",
    [{"low": 1.0}, {"format": 2.0}, {"low": -1.0, "format": -2.0}, {"high": float("inf")}],
)
def test_a_scale_out_of_order_is_refused(settings):
    with refused("allowed: low <= format <= high"):
        Scale(**settings)


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
    sums = [(f"What is {n} + {n + 7}?", str(2 * n + 7)) for n in range(300)]
    with Pool("integer", workers=2) as pool:
        pool.check_all([("0", "0")] * 4)
        found = pool.check_all(
            [
                (f"{text} It is {right if n % 3 else 0}.", right)
                for n, (text, right) in enumerate(sums)
            ]
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
        pairs = [
            (r"\frac{1}{2}", "0.5"),
            ("3 + 5 = 8", "8"),
            ("3 + 5 = 8, as was to be shown", "8"),
            (r"\boxed{12}", "13"),
            (r"Both $11$ and $12$; so \boxed{12}.", "12"),
            (r"\(\boxed{\dfrac{1}{2}}\)", r"\frac{1}{2}"),
            (r"\boxed{12} because of this", "12"),
            ("none", "1"),
        ]
        found = pool.check_all(pairs)
    words = ["right", "right", "format", "wrong", "right", "right", "format", "invalid"]
    assert [v.word for v in found] == words
    assert [v.answer for v in found[:4]] == ["0.5", "8", "8", "12"]


def test_checks_are_read_where_they_are_listed():
    assert verify_worker.CHECKS["mathematics"] is mathematics
    assert set(verify.NEEDS) <= set(verify_worker.CHECKS)
