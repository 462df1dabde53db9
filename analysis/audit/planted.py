"""Planted faults: which check of the audit finds which.

python -m windage.analysis.audit.planted > docs/mutants.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

from windage.analysis.audit.document import SCHEMA
from windage.analysis.audit.entry import audit, failures
from windage.analysis.audit.faults import STAGES
from windage.analysis.audit.faults_advantages import ADVANTAGES
from windage.analysis.audit.faults_corrections import CORRECTIONS
from windage.analysis.audit.faulty_losses import LOSSES, RIGHT
from windage.analysis.audit.foreign import bounds, judge
from windage.analysis.audit.logged import Subject
from windage.analysis.audit.loss import tried
from windage.analysis.audit.loss_claims import CLAIMS
from windage.analysis.audit.rows import Row
from windage.analysis.audit.samples import judged_samples
from windage.estimators.catalogue import get

FEW = 60
PLACES = tuple(pair for stages in (STAGES, ADVANTAGES, CORRECTIONS) for pair in stages.items())
HEAD = """\
# Planted faults

Each row is a mistake that someone has made or might make, planted in an entry of the catalogue, in
what feeds it, or in a whole loss. `windage audit` must find every one: the last column names the
checks that fail. Without the fault every one of these checks passes. The table is the output of
`python -m windage.analysis.audit.planted`; a test keeps it true.
"""


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: its name, what is wrong, where, and which of some checks find it."""

    name: str
    words: str
    place: str
    find: Callable[[int, Collection[str] | None], tuple[str, ...]]


def _in_entry(
    build: Callable[[], Subject], seed: int, only: Collection[str] | None
) -> tuple[str, ...]:
    return tuple(row.property for row in failures(audit(build(), seed=seed, only=only)))


def _judged(entry: str, function: Callable[..., Any], names: Iterable[str], seed: int) -> list[Row]:
    like = (entry, get(entry))
    loss = tried(function.__name__, function, "plain")
    samples = judged_samples(seed, bounds(like), FEW)
    return judge(loss, samples, like=like, required=names)[0]


@cache
def held_by_the_right_loss(entry: str, seed: int) -> tuple[str, ...]:
    """Claims that the library's own surrogate of an entry keeps; a fault must break one of them."""
    return tuple(row.property for row in _judged(entry, RIGHT[entry], CLAIMS, seed) if row.ok)


def _in_loss(
    entry: str, function: Callable[..., Any], seed: int, only: Collection[str] | None
) -> tuple[str, ...]:
    wanted = held_by_the_right_loss(entry, seed) if only is None else only
    rows = _judged(entry, function, [name for name in CLAIMS if name in wanted], seed)
    return tuple(row.property for row in rows if row.ok is False)


def faults() -> Iterator[Fault]:
    """Every planted fault, stage by stage, then losses."""
    for stage, builders in PLACES:
        for build in builders:
            yield Fault(
                name=build.__name__,
                words=_words(build),
                place=f"{stage} of {build().estimator.name}",
                find=partial(_in_entry, build),
            )
    for entry, functions in LOSSES.items():
        for function in functions:
            yield Fault(
                name=function.__name__,
                words=_words(function),
                place=f"a loss like {entry}",
                find=partial(_in_loss, entry, function),
            )


def _words(function: Callable[..., Any]) -> str:
    words = (function.__doc__ or "").strip().rstrip(".")
    return words if words[1:2].isupper() else words[:1].lower() + words[1:]


def row(fault: Fault, killers: tuple[str, ...]) -> Row:
    """The row of one fault."""
    return Row(
        target=fault.name,
        property="found",
        claimed=fault.words,
        measured=float(len(killers)),
        verdict="holds" if killers else "does not hold",
        ok=bool(killers),
        witness=fault.place,
        found=", ".join(killers),
    )


def document(*, seed: int = 0) -> dict[str, Any]:
    """Audit every fault; one that no check finds is a failure."""
    started = time.perf_counter()
    rows = [row(fault, fault.find(seed, None)) for fault in faults()]
    survivors = sum(r.ok is False for r in rows)
    return {
        "schema": SCHEMA,
        "targets": [r.target for r in rows],
        "planted": True,
        "ran_user_code": [],
        "like": None,
        "seed": seed,
        "failed": survivors,
        "passed": survivors == 0,
        "rows": [r.document() for r in rows],
        "losses": [],
        "counter_examples": [],
        "seconds": time.perf_counter() - started,
    }


def markdown(rows: list[Mapping[str, Any]]) -> str:
    """The table of docs/mutants.md."""
    lines = [HEAD, "| fault | in | what is wrong | found by |", "|---|---|---|---|"]
    for r in rows:
        found = ", ".join(f"`{name}`" for name in r["found"].split(", "))
        lines.append(f"| {r['target']} | {r['witness']} | {r['claimed']} | {found} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown(document()["rows"]))
