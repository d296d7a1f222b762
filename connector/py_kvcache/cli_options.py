"""What the commands' arguments have in common."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Final

import typer

from py_kvcache.errors import ConfigError

CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def not_empty(value: str) -> str:
    """A callback. Raises typer.BadParameter."""
    if not value:  # else it would be the current folder
        raise typer.BadParameter(
            "it is missing or empty; give the folder of the cache, or set PY_KVCACHE_ROOT"
        )
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with a `schema` instead of text.")]


class SourceName(Enum):
    """Where a hit may lie."""

    DISK = "disk"
    MEMORY = "memory"


BenchRoot = Annotated[
    str,
    typer.Option(
        "--root", envvar="PY_KVCACHE_ROOT", metavar="DIR", callback=not_empty,
        help="Folder on the volume; left as it was found.",
    ),
]  # fmt: skip


def numbers(text: str) -> list[int]:
    """Of a list with commas. Raises ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text[:40]!r} is no list of whole numbers such as 1,4,28") from None
    if min(found) < 1:
        raise ConfigError(f"{text[:40]!r}: numbers must be 1 or more")
    return found


def json_object(text: str, option: str) -> dict[str, Any]:
    """Of an option's value. Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text[:40]!r} is no JSON object")
    return value


def duration(text: str) -> float:
    """Seconds of 90s, 10m, 1.5h, or of a plain number. Raises ConfigError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"{text[:40]!r} is no duration such as 90s, 10m or 1h")
    return seconds
