"""What a dump alone says about the causes of its mismatch: parts where it can, bounds elsewhere.

All figures are a token, in the order sampler, sampling settings, engine, cache, lag, passes (see
`estimators.attribution`, whose chain needs a rescoring for what is bounded here):

    k1    -x        k3    exp(x) - 1 - x        chi_square    (exp(x) - 1)^2

with x the log-ratio of policy to sampler.  k3 and chi_square of two causes add up where the causes
are independent given the prefix; parts by lag, cache and turns rest on that, and say so.

    engine      what tokens of lag 0, or of the least lag, show (arithmetic, rounding, settings that
                the log-probabilities hold)
    lag         the rest of older tokens
    cache       by how much tokens after an update in their response exceed others of their lag
    passes      what came between the trainer's log-probabilities before the update and the latest
    turn edges  by how much tokens beside a tool's exceed the others: text that was merged and
                tokenized again shows here
    sampling    temperature, top-p and top-k, by log S(1/T) and the mass kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Float

from windage.analysis.diagnose.blocks import Block, block, gathered, policy
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import BUCKETS, Figure, Sums, figure
from windage.estimators.moments import LARGEST

OLDEST, UNAGED = 63, 64
LAGS = 65
MEASURES = ("k1", "k3", "chi_square")
ADDITIVE = ("k3", "chi_square")
Part = dict[str, Any]
Sum = Mapping[str, np.ndarray]


def attribution(rows: Iterable[Row]) -> list[Part]:
    """Parts of the mismatch by cause, as far as the rows go.

    Args:
        rows: of a dump, read once.

    Returns:
        A part each: `cause`, `measure`, `low` and `high` (equal where the dump determines the part;
        None: no bound), `error` (standard error of a determined part, groups independent),
        `tokens` that it rests on, `how` in a sentence.  Causes that the dump says nothing about are
        left out; `all` is the whole.
    """
    found = Attribution()
    for some in gathered(rows):
        found.add(block(some))
    return found.parts()


def measured(x: Float[np.ndarray, " N"]) -> dict[str, Float[np.ndarray, " N"]]:
    """k1, k3 and chi-square of each token's log-ratio.

    Example:
        >>> {name: round(float(value[0]), 4) for name, value in measured(np.log([2.0])).items()}
        {'k1': -0.6931, 'k3': 0.3069, 'chi_square': 1.0}
    """
    excess = np.expm1(np.minimum(x, LARGEST))
    return {"k1": -x, "k3": excess - x, "chi_square": excess**2}


@final
class Attribution:
    """Sums from which the parts are made."""

    def __init__(self) -> None:
        names = ("tokens", *MEASURES)
        self.by_lag = Sums(*names, bins=2 * LAGS)
        self.by_edge = Sums(*names, bins=2)
        self.before = Sums(*names, *(f"{name}_before" for name in MEASURES))
        self.settings = Sums("tokens", "low", "high", "boundless", "unbounded")
        self.outside: dict[bool | None, int] = {}
        self.turns = self.responses = self.tools = 0

    def add(self, block: Block) -> None:
        """Look at a block."""
        ones = np.ones(len(block.x))
        found = {"tokens": ones, **measured(block.x)}
        known = block.aged & (block.lag >= 0)
        lag = np.where(known, np.minimum(block.lag, OLDEST), UNAGED)
        self.by_lag.add(block.buckets, lag * 2 + block.changed, **found)
        edges = np.zeros(len(block.x), dtype=int)
        for number, row in enumerate(block.rows):
            if not row.whole:
                start = block.first[number]
                edges[start : start + row.count] = edge(row.mask)
        self.by_edge.add(block.buckets, edges, **found)
        self.responses += len(block.rows)
        self.turns += sum(turns(row) for row in block.rows)
        self.tools += sum(len(row.mask) - row.count for row in block.rows)
        for number, row in enumerate(block.rows):
            part = slice(block.first[number], block.first[number] + block.count[number])
            at = block.buckets[part]
            if row.proximal_logp is not None and row.logp is not None:
                early = measured(row.proximal_logp[row.mask] - block.behavior[part])
                late = {name: values[part] for name, values in found.items()}
                self.before.add(at, 0, **late, **{f"{n}_before": v for n, v in early.items()})
            self._settings(row, at)

    def _settings(self, row: Row, at: np.ndarray) -> None:
        """Bounds of what temperature, top-p and top-k do to a response."""
        if plain(row):
            return
        low, high = sampling(row)
        self.outside[row.raw] = self.outside.get(row.raw, 0) + len(at)
        self.settings.add(
            at,
            0,
            tokens=np.ones(len(at)),
            low=np.where(np.isfinite(low), low, 0.0),
            high=np.where(np.isfinite(high), high, 0.0),
            boundless=(~np.isfinite(low)).astype(float),
            unbounded=(~np.isfinite(high)).astype(float),
        )

    def parts(self) -> list[Part]:
        """What can be said."""
        whole = self.by_lag.over()
        if not whole["tokens"].sum():
            return []
        found = [
            determined("all", name, figure(whole, mean(name)), whole, "the whole mismatch")
            for name in MEASURES
        ]
        return [
            *found, *self._of_lag(), *self._of_cache(), *self._of_passes(), *self._of_edges(),
            *self._of_settings(),
        ]  # fmt: skip

    def _of_lag(self) -> list[Part]:
        """Engine and lag, by the youngest tokens."""
        tokens = self.by_lag.table["tokens"].reshape(BUCKETS, LAGS, 2).sum((0, 2))[:UNAGED]
        if not tokens.any() or self.by_lag.over(slice(2 * UNAGED, None))["tokens"].any():
            return []
        least = int(np.flatnonzero(tokens)[0])
        sums = {
            **self.by_lag.over(),
            **{f"{k}_young": v for k, v in self.by_lag.over([2 * least, 2 * least + 1]).items()},
        }
        found = []
        for name in ADDITIVE:
            young, rest = (figure(sums, f) for f in (youngest(name), older(name)))
            on = {"tokens": sums["tokens_young"]}
            if least == 0:
                how = "tokens of lag 0; older tokens are taken to have as much of it"
                found.append(determined("engine", name, young, on, how))
                how = "older tokens less those of lag 0"
                found.append(determined("lag", name, rest, sums, how))
            else:
                how = f"no token is younger than lag {least}, whose mismatch may be either's"
                top = figure(sums, mean(name)).value
                found.append(bounded("engine", name, (0.0, young.value), on, how))
                found.append(bounded("lag", name, (rest.value, top), sums, how))
        return found

    def _of_cache(self) -> list[Part]:
        """Tokens after an update in their response against others of the same lag."""
        tables = {
            name: table.reshape(BUCKETS, LAGS, 2)[:, :UNAGED]
            for name, table in self.by_lag.table.items()
        }
        counts = tables["tokens"].sum(0)
        both = (counts > 0).all(1)
        if not both.any():
            return []
        sums = {**self.by_lag.over()}
        for name, table in tables.items():
            sums[f"{name}_kept"], sums[f"{name}_after"] = table[:, both, 0], table[:, both, 1]
        on = {"tokens": sums["tokens_after"]}
        how = "tokens after an update beside others of their lag; later places may differ anyway"
        return [determined("cache", name, figure(sums, after(name)), on, how) for name in ADDITIVE]

    def _of_passes(self) -> list[Part]:
        sums = self.before.over()
        if not sums["tokens"].any():
            return []
        how = "the latest log-probabilities less those before the update, the latter undone last"
        return [
            determined(
                "passes",
                name,
                figure(sums, later(name)),
                sums,
                how,
            )
            for name in MEASURES
        ]

    def _of_edges(self) -> list[Part]:
        inner, outer = self.by_edge.over(0), self.by_edge.over(1)
        if not outer["tokens"].any() or not inner["tokens"].any():
            return []
        sums = {**inner, **{f"{name}_edge": table for name, table in outer.items()}}
        how = (
            f"tokens beside one of the {self.tools:,} that no policy chose, in {self.turns:,} "
            f"turns of {self.responses:,} responses, beyond what the others show"
        )
        return [
            determined("turn edges", name, figure(sums, beside(name)), outer, how)
            for name in ADDITIVE
        ]

    def _of_settings(self) -> list[Part]:
        sums = self.settings.over()
        if not sums["tokens"].any():
            return []
        share = {**sums, "all": self.by_lag.over()["tokens"]}
        low, high = (float(share[name].sum() / share["all"].sum()) for name in ("low", "high"))
        if sums["boundless"].any() or low < 0:
            low = 0.0  # a divergence
        where = {True: "beyond `all`", False: "within `all`", None: "within `all` or beyond it"}
        place = where[next(iter(self.outside))] if len(self.outside) == 1 else where[None]
        how = (
            f"temperature, top-p and top-k that the trainer does not apply, {place}: bounded by "
            "the sum of squared probabilities, the mass kept and the likeliest tokens"
        )
        top = None if sums["unbounded"].any() else high
        return [bounded("sampling", "k1", (low, top), sums, how)]


def mean(name: str) -> Callable[[Sum], np.ndarray]:
    """A measure a token."""
    return lambda s: s[name] / s["tokens"]


def youngest(name: str) -> Callable[[Sum], np.ndarray]:
    """A measure of a young token."""
    return lambda s: s[f"{name}_young"] / s["tokens_young"]


def older(name: str) -> Callable[[Sum], np.ndarray]:
    """What all tokens have beyond the young ones, a token."""
    return lambda s: s[name] / s["tokens"] - s[f"{name}_young"] / s["tokens_young"]


def later(name: str) -> Callable[[Sum], np.ndarray]:
    """What the latest log-probabilities add to those before the update, a token."""
    return lambda s: (s[name] - s[f"{name}_before"]) / s["tokens"]


def after(name: str) -> Callable[[Sum], np.ndarray]:
    """What tokens after an update have beyond others of their lag, a token of all."""

    def value(s: Sum) -> np.ndarray:
        kept = s[f"{name}_kept"] / s["tokens_kept"]
        excess = s[f"{name}_after"] - s["tokens_after"] * kept
        return excess.sum(-1) / s["tokens"]

    return value


def beside(name: str) -> Callable[[Sum], np.ndarray]:
    """What tokens at the edges of turns have beyond the others, a token of all."""

    def value(s: Sum) -> np.ndarray:
        excess = s[f"{name}_edge"] - s["tokens_edge"] * s[name] / s["tokens"]
        return excess / (s["tokens"] + s["tokens_edge"])

    return value


def determined(cause: str, measure: str, found: Figure, sums: Sum, how: str) -> Part:
    """A part that the dump tells."""
    return _part(cause, measure, (found.value, found.value), found.error, sums, how)


def bounded(
    cause: str, measure: str, ends: tuple[float | None, float | None], sums: Sum, how: str
) -> Part:
    """A part that the dump bounds."""
    return _part(cause, measure, ends, None, sums, how)


def _part(
    cause: str,
    measure: str,
    ends: tuple[float | None, float | None],
    error: float | None,
    sums: Sum,
    how: str,
) -> Part:
    return {
        "cause": cause,
        "measure": measure,
        "low": ends[0],
        "high": ends[1],
        "error": error,
        "tokens": int(sums["tokens"].sum()),
        "how": how,
    }


def turns(row: Row) -> int:
    """Runs of tokens that the policy chose."""
    return 1 if row.whole else int(np.diff(row.mask, prepend=False).sum() + 1) // 2


def edge(mask: Bool[np.ndarray, " T"]) -> np.ndarray:
    """For each trainable token 1 where it stands beside a tool's token, 0 elsewhere.

    Example:
        >>> edge(np.array([True, True, False, True, True])).tolist()
        [0, 1, 1, 0]
    """
    before = np.concatenate([[True], mask[:-1]])
    behind = np.concatenate([mask[1:], [True]])
    return (~before | ~behind)[mask].astype(int)


def plain(row: Row) -> bool:
    """Whether temperature, top-p and top-k change nothing, or the dump does not tell."""
    return (
        (row.temperature is None or row.temperature == 1)
        and (row.top_p is None or row.top_p == 1)
        and not limited(row)
    )


def limited(row: Row) -> bool:
    """Whether top-k cuts; 0 and -1 are engines' words for no limit."""
    return row.top_k is not None and row.top_k > 0


def sampling(row: Row) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Least and largest k1 of the sampling settings, a trainable token each.

        k1 = (a - 1) log pi(y) - log S(a) - log kept,   a = 1 / T, S(a) = sum over v of pi(v)^a

    S(a) is known for a = 1 and 2 and bounded by c = S(2) elsewhere, as log S is convex in a and
    S(a)^(1/a) falls in a: for 1 < a < 2, c^(a/2) <= S(a) <= c^(a - 1); for a > 2 the other way
    round; for a < 1, S(a) is at least c^(a - 1) and has no upper bound, so that k1 has no lower
    one.  At T = 0 the sampler's choice is certain: k1 = -log pi(y).  The mass kept is at most 1, at
    least top_p, and where a >= 1 at least the likeliest token's, which is at least c.  pi(y) is the
    sampler's where that is recorded before the settings, else the trainer's; c is the trainer's.
    """
    logp = row.behavior_logp if row.raw is True else policy(row)
    assert logp is not None
    y = logp[row.mask]
    if row.temperature == 0:
        return -y, -y
    square = row.probability_square
    with np.errstate(divide="ignore"):
        c = np.full(len(y), -math.inf) if square is None else np.log(square[row.mask])
    a = 1 / row.temperature if row.temperature else 1.0
    with np.errstate(invalid="ignore"):
        least, most = _of_power(a, c)
    least_kept, most_kept = _of_cut(row, a, c)
    middle = (a - 1) * y
    return middle - most - most_kept, middle - least - least_kept


def _of_cut(
    row: Row, a: float, c: Float[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Least and largest logarithm of the mass that top-p and top-k keep."""
    cut_p, cut_k = row.top_p is not None and row.top_p < 1, limited(row)
    nothing = np.zeros_like(c)
    if not cut_p and not cut_k:
        return nothing, nothing
    least = np.full_like(c, -math.inf if cut_k or not row.top_p else math.log(row.top_p))
    if a >= 1:
        least = np.maximum(least, c)
    if a != 1 or cut_p == cut_k or row.raw is not True or row.head_behavior_logp is None:
        return least, nothing
    mass, exact = _of_head(row, row.head_behavior_logp[row.mask])
    return np.where(exact, mass, np.maximum(least, mass)), np.where(exact, mass, 0.0)


def _of_power(a: float, c: Float[np.ndarray, " N"]) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest log S(a) from log S(2)."""
    if a == 1:
        return np.zeros_like(c), np.zeros_like(c)
    if a < 1:
        return np.where(np.isfinite(c), (a - 1) * c, 0.0), np.full_like(c, math.inf)
    ends = a / 2 * c, (a - 1) * c
    known = np.isfinite(c)
    least = np.where(known, np.minimum(*ends), -math.inf)
    return least, np.where(known, np.maximum(*ends), 0.0)


def _of_head(
    row: Row, head: Float[np.ndarray, "N K"]
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Logarithm of the mass of the likeliest tokens up to the cut, and whether the head reaches it.

    Args:
        row: whose sampler has top-p or top-k, not both, and temperature 1.
        head: log-probabilities of the likeliest tokens, before the cut.
    """
    total = np.exp(np.sort(head, axis=1)[:, ::-1]).cumsum(1)
    width = total.shape[1]
    if row.top_k is not None and limited(row):
        exact = np.full(len(total), width >= row.top_k)
        last = np.full(len(total), min(row.top_k, width) - 1)
    else:
        reached = total >= (row.top_p or 1.0)
        exact, last = reached.any(1), np.where(reached.any(1), reached.argmax(1), width - 1)
    return np.log(np.minimum(total[np.arange(len(total)), last], 1.0)), exact
