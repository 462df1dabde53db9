"""Weights and zero regions as claims declare them, in plain Python, a token at a time.

Nothing here calls a stage: these are the words of `estimators.claims`, computed a second way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from windage.estimators.claims import (
    BEHIND,
    CLIPPED,
    DIVERGED,
    DUAL,
    FAR,
    LOG_CLIPPED,
    MOVED,
)

Settings = Mapping[str, Any]
Row = Mapping[str, list[float]]
ALIKE = 1e-7
GRID_LOGP = -1.0


@final
@dataclass(frozen=True, kw_only=True)
class Spot:
    """A token among the rows of a batch.

    Args:
        rows: of each row its trainable tokens' log-probabilities and advantages.
        groups: of each row.
        row, token: where it stands.
        sign: of its advantage.
        settings: of the estimator.
    """

    rows: Sequence[Row]
    groups: Sequence[int]
    row: int
    token: int
    sign: float
    settings: Settings

    def chance(self, name: str) -> float:
        """Probability of the token under the policy of a field."""
        return math.exp(self.rows[self.row][name][self.token])

    def log_ratios(self, policies: str) -> list[list[float]]:
        """Log-ratios of every row's tokens."""
        first, second = (FIELDS[word] for word in policies.split(" / "))
        return [[a - b for a, b in zip(r[first], r[second], strict=True)] for r in self.rows]


FIELDS = {"policy": "logp", "sampler": "behavior_logp", "proximal": "proximal_logp"}
Rule = Callable[[float, Spot], float]
Reach = Callable[[Spot, list[list[float]]], float]


def weight(value: str, at: Spot) -> float:
    """The product of the factors that a claim declares."""
    product = 1.0
    for factor in value.split(" × "):
        rule, reach, policies = (*factor.split("; "), "", "")[:3]
        x = at.log_ratios(policies or "policy / sampler")
        effective = REACHES[reach or "own token"](at, x)
        product *= RULES[rule](math.exp(effective), at)
    return product


def _limits(at: Spot) -> tuple[float, float]:
    side = "pos" if at.sign >= 0 else "neg"
    return at.settings[f"a_{side}"], at.settings[f"b_{side}"]


def _beyond_clip(ratio: float, sign: float, s: Settings) -> bool:
    return ratio > 1 + s["clip_high"] if sign > 0 else sign < 0 and ratio < 1 - s["clip_low"]


def _beyond_dual(ratio: float, sign: float, s: Settings) -> bool:
    return _beyond_clip(ratio, sign, s) or (sign < 0 and ratio > s["cap"])


def _beyond_log(ratio: float, sign: float, s: Settings) -> bool:
    x = math.log(ratio)
    return x > s["log_high"] if sign > 0 else sign < 0 and x < -s["log_low"]


def _behind(ratio: float, sign: float, s: Settings) -> bool:
    return sign < 0 and math.log(ratio) < -s["delta"]


def _moved(p: float, q: float, sign: float, s: Settings) -> bool:
    return (p - q if sign > 0 else q - p) > s["limit"] if sign else False


def _diverged(p: float, q: float, sign: float, s: Settings) -> bool:
    p, q = min(p, 1.0), min(q, 1.0)
    parts = [q * math.log(q / p) if q else 0.0]
    if q < 1:
        parts.append((1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf)
    return sum(parts) > s["limit"] and (p > q if sign > 0 else sign < 0 and p < q)


def _gated(ratio: float, at: Spot) -> float:
    tau = at.settings["tau_pos" if at.sign > 0 else "tau_neg"]
    z = min(tau * (ratio - 1) / 2, 350.0)
    return ratio / math.cosh(z) ** 2


def _shaped(ratio: float, at: Spot) -> float:
    side = "pos" if at.sign >= 0 else "neg"
    k, rate = at.settings[f"k_{side}"], at.settings[f"lambda_{side}"]
    return float(ratio**k * math.exp(rate * (1 - ratio)))


def _inverted(ratio: float, at: Spot) -> float:
    if _beyond_dual(ratio, at.sign, at.settings):
        return 0.0
    return min(1 / ratio, at.settings["cap"]) if at.sign > 0 else ratio


def _capped(dropped: Callable[..., bool]) -> Rule:
    def rule(ratio: float, at: Spot) -> float:
        p, q = at.chance("logp"), at.chance("behavior_logp")
        return 0.0 if dropped(p, q, at.sign, at.settings) else min(ratio, at.settings["cap"])

    return rule


def _nearest(ratio: float, at: Spot) -> float:
    """The ratio where the token belongs to the nearest of the batch, else 0."""
    squares = sorted(x * x for row in at.log_ratios("policy / sampler") for x in row)
    total, limit = 0.0, math.inf
    for count, square in enumerate(squares, start=1):
        total += square
        if total / count >= at.settings["tau"]:
            limit = square
            break
    return ratio if math.log(ratio) ** 2 < limit * (1 - ALIKE) else 0.0


def _uncovered(ratio: float, at: Spot) -> float:
    """0 where the token's covariance is among the largest inside the band, else 1."""
    s = at.settings
    found = covariances(at.rows)
    inside = sorted((c for row in found for c in row if s["low"] < c < s["high"]), reverse=True)
    mine = found[at.row][at.token]
    if not inside or not s["low"] < mine < s["high"]:
        return 1.0
    count = max(1, int(s["share"] * sum(map(len, found))))
    last = inside[min(count, len(inside)) - 1]
    return 0.0 if mine >= last - ALIKE * abs(last) else 1.0


def covariances(rows: Sequence[Row]) -> list[list[float]]:
    """Of every token, deviation of log pi times that of the advantage."""
    pairs = [(p, a) for r in rows for p, a in zip(r["logp"], r["advantage"], strict=True)]
    means = [math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    return [
        [(p - means[0]) * (a - means[1]) for p, a in zip(r["logp"], r["advantage"], strict=True)]
        for r in rows
    ]


RULES: Mapping[str, Rule] = {
    "1": lambda ratio, at: 1.0,
    "ratio": lambda ratio, at: ratio,
    "ratio, at most cap": lambda ratio, at: min(ratio, at.settings["cap"]),
    "ratio inside [low, high], else 0": (
        lambda ratio, at: ratio if at.settings["low"] <= ratio <= at.settings["high"] else 0.0
    ),
    "1 inside [low, high], else 0": (
        lambda ratio, at: float(at.settings["low"] <= ratio <= at.settings["high"])
    ),
    "ratio, 0 beyond the clip": (
        lambda ratio, at: 0.0 if _beyond_clip(ratio, at.sign, at.settings) else ratio
    ),
    "ratio, 0 beyond the dual clip": (
        lambda ratio, at: 0.0 if _beyond_dual(ratio, at.sign, at.settings) else ratio
    ),
    "ratio between a and b of the sign of A": (
        lambda ratio, at: min(max(ratio, _limits(at)[0]), _limits(at)[1])
    ),
    "1, 0 where A < 0 and log ratio < -delta": (
        lambda ratio, at: float(not _behind(ratio, at.sign, at.settings))
    ),
    "1, 0 beyond the log clip": (
        lambda ratio, at: float(not _beyond_log(ratio, at.sign, at.settings))
    ),
    "ratio sech^2(tau (ratio - 1) / 2)": _gated,
    "ratio^k exp(lambda (1 - ratio))": _shaped,
    "1 / ratio if A > 0, else ratio, 0 beyond the dual clip": _inverted,
    "ratio, at most cap, 0 where p - q exceeds limit along A": _capped(_moved),
    "ratio, at most cap, 0 where binary KL exceeds limit along A": _capped(_diverged),
    "ratio, 0 from where the mean square reaches tau": _nearest,
    "1, 0 on the largest covariances": _uncovered,
}


def _one_sided(x: list[float], at: Spot) -> list[float]:
    s = at.settings
    if at.sign > 0:
        return [min(v, s["log_high"]) for v in x]
    return [max(v, -s["log_low"]) for v in x] if at.sign < 0 else x


def _over(at: Spot, sizes: list[float | None], mine: float, *, group: bool) -> float:
    """Log of a capped ratio over the mean of its kind; None has none."""
    cap = at.settings.get("cap", math.inf)
    near = [
        min(math.exp(x), cap)
        for i, x in enumerate(sizes)
        if x is not None and (not group or at.groups[i] == at.groups[at.row])
    ]
    return math.log(min(math.exp(mine), cap) / (math.fsum(near) / len(near)))


def _responses(x: list[list[float]]) -> list[float | None]:
    return [sum(row) if row else None for row in x]


REACHES: Mapping[str, Reach] = {
    "own token": lambda at, x: x[at.row][at.token],
    "tokens up to it": lambda at, x: sum(x[at.row][: at.token + 1]),
    "tokens from it": lambda at, x: sum(x[at.row][at.token :]),
    "response": lambda at, x: sum(x[at.row]),
    "response, geometric": lambda at, x: sum(x[at.row]) / len(x[at.row]),
    "response, geometric of one-sided": (
        lambda at, x: sum(_one_sided(x[at.row], at)) / len(x[at.row])
    ),
    "response, farthest token": lambda at, x: max(x[at.row], key=lambda v: (abs(v), v)),
    "response, over the mean of the group": (
        lambda at, x: _over(at, _responses(x), sum(x[at.row]), group=True)
    ),
    "response, over the mean of the batch": (
        lambda at, x: _over(at, _responses(x), sum(x[at.row]), group=False)
    ),
    "own token, over the mean of the batch": (
        lambda at, x: _over_tokens(at, [v for row in x for v in row], x[at.row][at.token])
    ),
}


def _over_tokens(at: Spot, tokens: list[float], mine: float) -> float:
    return _over(at, [*tokens], mine, group=False)


Region = Callable[[float, float, Settings], bool]


def _on_grid(dropped: Callable[..., bool]) -> Region:
    """A region of two probabilities where the policy's is exp(`GRID_LOGP`)."""
    p = math.exp(GRID_LOGP)
    return lambda ratio, sign, s: dropped(p, p / ratio, sign, s)


ZERO: Mapping[str, Region] = {
    "nowhere": lambda ratio, sign, s: False,
    CLIPPED: _beyond_clip,
    "ratio < low or ratio > high": lambda ratio, sign, s: not s["low"] <= ratio <= s["high"],
    "A < 0": lambda ratio, sign, s: sign < 0,
    DUAL: _beyond_dual,
    MOVED: _on_grid(_moved),
    DIVERGED: _on_grid(_diverged),
    LOG_CLIPPED: _beyond_log,
    BEHIND: lambda ratio, sign, s: _beyond_clip(ratio, sign, s) or _behind(ratio, sign, s),
    FAR: lambda ratio, sign, s: math.log(ratio) ** 2 >= s["tau"],
}


def edges(settings: Settings) -> list[float]:
    """Ratios at which some declared rule changes."""
    names: Mapping[str, Callable[[float], list[float]]] = {
        "clip_high": lambda v: [1 + v],
        "clip_low": lambda v: [1 - v],
        "low": lambda v: [v],
        "high": lambda v: [v],
        "cap": lambda v: [v],
        "log_high": lambda v: [math.exp(v)],
        "log_low": lambda v: [math.exp(-v)],
        "delta": lambda v: [math.exp(-v)],
        "tau": lambda v: [math.exp(math.sqrt(v)), math.exp(-math.sqrt(v))],
        "limit": lambda v: [1 / (1 + side * v / math.exp(GRID_LOGP)) for side in (-1, 1)],
    }
    found = [edge for name in names if name in settings for edge in names[name](settings[name])]
    return [edge for edge in found if 0 < edge < math.inf]
