"""Streams: answers on stdout, progress and errors on stderr, and one way in which a command fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from py_kvcache.errors import ConfigError, KvCacheError, RootError
from py_kvcache.tools.show import counted, errno_text, human_bytes, printable

GOOD, PROBLEM, USAGE, ROOT_UNUSABLE, INTERRUPTED = 0, 1, 2, 3, 130
CLOSED_PIPE = 128 + signal.SIGPIPE
_PIPE_WIDTH = 200
# The one wording, also of README and docs/operations.md.
EXIT_CODES = (
    "Exit codes: 0 good, 1 problem found, 2 usage, 3 root unusable, 128 + N ended by signal N "
    "(130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 the reader of a pipe has left)."
)


class _OutputError(Exception):
    """stdout takes nothing; its text says why."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to failures(); rich would end the process."""
        raise  # noqa: PLE0704  # called while the BrokenPipeError is handled


def console_for(stream: TextIO) -> Console:
    """A console as wide as the terminal; lines in a pipe stay whole, so that grep finds them."""
    return _Console(
        file=stream, width=None if stream.isatty() else _PIPE_WIDTH, soft_wrap=not stream.isatty()
    )


def answer(json_text: Callable[[], str], as_json: bool, show: Callable[[Console], None]) -> None:
    """Print the result on stdout: one JSON object, or text."""
    text = json_text() if as_json else ""
    with _writing():
        if as_json:
            print(text, flush=True)
        else:
            show(console_for(sys.stdout))
            sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputError(f"stdout cannot be written to: {errno_text(error.errno or 0)}") from error


@contextmanager
def printing() -> Iterator[None]:
    """Around everything: what is printed outside failures() (help, version) fails in one sentence as well."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(CLOSED_PIPE) from None
    except OSError as error:
        _drop_stdout()
        _complain(f"stdout cannot be written to: {errno_text(error.errno or 0)}")
        raise SystemExit(PROBLEM) from None


def _drop_stdout() -> None:
    """Python would complain once more when it flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_streams() -> None:
    """Give a process that was started with closed streams (``>&-``) some; raises SystemExit without stdout.

    Else the next file opened would get their number, and what a child prints would go into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # to the end of the process
    if sys.stdout is None:
        _complain("stdout is closed: there is nowhere to write the answer to")
        raise SystemExit(PROBLEM)


class _Signals:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that it removes what it made."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        for again in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # the first is being obeyed; it would end the cleaning up
        raise KeyboardInterrupt


_signals = _Signals()


def interrupt_code() -> int:
    """Exit code after a KeyboardInterrupt: 128 and the signal's number."""
    return 128 + _signals.number


@contextmanager
def _obeying_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup ignores SIGHUP, and so do we then
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _signals)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def failures(schema: str, as_json: bool) -> Iterator[None]:
    """Turn errors that a user can do something about into one sentence and an exit code."""
    try:
        with _obeying_signals():
            yield
    except RootError as error:
        _fail(schema, as_json, ROOT_UNUSABLE, "root", str(error))
    except ConfigError as error:
        _fail(schema, as_json, USAGE, "usage", str(error))
    except KvCacheError as error:
        _fail(schema, as_json, PROBLEM, "problem", str(error))
    except BrokenPipeError:
        _drop_stdout()  # the reader (head, less) has enough
        raise typer.Exit(CLOSED_PIPE) from None
    except _OutputError as error:
        _fail(schema, False, PROBLEM, "output", str(error))
    except OSError as error:
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        _fail(schema, as_json, ROOT_UNUSABLE, "root", f"{where}{errno_text(error.errno or 0)}")
    except KeyboardInterrupt:
        _fail(schema, as_json, interrupt_code(), "interrupted", "interrupted")


def fail_usage(schema: str, text: str) -> NoReturn:
    """What failures() does with a usage error, for those that are found before a command begins."""
    _fail(schema, True, USAGE, "usage", text)


def _fail(schema: str, as_json: bool, code: int, kind: str, text: str) -> NoReturn:
    if as_json:
        told = {"schema": schema, "good": False, "error": {"kind": kind, "text": text}}
        try:
            print(json.dumps(told), flush=True)
        except OSError:
            _drop_stdout()
    elif kind == "output":
        _drop_stdout()
    _complain(text)
    raise typer.Exit(code)


def _complain(text: str) -> None:
    with suppress(OSError):  # nobody is there to read it; the exit code tells
        console_for(sys.stderr).print(f"[bold red]error:[/] {escape(printable(text))}", highlight=False)


@contextmanager
def spinner(what: str) -> Iterator[Callable[[int, int], None]]:
    """Signs of life on stderr during a walk whose length nobody knows; silent when that is no terminal.

    Yields a function to call with the entries and bytes seen so far.
    """
    console = console_for(sys.stderr)
    if not console.is_terminal:
        yield lambda _entries, _size: None
        return
    with console.status(f"{what} ...") as status:
        yield lambda entries, size: status.update(
            f"{what}: {counted(entries, 'entry', 'entries')}, {human_bytes(size)} so far"
        )


@contextmanager
def steps() -> Iterator[Callable[[int, int, str], None]]:
    """Progress of a benchmark on stderr: a bar, or a line for each step when that is no terminal.

    Yields a function to call with steps done, steps in all, and what is being done now.
    """
    console = console_for(sys.stderr)
    if not console.is_terminal:

        def line(done: int, total: int, text: str) -> None:
            with suppress(OSError):  # a measurement does not end with its audience
                console.print(f"[{done + 1}/{total}] {text}", markup=False)

        yield line
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, description=escape(text)
        )


def show_measurements(report: Mapping[str, Any], console: Console) -> None:
    """A benchmark's report for people: every list of records a table, then what missed its target."""
    for name, value in report.items():
        title = name.replace("_", " ")
        if isinstance(value, Mapping):
            facts = ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in _figures(value))
            console.print(f"[bold]{title}[/]: {escape(facts)}", highlight=False)
        elif _is_records(value):
            console.print(f"[bold]{title}[/]")
            records = [dict(_figures(record)) for record in value]
            # one column a record: there are few records and many figures
            table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
            for key in dict.fromkeys(key for record in records for key in record):
                cells = (escape(record.get(key, "-")) for record in records)
                table.add_row(f"  {key.replace('_', ' ')}", *cells)
            console.print(table)
    for text in report.get("below_target", []):
        console.print(f"[red]below target:[/] {escape(text)}", highlight=False)
    if report.get("below_target"):
        console.print("One run on a busy machine says little: repeat it, with more --rounds and --seconds.")


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and figures; those of records within are named after their first one (``by 4 processes``)."""
    for key, value in record.items():
        if _is_records(value):
            for inner in value:
                (first, number), *rest = inner.items()
                for name, text in _figures(dict(rest)):
                    yield f"{name} by {number} {first}", text
        elif value is None or isinstance(value, (str, int, float)):
            yield key, _figure(value)


def _figure(value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else value
