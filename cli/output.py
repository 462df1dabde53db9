"""What verbs share around their work: one thread, the terminal's table, the folder's files."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windage.estimators.errors import BadInput


def one_thread() -> None:
    """Keep torch to one thread unless OMP_NUM_THREADS says otherwise.

    Tensors are small here: on a busy machine a second thread takes six times the processor time.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def show(document: Mapping[str, Any]) -> None:
    """Print a document as a table on standard output."""
    from rich.console import Console

    from windage.analysis.report import table

    Console(highlight=False).print(table(document))


def deliver(document: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Write the folder that was asked for; print the document, or what a person reads of it."""
    if arguments.out is not None:
        write(document, arguments.out)
    if arguments.json:
        print(json.dumps(document, allow_nan=False))
    else:
        show(document)


def write(document: Mapping[str, Any], folder: Path) -> None:
    """Write a document's tables, figures and page, and say so on standard error.

    Raises:
        BadInput: the folder cannot be written to.
    """
    from windage.analysis.report import verb
    from windage.analysis.report import write as write_files

    try:
        files = write_files(document, folder)
    except OSError as problem:
        raise BadInput(
            f"--out {str(folder)!r}: {problem.strerror}; allowed: a directory with room"
        ) from None
    print(f"windage {verb(document)}: {len(files)} files in {folder}", file=sys.stderr)


@contextmanager
def interruptible(line: str) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C ask for an end that loses nothing; the second is one at once.

    Gives a function that says whether it was asked for.

    Args:
        line: said on standard error when it is; empty: nothing is.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, f"{line}\n".encode() if line else b"")  # a stream may be inside a line

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of something are done, on standard error, where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
