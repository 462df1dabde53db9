"""Training runs in children that are killed, or whose engine dies; whether that left a trace."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from disk_faults import killed, tampered

STEPS, PROMPTS, GROUP, LAG = 3, 3, 2, 1
# What is to happen so often is given up where it does not in so many runs for each.
RUNS = 3
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
    "run": {"folder": "run", "save_every": 1, "card": False, "report": False, "samples": 1},
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

    def alike(self, answers):
        return list(range(len(answers)))

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


def begun(folder: Path, work: Callable[[], int | None], log: str = "log") -> int:
    """Start the work in a child that stands in a folder and writes to its log."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder)
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            status = work() or 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    return child


def ended(child: int) -> int:
    """Its exit status, negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def apart(folder: Path, work: Callable[[], int | None], *signals: tuple[float, int]) -> int:
    """Do the work in a child that stands in a folder; send it signals, each after some seconds."""
    child = begun(folder, work)
    for seconds, number in signals:
        time.sleep(seconds)
        os.kill(child, number)
    return ended(child)


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

    The first kill is at the very end, before the oldest checkpoint goes; every third run's is by
    the clock; every other resumed run is killed once more.

    Args:
        count: kills; those that came too late are not counted.
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

    done = number = 0
    while done < count and number < RUNS * count:
        folder = base / f"{case}{fault}-{number}"
        at, again = draw.randrange(len(calls)), draw.randrange(half)
        if fault:
            at = half + at // 5
        elif number == 0:
            at = len(calls) - 1 - calls[::-1].index("rename")
        by_clock = number % 3 == 2 and not fault
        if by_clock:
            at = draw.uniform(0, lasted)
            statuses = [apart(folder, lambda: go(config), (at, signal.SIGKILL))]
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
        happened, number = statuses.count(-signal.SIGKILL), number + 1
        done += happened
        told = {"at": at, "call": call, "statuses": statuses, "log": log}
        yield {"count": happened, "wrong": wrong, **told}


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
        from windage.llm.samplers.protocol import EngineDied

        def fated():
            self.turns[0] -= 1
            if self.turns[0] == 0:
                self.turns.pop(0)
                kind = EngineDied if len(self.turns) % 2 else RuntimeError  # vLLM's, and any
                raise kind("engine died")
            if between is not None:
                between()

        return self.inner.sample(requests, sampling, fated)


def deaths(base: Path, count: int, seed: int) -> Iterator[dict]:
    """Kill the sampler of asynchronous runs, some times a run; say what is not as it should be."""
    from windage.llm import journal, run

    config, draw = prepared(base, "asynchronous"), random.Random(seed)
    engine, done, number = run.sampler_of, 0, 0
    while done < count and number < RUNS * count:
        folder = base / f"deaths-{number}"
        turns = [draw.randint(1, 5) for _ in range(3)]

        def mortal(turns=turns):
            left = [*turns, -1]
            run.sampler_of = lambda *arguments: Mortal(engine(*arguments), left)
            go(config)

        status = apart(folder, mortal)
        counted = [one["deaths"] for one in journal.read(folder / "run" / "metrics.jsonl")]
        happened = counted[-1] if counted else 0
        wrong = orderly(folder) if status == 0 else [(folder / "log").read_text()[-2000:]]
        yield {"count": happened, "wrong": wrong, "turns": turns}
        done, number = done + happened, number + 1
