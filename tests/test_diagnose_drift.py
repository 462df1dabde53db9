"""Recipes that center, on a dump whose distributions are known: against updates written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_files import lines

from windage.analysis.diagnose import ranking, written
from windage.analysis.diagnose.document import collect
from windage.analysis.diagnose.drift import CENTERED, moved
from windage.analysis.diagnose.groups import Sample
from windage.analysis.diagnose.readers.index import read
from windage.analysis.diagnose.rows import Rejected, Row
from windage.analysis.diagnose.support import NO_HEAD, NO_SQUARE, support
from windage.estimators.batch import Batch
from windage.estimators.catalogue import CATALOGUE

VOCAB, HEAD, GROUPS = 7, 3, 24
NAMES = ("group_mean", *CENTERED)
World = list[tuple[Row, np.ndarray]]


def law(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    z = rng.normal(0, 1.2, shape)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def world() -> World:
    """Responses, and the trainer's distribution before each of their tokens."""
    rng = np.random.default_rng(3)
    found = []
    for n in range(4 * GROUPS):
        t = int(rng.integers(2, 6))
        p = law(rng, (t, VOCAB))
        q = p + rng.normal(0, 0.3, p.shape)
        q -= np.log(np.exp(q).sum(-1, keepdims=True))
        y = np.array([rng.choice(VOCAB, p=np.exp(one)) for one in q])
        head = np.argsort(-q, axis=1)[:, :HEAD]
        at = np.arange(t)
        row = Row(
            where=f"row {n}",
            mask=np.arange(t) != t - 2 if t > 3 else np.ones(t, bool),
            behavior_logp=q[at, y],
            logp=p[at, y],
            probability_square=np.exp(2 * p).sum(1),
            response_ids=y,
            versions=np.full(t, 3),
            current_version=4,
            group_id=str(n // 4),
            reward=float(rng.random() < 0.5),
            finish_reason="stop",
            head_ids=head,
            head_behavior_logp=np.take_along_axis(q, head, 1),
            head_logp=np.take_along_axis(p, head, 1),
        )
        found.append((row, p))
    return found


def made(rows: Any) -> Any:
    sample = Sample()
    sample.add(rows)
    return support(sample, NAMES)


def by_hand(world: World) -> tuple[list[str], np.ndarray]:
    """Inner products of updates by the logits of every token, each written out in full."""
    names = list(dict.fromkeys(["rloo", "token_is", "trajectory_is", *NAMES]))
    groups: dict[str, list[tuple[Row, np.ndarray]]] = {}
    for row, p in world:
        groups.setdefault(str(row.group_id), []).append((row, p))
    parts = {name: [] for name in names}
    for number in sorted({bucket_of(g) for g in groups}):
        own = [pair for g, pairs in groups.items() if bucket_of(g) == number for pair in pairs]
        rows = [row for row, _ in own]
        batch = Batch.from_rows(
            [row.reward for row in rows],
            [row.group_id for row in rows],
            mask=[row.mask.tolist() for row in rows],
            current_version=4,
            **{
                name: [torch.from_numpy(getattr(row, name)) for row in rows]
                for name in ("logp", "behavior_logp", "versions", "head_ids",
                             "head_behavior_logp", "head_logp")
            },
            truncated=[False] * len(rows),
        )  # fmt: skip
        longest = max(len(row.mask) for row, _ in world)
        for name in names:
            entry = CENTERED.get(name, CATALOGUE[name])
            if "length" in entry.settings:
                entry = entry.change(length=longest)
            coefficients = entry(batch)
            parts[name].append(updates(coefficients, batch, own))
    table = [[sum(float((a * b).sum()) for a, b in zip(parts[x], parts[y], strict=True))
              for y in names] for x in names]  # fmt: skip
    return names, np.array(table)


def bucket_of(group: str) -> int:
    from windage.analysis.diagnose.sums import bucket

    return bucket(group) % 16


def updates(coefficients: Any, batch: Batch, own: list[tuple[Row, np.ndarray]]) -> torch.Tensor:
    """Own * (e_y - pi) + sum over the head of h_v (e_v - pi), token after token."""
    out = []
    for p, g in np.ndindex(*batch.mask.shape[:2]):
        place = int(batch.row_index[p, g])
        if place < 0:
            continue
        row, logp = own[place]
        for t in np.flatnonzero(row.mask):
            pi = torch.from_numpy(np.exp(logp[t]))
            d = torch.zeros(VOCAB, dtype=torch.float64)
            pairs = [(int(row.response_ids[t]), coefficients.own[p, g, t])]
            if coefficients.head is not None:
                pairs += zip(row.head_ids[t].tolist(), coefficients.head[p, g, t], strict=True)
            for v, c in pairs:
                d[v] += c
                d -= c * pi
            out.append(d)
    return torch.stack(out)


def test_products_of_centered_updates_are_those_written_out(world: World) -> None:
    found = made(row for row, _ in world)
    names, wanted = by_hand(world)
    assert set(NAMES) <= set(found.names)
    order = [found.row_of[name] for name in names]
    ours = found.gram.sum(0)[np.ix_(order, order)]
    np.testing.assert_allclose(ours, wanted, rtol=1e-9, atol=1e-12)
    table = {row["estimator"]: row for row in ranking.rows(found)}
    assert all(table[name]["rank"] for name in CENTERED)
    assert table["centered"]["noise"] != pytest.approx(table["rloo"]["noise"], rel=1e-3)


def test_a_shorter_head_ends_in_nothing(world: World) -> None:
    """One response's head is shorter: the others' figures stay as finite, and all are served."""
    rows = [row for row, _ in world]
    short = {name: getattr(rows[0], name)[:, :2] for name in
             ("head_ids", "head_behavior_logp", "head_logp")}  # fmt: skip
    found = made([replace(rows[0], **short), *rows[1:]])
    assert set(CENTERED) <= set(found.names) and np.isfinite(found.gram).all()
    figures = collect([replace(rows[0], **short), *rows[1:]]).figures()
    assert figures["drift/centered"].value > 0.05


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_logp": None}, NO_HEAD),
        ({"head_behavior_logp": None}, NO_HEAD),
        ({"response_ids": None}, NO_HEAD),
        ({"raw": True}, NO_HEAD),
        ({"probability_square": None}, NO_SQUARE),
    ],
)
def test_what_centering_lacks_is_said(world: World, change: dict[str, Any], why: str) -> None:
    rows = [row for row, _ in world]
    found = made([*rows[:-1], replace(rows[-1], **change)])
    assert {found.excluded[name] for name in CENTERED} == {why}
    assert "group_mean" in found.names


def test_the_drift_of_the_plain_score_is_the_distance(world: World) -> None:
    """Sum over the head of |q - p|, and the tails as one token."""
    distances = []
    for row, _ in world:
        q, p = np.exp(row.head_behavior_logp), np.exp(row.head_logp)
        tail = np.abs(p.sum(1) - q.sum(1))
        distances.append((np.abs(q - p).sum(1) + tail)[row.mask])
    figures = collect([row for row, _ in world]).figures()
    assert figures["drift/centered"].value == pytest.approx(np.concatenate(distances).mean())
    assert figures["drift/centered"].error > 0
    p = torch.tensor([0.2, 0.3, 0.5]).log()
    assert float(moved(torch.tensor([0.2, 0.3, 0.5]) * 4, p)) == pytest.approx(0.0, abs=1e-6)


def test_what_is_written_comes_back(world: World, tmp_path: Path) -> None:
    rows = [replace(row, advantages=np.full(len(row.mask), 0.5), step=2) for row, _ in world]
    written.write(tmp_path / "a.parquet", rows)
    kept = list(read(tmp_path / "a.parquet"))
    assert len(kept) == len(rows)
    for ours, theirs in zip(kept, rows, strict=True):
        for name in Row.__dataclass_fields__:
            one, other = getattr(ours, name), getattr(theirs, name)
            if name in ("where", "others"):
                continue
            if isinstance(other, np.ndarray):
                on = theirs.mask if name != "prompt_ids" else slice(None)
                np.testing.assert_allclose(one[on], other[on], rtol=1e-6, err_msg=name)
            else:
                assert one == other, name


HEADS = {
    "logp": [-1.0, -2.0],
    "head_ids": [[4, 7], [5, 6]],
    "head_behavior_logp": [[-1, -2], [-2, -3]],
    "head_logp": [[-1, -2], [-2, -3]],
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_logp": [[-1, None], [-2, -3]]}, "not finite"),
        ({"head_behavior_logp": [[-1, float("nan")], [-2, -3]]}, "not finite"),
        ({"head_logp": [[-1, 0.5], [-2, -3]]}, "above 0"),
        ({"head_behavior_logp": [[-1, float("inf")], [-2, -3]]}, "above 0"),
        ({"head_logp": [[-1], [-2]]}, "lengths differ"),
        ({"head_logp": [[-1, -2]]}, "lengths differ"),
        ({"head_ids": [[4, 4], [5, 6]]}, "duplicate"),
        ({"head_ids": [4, 5]}, "wrong type"),
    ],
)
def test_a_head_that_is_none_costs_its_row(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    rejected: list[Rejected] = []
    path = lines(tmp_path / "a.jsonl", [HEADS, {**HEADS, **change}])
    (kept,) = read(path, refuse=rejected.append)
    assert kept.head_logp is not None and kept.head_logp.tolist() == HEADS["head_logp"]
    assert [each.reason for each in rejected] == [reason]
