"""`windage record`: how to record a run of another engine, and the runs that record themselves."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from windage.cli.output import deliver, progress, write
from windage.estimators.errors import BadInput

ENGINES = ("verl", "trl", "prime-rl")
JOINED = "prime-rl"
UNTRACED = "no trace"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the engine, and what a run of prime-rl left."""
    parser.add_argument(
        "engine",
        nargs="?",
        choices=ENGINES,
        metavar="ENGINE",
        help=f"{', '.join(ENGINES)}; default: each. Says what turns recording on, and whether what "
        "it needs is in the installed version (1: it is not)",
    )
    parser.add_argument(
        "export",
        nargs="?",
        metavar="RUN",
        help="a run of prime-rl, or its token exports: joined with its traces into a store",
    )
    parser.add_argument("--traces", metavar="FOLDER", help="default: those of the run")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="the rollout store to write")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="of the model, so that the store can be trained on; default: unknown",
    )


def run(arguments: argparse.Namespace) -> int:
    """Say how, or join."""
    if arguments.export is None:
        for flag in ("traces", "store", "tokenizer"):
            if getattr(arguments, flag) is not None:
                raise BadInput(f"--{flag} needs a run; allowed: prime-rl RUN before it")
        return _hooks(arguments)
    if arguments.engine != JOINED:
        raise BadInput(
            f"RUN {arguments.export!r} with {arguments.engine}; allowed: {JOINED} RUN, since the "
            "others are recorded while they run"
        )
    for what in ("export", "traces", "tokenizer"):
        path = getattr(arguments, what)
        if path is not None and not (path and Path(path).exists()):
            name = "RUN" if what == "export" else f"--{what}"
            raise BadInput(f"{name} {path!r} is not there; allowed: a file or folder")
    if arguments.store is None:
        raise BadInput("--store is missing; allowed: a folder for the rollout store")
    return _join(arguments)


def _hooks(arguments: argparse.Namespace) -> int:
    """What each engine needs, and whether it is there."""
    from windage.llm.record.hooks import ENGINES as known
    from windage.llm.record.hooks import installed, missing

    rows = []
    for name in ENGINES if arguments.engine is None else (arguments.engine,):
        engine = known[name]
        there = installed(engine)
        absent = [] if there is None else missing(engine)
        rows.append(
            {
                "engine": name,
                "installed": there,
                "known": engine.known,
                "hook": None if there is None else not absent,
                "missing": "; ".join(absent),
                "switch": engine.switch,
            }
        )
    document = {"schema": "windage/record/1", "rows": rows}
    if arguments.json:
        deliver(document, arguments)
    else:
        if arguments.out is not None:
            write(document, arguments.out)
        print("\n".join(_lines(rows)))
    return int(any(row["hook"] is False for row in rows))


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What a person reads: nothing may be cut where a line is to be copied."""
    for row in rows:
        there = row["installed"]
        state = f"{there} is here" if there else f"not here (known: {row['known']})"
        found = {True: ", with what recording needs", False: f", without {row['missing']}"}
        yield f"{row['engine']}: {state}{found.get(row['hook'], '')}"
        yield f"    {row['switch']}"


def _join(arguments: argparse.Namespace) -> int:
    """Token exports and traces of prime-rl as a store, a file a step.

    The run is read twice: first for what was not exported, which belongs to the steps' files too.
    """
    words = "unknown" if arguments.tokenizer is None else _fingerprint(arguments.tokenizer)
    left: dict[int | None, list[Any]] = defaultdict(list)
    for row in _read(arguments, Counter()):
        if row.rejected is not None:
            left[row.step].append(row)
    counts: dict[Any, Counter[str]] = {}
    aside: Counter[str] = Counter()
    there = (row for row in _read(arguments, aside) if row.rejected is None)
    with progress("steps") as advance:
        for step, rows in groupby(there, key=lambda row: row.step):
            own = chain(rows, left.pop(step, ()))
            counts[step] = _write(arguments.store, step, own, words, aside)
            advance(len(counts), len(counts))
    for step, others in left.items():
        counts[step] = _write(arguments.store, step, iter(others), words, aside)
    found = [{"step": step, **counts[step]} for step in sorted(counts)]
    document = {
        "schema": "windage/record/1",
        "store": str(arguments.store),
        "rows": found,
        "set_aside": dict(sorted(aside.items())),
    }
    deliver(document, arguments)
    return 0


def _fingerprint(folder: str) -> str:
    """Of a tokenizer in a folder.

    Raises:
        BadInput: none can be read there.
    """
    from transformers import AutoTokenizer

    from windage.llm.record.writer import vocabulary

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise BadInput(
            f"--tokenizer {folder!r} cannot be read: {why}; allowed: a folder with a tokenizer"
        ) from None
    return vocabulary(tokenizer)


def _read(arguments: argparse.Namespace, aside: Counter[str]) -> Iterator[Any]:
    """Rows of the run; what is set aside is counted by its reason."""
    from windage.analysis.diagnose.readers.index import read
    from windage.analysis.diagnose.rows import Rejected

    def refuse(fault: Rejected) -> None:
        if fault.rows or fault.reason == "trace unread":
            aside[fault.reason] += max(fault.rows, 1)

    traces = None if arguments.traces is None else Path(arguments.traces)
    return read(Path(arguments.export), traces=traces, refuse=refuse)


def _write(
    store: Path, step: int | None, rows: Iterator[Any], words: str, aside: Counter[str]
) -> Counter[str]:
    """One step's file; what it holds by whether both sides knew of it."""
    from windage.llm import rollouts

    if step is None:
        raise BadInput("a row tells no step; allowed: exports and traces under folders step_N")
    counts = Counter(dict.fromkeys(("joined", "not_exported", "without_trace"), 0))
    seen: Counter[str] = Counter()

    def made() -> Iterator[dict[str, Any]]:
        for row in rows:
            exported = row.rejected is None
            if exported and not row.others.get("trace"):
                counts["without_trace"] += 1
                aside[UNTRACED] += 1
            elif row.behavior_logp is None or row.versions is None:
                aside["no log-probabilities or versions"] += 1
            else:
                counts["joined" if exported else "not_exported"] += 1
                found = _columns(row, step)
                seen[found["sample_id"]] += 1
                if (times := seen[found["sample_id"]]) > 1:  # a trace with several branches
                    found["sample_id"] += f"#{times}"
                yield found

    trained = step - 1 if step else None
    rollouts.write(store, step, made(), tokenizer=words, version=trained)
    return counts


def _columns(row: Any, step: int) -> dict[str, Any]:
    """A row of the store."""
    import numpy as np

    from windage.analysis.diagnose.readers.fields import group_of
    from windage.llm.record.writer import UNKNOWN

    told = {name: getattr(row, name) for name in UNKNOWN if getattr(row, name, None) is not None}
    starts = row.mask[1:] & ~row.mask[:-1]
    return {
        **UNKNOWN,
        **told,
        "group_id": row.group_id or group_of(step, row.prompt_ids),
        "sample_id": row.sample_id or row.where,
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "mask": row.mask,
        "behavior_logp": row.behavior_logp,
        "versions": row.versions,
        "reward": row.reward,
        "outcome": row.reward if row.outcome is None else row.outcome,
        "finish_reason": row.finish_reason or "untold",
        "logp": row.logp,
        "advantages": row.advantages,
        "turns": np.concatenate([[0], np.cumsum(starts)]),
    }
