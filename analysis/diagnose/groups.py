"""Whole groups of a dump: which can teach nothing, what was selected, and a sample of them to keep.

Rows of a group may stand anywhere in the dump.  Of each group a few numbers are kept; whole rows
only of a sample, drawn by a hash of the group's name, that is thinned when it grows too large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final
from zlib import crc32

import numpy as np
from jaxtyping import Float

from windage.analysis.diagnose.blocks import group_name
from windage.analysis.diagnose.mismatch import truncated
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import BUCKETS, Figure, Named, Sums, bucket, figure

KEPT, ROWS = 1 << 17, 1 << 15
# Groups that wait before they are joined with those that are held.
FEWEST = 1 << 16


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
class Ends:
    """Size, least and greatest outcome of each group, under a hash: 28 bytes a group.

    What is new waits until it is half as much as what is held, so that rows cost the same however
    many there are.
    """

    def __init__(self) -> None:
        self._held = _table(*(np.zeros(0) for _ in range(4)))
        self._new: list[Table] = []
        self._waiting = 0

    def add(self, names: Sequence[str], values: Float[np.ndarray, " n"]) -> None:
        """Outcomes of responses of some groups."""
        if len(names):
            keys = [key_of(name) for name in names]
            self._new.append(_joined([_table(keys, np.ones(len(keys)), values, values)]))
            self._waiting += len(self._new[-1]["key"])
            if self._waiting > max(FEWEST, len(self._held["key"]) // 2):
                self._join()

    def _join(self) -> None:
        if self._new:
            self._held, self._new, self._waiting = _joined([self._held, *self._new]), [], 0

    @property
    def table(self) -> Table:
        """Columns `key` (its lowest bits the bucket), `size`, `low` and `high`, a row a group."""
        self._join()
        return self._held

    def __len__(self) -> int:
        return len(self.table["key"])


Table = dict[str, np.ndarray]
KINDS = {"key": np.uint64, "size": np.uint32, "low": np.float64, "high": np.float64}


def _table(*columns: Any) -> Table:
    pairs = zip(KINDS.items(), columns, strict=True)
    return {name: np.asarray(column, kind) for (name, kind), column in pairs}


def key_of(name: str) -> int:
    """A hash of a group's name whose lowest bits are its bucket."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) // BUCKETS * BUCKETS + bucket(name)


def _joined(tables: list[Table]) -> Table:
    """Several tables as one, with a row a group, ascending; the tables are emptied."""

    def taken(name: str) -> np.ndarray:
        return np.concatenate([table.pop(name) for table in tables])

    key = taken("key")
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else order
    out = {"key": key[first]}
    for name, add in (("size", np.add), ("low", np.minimum), ("high", np.maximum)):
        column = taken(name)[order]
        out[name] = add.reduceat(column, first) if len(first) else column
    return out


@final
class Selection:
    """Rewards and lengths of responses and groups, and what was admitted to training."""

    def __init__(self) -> None:
        self.groups = Ends()
        self.rows = Sums(
            "n", "r", "rr", "t", "tt", "rt", "cut", "cut_r", "cut_t", "told",
            "kept", "kept_r", "kept_t", "kept_cut",
        )  # fmt: skip
        self.rejected = 0

    def add(self, rows: list[Row]) -> None:
        """Look at some rows."""
        self.rejected += sum(row.rejected is not None for row in rows)
        scored = [row for row in rows if row.reward is not None]
        named = [row for row in scored if row.group_id is not None]
        values = np.array([outcome(row) for row in named])
        self.groups.add([group_name(row) for row in named], values)
        if not scored:
            return
        r = np.array([outcome(row) for row in scored])
        t = np.array([row.count for row in scored], float)
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
        several = self.groups.table["size"] > 1
        if several.any():
            held = {name: column[several] for name, column in self.groups.table.items()}
            low, high = held["low"], held["high"]
            equal = low == high
            columns = {"n": equal >= 0, "equal": equal, "low": equal & (low == low.min()),
                       "high": equal & (low == high.max())}  # fmt: skip
            at = (held["key"] % BUCKETS).astype(np.int64)
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
        if not self.rejected:
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
