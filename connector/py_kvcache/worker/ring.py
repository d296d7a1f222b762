"""One io_uring behind a small interface; the only module that imports liburing.

A ring belongs to one thread: every method is called by the reactor only. Results are those of the system
call: a count or a descriptor, or ``-errno``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from typing import Any, NamedTuple, Protocol

from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.worker.iovecs import IovecCache
from py_kvcache.worker.quickcalls import signal_event

# The kernel silently shortens one transfer to 0x7ffff000 bytes, which is no multiple of a block of ours;
# 1 GiB keeps the rest of a larger request aligned.
MAX_TRANSFER = 1 << 30
# A page-cache copy runs inside submit with the GIL held, and so does the wait for a full device queue;
# IOSQE_ASYNC hands the request to a kernel worker instead. Below this size the hand-over costs more.
ASYNC_FROM = 1 << 20
# Not among the package's functions. The call's number is the same on all machines.
_IO_URING_REGISTER, _IOWQ_MAX_WORKERS = 427, 19
_CANCEL = 1 << 63  # tag of our cancel requests; tokens stay below
_MAX_TOKEN = _CANCEL - 1

log = logging.getLogger("vllm.py_kvcache.worker.ring")

# Buffers that the kernel still owned when their ring was closed. Freeing them would let it write into
# memory that has become something else's, so they live as long as the process.
_abandoned: list[object] = []


class Completion(NamedTuple):
    """``result`` is what the system call returns, or ``-errno``."""

    token: int
    result: int


class Ring(Protocol):
    """Queue of file operations. A token is any int in 0..2**63-1, unique among those in flight."""

    @property
    def name(self) -> str:
        """``io_uring`` or ``threads``."""

    def openat(self, token: int, path: str, flags: int, mode: int = 0) -> None:
        """Queue an open of an absolute path; a name the kernel would not see as given raises ValueError."""

    def read(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """Queue a read of ``len(buffer)`` bytes (at most 1 GiB of them) at a byte offset of the file."""

    def write(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """Queue a write of ``len(buffer)`` bytes (at most 1 GiB of them) at a byte offset of the file."""

    def close(self, token: int, fd: int) -> None:
        """Queue a close. Whatever the result, the descriptor is gone."""

    def fsync(self, token: int, fd: int) -> None:
        """Queue an fsync."""

    def cancel(self, token: int) -> None:
        """Best effort. The target still completes exactly once: done, -ECANCELED or -EINTR."""

    def submit(self) -> None:
        """Hand everything queued to the kernel; does not wait for any of it."""

    def completions(self) -> list[Completion]:
        """Everything that finished since the last call; never waits."""

    def fileno(self) -> int:
        """The eventfd given to the constructor; readable after every completion."""

    def in_flight(self) -> int:
        """Operations queued or submitted whose completion has not been returned."""

    def shutdown(self) -> None:
        """Stop, waiting a bounded time only; idempotent. One last completions() gives what had finished."""


def check_path(path: str) -> str:
    """Return the path if the kernel will see exactly it, else raise ValueError.

    liburing cuts a name at a NUL without a word and cannot encode surrogates; our names are ASCII by
    construction and the root was checked at start, so anything else is a bug or an attack.
    """
    if "\0" in path or not path.startswith("/"):
        raise ValueError(f"not an absolute path without NUL: {path!r}")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a path must be encodable as UTF-8: {path!r}") from error
    return path


def check_request(token: int, fd: int, offset: int) -> None:
    """Raise ValueError for numbers that the kernel would read as something else (-1 = current position)."""
    if not 0 <= token <= _MAX_TOKEN:
        raise ValueError(f"token {token} is not in 0..2**63-1")
    if fd < 0 or offset < 0:
        raise ValueError(f"descriptor {fd} or offset {offset} is negative")


class UringRing:
    """io_uring through liburing 2026.3.30, set-up flags 0 (SINGLE_ISSUER and the like fail on 5.10).

    ``entries`` bounds the submission queue, not what may be in flight. It also bounds the kernel's workers
    together with four times the cores, so give it at least the I/O depth plus the open lookahead. ``workers``
    bounds those that work on files (opens, too) further: what is in flight beyond waits in the kernel's
    queue, so that its workers have something to do while the interpreter is somebody else's. Memory that was
    read into or written from stays referenced until shutdown (see iovecs).
    """

    name = "io_uring"

    def __init__(self, entries: int, wake_fd: int, workers: int | None = None) -> None:
        """Raise OSError (EPERM, ENOSYS, ENOMEM) if the kernel refuses. Run probe_ring before: SIGILL."""
        # Imported here: there is no wheel for arm64, and the thread ring must work without it.
        import liburing

        self._lib: Any = liburing
        self._wake_fd = wake_fd
        self._ring: Any = liburing.Ring()
        liburing.io_uring_queue_init(entries, self._ring)
        self._cqe: Any = liburing.Cqe()
        self._iovecs = IovecCache(liburing.Iovec)
        # What the kernel only has pointers to: path, Iovec and buffer of every operation in flight. A path
        # dropped before submit makes the kernel open (and create!) a garbage name and report success.
        self._pending: dict[int, object] = {}
        self._ready: list[Completion] = []
        self._closed = False
        if workers is not None:
            _limit_workers(self._ring.ring_fd, workers)
        try:
            liburing.io_uring_register_eventfd(self._ring, wake_fd)
        except OSError:
            self.shutdown()
            raise

    def openat(self, token: int, path: str, flags: int, mode: int = 0) -> None:
        """See Ring.openat."""
        check_path(path)
        check_request(token, 0, 0)
        sqe = self._claim(token, path)
        if sqe is None:
            self._answer(token, -errno.EAGAIN)
            return
        self._lib.io_uring_prep_open(sqe, path, flags, mode)
        sqe.flags = self._lib.IOSQE_ASYNC
        sqe.user_data = token

    def read(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring.read."""
        self._transfer(self._lib.io_uring_prep_readv, token, fd, buffer, offset)

    def write(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring.write."""
        self._transfer(self._lib.io_uring_prep_writev, token, fd, buffer, offset)

    def close(self, token: int, fd: int) -> None:
        """See Ring.close."""
        check_request(token, fd, 0)
        sqe = self._claim(token, None)
        if sqe is None:
            # A close must never be lost: the caller would not try again.
            self._answer(token, _close(fd))
            return
        self._lib.io_uring_prep_close(sqe, fd)
        sqe.user_data = token

    def fsync(self, token: int, fd: int) -> None:
        """See Ring.fsync."""
        check_request(token, fd, 0)
        sqe = self._claim(token, None)
        if sqe is None:
            self._answer(token, -errno.EAGAIN)
            return
        self._lib.io_uring_prep_fsync(sqe, fd)
        sqe.flags = self._lib.IOSQE_ASYNC
        sqe.user_data = token

    def cancel(self, token: int) -> None:
        """See Ring.cancel. In the kernel's hands it may answer EALREADY; the target then ends by itself."""
        if self._closed or token not in self._pending:
            return
        sqe = self._get_sqe()
        if sqe is not None:
            self._lib.io_uring_prep_cancel64(sqe, token, 0)
            sqe.user_data = _CANCEL

    def submit(self) -> None:
        """See Ring.submit."""
        if self._closed:
            return
        # A request that fails while it is prepared ends the batch early, so go on until none is left.
        while left := self._lib.io_uring_sq_ready(self._ring):
            if not self._enter():
                break
            if self._lib.io_uring_sq_ready(self._ring) == left:
                break

    def completions(self) -> list[Completion]:
        """See Ring.completions."""
        if not self._closed:
            self._reap()
        ready, self._ready = self._ready, []
        return ready

    def fileno(self) -> int:
        """See Ring.fileno."""
        return self._wake_fd

    def in_flight(self) -> int:
        """See Ring.in_flight."""
        return len(self._pending) + len(self._ready)

    def shutdown(self, grace_s: float = 0.5) -> None:
        """Cancel what is in flight, give it ``grace_s`` seconds, then close the ring."""
        if self._closed:
            return
        for token in list(self._pending):
            self.cancel(token)
        self.submit()
        ends = time.monotonic() + grace_s
        while self._pending and time.monotonic() < ends:
            self._reap()
            time.sleep(0.002)
        self._closed = True
        self._lib.io_uring_queue_exit(self._ring)
        self._iovecs.drop(self._pending.values())
        _abandoned.extend(self._pending.values())
        self._pending.clear()

    def _transfer(self, prepare: Any, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        check_request(token, fd, offset)
        if buffer.nbytes > MAX_TRANSFER:
            buffer = buffer[:MAX_TRANSFER]
        pinned = self._iovecs.get(buffer, self._pending.values())  # may raise, so before an entry is taken
        sqe = self._claim(token, pinned)
        if sqe is None:
            self._answer(token, -errno.EAGAIN)
            return
        prepare(sqe, fd, pinned.iovec, offset)
        if buffer.nbytes >= ASYNC_FROM:
            sqe.flags = self._lib.IOSQE_ASYNC
        sqe.user_data = token

    def _claim(self, token: int, keep: object) -> Any:
        """Take a submission entry and remember what must outlive it; None if there is none to be had.

        Nothing may raise between this and the end of the preparation: an entry that was taken is submitted,
        filled in or not.
        """
        if self._closed:
            raise KvCacheError("the ring is shut down")
        if token in self._pending:
            raise ValueError(f"token {token} is already in flight")
        sqe = self._get_sqe()
        if sqe is not None:
            self._pending[token] = keep
        return sqe

    def _answer(self, token: int, result: int) -> None:
        """Complete what found no place, since the kernel has no memory for more requests at the moment."""
        self._ready.append(Completion(token, result))
        signal_event(self._wake_fd)

    def _get_sqe(self) -> Any:
        sqe = self._lib.io_uring_get_sqe(self._ring)
        if sqe is None:
            self.submit()
            sqe = self._lib.io_uring_get_sqe(self._ring)
        return sqe

    def _enter(self) -> bool:
        """One submit call; False when the kernel cannot take more now, having arranged to be called again."""
        try:
            self._lib.io_uring_submit(self._ring)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM):
                raise
            # EBUSY: completions overflowed (before 5.19); EAGAIN: no memory for a request. Entries stay
            # queued. Make room and make sure that the caller's next pass comes.
            self._reap()
            signal_event(self._wake_fd)
            return False
        return True

    def _reap(self) -> None:
        lib, ring = self._lib, self._ring
        while True:
            ready = lib.io_uring_cq_ready(ring)
            if not ready:
                if not lib.io_uring_cq_has_overflow(ring):
                    return
                # More finished than the completion queue holds; the kernel keeps the rest until asked.
                lib.io_uring_get_events(ring)
                if not lib.io_uring_cq_ready(ring):
                    return
                continue
            for _ in range(ready):
                self._take_one()

    def _take_one(self) -> None:
        # The package's only safe access: peek, read entry 0, advance. Cqe[i] ignores the queue's wrap.
        lib, cqe = self._lib, self._cqe
        lib.io_uring_peek_cqe(self._ring, cqe)
        entry = cqe[0]
        token = entry.user_data
        try:
            result = entry.res
        except OSError as error:  # how the package hands out a negative result
            result = -(error.errno or errno.EIO)
        lib.io_uring_cq_advance(self._ring, 1)
        if token < _CANCEL:
            self._pending.pop(token, None)
            self._ready.append(Completion(token, result))


def _limit_workers(ring_fd: int, workers: int) -> None:
    """Of the kernel's threads that work on regular files, for whichever thread of ours uses the ring."""
    libc = ctypes.CDLL(None, use_errno=True)
    bounded_and_others = (ctypes.c_uint * 2)(workers, 0)  # 0: as it is
    code = libc.syscall(
        ctypes.c_long(_IO_URING_REGISTER), ctypes.c_uint(ring_fd), ctypes.c_uint(_IOWQ_MAX_WORKERS),
        ctypes.byref(bounded_and_others), ctypes.c_uint(2),
    )  # fmt: skip
    if code < 0:  # before Linux 5.15
        number = ctypes.get_errno()
        log.info(
            "py-kvcache: the kernel's I/O workers cannot be limited to %d: [%s] %s; up to four a core work",
            workers, errno.errorcode.get(number, number), os.strerror(number),
        )  # fmt: skip


def _close(fd: int) -> int:
    try:
        os.close(fd)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return 0


def make_ring(kind: str, entries: int, workers: int, wake_fd: int, directory: str) -> tuple[Ring, str | None]:
    """Build the ring that a setting asks for: ``auto``, ``io_uring`` or ``threads``; ``workers`` are both's.

    Returns the ring and, when ``auto`` fell back to threads, the sentence that says why. ``io_uring`` raises
    KvCacheError where the probe fails. ``directory`` is where the probe does its trial I/O.
    """
    # Imported here: both modules are built on this one.
    from py_kvcache.worker.probe import probe_ring
    from py_kvcache.worker.threads import ThreadRing

    if kind not in ("auto", "io_uring", "threads"):
        raise ConfigError(f"ring must be auto, io_uring or threads, not {kind!r}")
    if kind == "threads":
        return ThreadRing(workers, wake_fd), None
    probe = probe_ring(directory)
    reason = probe.reason
    if probe.ok:
        try:
            return UringRing(entries, wake_fd, workers), None
        except OSError as error:
            # The probe's ring was small; a memory limit may still refuse this one.
            reason = f"io_uring with {entries} entries: {os.strerror(error.errno or 0)}"
    if kind == "io_uring":
        raise KvCacheError(f"ring is set to io_uring, but {reason}")
    return ThreadRing(workers, wake_fd), reason
