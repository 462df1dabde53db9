"""How often `windage diagnose` finds what is planted, raises what is not there, and how fast it is.

    python benchmarks/diagnose.py [DUMPS]

Draws so many dumps (default 40) of every planted case, of different size, pace and error, and
writes benchmarks/results/diagnose.json and analysis/diagnose/rates.json, which reports quote.  A
case counts as found where its own sign is raised; a false alarm is any sign in an honest dump.
Last it times a dump of a million tokens, from file to document.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exact import machine

from windage.analysis.diagnose import faults, written
from windage.analysis.diagnose.document import collect_evidence
from windage.analysis.diagnose.planted import CASES, Run, dump, rows

HERE = Path(__file__).parent
RESULT = HERE / "results" / "diagnose.json"
RATES = HERE.parent / "analysis" / "diagnose" / "rates.json"
MILLION = Run(groups=6600, group_size=4, lag=2)
TIMED = """
import json, sys, time, resource
from pathlib import Path
start = time.perf_counter()
from windage.analysis.diagnose.document import diagnose
found = diagnose(Path(sys.argv[1]))
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 2),
    "processor_seconds": round(time.process_time(), 2),
    "tokens": found["dump"]["tokens"],
    "rows": found["dump"]["rows_kept"],
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


def rates(cases: list[dict[str, Any]]) -> dict[str, Any]:
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


def timed() -> dict[str, Any]:
    """A dump of about a million tokens, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.parquet"
        written.write(path, rows(MILLION, 0))
        answer = subprocess.run(
            [sys.executable, "-c", TIMED, str(path)], check=True, capture_output=True, text=True
        )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def main() -> None:
    """Try every case, time one, write."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    start = time.perf_counter()
    cases = []
    for name in CASES:
        cases.append(tried(name, count))
        print(cases[-1], flush=True)
    measured = rates(cases)
    speed = timed()
    print(json.dumps(speed))
    document = {
        "machine": machine(),
        "cases": cases,
        **measured,
        "speed": speed,
        "seconds": round(time.perf_counter() - start),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    RATES.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
