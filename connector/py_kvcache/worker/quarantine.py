"""Removes a block file that was proved damaged, and only then.

A load that met wrong bytes asks; the file is read once more through a fresh descriptor. An errno, a foreign
file, a good second reading or another file under the name by now leave everything as it is: a brown-out of
the storage must not make every reader delete the shared cache.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from py_kvcache.digest import new_digest
from py_kvcache.errors import PROOF_OF_DAMAGE, Fault
from py_kvcache.footer import digest_header
from py_kvcache.layout import FOOTER_BYTES, file_bytes, padded
from py_kvcache.worker.checksum import read_footer

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_kvcache.worker.fileops import FileOps

log = logging.getLogger(f"vllm.{__name__}")

WINDOW_S = 60.0
MAX_UNLINKS = 10
_CHUNK = 1 << 20
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class Outcome:
    """What became of one suspicion. ``fault`` None: the second reading was good."""

    path: str
    removed: bool
    fault: Fault | None
    detail: str
    code: int = 0


class Quarantine:
    """For one thread at a time. Every method may block on I/O.

    Args:
        checksum: False trusts every payload (then only lengths, key and footer can prove damage).
    """

    def __init__(
        self, ops: FileOps, *, checksum: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ops, self._checksum, self._clock = ops, checksum, clock
        self._unlinks: deque[float] = deque()

    def examine(self, path: str, key: bytes, payload_bytes: int) -> Outcome:
        """Read again, decide, unlink if proved. Never raises for what a file or file system can do."""
        if not self._may_unlink():
            return Outcome(path, False, None, f"limit of {MAX_UNLINKS} removals a minute")
        try:
            fd = self._ops.open(path, _FLAGS)
        except OSError as error:
            return _unproved(path, error)
        try:
            outcome = self._decide(fd, path, key, payload_bytes)
        except OSError as error:
            outcome = _unproved(path, error)
        finally:
            self._close(fd, path)
        if outcome.removed:
            log.warning("py-kvcache removed %s: %s", path, outcome.detail)
        return outcome

    def _decide(self, fd: int, path: str, key: bytes, payload_bytes: int) -> Outcome:
        found = self._ops.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Outcome(path, False, Fault.FOREIGN, "not a regular file")
        fault, detail = self._judge(fd, found.st_size, key, payload_bytes)
        if fault not in PROOF_OF_DAMAGE:
            return Outcome(path, False, fault, detail or "the second reading is good")
        # The name may lead to another file by now, which nobody has read. What remains open is the moment
        # between these two calls: it would cost one good entry, never a wrong answer.
        now = self._ops.lstat(path)
        if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return Outcome(path, False, fault, "replaced meanwhile")
        self._ops.unlink(path)
        self._unlinks.append(self._clock())
        return Outcome(path, True, fault, detail)

    def _judge(self, fd: int, size: int, key: bytes, payload_bytes: int) -> tuple[Fault | None, str]:
        want, end = file_bytes(payload_bytes), padded(payload_bytes)
        if size < want:
            return Fault.WRONG_SIZE, f"{size} bytes instead of {want}"
        self._drop_cached(fd)
        footer, verdict = read_footer(self._read(fd, FOOTER_BYTES, end), key, payload_bytes)
        if size > want:
            # We never append. With our footer in place somebody did; without it the file is not ours.
            if footer is None:
                return Fault.FOREIGN, f"{size} bytes instead of {want}, no footer of this block in its place"
            return Fault.WRONG_SIZE, f"{size} bytes instead of {want}"
        hasher = None if footer is None or not self._checksum else new_digest(footer.algorithm)
        if footer is None or hasher is None:
            return verdict
        for offset in range(0, end, _CHUNK):
            hasher.update(self._read(fd, min(_CHUNK, end - offset), offset))
        hasher.update(digest_header(footer))
        if hasher.digest() != footer.digest:
            return Fault.CHECKSUM, "payload does not match its digest"
        return None, ""

    def _read(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Exactly that many bytes; OSError (nothing proved) when they do not come."""
        parts = []
        while nbytes:
            part = self._ops.pread(fd, nbytes, offset)
            if not part:
                raise OSError(errno.EIO, "the file ended before its size")
            parts.append(part)
            nbytes, offset = nbytes - len(part), offset + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _drop_cached(self, fd: int) -> None:
        """Ask the disk, not this node's page cache: bad memory here is no proof against the file."""
        try:
            self._ops.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            log.debug("fadvise: %s", error)

    def _may_unlink(self) -> bool:
        now = self._clock()
        while self._unlinks and now - self._unlinks[0] >= WINDOW_S:
            self._unlinks.popleft()
        return len(self._unlinks) < MAX_UNLINKS

    def _close(self, fd: int, path: str) -> None:
        try:
            self._ops.close(fd)
        except OSError as error:
            log.debug("close of %s: %s", path, error)


def _unproved(path: str, error: OSError) -> Outcome:
    return Outcome(path, False, Fault.IO, f"nothing proved: {error.strerror}", error.errno or errno.EIO)
