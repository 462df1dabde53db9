"""Dump details of slime: `rollout_data/{id}.pt` and `train_data/{id}.pt`, joined by sample.

Lists of a sample have one entry a token of the response, whose tokens are the last ones of
`tokens`.  `weight_versions` has one entry a request: the first is taken for every token, and a
later one is noted.  What the trainer has no data of was not trained on.  Files are read without
running anything; a sample with an object in it is set aside, and its class is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import (
    Fault,
    Refuse,
    Seen,
    flags,
    group_of,
    integer,
    integers,
    kept,
    number,
    numbers,
    once,
    row,
    shown,
    text,
)
from windage.analysis.diagnose.readers.files import Dump
from windage.analysis.diagnose.readers.opcodes import Name, Unread
from windage.analysis.diagnose.readers.tensors import load, tainted
from windage.analysis.diagnose.rows import Rejected, Row

NAME = "slime"
NUMBER = re.compile(r"\d{1,12}")
FINISHED = {"completed": "stop", "truncated": "length"}
# A column of the trainer's file, and what it is called for one sample.
COLUMNS = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "sample_indices": "index",
    "rewards": "reward",
    "raw_reward": "raw_reward",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "advantages": "advantages",
}
TRAINED = ("log_probs", "ref_log_probs", "advantages", "raw_reward")
Sample = Mapping[str, Any]


def fits(data: bytes) -> bool:
    """Whether the opcodes of a file that torch saved name what this format has."""
    return b"rollout_id" in data or b"rollout_log_probs" in data


def rows(dump: Dump, refuse: Refuse) -> Iterator[Row]:
    """The rows of each rollout file with those of the trainer's files of the same number."""
    seen = Seen()
    files = [path for path in dump.files if not _evaluation(path, refuse)]
    trained = [path for path in files if path.parent.name == "train_data"]
    used: set[Path] = set()
    for path in files:
        if path in trained:
            continue
        beside = [other for other in trained if _number(other) == _number(path)]
        used |= set(beside)
        yield from _step(path, beside, seen, refuse)
    for path in trained:
        if path not in used:
            yield from _step(path, [], seen, refuse)


def _evaluation(path: Path, refuse: Refuse) -> bool:
    found = path.name.startswith("eval_")
    if found:
        refuse(Rejected(where=shown(path), reason="evaluation", what="is of an evaluation", rows=0))
    return found


def _number(path: Path) -> str | None:
    found = NUMBER.search(path.stem)
    return found[0] if found else None


def _step(path: Path, beside: list[Path], seen: Seen, refuse: Refuse) -> Iterator[Row]:
    """The rows of one file, completed by those beside it."""
    made: dict[int, Sample] = {}
    for other in beside:
        for _, sample in _samples(other, refuse, counted=False)[1]:
            index = sample.get("index")
            if type(index) is int:
                made[index] = sample
    step, samples = _samples(path, refuse)
    yield from kept(
        samples, lambda where, sample: _row(where, sample, step, made, bool(beside), seen), refuse
    )


def _samples(
    path: Path, refuse: Refuse, *, counted: bool = True
) -> tuple[int | None, list[tuple[str, Sample]]]:
    """Number of the rollout, and its samples; what cannot be read goes to `refuse`.

    Args:
        path: of either kind of file.
        refuse: told of the file, or of samples in it.
        counted: whether these are rows of their own.
    """
    rows_ = int(counted)
    try:
        root = load(path)
        if isinstance(root, (Unread, Name)):
            raise Fault("unsafe", f"holds {root.name}, which is not read")
        step, found = _found(root)
        bad = tainted(root)
    except Fault as fault:
        refuse(Rejected(where=shown(path), reason=fault.reason, what=fault.what, rows=rows_))
        return None, []
    good: list[tuple[str, Sample]] = []
    for place, sample in enumerate(found):
        where = f"{shown(path)}: sample {place}"
        name = bad.get(id(sample)) or next(
            (bad[i] for i in map(id, _values(sample)) if i in bad), None
        )
        if name is not None:
            what = f"holds {name}, which is not read"
            refuse(Rejected(where=where, reason="unsafe", what=what, rows=rows_))
        elif not isinstance(sample, dict):
            what = f"is no dictionary but {type(sample).__name__}"
            refuse(Rejected(where=where, reason="no object", what=what, rows=rows_))
        else:
            good.append((where, sample))
    return step, good


def _values(sample: Any) -> list[Any]:
    return list(sample.values()) if isinstance(sample, dict) else []


def _found(root: Any) -> tuple[int | None, list[Any]]:
    """Number and samples of a file of either kind.

    Raises:
        Fault: it is of neither.
    """
    if not isinstance(root, dict):
        raise Fault("wrong type", f"holds {type(root).__name__}; allowed: a dump of slime")
    for value in root.values():
        if isinstance(value, (Unread, Name)):
            raise Fault("unsafe", f"holds {value.name}, which is not read")
    step = integer("rollout_id", root.get("rollout_id"))
    samples = root.get("samples")
    if isinstance(samples, list):
        return step, samples
    columns = root.get("rollout_data")
    columns = columns if isinstance(columns, dict) else root
    lists = {name: columns[key] for key, name in COLUMNS.items() if _list(columns.get(key))}
    if "tokens" not in lists:
        raise Fault("wrong type", "holds no samples; allowed: rollout or train data of slime")
    count = max(map(len, lists.values()))
    return step, [
        {name: column[i] for name, column in lists.items() if i < len(column)} for i in range(count)
    ]


def _list(value: Any) -> bool:
    return isinstance(value, (list, np.ndarray))


def _row(
    where: str,
    sample: Sample,
    step: int | None,
    made: Mapping[int, Sample],
    joined: bool,
    seen: Seen,
) -> Row:
    index = integer("index", sample.get("index"))
    beside = made.get(index) if index is not None else None
    sample = {**sample, **{key: beside[key] for key in TRAINED if beside and key in beside}}
    tokens = integers("tokens", _needed(sample, "tokens"))
    length = integer("response_length", _needed(sample, "response_length"))
    if length is None or not 0 <= length <= len(tokens):
        what = f"has response_length {length}, {len(tokens)} tokens"
        raise Fault("lengths differ", what)
    mask = np.ones(length, bool)
    if sample.get("loss_mask") is not None:
        mask = flags("loss_mask", sample["loss_mask"])
    once(seen, step, index)
    start = len(tokens) - length
    versions, others = _versions(sample, length)
    reward, shaped = sample.get("reward"), sample.get("raw_reward")
    return row(
        where,
        mask,
        behavior_logp=_column("rollout_log_probs", sample),
        logp=_column("log_probs", sample),
        reference_logp=_column("ref_log_probs", sample),
        advantages=_column("advantages", sample),
        response_ids=tokens[start:],
        prompt_ids=tokens[:start],
        versions=versions,
        step=step,
        group_id=_group(sample, step, tokens[:start]),
        sample_id=None if index is None else str(index),
        reward=None if isinstance(reward, dict) else number("reward", reward),
        outcome=None if shaped is None else number("raw_reward", shaped),
        finish_reason=_finish(sample),
        rejected=_rejected(sample, joined and beside is None),
        others=others,
    )


def _needed(sample: Sample, name: str) -> Any:
    if sample.get(name) is None:
        raise Fault("missing field", f"has no {name}; needed")
    return sample[name]


def _column(name: str, sample: Sample) -> np.ndarray | None:
    return None if sample.get(name) is None else numbers(name, sample[name])


def _group(sample: Sample, step: int | None, prompt: np.ndarray) -> str:
    return text("group_index", sample.get("group_index")) or group_of(step, prompt)


def _finish(sample: Sample) -> str | None:
    status = text("status", sample.get("status"))
    return FINISHED.get(status, status) if status is not None else None


def _rejected(sample: Sample, untrained: bool) -> str | None:
    status = sample.get("status")
    if status in ("aborted", "failed"):
        return str(status)
    if sample.get("remove_sample") is True:
        return "removed"
    return "no train data" if untrained else None


def _versions(sample: Sample, length: int) -> tuple[np.ndarray | None, dict[str, object]]:
    """The first version for every token, or one each; a later one is noted."""
    value = sample.get("weight_versions")
    if not isinstance(value, list) or not value:
        return None, {}
    found = [integer("weight_versions", version) for version in value]
    known = np.array([version for version in found if version is not None], np.int64)
    if len(known) < len(found):
        raise Fault("wrong type", "has weight_versions with null; allowed: whole numbers")
    if len(known) == length > 1:
        return known, {}
    later = {"last_version": int(known.max())} if known.max() > known[0] else {}
    return np.full(length, known[0]), dict(later)
