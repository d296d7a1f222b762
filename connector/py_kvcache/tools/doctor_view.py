"""What `doctor` prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from py_kvcache.tools.checks import Status
from py_kvcache.tools.doctor import DoctorReport
from py_kvcache.tools.show import printable

_MARKS = {
    Status.OK: "[green]ok[/]",
    Status.NOTE: "[cyan]note[/]",
    Status.SLOW: "[yellow]slow[/]",
    Status.PROBLEM: "[bold red]problem[/]",
}


def show(report: DoctorReport, console: Console) -> None:
    """A line per check, its remedy under it, then the conclusion."""
    console.print(f"[bold]{escape(printable(report.root))}[/]\n", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        table.add_row(_MARKS[check.status], check.name, escape(printable(check.text)))
        if check.remedy:
            table.add_row("", "", f"[dim]-> {escape(printable(check.remedy))}[/]")
    console.print(table, highlight=False)
    ways = {"io_uring": "io_uring", "threads": "a pool of threads"}
    console.print(
        f"\nWill be used: [bold]{ways[report.ring]}[/], [bold]{report.io} I/O[/], {report.mode}"
        + (f", published by {report.publish}" if report.publish else ""),
        highlight=False,
    )
    if report.is_full:
        console.print("  as far as can be known: the volume is full, and a trial needs space")
    if report.settings.ring != "auto" or report.settings.direct_io != "auto":
        settings = f"ring={report.settings.ring}, direct_io={report.settings.direct_io}"
        console.print(f"  as set: {settings}", style="dim")
    if report.faster:
        console.print("To get the faster way:")
        for text in report.faster:
            console.print(f"  - {escape(text)}", highlight=False)
    if not report.is_good:
        bad = ", ".join(c.name for c in report.checks if c.status is Status.PROBLEM)
        console.print(f"[bold red]Problems:[/] {bad}", highlight=False)
