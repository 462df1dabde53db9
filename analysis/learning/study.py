"""A learning study: arms that train, orderings that are judged seed by seed, rows and verdicts.

An arm walks from the base policy of its world; it is evaluated on held-out prompts after given
numbers of updates.  Every figure has a 95 % interval over seeds (Student's t), and an ordering
compares two arms on the same seeds: same base, same data, same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, final

import numpy as np
from scipy.stats import t as student
from torch import Tensor

from windage.analysis.learning.world import world
from windage.toy.learning import State
from windage.toy.scores import FIGURES

LEVEL = 0.95
SHARE_OF_SEEDS = 7 / 8


@final
@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run.

    Args:
        seeds: replicates.
        fit: steps of a base's fit.
        train, held: prompts of a world.
        samples: of each held-out prompt.
        length: of the training, as a share of the full study's.
    """

    seeds: int = 8
    fit: int = 800
    train: int = 512
    held: int = 150
    samples: int = 16
    length: float = 1.0

    def of(self, updates: int) -> int:
        """So many updates (or epochs) at this size, at least 1."""
        return max(1, round(updates * self.length))


class Place(Protocol):
    """Where an arm trains: it knows how good parameters are there."""

    def evaluate(self, parameters: Tensor, samples: int) -> Mapping[str, Tensor]:
        """Figures of `FIGURES`, a number a seed; "histogram" may stand beside them."""
        ...


def on_sums(base: str, seeds: tuple[int, ...], size: Size) -> Place:
    """A network on sums, fitted to the demonstrations of a base."""
    return world(base, seeds, steps=size.fit, train=size.train, held=size.held)


FULL = Size()
QUICK = Size(seeds=2, fit=400, train=256, held=60, samples=8, length=0.5)


@final
@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Args:
        name: a line of a panel.
        panel: the part of the study that it belongs to.
        base: of its place.
        walk: states from the base on.
        marks: updates after which it is evaluated; the start is 0.
        x: place on the panel's axis where that is not the number of updates.
        place: where it trains, from the base, the seeds and the size.
    """

    name: str
    panel: str
    base: str
    walk: Callable[[Any], Iterable[State]]
    marks: Sequence[int]
    x: float | None = None
    place: Callable[[str, tuple[int, ...], Size], Place] = on_sums


@final
@dataclass(frozen=True, kw_only=True)
class Point:
    """A figure of an arm after so many updates; None: at its last evaluation."""

    panel: str
    arm: str
    figure: str = "pass_at_1"
    step: int | None = None
    x: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Ordering:
    """A statement that one figure exceeds another, or a number, seed by seed.

    Args:
        says: the statement in one sentence.
        source: who says so.
        high, low: what is compared.
        margin: by which the high one has to exceed.
        robust: expected to hold in at least 7 of 8 fresh seeds; otherwise reported as not
            reproduced on this task, whatever comes out.
    """

    says: str
    source: str
    high: Point | float
    low: Point | float
    margin: float = 0.0
    robust: bool = True


def over(
    says: str,
    high: Point | float,
    low: Point | float,
    *,
    source: str,
    margin: float = 0.0,
    robust: bool = True,
) -> Ordering:
    """An ordering in one line."""
    return Ordering(says=says, source=source, high=high, low=low, margin=margin, robust=robust)


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a study that is drawn together.

    Args:
        name: of the panel, a heading.
        x: what its axis counts.
        figures: drawn, one plot each.
        log: whether the axis is logarithmic.
        note: what to see.
        spread: arms whose prompts are drawn by number of right answers, beside the base.
    """

    name: str
    x: str = "updates"
    figures: tuple[str, ...] = ("pass_at_1", "invalid")
    log: bool = False
    note: str = ""
    spread: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, the arms that answer it, and what others said.

    Args:
        name: as on the command line.
        title: the question.
        intro: what is done, a paragraph each.
        panels: in order.
        arms: at a size.
        orderings: at a size.
        quick: the size of `--quick`.
    """

    name: str
    title: str
    intro: tuple[str, ...]
    panels: tuple[Panel, ...]
    arms: Callable[[Size], Sequence[Arm]]
    orderings: Callable[[Size], Sequence[Ordering]]
    quick: Size = QUICK


Evaluations = dict[int, dict[str, np.ndarray]]
Measured = dict[tuple[str, str, float | None], Evaluations]


def trained(arm: Arm, size: Size, seed: int) -> Evaluations:
    """Train one arm: its figures after the updates that it names.

    Args:
        arm: which.
        size: how much.
        seed: of the first replicate; the others follow.
    """
    seeds = tuple(range(seed, seed + size.seeds))
    return dict(_walked(arm, arm.place(arm.base, seeds, size), size.samples))


def gathered(
    study: Study, size: Size, evaluations: Sequence[Evaluations]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a study, and what became of each statement, from the evaluations of its arms."""
    arms = study.arms(size)
    rows = [
        _row(study, arm, step, figures)
        for arm, measured in zip(arms, evaluations, strict=True)
        for step, figures in measured.items()
    ]
    found = {(a.panel, a.name, a.x): e for a, e in zip(arms, evaluations, strict=True)}
    return rows, [{"study": study.name, **judge(o, found)} for o in study.orderings(size)]


def _walked(arm: Arm, place: Place, samples: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Evaluations of an arm after the updates that it names."""
    wanted = set(arm.marks)
    for state in arm.walk(place):
        if state.step in wanted:
            figures = place.evaluate(state.parameters, samples)
            yield state.step, {k: v.double().numpy() for k, v in figures.items()}
            wanted.discard(state.step)
    if wanted:
        raise ValueError(f"{arm.name}: never made {min(wanted)} updates")


def interval(values: np.ndarray) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval; None for one value.

    half = t(n - 1) * std / sqrt(n)
    """
    n = len(values)
    if n < 2:
        return float(values.mean()), None
    half = student.ppf((1 + LEVEL) / 2, n - 1) * values.std(ddof=1) / sqrt(n)
    return float(values.mean()), float(half)


def _row(study: Study, arm: Arm, step: int, figures: Mapping[str, np.ndarray]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "study": study.name,
        "panel": arm.panel,
        "arm": arm.name,
        "base": arm.base,
        "x": arm.x,
        "step": step,
    }
    known = [name for name in FIGURES if name in figures]
    for name in known:
        row[name], row[f"{name}_half_width"] = interval(figures[name])
    row["values"] = {name: figures[name].tolist() for name in known}
    if "histogram" in figures:
        row["histogram"] = figures["histogram"].mean(0).tolist()
    return row


def judge(ordering: Ordering, found: Measured) -> dict[str, Any]:
    """How often, and by how much, an ordering holds."""
    high, low = (_value(side, found) for side in (ordering.high, ordering.low))
    difference = np.atleast_1d(high - low)
    mean, half = interval(difference)
    wins = int((difference > ordering.margin).sum())
    held = wins >= SHARE_OF_SEEDS * len(difference)
    return {
        "says": ordering.says,
        "source": ordering.source,
        "difference": mean,
        "half_width": half,
        "margin": ordering.margin,
        "wins": wins,
        "of": len(difference),
        "robust": ordering.robust,
        "holds": held,
    }


def _value(side: Point | float, found: Measured) -> np.ndarray | float:
    if not isinstance(side, Point):
        return side
    measured = found[side.panel, side.arm, side.x]
    return measured[max(measured) if side.step is None else side.step][side.figure]
