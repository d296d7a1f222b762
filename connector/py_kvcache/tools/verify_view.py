"""What `verify` prints for people: a progress bar on stderr, then a table on stdout."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

from py_kvcache.tools.show import counted, human_bytes, printable
from py_kvcache.tools.verify_report import Progress, VerifyReport

_SHOWN = 20
_MEANING = {
    "good": "footer and checksum right",
    "unchecked": "stored with checksum off: footer right, payload not covered",
    "damaged": "the bytes are proved wrong",
    "foreign": "no footer of py-kvcache; left alone",
    "newer": "written by a later version; left alone",
    "unreadable": "the file system gave an error; left alone, says nothing about the file",
    "vanished": "evicted meanwhile",
}
_STYLES = {"good": "green", "damaged": "red", "unreadable": "red"}


class BarProgress(Progress):
    """A bar when stderr is a terminal; otherwise a line every ten seconds, so that logs stay short."""

    def __init__(self, console: Console) -> None:
        self._console, self._is_terminal = console, console.is_terminal
        self._lock = threading.Lock()
        self._files = self._bytes = self._damaged = self._total = self._total_bytes = 0
        self._said = time.monotonic()
        self.bar = RichProgress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
            TransferSpeedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not self._is_terminal,
        )  # fmt: skip
        self._task = self.bar.add_task("counting", total=None)

    def counted(self, files: int, size: int) -> None:
        if files % 500 == 0:
            self.bar.update(self._task, description=f"counting, {counted(files, 'file')} so far")

    def begin(self, files: int, size: int) -> None:
        self._total, self._total_bytes = files, size
        self.bar.update(self._task, total=size, completed=0)

    def advance(self, files: int, size: int, damaged: int) -> None:
        with self._lock:
            self._files, self._bytes = self._files + files, self._bytes + size
            self._damaged += damaged
            text = f"{self._files:,} of {self._total:,} files" + (
                f", [red]{self._damaged} damaged[/]" if self._damaged else ""
            )
            self.bar.update(self._task, advance=size, description=text)
            if not self._is_terminal and time.monotonic() - self._said > 10:
                self._said = time.monotonic()
                self._console.print(
                    f"verify: {self._files:,} of {self._total:,} files, {human_bytes(self._bytes)} of "
                    f"{human_bytes(self._total_bytes)}, {self._damaged} damaged",
                    highlight=False,
                )


@contextmanager
def bar(console: Console) -> Iterator[BarProgress]:
    """The bar, gone again at the end."""
    progress = BarProgress(console)
    with progress.bar:
        yield progress


def show(report: VerifyReport, console: Console) -> None:
    """Print what was found, what was done and what to do next."""
    rate = report.bytes_read / report.seconds if report.seconds else 0.0
    console.print(
        f"[bold]{escape(printable(report.root))}[/]  {counted(report.blocks, 'block')} checked, "
        f"{human_bytes(report.bytes_read)} read in {report.seconds:,.1f} s ({human_bytes(rate)}/s)",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
    table.add_column(justify="right")
    for name, meaning in _MEANING.items():
        n = report.verdicts[name]
        if n or name in ("good", "damaged"):
            style = _STYLES.get(name, "yellow") if n else "dim"
            table.add_row(f"{n:,}", f"[{style}]{name}[/]", meaning)
    console.print(table)
    for problem in report.problems[:_SHOWN]:
        what = problem["fault"] or problem["verdict"]
        code = f" [{problem['errno']}]" if problem["errno"] else ""
        done = ", [bold]deleted[/]" if problem["deleted"] else ""
        console.print(
            f"  [red]{what}[/]{escape(code)} {escape(problem['path'])}: {escape(problem['detail'])}{done}",
            highlight=False,
        )
    if report.problem_count > _SHOWN:
        console.print(f"  and {report.problem_count - _SHOWN:,} more (--json lists up to 1,000)", style="dim")
    _show_rest(report, console)


def _show_rest(report: VerifyReport, console: Console) -> None:
    if report.wrong_root:
        console.print(f"[red]problem:[/] {report.wrong_root}", highlight=False)
    elif not report.blocks and not report.interrupted:
        console.print("No block yet: nothing has been stored here, or this is not the cache's root.")
    if report.unknown:
        kinds = ", ".join(counted(n, what) for what, n in sorted(report.unknown.items()))
        console.print(f"Not ours, left alone: {kinds}", highlight=False)
    if report.temporaries:
        console.print(
            f"Not checked: {counted(report.temporaries, 'temporary', 'temporaries')}, "
            f"{report.dead_temporaries:,} of them dead (safe to delete)",
            highlight=False,
        )
    damaged = report.verdicts["damaged"]
    if report.limit and report.blocks >= report.limit:
        console.print(f"[yellow]Only {report.limit:,} blocks were checked (--limit); there may be more.[/]")
    if report.interrupted:
        console.print("[yellow]Interrupted: the counts above are of the part that was checked.[/]")
    if report.delete and damaged:
        console.print(
            f"Deleted {counted(report.deleted, 'damaged file')}"
            + (f"; {report.kept} kept: a second read or the file system disagreed" if report.kept else "")
            + ". vLLM computes and stores those blocks again.",
            highlight=False,
        )
    elif damaged:
        console.print(
            "Readers notice damaged blocks and recompute them. To remove them: run this again with --delete.",
            highlight=False,
        )
    if report.in_the_way:
        console.print(
            f"{counted(report.in_the_way, 'entry', 'entries')} in a block's place: never served and never "
            "replaced; remove by hand what you do not need.",
            highlight=False,
        )
    if report.errors or report.verdicts["unreadable"]:
        console.print(
            "Errors come from the file system or its permissions: look at the kernel log, the NFS server and "
            "the uid that this runs under, then run this again.",
            highlight=False,
        )
