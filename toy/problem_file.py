"""Problem files: JSON, read strictly and checked completely without torch.

    {"vocab": 3, "stop": 2, "horizon": 3,
     "prompts": [{"policy":   {"": [0.1, 0.0, -1.0], "0": [...], ...},
                  "behavior": {...},
                  "rewards":  {"2": 0.0, "0 2": 1.0, ...}}]}

Keys are token ids joined by one space.  Every prefix short of the horizon that does not end in the
stop token has logits, every complete response a reward, and nothing else is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from windage.estimators.errors import BadInput, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from windage.toy.problems import Problem

MOST_BYTES = 2**29
MOST_NUMBERS = 20_000_000
MOST_DIGITS = 300
SEARCHED = 200
FARTHEST = 1e300


@final
@dataclass(frozen=True)
class Shape:
    """Vocabulary, stop token (or None) and horizon: which keys a prompt has.

    Example:
        >>> shape = Shape(3, 2, 2)
        >>> list(shape.prefixes()), list(shape.responses())
        (['', '0', '1'], ['2', '0 0', '0 1', '0 2', '1 0', '1 1', '1 2'])
    """

    vocab: int
    stop: int | None
    horizon: int

    @property
    def going(self) -> int:
        """Tokens after which a response goes on."""
        return self.vocab - (self.stop is not None)

    @property
    def depth(self) -> int:
        """Tokens of the longest response: the horizon, but 1 where every token stops."""
        return self.horizon if self.going else 1

    def count(self) -> tuple[float, float]:
        """Prefixes and responses, without a large power: infinite above 1e300.

        Example:
            >>> Shape(3, 2, 3).count(), Shape(10**9, None, 10**9).count()
            ((7, 15), (inf, inf))
        """
        if self.going >= 2 and self.horizon > 300 / math.log10(self.going):
            return math.inf, math.inf
        last = self.going ** (self.depth - 1)
        prefixes = self.depth if self.going < 2 else (last * self.going - 1) // (self.going - 1)
        stopped = 0 if self.stop is None else prefixes - last
        return prefixes, stopped + last * self.vocab

    def numbers(self, prompts: int) -> float:
        """Logits and rewards that a file with so many prompts holds."""
        prefixes, responses = self.count()
        if max(prefixes, responses) > FARTHEST or self.vocab > FARTHEST or prompts > FARTHEST:
            return math.inf
        return float(prompts) * (float(prefixes) * self.vocab + responses)

    def prefixes(self) -> Iterator[str]:
        """Keys of the prefixes, by length and then by ids."""
        yield ""
        if self.depth > 1:
            going = [str(v) for v in range(self.vocab) if v != self.stop]
            for length in range(1, self.depth):
                yield from map(" ".join, product(going, repeat=length))

    def responses(self) -> Iterator[str]:
        """Keys of the responses, by length and then by ids."""
        if self.depth == 1:
            yield from map(str, range(self.vocab))
            return
        going = [str(v) for v in range(self.vocab) if v != self.stop]
        stopping = [] if self.stop is None else [str(self.stop)]
        for length in range(1, self.depth):
            yield from map(" ".join, product(*[going] * (length - 1), stopping))
        last = [str(v) for v in range(self.vocab)]
        yield from map(" ".join, product(*[going] * (self.depth - 1), last))

    def _ids(self, key: str) -> list[int] | None:
        """The ids of a key that is written as it must be, or None."""
        words = key.split(" ") if key else []
        if not all(w.isdecimal() and len(w) < 20 and str(int(w)) == w for w in words):
            return None
        ids = [int(w) for w in words]
        return ids if all(i < self.vocab for i in ids) else None

    def is_prefix(self, key: str) -> bool:
        """Whether a key names a prefix that has logits."""
        ids = self._ids(key)
        return ids is not None and len(ids) < self.depth and self.stop not in ids

    def is_response(self, key: str) -> bool:
        """Whether a key names a complete response."""
        ids = self._ids(key)
        if not ids or self.stop in ids[:-1]:
            return False
        return len(ids) == self.depth or (len(ids) < self.depth and ids[-1] == self.stop)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """A problem file that was checked; numbers are still Python's.

    Args:
        name: the file's name, without its folder.
        sha256: of the file's bytes.
        shape: which keys every prompt has.
        prompts: `policy`, `rewards` and maybe `behavior` of each.
    """

    name: str
    sha256: str
    shape: Shape
    prompts: tuple[dict[str, dict[str, Any]], ...]


class _Object(dict[str, Any]):
    """A JSON object that remembers the first key it was given twice."""

    twice: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    out = _Object(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        out.twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return out


def _number(text: str) -> int | float:
    return int(text) if len(text) <= MOST_DIGITS else float(text)


def _short(value: object) -> str:
    words = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    named = {"_Object": "an object", "list": "a list", "True": "true", "False": "false"}
    words = named.get(words, "null" if value is None else words)
    return words if len(words) <= 60 else f"{words[:40]}...{words[-15:]}"


def _refuse_constant(text: str) -> NoReturn:
    raise BadInput(f"{text} is no number of JSON; allowed: finite numbers")


def read(path: str | Path) -> Document:
    """Read and check a problem file.

    Raises:
        BadInput: names the file, the place in it, and what is allowed there.
    """
    try:
        content = _content(path)
        data = _parse(content)
        shape, prompts = _checked(data)
    except BadInput as problem:
        raise BadInput(f"{path}: {problem}") from None
    digest = hashlib.sha256(content).hexdigest()
    return Document(name=Path(path).name, sha256=digest, shape=shape, prompts=prompts)


def _content(path: str | Path) -> bytes:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise BadInput("is a directory; allowed: a JSON file")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise BadInput("is a device; allowed: a JSON file")
        too_large = f"allowed: at most {MOST_BYTES / 2**20:.0f} MiB"
        if status.st_size > MOST_BYTES:
            raise BadInput(f"has {status.st_size / 2**20:.0f} MiB; {too_large}")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as problem:
        if isinstance(problem, BadInput):
            raise
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise BadInput(f"cannot be read: {why}; allowed: a JSON file") from None
    if len(content) > MOST_BYTES:
        raise BadInput(f"goes on after {MOST_BYTES / 2**20:.0f} MiB; {too_large}")
    return content


def _parse(content: bytes) -> Any:
    allowed = "allowed: one JSON object in UTF-8"
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_number,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as problem:
        raise BadInput(f"byte {problem.start} is not UTF-8; {allowed}") from None
    except json.JSONDecodeError as problem:
        place = f"line {problem.lineno} column {problem.colno}"
        raise BadInput(f"{place}: {problem.msg}; {allowed}") from None
    except RecursionError:
        raise BadInput(f"brackets nest too deeply; {allowed}") from None


def _fields(value: Any, place: str, needed: tuple[str, ...], optional: tuple[str, ...]) -> _Object:
    """An object with the needed keys, maybe the optional ones, and no other."""
    found = _single(value, place)
    allowed = (*needed, *optional)
    for key in found:
        if key not in allowed:
            raise BadInput(f"{place}: {unknown('key', key, allowed)}")
    for key in needed:
        if key not in found:
            raise BadInput(f"{place}: key {key!r} is missing; allowed: {', '.join(allowed)}")
    return found


def _single(value: Any, place: str) -> _Object:
    if not isinstance(value, _Object):
        raise BadInput(f"{place} is {_short(value)}; allowed: an object")
    if value.twice is not None:
        raise BadInput(f"{place}: key {_short(value.twice)} is there twice; allowed: each key once")
    return value


def _whole(found: _Object, key: str, least: int) -> int:
    value = found[key]
    if type(value) is not int or value < least:
        raise BadInput(f"{key} is {_short(value)}; allowed: a whole number from {least}")
    return value


def _checked(data: Any) -> tuple[Shape, tuple[dict[str, dict[str, Any]], ...]]:
    found = _fields(data, "the file", ("vocab", "stop", "horizon", "prompts"), ())
    vocab, horizon = _whole(found, "vocab", 1), _whole(found, "horizon", 1)
    stop = found["stop"]
    if stop is not None and (type(stop) is not int or not 0 <= stop < vocab):
        raise BadInput(
            f"stop is {_short(stop)}; allowed: null, or a whole number from 0, below vocab {vocab}"
        )
    prompts = found["prompts"]
    if not isinstance(prompts, list) or not prompts:
        raise BadInput(f"prompts is {_short(prompts)}; allowed: a list of at least one object")
    shape = Shape(vocab, stop, horizon)
    refuse_size(shape, len(prompts))
    for index, prompt in enumerate(prompts):
        place = f"prompts[{index}]"
        tables = _fields(prompt, place, ("policy", "rewards"), ("behavior",))
        for name in tables:
            _table(shape, tables[name], f"{place}.{name}", rewards=name == "rewards")
    return shape, tuple(prompts)


def refuse_size(shape: Shape, prompts: int = 1) -> None:
    """Refuse a problem of absurd size before memory is touched.

    Raises:
        BadInput: states the size that it would need.
    """
    numbers = shape.numbers(prompts)
    if numbers > MOST_NUMBERS:
        more, numbers = ("more than ", FARTHEST) if math.isinf(numbers) else ("", numbers)
        raise BadInput(
            f"vocab {shape.vocab:.10g} and horizon {shape.horizon:.10g} need {more}{numbers:.3g} "
            f"logits and rewards, {numbers * 8 / 2**30:.3g} GiB; allowed: at most {MOST_NUMBERS:,}"
        )


def _table(shape: Shape, value: Any, place: str, *, rewards: bool) -> None:
    """Check that a table has exactly the keys it must have, and numbers under them."""
    found = _single(value, place)
    valid = shape.is_response if rewards else shape.is_prefix
    for key in found:
        if not valid(key):
            raise BadInput(f"{place}: {_wrong_key(shape, key, rewards=rewards)}")
    if len(found) < shape.count()[rewards]:
        keys = shape.responses() if rewards else shape.prefixes()
        missing = next(key for key in keys if key not in found)
        raise BadInput(
            f"{place}: key {_short(missing)} is missing; allowed: {_rule(shape, rewards=rewards)}"
        )
    for key, entry in found.items():
        if rewards:
            _finite(entry, place, key)
            continue
        if not isinstance(entry, list):
            raise BadInput(
                f"{place}[{_short(key)}] is {_short(entry)}; allowed: {shape.vocab} logits"
            )
        if len(entry) != shape.vocab:
            raise BadInput(
                f"{place}[{_short(key)}] has length {len(entry)}; allowed: {shape.vocab} logits, "
                "one a token id"
            )
        for index, number in enumerate(entry):
            _finite(number, place, key, f"[{index}]")


def _finite(value: Any, place: str, key: str, index: str = "") -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadInput(
            f"{place}[{_short(key)}]{index} is {_short(value)}; allowed: a finite number"
        )


def _rule(shape: Shape, *, rewards: bool) -> str:
    """Which keys a table has, in words."""
    ids = f"ids from 0 to {shape.vocab - 1} joined by one space"
    if not rewards:
        without = "" if shape.stop is None else f" without the stop token {shape.stop}"
        return f"every prefix of fewer than {shape.depth} {ids}{without}"
    if shape.stop is None:
        return f"every response of {shape.depth} {ids}"
    return (
        f"every response of {ids} that ends with its only stop token {shape.stop} or at "
        f"{shape.depth} ids"
    )


def _wrong_key(shape: Shape, key: str, *, rewards: bool) -> str:
    """Name a key that must not be there, the nearest one that may, and the rule."""
    valid = shape.is_response if rewards else shape.is_prefix
    ids = [int(w) for w in key.split() if w.isdecimal() and len(w) < 20]
    starts = (" ".join(map(str, ids[:end])) for end in range(min(len(ids), shape.depth), 0, -1))
    near = next((start for start in starts if valid(start)), None)
    if near is None:
        keys = islice(shape.responses() if rewards else shape.prefixes(), SEARCHED)
        near = get_close_matches(key[:100], keys, n=1, cutoff=0.0)[0]
    return (
        f"unknown key {_short(key)}; nearest valid key: {_short(near)}; "
        f"allowed: {_rule(shape, rewards=rewards)}"
    )


def to_problem(document: Document) -> Problem:
    """The problem of a checked file, its prefixes and responses in the order of `Tree`."""
    import torch

    from windage.toy.problems import Tree, make

    shape = document.shape
    prefixes, responses = list(shape.prefixes()), list(shape.responses())

    def logits(name: str) -> Tensor:
        tables = [prompt.get(name, prompt["policy"]) for prompt in document.prompts]
        rows = [[list(map(float, table[key])) for key in prefixes] for table in tables]
        found = torch.tensor(rows, dtype=torch.float64)
        return torch.maximum(found, found.amax(-1, keepdim=True) - FARTHEST)

    rewards = [[float(p["rewards"][key]) for key in responses] for p in document.prompts]
    return make(
        document.name,
        Tree(shape.vocab, shape.stop, shape.depth),
        logits("policy"),
        torch.tensor(rewards, dtype=torch.float64),
        behavior=logits("behavior"),
        sha256=document.sha256,
    )
