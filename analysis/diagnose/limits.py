"""What caps of a ratio leave: share beyond, effective sample size before and after truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from jaxtyping import Float, Int

from windage.analysis.diagnose.blocks import Block
from windage.analysis.diagnose.sums import Figure, Named, Sums, figure

CAPS = (2.0, 5.0)
LARGEST = 300.0


@final
class Limits:
    """Ratios of tokens and of responses against some caps.

    Args:
        caps: absolute ratios; a floor at 1 / cap is counted as well.
    """

    def __init__(self, caps: Sequence[float] = CAPS) -> None:
        self.caps = tuple(caps)
        names = ("n", "above", "below", "w", "ww", "gap")
        self.sums = {
            (over, cap): Sums(*names) for over in ("token", "response") for cap in self.caps
        }

    def add(self, block: Block) -> None:
        """Look at a block."""
        self._add("token", block.buckets, block.x)
        if len(block.count):
            self._add("response", block.bucket, np.add.reduceat(block.x, block.first))

    def _add(self, over: str, at: Int[np.ndarray, " N"], x: Float[np.ndarray, " N"]) -> None:
        for cap in self.caps:
            edge = np.log(cap)
            w = np.exp(np.minimum(x, edge))
            self.sums[over, cap].add(
                at, 0, n=np.ones_like(x), above=(x > edge).astype(float), w=w, ww=w * w,
                below=(x < -edge).astype(float), gap=np.abs(np.expm1(np.minimum(x, LARGEST))),
            )  # fmt: skip

    def figures(self) -> Mapping[str, Figure]:
        """By name: `limits/above_2` and the like, `_response` for whole responses."""
        found = {}
        for (over, cap), sums in self.sums.items():
            end = f"_{cap:g}" + ("_response" if over == "response" else "")
            table = sums.over()
            if table["n"].sum():
                found[f"limits/above{end}"] = figure(table, lambda s: s["above"] / s["n"])
                found[f"limits/below{end}"] = figure(table, lambda s: s["below"] / s["n"])
                found[f"limits/ess_truncated{end}"] = figure(table, _effective)
                if over == "token":
                    found["drift/distance"] = figure(table, lambda s: s["gap"] / s["n"])
        return found


def _effective(s: Named) -> np.ndarray:
    return s["w"] ** 2 / (s["n"] * s["ww"])
