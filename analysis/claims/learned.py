"""Runs that several claims share: PROBE and WINDOW, every seed at once, each run made only once.

Seed s of a row uses the generators numpy.random.default_rng(n s), ..., default_rng(n s + n - 1) for
its n replicates; each replicate draws in the order that the claims state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from windage.analysis.claims.claim import Figure, around, band
from windage.analysis.claims.one_step import FLOOR, IS, NAIVE, POSITIVES, PPO, TIS, TOPR
from windage.estimators.estimator import Estimator
from windage.toy.bits import Flips, Window, flip, flipped_update
from windage.toy.learning import State, marks, path
from windage.toy.questions import (
    Answers,
    Questions,
    draw_answers,
    preference_update,
    probe,
    recorded_update,
    rewarded,
)

SEEDS = 8
PASSES = 1_000
MARKS = (50, 200, PASSES)
EVERY = 10
ENTRIES: dict[str, Estimator] = {
    "naive": NAIVE,
    "positives only": POSITIVES,
    "topr": TOPR,
    "TIS": TIS,
    "IS": IS,
    "PPO": PPO,
    "topr with a- = 0.1": FLOOR,
}


def numbers(seed: int, replicates: int = SEEDS) -> tuple[int, ...]:
    """Seeds of a row's replicates."""
    return tuple(range(seed * replicates, (seed + 1) * replicates))


def generators(seed: int, replicates: int = SEEDS) -> list[np.random.Generator]:
    """One generator a replicate."""
    return [np.random.default_rng(n) for n in numbers(seed, replicates)]


def averaged(name: str, values: Tensor, expected: float, margin: float) -> Figure:
    """Mean over replicates within a margin of the stated number, with its standard error."""
    return around(name, values.mean(), expected, margin, standard_error=error(values))


def banded(
    name: str, values: Tensor, low: float | None, high: float | None, expected: float | None = None
) -> Figure:
    """Mean over replicates inside a band, with its standard error."""
    return band(name, values.mean(), low, high, expected=expected, standard_error=error(values))


def error(values: Tensor) -> float:
    """Standard error of the mean over replicates."""
    return float(values.std() / math.sqrt(len(values)))


def often(name: str, true: Tensor, least: int) -> Figure:
    """In how many replicates something is so; at least that many."""
    return band(name, true.sum(), least, len(true))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """PROBE: training and test questions, and the answers drawn at the start."""

    train: Questions
    test: Questions
    answers: Answers


@cache
def study(invalid: float, seed: int, replicates: int = SEEDS) -> Study:
    """PROBE with a start mass on invalid answers."""
    rngs = generators(seed, replicates)
    questions = probe(invalid, rngs)
    train, test = questions.select(slice(0, 30)), questions.select(slice(30, 60))
    return Study(train=train, test=test, answers=draw_answers(train, train.start, 16, rngs))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """What a run on PROBE went through.

    Args:
        study: the problem.
        places: parameters after the passes of `MARKS`.
        curve: mass on right training answers after every tenth pass, the start first, `[n S]`.
    """

    study: Study
    places: dict[int, Tensor]
    curve: Tensor

    def train(self, passes: int = PASSES) -> Tensor:
        """Mass on right answers of the training questions, a replicate."""
        return self.study.train.mass(self.places[passes], self.study.train.right)

    def test(self, passes: int = PASSES) -> Tensor:
        """Mass on right answers of the test questions."""
        return self.study.test.mass(self.places[passes], self.study.test.right)

    def invalid(self, passes: int = PASSES) -> Tensor:
        """Mass on invalid answers of the test questions."""
        return self.study.test.mass(self.places[passes], self.study.test.invalid)

    @property
    def fall(self) -> Tensor:
        """Best of every tenth pass minus the last pass, on training questions."""
        return self.curve.amax(0) - self.curve[-1]


@cache
def course(arm: str, invalid: float = 0.02, seed: int = 0) -> Course:
    """A thousand full-batch passes with an entry of `ENTRIES`, step 2, or with DPO, step 20."""
    found = study(invalid, seed)
    train, answers = found.train, found.answers
    if arm == "DPO":
        update, rate = preference_update(train, answers, beta=0.1), 20.0
    else:
        update, rate = recorded_update(train, answers, ENTRIES[arm]), 2.0
    states: list[State] = [
        state
        for state in path(train.start, update, steps=PASSES, rate=rate)
        if state.step % EVERY == 0
    ]
    return Course(
        study=found,
        places=marks(states, MARKS),
        curve=torch.stack([train.mass(s.parameters, train.right) for s in states]),
    )


SHARES = torch.tensor([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0], dtype=torch.float64)
LONG = (200, PASSES, 4_000)


def baseline_for(p: Tensor, share: Tensor) -> Tensor:
    """The baseline that gives the positives, p of the data, an effective share.

    c = (p - share) / (p + share - 2 p share)
    """
    return (p - share) / (p + share - 2 * p * share)


@cache
def composed(seed: int) -> dict[int, Tensor]:
    """Test mass on right answers after the passes of `LONG` with topr, `[shares S]`.

    A row a share of `SHARES`, set by the baseline; the step is normalized to constant weight, that
    is, advantages are divided by 1 + (1 - 2p) c.
    """
    found = study(0.02, seed)
    answers = found.answers
    p = (answers.rewards > 0).double().mean((-2, -1))
    c = baseline_for(p, SHARES.unsqueeze(-1))
    weight = (1 + (1 - 2 * p) * c)[..., None, None]
    advantages = (answers.rewards - c[..., None, None]) / weight
    update = recorded_update(found.train, rewarded(answers, advantages), TOPR)
    start = found.train.start.expand(len(SHARES), -1, -1)
    places = marks(path(start, update, steps=LONG[-1], rate=2.0), LONG)
    return {n: found.test.mass(w, found.test.right) for n, w in places.items()}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ending:
    """How runs on WINDOW ended.

    Args:
        right: P(right), a row a clip.
        taught: replicates whose data hold a positive; the others have nothing to learn from.
        norm: the longest update before the clip.
    """

    right: Tensor
    taught: Tensor
    norm: float

    @property
    def collapsed(self) -> list[int]:
        """Runs with a positive in their data that end below 0.05, at each clip."""
        return (self.taught & (self.right < 0.05)).sum(-1).tolist()


@cache
def _flips(window: Window, count: int, minibatch: int, seed: int) -> Flips:
    return flip(window, count, minibatch, 2_000, generators(seed, 24))


@cache
def ending(
    arm: str,
    low: int,
    high: int,
    count: int,
    minibatch: int,
    rate: float,
    limits: tuple[float, ...],
    seed: int,
) -> Ending:
    """Two thousand minibatch steps on WINDOW from fair coins, 24 replicates at each clip."""
    window = Window(low=low, high=high)
    flips = _flips(window, count, minibatch, seed)
    update = flipped_update(flips, ENTRIES[arm])
    start = torch.zeros((len(limits), 24, window.bits), dtype=torch.float64)
    limit = torch.tensor(limits, dtype=torch.float64).unsqueeze(-1)
    last, norm = start, 0.0
    for state in path(start, update, steps=2_000, rate=rate, limit=limit):
        last, norm = state.parameters, max(norm, float(state.norm.max()))
    taught = (flips.rewards > 0).any(-1)
    return Ending(right=window.chance(last), taught=taught, norm=norm)
