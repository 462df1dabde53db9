"""The dump that ships with the package: a run whose engine keeps its cache over updates.

    python -m windage.analysis.diagnose.demo

writes analysis/diagnose/demo.parquet.
"""

from __future__ import annotations

from pathlib import Path

from windage.analysis.diagnose import written
from windage.analysis.diagnose.planted import Run, rows

RUN = Run(groups=56, group_size=4, lag=3, in_flight=0.5, cache=1.0, drift=0.08)
SEED = 11

if __name__ == "__main__":
    written.write(Path(__file__).with_name("demo.parquet"), rows(RUN, SEED))
