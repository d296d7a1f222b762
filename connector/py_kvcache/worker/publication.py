"""How one block becomes a file: the synchronous steps, the same for threads, benchmarks and tests.

Temporary file in the target folder, then link to the final name, then unlink of the temporary name.
link() refuses to replace, so the first writer wins and a final name is absent or complete.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault, fault_of
from py_kvcache.layout import temp_path
from py_kvcache.worker.finalname import Counts, FinalNames

if TYPE_CHECKING:
    from py_kvcache.worker.fileops import FileOps
    from py_kvcache.worker.rootwatch import RootWatch

log = logging.getLogger(f"vllm.{__name__}")

CREATE_ATTEMPTS = 16
CHAIN_STEP_NS = 1_000_000
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC

# A pod that restarts often has the hostname and the pid of its predecessor: only this part of a
# temporary name tells the two apart (see leftovers.py).
INCARNATION = secrets.token_hex(4)
_serial = itertools.count()


def next_token() -> str:
    """For one temporary name; unique over the processes that ever had this hostname and pid."""
    return f"{INCARNATION}-{next(_serial):x}"


_NO_CHANGE = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class FileSettings:
    """What a block file looks like. ``root`` itself is never made here: an unmounted volume must not
    be replaced by a folder on the node's own disk."""

    root: str
    file_mode: int = 0o664
    dir_mode: int = 0o2775
    fsync: bool = False
    hostname: str = field(default_factory=socket.gethostname)


class BlockFiles:
    """Creates, publishes and abandons block files. Thread-safe; every method may block on I/O.

    ``direct`` may be changed at any time; it becomes False here when the file system refuses O_DIRECT.
    """

    def __init__(
        self, ops: FileOps, settings: FileSettings, *, direct: bool = False, watch: RootWatch | None = None
    ) -> None:
        self.ops, self.settings, self.direct, self._watch = ops, settings, direct, watch
        self.counts = Counts()
        self._root = settings.root.rstrip("/") + "/"
        self.names = FinalNames(ops, self.counts)

    def create(self, final: str, *, direct: bool = False) -> tuple[int, str] | None:
        """Open a new temporary file beside ``final``; its folders are made if absent.

        Returns:
            Descriptor (the caller's) and temporary name, or None if a regular file has the final name.
        Raises:
            BlockError: nothing is left behind (but perhaps empty folders). PAUSED if the root is another one
            now: below a bare mount point no folder is made.
        """
        open_, mode = self.ops.open, self.settings.file_mode
        try:
            if self.names.taken(final):
                return None
            temp = self._temp_of(final)
            for _ in range(CREATE_ATTEMPTS):
                try:
                    return open_(temp, _CREATE | os.O_DIRECT if direct else _CREATE, mode), temp
                except FileNotFoundError:
                    if self._is_root_away():
                        raise
                    # GC removes empty folders at any time: made and gone again is possible, so try again.
                    self._make_folder(final.rpartition("/")[0])
                except FileExistsError:
                    self.counts.add("temp_name_taken")
                    temp = self._temp_of(final)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    # Linux makes the name before it refuses O_DIRECT, so there is something to remove.
                    self._refused_direct(temp, error)
                    direct = False
        except OSError as error:
            raise self._error(error, final, "create") from error
        raise BlockError(Fault.IO, final, errno.ENOENT, f"folders vanished {CREATE_ATTEMPTS} times")

    def commit(self, fd: int, temp: str, final: str, index: int) -> bool:
        """Publish a completely written temporary file. Closes ``fd`` and removes ``temp`` in every case.

        Args:
            index: position in the prefix chain; the file is made that many milliseconds older, so
                that GC, which knows only mtime, removes tails before heads.
        Returns:
            True if ours is the published file, False if another writer was first.
        Raises:
            BlockError: the final name was not made by us.
        """
        is_open = True
        try:
            self._stamp(fd, index)
            if self.settings.fsync:
                self.ops.fsync(fd)
            # NFS reports failed buffered writes at close: close, and look at it, before the name exists.
            is_open = False
            self.ops.close(fd)
            won, renamed = self.names.give(temp, final)
        except OSError as error:
            self.abandon(fd if is_open else -1, temp)
            raise self._error(error, final, "commit") from error
        except BlockError:
            self._remove(temp)
            raise
        if not renamed:
            self._remove(temp)
        return won

    def abandon(self, fd: int, temp: str) -> None:
        """Close ``fd`` (unless negative) and remove ``temp``; what fails is counted and left to GC."""
        if fd >= 0:
            try:
                self.ops.close(fd)
            except OSError as error:
                self.counts.add("abandon_close_failed")
                log.debug("close of %s: %s", temp, error)
        self._remove(temp)

    def publish(self, final: str, data: bytes | bytearray | memoryview, index: int = 0) -> bool:
        """All steps for bytes in memory, buffered. True if published by us, False if it was there.

        Raises:
            BlockError: nothing was published and nothing is left behind.
        """
        created = self.create(final)
        if created is None:
            return False
        fd, temp = created
        try:
            written = self.ops.write(fd, data)
            while written < len(data):
                written += self.ops.write(fd, memoryview(data)[written:])
        except OSError as error:
            self.abandon(fd, temp)
            raise self._error(error, final, "write") from error
        return self.commit(fd, temp, final, index)

    def _temp_of(self, final: str) -> str:
        return temp_path(final, hostname=self.settings.hostname, pid=os.getpid(), token=next_token())

    def _make_folder(self, folder: str) -> None:
        """mkdir -p below the root, with the modes of the settings whatever the umask.

        A lost race is no error: whether the folder is there now, the caller's open tells.
        """
        mkdir, mode = self.ops.mkdir, self.settings.dir_mode
        try:
            try:
                mkdir(folder, mode)
            except FileNotFoundError:
                parent = folder.rpartition("/")[0]
                if not parent.startswith(self._root):
                    raise BlockError(Fault.IO, folder, errno.ENOENT, "the cache root is gone") from None
                self._make_folder(parent)
                mkdir(folder, mode)
        except (FileExistsError, FileNotFoundError):
            return
        try:
            # mkdir() drops the set-group-id bit and whatever the umask forbids. Only for folders that
            # we made: others may be somebody's deliberate choice.
            self.ops.chmod(folder, mode)
        except OSError as error:
            if error.errno != errno.ENOENT and self.counts.add("chmod_denied") == 1:
                log.warning("py-kvcache cannot set mode %o on %s: %s", mode, folder, error)

    def _stamp(self, fd: int, index: int) -> None:
        """Mode despite the umask, and an mtime by the file system's own clock (its answer to our write)."""
        ops, found = self.ops, self.ops.fstat(fd)
        if stat.S_IMODE(found.st_mode) != self.settings.file_mode:
            try:
                ops.fchmod(fd, self.settings.file_mode)
            except OSError as error:
                if error.errno not in _NO_CHANGE:
                    raise
                self.counts.add("chmod_denied")
        if index == 0:
            return
        try:
            ops.utime(fd, ns=(found.st_mtime_ns, found.st_mtime_ns - index * CHAIN_STEP_NS))
        except OSError as error:
            if error.errno not in _NO_CHANGE:
                raise
            # Explicit times need ownership, which squashing NFS servers take away; "now" needs only write.
            self.counts.add("utime_denied")
            try:
                ops.utime(fd)
            except OSError as again:
                if again.errno not in _NO_CHANGE:
                    raise
                self.counts.add("utime_now_denied")

    def _refused_direct(self, temp: str, error: OSError) -> None:
        self._remove(temp)
        self.direct = False
        if self.counts.add("direct_refused") == 1:
            log.warning("py-kvcache: O_DIRECT refused for %s: %s; stores are buffered now", temp, error)

    def _remove(self, temp: str) -> None:
        try:
            self.ops.unlink(temp)
        except FileNotFoundError:
            return
        except OSError as error:
            if self.counts.add("temp_left") == 1:
                log.warning(
                    "py-kvcache could not remove %s, delete it when it is 15 minutes old: %s", temp, error
                )

    def _is_root_away(self) -> bool:
        return self._watch is not None and not self._watch.is_same()

    def _error(self, error: OSError, final: str, step: str) -> BlockError:
        code = error.errno or errno.EIO
        if code in (errno.ENOENT, errno.ENOTDIR) and self._is_root_away():
            return BlockError(Fault.PAUSED, final, code, "the root was unmounted or replaced")
        # ENOENT here says that a folder or the root went away, not that a block is missing.
        fault = Fault.IO if code == errno.ENOENT else fault_of(code)
        return BlockError(fault, final, code, step)


def publish_bytes(
    ops: FileOps, final: str, data: bytes | bytearray | memoryview, settings: FileSettings, index: int = 0
) -> bool:
    """One publication with nothing remembered; see ``BlockFiles.publish``."""
    return BlockFiles(ops, settings).publish(final, data, index)
