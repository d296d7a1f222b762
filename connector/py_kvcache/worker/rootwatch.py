"""Is the cache root still the folder that we started on? A volume may be unmounted under a running engine.

What is then at the root's path is the bare mount point: a folder on the node's own disk, which must not fill.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py_kvcache.worker.fileops import FileOps

# These say that the folder is not there; any other errno only that nobody could tell for the moment.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN})


class RootWatch:
    """Remembers device and inode of ``root``. Thread-safe; may block on stat, also when it is made."""

    def __init__(self, ops: FileOps, root: str) -> None:
        # The dot makes the kernel look into the root, so that an automounter mounts it first.
        self._ops, self._path = ops, root.rstrip("/") + "/."
        self._first: tuple[int, int] | None = None
        self._is_same = True
        self.is_same()

    def is_same(self) -> bool:
        """Whether the root is the one of the start; the last answer where that cannot be told now."""
        try:
            found = self._identity()
        except OSError:
            return self._is_same
        if self._first is None:
            self._first = found
        self._is_same = found is not None and found == self._first
        return self._is_same

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._ops.stat(self._path)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        return found.st_dev, found.st_ino
