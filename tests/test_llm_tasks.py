"""Tasks: their questions by place, the split that never leaks, and verdicts on responses."""

from __future__ import annotations

import json
import logging
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from checks import refused

from windage.llm import verify
from windage.llm.tasks import files
from windage.llm.tasks.arithmetic import arithmetic
from windage.llm.tasks.index import TASKS, get, parse
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
        f"The answer is {question.answer}. The answer is 1.",
        f"The answer is {question.answer}. Now 7",
        question.answer,
        "The answer is unknown",
    ]
    found = task.judge([(question, text) for text in texts], [False] * len(texts))
    task.close()
    assert [v.word for v in found] == ["right", "right", "wrong", "format", "invalid", "invalid"]


# Files.


def lines(path, *records):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return str(path)


def answers(task, split, count):
    return [q.answer for q in task.questions(split, 0, 0, count)]


def test_gsm8k_reads_its_fields_and_checks_the_number_after_the_mark(tmp_path):
    rows = [
        {"question": f"How many are {n} and 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1:,}"}
        for n in (5, 1233)
    ]
    task = get("gsm8k", {"held_out": lines(tmp_path / "g.jsonl", *rows)})
    questions = sorted(task.questions("held out", 0, 0, 2), key=lambda q: len(q.answer))
    assert [q.answer for q in questions] == ["6", "1,234"]
    assert questions[0].text.startswith("How many are 5 and 1?\n")
    texts = ["5 + 1 = 6\n#### 6", "#### $1234", "1234", "#### 7", "#### 6\nQuestion: 9"]
    right = [questions[n] for n in (0, 1, 1, 0, 0)]
    found = task.judge(list(zip(right, texts, strict=True)), [False] * 5)
    task.close()
    assert [v.word for v in found] == ["right", "right", "invalid", "wrong", "format"]


def test_math_reads_the_box(tmp_path):
    row = {"problem": "Halve 1.", "solution": r"It is $\boxed{\frac{1}{2}}$."}
    task = get("math", {"train": lines(tmp_path / "m.jsonl", row)})
    (question,) = task.questions("train", 0, 0, 1)
    assert question.answer == r"\frac{1}{2}"
    found = task.judge([(question, text) for text in (r"\boxed{0.5}", r"\boxed{2}")], [False] * 2)
    task.close()
    assert [v.word for v in found] == ["right", "wrong"]


def test_jsonl_takes_numbers_and_words(tmp_path):
    file = lines(tmp_path / "j.jsonl", {"question": "1 + 1?", "answer": 2}, "\n")
    assert answers(get("jsonl", {"train": file}), "train", 2) == ["2", "2"]
    file = lines(tmp_path / "k.jsonl", {"question": "Capital of France?", "answer": "Paris"})
    task = get("jsonl", {"train": file, "check": "text"})
    (question,) = task.questions("train", 0, 0, 1)
    found = task.judge([(question, text) for text in ("paris", "Rome")], [False, False])
    task.close()
    assert [v.word for v in found] == ["right", "wrong"]


def test_verifier_rewards_the_right_judgment(tmp_path):
    rows = [
        {"question": "1 + 1?", "solution": "It is 2.", "correct": True},
        {"question": "1 + 1?", "solution": "It is 3.", "correct": False},
    ]
    task = get("verifier", {"held_out": lines(tmp_path / "v.jsonl", *rows)})
    good, bad = sorted(task.questions("held out", 0, 0, 2), key=lambda q: q.answer, reverse=True)
    assert (good.answer, bad.answer) == ("yes", "no") and "It is 3." in bad.text
    said = [
        (good, "It adds up. Judgment: yes", "right"),
        (good, "Judgment: correct", "right"),
        (good, "Judgment: no", "wrong"),
        (bad, "No error?\nJudgment: incorrect", "right"),
        (bad, "Judgment: no, since 1 + 1 = 2", "format"),
        (bad, "no", "invalid"),
    ]
    found = task.judge([(q, text) for q, text, _ in said], [False] * len(said))
    task.close()
    assert [v.word for v in found] == [word for _, _, word in said]


def test_what_is_held_out_is_no_question_of_training_whatever_the_files_say(tmp_path):
    rows = [{"question": f"What is {n}  + 1?", "answer": n + 1} for n in range(20)]
    again = [{"question": f"what is {n} + 1? ", "answer": 0} for n in range(5)]
    settings = {
        "train": lines(tmp_path / "train.jsonl", *rows, *rows),
        "held_out": lines(tmp_path / "held_out.jsonl", *again),
    }
    task = get("jsonl", settings)
    drawn = Counter(q.text for q in task.questions("train", 0, 0, 15))
    assert set(drawn.values()) == {1}
    assert not {f"What is {n}  + 1?" for n in range(5)} & set(drawn)
    assert get("jsonl", {"train": settings["train"]}).questions("train", 0, 0, 20)
    settings["train"] = lines(tmp_path / "same.jsonl", *again)
    with refused("train of task jsonl has no question that is not held out as well"):
        get("jsonl", settings).questions("train", 0, 0, 1)


def test_a_question_of_the_verifier_is_in_one_split_with_all_its_solutions(tmp_path):
    rows = [
        {"question": f"{q} + 1?", "solution": s, "correct": False} for q in "12" for s in ("3", "4")
    ]
    settings = {
        "train": lines(tmp_path / "t.jsonl", *rows),
        "held_out": lines(tmp_path / "h.jsonl", {**rows[0], "solution": "5"}),
    }
    task = get("verifier", settings)
    assert all("2 + 1?" in q.text for q in task.questions("train", 0, 0, 8))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("jsonl", '{"question": "a", "answer": 1}\n{"question": "b"}\n', ("line 2", "'answer'")),
        ("jsonl", '{"question": "a", "answer": 1}\n\n{"question"\n', ("line 3", "no JSON")),
        ("jsonl", "[1]\n", ("line 1", "list", "JSON objects")),
        ("jsonl", "[" * 100_000, ("line 1", "no JSON")),
        ("jsonl", b"\xff\xfe\n", ("line 1", "no JSON")),
        ("jsonl", '{"question": " ", "answer": 1}', ("line 1", 'question is " "', "text")),
        ("jsonl", '{"question": 3, "answer": 1}', ("line 1", "question is 3")),
        ("jsonl", '{"question": "a", "answer": true}', ("line 1", "answer is true")),
        ("jsonl", '{"question": "a", "answer": "many"}', ("line 1", "'many'", "a number")),
        ("jsonl", "", ("train of task jsonl has no question",)),
        ("gsm8k", '{"question": "a", "answer": "5"}', ("line 1", "#### ")),
        ("gsm8k", '{"question": "a", "answer": "#### five"}', ("line 1", "a number")),
        ("math", '{"problem": "a", "solution": "5"}', ("line 1", "boxed")),
        ("math", r'{"problem": "a", "solution": "\\boxed{ }"}', ("line 1", "boxed")),
        ("math", '{"question": "a", "solution": "5"}', ("line 1", "no field 'problem'")),
        (
            "verifier",
            '{"question": "a", "solution": "b", "correct": 1}',
            ("line 1", "true or false"),
        ),
        ("verifier", '{"question": "a", "solution": "b"}', ("line 1", "true or false")),
    ],
)
def test_damaged_files_are_refused_with_file_and_line(tmp_path, name, content, words):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused("damaged.jsonl" if "line" in words[0] else "train", *words):
        get(name, {"train": str(path)}).questions("train", 0, 0, 1)


def test_files_and_splits_that_are_not_there_are_refused(tmp_path):
    with refused("nowhere.jsonl", "No such file"):
        get("gsm8k", {"train": str(tmp_path / "nowhere.jsonl")}).questions("train", 0, 0, 1)
    with refused("Is a directory"):
        get("gsm8k", {"train": str(tmp_path)}).questions("train", 0, 0, 1)
    with refused("task jsonl has no held out questions", "held_out=FILE"):
        get("jsonl", {"train": "x"}).questions("held out", 0, 0, 1)


# The hub.


def test_data_sets_of_the_hub_are_read_in_the_same_fields(monkeypatch, capsys, caplog):
    calls = []

    def load_dataset(name, part, split):
        calls.append((name, part, split))
        row = {"problem": f"{part} {split}", "solution": r"\boxed{1}"}
        shared = {"problem": "shared", "solution": r"\boxed{2}"}
        return [row, shared] if name.endswith("MATH-500") or part == "algebra" else [row]

    hub = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setattr(files, "find_spec", lambda name: hub)
    monkeypatch.setattr(files, "import_module", lambda name: hub)
    task = get("math")
    texts = {q.text.split("\n")[0] for q in task.questions("train", 0, 0, 7)}
    assert len(texts) == 7 and "shared" not in texts and "algebra train" in texts
    assert answers(task, "held out", 2) in (["1", "2"], ["2", "1"])
    assert {name for name, _, split in calls if split == "test"} == {"HuggingFaceH4/MATH-500"}

    def fails(name, part, split):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise ConnectionError("no way\nthere")

    monkeypatch.setattr(hub, "load_dataset", fails)
    with refused("'openai/gsm8k' is not reached: no way", "held_out=FILE"):
        get("gsm8k").questions("held out", 0, 0, 1)
    assert capsys.readouterr().err == "" and not caplog.records


def test_without_the_package_the_hub_is_refused(monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with refused("'openai/gsm8k'", "datasets", "not installed", "train=FILE"):
        get("gsm8k").questions("held out", 0, 0, 1)


# reasoning-gym.


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_reasoning_gym_scores_what_stands_between_the_tags():
    task = get("reasoning_gym", {"dataset": "chain_sum", "min_terms": "2", "max_terms": 2})
    first, second = task.questions("held out", 0, 0, 2)
    assert task.questions("held out", 0, 1, 1) == [second]
    answer = json.loads(first.answer)["answer"]
    texts = [
        *(f"<answer>{answer}</answer>", f"Well, <answer> {answer} </answer>.", answer),
        *(f"<answer>{answer}</answer> as said", "<answer>x</answer>", "x", ""),
    ]
    found = task.judge([(first, text) for text in texts], [False] * len(texts))
    task.close()
    words = ["right", "right", "format", "format", "wrong", "invalid", "invalid"]
    assert [v.word for v in found] == words
    assert not any(v.stopped for v in found)
    train = {q.text for q in task.questions("train", 0, 0, 200)}
    assert not train & {q.text for q in task.questions("held out", 1, 0, 50)}
    with refused("unknown data set of reasoning-gym 'chain_sums'", "chain_sum"):
        get("reasoning_gym", {"dataset": "chain_sums"})
    with refused("chain_sum", "refuses its settings"):
        get("reasoning_gym", {"terms": 2})
    with refused("gives other questions for the same seed"):
        get("reasoning_gym", {"dataset": "ransom_note"})


def test_without_reasoning_gym_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    with refused("reasoning-gym", "not installed", "windage[reasoning-gym]"):
        get("reasoning_gym", {"dataset": "chain_sum"})


# By name.


def test_tasks_come_by_name_with_settings_of_their_own():
    assert set(TASKS) == {"arithmetic", "gsm8k", "math", "jsonl", "reasoning_gym", "verifier"}
    task = get("arithmetic", {"digits": "1", "operands": 3, "held_out": 1, "operators": "-"})
    assert isinstance(task, Task) and task.questions("held out", 0, 0, 1)
    assert parse("jsonl:train=a=b,ask=") == ("jsonl", {"train": "a=b", "ask": ""})


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("aritmetic", {}, ("unknown task 'aritmetic'", "nearest valid name: arithmetic")),
        ("arithmetic", {"digit": 1}, ("setting of task arithmetic 'digit'", "digits")),
        ("arithmetic", {"digits": "two"}, ("digits is 'two'", "a whole number")),
        ("arithmetic", {"digits": 1.5}, ("digits is '1.5'", "a whole number")),
        ("arithmetic", {"digits": True}, ("digits is 'True'", "a whole number")),
        ("arithmetic", {"held_out": "x"}, ("held_out is 'x'", "a number")),
        ("arithmetic", {"operators": 3}, ("operators is '3'", "text")),
        (
            "jsonl",
            {"check": "integers"},
            ("unknown check 'integers'", "nearest valid name: integer"),
        ),
    ],
)
def test_names_and_settings_that_are_not_there_are_refused(name, settings, words):
    with refused(*words):
        get(name, settings)


@pytest.mark.parametrize(("text", "what"), [("a:b", "'b' has no value"), ("a:b=1,b=2", "twice")])
def test_words_without_a_value_or_twice_are_refused(text, what):
    with refused(what, "NAME:key=value"):
        parse(text)
