"""GSM8K, MATH, and questions of any kind from a file."""

from __future__ import annotations

from collections.abc import Sequence

from windage.estimators.errors import BadInput, unknown
from windage.llm.tasks.checked import Checked
from windage.llm.tasks.files import Record, Source, asked, from_files, hub, splits, text_of
from windage.llm.tasks.places import finite
from windage.llm.tasks.protocol import Question, Split
from windage.llm.verify_worker import NUMBER, boxed, digest

SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
CHECKED = ("integer", "stated", "mathematics", "text")


def gsm8k(
    *,
    train: str = "",
    held_out: str = "",
    ask: str = "Think step by step, and end with #### and the answer as a number.",
    marker: str = "####",
) -> Checked:
    """Grade-school word problems whose answers are numbers.

    Args:
        train, held_out: files of JSON lines with `question` and `answer`, which ends in `#### n`;
            empty both: from the hub, where the test split is held out.
        ask: words below the question.
        marker: words that the answer must follow; empty: the last number counts.

    References:
        Cobbe et al., 2021, arXiv:2110.14168.
    """

    def reading(record: Record) -> tuple[Question, str]:
        question, worked = text_of(record, "question"), text_of(record, "answer")
        _, mark, last = worked.rpartition("####")
        answer = last.strip().lstrip("$")
        if not mark or not NUMBER.fullmatch(answer):
            raise BadInput(f"answer ends in {worked[-20:]!r}; allowed: '#### ' and a number")
        name = f"gsm8k {digest(question, answer)}"
        return Question(id=name, text=asked(question, ask), answer=answer), question

    sources = _either(train, held_out, ("openai/gsm8k", ("main",)), ("openai/gsm8k", ("main",)))
    kind = "stated" if marker else "integer"
    return Checked("gsm8k", finite(splits("gsm8k", sources, reading)), kind, marker=marker)


def math(
    *,
    train: str = "",
    held_out: str = "",
    ask: str = r"Put the final answer in \boxed{}.",
    marker: str = "",
) -> Checked:
    r"""Competition problems, their answers compared by math-verify.

    Args:
        train, held_out: files of JSON lines with `problem` and `solution`, which holds `\boxed{}`;
            empty both: from the hub, where MATH-500 is held out.
        ask: words below the problem.
        marker: words that the answer must follow; empty: none.

    References:
        Hendrycks et al., 2021, arXiv:2103.03874; MATH-500: Lightman et al., 2023, arXiv:2305.20050.
    """

    def reading(record: Record) -> tuple[Question, str]:
        problem, solution = text_of(record, "problem"), text_of(record, "solution")
        box = boxed(solution)
        if box is None or not box[0].strip():
            raise BadInput(f"solution ends in {solution[-20:]!r}; allowed: one with \\boxed{{}}")
        name = f"math {digest(problem, box[0])}"
        return Question(id=name, text=asked(problem, ask), answer=box[0].strip()), problem

    whole, tested = ("EleutherAI/hendrycks_math", SUBJECTS), ("HuggingFaceH4/MATH-500", (None,))
    sources = _either(train, held_out, whole, tested)
    return Checked("math", finite(splits("math", sources, reading)), "mathematics", marker=marker)


def jsonl(
    *, train: str = "", held_out: str = "", check: str = "integer", ask: str = "", marker: str = ""
) -> Checked:
    """Questions and answers from files.

    Args:
        train, held_out: files of JSON lines with `question` and `answer`.
        check: `integer`: the last number counts; `stated`: or that of the first statement, where
            the response rambles on; `mathematics`: by math-verify; `text`: the whole response.
        ask: words below the question.
        marker: words that the answer must follow; empty: none.
    """
    if check not in CHECKED:
        raise unknown("check", check, CHECKED)

    def reading(record: Record) -> tuple[Question, str]:
        question, answer = text_of(record, "question"), text_of(record, "answer", numbers=True)
        if check in ("integer", "stated") and not NUMBER.fullmatch(answer):
            raise BadInput(f"answer is {answer[:40]!r}; allowed for the check {check}: a number")
        name = f"jsonl {digest(question, answer)}"
        return Question(id=name, text=asked(question, ask), answer=answer), question

    draw = finite(splits("jsonl", from_files(train, held_out), reading))
    return Checked("jsonl", draw, check, marker=marker)


Named = tuple[str, Sequence[str | None]]


def _either(train: str, held_out: str, whole: Named, tested: Named) -> dict[Split, Source]:
    """The files that are named, or the data sets of the hub where none is."""
    if train or held_out:
        return from_files(train, held_out)
    return {
        "train": lambda: hub(*whole, "train"),
        "held out": lambda: hub(*tested, "test"),
    }
