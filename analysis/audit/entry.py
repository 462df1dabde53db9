"""Every claim of a catalogue entry, declared or due from all, decided one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from windage.analysis.audit import coefficients, invariance, moments
from windage.analysis.audit.logged import Subject
from windage.analysis.audit.rows import Finding, Row, judged, worst
from windage.estimators.catalogue import CATALOGUE
from windage.estimators.claims import ALWAYS, PROPERTIES, VALUED, Claim
from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Undefined

DRAWS = 2
ALL_PROPERTIES = {**PROPERTIES, **VALUED, **ALWAYS}


def audit(
    subject: Subject | Estimator,
    *,
    seed: int = 0,
    only: Iterable[str] | None = None,
    target: str | None = None,
) -> list[Row]:
    """Decide the claims of an estimator, in both directions.

    Declared claims are about rewards: penalties are set aside and decided by themselves.

    Args:
        subject: an entry, or one with the functions that feed it.
        seed: of the generated problems and rows.
        only: properties to decide; default all.
        target: name in the rows; default the entry's.
    """
    if isinstance(subject, Estimator):
        subject = Subject(estimator=subject)
    estimator = subject.estimator
    name = target or estimator.name
    wanted = set(ALL_PROPERTIES if only is None else only)
    bare = replace(subject, estimator=_bare(estimator))
    rows = _moment_rows(bare.estimator, name, wanted, seed)
    for claim in estimator.claims:
        if claim.property in coefficients.DECIDED and claim.property in wanted:
            decide = coefficients.DECIDED[claim.property]
            findings = [_guarded(decide, bare, claim, seed + k) for k in range(DRAWS)]
            known = [finding for finding in findings if finding is not None]
            rows.append(_row(name, claim, worst(known), estimator))
    for property in ALWAYS:
        check = invariance.CHECKS.get(property, coefficients.penalty)
        if property in wanted:
            seen = [_guarded(check, subject, seed + k) for k in range(DRAWS)]
            known = [finding for finding in seen if finding is not None]
            if known:
                rows.append(judged(name, property, worst(known)))
    order = list(ALL_PROPERTIES)
    return sorted(rows, key=lambda row: order.index(row.property))


def _bare(estimator: Estimator) -> Estimator:
    """The estimator without its penalties."""
    return replace(estimator, penalties=())


def _guarded(decide: Callable[..., Finding | None], *arguments: Any) -> Finding | None:
    """A check's finding; where the estimator refuses what it should take, that is the finding."""
    try:
        return decide(*arguments)
    except (ValueError, RuntimeError, ArithmeticError) as problem:
        return Finding(size=math.inf, witness=f"{type(problem).__name__}: {problem}")


def _moment_rows(estimator: Estimator, name: str, wanted: set[str], seed: int) -> list[Row]:
    asked = [
        claim
        for claim in estimator.claims
        if claim.property in wanted
        and (claim.property in moments.MEASURES or claim.property in moments.VALUED_MEANS)
    ]
    if not asked:
        return []
    cases = [*moments.generated(seed), *moments.witnesses()]
    try:
        known = [found for case in cases if (found := moments.facts(estimator, case)) is not None]
    except Undefined as reason:
        return [_undefined(name, claim, str(reason)) for claim in asked]
    rows = []
    for claim in asked:
        if claim.property in moments.MEASURES:
            finding = moments.boolean(claim, known)
        else:
            finding = moments.valued_mean(estimator, claim, known)
        rows.append(_row(name, claim, finding, estimator))
    return rows


def _undefined(name: str, claim: Claim, reason: str) -> Row:
    return Row(
        target=name,
        property=claim.property,
        claimed=claim.describe(),
        measured=None,
        verdict="undefined",
        ok=None,
        witness="",
        found=reason,
    )


def _row(name: str, claim: Claim, finding: Finding, estimator: Estimator) -> Row:
    """The row of a declared claim.

    An entry with other settings than the catalogue's may hold more than the entry claims: a cap
    that is never reached removes a bias.  Such a row is reported, not failed.
    """
    row = judged(name, claim.property, finding, claimed=claim.describe(), holds=claim.holds)
    published = CATALOGUE.get(estimator.name)
    changed = published is None or _bare(published).settings != _bare(estimator).settings
    if changed and not claim.holds and row.verdict == "holds":
        return replace(row, ok=None)
    return row


def failures(rows: Iterable[Row]) -> list[Row]:
    """The rows whose verdict is not what was claimed."""
    return [row for row in rows if row.ok is False]
