"""Where the commands print: results to stdout, errors to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

_ANY_WIDTH = 10_000
"""Columns that no table needs."""


def show_error(error: BaseException | str) -> None:
    """Print an error's text in the form of all commands."""
    err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)


def show_table(table: Table, console: Console = out) -> None:
    """Print a table so that every cell can be read: as it is where it fits; into a pipe or file as wide as it needs;
    on a terminal that is too narrow, a list a row.
    """
    needed = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
    if needed <= console.width:
        console.print(table)
    elif not console.is_terminal:
        Console(highlight=False, file=console.file, width=needed).print(table)
    else:
        console.print(table.title or "", style="table.title")
        for row in zip(*(column.cells for column in table.columns), strict=True):
            cells = Table.grid(padding=(0, 2))
            for column, cell in zip(table.columns, row, strict=True):
                cells.add_row(column.header, cell)
            console.print(cells)
            console.print()
