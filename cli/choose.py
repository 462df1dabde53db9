"""`windage choose`: lag, length, group size and budget in, ranked recipes with the reasons out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from windage.analysis.choose.request import PRECISIONS, Request, precision
from windage.cli.output import deliver, one_thread, progress
from windage.estimators.errors import BadInput

HELP = {
    "response_tokens": "mean length of a response, in tokens",
    "spread": "standard deviation of the logarithm of the length",
    "prompt_tokens": "mean length of a prompt",
    "group_size": "responses of a prompt",
    "prompts": "prompts of a batch",
    "mismatch": "KL(policy | sampler) a token of weights that are the same, in nats",
    "drift": "KL a token between policies one update apart",
    "generation_gpus": "GPUs that generate",
    "training_gpus": "GPUs that train",
    "slots": "responses that a generation GPU writes at the same time",
    "token_seconds": "seconds a token of a response takes",
    "update_seconds": "seconds of an update",
    "sync_seconds": "seconds until new weights are in the sampler",
    "verifier_seconds": "seconds from a response's end to its reward",
    "pass_rate": "mean share of right answers",
    "budget": "GPU-hours",
    "gain": "what the run is hoped to add to the score (0 to 1), to plan an experiment",
}
SWITCHES = {
    "critic": ("--critic", "there is a critic"),
    "logprobs": ("--no-logprobs", "the sampler's log-probabilities are not recorded"),
    "head": ("--no-head", "the sampler's likeliest tokens are not recorded"),
    "covered": ("--uncovered", "the sampler cannot draw all that the policy can (top-p, top-k)"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of a request."""
    plain = Request()
    for field in fields(Request):
        if field.name in HELP:
            default = getattr(plain, field.name)
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=number(type(default)),
                metavar="N" if isinstance(default, int) else "X",
                help=f"{HELP[field.name]}; default: {default:g}",
            )
    parser.add_argument(
        "--precision",
        metavar="|".join(PRECISIONS),
        help="the sampler's arithmetic, instead of --mismatch; a rough figure each",
    )
    for flag, words in SWITCHES.values():
        parser.add_argument(flag, action="store_true", help=words)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DUMP",
        help="measure lengths and mismatch from a dump: any that diagnose reads, or our store",
    )


def number(kind: type) -> Callable[[str], Any]:
    """A `type=` that says what is allowed."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            words = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {words}") from None

    return parse


def check(arguments: argparse.Namespace) -> Request:
    """The request that the flags state.

    Raises:
        BadInput: a value outside its limits, two flags for one thing, or a file that does not hold
            what is measured.
    """
    given = {key: v for key in HELP if (v := getattr(arguments, key)) is not None}
    if arguments.precision is not None:
        if "mismatch" in given:
            raise BadInput("--precision and --mismatch: both set the mismatch; allowed: one")
        given["mismatch"] = precision(arguments.precision)
    if arguments.source is not None:
        from windage.analysis.choose.measured import measured

        for key, value in measured(arguments.source).items():
            if key in given:
                raise BadInput(f"--from and --{key.replace('_', '-')}: both set it; allowed: one")
            given[key] = value
    for key, (flag, _) in SWITCHES.items():
        on = getattr(arguments, flag[2:].replace("-", "_"))
        given[key] = on != getattr(Request, key) if on else getattr(Request, key)
    return Request(**given, seed=arguments.seed)


def run(arguments: argparse.Namespace) -> int:
    """Check the request, rank, print."""
    request = check(arguments)
    one_thread()
    from windage.analysis.choose.choice import choose

    with progress("orders") as advance:
        document = choose(request, advance)
    deliver(document, arguments)
    return 0
