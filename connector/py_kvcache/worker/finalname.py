"""Gives a written file its final name unless that is taken: link, or a rename that does not replace.

What the file system cannot do is found out by trying, once.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault

if TYPE_CHECKING:
    from py_kvcache.worker.fileops import FileOps

log = logging.getLogger(f"vllm.{__name__}")

_NO_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# EPERM: seccomp profiles older than renameat2 answer so to every call they do not know.
_NO_NOREPLACE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP})


class Counts:
    """Counters of rare events, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str) -> int:
        """Count one event; returns how often it has happened, for messages said once."""
        with self._lock:
            self._values[name] += 1
            return self._values[name]

    def read(self) -> dict[str, int]:
        """A copy of all counters so far."""
        with self._lock:
            return dict(self._values)


def kind_of(mode: int) -> str:
    """What st_mode says in words a person knows."""
    names = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO"}
    return names.get(stat.S_IFMT(mode), "no regular file")


class FinalNames:
    """Thread-safe. Remembers that there are no hard links once a rename worked where a link did not."""

    def __init__(self, ops: FileOps, counts: Counts) -> None:
        self._ops, self._counts = ops, counts
        self._links = True

    def taken(self, final: str) -> bool:
        """True if a regular file has the final name; BlockError if something else has it."""
        try:
            mode = self._ops.lstat(final).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode):
            # Reported as failure, not as "exists": a look-up must not take it for a stored block.
            raise BlockError(Fault.IO, final, errno.EEXIST, f"the name is taken by {kind_of(mode)}")
        return True

    def give(self, temp: str, final: str) -> tuple[bool, bool]:
        """Returns (ours was first, the temporary name is gone because it was renamed)."""
        for _ in range(3):
            try:
                return True, self._link_or_rename(temp, final)
            except FileExistsError:
                if self.taken(final):
                    return False, False
                # else evicted between the two calls: the name is free again
        raise OSError(errno.EEXIST, "the final name came and went", final)

    def _link_or_rename(self, temp: str, final: str) -> bool:
        """Returns whether it was renamed; FileExistsError if the name is taken."""
        code = 0
        if self._links:
            try:
                self._ops.link(temp, final)
                return False
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                code = error.errno
        self._rename(temp, final)
        # Remembered only now: where the rename fails too, the link's errno was about this folder.
        if self._links and self._counts.add("link_unsupported") and code != errno.EMLINK:
            self._links = False
            log.warning(
                "py-kvcache: no hard links at %s [%s]; files are published by rename",
                os.path.dirname(final),
                errno.errorcode.get(code, code),
            )
        return True

    def _rename(self, temp: str, final: str) -> None:
        """Rename without replacing; FileExistsError if the name is taken."""
        try:
            self._ops.rename_noreplace(temp, final)
            return
        except OSError as error:
            if error.errno not in _NO_NOREPLACE:
                raise
        self._counts.add("rename_plain")
        # Two writers may both pass this test; then the second replaces equal bytes by equal bytes in
        # one step, and readers still see a complete file.
        if self.taken(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        self._ops.rename(temp, final)
