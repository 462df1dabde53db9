"""Training data of NeMo-RL: `train_data_stepN.jsonl`, a response a line.

The logger writes each field as a list of one.  Lists are padded on the right to one width S;
`input_lengths` counts prompt and response.  An entry of `generation_logprobs` and `prev_logprobs`
belongs to the token at its own place, so that the first is unused.  `token_loss_mask` marks the
policy's tokens.  There are no groups: responses of a step with the same prompt are taken as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import (
    Fault,
    Refuse,
    Seen,
    aligned,
    flags,
    group_of,
    integer,
    integers,
    kept,
    member,
    number,
    numbers,
    once,
    row,
    span,
    text,
)
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.jsonl import records
from windage.analysis.diagnose.rows import Row

NAME = "nemo-rl"
STEP = re.compile(r"step_?(\d{1,12})")
TOKENS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is of this format."""
    return "generation_logprobs" in record or "prev_logprobs" in record


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of a file or of a folder of steps."""
    seen = Seen()
    for path in dump.files:
        step = STEP.search(path.name)
        yield from kept(
            records(path, refuse),
            partial(_row, path=path, step=int(step[1]) if step else None, seen=seen),
            refuse,
        )


def _one(record: Mapping[str, Any], name: str) -> Any:
    """A field without the list of one around it."""
    value = member(record, name)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _some(record: Mapping[str, Any], name: str) -> Any:
    return None if record.get(name) is None else _one(record, name)


def _row(where: str, record: Mapping[str, Any], path: Path, step: int | None, seen: Seen) -> Row:
    tokens = integers("token_ids", _one(record, "token_ids"))
    mask = flags("token_loss_mask", _one(record, "token_loss_mask"))
    behavior = numbers("generation_logprobs", _one(record, "generation_logprobs"))
    before = numbers("prev_logprobs", _one(record, "prev_logprobs"))
    width = len(tokens)
    aligned(width, **dict(zip(TOKENS[1:], (mask, behavior, before), strict=True)))
    length = integer("input_lengths", _one(record, "input_lengths"))
    own = span(mask)
    if length is None or not own.stop <= length <= width:
        what = f"has input_lengths {length}, width {width}, last trained token {own.stop - 1}"
        raise Fault("lengths differ", what)
    name = text("idx", _some(record, "idx"))
    once(seen, str(path), name)
    shaped, plain = _some(record, "filtered_rewards"), _some(record, "rewards")
    trained = number("sample_loss_mask", _some(record, "sample_loss_mask"))
    return row(
        where,
        mask[own],
        behavior_logp=behavior[own],
        logp=before[own],
        response_ids=tokens[own],
        prompt_ids=tokens[: own.start],
        advantages=_advantages(record, width, own),
        step=step,
        group_id=group_of(step, tokens[: own.start]),
        sample_id=None if name is None else f"{'' if step is None else step}:{name}",
        reward=number("rewards", plain if shaped is None else shaped),
        outcome=number("rewards", plain),
        rejected="sample_loss_mask is 0" if trained == 0 else None,
    )


def _advantages(record: Mapping[str, Any], width: int, own: slice) -> np.ndarray | None:
    """One a token; a single one holds for all."""
    value = record.get("advantages")
    if value is None:
        return None
    inner = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(inner, list):
        scalar = number("advantages", inner)
        return None if scalar is None else np.full(own.stop - own.start, scalar)
    found = numbers("advantages", inner)
    if len(found) == 1:
        found = np.full(width, found[0])
    aligned(width, advantages=found)
    return found[own]
