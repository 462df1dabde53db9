"""Audit the losses of one framework in its own environment: `audit.py trl` or `audit.py verl`.

Writes benchmarks/results/peers-<framework>.json and renders docs/peers.md from all such files.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from table import RESULTS, render

FRAMEWORKS = ("trl", "verl")


def main(arguments: list[str]) -> int:
    """Measure, store, render; 2 where the framework is unknown."""
    if len(arguments) != 1 or arguments[0] not in FRAMEWORKS:
        given = " ".join(arguments) or "nothing"
        print(f"audit.py: got {given}; allowed: {' or '.join(FRAMEWORKS)}", file=sys.stderr)
        return 2
    (name,) = arguments
    measured = import_module(f"{name}_losses").measure()
    path = RESULTS / f"peers-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=1, allow_nan=False) + "\n")
    page = Path(__file__).parents[2] / "docs" / "peers.md"
    page.write_text(render())
    print(f"wrote {path.name} and {page.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
