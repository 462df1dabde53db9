"""The document of `windage pipeline --curve`."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windage.analysis.pipeline import curve


def run(
    compute: NDArray[np.float64],
    score: NDArray[np.float64],
    base: float | None,
    source: str,
    seed: int,
) -> dict[str, Any]:
    """Fit scores by compute; rows are the parameters with their intervals."""
    begin = perf_counter()
    order = np.argsort(compute, kind="stable")
    found = curve.report(curve.Data(compute=compute[order], score=score[order], base=base), source)
    return {
        "schema": "windage/pipeline/1",
        "rows": found.pop("parameters"),
        "curve": found,
        "occupancy_residual": None,
        "seed": seed,
        "seconds": perf_counter() - begin,
    }
