"""Tasks: their questions by place, the split that never leaks, and verdicts on responses."""

from __future__ import annotations

from collections import Counter

import pytest
from checks import refused

from windage.llm.tasks.arithmetic import arithmetic
from windage.llm.tasks.protocol import Task

MANY = 1_000


# Arithmetic.


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
    for question in arithmetic(**settings).questions("train", 3, 0, 50):
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


@pytest.mark.parametrize("digits", [2, 3])
def test_splits_never_meet_whatever_the_seed_and_the_order_of_numbers(digits):
    task = arithmetic(digits=digits, held_out=0.3)

    def pairs(seed, split):
        questions = task.questions(split, seed, 0, MANY)
        return {tuple(sorted(q.id.split("+"))) for q in questions}

    train, held_out = pairs(0, "train"), pairs(1, "held out")
    assert not train & held_out and len(held_out) > 500


def test_every_question_is_in_one_split_or_the_other():
    task = arithmetic(digits=1, held_out=0.3)
    size = 100
    parts = {
        split: {q.id for q in task.questions(split, 0, 0, size)} for split in ("train", "held out")
    }
    assert not parts["train"] & parts["held out"]
    assert len(parts["train"]) + len(parts["held out"]) == size
    assert 15 <= len(parts["held out"]) <= 45


@pytest.mark.parametrize("settings", [{"digits": 1}, {"digits": 4}], ids=["listed", "drawn"])
def test_questions_go_by_place(settings):
    task = arithmetic(**settings)
    whole = task.questions("train", 5, 0, 300)
    assert task.questions("train", 5, 120, 50) == whole[120:170]
    assert task.questions("train", 6, 0, 300) != whole
    assert task.questions("train", 5, 10, 0) == []


def test_a_list_goes_round_in_another_order_each_turn():
    task = arithmetic(digits=1)
    size = len({q.id for q in task.questions("train", 0, 0, 200)})
    turns = [[q.id for q in task.questions("train", 0, t * size, size)] for t in range(3)]
    assert all(Counter(turn) == Counter(turns[0]) for turn in turns)
    assert len(set(turns[0])) == size
    assert len({tuple(turn) for turn in turns}) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"operators": "/"}, ("operators is '/'", "+-*")),
        ({"operators": ""}, ("operators is ''",)),
        ({"operators": "++"}, ("operators is '++'", "each once")),
        ({"operands": 1}, ("operands is 1",)),
        ({"digits": 0}, ("digits is 0",)),
        ({"held_out": 1.5}, ("held_out is 1.5",)),
        ({"held_out": 0.0}, ("no question is held out",)),
        ({"held_out": 0.0, "digits": 5}, ("no question is held out",)),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with refused(*words):
        arithmetic(**settings).questions("held out", 0, 0, 1)


def test_verdicts_come_in_order_and_a_cut_response_has_at_best_a_fault_of_format():
    task = arithmetic()
    assert isinstance(task, Task)
    question, other = task.questions("train", 0, 0, 2)
    texts = [question.answer, f"It is {question.answer}.", "1", "none", question.answer]
    pairs = [*((question, text) for text in texts), (other, other.answer)]
    found = task.judge(pairs, [False, False, True, False, True, False])
    assert [v.word for v in found] == ["right", "right", "wrong", "invalid", "format", "right"]
    assert found[0].answer == found[4].answer == question.answer and found[2].answer == "1"
    task.close()
    task.close()


def test_a_marker_must_come_before_the_answer():
    task = arithmetic(marker="The answer is")
    question = task.questions("train", 0, 0, 1)[0]
    texts = [
        f"7. The answer is {question.answer}.",
        f"The answer is 1. The answer is {question.answer}",
        f"The answer is {question.answer}. Now 7",
        question.answer,
        "The answer is unknown",
    ]
    found = task.judge([(question, text) for text in texts], [False] * len(texts))
    task.close()
    assert [v.word for v in found] == ["right", "right", "format", "invalid", "invalid"]
