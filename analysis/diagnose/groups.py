"""Whole groups of a dump: which can teach nothing, what was selected, and a sample of them to keep.

Rows of a group may stand anywhere in the dump.  Of each group a few numbers are kept; whole rows
only of a sample, drawn by a hash of the group's name, that is thinned when it grows too large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final
from zlib import crc32

import numpy as np

from windage.analysis.diagnose.blocks import group_name
from windage.analysis.diagnose.mismatch import truncated
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import BUCKETS, Figure, Named, Sums, bucket, figure

KEPT, ROWS = 1 << 17, 1 << 15


@final
class Sample:
    """Rows of whole groups, of about so many tokens and rows at most.

    Args:
        tokens, rows: above which the half of the groups with the larger hash is let go.
        fewest: groups that are never thinned.
    """

    def __init__(self, tokens: int = KEPT, rows: int = ROWS, fewest: int = BUCKETS) -> None:
        self.most, self.tokens = tokens, 0
        self.most_rows, self.rows, self.fewest = rows, 0, fewest
        self.limit = 2**32
        self.groups: dict[str, list[Row]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Keep the rows of groups that are in the sample."""
        for row in rows:
            name = group_name(row)
            if _hash(name) < self.limit:
                self.groups.setdefault(name, []).append(row)
                self.tokens += len(row.mask)
                self.rows += 1
                while self._full and len(self.groups) > self.fewest:
                    self._thin()

    @property
    def _full(self) -> bool:
        return self.tokens > self.most or self.rows > self.most_rows

    def _thin(self) -> None:
        self.limit //= 2
        self.groups = {n: rows for n, rows in self.groups.items() if _hash(n) < self.limit}
        self.tokens = sum(len(row.mask) for rows in self.groups.values() for row in rows)
        self.rows = sum(map(len, self.groups.values()))

    def first(self, count: int) -> list[Row]:
        """Whole groups that hold so many rows, or a few more."""
        found: list[Row] = []
        for name in sorted(self.groups, key=_hash):
            if len(found) < count:
                found += self.groups[name]
        return found

    @property
    def share(self) -> float:
        """Of the groups."""
        return self.limit / 2**32


def _hash(name: str) -> int:
    """Unlike `sums.bucket`, so that every bucket keeps groups."""
    return crc32(b"sample/" + name.encode("utf-8", "surrogatepass"))


@final
class Selection:
    """Rewards and lengths of responses and groups, and what was admitted to training."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, float, float]] = {}
        self.rows = Sums(
            "n", "r", "rr", "t", "tt", "rt", "cut", "cut_r", "cut_t", "told",
            "kept", "kept_r", "kept_t", "kept_cut",
        )  # fmt: skip
        self.reasons: Counter[str] = Counter()
        self.unscored = 0

    def add(self, rows: list[Row]) -> None:
        """Look at some rows."""
        self.reasons.update(row.rejected for row in rows if row.rejected is not None)
        scored = [row for row in rows if row.reward is not None]
        self.unscored += len(rows) - len(scored)
        for row in scored:
            if row.group_id is not None:
                value, name = outcome(row), group_name(row)
                size, low, high = self.groups.get(name, (0, value, value))
                self.groups[name] = (size + 1, min(low, value), max(high, value))
        if not scored:
            return
        r = np.array([outcome(row) for row in scored])
        t = np.array([row.mask.sum() for row in scored], float)
        told = np.array([row.finish_reason is not None for row in scored], float)
        cut = np.array([truncated(row) for row in scored], float)
        kept = np.array([row.rejected is None for row in scored], float)
        at = np.array([bucket(group_name(row)) for row in scored], dtype=np.int64)
        self.rows.add(
            at, 0, n=np.ones_like(r), r=r, rr=r * r, t=t, tt=t * t, rt=r * t, cut=cut,
            cut_r=cut * r, cut_t=cut * t, told=told, kept=kept, kept_r=kept * r,
            kept_t=kept * t, kept_cut=kept * cut,
        )  # fmt: skip

    def constant(self) -> tuple[Figure, dict[str, Figure]]:
        """Share of groups of two or more whose outcomes are all equal; and at the extremes."""
        sums = Sums("n", "equal", "low", "high")
        names = [name for name, (size, _, _) in self.groups.items() if size > 1]
        if names:
            held = np.array([self.groups[name] for name in names])
            least, most = held[:, 1].min(), held[:, 2].max()
            equal = held[:, 1] == held[:, 2]
            columns = {"n": equal >= 0, "equal": equal, "low": equal & (held[:, 1] == least),
                       "high": equal & (held[:, 1] == most)}  # fmt: skip
            at = np.array([bucket(name) for name in names], dtype=np.int64)
            sums.add(at, 0, **{k: v.astype(float) for k, v in columns.items()})
        table = sums.over()
        shares = {name: figure(table, _share(name)) for name in ("low", "high")}
        return figure(table, _share("equal")), shares

    def figures(self) -> Mapping[str, Figure]:
        """What selection and truncation do to rewards and lengths."""
        table = self.rows.over()
        found = {name: figure(table, function) for name, function in FORMULAS.items()}
        if not table["told"].sum():
            found = {k: v for k, v in found.items() if "truncat" not in k}
        if not self.reasons:
            found = {k: v for k, v in found.items() if not k.startswith("selection/")}
        return {k: v for k, v in found.items() if v.value is not None}


def outcome(row: Row) -> float:
    """The reward before shaping, of a response that has a reward."""
    found = row.reward if row.outcome is None else row.outcome
    assert found is not None
    return found


def _share(name: str) -> Any:
    return lambda s: s[name] / s["n"]


def _correlation(s: Named) -> np.ndarray:
    r, t = s["r"] / s["n"], s["t"] / s["n"]
    both = s["rt"] / s["n"] - r * t
    return both / np.sqrt((s["rr"] / s["n"] - r * r) * (s["tt"] / s["n"] - t * t))


def _slope(s: Named) -> np.ndarray:
    r, t = s["r"] / s["n"], s["t"] / s["n"]
    return 1000 * (s["rt"] / s["n"] - r * t) / (s["tt"] / s["n"] - t * t)


def _without(s: Named) -> np.ndarray:
    return (s["r"] - s["cut_r"]) / (s["n"] - s["cut"])


# Name: function of the sums of rows; formulas and words are in `tables`.
FORMULAS = {
    "length/reward_correlation": _correlation,
    "length/reward_slope": _slope,
    "truncation/share": _share("cut"),
    "truncation/reward": lambda s: s["cut_r"] / s["cut"],
    "truncation/reward_of_others": _without,
    "truncation/effect": lambda s: s["r"] / s["n"] - _without(s),
    "selection/admitted": _share("kept"),
    "selection/reward": lambda s: s["kept_r"] / s["kept"] - s["r"] / s["n"],
    "selection/length": lambda s: s["kept_t"] / s["kept"] - s["t"] / s["n"],
    "selection/truncated": lambda s: s["kept_cut"] / s["kept"] - s["cut"] / s["n"],
}
