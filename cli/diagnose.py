"""`windage diagnose`: what a rollout dump of a real run tells."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from windage.cli import rescore
from windage.cli.output import deliver, one_thread, progress
from windage.estimators.errors import BadInput

FORMATS = "prime-rl, NeMo-RL, slime, open-instruct, PipelineRL, windage, plain JSONL or parquet"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the dump and what is asked of it."""
    parser.add_argument(
        "dump",
        nargs="?",
        metavar="DUMP",
        help=f"a file or folder ({FORMATS}); default: the dump that ships with windage",
    )
    parser.add_argument(
        "--columns",
        type=columns,
        metavar="FIELD=NAME,...",
        help="for files of no known format: the column that holds a field, such as "
        "logp=actor_logprobs,behavior_logp=vllm_logprobs",
    )
    parser.add_argument("--compare", metavar="OTHER", help="a second dump, set beside the first")
    parser.add_argument(
        "--cap",
        type=caps,
        default=(2.0, 5.0),
        metavar="X,...",
        help="ratios beyond which tokens and responses are counted; default: 2,5",
    )
    rescore.configure(parser)


def there(text: str | None, what: str) -> Path | None:
    """Refuse a path that is not there.

    Raises:
        BadInput: names it.
    """
    if text is not None and not (text and Path(text).exists()):
        raise BadInput(f"{what} {text!r} is not there; allowed: a file or folder")
    return None if text is None else Path(text)


def columns(text: str) -> Mapping[str, str]:
    """Read FIELD=NAME pairs."""
    found: dict[str, str] = {}
    for pair in text.split(","):
        field, equals, name = (part.strip() for part in pair.partition("="))
        if not (field and equals and name) or field in found:
            raise argparse.ArgumentTypeError(
                f"{pair!r}; allowed: field=column pairs, each field once, joined by commas"
            )
        found[field] = name
    return found


def caps(text: str) -> tuple[float, ...]:
    """Read ratios above 1, in order."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = [0.0]
    if not all(1 < cap < math.inf for cap in found):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers above 1, joined by commas")
    return tuple(found)


def run(arguments: argparse.Namespace) -> int:
    """Read, judge, print; a sign that is raised is a finding, not a failure."""
    if arguments.columns is not None:
        from windage.analysis.diagnose.readers.plain import named

        named(arguments.columns)
        if arguments.dump is None:
            raise BadInput("--columns needs a dump; allowed: a file or folder before it")
    chosen = there(arguments.dump, "DUMP")
    other = there(arguments.compare, "--compare")
    asked = rescore.checked(arguments)
    one_thread()
    from windage.analysis.diagnose.document import demo, diagnose

    found = None
    if asked is not None and chosen is not None:
        found = rescore.rescored(chosen, arguments.columns, asked, arguments.seed)
    with progress("rows") as advance:
        document = diagnose(
            demo() if chosen is None else chosen,
            columns=arguments.columns,
            compare=other,
            caps=arguments.cap,
            advance=lambda done: advance(done, done),
        )
    document["rescored"] = found
    deliver(document, arguments)
    return 0
