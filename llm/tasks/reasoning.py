"""Questions of reasoning-gym, whose data sets make and score them."""

from __future__ import annotations

import json
import random
from importlib import import_module
from typing import Any

from windage.estimators.errors import BadInput, unknown, within
from windage.llm.tasks.checked import Checked
from windage.llm.tasks.places import endless
from windage.llm.tasks.protocol import Question
from windage.llm.verify import Limits, check_kind
from windage.llm.verify_worker import digest

ASK = "Put the answer alone between <answer> and </answer>."
SEEDS = 2**31
# Its packages take more room than a checker of numbers.
LIMITS = Limits(memory=4 << 30)


def reasoning_gym(
    *, dataset: str = "chain_sum", held_out: float = 0.1, ask: str = ASK, **settings: Any
) -> Checked:
    """Questions of one data set; a response is right where its score is 1.

    Args:
        dataset: its name there.
        held_out: share of all questions, told by their words.
        ask: words below the question.
        settings: of the data set, by its own names.

    Raises:
        BadInput: the package is not installed, or knows no such data set or setting.
    """
    check_kind("reasoning")
    within(0, 1, held_out=held_out)
    names = import_module("reasoning_gym.factory").DATASETS
    if dataset not in names:
        raise unknown("data set of reasoning-gym", dataset, sorted(names))
    make_data = import_module("reasoning_gym").create_dataset

    def entry_of(seed: int) -> tuple[dict[str, Any], str, str]:
        told = {**settings, "seed": seed, "size": 1}
        entry = make_data(dataset, **told)[0]
        return told, str(entry["question"]), str(entry["answer"])

    try:
        first, again = entry_of(0), entry_of(0)
    except Exception as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise BadInput(f"data set {dataset} of reasoning-gym refuses its settings: {why}") from None

    def make(generator: random.Random) -> tuple[Question, str]:
        return question_of(*entry_of(generator.randrange(SEEDS)))

    def question_of(told: dict[str, Any], question: str, answer: str) -> tuple[Question, str]:
        name = digest(question)
        asked_for = {"dataset": dataset, "settings": told, "question": name, "answer": answer}
        text = f"{question}\n{ask}".rstrip()
        return Question(id=f"{dataset} {name}", text=text, answer=json.dumps(asked_for)), name

    task = Checked("reasoning_gym", endless(make, held_out), "reasoning", limits=LIMITS)
    try_out(task, dataset, question_of(*first)[0] if first == again else None)
    return task


def try_out(task: Checked, dataset: str, question: Question | None) -> None:
    """Refuse a data set whose questions are others in another process, or cannot be checked there.

    Raises:
        BadInput: names the data set.
    """
    why = "LookupError"
    if question is not None:
        (verdict,) = task.judge([(question, "<answer>0</answer>")], [False])
        if verdict.stopped is None:
            return
        why = verdict.stopped
    task.close()
    what = "gives other questions for the same seed" if why == "LookupError" else f"fails: {why}"
    raise BadInput(f"data set {dataset} of reasoning-gym {what}; allowed: one that does not")
