"""Schedules of the reference policy: never refreshed, now and then, by epoch, mixed up, always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.penalty import loss_k2
from windage.toy.ascent import Reference

SOURCE = "document 001"
said = partial(over, source=SOURCE)
PANEL = "schedule of the reference"
STEPS, RATE, STRENGTH, PROMPTS = 120, 0.1, 0.3, 32
NONE, ALWAYS, NEVER, EPOCH = "no reference", "every step", "never", "every epoch"


def held(strength: float) -> Estimator:
    """Reward minus group mean, with a divergence from the reference in the loss."""
    return replace(get("group_mean"), penalties=(use(loss_k2, coefficient=strength),))


def schedules(size: Size) -> dict[str, Reference | None]:
    """By name; an epoch is as many batches as the training prompts fill."""
    return {
        NONE: None,
        NEVER: Reference(),
        EPOCH: Reference(every=max(1, size.train // PROMPTS)),
        "every 4 steps": Reference(every=4),
        "mix-up 0.1 every step": Reference(every=1, share=0.1),
        ALWAYS: Reference(every=1),
    }


def arms(size: Size) -> Sequence[Arm]:
    """The same rule under every schedule."""
    found = []
    for name, reference in schedules(size).items():
        plan = Drawn(steps=size.of(STEPS), rate=RATE, reference=reference)
        rule = held(STRENGTH) if reference else get("group_mean")
        found.append(
            Arm(
                name=name,
                panel=PANEL,
                base="mid",
                walk=partial(plan.walk, rule),
                marks=plan.quarters(),
            )
        )
    return found


def orderings(size: Size) -> Sequence[Ordering]:
    """A fixed reference holds back; one refreshed at every step is none."""

    def point(arm: str, figure: str = "pass_at_1") -> Point:
        return Point(panel=PANEL, arm=arm, figure=figure)

    exact = 1e-6
    return [
        said(
            "A reference that is refreshed lets the policy move on further than a fixed one.",
            point(EPOCH),
            point(NEVER),
        ),
        said(
            "A fixed reference keeps the policy nearer to its start.",
            point(EPOCH, "kl_start"),
            point(NEVER, "kl_start"),
        ),
        said(
            "Refreshed at every step it equals no reference: not better,",
            point(NONE),
            point(ALWAYS),
            margin=-exact,
        ),
        said("... and not worse.", point(ALWAYS), point(NONE), margin=-exact),
    ]


STUDY = Study(
    name="reference",
    title="When should the reference be refreshed?",
    intro=(
        f"A squared log-ratio to the reference in the loss, strength {STRENGTH}; reward minus the "
        "group's mean, on-policy. An epoch is one pass over the training prompts in batches of 32.",
    ),
    panels=(
        Panel(
            name=PANEL,
            figures=("pass_at_1", "kl_start"),
            note="What each schedule lets the policy learn, and how far it moves for that.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
