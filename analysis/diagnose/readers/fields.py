"""Values of a dump as checked arrays, and checked arrays as a row."""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Float, Int

from windage.analysis.diagnose.rows import Rejected, Row

Refuse = Callable[[Rejected], None]

LOGPS = ("behavior_logp", "logp", "proximal_logp", "reference_logp")
HEADS = ("head_behavior_logp", "head_logp")
# What rounding in half precision may add to a log-probability of 0.
ROUNDING = 0.01
# Sorted lists among which the names of rows are spread.
PARTS = 1 << 12
NUMBERS = {float, int}


class Fault(Exception):
    """Why one row cannot be read: a reason to count by, and the end of a sentence."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason, self.what = reason, what


def shown(path: Path) -> str:
    """A path on one line, whatever its name holds."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))


def member(record: Mapping[str, Any], name: str) -> Any:
    """A field that the format has.

    Raises:
        Fault: it is missing or null.
    """
    value = record.get(name)
    if value is None:
        raise Fault("missing field", f"has no {name}; needed")
    return value


def numbers(name: str, value: Any) -> Float[np.ndarray, " T"]:
    """A list of numbers; null is nan.

    Raises:
        Fault: of another type.

    Example:
        >>> numbers("logp", [0, -1.5, None])
        array([ 0. , -1.5,  nan])
    """
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "fiu":
        return value.astype(np.float64)
    if isinstance(value, list) and set(map(type, value)) <= {*NUMBERS, type(None)}:
        try:
            return np.array(value, dtype=np.float64)
        except OverflowError:
            pass
    raise Fault("wrong type", f"has {name} of {_kind(value)}; allowed: a list of numbers")


def integers(name: str, value: Any) -> Int[np.ndarray, " T"]:
    """A list of whole numbers in 64 bits.

    Raises:
        Fault: of another type.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if not (value.dtype == np.uint64 and len(value) and value.max() >= 2**63):
            return value.astype(np.int64)
    elif isinstance(value, list) and set(map(type, value)) <= {int}:
        try:
            return np.array(value, dtype=np.int64)
        except OverflowError:
            pass
    raise Fault("wrong type", f"has {name} of {_kind(value)}; allowed: a list of whole numbers")


def flags(name: str, value: Any) -> Bool[np.ndarray, " T"]:
    """A list of true and false, or of 1 and 0.

    Raises:
        Fault: of another type.
    """
    if isinstance(value, list) and set(map(type, value)) <= {bool}:
        return np.array(value, dtype=bool)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "b":
        return value
    try:
        found = numbers(name, value)
    except Fault:
        found = np.array([np.nan])
    if not np.isin(found, (0, 1)).all():
        raise Fault("wrong type", f"has {name} of {_kind(value)}; allowed: a list of 1 and 0")
    return found.astype(bool)


def number(name: str, value: Any) -> float | None:
    """One finite number, or nothing.

    Raises:
        Fault: of another type, or not finite.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None
    if type(value) not in NUMBERS:
        raise Fault("wrong type", f"has {name} of {_kind(value)}; allowed: a number")
    try:
        found = float(value)
    except OverflowError:
        found = np.inf
    if not np.isfinite(found):
        raise Fault("not finite", f"has {name} {found}; allowed: a finite number")
    return found


def integer(name: str, value: Any) -> int | None:
    """One whole number in 64 bits, or nothing; 3.0 and "3" count as 3.

    Raises:
        Fault: of another type.
    """
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    found = number(name, value)
    if found is None:
        return None
    if found != int(found) or abs(found) >= 2**63:
        raise Fault("wrong type", f"has {name} {found:g}; allowed: a whole number")
    return int(value)


def text(name: str, value: Any) -> str | None:
    """A name, or nothing; numbers are names too.

    Raises:
        Fault: of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) is str:
        return None if value is None else value.encode(errors="backslashreplace").decode()
    if type(value) in (int, float):
        return (
            f"{value:g}"
            if type(value) is float
            else hex(value)
            if value.bit_length() > 64
            else str(value)
        )
    raise Fault("wrong type", f"has {name} of {_kind(value)}; allowed: text")


def _kind(value: Any) -> str:
    """Words for a type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} in {value.ndim} dimensions"
    if isinstance(value, list):
        kinds = sorted({type(entry).__name__ for entry in value[:1000]})
        return f"a list of {', '.join(kinds)}"
    return type(value).__name__


def aligned(length: int, **columns: np.ndarray | None) -> None:
    """Refuse columns that do not have one entry a token.

    Raises:
        Fault: names the column.
    """
    for name, column in columns.items():
        if column is not None and len(column) != length:
            raise Fault(
                "lengths differ",
                f"has {len(column)} entries in {name}, {length} tokens; allowed: one a token",
            )


def row(where: str, mask: Bool[np.ndarray, " T"], **fields: Any) -> Row:
    """A row whose columns fit one another and whose log-probabilities are such.

    Args:
        where: for messages.
        mask: True on the policy's tokens.
        fields: any other fields of `Row`, in its types.

    Raises:
        Fault: lengths that differ, no token that the policy chose, a log-probability beside one
            that is not finite or above 0.
    """
    columns = {
        name: column
        for name, column in fields.items()
        if isinstance(column, np.ndarray) and name != "prompt_ids"
    }
    aligned(len(mask), **columns)
    if not mask.any():
        raise Fault("empty", "has no token that the policy chose")
    for name in (*LOGPS, "advantages", "probability_square"):
        if name in columns:
            fields[name] = _on_mask(name, columns[name], mask)
    _head(fields, mask)
    return Row(where=where, mask=mask, **fields)


def _on_mask(
    name: str, column: Float[np.ndarray, " T"], mask: Bool[np.ndarray, " T"]
) -> Float[np.ndarray, " T"]:
    """The column with 0 where it holds no number beside a False."""
    top = ROUNDING if name in LOGPS else sys.float_info.max
    if len(column) and column.max() <= top and column.min() > -np.inf:
        return column
    finite = np.isfinite(column)
    bad = mask & ~finite
    if bad.any():
        t = int(bad.argmax())
        raise Fault("not finite", f"has {name} {column[t]} at token {t}; allowed: finite numbers")
    above = mask & (column > ROUNDING)
    if name in LOGPS and above.any():
        t = int(above.argmax())
        raise Fault(
            "above 0", f"has {name} {column[t]:g} at token {t}; allowed: log-probabilities, up to 0"
        )
    return column if finite.all() else np.where(finite, column, 0.0)


def _head(fields: Mapping[str, Any], mask: Bool[np.ndarray, " T"]) -> None:
    """Refuse log-probabilities of a head that are none, or of other tokens than it names."""
    widths = {name: fields[name].shape[1] for name in ("head_ids", *HEADS) if name in fields}
    if len({*widths.values()}) > 1:
        told = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise Fault("lengths differ", f"has heads of different width ({told}); allowed: the same")
    for name in (name for name in HEADS if name in widths):
        bad = mask[:, None] & ~(fields[name] <= ROUNDING)
        if bad.any():
            t, k = np.argwhere(bad)[0]
            reason = "not finite" if np.isnan(fields[name][t, k]) else "above 0"
            what = f"has {name} {fields[name][t, k]:g} at token {t}; allowed: log-probabilities"
            raise Fault(reason, what)
    if "head_ids" in widths:
        ids = np.sort(fields["head_ids"], 1)
        twice = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(1)
        if twice.any():
            what = f"names a token of the head twice at token {int(twice.argmax())}; allowed: once"
            raise Fault("duplicate", what)


def span(mask: Bool[np.ndarray, " S"]) -> slice:
    """From the first token that the policy chose to the last: the response.

    Raises:
        Fault: it chose none.

    Example:
        >>> span(np.array([False, True, False, True, False]))
        slice(1, 4, None)
    """
    if not mask.any():
        raise Fault("empty", "has no token that the policy chose")
    return slice(int(mask.argmax()), len(mask) - int(mask[::-1].argmax()))


def group_of(step: int | None, prompt_ids: Int[np.ndarray, " S"]) -> str:
    """A name for the responses of one step to the same prompt, where a dump has none."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt_ids).tobytes(), digest_size=6).hexdigest()
    return f"{'' if step is None else step}:{digest}"


@final
class Seen:
    """Names that came before, by a hash of eight bytes: so much memory a name, however many.

    Example:
        >>> seen = Seen()
        >>> seen.new("a"), seen.new("b"), seen.new("a")
        (True, True, False)
    """

    def __init__(self) -> None:
        self._parts = [array("Q") for _ in range(PARTS)]

    def new(self, *key: object) -> bool:
        """Whether a name comes for the first time."""
        digest = hashlib.blake2b(repr(key).encode(errors="replace"), digest_size=8).digest()
        name = int.from_bytes(digest)
        part = self._parts[name % PARTS]
        at = bisect_left(part, name)
        if at < len(part) and part[at] == name:
            return False
        part.insert(at, name)
        return True


def once(seen: Seen, *key: object) -> None:
    """Refuse a row whose name came before; a name without a part is none.

    Raises:
        Fault: it did.
    """
    if None not in key and not seen.new(*key):
        raise Fault("duplicate", f"repeats {' '.join(map(str, key))}; allowed: once")


def kept(
    items: Iterable[tuple[str, Any]], row_of: Callable[[str, Any], Row], refuse: Refuse
) -> Iterator[Row]:
    """The rows that can be read; each of the others goes to `refuse`."""
    for where, item in items:
        try:
            found = row_of(where, item)
        except Fault as fault:
            refuse(Rejected(where=where, reason=fault.reason, what=fault.what))
        else:
            yield found
