"""Rollouts of open-instruct: `{run}_rollouts_{shard}.jsonl`, a response a line.

`logprobs` has one entry a token of `response_tokens`, or is null where it was not recorded.  There
is no mask: every token of a response counts as the policy's, a tool's too where `tool_mask` is not
written.  There is no version, and no log-probability of the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import (
    Refuse,
    Seen,
    flags,
    integer,
    integers,
    kept,
    member,
    number,
    numbers,
    once,
    row,
    text,
)
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.jsonl import records
from windage.analysis.diagnose.rows import Row

NAME = "open-instruct"
SHARD = re.compile(r"_rollouts_\d+$")


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is of this format."""
    return "response_tokens" in record and ("prompt_tokens" in record or "logprobs" in record)


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of all shards."""
    seen = Seen()
    for path in dump.files:
        run = SHARD.sub("", path.stem)
        yield from kept(
            records(path, refuse),
            partial(_row, run=str(path.with_name(run)), seen=seen),
            refuse,
        )


def _row(where: str, record: Mapping[str, Any], run: str, seen: Seen) -> Row:
    tokens = integers("response_tokens", member(record, "response_tokens"))
    prompt = integers("prompt_tokens", member(record, "prompt_tokens"))
    logps = record.get("logprobs")
    mask = np.ones(len(tokens), bool)
    if record.get("tool_mask") is not None:
        mask = flags("tool_mask", record["tool_mask"])
    step = integer("step", record.get("step"))
    sample = integer("sample_idx", record.get("sample_idx"))
    group = text("prompt_idx", record.get("prompt_idx"))
    advantage = number("advantage", record.get("advantage"))
    once(seen, run, step, sample)
    return row(
        where,
        mask,
        behavior_logp=None if logps is None else numbers("logprobs", logps),
        response_ids=tokens,
        prompt_ids=prompt,
        step=step,
        group_id=None if group is None else f"{'' if step is None else step}:{group}",
        sample_id=None if sample is None else f"{'' if step is None else step}:{sample}",
        reward=number("reward", record.get("reward")),
        advantages=None if advantage is None else np.full(len(tokens), advantage),
        finish_reason=text("finish_reason", record.get("finish_reason")),
    )
