"""One document of an audit: entries, losses, or both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from windage.analysis.audit.entry import audit
from windage.analysis.audit.foreign import Verdicts, audit_loss
from windage.analysis.audit.loss import load, tried
from windage.analysis.audit.rows import Row
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator

SCHEMA = "windage/audit/1"
Named = tuple[str, str, dict[str, float]]


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What to audit.

    Args:
        entries: text as given, name and settings of each.
        losses: `module:function` of each.
        like: the entry to hold the losses to.
        claims: names to decide; none: all.
        signature: of the losses; None: by their parameters.
        seed: of generated problems and inputs.
    """

    entries: Sequence[Named] = ()
    losses: Sequence[str] = ()
    like: Named | None = None
    claims: Sequence[str] = ()
    signature: str | None = None
    seed: int = 0


def _entry(named: Named) -> Estimator:
    return get(named[1], **named[2])


def run(request: Request) -> dict[str, Any]:
    """Audit every target; the losses are the user's own code and are run here.

    Raises:
        BadInput: a loss that cannot be imported or called, or a standard that does not apply.
    """
    started = time.perf_counter()
    rows: list[Row] = []
    losses: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    like = None if request.like is None else (request.like[0], _entry(request.like))
    for text in request.losses:
        loss = tried(text, load(text), request.signature)
        found = audit_loss(loss, like=like, claimed=request.claims, seed=request.seed)
        rows += found.rows
        losses.append(_loss(found))
        examples += [example.document() for example in found.counter_examples]
    for named in request.entries:
        rows += audit(
            _entry(named), seed=request.seed, only=request.claims or None, target=named[0]
        )
    failed = sum(row.ok is False for row in rows)
    return {
        "schema": SCHEMA,
        "targets": [*request.losses, *(named[0] for named in request.entries)],
        "planted": False,
        "ran_user_code": list(request.losses),
        "like": None if request.like is None else request.like[0],
        "seed": request.seed,
        "failed": failed,
        "passed": failed == 0,
        "rows": [row.document() for row in rows],
        "losses": losses,
        "counter_examples": examples,
        "seconds": time.perf_counter() - started,
    }


def _loss(found: Verdicts) -> dict[str, Any]:
    loss = found.loss
    return {
        "target": loss.name,
        "signature": loss.signature,
        "layout": loss.layout.words if loss.signature in ("plain", "trl") else "",
        "inputs": found.inputs,
        "closest": [c.document() for c in found.closest],
    }
