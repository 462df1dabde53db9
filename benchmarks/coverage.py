"""How often intervals of a measured study hold the exact figure, on a transformer that is listed.

    .venv/bin/python benchmarks/coverage.py               # 2,000 studies a place, minutes
    .venv/bin/python benchmarks/coverage.py --runs 100    # that it works; nothing is kept

A study of 16 to 128 prompts is drawn again and again from a tiny transformer of which every group
is estimated once, by the study's own code; 16 responses of the policy and 4 groups of 2 a prompt,
with the policy as sampler and with one near it.  Intervals are of 95 %.  `unbounded` is the share
of studies whose interval has an end at infinity: the divisor is not told from 0.  Writes
benchmarks/results/coverage.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from exact import machine

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "coverage.json"
sys.path.append(str(ROOT / "tests"))
PROMPTS = (16, 24, 32, 64, 128)
# Noise on the sampler's weights, as a share of their spread.
SAMPLERS = {"the policy": 0.0, "weights 3 % off": 0.03}


def rows(runs: int) -> Iterator[dict[str, Any]]:
    """A row a sampler, number of prompts and entry."""
    import enumerated_study as listing

    for sampler, share in SAMPLERS.items():
        world = listing.listed(listing.ENTRIES, share)
        for prompts in PROMPTS:
            found = listing.coverage(world, listing.ENTRIES, runs=runs, prompts=prompts)
            for entry in listing.ENTRIES:
                own = {f: c.tolist() for (name, f), c in found.items() if name == entry}
                yield {
                    "sampler": sampler,
                    "prompts": prompts,
                    "estimator": entry,
                    "covered": {f: round(hits / said, 4) for f, (hits, said, _) in own.items()},
                    "unbounded": {f: round(w / said, 4) for f, (_, said, w) in own.items() if w},
                }


def extremes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Least and most over entries and samplers, by figure and number of prompts."""
    out = []
    for figure in dict.fromkeys(f for row in found for f in row["covered"]):
        for prompts in PROMPTS:
            place = [row for row in found if row["prompts"] == prompts and figure in row["covered"]]
            shares = [row["covered"][figure] for row in place]
            least = min(place, key=lambda row: row["covered"][figure])
            out.append(
                {
                    "figure": figure,
                    "prompts": prompts,
                    "least": min(shares),
                    "of": least["estimator"],
                    "median": sorted(shares)[len(shares) // 2],
                    "most": max(shares),
                }
            )
    return out


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000, help="a multiple of 50")
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    start, found = time.perf_counter(), []
    for row in rows(runs):
        found.append(row)
        if row["estimator"] == "reinforce":
            print(f"{row['sampler']}, {row['prompts']} prompts", file=sys.stderr)
    told = extremes(found)
    for row in told:
        print("{figure:30} {prompts:4} {least:.3f} {median:.3f} {most:.3f}  {of}".format(**row))
    if runs == parser.get_default("runs"):
        about = {"level": 0.95, "runs": runs, "machine": machine()}
        about |= {"seconds": round(time.perf_counter() - start)}
        lines = (",\n".join(map(json.dumps, part)) for part in (told, found))
        text = '{"about": %s,\n"extremes": [\n%s\n],\n"rows": [\n%s\n]}\n'
        RESULT.write_text(text % (json.dumps(about), *lines))


if __name__ == "__main__":
    main()
