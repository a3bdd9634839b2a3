"""Tables of the command line: every cell can be read, however wide it is printed."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from stagecache.cli.console import show_table

CELLS = [f"cell-{number}-of-the-row" for number in range(9)]


def shown(width: int, *, terminal: bool) -> str:
    table = Table(title="things")
    for cell in CELLS:
        table.add_column(cell.replace("cell", "column"))
    table.add_row(*CELLS)
    file = StringIO()
    show_table(table, Console(file=file, width=width, force_terminal=terminal, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 400])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_cell_is_whole(width: int, terminal: bool) -> None:
    lines = shown(width, terminal=terminal).splitlines()
    assert [cell for cell in CELLS if any(cell in line for line in lines)] == CELLS
    if terminal:
        assert max(map(len, lines)) <= width


def test_a_table_that_fits_or_goes_into_a_file_stays_one() -> None:
    table = shown(400, terminal=True)
    assert any(all(cell in line for cell in CELLS) for line in table.splitlines())
    assert "┃" not in shown(60, terminal=True)
    assert "┃" in shown(60, terminal=False)
