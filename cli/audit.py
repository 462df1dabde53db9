"""`windage audit`: decide what entries of the catalogue, or any loss, claim."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from windage.analysis.audit.words import LOSS_CLAIMS, SIGNATURES
from windage.cli import specs
from windage.cli.output import deliver, one_thread
from windage.estimators.claims import ALWAYS, PROPERTIES, VALUED
from windage.estimators.errors import BadInput, unknown
from windage.estimators.index import SETTINGS

if TYPE_CHECKING:
    from windage.analysis.audit.document import Request

Named = tuple[str, str, dict[str, float]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add targets and what they are held to."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="ENTRY[:key=value,...] or module:function; default: every entry",
    )
    parser.add_argument(
        "--like",
        metavar="ENTRY[:key=value,...]",
        help="hold a loss to this entry's correction and aggregation",
    )
    parser.add_argument(
        "--claims", metavar="A,B", help="decide these claims only; a loss is held to them"
    )
    parser.add_argument(
        "--signature",
        type=_signature,
        metavar="|".join(SIGNATURES),
        help="how to call a loss; default: by the names of its parameters",
    )
    parser.add_argument(
        "--planted", action="store_true", help="audit planted faults: which check finds which"
    )


def _epilog() -> str:
    def listed(title: str, words: dict[str, str]) -> str:
        width = max(map(len, words))
        return "\n".join([title, *(f"  {name:{width}}  {w}" for name, w in words.items())])

    first = (
        "A module:function is your own code; it is imported and run. The working directory comes "
        "last\non the import path. Its advantages are given numbers: correction and aggregation "
        "are judged.\n\n"
    )
    return first + "\n\n".join(
        (
            listed("signatures of a loss:", SIGNATURES),
            listed("claims of a loss:", LOSS_CLAIMS),
            listed("claims of an entry:", {**PROPERTIES, **VALUED, **ALWAYS}),
        )
    )


def _signature(text: str) -> str:
    if text not in SIGNATURES:
        raise argparse.ArgumentTypeError(str(unknown("signature", text, SIGNATURES)))
    return text


def run(arguments: argparse.Namespace) -> int:
    """Check every word, audit, print; 1 where something is not as claimed."""
    if arguments.planted:
        return _planted(arguments)
    request = check(arguments)
    one_thread()
    from windage.analysis.audit import document

    return _print(document.run(request), arguments)


def _print(document: dict[str, object], arguments: argparse.Namespace) -> int:
    deliver(document, arguments)
    return 0 if document["passed"] else 1


def _planted(arguments: argparse.Namespace) -> int:
    given = [arguments.targets, arguments.like, arguments.claims, arguments.signature]
    if any(given):
        raise BadInput("--planted audits its own faults; allowed with it: --json, --out, --seed")
    one_thread()
    from windage.analysis.audit.planted import document

    return _print(document(seed=arguments.seed), arguments)


def check(arguments: argparse.Namespace) -> Request:
    """Turn words into a request, without torch.

    Raises:
        BadInput: names the word and what is allowed.
    """
    texts = arguments.targets or list(SETTINGS)
    losses = [text for text in texts if _is_loss(text)]
    entries = [_entry(text) for text in texts if not _is_loss(text)]
    if not losses:
        for flag, given in (("--like", arguments.like), ("--signature", arguments.signature)):
            if given is not None:
                raise BadInput(f"{flag} is about a loss; allowed with a module:function target")
    like = None if arguments.like is None else _entry(arguments.like)
    claims = _claims(arguments.claims, bool(losses), bool(entries))
    from windage.analysis.audit.document import Request

    return Request(
        entries=entries,
        losses=losses,
        like=like,
        claims=claims,
        signature=arguments.signature,
        seed=arguments.seed,
    )


def _is_loss(text: str) -> bool:
    """Whether a word is `module:function` rather than an entry with settings."""
    name, colon, rest = text.partition(":")
    return bool(colon) and "=" not in rest and not (name in SETTINGS and not rest)


def _entry(text: str) -> Named:
    name = text.partition(":")[0]
    if name not in SETTINGS:
        raise BadInput(f"{unknown('estimator', name, SETTINGS)}, or module:function")
    name, settings = specs.estimator(text)
    specs.check_order(name, settings)
    return text, name, dict(settings)


def _claims(text: str | None, losses: bool, entries: bool) -> list[str]:
    if text is None:
        return []
    known = [LOSS_CLAIMS] if losses else []
    known += [{**PROPERTIES, **VALUED, **ALWAYS}] if entries else []
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        for allowed in known:
            if name not in allowed:
                raise unknown("claim", name, allowed)
    return names
