"""`windage train`: a language model trained with the very estimators that the studies measure."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from windage.cli import run_flags
from windage.cli.output import deliver, interruptible
from windage.estimators.errors import BadInput
from windage.llm.config import Config, build, plain, toml

STOPPING = "windage train: ends after this step and saves; Ctrl-C once more: at once"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, resuming and the dry run."""
    run_flags.add(parser)
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with the run in this folder"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the resolved configuration, the memory it needs and the recipe's card",
    )
    parser.add_argument("--quiet", action="store_true", help="no line a step")


def run(arguments: argparse.Namespace) -> int:
    """Train, and show what came of it."""
    config = _resolved(arguments)
    if arguments.dry_run:
        return _dry(config, arguments)
    if not config.run.folder:
        raise BadInput("run.folder is missing; allowed: a folder for the run")
    from windage.llm import trackers

    trackers.check(config.run.trackers)
    from windage.analysis.runs.document import run as document_of
    from windage.llm import checkpoint, processes
    from windage.llm import run as runs
    from windage.llm.train import train

    folder = Path(config.run.folder)
    ranks, wrap, device = processes.join(config.model.device)
    config = build({"model": {"device": device}}, config)
    with ExitStack() as stack:
        stack.enter_context(processes.leaving(ranks))
        with ranks.together():
            if ranks.first:
                stack.enter_context(checkpoint.claim(folder))
        ready = runs.start(config, ranks=ranks, wrap=wrap, resume=arguments.resume is not None)
        stop = stack.enter_context(interruptible(STOPPING if ranks.first else ""))
        watch = None
        with ranks.together():
            if ranks.first:
                _tell(ready.start, ready.steps, resumed=arguments.resume is not None)
                lacks = arguments.resume is None or not (folder / "card.json").exists()
                if config.run.card and lacks:
                    _keep(folder, _card(config))
                watch = stack.enter_context(_watching(config, arguments.quiet, ready.steps))
        done = train(ready, watch or (lambda record: None), stop)
    if not ranks.first:
        return 0
    if not done:
        _say(f"stopped and saved; windage train --resume {shlex.quote(str(folder))} goes on")
        return 130
    found = document_of([folder])
    if config.run.report:
        _report(found, folder / "report")
    deliver(found, arguments)
    return 0


def _report(document: dict[str, Any], folder: Path) -> None:
    """Write tables, figures and the page of a run into its folder.

    Raises:
        BadInput: it has no room for them.
    """
    from windage.analysis.report import write

    try:
        write(document, folder)
    except OSError as problem:
        raise BadInput(
            f"{str(folder)!r} is not written: {problem.strerror}; allowed: a folder with room, "
            "and --resume, which writes it again"
        ) from None


def _say(words: str) -> None:
    print(f"windage train: {words}", file=sys.stderr, flush=True)


def _tell(start: int, steps: int, *, resumed: bool) -> None:
    """Where a resumed run goes on, if that is not where one would think."""
    if resumed and start == 0:
        _say("no checkpoint was there yet, so the run begins again")
    elif resumed and start == steps:
        _say(f"all {steps} steps are done; more by --train.steps")


def _resolved(arguments: argparse.Namespace) -> Config:
    """From the file and flags; of a resumed run, what its folder says, with flags in place."""
    if arguments.resume is not None:
        file = arguments.resume / "config.toml"
        if arguments.file is not None:
            raise BadInput("a file beside --resume; allowed: flags beside --resume")
        if not file.exists():
            raise BadInput(f"--resume {str(arguments.resume)!r} holds no run; allowed: its folder")
        arguments.file = file
        if vars(arguments)["run.folder"] is not None:
            raise BadInput("--run.folder beside --resume; allowed: the run stays in its folder")
        config = run_flags.resolve(arguments)
        return run_flags.check(build({"run": {"folder": str(arguments.resume)}}, config))
    return run_flags.check(run_flags.resolve(arguments))


def _card(config: Config) -> dict[str, Any]:
    """The recipe's card at the run's length, group size and lag."""
    from windage.analysis.card import card
    from windage.analysis.choose.request import PRECISIONS
    from windage.llm import recipe

    train = config.train
    updates = train.passes * train.minibatches
    ahead = {"one step off": 1, "asynchronous": train.max_lag}.get(train.mode, 0)
    narrow = "bfloat16" in (config.sampling.dtype, config.model.autocast, config.model.dtype)
    return card(
        recipe.resolve(config),
        length=config.sampling.max_tokens,
        group_size=train.group_size,
        lag=(ahead + 1) * updates - 1,
        mismatch=PRECISIONS["bf16"] if narrow else 0.0,
        seed=config.run.seed,
    )


def _keep(folder: Path, card: dict[str, Any]) -> None:
    from windage.analysis.card import lines
    from windage.llm.folder import whole

    print("\n".join(lines(card)), file=sys.stderr)
    whole(folder / "card.json", json.dumps(card, allow_nan=False, indent=1) + "\n")


@contextmanager
def _watching(config: Config, quiet: bool, steps: int) -> Iterator[Callable[[Any], None]]:
    """What is told of each step: a line, and trackers where they are asked for."""
    from windage.llm.console import watcher
    from windage.llm.trackers import tracking

    show = (lambda record: None) if quiet else watcher(steps)
    with tracking(config.run.trackers, Path(config.run.folder), plain(config)) as track:

        def watch(record: Any) -> None:
            show(record)
            track(record)

        yield watch


def _dry(config: Config, arguments: argparse.Namespace) -> int:
    from windage.llm.memory import estimate

    memory, card = estimate(config), _card(config)
    if arguments.json:
        found = {"schema": "windage/train/1", "dry_run": True, "rows": [], "config": toml(config)}
        print(json.dumps({**found, "memory": memory, "card": card}, allow_nan=False))
        return 0
    from windage.analysis.card import lines

    print(toml(config))
    print(f"[memory, GiB]  {memory.pop('parameters') / 1e6:,.1f} million parameters")
    print("\n".join(f"{name} = {value:.2f}" for name, value in memory.items()))
    print("\n" + "\n".join(lines(card)))
    return 0
