"""`windage learn`: training on toy problems, and who improves, stalls, drifts or collapses."""

from __future__ import annotations

import argparse
import sys

from windage.analysis.learning.index import STUDIES
from windage.cli.common import whole
from windage.cli.output import deliver, progress
from windage.estimators.errors import unknown


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the study and its size."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, STUDIES))
    parser.epilog = "studies:\n" + "\n".join(f"  {k:{width}}  {v}" for k, v in STUDIES.items())
    parser.add_argument("study", nargs="?", metavar="STUDY", help="one study; default: all")
    parser.add_argument("--quick", action="store_true", help="few seeds, short training")
    parser.add_argument(
        "--seeds", type=whole(1), metavar="N", help="replicates; default: the study's"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train and judge; 1 where an ordering that is known to hold at full size did not."""
    if arguments.study is not None and arguments.study not in STUDIES:
        raise unknown("study", arguments.study, STUDIES)
    names = tuple(STUDIES) if arguments.study is None else (arguments.study,)
    from windage.analysis.learning import document
    from windage.analysis.workers import processors

    with progress("arms") as advance:
        found = document.run(
            names,
            quick=arguments.quick,
            seeds=arguments.seeds,
            seed=arguments.seed,
            processes=processors(),
            advance=advance,
        )
    deliver(found, arguments)
    if arguments.quick:
        return 0
    failed = [o["says"] for o in found["orderings"] if o["robust"] and not o["holds"]]
    for says in failed:
        print(f"windage learn: does not hold: {says}", file=sys.stderr)
    return 1 if failed else 0
