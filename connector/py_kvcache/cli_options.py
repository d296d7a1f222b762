"""What the commands' arguments have in common."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import typer

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
