"""What must not matter, on random logged rows: orders, padding, absence, partition, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.audit.logged import (
    Logged,
    Subject,
    at_shares,
    gap,
    picks,
    random_rows,
    run,
    scored,
    trainable,
)
from windage.analysis.audit.rows import SHOWS_ABOVE, Finding, worst
from windage.estimators.batch import HEAD_FIELDS, TOKEN_FIELDS, Batch
from windage.estimators.catalogue import CATALOGUE

NOTHING = 0.0
FAR = 1e4
Check = Callable[[Subject, int], Finding | None]


def _shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def row_order(subject: Subject, seed: int) -> Finding:
    """Reverse and shuffle rows; each row's coefficients must come back with it."""
    rows = random_rows(seed)
    plain = _by_row(subject, rows)
    found = []
    count = len(rows.groups)
    for words, order in (
        ("rows reversed", list(range(count))[::-1]),
        ("rows shuffled", _shuffled(count, seed + 1)),
        ("groups one after the other", sorted(range(count), key=rows.groups.__getitem__)),
    ):
        moved = _by_row(subject, rows.pick(order))
        size = max(gap(moved[k], plain[i]) for k, i in enumerate(order))
        found.append(Finding(size=size, witness=f"random rows (seed {seed}), {words}"))
    return worst(found)


def _by_row(subject: Subject, rows: Logged) -> list[Tensor]:
    batch = rows.batch(subject)
    found = subject.whole(subject.ready, batch)
    own, mask = batch.to_rows(found.own), batch.to_rows(batch.mask)
    return [o[m] for o, m in zip(own, mask, strict=True)]


def _filled(batch: Batch, value: float, extra: int) -> Batch:
    """The batch with a value under every False mask, and `extra` more columns of it."""
    pad = (0, extra)
    mask = torch.nn.functional.pad(batch.mask, pad, value=False)
    changes: dict[str, Any] = {"mask": mask}
    for name in (*TOKEN_FIELDS, *HEAD_FIELDS):
        old = getattr(batch, name)
        if old is None:
            continue
        deep = name in HEAD_FIELDS
        wide = torch.nn.functional.pad(old, (0, 0, *pad) if deep else pad)
        if not old.is_floating_point() and not abs(value) < 1e9:
            changes[name] = wide
            continue
        where = mask.unsqueeze(-1) if deep else mask
        changes[name] = torch.where(where, wide, torch.full_like(wide, value))
    return replace(batch, **changes)


def padding(subject: Subject, seed: int) -> Finding:
    """Fill padding and tool tokens with garbage and NaN, and widen the batch."""
    rows = random_rows(seed)
    batch = rows.batch(subject)
    plain = trainable(subject.whole(subject.ready, batch), batch)
    found = []
    for value, extra in ((7.0, 0), (math.nan, 0), (-1e30, 0), (0.0, 3), (math.nan, 3)):
        filled = _filled(batch, value, extra)
        size = gap(trainable(subject.whole(subject.ready, filled), filled), plain)
        words = f"padding of {value:g}, {extra} more columns"
        found.append(Finding(size=size, witness=f"random rows (seed {seed}), {words}"))
    return worst(found)


def masked_tokens(subject: Subject, seed: int) -> Finding:
    """Take out every masked token, or put more in at random places: nothing may change."""
    rows = random_rows(seed)
    plain = run(subject, rows)
    found = []
    for words, places in (("left out", _kept(rows)), ("added", _stuffed(rows, seed))):
        size = gap(run(subject, _at(rows, places)), plain)
        witness = f"random rows (seed {seed}), tokens with a False mask {words}"
        found.append(Finding(size=size, witness=witness))
    return worst(found)


def _kept(rows: Logged) -> list[list[int]]:
    return [[t for t, m in enumerate(row) if m] for row in rows.mask]


def _stuffed(rows: Logged, seed: int) -> list[list[int]]:
    """Positions of each row with masked newcomers (-1) among them."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for row in rows.mask:
        places = list(range(len(row)))
        for _ in range(2):
            places.insert(int(torch.randint(0, len(places) + 1, (), generator=generator)), -1)
        out.append(places)
    return out


def _at(rows: Logged, places: list[list[int]]) -> Logged:
    """The rows at chosen positions; -1 is a masked token that holds another's numbers."""

    def moved(column: list[Any], row: int, *, is_mask: bool = False) -> Any:
        cells: list[Any] = [0 if is_mask and t < 0 else column[row][t] for t in places[row]]
        return torch.stack(cells) if cells and isinstance(cells[0], Tensor) else cells

    count = range(len(places))
    return replace(
        rows,
        mask=[moved(rows.mask, i, is_mask=True) for i in count],
        columns={n: [moved(c, i) for i in count] for n, c in rows.columns.items()},
    )


def absent_rows(subject: Subject, seed: int) -> Finding:
    """Rows that never arrived against a log without them; their numbers are NaN or garbage."""
    rows = random_rows(seed)
    gone = next(i for i, g in enumerate(rows.groups) if g == 0)
    absent = replace(rows, rewards=[None if i == gone else r for i, r in enumerate(rows.rewards)])
    left = rows.pick([i for i in range(len(rows.groups)) if i != gone])
    plain = run(subject, left)
    batch = absent.batch(subject)
    found = []
    for value in (NOTHING, 1e3, math.nan):
        rewards = torch.where(batch.get("present"), batch.rewards, value)
        filled = scored(batch, rewards)
        size = gap(trainable(subject.whole(subject.ready, filled), filled), plain)
        witness = f"random rows (seed {seed}), one absent with reward {value:g}"
        found.append(Finding(size=size, witness=witness))
    return worst(found)


def partition(subject: Subject, seed: int) -> Finding:
    """Micro-batches of one or two prompts, and ranks, against the whole batch."""
    rows = random_rows(seed)
    batch = rows.batch(subject)
    whole = subject.whole(subject.ready, batch)
    found = []
    for parts in ([slice(0, 1), slice(1, 3)], [slice(0, 2), slice(2, 3)]):
        pieces = subject.slices(subject.ready, batch, parts)
        size = gap(torch.cat([piece.own for piece in pieces]), whole.own)
        if whole.head is not None:
            heads = [piece.head for piece in pieces if piece.head is not None]
            size = max(size, gap(torch.cat(heads), whole.head))
        sizes = " and ".join(str(p.stop - p.start) for p in parts)
        witness = f"random rows (seed {seed}), micro-batches of {sizes} prompts"
        found.append(Finding(size=size, witness=witness))
    return worst(found)


def other_groups(subject: Subject, seed: int) -> Finding:
    """Change one prompt's rewards: others keep their coefficients, unless the scope is batch.

    One that picks a share of the batch's tokens by their advantages is asked for several shares.
    """
    rows = random_rows(seed)
    changed = replace(
        rows,
        rewards=[
            r if r is None or g != 0 else r * r - 1.0
            for r, g in zip(rows.rewards, rows.groups, strict=True)
        ],
    )
    size = 0.0
    for one in at_shares(subject):
        before, after = _by_row(one, rows), _by_row(one, changed)
        gaps = (gap(a, b) for a, b, g in zip(after, before, rows.groups, strict=True) if g != 0)
        size = max(size, *gaps)
        if size > SHOWS_ABOVE:
            break
    witness = f"random rows (seed {seed}), other rewards in group 0"
    published = CATALOGUE.get(subject.estimator.name, subject.estimator)
    if published.advantage.traits.scope == "batch" or picks(published):
        moved = size > SHOWS_ABOVE
        return Finding(size=0.0 if moved else math.inf, witness=witness, found=f"moved by {size:g}")
    return Finding(size=size, witness=witness)


def rejected_rows(subject: Subject, seed: int) -> Finding | None:
    """With some responses rejected, the rest must be as without any admission."""
    estimator = subject.ready
    if not estimator.admission:
        return None
    if "max_lag" in estimator.settings:
        estimator = estimator.change(max_lag=2)
    rows = random_rows(seed)
    rewards = [0.5 if g == 1 else r for r, g in zip(rows.rewards, rows.groups, strict=True)]
    batch = replace(rows, rewards=rewards).batch(subject)
    found = subject.whole(estimator, batch)
    free = subject.whole(replace(estimator, admission=()), batch)
    kept = (found.terms.reason == 0).unsqueeze(-1)
    size = gap(torch.where(kept, found.own, 0.0), torch.where(kept, free.own, 0.0))
    leaked = float(torch.where(kept, 0.0, found.own).abs().max())
    if bool(kept.all()):
        size = math.inf
    names = ", ".join(m.describe() for m in estimator.admission)
    return Finding(size=max(size, leaked), witness=f"random rows (seed {seed}), {names}")


def rises_with_reward(subject: Subject, seed: int) -> Finding:
    """Raise one response's reward at a time; its own advantage may not fall, and some must rise."""
    rows = random_rows(seed)
    batch = rows.batch(subject)

    def advantages(one: Batch) -> Tensor:
        terms = subject.whole(subject.ready, one).terms
        return torch.where(one.mask, terms.advantages, 0.0).sum(-1)

    before = advantages(batch)
    lowest, highest = math.inf, -math.inf
    for p, g in torch.nonzero(batch.get("present")).tolist()[::2]:
        rewards = batch.rewards.clone()
        rewards[p, g] += 0.5
        change = float((advantages(scored(batch, rewards)) - before)[p, g])
        lowest, highest = min(lowest, change), max(highest, change)
    size = max(0.0, -lowest) if highest > 0 else math.inf
    return Finding(size=size, witness=f"random rows (seed {seed}), one reward raised by 0.5")


def empty_rows(subject: Subject, seed: int) -> Finding:
    """A response without tokens, and one of masked tokens: alike, and no loss to its siblings."""
    rows = random_rows(seed)
    hollow = next(i for i, g in enumerate(rows.groups) if g == 0)

    def hollowed(places: list[int]) -> Logged:
        kept = [list(range(len(row))) if i != hollow else places for i, row in enumerate(rows.mask)]
        return _at(rows, kept)

    def advantages(log: Logged) -> list[Tensor]:
        batch = log.batch(subject)
        terms = subject.whole(subject.ready, batch).terms
        mask = batch.to_rows(batch.mask)
        wide = batch.to_rows(terms.advantages.expand(batch.mask.shape))
        return [a[m] for i, (a, m) in enumerate(zip(wide, mask, strict=True)) if i != hollow]

    masked, empty = hollowed([-1, -1]), hollowed([])
    size = gap(run(subject, masked), run(subject, empty))
    by_length = {"lengths", "mask"} & set(subject.estimator.advantage.traits.needs)
    if not (by_length and subject.estimator.advantage.traits.scope in ("group", "batch")):
        size = max(size, gap(torch.cat(advantages(empty)), torch.cat(advantages(rows))))
    every = _at(rows, [[-1, -1] for _ in rows.mask])
    batch = every.batch(subject)
    found = subject.whole(subject.ready, batch)
    size = max(size, gap(found.own, torch.zeros_like(found.own)) if found.own.numel() else 0.0)
    return Finding(size=size, witness=f"random rows (seed {seed}), one empty, one or all masked")


def lone_rows(subject: Subject, seed: int) -> Finding | None:
    """A requested group of one is an error; a lone survivor of a larger group adds nothing."""
    if not subject.estimator.compares:
        return None
    rows = random_rows(seed, sizes=(1, 3))
    survivor = rows.batch(subject)
    found = subject.whole(subject.ready, survivor)
    alone = rows.groups.index(0)
    own = survivor.to_rows(found.own)[alone]
    size = float(own.abs().max()) if bool(torch.isfinite(own).all()) else math.inf
    witness = f"random rows (seed {seed}), one of three arrived"
    try:
        subject.whole(subject.ready, replace(rows, group_size=1).batch(subject))
    except ValueError as refusal:
        return Finding(size=size, witness=witness, found=f"group of one: {refusal}")
    return Finding(size=math.inf, witness="a group of one response was accepted")


def extremes(subject: Subject, seed: int) -> Finding:
    """Ratios of e^+-10000 and -inf in single tokens: finite numbers or a ValueError."""
    rows = random_rows(seed)
    outcomes, size = [], 0.0
    for words, logp, behavior in (
        ("e^10000", -1.0, -1.0 - FAR),
        ("e^-10000", -1.0 - FAR, -1.0),
        ("-inf in logp", -math.inf, -1.0),
        ("-inf in behavior_logp", -1.0, -math.inf),
    ):
        for positive in (True, False):
            place = max(range(len(rows.mask)), key=lambda i: _signed(rows, i, positive))
            try:
                found = run(subject, _replaced(rows, place, logp, behavior))
            except ValueError:
                outcomes.append(f"{words}: refused")
                continue
            finite = bool(torch.isfinite(found).all())
            size = size if finite else math.inf
            outcomes.append(f"{words}: {'finite' if finite else 'not finite'}")
    words = "; ".join(dict.fromkeys(outcomes))
    return Finding(size=size, witness=f"random rows (seed {seed}), one extreme token", found=words)


def _signed(rows: Logged, row: int, positive: bool) -> float:
    reward = rows.rewards[row] or 0.0
    return reward if positive else -reward


def _replaced(rows: Logged, row: int, logp: float, behavior: float) -> Logged:
    token = rows.mask[row].index(1)
    columns = dict(rows.columns)
    for name, value in (("logp", logp), ("behavior_logp", behavior)):
        column = [list(entry) for entry in columns[name]]
        column[row][token] = value
        columns[name] = column
    return replace(rows, columns=columns)


CHECKS: Mapping[str, Check] = {
    function.__name__: function
    for function in (
        row_order,
        padding,
        masked_tokens,
        absent_rows,
        partition,
        other_groups,
        rejected_rows,
        rises_with_reward,
        empty_rows,
        lone_rows,
        extremes,
    )
}
