"""Tables as data: columns, rows and honest numbers, for a terminal, a page and a file alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

NULL = "–"
NOISE = 1e-10


@final
@dataclass(frozen=True, kw_only=True)
class Column:
    """One column.

    Args:
        key: of the rows.
        label: a line break splits it.
        percent: show a share of 1 in per cent.
        keep: columns with the least value go first where a terminal is narrow.
    """

    key: str
    label: str
    percent: bool = False
    keep: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns.

    Args:
        columns: from left to right.
        rows: by column's key; None is a dash.
        caption: what the numbers are.
        notes: below the table.
        strong: cells to stress, by row number and key.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""
    notes: Sequence[str] = ()
    strong: frozenset[tuple[int, str]] = field(default_factory=frozenset)

    def cell(self, index: int, column: Column) -> str:
        """The text of a cell."""
        return text(self.rows[index].get(column.key), percent=column.percent)

    def is_number(self, column: Column) -> bool:
        """Whether a column is to be aligned at its right."""
        return column.key not in self._words

    @cached_property
    def _words(self) -> frozenset[str]:
        """Keys under which some row holds a word."""
        return frozenset(k for row in self.rows for k, v in row.items() if isinstance(v, str))


def text(value: Any, *, percent: bool = False) -> str:
    """A value as a reader wants it: three significant digits, rounding noise shown as such.

    Args:
        value: None is a dash; below 1e-10 in size is computer arithmetic, and said to be.
        percent: a share of 1.

    Example:
        >>> [text(v) for v in (None, 0.0, 3e-17, 0.12345, 67890.0, 12, {"cap": 2.0})]
        ['–', '0', '<1e-10', '0.123', '6.79e4', '12', 'cap=2']
        >>> text(1.0), text(1 - 1e-15), text(0.99996), text(0.9996)
        ('1', '1', '1-4e-05', '1-4e-04')
        >>> text(0.256, percent=True), text(0.004, percent=True), text(0.0, percent=True)
        ('26 %', '<1 %', '0 %')
    """
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text(item) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if percent:
        return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"
    if isinstance(value, int) or value == 0:
        return f"{int(value)}"
    if abs(value) < NOISE:
        return f"<{NOISE:.0e}"
    if NOISE < abs(abs(value) - 1) < 5e-4:
        return f"{'-' if value < 0 else ''}1{abs(value) - 1:+.0e}"
    if 1e-4 <= abs(value) < 9999.5:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def scalars(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of the rows whose values fit in a cell: no vectors."""
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(row)
    return [k for k in keys if not any(isinstance(row.get(k), list) for row in rows)]


def from_rows(
    rows: Sequence[Mapping[str, Any]], *, caption: str = "", notes: Sequence[str] = ()
) -> Table:
    """A table of everything that fits in a cell, under the keys' own names."""
    columns = [
        Column(key=key, label=key.replace("_", " "), keep=-place)
        for place, key in enumerate(scalars(rows))
        if any(row.get(key) is not None for row in rows)
    ]
    return Table(columns=columns, rows=rows, caption=caption, notes=notes)


def reasons(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """One note for each reason why rows have no figures, with the names of those rows.

    Args:
        rows: those with a reason hold it under `reason`.
        name: the key that names a row.
    """
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("reason"):
            found.setdefault(row["reason"], {})[str(row[name])] = None
    return [f"{NULL} {', '.join(names)}: {why}" for why, names in found.items()]


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas frame of scalars; settings and other mappings become text."""
    import pandas as pd

    rows = list(rows)
    keys = scalars(rows)

    def flat(value: Any) -> Any:
        return text(value) if isinstance(value, Mapping) else value

    return pd.DataFrame([{key: flat(row.get(key)) for key in keys} for row in rows], columns=keys)
