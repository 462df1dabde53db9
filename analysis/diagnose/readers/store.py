"""Our own rollout store, and what `windage record` writes: one parquet file a step.

The names are those of `ROLLOUT_FIELDS` and `ROLLOUT_OPTIONAL`.  `behavior_logp` is of the
distribution that really drew, unless a column `raw` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from windage.analysis.diagnose.readers import tables
from windage.analysis.diagnose.readers.fields import Fault, Refuse, Seen, kept, member, shown
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.plain import FIELDS, made, named
from windage.analysis.diagnose.rows import Rejected, Row
from windage.estimators.batch import ROLLOUT_FIELDS, ROLLOUT_OPTIONAL, SCHEMA_VERSION

NAME = "store"
SCHEMA = "windage/rollouts/"
NEEDED = [name for name, kind in ROLLOUT_FIELDS.items() if not kind.endswith("or null")]
OTHERS = [name for name in (*ROLLOUT_FIELDS, *ROLLOUT_OPTIONAL) if name not in FIELDS]
STEP = re.compile(r"\d{1,12}")


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of every step."""
    names, seen = named(None), Seen()
    for path in dump.files:
        try:
            told = tables.metadata(tables.opened(path))
        except Fault as fault:
            refuse(Rejected(where=shown(path), reason=fault.reason, what=fault.what))
            continue
        if told.get("schema", SCHEMA) != f"{SCHEMA}{SCHEMA_VERSION}":
            what = f"has the schema {told.get('schema')!r}; allowed: {SCHEMA}{SCHEMA_VERSION}"
            refuse(Rejected(where=shown(path), reason="other schema", what=what))
            continue
        step, trained = (
            int(word) if STEP.fullmatch(word := told.get(name, "")) else None
            for name in ("step", "version")
        )
        also = {"raw": False, "step": step, "current_version": trained}
        items = tables.records(path, [*names.values(), *OTHERS], refuse)
        yield from kept(items, partial(_row, names=names, seen=seen, also=also), refuse)


def _row(
    where: str,
    record: Mapping[str, Any],
    *,
    names: Mapping[str, str],
    seen: Seen,
    also: Mapping[str, Any],
) -> Row:
    for name in NEEDED:
        member(record, name)
    others = {name: record[name] for name in OTHERS if record.get(name) is not None}
    return made(where, record, names=names, given={}, seen=seen, **also, others=others)
