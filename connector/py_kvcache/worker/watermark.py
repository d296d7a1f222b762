"""When to stop storing: volume fullness with hysteresis, and a budget per day. Time and statvfs come in.

GC alone cannot keep a volume from filling: it looks every few seconds, and a writer at 1 GB/s fills a gap
of 25 MiB in 26 ms. So the store path itself looks, often enough for the gap that is left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

CHECK_EVERY_S = 1.0
FILES_A_BLOCK = 3  # inodes: itself and, where they are new, its two folders
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Space:
    """One statvfs answer. ``used`` and ``usable`` as df counts them: without the blocks kept for root."""

    used_bytes: int
    usable_bytes: int
    used_files: int = 0
    usable_files: int = 0  # 0: the file system has no fixed number of inodes (btrfs, many NFS servers)

    @classmethod
    def of(
        cls, *, frsize: int, blocks: int, bfree: int, bavail: int, files: int = 0, ffree: int = 0
    ) -> Space:
        """From the fields of statvfs; ``usable`` is used + what we may still take."""
        used = blocks - bfree
        return cls(used * frsize, (used + bavail) * frsize, files - ffree, files)


class Watermark:
    """Admits bytes while the volume stays below ``stop_at``; once stopped, until it is at ``resume_at``.

    Args:
        stop_at, resume_at: fractions of the usable bytes (and inodes), resume_at <= stop_at. stop_at 1
            means no limit of ours: the volume itself then says ENOSPC.
    """

    def __init__(self, stop_at: float, resume_at: float) -> None:
        if not 0 < resume_at <= stop_at <= 1:
            raise ValueError(f"watermarks must be 0 < resume {resume_at} <= stop {stop_at} <= 1")
        self.stop_at, self.resume_at = stop_at, resume_at
        self.paused = False
        self.in_flight = 0  # admitted, neither written nor given back
        self._blocks = 0  # of those in flight
        self._written = 0  # finished since the last look, so perhaps not in it
        self._written_blocks = 0
        self._space: Space | None = None
        self._looked_at = float("-inf")

    def is_due(self, now: float, nbytes: int) -> bool:
        """Must the caller look at the volume before it asks for ``nbytes``?"""
        if self.stop_at >= 1:
            return False
        if now - self._looked_at >= CHECK_EVERY_S:
            return True
        if self._space is None or self.paused:
            return False
        # Others write to this volume too: trust a quarter of the gap that was seen, no more.
        return self._exceeds(self._space, nbytes, 4)

    def look(self, now: float, space: Space | None) -> None:
        """Take in a statvfs answer; None if there was none (what was known before goes on to hold)."""
        self._looked_at = now
        if space is None:
            return
        self._space, self._written, self._written_blocks = space, 0, 0
        if self.paused:
            self.paused = not self._below(space, self.resume_at)
        else:
            self.paused = not self._below(space, self.stop_at)

    def admit(self, nbytes: int) -> bool:
        """Ask for ``nbytes`` (they are then in flight until ``finish``). False: stores are paused."""
        if self.stop_at < 1 and self._space is not None and not self.paused:
            self.paused = self._exceeds(self._space, nbytes, 1)
        if self.paused:
            return False
        self.in_flight += nbytes
        self._blocks += 1
        return True

    def finish(self, nbytes: int, *, written: bool) -> None:
        """The file of an admitted store is published, or it is gone again."""
        self.in_flight -= nbytes
        self._blocks -= 1
        if written:
            self._written += nbytes
            self._written_blocks += 1

    def _exceeds(self, space: Space, nbytes: int, caution: int) -> bool:
        """Whether ``caution`` times what was admitted since the last look and one block more is too much."""
        size = (self._written + self.in_flight + nbytes) * caution
        if size > int(self.stop_at * space.usable_bytes) - space.used_bytes:
            return True
        files = (self._written_blocks + self._blocks + 1) * FILES_A_BLOCK * caution
        return space.usable_files > 0 and files > int(self.stop_at * space.usable_files) - space.used_files

    @staticmethod
    def _below(space: Space, fraction: float) -> bool:
        return space.used_bytes <= fraction * space.usable_bytes and (
            space.usable_files <= 0 or space.used_files <= fraction * space.usable_files
        )


class DayBudget:
    """At most ``limit`` bytes in any 24 hours, for the flash's sake; counted by the hour; 0 = no limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._hours: deque[tuple[int, int]] = deque()  # (hour number, bytes), oldest first
        self._spent = 0

    def affords(self, now: float, nbytes: int) -> bool:
        """Whether ``nbytes`` would be admitted now."""
        if not self.limit:
            return True
        hour = int(now // _HOUR_S)
        # 25 hour bins, so that the window is never shorter than a day.
        while self._hours and self._hours[0][0] <= hour - 25:
            self._spent -= self._hours.popleft()[1]
        return self._spent + nbytes <= self.limit

    def admit(self, now: float, nbytes: int) -> bool:
        """Spend ``nbytes``; False if that would exceed the budget."""
        if not self.affords(now, nbytes):
            return False
        if not self.limit:
            return True
        hour = int(now // _HOUR_S)
        earlier = self._hours.pop()[1] if self._hours and self._hours[-1][0] == hour else 0
        self._hours.append((hour, earlier + nbytes))
        self._spent += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """An admitted store wrote nothing. Taken from the newest hours."""
        while nbytes > 0 and self._hours:
            hour, spent = self._hours.pop()
            back = min(spent, nbytes)
            nbytes -= back
            self._spent -= back
            if spent > back:
                self._hours.append((hour, spent - back))
