"""Exact means on token trees: what drift and staleness do when there is no noise at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from windage.analysis.learning.recipes import without_baseline
from windage.analysis.learning.study import Arm, Ordering, Panel, Point, Size, Study, over
from windage.analysis.learning.world import FIT, TRAIN, streamed
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.ascent import Ascent, Sampler
from windage.toy.learning import State
from windage.toy.problems import token_tree
from windage.toy.sums import Generators, generators
from windage.toy.tabular import Table, along_means, along_samples

SOURCE = "arXiv:2609.20807"
said = partial(over, source=SOURCE)
DRIFT, MEANS, GROUPS = "reward 1, exact means", "by lag, exact means", "by lag, groups of 8"
STEPS, RATE, NOISE, SPREAD = 128, 0.3, 0.3, 0.5
LAGS = (0, 1, 3, 7, 15, 31, 63)
FROZEN, UNTOUCHED = "no correction, frozen sampler", "trajectory IS"
ENTRIES = {
    "no correction": "group_mean",
    "centered": "centered",
    "token TIS": "token_tis",
    "centered + TIS": "centered_tis",
    UNTOUCHED: "trajectory_is",
    "TOPR": "topr",
}
STRICTLY = ("no correction", "token TIS", "centered", "centered + TIS", UNTOUCHED)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """Token trees with normal logits, one a seed.

    Args:
        table: the trees.
        among: generators of the runs on them, anew for each.
        seeds: of the generators.
    """

    table: Table
    seeds: tuple[int, ...]

    def among(self) -> Generators:
        """A generator a seed; the same numbers every time."""
        return generators(streamed(self.seeds, TRAIN))

    def constant(self) -> Table:
        """The same trees with reward 1 for every response."""
        problem = self.table.problem
        return replace(
            self.table, problem=replace(problem, rewards=torch.ones_like(problem.rewards))
        )

    def evaluate(self, parameters: Tensor, samples: int) -> dict[str, Tensor]:
        """Exact figures; nothing is sampled."""
        return self.table.figures(parameters)


def trees(base: str, seeds: tuple[int, ...], size: Size) -> Trees:
    """Responses of up to four tokens, right if id 1 outnumbers id 0; a policy a seed."""
    tree = token_tree()
    drawn = [
        SPREAD * torch.randn(tree.logits.shape, generator=g, dtype=torch.float64)
        for g in generators(streamed(seeds, FIT))
    ]
    table = Table.joined([replace(tree, logits=logits) for logits in drawn])
    return Trees(table=table, seeds=seeds)


def drift(rule: Estimator, sampler: Sampler, steps: int, place: Trees) -> Iterator[State]:
    """Exact ascent where the gradient of the objective is 0."""
    ascent = Ascent(optimizer="sgd", rate=RATE, limit=float("inf"))
    return along_means(place.constant(), rule, ascent, sampler, place.among(), steps=steps)


def late(name: str, lag: int, panel: str, steps: int, place: Trees) -> Iterator[State]:
    """Ascent under a sampler that lags, along means or along groups of 8."""
    walk = along_means if panel == MEANS else along_samples
    ascent = Ascent(optimizer="sgd", rate=RATE, limit=float("inf"))
    rule, sampler = get(ENTRIES[name]), Sampler(lag=lag)
    return walk(place.table, rule, ascent, sampler, place.among(), steps=steps)


def arms(size: Size) -> Sequence[Arm]:
    """Drift by rule, and value by lag along means and along samples."""
    steps = size.of(STEPS)
    arm = partial(Arm, base="trees", place=trees)
    samplers = {name: Sampler(sigma=NOISE) for name in STRICTLY}
    samplers[FROZEN] = Sampler(sigma=NOISE, frozen=True)
    entries = {**ENTRIES, "no correction": "reinforce", FROZEN: "reinforce"}
    drifting = [
        arm(
            name=name,
            panel=DRIFT,
            walk=partial(drift, without_baseline(entries[name]), sampler, steps),
            marks=sorted({steps * i // 8 for i in range(9)}),
        )
        for name, sampler in samplers.items()
    ]
    lagging = [
        arm(
            name=name,
            panel=panel,
            walk=partial(late, name, lag, panel, steps),
            marks=[steps],
            x=float(lag),
        )
        for panel in (MEANS, GROUPS)
        for lag in LAGS
        for name in ENTRIES
    ]
    return [*drifting, *lagging]


def orderings(size: Size) -> Sequence[Ordering]:
    """Drift is a bias, and so is what staleness costs here."""

    def moved(name: str) -> Point:
        return Point(panel=DRIFT, arm=name, figure="kl_start")

    def at(panel: str, name: str, lag: int) -> Point:
        return Point(panel=panel, arm=name, figure="value", x=float(lag))

    far, exactly = LAGS[-1], 1e-9
    here = "this task"
    return [
        said("Without any noise an uncorrected policy drifts.", moved("no correction"), 0.1),
        said("Centered it does not move at all.", exactly, moved("centered")),
        said(
            "Synced back, the drift compounds: a frozen sampler is left behind.",
            moved("no correction"),
            moved(FROZEN),
        ),
        said(
            "Truncated weights drift less than no weights.",
            moved("no correction"),
            moved("token TIS"),
        ),
        said(
            f"An unbiased weight learns as fast at lag {far} as on-policy, within 0.02.",
            at(MEANS, UNTOUCHED, far),
            at(MEANS, UNTOUCHED, 0),
            margin=-0.02,
            source=here,
        ),
        *(
            said(
                f"At lag {far} {name} ends below an unbiased weight ({panel}).",
                at(panel, UNTOUCHED, far),
                at(panel, name, far),
                source=here,
                robust=name != "no correction",
            )
            for panel in (MEANS, GROUPS)
            for name in ("no correction", "token TIS", "TOPR")
        ),
    ]


STUDY = Study(
    name="tabular",
    title="What is left of drift and staleness when there is no noise?",
    intro=(
        "Every seed is a token tree of its own, with a logit for each token after each prefix; "
        "responses have up to four tokens and are right if one token outnumbers another. Steps "
        "follow the exact mean of each estimator's update, so that nothing but its bias is left; "
        "groups of 8 responses stand beside it.",
    ),
    panels=(
        Panel(
            name=DRIFT,
            figures=("kl_start", "entropy"),
            note="The sampler's logits carry a fixed direction, 0.3 of their root mean square; the "
            "gradient of the objective is 0, so whatever moves is drift.",
        ),
        Panel(
            name=MEANS,
            x="lag in updates",
            figures=("value",),
            log=True,
            note="The reward where training ends; the band is over trees, nothing is sampled.",
        ),
        Panel(
            name=GROUPS,
            x="lag in updates",
            figures=("value",),
            log=True,
            note="The same with sampled groups: what differs from the panel above is noise.",
        ),
    ),
    arms=arms,
    orderings=orderings,
)
