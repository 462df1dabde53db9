"""The process in which answers are checked: requests come as lines of JSON, and so do replies.

It is started by path, knows the standard library only (and math-verify where a task asks for it),
and gives up what it does not need before it reads the first request.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping

NUMBER = re.compile(r"(?:(?<![\w).])[-−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
Check = Callable[[str, str], str]


def integer(text: str, answer: str) -> str:
    """Compare the last number of a text with an integer, digit by digit.

    `right`, or `format` where words follow the right number, or `wrong`, or `invalid` where there
    is no number.

    Example:
        >>> [integer(text, "42") for text in ("It is 42.", "42, and so on", "41", "many")]
        ['right', 'format', 'wrong', 'invalid']
    """
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None:
        return "invalid"
    if canonical(last[0]) != canonical(answer):
        return "wrong"
    return "format" if re.search(r"\w", text[last.end() :]) else "right"


def canonical(number: str) -> str:
    """A number without what does not change its value.

    Example:
        >>> canonical("-007.50"), canonical("1,000.0"), canonical("-0")
        ('-7.5', '1000', '0')
    """
    plain = number.replace("−", "-").replace(",", "")
    sign = "-" if plain.startswith("-") else ""
    whole, _, part = plain.lstrip("+-").partition(".")
    whole, part = whole.lstrip("0"), part.rstrip("0")
    if not whole and not part:
        return "0"
    return f"{sign}{whole or '0'}{'.' * bool(part)}{part}"


def mathematics(text: str, answer: str) -> str:
    """Whether math-verify finds the answer in a text and holds it for equal to the one given."""
    from math_verify import parse, verify

    found = parse(text, parsing_timeout=None)
    if not found:
        return "invalid"
    return "right" if verify(parse(answer), found, timeout_seconds=None) else "wrong"


CHECKS: dict[str, Check] = {"integer": integer, "mathematics": mathematics}


def confine(memory: int, files: int) -> None:
    """Give up memory, files, processes and core dumps beyond the limits, for good."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def serve(checks: Mapping[str, Check]) -> None:
    """Answer requests until there are no more; the first line says what to give up.

    The processor time of a check is limited by a timer whose signal ends the process, whatever it
    is at.
    """
    limits = json.loads(sys.stdin.readline())
    confine(limits["memory"], limits["files"])
    checks[limits["kind"]]("0", "0")  # what it imports is not the first answer's time
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limits["cpu"])
        try:
            reply = {"word": checks[request["kind"]](request["text"], request["answer"])}
        except MemoryError:
            reply = {"stopped": "memory"}
        except Exception as problem:
            reply = {"stopped": f"{type(problem).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(CHECKS)
