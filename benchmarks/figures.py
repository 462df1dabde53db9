"""Write the figures of the README and the numbers behind them: docs/figures/NAME.{png,csv}.

python benchmarks/figures.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windage.analysis.plots import Figure
from windage.analysis.studies import length, length_page, staleness, staleness_page
from windage.analysis.tables import NOISE, frame
from windage.cli.output import one_thread

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
KEYS = ("horizon", "steps", "estimator", "engine", "scale", "relative_bias_rescaled", "noise")
SITE_KEYS = ("tokens", "kl", "chi_squared")


def kept(value: Any) -> Any:
    """Ten digits: what lies below them differs from one processor to the next."""
    if not isinstance(value, float):
        return value
    return 0.0 if abs(value) < NOISE else float(f"{value:.10g}")


def write(
    folder: Path, figure: Figure, rows: Iterable[Mapping[str, Any]], keys: Iterable[str]
) -> None:
    """One figure and the numbers behind it."""
    numbers = frame([{key: kept(row[key]) for key in keys} for row in rows])
    (folder / f"{figure.name}.png").write_bytes(figure.png)
    numbers.to_csv(folder / f"{figure.name}.csv", index=False, lineterminator="\n")


def main(folder: Path) -> None:
    """Run the built-in studies and write their figures and their numbers."""
    one_thread()
    folder.mkdir(parents=True, exist_ok=True)
    document = staleness.run()
    write(folder, staleness_page.overview(document), document["rows"], KEYS)
    print(*document["reading"], sep="\n")
    document = length.run()
    sites = {(site["horizon"], site["steps"]): site for site in document["sites"]}
    rows = length.of_size(document)["rows"]
    found = [
        {**row, **{k: sites[row["horizon"], row["steps"]][k] for k in SITE_KEYS}} for row in rows
    ]
    keys = ("group_size", *KEYS, *SITE_KEYS)
    write(folder, length_page.overview(document), found, keys)
    print(*document["reading"], sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
