"""Streams: answers on stdout, progress and errors on stderr, and one way in which a command fails."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from py_kvcache.errors import ConfigError, KvCacheError, RootError
from py_kvcache.tools.show import counted, errno_text, human_bytes, printable

GOOD, PROBLEM, USAGE, ROOT_UNUSABLE, INTERRUPTED = 0, 1, 2, 3, 130
_PIPE_WIDTH = 200


def console_for(stream: TextIO) -> Console:
    """A console as wide as the terminal; lines in a pipe stay whole, so that grep finds them."""
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, soft_wrap=not stream.isatty())


def answer(json_text: Callable[[], str], as_json: bool, show: Callable[[Console], None]) -> None:
    """Print the result on stdout: one JSON object, or text."""
    if as_json:
        print(json_text(), flush=True)
    else:
        show(console_for(sys.stdout))
        sys.stdout.flush()


@contextmanager
def failures(schema: str, as_json: bool) -> Iterator[None]:
    """Turn errors that a user can do something about into one sentence and an exit code."""
    try:
        yield
    except RootError as error:
        _fail(schema, as_json, ROOT_UNUSABLE, "root", str(error))
    except ConfigError as error:
        _fail(schema, as_json, USAGE, "usage", str(error))
    except KvCacheError as error:
        _fail(schema, as_json, PROBLEM, "problem", str(error))
    except BrokenPipeError:
        # the reader (head, less) has enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(GOOD) from None
    except OSError as error:
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        _fail(schema, as_json, ROOT_UNUSABLE, "root", f"{where}{errno_text(error.errno or 0)}")
    except KeyboardInterrupt:
        _fail(schema, as_json, INTERRUPTED, "interrupted", "interrupted")


def _fail(schema: str, as_json: bool, code: int, kind: str, text: str) -> NoReturn:
    if as_json:
        print(
            json.dumps({"schema": schema, "good": False, "error": {"kind": kind, "text": text}}), flush=True
        )
    console_for(sys.stderr).print(f"[bold red]error:[/] {escape(printable(text))}", highlight=False)
    raise typer.Exit(code)


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
