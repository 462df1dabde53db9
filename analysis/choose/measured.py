"""Lengths and mismatch of recorded responses: what a request may take from data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from windage.analysis.diagnose.readers.index import detect, read
from windage.analysis.diagnose.readers.plain import NAME
from windage.analysis.diagnose.rows import Row
from windage.estimators.errors import BadInput

NEEDED = ("logp", "behavior_logp")
FEWEST = 8


def measured(path: Path) -> dict[str, float]:
    """Mean length, spread of its logarithm, and mismatch a token, of a dump.

        mismatch = max(0, sum of ratio * log ratio - (ratio - 1)) / tokens,   ratio = exp(x)

    with x the log-ratio of policy to sampler on the tokens that the policy chose: an estimate of
    KL(policy | sampler) from the sampler's tokens, each term 0 or more.  Where the trainer's
    weights are newer than the sampler's, it holds their drift too.

    Args:
        path: any dump that `windage diagnose` reads, our rollout store among them.  Of one without
            the trainer's log-probabilities only the lengths are known; a plain table needs both.

    Raises:
        BadInput: no dump, too few rows, or a row that would be set aside.
    """
    lengths: list[int] = []
    total, tokens = 0.0, 0
    needed = NEEDED if detect(path) == NAME else ()
    for row in read(path):
        x = _gap(row, needed)
        lengths.append(len(row.mask))
        total += float(np.sum(np.exp(x) * x - np.expm1(x)))
        tokens += len(x)
    if len(lengths) < FEWEST:
        raise BadInput(f"{path}: {len(lengths)} rows; allowed: at least {FEWEST}")
    found = {
        "response_tokens": float(np.mean(lengths)),
        "spread": float(np.log(lengths).std(ddof=1)),
    }
    if tokens:
        found["mismatch"] = max(0.0, total) / tokens
    return found


def _gap(row: Row, needed: Sequence[str]) -> np.ndarray:
    """Log-ratios of a row, none where the dump lacks one of the two.

    Raises:
        BadInput: a field that is needed and missing, or a ratio that is not finite.
    """
    for name in needed:
        if getattr(row, name) is None:
            raise BadInput(f"{row.where} has no {name}; needed: {', '.join(NEEDED)}")
    if row.logp is None or row.behavior_logp is None:
        return np.zeros(0)
    x = (row.logp - row.behavior_logp)[row.mask]
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(np.exp(x))
    if bad.any():
        token = int(np.flatnonzero(row.mask)[bad.argmax()])
        raise BadInput(f"{row.where} has the log-ratio {x[bad][0]:g} at token {token}; too large")
    return np.asarray(x)
