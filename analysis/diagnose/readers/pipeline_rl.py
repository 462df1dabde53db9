"""Streams of PipelineRL: `streams/<topic>/<instance>/<partition>/0.jsonl`.

A line of the topic `actor` is the list of texts of one group, one of `training_data` a text.
`labels` are the tokens that the policy drew and -100 elsewhere; `logprobs` and `ref_logprobs` have
one entry a label, or one a token of the whole text.  Where a dump has both topics the actor's is
read, since the other repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import (
    Fault,
    Refuse,
    Seen,
    aligned,
    integer,
    integers,
    kept,
    member,
    number,
    numbers,
    once,
    row,
    shown,
    span,
    text,
)
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.jsonl import records
from windage.analysis.diagnose.rows import Rejected, Row

NAME = "pipeline-rl"
TOPICS = ("actor", "training_data")
NO_LABEL = -100


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is of this format."""
    return "labels" in record and ("input_ids" in record or "logprobs" in record)


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of the actor's stream, or of the trainer's where there is no other."""
    seen = Seen()
    drawn = [path for path in dump.files if TOPICS[0] in path.parts[-4:]]
    for path in dump.files:
        if drawn and TOPICS[1] in path.parts[-4:]:
            what = "repeats the texts of the actor's stream"
            refuse(Rejected(where=shown(path), reason="repeated stream", what=what, rows=0))
            continue
        items = records(path, refuse, many=True)
        yield from kept(items, lambda where, record: _row(where, record, seen), refuse)


def _row(where: str, record: Mapping[str, Any], seen: Seen) -> Row:
    tokens = integers("input_ids", member(record, "input_ids"))
    labels = integers("labels", member(record, "labels"))
    aligned(len(tokens), labels=labels)
    mask = labels != NO_LABEL
    own = span(mask)
    if (labels[mask] != tokens[mask]).any():
        raise Fault("lengths differ", "has labels that are not the tokens beside them")
    about = record.get("metadata")
    about = about if isinstance(about, dict) else {}
    version = integer("model_version", about.get("model_version"))
    group = text("group_id", record.get("group_id"))
    place = [about.get(name) for name in ("rollout_index", "step_index")]
    name = [text("rollout_index", part) for part in place]
    once(seen, group, *name)
    finished = record.get("finished")
    advantages = record.get("advantages")
    return row(
        where,
        mask[own],
        behavior_logp=_spread("logprobs", member(record, _logps(record)), mask)[own],
        reference_logp=_optional("ref_logprobs", record, mask, own),
        advantages=_optional("advantages", record, mask, own)
        if isinstance(advantages, list)
        else None,
        response_ids=tokens[own],
        prompt_ids=tokens[: own.start],
        versions=None if version is None else np.full(own.stop - own.start, version),
        group_id=group,
        sample_id=None if None in (group, *name) else "/".join(map(str, (group, *name))),
        reward=number("reward", record.get("reward")),
        finish_reason={True: "stop", False: "length"}.get(finished)
        if isinstance(finished, bool)
        else None,
    )


def _logps(record: Mapping[str, Any]) -> str:
    return "old_logprobs" if "old_logprobs" in record else "logprobs"


def _spread(name: str, value: Any, mask: np.ndarray) -> np.ndarray:
    """One number a token of the text, given one a label or one a token."""
    found = numbers(name, value)
    if len(found) == len(mask):
        return found
    if len(found) != mask.sum():
        what = f"has {len(found)} entries in {name}, {mask.sum()} labels; allowed: one a label"
        raise Fault("lengths differ", what)
    out = np.zeros(len(mask))
    out[mask] = found
    return out


def _optional(
    name: str, record: Mapping[str, Any], mask: np.ndarray, own: slice
) -> np.ndarray | None:
    value = record.get(name)
    return None if value is None or value == [] else _spread(name, value, mask)[own]
