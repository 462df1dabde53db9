"""Entries in order: by bias and noise together, and never inside their uncertainty.

An entry beats another where it is surely better in bias or in noise, and not worse in the other.
Noise counts between entries whose updates without correction are alike, as `support` says; between
others bias alone does.  Those that none beats come first and are undecided between: the dump does
not tell how much bias is worth how much noise.  Those whose weights have a tail that no average of
them can bear are not ranked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windage.analysis.diagnose.support import (
    PLAIN,
    Support,
    concentration,
    cosines,
    errors,
    estimate,
    geometry,
)
from windage.estimators.catalogue import CATALOGUE

SURE, MAYBE, MATTERS = 3.5, 2.0, 0.01
# Cosine from which on two entries differ by their corrections alone.
ALIKE = 0.99
OTHERWISE = "noise is not compared"


def better(values: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether the row's entry is surely, and perhaps, smaller than the column's.

    Args:
        values: `[replicates, entries]`, the first the whole.
        size: below which a difference does not matter.
    """
    gap = values[:, None, :] - values[:, :, None]
    error = errors(gap)
    with np.errstate(all="ignore"):
        away = gap[0] / np.where(error > 0, error, 1e-300)
    large = gap[0] > size
    return large & (away > SURE), large & (away > MAYBE)


def layers(beats: np.ndarray) -> list[int]:
    """Rank of each entry: 1 for those that none beats, then 2 with those taken away, and so on.

    Example:
        >>> layers(np.array([[False, True], [False, False]]))
        [1, 2]
    """
    rank = np.zeros(len(beats), dtype=int)
    level = 0
    while (rank == 0).any():
        level += 1
        rest = rank == 0
        first = rest & ~(beats & rest[:, None]).any(0)
        rank[first if first.any() else rest] = level
    return rank.tolist()


def rows(made: Support) -> list[dict[str, Any]]:
    """A row an entry, in order of rank; those that are not served last, with the reason."""
    found = geometry(made)
    alike = cosines(made)
    out = [_row(made, name, found, alike) for name in made.names]
    ranked = [i for i, row in enumerate(out) if row["reason"] is None]
    order, why = _ranks(made, found, ranked)
    for place, i in enumerate(ranked):
        out[i] |= {"rank": order[place], "why": why[place]}
    out.sort(key=lambda row: (row["rank"] or math.inf, row["noise"] or math.inf, row["estimator"]))
    blank = dict.fromkeys(out[0] if out else ())
    out += [
        blank | {"estimator": name, "reason": reason, "composition": CATALOGUE[name].describe()}
        for name, reason in made.excluded.items()
    ]
    return out


def _row(
    made: Support, name: str, found: Mapping[str, np.ndarray], alike: np.ndarray
) -> dict[str, Any]:
    number, each = made.row_of[name], made.found[name]
    bias = found["bias_square"][:, number]
    figures = {
        "scale": estimate(found["scale"][:, number]),
        "noise": estimate(found["noise"][:, number]),
        "bias": estimate(np.sqrt(bias)),
        "effective_share": estimate(concentration(each.sums)),
    }
    reason = None
    if each.tail is not None and each.tail > each.limit:
        reason = f"tail of its weights has shape {each.tail:.2f}, above {each.limit:.2f}"
    elif figures["noise"].value is None:
        reason = "makes no progress along the plain update on this dump"
    signal = each.signal[np.isfinite(each.signal)]
    total = float(each.sums["size"].sum())
    return {
        "rank": None,
        "estimator": name,
        "why": None,
        "reason": reason,
        **{key: value.value for key, value in figures.items()},
        **{f"{key}_half_width": value.half_width for key, value in figures.items()},
        "largest_share": each.most / total if total else None,
        "alike": _finite(made.alike[number, made.row_of[PLAIN]]),
        "cosine_plain": _finite(alike[number, made.row_of[PLAIN]]),
        "cosine_reference": _finite(alike[number, made.row_of[made.reference]]),
        "signal_to_noise": float(signal.mean()) if len(signal) else None,
        "tail": each.tail,
        **{key.replace("/", "_"): figure.value for key, figure in each.weights.items()},
        "composition": CATALOGUE[name].describe(),
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _ranks(
    made: Support, found: Mapping[str, np.ndarray], ranked: Sequence[int]
) -> tuple[list[int], list[str]]:
    """Layers, and a sentence for each entry."""
    if not ranked:
        return [], []
    noise, bias = found["noise"][:, ranked], np.sqrt(found["bias_square"][:, ranked])
    sure_noise, maybe_noise = better(np.log(noise), MATTERS)
    sure_bias, maybe_bias = better(bias, MATTERS)
    alike = made.alike[np.ix_(ranked, ranked)] > ALIKE
    sure_noise, maybe_noise = sure_noise & alike, maybe_noise & alike
    beats = (sure_noise & ~maybe_bias.T) | (sure_bias & ~maybe_noise.T)
    rank = layers(beats)
    names = [made.names[i] for i in ranked]
    words = []
    for i, name in enumerate(names):
        over = [j for j in range(len(names)) if beats[j, i] and rank[j] == 1]
        if rank[i] == 1:
            words.append("no entry is surely better in one and as good in the other")
            continue
        over = over or [j for j in range(len(names)) if beats[j, i]]
        best = min(over, key=lambda j: (not alike[j, i], noise[0, j]))
        how = []
        if sure_noise[best, i]:
            how.append(f"noise {noise[0, i]:.3g} against {noise[0, best]:.3g}")
        if sure_bias[best, i]:
            how.append(f"bias {bias[0, i]:.2g} against {bias[0, best]:.2g}")
        if not alike[best, i]:
            how.append(OTHERWISE)
        words.append(f"{names[best]} is better: {', '.join(how)}")
        assert name != names[best]
    return rank, words


def verdict(table: Sequence[Mapping[str, Any]]) -> str:
    """The answer in a sentence."""
    first = [row["estimator"] for row in table if row["rank"] == 1]
    if not first:
        return "No entry is supported by this dump."
    if len(first) == 1:
        return f"{first[0]}: better in bias and noise than every other entry."
    shown = ", ".join(first[:6]) + (f" and {len(first) - 6} more" if len(first) > 6 else "")
    return f"Undecided between {shown}: none is surely better in bias and noise both."
