"""The task of a generative verifier: is a stored solution correct?"""

from __future__ import annotations

from windage.estimators.errors import BadInput
from windage.llm.tasks.checked import Checked
from windage.llm.tasks.files import Record, from_files, splits, text_of
from windage.llm.tasks.places import finite
from windage.llm.tasks.protocol import Question
from windage.llm.verify_worker import digest

ASK = "Is this solution correct? Think it over, and end with 'Judgment: yes' or 'Judgment: no'."


def verifier(
    *, train: str = "", held_out: str = "", ask: str = ASK, marker: str = "Judgment:"
) -> Checked:
    """Solutions to be judged; the right judgment is what earns the reward.

    A question stands in one split only, with all its solutions.

    Args:
        train, held_out: files of JSON lines with `question`, `solution` and `correct`, true or
            false.
        ask: words below the solution.
        marker: words that the judgment must follow; the first yes or no after the last of them
            counts, and so do correct and incorrect.

    References:
        Le Roux et al., 2025, arXiv:2503.14286; Zhang et al., 2024, arXiv:2408.15240.
    """
    load = splits("verifier", from_files(train, held_out), lambda record: _reading(record, ask))
    return Checked("verifier", finite(load), "judgment", marker=marker)


def _reading(record: Record, ask: str) -> tuple[Question, str]:
    question, solution = text_of(record, "question"), text_of(record, "solution")
    if not isinstance(correct := record.get("correct"), bool):
        raise BadInput(f"correct is {str(correct)[:40]!r}; allowed: true or false")
    text = f"Question:\n{question}\n\nProposed solution:\n{solution}\n\n{ask}".rstrip()
    answer = "yes" if correct else "no"
    name = f"verifier {digest(question, solution, answer)}"
    return Question(id=name, text=text, answer=answer), question
