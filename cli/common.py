"""What every verb shares: the parser that refuses in one line, and the flags of design.md."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from windage.estimators.errors import BadInput, unknown


class Parser(argparse.ArgumentParser):
    """Argument parser whose complaints are `BadInput`, with the nearest valid flag.

    A `type=` callable says what is allowed by raising `argparse.ArgumentTypeError`; argparse
    replaces the message of a plain ValueError, `BadInput` included, by its own.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise BadInput(message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, and refuse the first word that no flag took."""
        arguments, rest = self.parse_known_args(args, namespace)
        if not rest:
            return arguments
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in rest:
            if word.startswith("-"):
                raise unknown("flag", word.partition("=")[0], flags)
        raise BadInput(f"unexpected argument {rest[0]!r}; allowed: {', '.join(flags)}")


def common(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every verb; `windage.cli.main` calls it after the verb's `configure`."""
    flags = parser.add_argument_group("every verb")
    flags.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, logs on error"
    )
    flags.add_argument(
        "--out", type=directory, metavar="DIR", help="write tables, figures and one HTML page there"
    )
    unsaid = parser.get_default("seed") or 0
    words = "of whatever is sampled"
    flags.add_argument("--seed", type=seed, default=unsaid, metavar="N", help=words)


def whole(least: int) -> Callable[[str], int]:
    """A `type=` that accepts whole numbers from the least one on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number from {least} on")
        return int(text)

    return parse


def directory(text: str) -> Path:
    """Accept a directory, or a path where one can be made; not the empty path of an unset name."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no path; allowed: a directory")
    path = Path(text)
    present = next((place for place in (path, *path.parents) if os.path.exists(place)), Path())
    if not present.is_dir():
        raise argparse.ArgumentTypeError(f"{str(present)!r} is a file; allowed: a directory")
    if not os.access(present, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{str(present)!r} cannot be written to; allowed: a directory with write permission"
        )
    return path


def seed(text: str) -> int:
    """Accept a whole number that every generator takes."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number from 0 to 2**63 - 1")
    return int(text)
