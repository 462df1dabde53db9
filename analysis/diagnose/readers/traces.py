"""Traces of prime-rl's orchestrator, joined with token exports by their tokens.

A trace is a graph of messages with the tokens of each; a path from its root to a leaf is one
sequence.  Lines hold a trace, or an episode with several.  Traces lie in
`rollouts/step_N/<kind>/<subset>/traces.jsonl`; those of a kind that starts with `eval` are not
training data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.diagnose.readers.fields import (
    Fault,
    Refuse,
    flags,
    integer,
    integers,
    kept,
    member,
    number,
    numbers,
    row,
    span,
    text,
)
from windage.analysis.diagnose.readers.files import Dump, regular
from windage.analysis.diagnose.readers.jsonl import records
from windage.analysis.diagnose.rows import Rejected, Row

Told = dict[str, Any]
LEFT = "no token export"
# Of the folder in which a trace lies: the step that its siblings trained.
STEP = re.compile(r".*\bstep_(\d{1,12})/")


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a line's object is a trace, or an episode of traces."""
    return isinstance(record.get("nodes"), list) or isinstance(record.get("traces"), list)


class Traces:
    """What traces tell of sequences, by the digest of their tokens.

    Args:
        files: of traces.
        refuse: told of each trace that cannot be read; an export's own row stays.
    """

    def __init__(self, files: list[Path], refuse: Refuse) -> None:
        self.files = files
        self.found: dict[bytes, list[Told]] = {}
        quiet: Refuse = lambda fault: refuse(_unread(fault))  # noqa: E731
        for where, branch in _branches(files, quiet):
            try:
                tokens, told = _tokens(branch), _told(branch)
            except Fault as fault:
                quiet(Rejected(where=where, reason=fault.reason, what=fault.what))
            else:
                self.found.setdefault(_digest(tokens), []).append(told)

    def of(self, tokens: np.ndarray, length: int) -> tuple[Told, bool | None]:
        """What is told of a sequence, and whether a trace was found; None: there are no traces."""
        if not self.files:
            return {}, None
        told = self.found.get(_digest(tokens))
        if not told:
            return {}, False
        return _per_token(told.pop(0), length), True

    def left(self, dump: Dump, refuse: Refuse) -> Iterator[Row]:
        """The sequences that were generated and that no export of their step has.

        Of one rank's file alone that cannot be said, nor of a step without any export.
        """
        if dump.root.is_file():
            return
        exported = {path.parent.name for path in dump.files}
        files = [path for path in self.files if not exported or exported & {*path.parts}]
        remaining = {digest: len(told) for digest, told in self.found.items() if told}
        items = _branches(files, lambda fault: None)
        yield from kept(_of_digests(items, remaining), _row, refuse)


def traces_of(dump: Dump, refuse: Refuse) -> Traces:
    """The traces in a dump, or beside the exports that it consists of."""
    files = list(dump.beside)
    runs = {
        parent.parent
        for path in (() if files else dump.files)
        for parent in path.absolute().parents
        if parent.name == "token_exports"
    }
    root = dump.root.absolute()
    for run in sorted(runs):
        place = run / "rollouts"
        if place.is_dir() and not place.is_symlink() and root not in (run, *run.parents):
            files += [p for p in regular(place, refuse) if p.name == "traces.jsonl"]
    return Traces([path for path in files if not _evaluation(path)], refuse)


def _evaluation(path: Path) -> bool:
    return any(part.startswith("eval") for part in path.parts[-3:-1])


def _unread(fault: Rejected) -> Rejected:
    return Rejected(where=fault.where, reason="trace unread", what=fault.what, rows=0)


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, "<i8").tobytes(), digest_size=16).digest()


def _branches(files: list[Path], refuse: Refuse) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The paths of each trace, with what trace and episode tell."""
    for path in files:
        for where, record in records(path, refuse):
            inner = record.get("traces")
            for trace in inner if isinstance(inner, list) else [record]:
                try:
                    yield from ((where, branch) for branch in _paths(trace, record))
                except Fault as fault:
                    refuse(Rejected(where=where, reason=fault.reason, what=fault.what))


def _paths(trace: Any, episode: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Paths from a root to a leaf.

    Raises:
        Fault: nodes that are none, or that do not form trees.
    """
    nodes = trace.get("nodes") if isinstance(trace, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise Fault("wrong type", "has a trace without nodes")
    parents = [node.get("parent") for node in nodes]
    if not all(p is None or (type(p) is int and 0 <= p < n) for n, p in enumerate(parents)):
        raise Fault("wrong type", "has a trace whose nodes do not follow their parents")
    inner = set(parents)
    budget = 64 * len(nodes) + 4096
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = parents[at]
        budget -= len(path)
        if budget < 0:
            raise Fault("too many parts", "has a trace with too many paths; not read")
        yield {"nodes": path[::-1], "trace": trace, "episode": episode}


def _tokens(branch: Mapping[str, Any]) -> np.ndarray:
    parts = [integers("token_ids", member(node, "token_ids")) for node in branch["nodes"]]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _told(branch: Mapping[str, Any]) -> Told:
    """What a row takes from a trace."""
    trace, episode = branch["trace"], branch["episode"]
    info = {**_inside(trace, "info"), **_inside(episode, "info")}
    policy = _inside(episode, "run", "metadata", "policy") or _inside(
        trace, "run", "metadata", "policy"
    )
    calls = [call for call in trace.get("calls") or [] if isinstance(call, dict)]
    sampling = _inside(calls[-1], "sampling") if calls else {}
    told = {
        "sample_id": text("id", trace.get("id")),
        "group_id": text("group_id", info.get("group_id")),
        "reward": _reward(trace),
        "finish_reason": text("finish_reason", calls[-1].get("finish_reason")) if calls else None,
        "temperature": number("temperature", sampling.get("temperature")),
        "top_p": number("top_p", sampling.get("top_p")),
        "elapsed": _elapsed(calls),
        "first": integer("start", policy.get("start")),
        "last": integer("end", policy.get("end")),
    }
    return {key: value for key, value in told.items() if value is not None}


def _inside(value: Any, *names: str) -> Mapping[str, Any]:
    """An object some names down, empty where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _reward(trace: Mapping[str, Any]) -> float | None:
    """The sum of score times weight, or the reward itself."""
    parts = trace.get("rewards")
    if not isinstance(parts, dict):
        return number("reward", trace.get("reward"))
    values = [part for part in parts.values() if isinstance(part, dict)]
    scores = [number("score", part.get("score")) for part in values]
    weights = [number("weight", part.get("weight", 1.0)) for part in values]
    if not scores or None in scores or None in weights:
        return None
    return float(np.dot(scores, weights))  # type: ignore[arg-type]


def _elapsed(calls: list[dict[str, Any]]) -> float | None:
    """Seconds from the first request to the last answer."""
    times = [_inside(call, "time") for call in calls]
    starts = [number("start", time.get("start")) for time in times]
    ends = [number("end", time.get("end")) for time in times]
    known = [t for t in starts if t is not None], [t for t in ends if t]
    return max(0.0, max(known[1]) - min(known[0])) if all(known) else None


def _per_token(told: Told, length: int) -> Told:
    """Versions as a list: the first weights that drew, and the last by name."""
    first, last = told.pop("first", None), told.pop("last", None)
    if first is not None:
        told["versions"] = np.full(length, first)
    if last is not None and last != first:
        told["others"] = {"last_version": last}
    return told


def _of_digests(
    items: Iterator[tuple[str, Mapping[str, Any]]], remaining: dict[bytes, int]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The branches whose digest is wanted, each as often as it is."""
    for where, branch in items:
        try:
            digest = _digest(_tokens(branch))
        except Fault:
            continue
        if remaining.get(digest):
            remaining[digest] -= 1
            yield where, branch


def _row(where: str, branch: Mapping[str, Any]) -> Row:
    """A sequence that was generated and not exported."""
    nodes, tokens = branch["nodes"], _tokens(branch)
    mask = np.concatenate([flags("mask", member(node, "mask")) for node in nodes])
    if len(mask) != len(tokens):
        raise Fault("lengths differ", f"has {len(mask)} entries in mask, {len(tokens)} tokens")
    own = span(mask)
    drawn = [numbers("logprobs", node.get("logprobs") or []) for node in nodes]
    logps = np.concatenate(drawn)
    behavior = None
    if len(logps):
        if len(logps) != mask.sum():
            raise Fault("lengths differ", f"has {len(logps)} log-probabilities, {mask.sum()} drawn")
        behavior = np.zeros(len(mask))
        behavior[mask] = logps
    told = _per_token(_told(branch), own.stop - own.start)
    step = STEP.match(where)
    others = {"trace": True, **told.pop("others", {})}
    return row(
        where,
        mask[own],
        behavior_logp=None if behavior is None else behavior[own],
        response_ids=tokens[own],
        prompt_ids=tokens[: own.start],
        rejected=LEFT,
        step=int(step[1]) if step else None,
        **told,
        others=others,
    )
