"""What became of every statement of the learning studies, from documents of `windage learn`.

    windage learn --seed 100 --json > first.json
    windage learn --seed 200 --json > second.json
    python benchmarks/learn.py first.json second.json

Writes benchmarks/results/learn.json: a row a statement and document, with the wins among its seeds.
A document may hold some of the studies only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "learn.json"
KEPT = ("study", "says", "robust", "holds", "wins", "of", "difference", "half_width", "margin")


def main() -> None:
    """Collect the statements of the documents given."""
    rows = []
    for name in sys.argv[1:]:
        document = json.loads(Path(name).read_text())
        if document["quick"]:
            sys.exit(f"{name}: a quick run judges nothing; run the studies at full size")
        rows += [
            {key: o[key] for key in KEPT} | {"seed": document["seed"]}
            for o in document["orderings"]
        ]
    for row in rows:
        row |= {key: round(row[key], 4) for key in ("difference", "half_width")}
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
    RESULT.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
