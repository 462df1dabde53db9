"""Statements of the documents that cannot be run here, and the rows of toys that stand in.

They get no verdict, and no figure of a large run is printed as if it had been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from windage.analysis.claims.index import SOURCES


@final
@dataclass(frozen=True, kw_only=True)
class Reported:
    """One statement.

    Args:
        letter: of the document.
        statement: in our words.
        stands_in: claims whose toys are about the same thing.
    """

    letter: str
    statement: str
    stands_in: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """The statement in `--json`."""
        return {
            "source": SOURCES[self.letter],
            "statement": self.statement,
            "stands_in": list(self.stands_in),
        }


def curated(p: float, answers: int = 16) -> float:
    """Share of positives when the first right answer and every wrong one are kept.

    Args:
        p: chance that an answer is right.
        answers: drawn a question.

    Example:
        >>> [round(curated(p), 4) for p in (0.05, 0.5, 0.8)]
        [0.0355, 0.1111, 0.2381]
    """
    right = 1 - (1 - p) ** answers
    return right / (right + answers * (1 - p))


def _curation() -> str:
    success = (0.05, 0.5, 0.8)
    shares = ", ".join(f"{curated(p):.4f}" for p in success)
    return (
        "Keeping the first right and all wrong of 16 answers evens out what questions contribute "
        f"(counted: positives are {shares} of what is kept at p = {', '.join(map(str, success))})."
    )


REPORTED = (
    Reported(
        letter="B",
        statement="With GSPO, mixture-of-experts models trained steadily and replaying the routing "
        "became unnecessary.",
        stands_in=("B-31",),
    ),
    Reported(
        letter="B",
        statement="In its authors' code score centering costs less than 1 % at k = 128; gains were "
        "published under quantization and on stale data.",
        stands_in=("B-39", "B-40", "B-41"),
    ),
    Reported(
        letter="B",
        statement="In ScaleRL most choices of design change how efficient the whole recipe is.",
        stands_in=("B-48",),
    ),
    Reported(
        letter="B",
        statement="The settings of MiniMax-M1 and Ring-1T, and recent critics that reach group "
        "baselines on reasoning tasks.",
        stands_in=("B-27", "B-30", "B-10"),
    ),
    Reported(
        letter="T",
        statement="After iterations and curation the 8B model reaches the 70B one; MATH pass@1 "
        "nearly doubles; the 8B verifier on MATH.",
        stands_in=("T-17", "T-21", "T-22"),
    ),
    Reported(letter="T", statement=_curation(), stands_in=("T-13",)),
    Reported(
        letter="T",
        statement="Training that lowers the loss of all examples alike generalizes better.",
        stands_in=("T-30",),
    ),
    Reported(
        letter="G",
        statement="Which implementations refresh the reference, that refreshing helped published "
        "runs, four passes as the usual number, and the published result one step off-policy.",
        stands_in=("G-01", "G-08", "G-10"),
    ),
)
