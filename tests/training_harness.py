"""Faults and kills at the calls by which a process changes a disk; training runs that suffer them.

As a program it forks a child a run and prints a JSON line a kill or death:

    python tests/training_harness.py FOLDER SEED synchronous=4 synchronous:optimizer=1 deaths=8 ...

A word names a case, perhaps with a fault planted in resuming, and how many kills.

A process of its own, because the shape checks of the suite draw from `random`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path

CALLS = ("open", "mkdir", "write", "pwrite", "fsync", "rename", "unlink", "rmdir", "ftruncate")
Fault = Callable[..., object]


class Crash(BaseException):
    """The end of a run at a call, in a process that goes on."""


class Calls:
    """The calls seen so far: their names, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []


@contextmanager
def tampered(at: int = -1, fault: Fault | None = None) -> Iterator[Calls]:
    """Count the calls of `os` that change a disk, and put something in place of one of them.

    Args:
        at: which call, counted over all names; -1: none.
        fault: takes the call's name, the real function and the arguments.
    """
    seen = Calls()
    real = {name: getattr(os, name) for name in CALLS}

    def wrapped(name):
        def call(*arguments, **settings):
            seen.names.append(name)
            if len(seen.names) - 1 == at:
                return fault(name, real[name], *arguments, **settings)
            return real[name](*arguments, **settings)

        return call

    # shutil looks functions up among those that take a folder's descriptor.
    takes = os.supports_dir_fd
    try:
        for name in CALLS:
            replaced = wrapped(name)
            setattr(os, name, replaced)
            if real[name] in takes:
                takes.add(replaced)
        yield seen
    finally:
        for name in CALLS:
            takes.discard(getattr(os, name))
            setattr(os, name, real[name])


def failing(number: int) -> Fault:
    """An error of the disk."""

    def fault(name, real, *arguments, **settings):
        raise OSError(number, os.strerror(number))

    return fault


def killed(name, real, *arguments, **settings):
    """`kill -9` instead of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def crashed(name, real, *arguments, **settings):
    """The run ends, the process does not."""
    raise Crash


def short(name, real, *arguments, **settings):
    """A short write; any other call is made."""
    if name == "write":
        descriptor, content = arguments
        return real(descriptor, content[: max(1, len(content) // 2)])
    return real(*arguments, **settings)


def forked(work: Callable[[], int]) -> int:
    """Do the work in a child; its exit status, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# Training runs.

STEPS, PROMPTS, GROUP, LAG = 3, 3, 2, 2
COMMON: dict[str, dict] = {
    "task": {"low": -1.0},
    "sampling": {"max_tokens": 5},
    "train": {
        "steps": STEPS,
        "prompts": PROMPTS,
        "group_size": GROUP,
        "micro_batch": 4,
        "learning_rate": 0.01,
        "schedule": "cosine",
        "warmup": 2,
    },
    "run": {"folder": "run", "save_every": 1, "card": False, "samples": 1},
}
CASES: dict[str, dict[str, dict]] = {
    "synchronous": {
        "recipe": {"name": "grpo", "settings": {"coefficient": 0.1}},
        "train": {"passes": 2, "minibatches": 2},
        "reference": {"refresh": "ema", "every": 3, "alpha": 0.5},
        "evaluate": {"every": 2, "questions": 2, "samples": 1},
    },
    "offline": {
        "recipe": {"name": "topr"},
        "train": {"mode": "offline", "steps": 0, "prompts": 5, "data_epochs": 2},
    },
    "asynchronous": {
        "recipe": {"name": "reinforce"},
        "train": {"mode": "asynchronous", "max_lag": LAG},
    },
}


class Parity:
    """A task that a random model earns something in: the bytes of a response, and some luck.

    Args:
        lucky: the luck is of the process's random generators, which a resumed run must find as they
            were; otherwise there is none.
    """

    name = "parity"

    def __init__(self, lucky: bool = True) -> None:
        self.lucky = lucky

    def questions(self, split, seed, start, count):
        from windage.llm.tasks.protocol import Question

        places = range(start, start + count)
        return [Question(id=f"{split[0]}{n}", text=f"{n}+1=?", answer="2") for n in places]

    def judge(self, pairs, cut):
        import numpy as np
        import torch

        from windage.llm.verify import Verdict

        luck = [
            random.random() + np.random.random() + float(torch.rand(())) if self.lucky else 0.0
            for _ in pairs
        ]
        even = [hashlib.sha256(text.encode()).digest()[0] % 2 == 0 for _, text in pairs]
        words = ["right" if a == (b < 1) else "wrong" for a, b in zip(even, luck, strict=True)]
        return [Verdict(word=word, stopped=None, seconds=0.0) for word in words]

    def close(self):
        pass


def configuration(case: str, model: Path, store: Path | None = None, **changes):
    """The configuration of a case, with a folder `run` where the process stands."""
    from windage.llm.config import build

    told = build({"model": {"path": str(model)}}, build(CASES[case], build(COMMON)))
    if store is not None:
        told = build({"train": {"store": str(store)}}, told)
    return build(changes, told)


def go(config, *, resume: bool = False, lucky: bool = True) -> None:
    """A whole run, or the rest of one, where the process stands."""
    from windage.llm import run
    from windage.llm.checkpoint import claim
    from windage.llm.train import train

    run.task_of = lambda name, settings: Parity(lucky)
    with claim(Path(config.run.folder)):
        train(run.start(config, resume=resume))


def apart(folder: Path, work: Callable[[], None], seconds: float | None = None) -> int:
    """Do the work in a child that stands in a folder; `kill -9` after some seconds, where given."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder)
            with open("log", "a") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            work()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(path: Path, run: Path) -> object:
    """What a file of a run says, the clock's part left out."""
    from windage.llm import journal

    if path.name == "metrics.jsonl":
        records = journal.read(path)
        return repr([{k: v for k, v in one.items() if "time/" not in k} for one in records])
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return repr(pq.read_table(path).drop_columns(["elapsed"]).to_pydict())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state(folder: Path) -> dict[str, object]:
    """Every file of a run: checkpoints, metrics, rollouts, and any litter."""
    run = folder / "run"
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {path.relative_to(run).as_posix(): content(path, run) for path in files}


def orderly(folder: Path) -> list[str]:
    """What is wrong with an asynchronous run: lost, repeated, too old, out of order, litter."""
    import pyarrow.parquet as pq

    from windage.llm import journal

    run, wrong = folder / "run", []
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    asked = list(dict.fromkeys(row["group_id"] for row in rows))
    if asked != [f"{n}:t{n}" for n in range(STEPS * PROMPTS)]:
        wrong.append(f"groups {asked}")
    samples = [row["sample_id"] for row in rows]
    if samples != [f"{n}:{g}" for n in range(STEPS * PROMPTS) for g in range(GROUP)]:
        wrong.append(f"samples {samples}")
    for number, row in enumerate(rows):
        step = number // (PROMPTS * GROUP)
        ages = [step - version for version in row["versions"]]
        if not all(0 <= age <= LAG for age in ages):
            wrong.append(f"{row['sample_id']} has ages {ages}")
    if [one["step"] for one in journal.read(run / "metrics.jsonl")] != list(range(1, STEPS + 1)):
        wrong.append("steps in metrics.jsonl")
    last = run / "checkpoints" / f"checkpoint-{STEPS:08d}" / "state.json"
    if json.loads(last.read_text())["updates"] != STEPS:
        wrong.append("updates")
    return wrong + [path.name for path in run.rglob("*unfinished*")]


def prepared(base: Path, case: str):
    """The configuration of a case, its model and its store."""
    from tiny_language_model import make

    model, store = base / "model", base / "recorded" / "run" / "rollouts"
    if not model.exists():
        make(model, width=16, layers=1)
    if case == "offline" and not store.exists():
        recorded = configuration("synchronous", model)
        assert apart(base / "recorded", lambda: go(recorded)) == 0
    return configuration(case, model, store if case == "offline" else None)


def warm(names: list[str]) -> None:
    """Import here what each child would."""
    for name in names:
        with suppress(ImportError):
            import_module(name)


def plant(fault: str) -> None:
    """Break one part of resuming, in this process."""
    import torch

    from windage.llm import journal, rollouts, run
    from windage.llm.models import Policy

    def nothing(*arguments, **settings):
        return None

    place, name = {
        "optimizer": (run, "unpack_optimizer"),
        "random": (run, "unpack_random"),
        "schedule": (torch.optim.lr_scheduler.LambdaLR, "load_state_dict"),
        "reference": (Policy, "load_state_dict"),
        "journal": (journal, "rewind"),
        "store": (rollouts, "steps"),
    }[fault]
    setattr(place, name, (lambda folder: []) if fault == "store" else nothing)


@cache
def whole_run(base: Path, case: str) -> tuple[list[str], dict[str, object], float]:
    """The calls of a run that nothing stops, what it leaves, and the seconds it takes."""
    config = prepared(base, case)
    whole, told = base / f"whole-{case}", base / "calls.json"

    def watched():
        with tampered() as seen:
            go(config)
        told.write_text(json.dumps([seen.names, [n for n in sys.modules if n != "__main__"]]))

    assert apart(whole, watched) == 0, (whole / "log").read_text()
    calls, modules = json.loads(told.read_text())
    warm(modules)
    wanted, began = state(whole), time.perf_counter()
    assert apart(base / f"again-{case}", lambda: go(config)) == 0
    assert case == "asynchronous" or state(base / f"again-{case}") == wanted
    return calls, wanted, time.perf_counter() - began


def kills(base: Path, case: str, count: int, seed: int, fault: str = "") -> Iterator[dict]:
    """Kill a run at calls drawn at random, and at random times; resume it; say what is different.

    The first kill is at the very end, before the oldest checkpoint goes; every third is by the
    clock; every other resumed run is killed once more.

    Args:
        fault: planted in resuming; kills are then after the first checkpoint, before the last.
    """
    config, draw = prepared(base, case), random.Random(f"{seed} {case} {fault}")
    calls, wanted, lasted = whole_run(base, case)
    half = len(calls) // 2

    def broken(at, resume):
        with tampered(at, killed):
            go(config, resume=resume)

    def resumed():
        if fault:
            plant(fault)
        go(config, resume=True)

    for number in range(count):
        folder = base / f"{case}{fault}-{number}"
        at, again = draw.randrange(len(calls)), draw.randrange(half)
        if fault:
            at = half + at // 5
        elif number == 0:
            at = len(calls) - 1 - calls[::-1].index("rename")
        by_clock = number % 3 == 2 and not fault
        if by_clock:
            at = draw.uniform(0, lasted)
            statuses = [apart(folder, lambda: go(config), at)]
        else:
            statuses = [apart(folder, lambda at=at: broken(at, False))]
        if number % 2 and not fault:
            statuses.append(apart(folder, lambda again=again: broken(again, True)))
        statuses.append(apart(folder, resumed))
        wrong = ["the resumed run failed"]
        if statuses[-1] == 0:
            wrong = orderly(folder) if case == "asynchronous" else different(state(folder), wanted)
        log = "" if statuses[-1] == 0 else (folder / "log").read_text()[-2000:]
        call = "by the clock" if by_clock else calls[at]
        yield {"at": at, "call": call, "statuses": statuses, "wrong": wrong, "log": log}


def different(found: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """Names of files that are not the same."""
    return sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))


class Mortal:
    """A sampler that dies between two tokens, when its turn comes."""

    def __init__(self, inner, turns: list[int]) -> None:
        self.inner, self.turns = inner, turns

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sample(self, requests, sampling, between=None):
        def fated():
            self.turns[0] -= 1
            if self.turns[0] == 0:
                self.turns.pop(0)
                raise RuntimeError("engine died")
            if between is not None:
                between()

        return self.inner.sample(requests, sampling, fated)


def deaths(base: Path, count: int, seed: int) -> Iterator[dict]:
    """Kill the sampler of asynchronous runs, some times a run; say what is not as it should be."""
    from windage.llm import journal, run

    config, draw = prepared(base, "asynchronous"), random.Random(seed)
    engine, done = run.sampler_of, 0
    while done < count:
        folder = base / f"deaths-{done}"
        turns = [draw.randint(1, 5) for _ in range(3)]

        def mortal(turns=turns):
            left = [*turns, -1]
            run.sampler_of = lambda *arguments: Mortal(engine(*arguments), left)
            go(config)

        status = apart(folder, mortal)
        counted = [one["deaths"] for one in journal.read(folder / "run" / "metrics.jsonl")]
        happened = counted[-1] if counted else 0
        wrong = orderly(folder) if status == 0 else [(folder / "log").read_text()[-2000:]]
        yield {"turns": turns, "deaths": happened, "wrong": wrong}
        done += len(turns)


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.utils.logging.disable_progress_bar()
    base, seed = Path(sys.argv[1]), int(sys.argv[2])
    for word in sys.argv[3:]:
        name, _, count = word.partition("=")
        case, _, fault = name.partition(":")
        many = int(count)
        found = (
            deaths(base, many, seed) if case == "deaths" else kills(base, case, many, seed, fault)
        )
        for one in found:
            print(json.dumps({"name": name, **one}), flush=True)


if __name__ == "__main__":
    main()
