"""The document of `windage learn`: the studies that were run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from windage.analysis.learning.study import FULL, LEVEL, Evaluations, Size, Study, gathered, trained
from windage.analysis.workers import side_by_side
from windage.toy.scores import FIGURES

SCHEMA = "windage/learn/1"
Advance = Callable[[int, int], None]
Job = tuple[str, Size, int, int]


def study(name: str) -> Study:
    """A study by name; each is a module of this package."""
    found: Study = import_module(f"windage.analysis.learning.{name}").STUDY
    return found


def run(
    names: Sequence[str],
    *,
    quick: bool,
    seeds: int | None,
    seed: int,
    processes: int = 1,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Run studies at their quick or full size; the processes change no number.

    Args:
        names: of the studies.
        quick: few seeds and short training.
        seeds: replicates; None: the size's own.
        seed: of the first replicate.
        processes: that share the arms.
        advance: told after each arm how many of how many are done.
    """
    begin = perf_counter()
    chosen = [(s, s.quick if quick else FULL) for s in map(study, names)]
    sized = [(s, size if seeds is None else replace(size, seeds=seeds)) for s, size in chosen]
    jobs = [(s.name, size, seed, i) for s, size in sized for i in range(len(s.arms(size)))]
    found: dict[Job, Evaluations] = {}
    shared = side_by_side(_apart, jobs, processes) if processes > 1 else chain(*map(_apart, jobs))
    for job, evaluations in shared:
        found[job] = evaluations
        advance(len(found), len(jobs))
    rows: list[dict[str, Any]] = []
    orderings: list[dict[str, Any]] = []
    for s, size in sized:
        mine = [found[job] for job in jobs if job[0] == s.name]
        more, judged = gathered(s, size, mine)
        rows += more
        orderings += judged
    return {
        "schema": SCHEMA,
        "studies": [
            {
                "name": s.name,
                "title": s.title,
                "intro": list(s.intro),
                "panels": [asdict(panel) for panel in s.panels],
                "settings": asdict(size),
            }
            for s, size in sized
        ],
        "figures": {name: figure._asdict() for name, figure in FIGURES.items()},
        "level": LEVEL,
        "quick": quick,
        "rows": rows,
        "orderings": orderings,
        "seed": seed,
        "seconds": perf_counter() - begin,
    }


def _apart(job: Job) -> Iterator[tuple[Job, Evaluations]]:
    """One arm, on one thread; a process keeps the bases that it has fitted."""
    torch.set_num_threads(1)
    name, size, seed, number = job
    yield job, trained(study(name).arms(size)[number], size, seed)
