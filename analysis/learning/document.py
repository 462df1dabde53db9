"""The document of `windage learn`: the studies that were run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from time import perf_counter
from typing import Any

from windage.analysis.learning.study import FULL, LEVEL, Study
from windage.analysis.learning.study import run as run_study
from windage.toy.scores import FIGURES

SCHEMA = "windage/learn/1"
Advance = Callable[[int, int], None]


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
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Run studies at their quick or full size.

    Args:
        names: of the studies.
        quick: few seeds and short training.
        seeds: replicates; None: the size's own.
        seed: of the first replicate.
        advance: told after each arm how many of how many are done.
    """
    begin = perf_counter()
    chosen = [(s, s.quick if quick else FULL) for s in map(study, names)]
    sized = [(s, size if seeds is None else replace(size, seeds=seeds)) for s, size in chosen]
    total = sum(len(s.arms(size)) for s, size in sized)
    rows: list[dict[str, Any]] = []
    orderings: list[dict[str, Any]] = []
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        advance(done, total)

    for s, size in sized:
        found, judged = run_study(s, size, seed, one_more)
        rows += found
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
