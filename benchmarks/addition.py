"""Training runs on addition, as the README shows them: a figure, its numbers, and a table.

    python benchmarks/addition.py RUN_FOLDER ...

Reads what `windage train docs/examples/*.toml` left in the folders; writes
docs/figures/addition.png and .csv and benchmarks/results/addition.json, and prints the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from exact import machine
from figures import FIGURES, kept

from windage.analysis.runs import document, panels
from windage.analysis.tables import frame

RESULT = Path(__file__).parent / "results" / "addition.json"
FIGURES_OF = ("pass_at_1", "right", "format", "invalid", "cut", "tokens")
KEYS = ("run", "step", *(f"{n}{end}" for n in FIGURES_OF for end in ("", "_low", "_high")))


def row(run: dict[str, Any], found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """First and last held-out evaluation of a run."""
    first, last = found[0], found[-1]
    return {
        "run": run["name"],
        "recipe": run["config"]["recipe"]["name"],
        "mode": run["config"]["train"]["mode"],
        "before": {key: first[key] for key in KEYS[1:]},
        "after": {key: last[key] for key in KEYS[1:]},
        "seconds": seconds,
        "versions": run["versions"],
    }


def words(one: dict[str, Any]) -> str:
    """A row of the table."""
    before, after = one["before"], one["after"]
    return (
        f"| {one['run']} | {one['recipe']} | {one['mode']} | {before['pass_at_1']:.3f} "
        f"| {after['pass_at_1']:.3f} ({after['pass_at_1_low']:.3f} to "
        f"{after['pass_at_1_high']:.3f}) | {after['format']:.2f} | {after['invalid']:.2f} "
        f"| {after['tokens']:.1f} | {one['seconds'] / 60:.0f} |"
    )


def main(folders: list[Path]) -> None:
    """Read, draw, print."""
    told = document.run(folders)
    rows = []
    for run in told["runs"]:
        mine = [one for one in told["evaluations"] if one["run"] == run["name"]]
        steps = [one for one in told["rows"] if one["run"] == run["name"]]
        rows.append(row(run, mine, sum(one["time/step"] for one in steps)))
    figure = panels.learning(told)
    (FIGURES / "addition.png").write_bytes(figure.png)
    numbers = frame([{key: kept(one.get(key)) for key in KEYS} for one in told["evaluations"]])
    numbers.to_csv(FIGURES / "addition.csv", index=False, lineterminator="\n")
    RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(
        "| run | recipe | mode | pass@1 before | after (95 %) | format | invalid | tokens | min |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(words, rows)))


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
