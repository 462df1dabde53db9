"""Training runs on addition, as the README shows them: a figure, its numbers, and a table.

    python benchmarks/addition.py NAME=RUN_FOLDER ...

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

from windage.analysis.plots import Figure, Later, draw
from windage.analysis.runs import document
from windage.analysis.runs.panels import COLORS
from windage.analysis.tables import frame

RESULT = Path(__file__).parent / "results" / "addition.json"
FIGURES_OF = ("pass_at_1", "right", "format", "invalid", "cut", "tokens")
KEYS = (
    "run",
    "step",
    "updates",
    *(f"{n}{end}" for n in FIGURES_OF for end in ("", "_low", "_high")),
)


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
        f"| {one['run']} | {one['recipe']} | {one['mode']} | {after['updates']} "
        f"| {before['pass_at_1']:.3f} "
        f"| {after['pass_at_1']:.3f} ({after['pass_at_1_low']:.3f} to "
        f"{after['pass_at_1_high']:.3f}) | {after['format']:.2f} | {after['invalid']:.2f} "
        f"| {after['tokens']:.1f} | {one['seconds'] / 60:.0f} |"
    )


def learning(rows: list[dict[str, Any]]) -> Figure:
    """Held-out answers that are right, and those that are none, by optimizer update."""

    def paint(canvas: Any) -> list[Later]:
        left, right = canvas.subplots(1, 2)
        for one, color in zip(rows, COLORS, strict=False):
            told = one["evaluations"]
            at = [e["updates"] for e in told]
            left.plot(at, [e["pass_at_1"] for e in told], color=color, marker="o", ms=3)
            band = [[e[f"pass_at_1_{side}"] for e in told] for side in ("low", "high")]
            left.fill_between(at, *band, color=color, alpha=0.15, lw=0)
            right.plot(at, [e["invalid"] for e in told], color=color, marker="o", ms=3)
            left.plot([], [], color=color, label=one["run"])
        left.set_title("held-out pass@1, with 95 % intervals")
        right.set_title("share of responses without an answer")
        for axes in (left, right):
            axes.set_xlabel("optimizer updates")
            axes.set_ylim(0, 1)
            axes.margins(x=0.02)
        left.legend(frameon=False, fontsize=8, loc="upper left")
        return []

    return draw(
        "addition",
        paint,
        size=(9.2, 3.2),
        caption="SmolLM2-135M-Instruct on two-digit addition, 100 held-out questions, 2 samples.",
        alt="Held-out pass@1 and invalid share by update of several runs.",
    )


def main(words_given: list[str]) -> None:
    """Read, draw, print."""
    pairs = [word.partition("=") for word in words_given]
    told = document.run([Path(folder) for _, _, folder in pairs])
    rows = []
    for run, (name, _, _) in zip(told["runs"], pairs, strict=True):
        steps = [one for one in told["rows"] if one["run"] == run["name"]]
        done = {0: 0} | {one["step"]: one["updates"] for one in steps}
        mine = [one for one in told["evaluations"] if one["run"] == run["name"]]
        mine = [{**one, "run": name, "updates": int(done[one["step"]])} for one in mine]
        last = mine[-1]["step"]
        seconds = sum(one["time/step"] for one in steps if one["step"] <= last)
        rows.append(row(run, mine, seconds) | {"run": name, "evaluations": mine})
    (FIGURES / "addition.png").write_bytes(learning(rows).png)
    numbers = [{key: kept(e.get(key)) for key in KEYS} for one in rows for e in one["evaluations"]]
    frame(numbers).to_csv(FIGURES / "addition.csv", index=False, lineterminator="\n")
    kept_rows = [{k: v for k, v in one.items() if k != "evaluations"} for one in rows]
    RESULT.write_text(json.dumps({"machine": machine(), "rows": kept_rows}, indent=1) + "\n")
    print(
        "| run | recipe | mode | updates | pass@1 before | after (95 %) | words after | no answer "
        "| tokens | min |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(words, rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
