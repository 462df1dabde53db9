"""TensorBoard, W&B and trackio beside the run's own metrics, through accelerate's trackers.

A tracker never stops a run: one that fails while it logs is named once on standard error and left
alone from there on.  Nothing is sent anywhere unless the user's environment says so: W&B is offline
without a key, trackio keeps its data on this machine.  What they print goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windage.estimators.errors import BadInput, unknown

# Tracker, and the package that it needs, which the extra of the same name installs.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
Track = Callable[[Mapping[str, Any]], None]


def check(names: Sequence[str]) -> None:
    """Refuse a tracker that is not known or whose package is not there, before anything starts.

    Raises:
        BadInput: which, and how to install it.

    Example:
        >>> check(["tensorbord"])
        Traceback (most recent call last):
        windage.estimators.errors.BadInput: unknown tracker 'tensorbord'; nearest valid name: \
tensorboard; allowed: tensorboard, wandb, trackio
    """
    for name in names:
        if name not in PACKAGES:
            raise unknown("tracker", name, PACKAGES)
        if find_spec(PACKAGES[name]) is None:
            raise BadInput(
                f"tracker {name!r} needs the package {PACKAGES[name]}, which is not installed; "
                f"pip install 'windage[{name}]'"
            )


@contextmanager
def tracking(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> Iterator[Track]:
    """Give each record of a step to the trackers, until the block ends.

    Args:
        names: of trackers; none: nothing is done.
        folder: of the run; what a tracker writes goes under it.
        config: of the run, for trackers that show it.

    Raises:
        BadInput: a tracker is not known, not installed, or does not start.
    """
    check(names)
    with ExitStack() as stack:
        live = [
            _guarded(name, stack.enter_context(_started(name, folder, config))) for name in names
        ]

        def track(record: Mapping[str, Any]) -> None:
            step = int(record["step"])
            values = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
            for log in live:
                log(values, step)

        yield track


@contextmanager
def _started(name: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Any]:
    """A tracker of accelerate's, finished at the end whatever happened."""
    try:
        with redirect_stdout(sys.stderr):
            tracker = _tracker(name, folder, config)
            tracker.start()
    except Exception as problem:
        raise BadInput(f"tracker {name!r} does not start: {_words(problem)}") from problem
    try:
        yield tracker
    finally:
        try:
            with redirect_stdout(sys.stderr):
                tracker.finish()
        except Exception as problem:
            _tell(name, problem)


def _tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """accelerate's, set up to write under the run's folder."""
    from accelerate import PartialState
    from accelerate import tracking as trackers

    PartialState()
    if name == "tensorboard":
        return trackers.TensorBoardTracker("tensorboard", folder)
    if name == "wandb":
        offline = "WANDB_API_KEY" not in os.environ and "WANDB_MODE" not in os.environ
        return trackers.WandBTracker(
            "windage",
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            **({"mode": "offline"} if offline else {}),
        )
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    return trackers.TrackioTracker("windage", name=folder.name, config=dict(config))


def _guarded(name: str, tracker: Any) -> Callable[[Mapping[str, Any], int], None]:
    """Log until the first failure, which is told."""
    alive = True

    def log(values: Mapping[str, Any], step: int) -> None:
        nonlocal alive
        if not alive:
            return
        try:
            tracker.log(dict(values), step=step)
        except Exception as problem:
            alive = False
            _tell(name, problem)

    return log


def _words(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__} {problem}".split())


def _tell(name: str, problem: Exception) -> None:
    print(
        f"windage train: tracker {name!r} failed and is left out: {_words(problem)}",
        file=sys.stderr,
    )
