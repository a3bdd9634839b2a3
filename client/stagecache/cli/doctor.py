"""``stagecache doctor``: what is wrong with this node, and how to mend it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from stagecache.cli.app import SOCKET, SocketOption, TimeoutOption, _examples, app
from stagecache.cli.console import out

if TYPE_CHECKING:
    from stagecache.doctor import Report

_MARKS = {
    "ok": "[green]ok[/]",
    "note": "[cyan]note[/]",
    "warning": "[yellow]warning[/]",
    "problem": "[bold red]PROBLEM[/]",
    "skipped": "[dim]-[/]",
}


@app.command(
    epilog=_examples(
        "stagecache doctor --socket /run/stagecache/stagecached.sock",
        "stagecache doctor --strict --json | jq '.findings[] | select(.status == \"problem\")'",
    )
)
def doctor(
    socket: SocketOption = SOCKET,
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 for warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: TimeoutOption = 2.0,
) -> None:
    """Look at this node and say what is wrong and how to mend it: status 1 where there is a problem.

    It looks at /dev/shm, limits, the socket and its modes, the daemon, CPU affinity, memory limits, and at the vLLM of
    this environment. Run it where the engine runs and, in containers, also where the daemon does: each sees its own.
    """
    from stagecache.doctor import examine

    report = examine(socket, timeout_s=timeout)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    raise typer.Exit(report.exit_status(strict=strict))


def _show(report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in report.findings:
        text = escape(finding.found)
        if finding.status.value == "skipped":
            text = f"[dim]{text}[/]"
        elif finding.remedy:
            text += f"\n[cyan]mend:[/] {escape(finding.remedy)}"
        table.add_row(_MARKS[finding.status.value], finding.check, text)
    out.print(table)
    counts = report.as_dict()
    problems, warnings = counts["problems"], counts["warnings"]
    colour = "red" if problems else "yellow" if warnings else "green"
    out.print(f"\n[bold {colour}]{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}[/]")


def _counted(count: int, noun: str) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
