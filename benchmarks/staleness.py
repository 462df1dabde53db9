"""Write the figure of the README and the numbers behind it: docs/figures/staleness.{png,csv}.

python benchmarks/staleness.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from windage.analysis.studies import staleness, staleness_page
from windage.analysis.tables import NOISE, frame

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
KEYS = ("horizon", "steps", "estimator", "engine", "scale", "relative_bias_rescaled", "noise")


def kept(value: Any) -> Any:
    """Ten digits: what lies below them differs from one processor to the next."""
    if not isinstance(value, float):
        return value
    return 0.0 if abs(value) < NOISE else float(f"{value:.10g}")


def main(folder: Path) -> None:
    """Run the built-in study and write its figure and its numbers."""
    document = staleness.run()
    rows = [{key: kept(row[key]) for key in KEYS} for row in document["rows"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "staleness.png").write_bytes(staleness_page.overview(document).png)
    frame(rows).to_csv(folder / "staleness.csv", index=False, lineterminator="\n")
    print(*document["reading"], sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
