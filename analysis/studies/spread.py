"""The covariance of a study's rows, a block of V x V numbers for each prefix, on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from windage.analysis.studies.grid import Settings, cells, sites
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.exact.covariance import covariance_blocks
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import Site
from windage.toy.problems import Problem

LARGEST = 1e5


def covariances(
    settings: Settings, bind: Callable[[Estimator, Site], Estimator]
) -> list[Mapping[str, Any]]:
    """For each row `blocks`, nested by prompt, prefix and two tokens, or the `reason` for none.

    Args:
        settings: of the study.
        bind: gives an estimator what the problem supplies.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for site, here in sites(settings, cells(settings)):
        for cell in here:
            name, given = cell.estimator
            try:
                if not isinstance(site, Problem):
                    raise Undefined("covariance blocks are of trees of prefixes")
                estimator = bind(get(name, **dict(given)), site)
                blocks = covariance_blocks(estimator, site, cell.group_size, most=LARGEST)
                found[cell.number] = {"row": cell.number, "blocks": blocks.tolist()}
            except Undefined as why:
                found[cell.number] = {"row": cell.number, "reason": str(why)}
    return [found[number] for number in sorted(found)]
