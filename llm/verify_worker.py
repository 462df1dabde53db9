"""The process in which answers are checked: requests come as lines of JSON, and so do replies.

It is started by path, knows the standard library only (and the package of a check that needs one),
and gives up what it does not need before it reads the first request.

A check reads the answer out of a text and compares it with the right one:

    right      it is the right one, and nothing follows it
    format     it is the right one, but words go on after it
    wrong      it is another
    invalid    there is none
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

NUMBER = re.compile(r"(?:(?<![\w).])[-−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
# Where a first statement ends: at a line's end, or at a sentence's.
END = re.compile(r"\n|[.!?;](?=\s|$)")
WORD = re.compile(r"[^\W\d_]{2,}")
MATHEMATICAL = re.compile(r"[\d$}\])|]")
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
JUDGMENT = re.compile(r"\b(yes|no|(?:not\s+|in)?correct)\b", re.IGNORECASE)
TAGS = ("<answer>", "</answer>")
LONG, DIGESTED = 200, "sha256 "
# Below the score 1 by rounding only.
FULL = 0.999


class Found(NamedTuple):
    """What a check came to, and the answer that it read, spelled in one way; None: it read none."""

    word: str
    answer: str | None = None


Check = Callable[[str, str], Found]


def integer(text: str, answer: str) -> Found:
    """Compare the last number of a text with the right one, digit by digit.

    Example:
        >>> [integer(text, "42").word for text in ("It is 42.", "42, and so on", "41", "many")]
        ['right', 'format', 'wrong', 'invalid']
    """
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None:
        return Found("invalid")
    number = canonical(last[0])
    if number != canonical(answer):
        return Found("wrong", number)
    return Found("format" if re.search(r"\w", text[last.end() :]) else "right", number)


def stated(text: str, answer: str) -> Found:
    """As `integer`, but rambling spoils no answer.

    Where the last number is wrong and the last one of the first statement with a number is right,
    the answer has a fault of format.  For questions that take one step: in a text that works its
    way to the answer an earlier number is none.

    Example:
        >>> [stated(text, "42").word for text in ("40 + 2 = 42. Then 3", "41, 42. Or 43", "7\\n42")]
        ['format', 'format', 'right']
    """
    found = integer(text, answer)
    if found.word != "wrong":
        return found
    first = NUMBER.search(text)
    assert first is not None
    end = END.search(text, first.end())
    early = integer(text[: end.start()] if end else text, answer)
    return Found("format", early.answer) if early.word in ("right", "format") else found


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


def boxed(text: str) -> tuple[str, int] | None:
    r"""What the last `\boxed{}` of a text holds, and where it ends; None: there is none.

    Example:
        >>> boxed(r"so \boxed{\frac{1}{2}}.")
        ('\\frac{1}{2}', 22)
        >>> boxed(r"\boxed 7")
        ('7', 8)
    """
    last = None
    for last in BOX.finditer(text):  # noqa: B007
        pass
    if last is None or last.end() == len(text):
        return None
    start = last.end()
    if text[start] != "{":
        return text[start], start + 1
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : start + brace.start()], start + brace.end()
    return None


def mathematics(text: str, answer: str) -> Found:
    """Whether math-verify finds the answer in a text and holds it for equal to the one given.

    What the last box holds is the answer; without a box math-verify looks for it.
    """
    from math_verify import parse, verify

    box = boxed(text)
    found = parse(f"\\boxed{{{box[0]}}}" if box else text, parsing_timeout=None)
    if not found:
        return Found("invalid")
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not verify(gold, found, timeout_seconds=None):
        return Found("wrong", " ".join(str(found[-1]).split()))
    if box is None:
        for place in MATHEMATICAL.finditer(text):
            box = ("", place.end())
    rest = text[box[1] :] if box else ""
    return Found("format" if WORD.search(rest) else "right", answer)


def plain(text: str, answer: str) -> Found:
    """Compare a whole text with the answer, but for case, spaces and a full stop.

    Example:
        >>> [plain(text, "a cat").word for text in ("A  cat.", "A cat\\nIt says", "a dog", " ")]
        ['right', 'format', 'wrong', 'invalid']
    """
    whole, first = simple(text), simple(text.strip().partition("\n")[0])
    if not whole:
        return Found("invalid")
    wanted = simple(answer)
    if wanted in (whole, first):
        return Found("right" if wanted == whole else "format", wanted)
    return Found("wrong", first)


def simple(text: str) -> str:
    """A text in small letters, with single spaces and without a full stop at its end."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


def judgment(text: str, answer: str) -> Found:
    """Whether the first yes or no of a text is the right one; `correct` is a yes.

    Example:
        >>> [judgment(text, "no").word for text in ("Incorrect", "No, for", "yes", "who knows")]
        ['right', 'format', 'wrong', 'invalid']
    """
    first = JUDGMENT.search(text)
    if first is None:
        return Found("invalid")
    said = "yes" if first[0].lower() in ("yes", "correct") else "no"
    if said != answer:
        return Found("wrong", said)
    return Found("format" if re.search(r"\w", text[first.end() :]) else "right", said)


def reasoning(text: str, answer: str) -> Found:
    """The verdict of a reasoning-gym data set on what stands between the last answer tags.

    Without tags the whole text may be the answer, which is a fault of format.

    Args:
        text: the response.
        answer: JSON with the data set's name and settings, whose first question it is, and a
            digest of that question, so that a data set that gives another one is found out.
    """
    asked = json.loads(answer)
    data, entry = entry_of(asked["dataset"], json.dumps(asked["settings"]))
    if digest(str(entry["question"])) != asked["question"]:
        raise LookupError
    _, opening, rest = text.rpartition(TAGS[0])
    given, closing, after = rest.partition(TAGS[1])
    tagged = bool(opening and closing)
    said = (given if tagged else text).strip()
    full = bool(said) and float(data.score_answer(said, entry)) >= FULL
    if full:
        return Found("right" if tagged and not re.search(r"\w", after) else "format", "")
    return Found("wrong", said) if tagged else Found("invalid")


@lru_cache(maxsize=64)
def entry_of(name: str, settings: str) -> tuple[Any, Any]:
    """A reasoning-gym data set and its first question."""
    from reasoning_gym import create_dataset

    data = create_dataset(name, **json.loads(settings))
    return data, data[0]


def digest(*parts: str, length: int = 16) -> str:
    """A name made of texts, the same on every machine.

    Example:
        >>> digest("a", "b") == digest("a", "b"), digest("a", "b") == digest("ab")
        (True, False)
    """
    text = "\0".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:length]


CHECKS: dict[str, Check] = {
    "integer": integer,
    "stated": stated,
    "mathematics": mathematics,
    "text": plain,
    "judgment": judgment,
    "reasoning": reasoning,
}


# Checks that know answers as the same that are spelled in two ways: how one is put to them.
BY_VALUE: dict[str, Callable[[str], str]] = {"mathematics": lambda answer: f"\\boxed{{{answer}}}"}


def warm(kind: str, check: Check) -> None:
    """Import what a check needs, so that it is not the first answer's time."""
    if kind == "reasoning":
        entry_of("leg_counting", '{"seed": 0, "size": 1}')
    else:
        check("0", "0")


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


def short(answer: str | None) -> str | None:
    """An answer, or a digest of a long one, which says that it is one."""
    if answer is None or len(answer) <= LONG:
        return answer
    return DIGESTED + digest(answer)


def serve(checks: Mapping[str, Check]) -> None:
    """Answer requests until there are no more; the first line says what to give up.

    The processor time of a check is limited by a timer whose signal ends the process, whatever it
    is at.
    """
    limits = json.loads(sys.stdin.readline())
    confine(limits["memory"], limits["files"])
    warm(limits["kind"], checks[limits["kind"]])
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limits["cpu"])
        try:
            found = checks[request["kind"]](request["text"], request["answer"])
            reply = {"word": found.word, "answer": short(found.answer)}
        except MemoryError:
            reply = {"stopped": "memory"}
        except Exception as problem:
            reply = {"stopped": f"{type(problem).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(CHECKS)
