"""Where the commands print: results to stdout, errors to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_error(error: BaseException | str) -> None:
    """Print an error's text in the form of all commands."""
    err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
