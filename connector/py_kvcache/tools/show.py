"""Numbers, times and names as people read them."""

from __future__ import annotations

import errno
import os

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def human_bytes(n: float) -> str:
    """``28.0 MiB``; whole bytes below 1 KiB."""
    size, unit = float(n), 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def human_age(seconds: float) -> str:
    """``3.2 h``; times ahead of the clock have a minus sign."""
    for name, length in _AGES:
        if abs(seconds) >= length:
            return f"{seconds / length:.{0 if length == 1 else 1}f} {name}"
    return "0 s"


def counted(n: int, noun: str, plural: str = "") -> str:
    """``1 file``, ``2,000 files``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def printable(path: str) -> str:
    """A name as it can be shown: what a stranger called his file must not steer the terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path
    )


def errno_text(code: int) -> str:
    """``Input/output error [EIO]``."""
    return f"{os.strerror(code)} [{errno.errorcode.get(code, str(code))}]"
