"""Bytes that a tree of processes moved, and when it has come to rest. Linux only, standard library only."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

_NAMES = ("rchar", "wchar", "read_bytes", "write_bytes")
STILL_S = 1.0
_LOOK_EVERY_S = 0.25
# Wake-ups through pipes and eventfds count as written bytes, and so does a line of log.
_NOISE_BYTES = 1 << 20


def process_stats() -> Iterator[tuple[int, list[str]]]:
    """Every process now: its id, and the fields of its stat behind the name (state, parent, group, ...)."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile
            continue
        # The command's name, in parentheses, may contain anything.
        yield int(entry), stat.rpartition(")")[2].split()


def process_tree(root: int) -> list[int]:
    """Ids of a process and of all that it started, now."""
    children: dict[int, list[int]] = {}
    for pid, (_state, parent, *_) in process_stats():
        children.setdefault(int(parent), []).append(pid)
    found, queue = [], [root]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def read_io(root: int) -> dict[str, int] | None:
    """Sums over the tree: bytes by system calls (rchar, wchar) and from devices; None where /proc lacks them.

    What io_uring reads counts as read_bytes only, and from tmpfs not at all.
    """
    total = dict.fromkeys(_NAMES, 0)
    readable = False
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        except OSError:  # ended meanwhile, another user's, or a kernel without it
            continue
        readable = True
        for line in lines:
            name, _, value = line.partition(":")
            if name in total:
                total[name] += int(value)
    return total if readable else None


def difference(after: dict[str, int] | None, before: dict[str, int] | None) -> dict[str, int] | None:
    """What was added in between; None if either is not known."""
    if after is None or before is None:
        return None
    return {name: after[name] - before[name] for name in after}


def folder_bytes(folder: str) -> int:
    """Sizes of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    queue = [folder]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    else:
                        total += _size(entry)
        except OSError:
            continue
    return total


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


async def at_rest(
    sample: Callable[[], tuple[float, ...]],
    nudge: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]],
    at_most_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until no figure of ``sample`` has grown by more than noise for STILL_S; False if that never came.

    ``nudge`` is called before each look: an engine that does nothing tells nothing of what it stored.
    """
    begin = clock()
    last, since = sample(), begin
    while clock() - begin < at_most_s:
        await nudge()
        await sleep(_LOOK_EVERY_S)
        now = sample()
        if any(abs(new - old) > _NOISE_BYTES for new, old in zip(now, last, strict=True)):
            last, since = now, clock()
        elif clock() - since >= STILL_S:
            return True
    return False
