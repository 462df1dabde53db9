"""Shares of a mismatch by cause, from a sample rescored under the policies in between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.analysis.diagnose.groups import Sample
from windage.analysis.diagnose.readers import index
from windage.analysis.diagnose.rows import Row
from windage.estimators.attribution import MEASURES, averaged, every_order, extremes, shares
from windage.estimators.errors import BadInput, within

# Undone first, in this order.
FIRST = ("engine", "support")
ALL = "all"
BY_RESPONSE = ("chi_square_response",)
NAMES = (
    "prompt_ids", "response_ids", "mask", "behavior_logp", "versions", "temperature", "top_p",
    "top_k", "raw", "logp",
)  # fmt: skip
Sampled = Mapping[str, Any]


def sample(
    path: Path,
    *,
    count: int,
    seed: int,
    columns: Mapping[str, str] | None = None,
    settings: Mapping[str, float] | None = None,
) -> list[Sampled]:
    """Some responses of a dump, each with the same chance, by the names of the rollout store.

    Args:
        path: a dump.
        count: responses; fewer where the dump has fewer.
        seed: of the choice.
        columns: for files of no known format.
        settings: temperature, top_p and top_k of responses that do not tell them.

    Raises:
        BadInput: no response has tokens of its own and of its prompt, and log-probabilities.
    """
    within(2, 1 << 20, sample=count)
    generator = np.random.default_rng(seed)
    kept: list[Row] = []
    for seen, row in enumerate(_rows(path, columns, settings), 1):
        if len(kept) < count:
            kept.append(row)
        elif (place := int(generator.integers(seen))) < count:
            kept[place] = row
    return [{name: getattr(row, name) for name in NAMES} for row in _some(kept, path)]


def groups(
    path: Path,
    *,
    count: int,
    columns: Mapping[str, str] | None = None,
    settings: Mapping[str, float] | None = None,
) -> list[Row]:
    """Whole groups of a dump, the same whenever it is asked, that hold so many responses.

    Args:
        path, columns, settings: as of `sample`.
        count: responses, or a few more; fewer where the dump has fewer.

    Raises:
        BadInput: as of `sample`.
    """
    within(2, 1 << 20, sample=count)
    kept = Sample(tokens=1 << 40, rows=4 * count, fewest=16)
    kept.add(_rows(path, columns, settings))
    return _some(kept.first(count), path)


def _rows(
    path: Path, columns: Mapping[str, str] | None, settings: Mapping[str, float] | None
) -> Iterator[Row]:
    """Responses that a model can be passed over."""
    for row in index.read(path, columns=columns, refuse=lambda _: None):
        if _complete(row):
            given: dict[str, Any] = dict(settings or {})
            yield replace(row, **{k: v for k, v in given.items() if getattr(row, k) is None})


def _some(rows: list[Row], path: Path) -> list[Row]:
    """Refuse none.

    Raises:
        BadInput: there is none.
    """
    if not rows:
        raise BadInput(
            f"{path}: no response can be rescored; allowed: responses with prompt_ids, "
            "response_ids and behavior_logp"
        )
    return rows


def _complete(row: Row) -> bool:
    return (
        row.response_ids is not None
        and row.prompt_ids is not None
        and len(row.prompt_ids) > 0
        and row.behavior_logp is not None
    )


def block(
    rows: Sequence[Sampled],
    *,
    recorded: Float[Tensor, "R T"],
    repeated: Float[Tensor, "R T"],
    policies: Float[Tensor, "L R T"],
    mask: Bool[Tensor, "R T"],
    causes: Sequence[str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """What a document says of a rescored sample.

    Args:
        rows: the responses.
        recorded, repeated, policies, mask, causes: as of `parts`.
        about: what was rescored with what.

    Returns:
        `rows` of `parts` and beside `about`: `responses`, `tokens`, and in nats a token how far our
        pass is from what the sampler recorded and from what the trainer did (None: it did not).
    """
    gaps = [
        np.abs(policies[-1, n, : len(row["mask"])].numpy() - row["logp"])[row["mask"]]
        for n, row in enumerate(rows)
        if row["logp"] is not None
    ]
    return {
        **about,
        "responses": len(rows),
        "tokens": int(mask.sum()),
        "sampler_gap": float((recorded - repeated).abs()[mask].mean()),
        "trainer_gap": float(np.concatenate(gaps).mean()) if gaps else None,
        "first": list(FIRST),
        "rows": parts(
            recorded=recorded, repeated=repeated, policies=policies, mask=mask, causes=causes
        ),
    }


def parts(
    *,
    recorded: Float[Tensor, "R T"],
    repeated: Float[Tensor, "R T"],
    policies: Float[Tensor, "L R T"],
    mask: Bool[Tensor, "R T"],
    causes: Sequence[str],
) -> list[dict[str, Any]]:
    """Each cause's part and share of each measure, with errors and with extremes over orders.

    Args:
        recorded: log-probabilities by the sampler.
        repeated: the same with the engine undone.
        policies: with top-k and top-p undone as well, and every subset of `causes`.
        mask: tokens that the policy chose.
        causes: undone in all orders.

    Returns:
        A row a measure and cause: `value` (a token; of `BY_RESPONSE` a response), its `error` with
        responses independent, `least` and `most` among all orders, `share` of the whole, its error.
        None: not finite, or without meaning.  The cause `all` is the whole.

    Raises:
        BadInput: fewer than two responses.
    """
    if len(mask) < 2:
        raise BadInput(f"{len(mask)} responses were rescored; allowed: two or more")
    found = []
    for name, measure in MEASURES.items():
        first = shares(torch.stack([recorded, repeated, policies[0]]), mask, measure)
        rest = every_order(policies, mask, measure, since=recorded)
        each = torch.cat([first, rest])
        whole = each.sum(0)
        size = torch.ones_like(whole) if name in BY_RESPONSE else mask.sum(1).to(whole)
        value, error = averaged(torch.cat([each, whole.unsqueeze(0)]), size)
        share, share_error = averaged(each, whole)
        scale = len(mask) / size.sum()
        low, high = (end * scale for end in extremes(policies, mask, measure, since=recorded))
        least = torch.cat([value[: len(FIRST)], low, value[-1:]])
        most = torch.cat([value[: len(FIRST)], high, value[-1:]])
        for i, cause in enumerate((*FIRST, *causes, ALL)):
            found.append(
                {
                    "cause": cause,
                    "measure": name,
                    "unit": "response" if name in BY_RESPONSE else "token",
                    "value": _finite(value[i]),
                    "error": _finite(error[i]),
                    "least": _finite(least[i]),
                    "most": _finite(most[i]),
                    "share": None if cause == ALL else _finite(share[i]),
                    "share_error": None if cause == ALL else _finite(share_error[i].abs()),
                }
            )
    return found


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
