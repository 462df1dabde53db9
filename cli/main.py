"""`windage VERB`: finds the verb, hands it its flags and turns bad input into one line.

A verb is a module `windage.cli.<verb>` with `configure(parser) -> None` and
`run(arguments) -> int`; it imports torch and everything heavy inside `run`, after its input was
checked.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from windage.cli.common import Parser, common
from windage.estimators.errors import BadInput, unknown

VERBS = {
    "study": "exact bias and variance of estimators on a problem",
    "audit": "do declared claims hold? for catalogue entries and for any module:function loss",
    "claims": "the documents' statements, executed: statement, measured figures, verdict",
    "learn": "training on toy problems: who improves, stalls, drifts, collapses",
    "pipeline": "asynchronous pipeline: throughput, lag, selection bias",
    "choose": "lag, length, group size, budget in: ranked recipes with the reasons",
    "diagnose": "a rollout dump of a real run in: mismatch, faults, which estimator it supports",
    "record": "how to record runs of verl, TRL and prime-rl, and prime-rl's exports as a store",
    "evaluate": "a language model on held-out questions: pass@k, maj@k, two models in pairs",
    "sample": "responses of a language model, judged and recorded, as a store to train on",
    "train": "a language model trained with the estimators that the studies measure",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done; 1 a claim or check failed; 2 bad input, or a file or standard output that cannot be
        used, after one line on standard error; 130 interrupted; 141 the reader of standard output
        went away.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"windage {words[0]}" if words and words[0] in VERBS else "windage"
    try:
        status = dispatch(words)
        print(end="", flush=True)
        return status
    except BadInput as problem:
        if os.environ.get("RANK", "0") == "0":  # of processes that train together, the first speaks
            print(f"{name}: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard()
        return 141
    except OSError as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        discard()
        return 2


def discard() -> None:
    """Send what standard output still holds nowhere, so that the interpreter's end stays silent."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(words: Sequence[str]) -> int:
    """Run the verb that the first word names, or answer `--help` and `--version`."""
    if words and not words[0].startswith("-"):
        if words[0] not in VERBS:
            raise unknown("verb", words[0], VERBS)
        return run_verb(words[0], words[1:])
    parser = Parser(
        prog="windage",
        usage="windage VERB [--help] ...",
        description="What correcting drift costs in bias, variance and throughput.",
        epilog="verbs:\n" + "\n".join(f"  {verb:10} {job}" for verb, job in VERBS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    if not parser.parse_args(words).version:
        raise BadInput(f"a verb is missing; allowed: {', '.join(VERBS)}")
    from importlib.metadata import version

    print(f"windage {version('windage')}")
    return 0


def run_verb(verb: str, words: Sequence[str]) -> int:
    """Import the verb's module, parse its flags and run it."""
    module = import_module(f"windage.cli.{verb}")
    parser = Parser(prog=f"windage {verb}", description=VERBS[verb])
    module.configure(parser)
    common(parser)
    arguments = parser.parse_args(words)
    status: int = module.run(arguments)
    return status
