"""Dynamic sampling, dropping what is slow, time-outs: what is learned on easy and hard prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from windage.analysis.learning.drawn import Drawn
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import TIME, World
from windage.estimators.admission import time_out, zero_variance
from windage.estimators.catalogue import get
from windage.estimators.penalty import timeout_failure
from windage.toy.learning import State
from windage.toy.network import grouped
from windage.toy.sums import Generators
from windage.toy.training import Record

SOURCE = "document 002"
said = partial(over, source=SOURCE)
PANEL = "what a batch admits"
EVERYTHING, VARIED, FAST, FAILED = (
    "everything",
    "groups that vary, refilled",
    "without slow responses",
    "slow responses count as wrong",
)
STEPS, RATE, BATCH, DRAWN = 120, 0.1, 32, 96
LIMIT, SPREAD = 16.0, 0.5
Admit = Callable[[Record], Record]


def varied(record: Record) -> Record:
    """The first groups of which the rewards vary; others only where too few do."""
    rewards = grouped(record.rewards, len(record))
    keep = zero_variance(rewards, torch.ones_like(rewards, dtype=torch.bool)).any(-1)
    order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
    return record.take(order[:, :BATCH])


def seconds(record: Record, among: Generators, place: World) -> Float[Tensor, "S P G"]:
    """Time of each response: its tokens, times one more for each hard digit, times chance.

    The chance is lognormal with median 1.
    """
    task = place.network.task
    tokens = task.mask(record.tokens).sum(-1)
    noise = torch.stack([torch.randn(tokens.shape[1], generator=g) for g in among])
    found = tokens * (1 + task.steps_that_are_hard(record.prompts)) * (SPREAD * noise).exp()
    return grouped(found, len(record))


def walk(name: str, steps: int, place: World) -> Iterator[State]:
    """On-policy training on what the batch admits."""
    among = place.generators(TIME)

    def fast(record: Record) -> Record:
        kept = time_out(seconds(record, among, place), limit=LIMIT)
        return replace(record, present=kept.flatten(1))

    def failed(record: Record) -> Record:
        rewards = grouped(record.rewards, len(record))
        late = timeout_failure(rewards, seconds(record, among, place), limit=LIMIT)
        return replace(record, rewards=(rewards + late).flatten(1))

    rules: dict[str, tuple[int, Admit]] = {
        EVERYTHING: (BATCH, lambda record: record),
        VARIED: (DRAWN, varied),
        FAST: (BATCH, fast),
        FAILED: (BATCH, failed),
    }
    batch, admit = rules[name]
    plan = Drawn(steps=steps, rate=RATE, batch=batch)
    return plan.walk(get("rloo"), place, admit=admit)


def arms(size: Size) -> Sequence[Arm]:
    """Four rules of admission, from the easy base, where prompts differ most."""
    steps = size.of(STEPS)
    return [
        Arm(
            name=name,
            panel=PANEL,
            base="easy",
            walk=partial(walk, name, steps),
            marks=Drawn(steps=steps).quarters(),
        )
        for name in (EVERYTHING, VARIED, FAST, FAILED)
    ]


def orderings(size: Size) -> Sequence[Ordering]:
    """Who pays for what is left out."""

    def point(arm: str, figure: str) -> Point:
        return Point(panel=PANEL, arm=arm, figure=figure)

    return [
        said(
            "Groups that vary, refilled, teach more a batch than all groups.",
            point(VARIED, "pass_at_1"),
            point(EVERYTHING, "pass_at_1"),
        ),
        said(
            "Without slow responses hard prompts are learned less well.",
            point(EVERYTHING, "hard"),
            point(FAST, "hard"),
        ),
        said(
            "Slow responses that count as wrong cost hard prompts.",
            point(EVERYTHING, "hard"),
            point(FAILED, "hard"),
        ),
    ]


STUDY = Study(
    name="admission",
    title="Who pays for what a batch leaves out?",
    intro=(
        "A response takes as long as it has tokens, longer where digits are hard, times lognormal "
        f"chance; {LIMIT:g} units are the limit. Leave-one-out advantages, on-policy; refilled, a "
        f"batch is the first {BATCH} of {DRAWN} groups whose rewards vary.",
    ),
    panels=(
        Panel(
            name=PANEL,
            figures=("easy", "hard"),
            note="Hard prompts have two hard digits to add or more, and take longer.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
