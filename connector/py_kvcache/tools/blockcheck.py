"""Is one block file what its name says? From its bytes alone, the same rules as the worker's loads."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from py_kvcache import layout
from py_kvcache.digest import Digest, new_digest
from py_kvcache.errors import Fault
from py_kvcache.footer import Footer, FooterError, digest_header, unpack_footer
from py_kvcache.tools.scan import open_parent

CHUNK = 4 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Verdict(Enum):
    """Outcome for one file; only DAMAGED ones may ever be deleted."""

    GOOD = "good"
    UNCHECKED = "unchecked"  # stored with the checksum off: footer good, payload unknown
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # no footer of ours
    NEWER = "newer"  # a footer of a later version
    UNREADABLE = "unreadable"  # an errno: says nothing about the file
    VANISHED = "vanished"  # evicted while we looked


@dataclass(frozen=True)
class Check:
    """Verdict, what is wrong in words, bytes read, and the inode that was read."""

    verdict: Verdict
    fault: Fault | None = None
    detail: str = ""
    bytes: int = 0
    code: int = 0
    inode: tuple[int, int] = (0, 0)


class StopError(Exception):
    """The user interrupted the run."""


def new_buffer() -> mmap.mmap:
    """Page-aligned memory for direct reads, one per thread."""
    return mmap.mmap(-1, CHUNK)


def check_block(
    root_fd: int,
    path: str,
    key: bytes,
    buffer: mmap.mmap,
    *,
    sizes: frozenset[int] = frozenset(),
    namespace_is_ours: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Check:
    """Read one block file from the disk, not from the page cache, and judge it. Raises StopError only.

    Args:
        path: relative to the root.
        sizes: file sizes that valid neighbours of the same part and group have, empty if not known.
        namespace_is_ours: its config.json is ours, so a size that no block can have is damage.
        on_bytes: called with each chunk's size as it is read.
    """
    try:
        parent = open_parent(root_fd, path)
        try:
            fd, direct = _open_block(os.path.basename(path), parent)
        finally:
            os.close(parent)
    except OSError as error:
        return _from_errno(error)
    try:
        return _judge(fd, direct, key, buffer, sizes, namespace_is_ours, on_bytes)
    except OSError as error:
        return _from_errno(error)
    finally:
        os.close(fd)


def _open_block(name: str, parent: int) -> tuple[int, bool]:
    try:
        return os.open(name, _OPEN | os.O_DIRECT, dir_fd=parent), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(name, _OPEN, dir_fd=parent), False


def _from_errno(error: OSError) -> Check:
    code = error.errno or errno.EIO
    if code == errno.ENOENT:
        return Check(Verdict.VANISHED)
    if code in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR):
        return Check(Verdict.FOREIGN, Fault.FOREIGN, "not a regular file")
    return Check(Verdict.UNREADABLE, Fault.IO, os.strerror(code), code=code)


def _judge(
    fd: int,
    direct: bool,
    key: bytes,
    buffer: mmap.mmap,
    sizes: frozenset[int],
    namespace_is_ours: bool,
    on_bytes: Callable[[int], None],
) -> Check:
    seen = os.fstat(fd)
    inode = (seen.st_dev, seen.st_ino)
    if not stat.S_ISREG(seen.st_mode):
        return Check(Verdict.FOREIGN, Fault.FOREIGN, "not a regular file")
    reader = _Reader(fd, direct, buffer)
    size = seen.st_size
    if size % layout.ALIGN or size < layout.FOOTER_BYTES:
        return _wrong_size(reader, size, sizes, namespace_is_ours, inode)
    raw = reader.read(size - layout.FOOTER_BYTES, layout.FOOTER_BYTES)
    try:
        if len(raw) != layout.FOOTER_BYTES:
            return Check(Verdict.VANISHED)  # truncated under our eyes: judge it next time
        footer = unpack_footer(raw)
    except FooterError as error:
        if error.kind == "version":
            return Check(Verdict.NEWER, error.fault, str(error), inode=inode)
        if error.kind == "absent":
            return _wrong_size(reader, size, sizes, namespace_is_ours, inode, str(error))
        return Check(Verdict.DAMAGED, error.fault, str(error), layout.FOOTER_BYTES, inode=inode)
    if footer.key != key:
        return Check(
            Verdict.DAMAGED, Fault.WRONG_KEY, "holds another block", layout.FOOTER_BYTES, inode=inode
        )
    if layout.file_bytes(footer.payload_bytes) != size or footer.padded_bytes + layout.FOOTER_BYTES != size:
        return Check(
            Verdict.DAMAGED, Fault.WRONG_SIZE, f"{size} bytes, its footer says "
            f"{layout.file_bytes(footer.payload_bytes)}", layout.FOOTER_BYTES, inode=inode,
        )  # fmt: skip
    digest = new_digest(footer.algorithm)
    if digest is None:
        on_bytes(size)
        return Check(Verdict.UNCHECKED, bytes=layout.FOOTER_BYTES, inode=inode)
    return _check_digest(reader, footer, digest, inode, on_bytes)


def _wrong_size(
    reader: _Reader,
    size: int,
    sizes: frozenset[int],
    namespace_is_ours: bool,
    inode: tuple[int, int],
    detail: str = "",
) -> Check:
    """No footer at the end of the file: cut off, grown, or somebody else's?

    Damage is proved when the file is empty, shorter than its valid neighbours, or has our footer where
    theirs have it; also when no block can have such a size and config.json says the namespace is ours.
    """
    instead = f" instead of {min(sizes):,}" if sizes else ""
    damaged = Check(Verdict.DAMAGED, Fault.WRONG_SIZE, f"{size:,} bytes{instead}", inode=inode)
    if size == 0 or (sizes and size < min(sizes)):
        return damaged
    for expected in sorted(sizes):
        if expected < size:
            raw = reader.read(expected - layout.FOOTER_BYTES, layout.FOOTER_BYTES)
            try:
                unpack_footer(raw)
            except FooterError:
                continue
            return damaged
    impossible = size % layout.ALIGN or size < layout.FOOTER_BYTES
    if impossible and namespace_is_ours:
        return damaged
    return Check(
        Verdict.FOREIGN, Fault.FOREIGN, detail or f"{size} bytes, no footer of py-kvcache", inode=inode
    )


def _check_digest(
    reader: _Reader,
    footer: Footer,
    digest: Digest,
    inode: tuple[int, int],
    on_bytes: Callable[[int], None],
) -> Check:
    offset = 0
    while offset < footer.padded_bytes:
        chunk = reader.read(offset, min(CHUNK, footer.padded_bytes - offset))
        if not chunk:
            return Check(Verdict.VANISHED)
        digest.update(chunk)
        offset += len(chunk)
        on_bytes(len(chunk))
    digest.update(digest_header(footer))
    on_bytes(layout.FOOTER_BYTES)
    total = offset + layout.FOOTER_BYTES
    if digest.digest() != footer.digest:
        return Check(
            Verdict.DAMAGED, Fault.CHECKSUM, "payload does not match its checksum", total, inode=inode
        )
    return Check(Verdict.GOOD, bytes=total, inode=inode)


class _Reader:
    """Reads of one descriptor: direct if possible, else buffered with the cached pages dropped first."""

    def __init__(self, fd: int, direct: bool, buffer: mmap.mmap) -> None:
        self._fd, self._view, self._direct = fd, memoryview(buffer), direct
        if direct:
            # needed for the open only (a FIFO would hang it); with it on, reads may answer EAGAIN
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        else:
            self._buffered()

    def _buffered(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
        self._direct = False
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, length: int) -> memoryview:
        """Up to `length` (at most CHUNK) bytes; valid until the next read. Shorter only at the file's end."""
        got = 0
        while got < length:
            # an O_DIRECT read that ended off the alignment can only go on buffered
            if self._direct and (offset + got) % layout.ALIGN:
                self._buffered()
            try:
                n = os.preadv(self._fd, [self._view[got:length]], offset + got)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._buffered()
                continue
            if n == 0:
                break
            got += n
        return self._view[:got]
