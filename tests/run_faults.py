"""Training runs by the command line: killed in a save, on a failing disk, interrupted, watched."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

from disk_faults import Calls, failing, killed, short, tampered
from training_harness import (
    RUNS,
    Parity,
    apart,
    begun,
    configuration,
    different,
    ended,
    go,
    prepared,
    state,
    warm,
    whole_run,
)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


def command(*words: str) -> int:
    """`windage train` where the process stands; its exit status."""
    from windage.cli.main import main
    from windage.llm import run

    run.task_of = lambda name, settings: Parity()
    return main(["train", "--quiet", *words])


def unsound(run: Path) -> list[str]:
    """Files of a run's folder that a reader finds broken."""
    import pyarrow.parquet as pq

    from windage.llm import checkpoint, journal

    readers = {
        ".parquet": pq.read_table,
        ".jsonl": journal.read,
        ".json": lambda path: json.loads(path.read_text()),
        ".toml": lambda path: tomllib.loads(path.read_text()),
    }
    wrong = []
    for path in [*run.rglob("*.*"), *run.glob("checkpoints/checkpoint-*")]:
        try:
            if path.is_dir() and path.suffix != ".unfinished":
                checkpoint.verify(path)
            elif ".unfinished" not in str(path) and path.suffix in readers:
                readers[path.suffix](path)
                assert path.suffix != ".jsonl" or path.read_bytes()[-1:] in (b"", b"\n")
        except Exception as problem:
            wrong.append(f"{path}: {problem!r}")
    return wrong


def resumed(folder: Path, file: Path, wanted: dict[str, object]) -> list[str]:
    """What is wrong once the run went on, or began again where it had not begun."""
    there = (folder / "run" / "config.toml").exists()
    words = ("--resume", "run") if there else (str(file),)
    if apart(folder, lambda: command(*words)) != 0:
        return ["the resumed run failed", (folder / "log").read_text()[-2000:]]
    return different(state(folder), wanted)


@cache
def by_command(base: Path, steps: int = 2) -> tuple[Path, list[str], dict[str, object]]:
    """A configuration's file, the calls of a run that nothing stops, and what it leaves."""
    model = prepared(base, "synchronous").model.path
    from windage.llm import config as configs

    file, told = base / f"{steps}.toml", base / f"{steps}.json"
    train = {"steps": steps, "prompts": 2, "passes": 1}
    file.write_text(configs.toml(configuration("synchronous", Path(model), train=train)))

    def watched() -> int:
        with tampered() as seen:
            status = command(str(file))
        told.write_text(json.dumps([seen.names, [n for n in sys.modules if n != "__main__"]]))
        return status

    for number in range(2):  # what the first imports, the second has
        folder = base / f"{steps}-{number}"
        assert apart(folder, watched) == 0, (folder / "log").read_text()
        calls, modules = json.loads(told.read_text())
        warm(modules)
    wanted = state(folder)
    assert state(base / f"{steps}-0") == wanted
    return file, calls, wanted


def saves(base: Path, every: int) -> Iterator[dict]:
    """Kill a run at each of the file-system calls of its last save; resume it."""
    from windage.llm import checkpoint

    config = prepared(base, "synchronous")
    _, wanted, _ = whole_run(base, "synchronous")
    save, told = checkpoint.save, base / "spans.json"

    def marked(seen: Calls, spans: list[tuple[int, int]]) -> None:
        def call(*arguments, **settings):
            before = len(seen.names)
            save(*arguments, **settings)
            spans.append((before, len(seen.names)))

        checkpoint.save = call

    def watched():
        spans: list[tuple[int, int]] = []
        with tampered() as seen:
            marked(seen, spans)
            go(config)
        told.write_text(json.dumps([seen.names, spans[-1]]))

    def broken(at: int) -> None:
        with tampered(at, killed):
            go(config)

    assert apart(base / "spans", watched) == 0
    calls, (first, last) = json.loads(told.read_text())
    for at in range(first, last, every):
        folder = base / f"save-{at}"
        statuses = [apart(folder, lambda at=at: broken(at))]
        wrong = unsound(folder / "run")
        statuses.append(apart(folder, lambda: go(config, resume=True)))
        if statuses != [-signal.SIGKILL, 0]:
            wrong += [f"statuses {statuses}", (folder / "log").read_text()[-2000:]]
        wrong += different(state(folder), wanted)
        shutil.rmtree(folder)
        yield {"count": 1, "wrong": wrong, "call": calls[at]}


def disk(base: Path, every: int) -> Iterator[dict]:
    """Let the disk fail at each call of a run, once or from then on; what it says, what it leaves.

    Either the call did not matter and the run is what it would have been, or it ends with status 2
    and one line that names a path in its folder; what lies there is whole, and resumed it is what
    it would have been.
    """
    file, calls, wanted = by_command(base)
    for at in range(0, len(calls), every):
        number = ERRORS[at % 3]
        kinds = {"once": (failing(number), False), "from then on": (failing(number), True)}
        if calls[at] == "write":
            kinds["short"] = (short, False)
        for kind, (fault, on) in kinds.items():
            folder = base / f"disk-{at}-{kind}"

            def broken(at=at, fault=fault, on=on) -> int:
                with tampered(at, fault, on=on):
                    return command(str(file))

            status = apart(folder, broken)
            wrong, log = unsound(folder / "run"), (folder / "log").read_text()
            if status == 0:
                wrong += different(state(folder), wanted)
            elif status != 2 or not plain(log, number):
                wrong += [f"status {status}", log[-2000:]]
            if not on:
                wrong += [str(path) for path in folder.rglob("*.unfinished")]
            wrong += resumed(folder, file, wanted)
            shutil.rmtree(folder)
            yield {"count": 1, "wrong": wrong, "call": calls[at], "kind": kind, "status": status}


def plain(log: str, number: int) -> bool:
    """Whether it is one line that names a path in the run's folder and says what the disk said."""
    parts = ("'run'" in log or "'run/" in log, os.strerror(number) in log)
    return log.startswith("windage train: ") and log.count("\n") == 1 and all(parts)


def interrupts(base: Path, count: int, seed: int) -> Iterator[dict]:
    """Press Ctrl-C at random times, every other time once more soon after; resume the run."""
    draw, (file, _, wanted) = random.Random(f"{seed} interrupts"), by_command(base)
    lasted = seconds(base, file)
    done = number = 0
    while done < count and number < RUNS * count:
        folder, number = base / f"interrupted-{number}", number + 1
        pressed = [(draw.uniform(0, lasted), signal.SIGINT)]
        if number % 2:
            pressed.append((draw.uniform(0, 0.1), signal.SIGINT))
        status = apart(folder, lambda: command(str(file)), *pressed)
        wrong = unsound(folder / "run")
        log = (folder / "log").read_text()
        if status not in (0, 130) or "Traceback" in log:
            wrong += [f"status {status}", log[-2000:]]
        wrong += resumed(folder, file, wanted)
        shutil.rmtree(folder)
        done += status == 130
        yield {"count": int(status == 130), "wrong": wrong, "pressed": len(pressed)}


def seconds(base: Path, file: Path) -> float:
    """That a run takes."""
    began = time.perf_counter()
    assert apart(base / "timed", lambda: command(str(file))) == 0
    return time.perf_counter() - began


def together(base: Path, steps: int) -> Iterator[dict]:
    """While a run writes, read all of its files and try to begin a second run in its folder."""
    file, _, _ = by_command(base)
    folder, found = base / "together", base / "together.json"
    words = ("--train.steps", str(steps), "--evaluate.every", "0")

    def watching() -> None:
        found.write_text(json.dumps(watch(folder, file, steps)))

    trainer = begun(folder, lambda: command(str(file), *words))
    watched = apart(base / "watcher", watching)
    if ended(trainer) != 0 or watched != 0:
        logs = [(one / "log").read_text()[-2000:] for one in (folder, base / "watcher")]
        yield {"count": 0, "wrong": ["a process failed", *logs]}
        return
    yield json.loads(found.read_text())


def watch(folder: Path, file: Path, steps: int) -> dict:
    """Readers and second runs until the first is done; what they met."""
    from windage.analysis.runs import document
    from windage.llm import checkpoint, journal

    os.chdir(folder)
    run, looks, refused, done = folder / "run", 0, 0, 0
    wrong: list[str] = []
    while done < steps:
        done = len(journal.read(run / "metrics.jsonl"))
        if not done:
            continue
        said = StringIO()
        with redirect_stderr(said):
            status = command(str(file))
        refused += "belongs to a run that goes on" in said.getvalue()
        if status != 2 or "allowed" not in said.getvalue():
            wrong.append(f"a second run: {status} {said.getvalue()}")
        found = [one["step"] for one in journal.read(run / "metrics.jsonl")]
        if found != list(range(1, len(found) + 1)):
            wrong.append(f"steps {found}")
        wrong += unsound(run / "rollouts")
        for path in run.glob("*.jsonl"):
            journal.read(path)
        newest = checkpoint.latest(run / "checkpoints", wrong.append)
        if newest is not None and looks % 5 == 0:
            checkpoint.load(newest)
            document.run([run])
        looks += 1
    return {"count": refused, "wrong": wrong, "looks": looks}


def spoiled(base: Path, policy: str, count: int) -> Iterator[dict]:
    """Plant numbers that are not finite at four steps of five; what the guard makes of them."""
    model = Path(prepared(base, "synchronous").model.path)
    folder = base / f"spoiled-{policy}"

    def guarded() -> None:
        from spoiled_numbers import PLACES, assert_guarded

        from windage.llm import run

        run.task_of = lambda name, settings: Parity()
        places = [*PLACES, ""] * -(-count // len(PLACES))
        assert_guarded(model, policy, places, SimpleNamespace(setattr=setattr))

    status = apart(folder, guarded)
    yield {"count": count, "wrong": [(folder / "log").read_text()[-2000:]] * (status != 0)}
