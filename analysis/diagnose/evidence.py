"""What the signs of faults are read from: sums over tokens, a pass over the dump.

Tokens whose log-ratio is beyond 5 nats stand apart: they are few, and would hide everything else.
"""

from __future__ import annotations

from typing import final

import numpy as np
from jaxtyping import Float, Int

from windage.analysis.diagnose.blocks import Block
from windage.analysis.diagnose.sums import BUCKETS, Sums

FAR = 5.0
LAGS = 10
PLACES = 12
NEIGHBORS = (-1, 0, 1)
VERSIONS = 4096
SAME = 1e-9
# Nearer to 0 a log-probability is 0 in single precision, whoever computed it.
CERTAIN = 1e-6


def lag_bin(lag: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """0 to 8 updates; 9 for more, for less than none, and for unknown."""
    return np.where((lag < 0) | (lag >= LAGS - 1), LAGS - 1, lag)


def place_bin(position: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Positions by doubling: 0-7, 8-15, 16-31, ... the last from 8,192 on.

    Example:
        >>> place_bin(np.array([0, 7, 8, 16, 10**6])).tolist()
        [0, 0, 1, 2, 11]
    """
    _, power = np.frexp(np.maximum(position, 1).astype(float) / 8)
    return np.clip(power, 0, PLACES - 1).astype(np.int64)


def weight_of(logp: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """What a token's mismatch scales with: the part of the probability that is not its own."""
    return np.expm1(logp) ** 2


@final
class Evidence:
    """Sums over all tokens seen so far.

    near: of tokens within 5 nats, by lag.
    far: of the others, and of all.
    same: of tokens that are not certain, by whether lag 0 is recorded.
    pairs: of the trainer's log-probability and the sampler's one place before, at and after.
    moved: by whether new weights arrived before in the response, by lag and by position.
    by_version: by version and lag, before new weights arrived.
    """

    def __init__(self) -> None:
        self.near = Sums(
            "n", "l", "ll", "x", "xx", "xl", "ratio", "inverse", "known", "calibration", bins=LAGS
        )
        self.far = Sums("n", "below", "above", "far", "all")
        self.same = Sums("n", "same", bins=2)
        self.pairs = {d: Sums("n", "a", "b", "aa", "bb", "ab") for d in NEIGHBORS}
        self.moved = Sums("n", "k3", "weight", bins=2 * LAGS * PLACES)
        self.by_version: dict[tuple[int, int], np.ndarray] = {}

    def add(self, block: Block) -> None:
        """Look at a block."""
        x, logp = block.x, block.logp
        near = np.abs(x) <= FAR
        lag = lag_bin(block.lag)
        at = block.buckets[near]
        u, v = x[near], logp[near]
        ratio = np.exp(u)
        known = ~np.isnan(block.square[near])
        gap = np.where(known, ratio * (np.exp(v) - np.nan_to_num(block.square[near])), 0.0)
        self.near.add(
            at, lag[near], n=np.ones_like(u), l=v, ll=v * v, x=u, xx=u * u, xl=u * v,
            ratio=ratio - 1, inverse=1 / ratio - 1, known=known.astype(float), calibration=gap,
        )  # fmt: skip
        size = np.minimum(np.abs(x), 50.0)
        self.far.add(
            block.buckets, 0, n=np.ones_like(x), below=(x < -FAR).astype(float),
            above=(x > FAR).astype(float), far=np.where(near, 0.0, size), all=size,
        )  # fmt: skip
        open_ = np.minimum(logp, block.behavior) < -CERTAIN
        self.same.add(
            block.buckets[open_], (lag[open_] == 0).astype(int),
            n=np.ones(int(open_.sum())), same=(np.abs(x[open_]) < SAME).astype(float),
        )  # fmt: skip
        self._pairs(block)
        k3 = np.where(near, np.expm1(np.clip(x, -FAR, FAR)) - x, 0.0)
        weight = np.where(near, weight_of(logp), 0.0)
        cell = (block.changed * LAGS + lag) * PLACES + place_bin(block.position)
        self.moved.add(block.buckets, cell, n=near.astype(float), k3=k3, weight=weight)
        self._versions(block, near & ~block.changed, k3, weight)

    def _pairs(self, block: Block) -> None:
        """Each log-probability of the trainer beside the sampler's of a neighboring place."""
        together = (block.response[1:] == block.response[:-1]) & (np.diff(block.position) == 1)
        inside = np.concatenate([[False], together]) & np.concatenate([together, [False]])
        here = np.flatnonzero(inside)
        a = np.clip(block.logp[here], -50.0, 0.0)
        for d, sums in self.pairs.items():
            b = np.clip(block.behavior[here + d], -50.0, 0.0)
            sums.add(
                block.buckets[here], 0, n=np.ones_like(a), a=a, b=b, aa=a * a, bb=b * b, ab=a * b
            )

    def _versions(self, block: Block, take: np.ndarray, k3: np.ndarray, weight: np.ndarray) -> None:
        """Mismatch by version and lag; by step, where versions are not recorded."""
        steps = np.array(
            [-1 if row.step is None else row.step for row in block.rows], dtype=np.int64
        )
        version = np.where(block.aged, block.version, steps[block.response] if len(steps) else 0)
        lag = np.where(block.aged, block.lag, 0)
        take = take & (version >= 0)
        keys = np.stack([version[take], lag[take]], 1)
        found, number = np.unique(keys, axis=0, return_inverse=True)
        at, many = block.buckets[take], BUCKETS * len(found)
        place = number.reshape(-1) * BUCKETS + at
        columns = (np.ones(len(at)), k3[take], weight[take])
        table = [np.bincount(place, c, minlength=many).reshape(len(found), BUCKETS) for c in
                 columns]  # fmt: skip
        for i, key in enumerate(map(tuple, found.tolist())):
            part = np.stack([t[i] for t in table])
            if key in self.by_version:
                self.by_version[key] += part
            elif len(self.by_version) < VERSIONS:
                self.by_version[key] = part
