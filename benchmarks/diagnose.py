"""How often `windage diagnose` finds what is planted, raises what is not there, and how fast it is.

    python benchmarks/diagnose.py [--dumps N] [--cases NAME ...]
    python benchmarks/diagnose.py --speed | --tokens | --rows [N]

Draws so many dumps (default 40) of every planted case, of different size, pace and error, and
writes benchmarks/results/diagnose.json and analysis/diagnose/rates.json, which reports quote.  A
case counts as found where its own sign is raised; a false alarm is any sign in an honest dump.
`--cases` draws some cases anew and keeps the others' figures.

Each of the other flags times one dump from file to document, in a process of its own, and writes
its own figure: a million tokens of the planted automaton; ten million tokens in responses of 400;
ten million rows, or N, of a short response each, some fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from exact import machine

from windage.analysis.diagnose import faults, written
from windage.analysis.diagnose.document import collect_evidence
from windage.analysis.diagnose.planted import CASES, Run, dump, rows
from windage.cli.output import one_thread

HERE = Path(__file__).parent
RESULT = HERE / "results" / "diagnose.json"
RATES = HERE.parent / "analysis" / "diagnose" / "rates.json"
GROUP, PIECE = 8, 50_000
TIMED = """
import json, sys, time, resource
from pathlib import Path
start = time.perf_counter()
from windage.cli.output import one_thread
one_thread()
from windage.analysis.diagnose.document import diagnose
found = diagnose(Path(sys.argv[1]))
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 2),
    "processor_seconds": round(time.process_time(), 2),
    "tokens": found["dump"]["tokens"],
    "rows": found["dump"]["rows_kept"],
    "groups": found["dump"]["groups"],
    "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
}))
"""


def tried(name: str, count: int) -> dict[str, Any]:
    """What was raised on the dumps of a case."""
    sign, run = CASES[name]
    plain = asdict(Run())
    planted = {key: value for key, value in asdict(run).items() if value != plain[key]}
    raised: dict[str, int] = {}
    for seed in range(count):
        evidence, settings = collect_evidence(dump(name, 1000 + seed))
        for each in faults.judge(evidence, settings):
            if each.raised:
                raised[each.name] = raised.get(each.name, 0) + 1
    return {"case": name, "planted": sign, "run": planted, "dumps": count, "raised": raised}


def rates(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By sign: false alarms on honest dumps, and how many planted ones were found."""
    honest = [each for each in cases if each["planted"] is None]
    total = sum(each["dumps"] for each in honest)
    signs = {}
    for name in sorted({str(each["planted"]) for each in cases if each["planted"]}):
        own = [each for each in cases if each["planted"] == name]
        signs[name] = {
            "found": [sum(e["raised"].get(name, 0) for e in own), sum(e["dumps"] for e in own)],
            "false_alarms": [sum(e["raised"].get(name, 0) for e in honest), total],
        }
    return {"signs": signs}


def million(groups: int) -> Run:
    """Of so many groups of four; a million tokens at 6,600."""
    return Run(groups=groups, group_size=4, lag=2)


def made(path: Path, count: int, shortest: int, longest: int) -> None:
    """A dump of random responses in groups of eight, a piece at a time."""
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, count, PIECE):
        piece = _piece(rng, np.arange(start, min(start + PIECE, count)), shortest, longest)
        writer = writer or pq.ParquetWriter(path, piece.schema, compression="zstd")
        writer.write_table(piece)
    if writer is not None:
        writer.close()


def _piece(rng: np.random.Generator, number: np.ndarray, shortest: int, longest: int) -> pa.Table:
    n = len(number)
    length = rng.integers(shortest, longest + 1, n)
    ends = pa.array(np.concatenate([[0], length.cumsum()]).astype(np.int32))
    behavior = -rng.exponential(0.6, length.sum())
    error = rng.normal(0, 0.02, len(behavior)) * -np.expm1(behavior)
    version = rng.integers(3, 6, n)

    def lists(values: np.ndarray, kind: type) -> pa.ListArray:
        return pa.ListArray.from_arrays(ends, pa.array(values.astype(kind)))

    return pa.table(
        {
            "behavior_logp": lists(behavior, np.float32),
            "logp": lists(np.minimum(behavior + error, 0), np.float32),
            "versions": lists(np.repeat(version, length), np.int32),
            "current_version": np.full(n, 5),
            "group_id": (number // GROUP).astype(str),
            "sample_id": number.astype(str),
            "reward": rng.integers(0, 2, n).astype(float),
            "finish_reason": np.where(rng.random(n) < 0.9, "stop", "length"),
        }
    )


def timed(write: Callable[[Path, int], None], count: int) -> dict[str, Any]:
    """A dump from file to document, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.parquet"
        write(path, count)
        answer = subprocess.run(
            [sys.executable, "-c", TIMED, str(path)], check=True, capture_output=True, text=True
        )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


SIZES: dict[str, tuple[int, Callable[[Path, int], None]]] = {
    "speed": (6_600, lambda path, count: written.write(path, rows(million(count), 0))),
    "tokens": (25_000, lambda path, count: made(path, count, 400, 400)),
    "rows": (10_000_000, lambda path, count: made(path, count, 1, 7)),
}


def main() -> None:
    """Try cases, or time a dump; keep what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dumps", type=int, default=40)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    for name, (size, _) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, nargs="?", const=size, metavar="N")
    asked = parser.parse_args()
    one_thread()
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    sizes = [name for name in SIZES if getattr(asked, name)]
    for name in sizes:
        document[name] = timed(SIZES[name][1], getattr(asked, name)) | {"machine": machine()}
        print(name, json.dumps(document[name]))
    if not sizes:
        known = {each["case"]: each for each in document.get("cases", [])}
        for name in asked.cases:
            known[name] = tried(name, asked.dumps)
            print(known[name], flush=True)
        cases = [known[name] for name in CASES if name in known]
        measured = rates(cases)
        document |= {"machine": machine(), "cases": cases, **measured}
        RATES.write_text(json.dumps(measured, indent=1) + "\n")
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
