"""How far sampler and trainer are apart: every metric of `estimators.metrics`, with its interval.

The sums are those that a trainer logs, kept apart by bucket of groups; by position, lag and length
they are kept for tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.analysis.diagnose.blocks import Block, group_name, policy
from windage.analysis.diagnose.evidence import LAGS, PLACES, lag_bin, place_bin
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import BUCKETS, Figure, Sums, bucket, jackknife
from windage.analysis.diagnose.tails import Tail
from windage.estimators.batch import Batch
from windage.estimators.metrics import METRICS, NAMES, Metric
from windage.estimators.moments import LARGEST, Moments, of_lags, of_ratios, of_responses

LENGTHS = 12
AT_ONCE = 1 << 20


def padded(values: np.ndarray, count: Int[np.ndarray, " R"], fill: float = 0.0) -> Tensor:
    """Values of responses one after another, as `[R 1 T]`.

    Example:
        >>> padded(np.array([1.0, 2.0, 3.0]), np.array([1, 2])).squeeze(1).tolist()
        [[1.0, 0.0], [2.0, 3.0]]
    """
    real = np.arange(count.max(initial=0)) < count[:, None]
    out = np.full(real.shape, fill, dtype=values.dtype)
    out[real] = values
    return torch.from_numpy(out).unsqueeze(1)


@final
class Kept:
    """Moments by bucket, merged as `estimators.moments` says."""

    def __init__(self) -> None:
        self.table: dict[str, np.ndarray] = {}

    def add(self, number: int, moments: Moments) -> None:
        """Merge a part into a bucket."""
        for key, value in moments.items():
            part = value.numpy()
            if key not in self.table:
                empty = 0.0 if key.startswith("sum/") else -math.inf
                self.table[key] = np.full((BUCKETS, *part.shape), empty)
            held = self.table[key]
            held[number] = _joined(key, np.stack([held[number], part]))

    def whole(self, left: int | None = None) -> dict[str, Any]:
        """Sums of every bucket, or of every bucket but one."""
        keep = np.arange(BUCKETS) != (-1 if left is None else left)
        return {key: _joined(key, value[keep]).tolist() for key, value in self.table.items()}

    @property
    def filled(self) -> list[int]:
        """Buckets that hold something."""
        counts = [v for k, v in self.table.items() if k.endswith(".count")]
        return np.flatnonzero(np.any([c != 0 for c in counts], axis=0)).tolist() if counts else []

    def figures(self, metrics: tuple[Metric, ...] = METRICS) -> dict[str, Figure]:
        """Metrics that the sums can tell; extremes and quantiles have no error."""
        whole, filled = self.whole(), self.filled
        left = {number: self.whole(number) for number in filled}
        found = {}
        for metric in metrics:
            value = metric.of(whole)
            if value is not None:
                sharp = any(k.startswith("max/") or k.endswith("histogram") for k in metric.keys)
                parts = {} if sharp else {n: metric.of(sums) for n, sums in left.items()}
                found[metric.name] = jackknife(value, parts)
        return found


def _joined(key: str, parts: np.ndarray) -> np.ndarray:
    if key.startswith("sum/"):
        return parts.sum(0)
    return parts.max(0) if key.startswith("max/") else np.logaddexp.reduce(parts, axis=0)


@final
class Mismatch:
    """Everything that is asked of tokens and responses alone.

    Args:
        low, high: ratios beyond which tokens and responses count as outside.
    """

    def __init__(self, low: float = 0.5, high: float = 2.0) -> None:
        self.low, self.high = low, high
        self.kept = Kept()
        names = ("count", "log", "k3", "excess", "excess_square")
        self.by = {
            "position": Sums(*names, bins=PLACES),
            "lag": Sums(*names, bins=LAGS),
            "length": Sums(*names, bins=LENGTHS),
        }
        self.tails = {"token": Tail(), "response": Tail()}
        self.policies: dict[str, Sums] = {
            name: Sums("count", "log", "k3", "excess", "excess_square")
            for name in ("proximal_logp", "reference_logp")
        }

    def add(self, block: Block, rows: list[Row]) -> None:
        """Look at a block, and at all rows that it was made of."""
        self._ratios(block)
        self._responses(rows)
        self._bins(block)
        self._policies(block)
        self.tails["token"].add(block.x)
        if len(block.count):
            self.tails["response"].add(np.add.reduceat(block.x, block.first))

    def _ratios(self, block: Block) -> None:
        told = np.logical_and.reduceat(block.aged, block.first) if len(block.count) else block.aged
        for number, part in by_bucket(block.bucket, block.count):
            where = block.places(part)
            count = block.count[part]
            batch = Batch(
                rewards=torch.zeros(len(part), 1, dtype=torch.float64),
                mask=padded(np.ones(len(where), bool), count, False),
                logp=padded(block.logp[where], count),
                behavior_logp=padded(block.behavior[where], count),
            )
            self.kept.add(number, of_ratios(batch, low=self.low, high=self.high))
            aged = part[told[part]]
            if len(aged):
                lag = block.lag[block.places(aged)]
                size = block.count[aged]
                old = Batch(
                    rewards=torch.zeros(len(size), 1, dtype=torch.float64),
                    mask=padded(np.ones(len(lag), bool), size, False),
                    versions=padded(-lag, size, 0),
                    current_version=0,
                )
                self.kept.add(number, of_lags(old))

    def _responses(self, rows: list[Row]) -> None:
        """Rewards, lengths, and how responses ended."""
        scored = [row for row in rows if row.reward is not None]
        buckets = np.array([bucket(group_name(row)) for row in scored], dtype=np.int64)
        count = np.array([row.count for row in scored], dtype=np.int64)
        for number, part in by_bucket(buckets, count):
            some = [scored[i] for i in part]
            told = all(row.finish_reason is not None for row in some)
            batch = Batch(
                rewards=column([row.reward for row in some]),
                outcomes=column([row.reward if row.outcome is None else row.outcome for row in
                                 some]),
                mask=padded(np.ones(count[part].sum(), bool), count[part], False),
                truncated=torch.tensor([[truncated(row)] for row in some]) if told else None,
            )  # fmt: skip
            self.kept.add(number, of_responses(batch))

    def _bins(self, block: Block) -> None:
        parts = divergences(block.x)
        size = np.bincount(block.response, minlength=len(block.count))
        where = {
            "position": place_bin(block.position),
            "lag": lag_bin(block.lag),
            "length": place_bin(size[block.response]),
        }
        for name, bins in where.items():
            take = block.aged if name == "lag" else slice(None)
            columns = {k: v[take] for k, v in parts.items()}
            self.by[name].add(block.buckets[take], bins[take], **columns)

    def _policies(self, block: Block) -> None:
        """Other policies of the dump beside the sampler."""
        for name, sums in self.policies.items():
            for i, row in enumerate(block.rows):
                other, behavior = getattr(row, name), row.behavior_logp
                if other is None or behavior is None or other is policy(row):
                    continue
                parts = divergences((other - behavior)[row.mask])
                at = np.full(block.count[i], block.bucket[i])
                sums.add(at, 0, **parts)


def truncated(row: Row) -> bool:
    """Whether a limit ended the response."""
    return row.finish_reason in ("length", "max_tokens", "truncated", "LENGTH", "TRUNCATED")


def column(values: list[float | None]) -> Float[Tensor, "R 1"]:
    """One number a response."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def divergences(x: Float[np.ndarray, " N"]) -> dict[str, np.ndarray]:
    """What the sums `sum/token.*` of `estimators.metrics` add up, a column each."""
    excess = np.expm1(np.minimum(x, LARGEST))
    return {
        "count": np.ones_like(x),
        "log": x,
        "k3": np.maximum(excess - x, 0.0),
        "excess": excess,
        "excess_square": excess**2,
    }


def by_bucket(
    buckets: Int[np.ndarray, " R"], count: Int[np.ndarray, " R"]
) -> list[tuple[int, Int[np.ndarray, " n"]]]:
    """Responses of each bucket, in parts that are not too wide once padded."""
    parts = []
    order = np.lexsort((count, buckets))
    start, widest = 0, 0
    for place, i in enumerate(order.tolist()):
        widest = max(widest, int(count[i]))
        other = buckets[i] != buckets[order[start]]
        if other or widest * (place + 1 - start) > AT_ONCE:
            parts.append((int(buckets[order[start]]), order[start:place]))
            start, widest = place, int(count[i])
    if len(order):
        parts.append((int(buckets[order[start]]), order[start:]))
    return [(number, part) for number, part in parts if len(part)]


def binned(sums: Sums, name: str) -> list[Figure]:
    """A metric over tokens in each bin, such as `mismatch/k3`."""
    metric = NAMES[name]
    keys = [key.removeprefix("sum/token.") for key in metric.keys]

    def of(replicate: Mapping[str, np.ndarray]) -> float | None:
        values = [float(replicate[key]) for key in keys]
        return metric.of(dict(zip(metric.keys, values, strict=True)))

    return [_bin(sums, number, of) for number in range(sums.bins)]


def _bin(sums: Sums, number: int, of: Callable[[Mapping[str, np.ndarray]], float | None]) -> Figure:
    table = sums.over(slice(number, number + 1))
    filled = np.flatnonzero(table["count"]).tolist()
    left = {b: of({k: v.sum() - v[b] for k, v in table.items()}) for b in filled}
    return jackknife(of({k: v.sum() for k, v in table.items()}), left)
