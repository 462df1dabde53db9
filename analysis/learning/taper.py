"""The four limits of the taper: what each of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.recorded import Recorded
from windage.analysis.learning.study import QUICK, Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get

SOURCE = "Le Roux et al., 2025, arXiv:2503.14286"
said = partial(over, source=SOURCE)
EPOCHS = 8
VALUES = {
    "a_neg": (0.0, 0.01, 0.1, 0.5),
    "b_neg": (0.0, 0.25, 1.0, 4.0),
    "a_pos": (0.0, 0.01, 0.1, 1.0),
    "b_pos": (1.0, 2.0, 8.0, 64.0),
}
TITLES = {
    "a_neg": "a-, least weight of a negative",
    "b_neg": "b-, greatest weight of a negative",
    "a_pos": "a+, least weight of a positive",
    "b_pos": "b+, greatest weight of a positive",
}
NOTES = {
    "a_neg": "Above 0 a negative is pushed down for ever.",
    "b_neg": "How hard a negative is pushed while it is still likely.",
    "a_pos": "How hard an unlikely positive is pulled.",
    "b_pos": "How hard a positive is pulled that has become likelier than it was.",
}
ARM = "TOPR"


def arms(size: Size) -> Sequence[Arm]:
    """One limit at a time, the others as in TOPR."""
    plan = Recorded(prompts=size.train, epochs=size.of(EPOCHS))
    return [
        Arm(
            name=ARM,
            panel=TITLES[limit],
            base="mid",
            walk=partial(plan.walk, get("topr", **{limit: value})),
            marks=plan.epochs_at()[-1:],
            x=value,
        )
        for limit, values in VALUES.items()
        for value in values
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """A lower limit for negatives destroys the form; the others change the pace."""

    def point(limit: str, value: float, figure: str = "pass_at_1") -> Point:
        return Point(panel=TITLES[limit], arm=ARM, figure=figure, x=value)

    return [
        said(
            "A negative that keeps weight however unlikely it is (a- = 0.5) degenerates.",
            point("a_neg", 0.0),
            point("a_neg", 0.5),
            margin=0.2,
        ),
        said(
            "... and its answers lose their form.",
            point("a_neg", 0.5, "invalid"),
            point("a_neg", 0.0, "invalid"),
            margin=0.2,
        ),
    ]


STUDY = Study(
    name="taper",
    title="What does each limit of the taper do?",
    intro=(
        "A negative is weighed by the ratio kept between a- and b-, a positive between a+ and b+; "
        "TOPR is a- = 0 and the others 1. One limit is changed at a time; recorded responses, "
        f"{EPOCHS} epochs.",
    ),
    panels=tuple(
        Panel(name=TITLES[limit], x=TITLES[limit].split(",")[0], log=True, note=note)
        for limit, note in NOTES.items()
    ),
    arms=arms,
    orderings=orderings,
    quick=replace(QUICK, length=0.25),
)
