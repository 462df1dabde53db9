"""`windage/diagnose/1`: a dump read once, and everything that it tells."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import numpy as np

from windage.analysis.diagnose import faults, ranking
from windage.analysis.diagnose.attribution import Attribution
from windage.analysis.diagnose.blocks import Block, block, gathered
from windage.analysis.diagnose.drift import Drift
from windage.analysis.diagnose.evidence import LAGS, PLACES, Evidence
from windage.analysis.diagnose.groups import Sample, Selection
from windage.analysis.diagnose.limits import CAPS, Limits
from windage.analysis.diagnose.mismatch import Mismatch, binned
from windage.analysis.diagnose.readers import index
from windage.analysis.diagnose.rows import Rejected, Row
from windage.analysis.diagnose.sums import Figure, Sums, difference, figure
from windage.analysis.diagnose.support import cosines, support
from windage.analysis.diagnose.tails import threshold
from windage.analysis.diagnose.words import words
from windage.estimators.errors import BadInput

SCHEMA = "windage/diagnose/1"
SHOWN = 20
BY = ("mismatch/k1", "mismatch/k3", "mismatch/chi2", "ratio/mean")


@final
class Refused:
    """Rows that were set aside: how many by reason, and the first of them."""

    def __init__(self) -> None:
        self.rows = 0
        self.reasons: Counter[str] = Counter()
        self.first: list[dict[str, Any]] = []
        self.files: list[str] = []

    def __call__(self, rejected: Rejected) -> None:
        """Count one."""
        if rejected.rows == 0:
            self.files.append(str(rejected))
            return
        self.rows += rejected.rows
        self.reasons[rejected.reason] += rejected.rows
        if len(self.first) < SHOWN:
            self.first.append({"where": rejected.where, "reason": rejected.reason, "says":
                               str(rejected), "rows": rejected.rows})  # fmt: skip


@final
class Diagnosis:
    """Everything that one pass over a dump collects.

    Args:
        caps: absolute ratios to ask about.
    """

    def __init__(self, caps: Sequence[float] = CAPS) -> None:
        self.evidence, self.mismatch = Evidence(), Mismatch()
        self.limits, self.selection, self.sample = Limits(caps), Selection(), Sample()
        self.attribution, self.drift = Attribution(), Drift()
        self.head = Sums("n", "mass", "covered", "ids")
        self.count = {"rows": 0, "tokens": 0, "measured_rows": 0, "measured_tokens": 0}
        self.processed = False

    def add(self, rows: list[Row]) -> None:
        """Look at some rows."""
        here = block(rows)
        self.evidence.add(here)
        self.mismatch.add(here, rows)
        self.limits.add(here)
        self.attribution.add(here)
        self.drift.add(here)
        self.selection.add(rows)
        self.sample.add(rows)
        self._head(here)
        self.count["rows"] += len(rows)
        self.count["tokens"] += sum(row.count for row in rows)
        self.count["measured_rows"] += len(here.rows)
        self.count["measured_tokens"] += len(here.x)
        self.processed = self.processed or any(processed(row) for row in rows)

    def _head(self, here: Block) -> None:
        for i, row in enumerate(here.rows):
            if row.head_behavior_logp is None or row.head_ids is None:
                continue
            mass = np.exp(row.head_behavior_logp[row.mask].astype(float)).sum(-1)
            inside = np.zeros_like(mass)
            if row.response_ids is not None:
                inside = (row.head_ids == row.response_ids[:, None]).any(-1)[row.mask].astype(float)
            known = np.full_like(mass, row.response_ids is not None)
            at = np.full(len(mass), here.bucket[i])
            self.head.add(at, 0, n=np.ones_like(mass), mass=mass, covered=inside, ids=known)

    def figures(self) -> dict[str, Figure]:
        """Every metric that the dump can tell, by name."""
        found = self.mismatch.kept.figures()
        found |= {**self.limits.figures(), **self.drift.figures()}
        for name, sums in self.mismatch.policies.items():
            stem = name.partition("_")[0]
            for metric in ("k1", "k3") if sums.table["count"].any() else ():
                found[f"{stem}/{metric}"] = binned(sums, f"mismatch/{metric}")[0]
        for name, tail in self.mismatch.tails.items():
            shape = tail.shape()
            if shape is not None:
                found[f"tail/{name}"] = Figure(value=shape)
                found[f"tail/{name}_limit"] = Figure(value=threshold(tail.count))
        head = self.head.over()
        if head["n"].sum():
            found["head/mass"] = figure(head, lambda s: s["mass"] / s["n"])
        if head["ids"].sum():
            found["head/covered"] = figure(head, lambda s: s["covered"] / s["ids"])
        constant, ends = self.selection.constant()
        if constant.value is not None:
            found["group/constant"] = constant
            found |= {f"group/constant_{name}": value for name, value in ends.items()}
        return found | dict(self.selection.figures())


def processed(row: Row) -> bool:
    """Whether something other than the model's own distribution drew."""
    return (
        row.temperature not in (None, 1.0)
        or row.top_p not in (None, 1.0)
        or row.top_k not in (None, 0, -1)
    )


@cache
def rates() -> Mapping[str, Any]:
    """How often each sign was right and wrong on planted dumps, from benchmarks/diagnose.py."""
    text = files("windage.analysis.diagnose").joinpath("rates.json").read_text(encoding="utf-8")
    return json.loads(text)


def demo() -> Path:
    """The dump that ships with the package."""
    return Path(str(files("windage.analysis.diagnose").joinpath("demo.parquet")))


def counted(rows: Iterable[Row], advance: Callable[[int], None]) -> Iterator[Row]:
    """The same rows; tells how many have gone by, now and then."""
    for number, row in enumerate(rows, 1):
        if number % 1000 == 0:
            advance(number)
        yield row


def collect(rows: Iterable[Row], caps: Sequence[float] = CAPS) -> Diagnosis:
    """Read all rows, once."""
    found = Diagnosis(caps)
    for some in gathered(rows):
        found.add(some)
    return found


def collect_evidence(rows: Iterable[Row]) -> tuple[Evidence, dict[str, bool]]:
    """What the signs alone are read from."""
    evidence, settings = Evidence(), False
    for some in gathered(rows):
        evidence.add(block(some))
        settings = settings or any(processed(row) for row in some)
    return evidence, {"processed": settings}


def look(
    path: Path,
    columns: Mapping[str, str] | None,
    caps: Sequence[float],
    advance: Callable[[int], None],
) -> tuple[Diagnosis, dict[str, Any]]:
    """A dump's diagnosis, and what it is.

    Raises:
        BadInput: no dump, or no row of it can be used.
    """
    refused = Refused()
    rows = index.read(path, columns=columns, refuse=refused)
    found = collect(counted(rows, advance), caps)
    if not found.count["rows"]:
        why = ", ".join(f"{reason} ({n})" for reason, n in refused.reasons.most_common(3))
        raise BadInput(f"{path}: no row can be used{': ' + why if why else ''}; allowed: a dump "
                       "with tokens and the sampler's log-probabilities")  # fmt: skip
    told = {
        "path": str(path),
        "format": "a map of columns" if columns else index.detect(path),
        "rows_in": found.count["rows"] + refused.rows,
        "rows_kept": found.count["rows"],
        "set_aside": dict(refused.reasons.most_common()),
        "first_set_aside": refused.first,
        "files_without_rows": refused.files,
        **{key: value for key, value in found.count.items() if key != "rows"},
        "groups": len(found.selection.groups),
    }
    return found, told


def diagnose(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    compare: Path | None = None,
    caps: Sequence[float] = CAPS,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Everything that a dump tells.

    Args:
        path: a dump.
        columns: for files of no known format.
        compare: another dump, whose figures are set beside.
        caps: absolute ratios to ask about.
        advance: told how many rows were read.

    Raises:
        BadInput: no dump, or nothing in it can be used.
    """
    start = time.perf_counter()
    found, told = look(path, columns, caps, advance)
    figures = found.figures()
    other, theirs, told_other = None, {}, None
    if compare is not None:
        other, told_other = look(compare, columns, caps, advance)
        theirs = other.figures()
    return {
        "schema": SCHEMA,
        "dump": told,
        "rows": metrics(figures, theirs if other is not None else None),
        "bins": bins(found.mismatch),
        "signs": signs(found),
        "support": supported(found),
        "attribution": list(found.attribution.parts()),
        "rescored": None,
        "other": None if other is None else {"dump": told_other, "signs": signs(other)},
        "caps": list(caps),
        "seconds": round(time.perf_counter() - start, 2),
    }


def metrics(
    figures: Mapping[str, Figure], other: Mapping[str, Figure] | None
) -> list[dict[str, Any]]:
    """A row a metric; beside another dump also its value and the difference."""
    out = []
    for name, value in figures.items():
        about = words(name)
        row: dict[str, Any] = {
            "name": name,
            "value": value.value,
            "half_width": value.half_width,
            "unit": about.unit,
            "better": about.better,
            "stage": about.stage,
            "verl": about.verl,
            "formula": about.formula,
        }
        if other is not None:
            theirs = other.get(name, Figure(value=None))
            gap = difference(value, theirs)
            row |= {
                "other": theirs.value,
                "other_half_width": theirs.half_width,
                "difference": gap.value,
                "difference_half_width": gap.half_width,
                "differs": None
                if gap.half_width is None or gap.value is None
                else abs(gap.value) > gap.half_width,
            }
        out.append(row)
    return out


def label(by: str, number: int) -> str:
    """Words for a bin.

    Example:
        >>> label("position", 0), label("position", 2), label("lag", 3), label("lag", 9)
        ('0-7', '16-31', '3', 'other')
    """
    if by == "lag":
        return "other" if number == LAGS - 1 else str(number)
    low = 0 if number == 0 else 8 * 2 ** (number - 1)
    return f"{low:,}-" if number == PLACES - 1 else f"{low:,}-{8 * 2**number - 1:,}"


def bins(found: Mismatch) -> list[dict[str, Any]]:
    """Mismatch by position, by lag and by length of the response."""
    out = []
    for by, sums in found.by.items():
        parts = {name: binned(sums, name) for name in BY}
        for number in range(sums.bins):
            if not sums.table["count"][:, number].any():
                continue
            row: dict[str, Any] = {
                "by": by,
                "bin": number,
                "label": label(by, number),
                "tokens": int(sums.table["count"][:, number].sum()),
            }
            for name, values in parts.items():
                key = name.partition("/")[2] if name != "ratio/mean" else "ratio_mean"
                row |= {key: values[number].value, f"{key}_half_width": values[number].half_width}
            out.append(row)
    return out


def signs(found: Diagnosis) -> list[dict[str, Any]]:
    """Each sign with its evidence, and how often it was right and wrong on planted dumps."""
    table = rates()["signs"]
    judged = faults.judge(found.evidence, {"processed": found.processed})
    return [
        {
            "name": sign.name,
            "state": sign.state,
            "says": sign.says,
            "evidence": {
                key: value if value is None or np.isfinite(value) else None
                for key, value in sign.evidence.items()
            },
            "false_alarms": table.get(sign.name, {}).get("false_alarms"),
            "found": table.get(sign.name, {}).get("found"),
        }
        for sign in judged
    ]


def supported(found: Diagnosis) -> dict[str, Any]:
    """Which entries the dump supports, in order."""
    made = support(found.sample)
    if isinstance(made, str):
        return {"verdict": f"Nothing can be said: {made}.", "rows": [], "agreement": None}
    table = ranking.rows(made)
    alike = cosines(made)
    return {
        "verdict": ranking.verdict(table),
        "reference": made.reference,
        "advantages": made.advantages,
        "exact_norms": made.exact_norms,
        "groups": made.groups,
        "responses": made.responses,
        "tokens": made.tokens,
        "share_of_groups": found.sample.share,
        "rows": table,
        "agreement": {
            "estimators": list(made.names),
            "cosine": [[float(v) if np.isfinite(v) else None for v in row] for row in alike],
        },
    }
