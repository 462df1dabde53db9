"""Tables on a terminal: as many columns as fit, and what was left out is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from windage.analysis.tables import Column, Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


def widths(table: Table) -> dict[str, int]:
    """Cells that each column takes, padding included."""
    return {
        column.key: 2
        + max(
            [len(line) for line in column.label.split("\n")]
            + [
                len(table.cell(i, column)) + 2 * ((i, column.key) in table.strong)
                for i in range(len(table.rows))
            ]
        )
        for column in table.columns
    }


def fit(table: Table, width: int) -> tuple[list[Column], list[Column]]:
    """The columns that fit in a width, and those left out: the least worth keeping go first."""
    size = widths(table)
    kept = list(table.columns)
    while len(kept) > 1 and sum(size[c.key] for c in kept) > width:
        kept.remove(min(reversed(kept), key=lambda column: column.keep))
    return kept, [column for column in table.columns if column not in kept]


@final
@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A heading, a table and lines below it, as wide as the console that prints it.

    Args:
        title: first line.
        table: its best cells carry a star, so that they stand out without color too.
        lines: below the notes of the table.
    """

    title: str
    table: Table
    lines: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        kept, dropped = fit(self.table, options.max_width)
        yield Text(self.title, style="bold")
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for column in kept:
            side: Any = "right" if self.table.is_number(column) else "left"
            grid.add_column(column.label, justify=side, no_wrap=True, overflow="fold")
        for i in range(len(self.table.rows)):
            grid.add_row(*(self._cell(i, column) for column in kept))
        yield grid
        if self.table.caption:
            yield Text(self.table.caption, style="dim")
        for note in self.table.notes:
            yield Text(note, style="dim")
        if dropped:
            names = ", ".join(" ".join(column.label.split()) for column in dropped)
            yield Text(f"Left out at this width: {names}; --json and --out have them.", style="dim")
        for line in self.lines:
            yield Text()
            yield Text(line)

    def _cell(self, index: int, column: Column) -> Any:
        from rich.text import Text

        words = self.table.cell(index, column)
        if (index, column.key) in self.table.strong:
            return Text(f"* {words}", style="bold")
        return Text(words)
