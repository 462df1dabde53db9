"""Which ratio tapers a negative: of the response, its geometric mean, or of the token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from windage.analysis.learning import offline
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over

SOURCE = "this task"
said = partial(over, source=SOURCE)
NAMES = ("TOPR", "TOPR, geometric", "TOPR, token ratio")


def arms(size: Size) -> Sequence[Arm]:
    """The three levels on ample recorded data."""
    return [offline.arm(offline.AMPLE, name, size) for name in NAMES]


def orderings(size: Size) -> Sequence[Ordering]:
    """The product beats the geometric mean, which beats the token's ratio."""
    return [
        said(
            f"{high} ends above {low}.",
            Point(panel=offline.AMPLE, arm=high),
            Point(panel=offline.AMPLE, arm=low),
            margin=0.05,
        )
        for high, low in pairwise(NAMES)
    ]


STUDY = Study(
    name="level",
    title="Which ratio should taper a negative?",
    intro=(
        "TOPR's paper truncates the ratio of the whole response; frameworks truncate the token's "
        "or the geometric mean. Same recorded responses, same steps.",
    ),
    panels=(
        Panel(
            name=offline.AMPLE,
            note="One rule, three ratios: how far a negative may be pushed before it is let go.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
