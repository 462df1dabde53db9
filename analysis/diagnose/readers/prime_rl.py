"""Token exports of prime-rl: `token_exports/step_N/rank_R.jsonl`, and the traces beside them.

A line is a sequence, or several one after the other, told apart by positions that start anew.
Every list has one entry a token of prompt and response; an entry of `inference_logprobs` and of
`trainer_logprobs` belongs to the token at its own place, given those before it.  `loss_mask` marks
the policy's tokens: the response lasts from the first to the last of them, and what lies between
and is not marked came from a tool.  Step N trains the weights numbered N - 1.

A step whose folder lacks the mark `STABLE` while others have it is not finished.  Rewards, groups
and versions are in the traces only; see `traces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from windage.analysis.diagnose.readers.traces import Traces, traces_of
from windage.analysis.diagnose.rows import Rejected, Row

NAME = "prime-rl"
MARK = "STABLE"
IDENTITY = (
    "run_id",
    "step",
    "export_step",
    "rank",
    "micro_step",
    "micro_sequence_idx",
    "export_sequence_idx",
)
Part = Mapping[str, Any]


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is of this format."""
    return "token_ids" in record and ("inference_logprobs" in record or "position_ids" in record)


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of token exports, and of the traces that no export has."""
    traces = traces_of(dump, refuse)
    seen = Seen()
    marked = any((path.parent / MARK).is_file() for path in dump.files)
    for path in dump.files:
        if marked and not (path.parent / MARK).is_file():
            for where, _ in records(path, refuse):
                what = f"is of a step without the mark {MARK}"
                refuse(Rejected(where=where, reason="unfinished step", what=what))
            continue
        yield from kept(_parts(path, refuse), lambda w, part: _row(w, part, seen, traces), refuse)
    yield from traces.left(dump, refuse)


def _parts(path: Path, refuse: Refuse) -> Iterator[tuple[str, Part]]:
    """The sequences of each line."""
    for where, record in records(path, refuse):
        try:
            columns, starts = _columns(record)
        except Fault as fault:
            refuse(Rejected(where=where, reason=fault.reason, what=fault.what))
            continue
        about = {key: record.get(key) for key in (*IDENTITY, "env_name")}
        for number_, (start, end) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
            own = {name: column[start:end] for name, column in columns.items()}
            place = where if len(starts) == 1 else f"{where}, sequence {number_}"
            yield place, {**about, **own, "part": number_}


def _columns(record: Part) -> tuple[dict[str, np.ndarray], list[int]]:
    """The lists of a line, and where its sequences start.

    Raises:
        Fault: a list that is missing, of another type or of another length.
    """
    columns: dict[str, np.ndarray] = {
        "token_ids": integers("token_ids", member(record, "token_ids")),
        "loss_mask": flags("loss_mask", member(record, "loss_mask")),
    }
    for name in ("inference_logprobs", "trainer_logprobs"):
        columns[name] = numbers(name, member(record, name))
    for name in ("advantages", "rewards"):
        if record.get(name) is not None:
            columns[name] = numbers(name, record[name])
    starts = [0]
    if record.get("position_ids") is not None:
        columns["position_ids"] = integers("position_ids", record["position_ids"])
        starts += (np.flatnonzero(np.diff(columns["position_ids"]) <= 0) + 1).tolist()
    aligned(len(columns["token_ids"]), **columns)
    return columns, starts


def _row(where: str, part: Part, seen: Seen, traces: Traces) -> Row:
    mask = part["loss_mask"]
    own = span(mask)
    step = integer("step", part["step"])
    tokens, prompt = part["token_ids"], part["token_ids"][: own.start]
    name = [text(key, part[key]) for key in IDENTITY]
    if part["step"] is not None and part["export_sequence_idx"] is not None:
        once(seen, *(word or "" for word in name), part["part"])
    advantages = part.get("advantages")
    if advantages is not None and not np.isfinite(advantages[mask]).any():
        advantages = None
    found = dict(
        mask=mask[own],
        behavior_logp=part["inference_logprobs"][own],
        logp=part["trainer_logprobs"][own],
        response_ids=tokens[own],
        prompt_ids=prompt,
        advantages=None if advantages is None else advantages[own],
        step=step,
        current_version=step - 1 if step else None,
        sample_id="/".join(word for word in (*name, str(part["part"])) if word),
        reward=_reward(part, mask),
        group_id=group_of(step, prompt),
    )
    others: dict[str, Any] = (
        {"env_name": text("env_name", part["env_name"])} if part["env_name"] else {}
    )
    told, others["trace"] = traces.of(tokens, own.stop - own.start)
    others |= told.pop("others", {})
    return row(where, **{**found, **told}, others=others)


def _reward(part: Part, mask: np.ndarray) -> float | None:
    """The reward, where every token of the policy holds the same."""
    if "rewards" not in part:
        return None
    values = part["rewards"][mask]
    return number("rewards", float(values[0])) if (values == values[0]).all() else None
