"""`windage study --model`: bias and variance of estimators, measured on a language model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from windage.cli import specs
from windage.cli.common import whole
from windage.cli.output import deliver, progress
from windage.estimators.errors import BadInput, unknown
from windage.llm.measure import behavior
from windage.llm.measure.plan import Request

if TYPE_CHECKING:
    from windage.llm.measure.study import Ready

PARAMETERS = ("last", "head", "lora", "all")
DTYPES = ("float32", "bfloat16", "float64")
SAMPLERS = ("policy",)
# Flags of a study of a model, with what they are without being given.
FLAGS: dict[str, tuple[Any, str, str]] = {
    "task": (str, "NAME[:key=value,...]", "where questions come from; default: arithmetic"),
    "prompts": (whole(3), "N", "questions, which every standard error is by; default: 32"),
    "references": (
        whole(2),
        "N",
        "responses of the policy a prompt, for the gradient; default: 16",
    ),
    "responses": (
        whole(1),
        "N",
        "responses of a sampler a prompt, whole groups; default: 16, or two groups",
    ),
    "parameters": (
        str,
        "|".join(PARAMETERS),
        "by which gradients are taken; default: last (block)",
    ),
    "lora_rank": (whole(1), "N", "of the adapters of --parameters lora; default: 8"),
    "sketch": (whole(0), "K", "numbers kept of a gradient, 0: all; default: 4096"),
    "max_tokens": (whole(1), "N", "of a response; default: 64"),
    "head": (whole(0), "K", "likeliest tokens recorded, for score centering; default: 32"),
    "batch": (whole(1), "N", "responses drawn at a time; default: 64"),
    "dtype": (str, "|".join(DTYPES), "of the weights; default: float32"),
    "device": (str, "NAME", "default: auto"),
}
# What belongs to problems that are computed exactly.
EXACT = ("study", "problem", "behavior", "samples", "frontier")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a study of a model to those of a study."""
    flags = parser.add_argument_group("measured on a language model")
    flags.add_argument(
        "--model", metavar="FOLDER", help="measure on this model, in place of a problem"
    )
    flags.add_argument(
        "--samplers",
        nargs="+",
        action="extend",
        metavar="KIND[:key=value,...]",
        help="who draws the data: " + ", ".join(_listed()) + "; default: policy",
    )
    for name, (kind, shown, words) in FLAGS.items():
        flags.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=shown, help=words)
    flags.add_argument(
        "--dry-run", action="store_true", help="say what it would cost, and spend a group on it"
    )


def _listed() -> Iterator[str]:
    for kind, settings in behavior.KINDS.items():
        yield ":".join(filter(None, (kind, ",".join(settings))))


def refuse(arguments: argparse.Namespace) -> None:
    """Refuse flags of a model where there is none.

    Raises:
        BadInput: names the flag.
    """
    given = [name for name in ("samplers", *FLAGS) if getattr(arguments, name) is not None]
    given += ["dry_run"] if arguments.dry_run else []
    if given:
        raise BadInput(f"--{given[0].replace('_', '-')} is of a model; allowed: with --model")


def request_of(arguments: argparse.Namespace) -> Request:
    """Turn flags into a request.

    Raises:
        BadInput: names the flag and what is allowed.
    """
    for name in EXACT:
        if getattr(arguments, name) is not None:
            raise BadInput(f"--{name} is of an exact study; allowed: without --model")
    if arguments.engine != "auto" or arguments.covariance:
        flag = "--covariance" if arguments.covariance else "--engine"
        raise BadInput(f"{flag} is of an exact study; allowed: without --model")
    for name, allowed in (("parameters", PARAMETERS), ("dtype", DTYPES)):
        value = getattr(arguments, name)
        if value is not None and value not in allowed:
            raise unknown(name, value, allowed)
    path = Path(arguments.model)
    if not (path / "config.json").is_file():
        raise BadInput(f"--model {arguments.model!r} has no config.json; allowed: a model folder")
    sizes = _sizes(arguments)
    given = {name: getattr(arguments, name) for name in FLAGS}
    if given["responses"] is None:
        given["responses"] = max(16, 2 * max(sizes))
    if arguments.error is not None:
        given["error"] = arguments.error
    return Request(
        model=arguments.model,
        samplers=tuple(map(behavior.parse, arguments.samplers or SAMPLERS)),
        estimators=tuple(map(specs.estimator, arguments.estimators or ())),
        group_sizes=sizes,
        seed=arguments.seed,
        **{name: value for name, value in given.items() if value is not None},
    ).check()


def _sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Group sizes: the one given, or those that are swept."""
    for text in arguments.sweep or ():
        _, values = specs.sweep(text, ["group_size"])
        return tuple(sorted(int(value) for value in values))
    return (arguments.group_size or 4,)


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, say what it costs, measure, print."""
    request = request_of(arguments)
    from windage.llm.tasks import index

    task = index.get(*index.parse(request.task))
    try:
        from windage.analysis.measured import toy
        from windage.llm.measure import document, store, study

        made = study.ready(request, task)
        if arguments.out is not None:
            store.check(arguments.out, request.told(made.loaded))
        made = replace(made, cost=study.tried(made))
        print(in_words(made.cost), file=sys.stderr)
        if arguments.dry_run:
            print(json.dumps({"schema": document.SCHEMA, "rows": [], "cost": made.cost}))
            return 0
        start = time.perf_counter()
        with _folder(arguments) as folder:
            measure(made, folder)
            spent = time.perf_counter() - start
            found = document.document(made, folder, spent)
            deliver(found | {"toy": toy.compared(found)}, arguments)
    finally:
        task.close()
    return 0


def measure(study: Ready, folder: Path) -> None:
    """Draw and differentiate; an interruption keeps what is done."""
    from windage.llm.measure.study import run as measured

    try:
        with progress("responses") as advance:
            measured(study, folder, advance)
    except KeyboardInterrupt:
        print(f"windage study: {folder} goes on with the same command", file=sys.stderr)
        raise


@contextmanager
def _folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Where a study is kept while it runs."""
    if arguments.out is not None:
        yield arguments.out
        return
    with TemporaryDirectory() as name:
        yield Path(name)


def in_words(cost: Mapping[str, Any]) -> str:
    """What a study costs, in a line."""
    seconds = cost["seconds"]
    parts: Sequence[str] = (
        f"{cost['responses']:,} responses of at most {cost['tokens_at_most']:,} tokens",
        f"{cost['forward_passes']:,} forward and up to {cost['backward_passes_at_most']:,} "
        f"backward passes by {cost['parameters']:,} parameters",
        f"about {seconds['total'] / 60:.1f} minutes, up to {seconds['draw'] / 60:.1f} of them to "
        "draw",
        f"{cost['memory'] / 2**30:.2f} GiB for sketches of {cost['sketch']:,} numbers "
        f"(error {100 * cost['sketch_error']:.1f} %, seen {100 * cost['sketch_error_seen']:.1f} %)",
        f"{cost['disk'] / 2**30:.2f} GiB of disk",
    )
    return "windage study: " + "; ".join(parts)
