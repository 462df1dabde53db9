"""Which estimators a dump supports: what each would have made of its groups.

Every entry of the catalogue gives its coefficients to the same groups.  With d the update by the
logits of each token (`estimators.agreement`), 0 the plain `rloo` and R the reference,

    scale      <d, d0> / |d0|^2                         progress a step along the plain update
    noise      |d|^2 / (scale^2 |d0|^2)                 power for equal progress, 1 at least
    bias       |d / scale - dR / scale_R| / |d0|        distance from the update that is unbiased

Power, the mean square of the update, is its variance as long as the mean is small beside it, as for
single responses; each token has its own context, so responses add up without cross terms.  The
distance bounds what the mean can differ by (Jensen) and is a proxy for it: it is 0 for the
reference, and for the others grows with the chi-square divergence that they leave uncorrected.
Where tokens share parameters, only the order is meant; benchmarks/support.py measures how well both
proxies order the entries on problems whose bias and variance are exact.

Progress is agreement with the plain update token by token, noise included, so no entry has less
noise than it.  That is fair between entries that differ by their correction.  One that weighs
responses otherwise, by their lengths or by the spread of their group, may reach the same mean with
less noise; what it reaches shows only between responses, by pi of every token, which no dump holds.
`ranking` compares the noise of entries only where they are alike without their corrections.
Where the dump holds the head of both sides, an update includes what centering adds on head tokens.
The reference is the ratio of whole responses where its tail can bear it, else of tokens, which
leaves out how prefixes were reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.analysis.diagnose.blocks import measurable, policy
from windage.analysis.diagnose.drift import headed, of_head
from windage.analysis.diagnose.groups import Sample
from windage.analysis.diagnose.mismatch import Kept, truncated
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import Figure, bucket
from windage.analysis.diagnose.tails import Tail, threshold
from windage.estimators.advantage import constant
from windage.estimators.agreement import (
    Space,
    direction,
    gram,
    inner,
    score_bounds,
    signal_to_noise,
    space,
)
from windage.estimators.batch import HEAD_FIELDS, Batch
from windage.estimators.catalogue import CATALOGUE
from windage.estimators.diagnostics import effective_log_ratio
from windage.estimators.estimator import Coefficients, Estimator
from windage.estimators.member import use
from windage.estimators.metrics import NAMES
from windage.estimators.moments import of_weights, score_norms

PARTS = 16
PLAIN, TOKEN, WHOLE = "rloo", "token_is", "trajectory_is"
FEWEST = 4
AFTER = ("weight/ess", "weight/ess_response", "weight/max", "clip/share", "clip/mass_positive",
         "clip/mass_negative", "admission/admitted")  # fmt: skip
NO_HEAD = (
    "centers on the trainer's log-probabilities of the sampler's head, which the dump lacks; "
    "--rescore MODEL --write FILE makes a dump that has them"
)
NO_SQUARE = "centers, and the dump lacks sum(pi^2), without which a head's update has no norm"


# Inner products of updates, by two names.
Products = dict[str, dict[str, float]]


@final
@dataclass(frozen=True, kw_only=True)
class Found:
    """What an entry made of the sample.

    Args:
        sums: `count`, `size`, `square` of its coefficients, by part.
        most: largest coefficient.
        tail: shape of the tail of its weights, and `limit` up to which it can be trusted.
        weights: what the correction did to the ratios.
        signal: to noise, by part.
    """

    sums: Mapping[str, np.ndarray]
    most: float
    tail: float | None
    limit: float
    weights: Mapping[str, Figure]
    signal: np.ndarray


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Support:
    """Every entry on the same groups.

    Args:
        names: of the entries that the dump serves.
        gram: inner products of their updates, by part.
        alike: cosines of what they were without correction and centering: advantages times
            aggregation.
        found: the rest, by name.
        excluded: reason by name.
        reference: whose update counts as unbiased.
        advantages: `of each entry`, or `as recorded`.
        exact_norms: sum(pi^2) was recorded.
        responses, tokens, groups: of the sample.
        row_of: place of a name.
    """

    names: tuple[str, ...]
    gram: Float[np.ndarray, "B E E"]
    alike: Float[np.ndarray, "E E"]
    found: Mapping[str, Found]
    excluded: Mapping[str, str]
    reference: str
    advantages: str
    exact_norms: bool
    responses: int
    tokens: int
    groups: int
    row_of: Mapping[str, int] = field(default_factory=dict)


def entries(names: Iterable[str], longest: int, recorded: bool) -> dict[str, Estimator]:
    """Entries with the dump's length; with advantages as recorded where there is no reward.

    Args:
        names: of the catalogue.
        longest: response of the dump, in tokens.
        recorded: take the framework's advantages for those of each entry.
    """
    out = {}
    for name in names:
        entry = of_head(CATALOGUE[name])
        if "length" in entry.settings and entry.settings["length"] is None and name != "dapo":
            entry = entry.change(length=longest)
        if recorded:
            entry = replace(entry, advantage=use(constant), admission=())
        out[name] = entry
    return out


def batch_of(groups: Sequence[Sequence[Row]], recorded: bool) -> Batch:
    """The groups as the record that stages read; versions count back from the trained one.

    Args:
        groups: of measurable rows.
        recorded: the advantages are taken for rewards.
    """
    flat = [(str(number), row) for number, rows in enumerate(groups) for row in rows]
    rows = [row for _, row in flat]
    columns: dict[str, Any] = {
        "logp": [policy(row) for row in rows],
        "behavior_logp": [row.behavior_logp for row in rows],
    }
    for name in ("proximal_logp", "reference_logp", "probability_square"):
        if all(getattr(row, name) is not None for row in rows):
            columns[name] = [getattr(row, name) for row in rows]
    columns |= _heads(rows)
    for name, values in columns.items():
        if name not in HEAD_FIELDS:
            fitting = zip(rows, values, strict=True)
            columns[name] = [np.where(r.mask, v, 0.0) for r, v in fitting]
    if all(row.versions is not None and row.current_version is not None for row in rows):
        columns["versions"] = [row.versions - row.current_version for row in rows]  # type: ignore[operator]
    if all(row.finish_reason is not None for row in rows):
        columns["truncated"] = [truncated(row) for row in rows]
    if all(row.elapsed is not None for row in rows):
        columns["elapsed"] = [row.elapsed for row in rows]
    if recorded:
        rewards: list[float | None] = [advantage(row) for row in rows]
    else:
        rewards = [row.reward for row in rows]
        if all(row.outcome is not None for row in rows):
            columns["outcomes"] = [row.outcome for row in rows]
    return Batch.from_rows(
        rewards,
        [name for name, _ in flat],
        mask=[row.mask.tolist() for row in rows],
        current_version=0,
        **columns,
    )


def _heads(rows: Sequence[Row]) -> dict[str, list[Tensor]]:
    """Heads of one width, where every response has one and ids; a shorter one ends in nothing."""
    if not rows or not all(headed(row) and row.response_ids is not None for row in rows):
        return {}
    width = max(row.head_logp.shape[1] for row in rows)  # type: ignore[union-attr]

    def filled(values: np.ndarray, nothing: float) -> Tensor:
        short = width - values.shape[1]
        return torch.from_numpy(np.pad(values, ((0, 0), (0, short)), constant_values=nothing))

    return {
        name: [filled(getattr(row, name), -1 if name == "head_ids" else -math.inf) for row in rows]
        for name in HEAD_FIELDS
    }


def advantage(row: Row) -> float | None:
    """The recorded advantage, where all tokens of a response have the same."""
    if row.advantages is None:
        return None
    held = row.advantages[row.mask]
    same = len(held) and np.ptp(held) <= 1e-6 * max(1.0, float(np.abs(held).max()))
    return float(held[0]) if same else None


def refusal(entry: Estimator, batch: Batch, recorded: bool) -> str | None:
    """Why an entry cannot be served, or None."""
    if entry.centering is not None and batch.head_logp is None:
        return NO_HEAD
    if entry.centering is not None and batch.probability_square is None:
        return NO_SQUARE
    if recorded and entry.active_penalties:
        return "has a penalty beside the advantage, and only the framework's advantages are known"
    missing = [name for name in entry.needs_beside_admission if getattr(batch, name) is None]
    if missing:
        return f"needs {', '.join(missing)}, which the dump lacks"
    return None


def support(sample: Sample, names: Iterable[str] = tuple(CATALOGUE)) -> Support | str:
    """What every entry makes of a sample of groups; a sentence where nothing can be said.

    Args:
        sample: of the dump.
        names: of entries; `rloo`, `token_is` and `trajectory_is`, the yardsticks, always are.
    """
    groups = {n: [r for r in rows if measurable(r)] for n, rows in sample.groups.items()}
    groups = {n: rows for n, rows in groups.items() if rows}
    every = [row for rows in groups.values() for row in rows]
    if not every:
        return "no response has log-probabilities of both trainer and sampler"
    scored = any(row.reward is not None for row in every)
    grouped = sum(len(rows) > 1 for rows in groups.values())
    recorded = not scored or not grouped
    if not recorded:
        groups = {n: rows for n, rows in groups.items() if len(rows) > 1}
    else:
        groups = {
            n: [r for r in rows if advantage(r) is not None or (scored and r.reward is not None)]
            for n, rows in groups.items()
        }
        groups = {n: rows for n, rows in groups.items() if rows}
        if not any(row.advantages is not None for rows in groups.values() for row in rows):
            return "neither rewards of groups nor advantages of responses are recorded"
    parts: list[list[list[Row]]] = [[] for _ in range(PARTS)]
    for name, rows in groups.items():
        parts[bucket(name) % PARTS].append(rows)
    wanted = dict.fromkeys([PLAIN, TOKEN, WHOLE, *names])
    return _measured([part for part in parts if part], wanted, recorded)


def _wanted(
    batches: Sequence[Batch], names: Iterable[str], recorded: bool
) -> tuple[dict[str, Estimator], dict[str, str]]:
    """Entries that the dump serves, and why not the others."""
    longest = max(batch.mask.shape[-1] for batch in batches)
    wanted, excluded = {}, {}
    for name, entry in entries(names, longest, recorded).items():
        why = next((w for b in batches if (w := refusal(entry, b, recorded))), None)
        if why is None:
            wanted[name] = entry
        else:
            excluded[name] = why
    return wanted, excluded


@torch.no_grad()
def _measured(
    parts: Sequence[Sequence[Sequence[Row]]], names: Iterable[str], recorded: bool
) -> Support:
    batches = [batch_of(part, recorded) for part in parts]
    wanted, excluded = _wanted(batches, names, recorded)
    runs = {name: _Run() for name in wanted}
    tables: list[Products] = []
    plain: list[Products] = []
    for number, (batch, part) in enumerate(zip(batches, parts, strict=True)):
        each: dict[str, Coefficients] = {}
        ids = _ids(batch, part)
        told = ids is not None and batch.probability_square is not None
        at = space(batch, ids) if told else None
        for name, entry in list(wanted.items()):
            try:
                made = entry(batch)
            except ValueError as problem:
                excluded[name] = " ".join(str(problem).split())
                del wanted[name], runs[name]
                continue
            each[name] = made
            runs[name].add(entry, batch, made, at, number)
        tables.append(products(each, batch, at))
        plain.append(products({n: uncorrected(made, batch) for n, made in each.items()}, batch))
    table, bare = (
        np.array([[[one[a][b] for b in wanted] for a in wanted] for one in several])
        for several in (tables, plain)
    )
    found = {name: runs[name].found() for name in wanted}
    whole = found.get(WHOLE)
    steady = whole is not None and (whole.tail is None or whole.tail < whole.limit)
    return Support(
        names=tuple(wanted),
        gram=table,
        alike=cosine(bare.sum(0)),
        found=found,
        excluded=excluded,
        reference=WHOLE if steady else TOKEN,
        advantages="as recorded" if recorded else "of each entry",
        exact_norms=all(batch.probability_square is not None for batch in batches),
        responses=sum(len(group) for part in parts for group in part),
        tokens=int(sum(batch.mask.sum() for batch in batches)),
        groups=sum(len(part) for part in parts),
        row_of={name: number for number, name in enumerate(wanted)},
    )


def uncorrected(made: Coefficients, batch: Batch) -> Coefficients:
    """The coefficients without correction, centering and penalties: advantage times aggregation."""
    admitted = (made.terms.reason == 0).unsqueeze(-1)
    bare = made.terms.advantages * made.terms.scale.unsqueeze(-1)
    bare = torch.where(admitted & batch.mask, bare, 0.0).to(made.own.dtype)
    return replace(made, own=bare, head=None)


def products(made: Mapping[str, Coefficients], batch: Batch, at: Space | None = None) -> Products:
    """Inner products of all pairs of updates, those of head tokens included."""
    names = list(made)
    own = torch.stack([one.own[batch.mask].double() for one in made.values()])
    table = gram(own, norms_of(batch))
    heads = [i for i, name in enumerate(names) if made[name].head is not None]
    if heads and at is not None:
        ways = [direction(one, batch, at) for one in made.values()]
        for i in heads:
            for j, way in enumerate(ways):
                scale = ways[i].scale * way.scale
                table[i, j] = table[j, i] = float(inner(ways[i], way, at)) * scale
    return {name: dict(zip(names, table[i].tolist(), strict=True)) for i, name in enumerate(names)}


def norms_of(batch: Batch) -> Float[Tensor, " N"]:
    """Squared norms of the scores, or the lower bound of them where sum(pi^2) is not recorded."""
    if batch.probability_square is not None:
        return score_norms(batch)[batch.mask]
    return score_bounds(batch.get("logp")[batch.mask].double())[0]


def _ids(batch: Batch, part: Sequence[Sequence[Row]]) -> Tensor | None:
    """The sampled tokens, where all rows have them."""
    rows = [row for group in part for row in group]
    if any(row.response_ids is None for row in rows):
        return None
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    assert batch.row_index is not None
    for place in torch.nonzero(batch.row_index >= 0).tolist():
        row = rows[int(batch.row_index[tuple(place)])]
        ids[place[0], place[1], : len(row.mask)] = torch.from_numpy(
            np.asarray(row.response_ids, dtype=np.int64)
        )
    return ids


def independent(
    weights: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"]
) -> Float[Tensor, " N"]:
    """Weights of tokens, or one a response where all its tokens have the same."""
    low = torch.where(mask, weights, math.inf).amin(-1)
    high = torch.where(mask, weights, -math.inf).amax(-1)
    real = mask.any(-1)
    return weights[mask] if bool((high > low * (1 + 1e-9))[real].any()) else high[real]


@final
class _Run:
    """Sums over the parts, for one entry."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {"count": [], "size": [], "square": []}
        self.most, self.tail, self.kept = 0.0, Tail(), Kept()
        self.signal: list[float] = []

    def add(
        self, entry: Estimator, batch: Batch, made: Coefficients, at: Space | None, number: int
    ) -> None:
        own = made.own[batch.mask].double()
        self.sums["count"].append(float(len(own)))
        self.sums["size"].append(float(own.abs().sum()))
        self.sums["square"].append(float(own.square().sum()))
        self.most = max(self.most, float(own.abs().amax()) if len(own) else 0.0)
        weights = independent(made.weights, batch.mask)
        self.tail.add(weights[weights > 0].log().numpy())
        effective = effective_log_ratio(entry, batch, made.terms.advantages)
        self.kept.add(number, of_weights(batch, made, effective))
        if at is not None:
            ratio = signal_to_noise(direction(made, batch, at), at)
            self.signal.append(math.nan if ratio is None else ratio)

    def found(self) -> Found:
        return Found(
            sums={name: np.array(values) for name, values in self.sums.items()},
            most=self.most,
            tail=self.tail.shape(),
            limit=threshold(self.tail.count),
            weights=self.kept.figures(tuple(NAMES[name] for name in AFTER)),
            signal=np.array(self.signal),
        )


def left_out(table: np.ndarray) -> np.ndarray:
    """The sum over parts, then the sums without one part each."""
    whole = table.sum(0, keepdims=True)
    return np.concatenate([whole, whole - table]) if len(table) >= FEWEST else whole


def errors(values: np.ndarray) -> np.ndarray:
    """Jackknife over the replicates behind the first."""
    left = values[1:]
    if len(left) < FEWEST:
        return np.full(values.shape[1:], np.nan)
    return np.sqrt(((left - left.mean(0)) ** 2).sum(0) * (len(left) - 1) / len(left))


def geometry(made: Support) -> dict[str, np.ndarray]:
    """Scale, noise and squared bias of every entry, of the whole and with a part left out."""
    g = left_out(made.gram)
    plain, reference = made.row_of[PLAIN], made.row_of[made.reference]
    with np.errstate(all="ignore"):
        base = g[:, plain, plain][:, None]
        scale = g[:, :, plain] / base
        scale = np.where(scale > 1e-9, scale, np.nan)
        noise = np.diagonal(g, axis1=1, axis2=2) / (scale**2 * base)
        cross = g[:, :, reference] / (scale * scale[:, [reference]] * base)
        bias = np.maximum(noise + noise[:, [reference]] - 2 * cross, 0.0)
    bias[:, reference] = 0.0
    return {"scale": scale, "noise": noise, "bias_square": bias}


def cosines(made: Support) -> Float[np.ndarray, "E E"]:
    """Of all pairs of updates, by the logits; NaN where one is 0."""
    return cosine(made.gram.sum(0))


def cosine(table: Float[np.ndarray, "E E"]) -> Float[np.ndarray, "E E"]:
    """Of inner products; NaN where one is with 0."""
    size = np.sqrt(np.diagonal(table))
    with np.errstate(all="ignore"):
        return np.clip(table / np.outer(size, size), -1.0, 1.0)


def concentration(sums: Mapping[str, np.ndarray]) -> np.ndarray:
    """Effective number of coefficients as a share of the tokens, with parts left out."""
    count, size, square = (left_out(sums[name]) for name in ("count", "size", "square"))
    with np.errstate(all="ignore"):
        return size**2 / (count * square)


def estimate(values: np.ndarray) -> Figure:
    """A figure of replicates of which the first is the whole."""
    value = float(values[0])
    error = float(errors(values))
    sharp = not math.isfinite(error)
    return Figure(
        value=value if math.isfinite(value) else None,
        error=None if sharp else error,
        buckets=0 if sharp else len(values) - 1,
    )
