"""The ring's fallback: the same operations on a few threads, for kernels and CPUs without io_uring.

Also what serves arm64, where liburing has no wheel. pread and pwrite release the GIL, so large transfers run
side by side; a thread stuck in a hung network file system occupies its place until the kernel lets go.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.quickcalls import signal_event
from py_kvcache.worker.ring import MAX_TRANSFER, Completion, check_path, check_request

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False)
class _Op:
    token: int
    call: Callable[[], int | None]  # holds path and buffer until it has run
    opens: bool = False
    closes: bool = False
    claimed: bool = field(default=False)  # by a thread or by cancel, whichever came first


class ThreadRing:
    """Each thread runs one operation at a time, started in submit order."""

    name = "threads"

    def __init__(self, threads: int, wake_fd: int) -> None:
        if threads < 1:
            raise ValueError(f"a thread ring needs at least one thread, not {threads}")
        self._wake_fd = wake_fd
        self._lock = threading.Lock()
        self._queued: list[_Op] = []
        self._inbox: SimpleQueue[_Op | None] = SimpleQueue()
        self._flying: dict[int, _Op] = {}
        self._done: deque[Completion] = deque()
        self._closed = False
        self._threads = [
            # Daemons: an operation that hangs for ever must not keep the process from ending.
            threading.Thread(target=self._work, name=f"py-kvcache-io-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def openat(self, token: int, path: str, flags: int, mode: int = 0) -> None:
        """See Ring.openat."""
        check_path(path)
        self._queue(_Op(token, lambda: os.open(path, flags, mode), opens=True), 0, 0)

    def read(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring.read."""
        part = buffer[:MAX_TRANSFER] if buffer.nbytes > MAX_TRANSFER else buffer
        self._queue(_Op(token, lambda: os.preadv(fd, [part], offset)), fd, offset)

    def write(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring.write."""
        part = buffer[:MAX_TRANSFER] if buffer.nbytes > MAX_TRANSFER else buffer
        self._queue(_Op(token, lambda: os.pwritev(fd, [part], offset)), fd, offset)

    def close(self, token: int, fd: int) -> None:
        """See Ring.close. Never cancelled: nobody would close the descriptor afterwards."""
        self._queue(_Op(token, lambda: os.close(fd), closes=True), fd, 0)

    def fsync(self, token: int, fd: int) -> None:
        """See Ring.fsync."""
        self._queue(_Op(token, lambda: os.fsync(fd)), fd, 0)

    def cancel(self, token: int) -> None:
        """See Ring.cancel. Only what no thread has begun can be stopped."""
        op = self._flying.get(token)
        if op is None or op.closes:
            return
        with self._lock:
            if op.claimed:
                return
            op.claimed = True
        self._finish(op, -errno.ECANCELED)

    def submit(self) -> None:
        """See Ring.submit."""
        queued, self._queued = self._queued, []
        for op in queued:
            self._inbox.put(op)

    def completions(self) -> list[Completion]:
        """See Ring.completions."""
        ready = []
        while self._done:
            completion = self._done.popleft()
            self._flying.pop(completion.token, None)
            ready.append(completion)
        return ready

    def fileno(self) -> int:
        """See Ring.fileno."""
        return self._wake_fd

    def in_flight(self) -> int:
        """See Ring.in_flight."""
        return len(self._flying)

    def shutdown(self, grace_s: float = 0.5) -> None:
        """Drop what has not begun, wait ``grace_s`` seconds at most for what has."""
        if self._closed:
            return
        for token in list(self._flying):
            self.cancel(token)
        self.submit()
        for _ in self._threads:
            self._inbox.put(None)
        each = grace_s / len(self._threads)
        for thread in self._threads:
            thread.join(each)
        with self._lock:
            # From here on no thread touches the eventfd: its number may soon be another file's.
            self._closed = True
        # Whatever still runs holds its own buffer; its result is nobody's any more.
        self._flying = {c.token: self._flying[c.token] for c in self._done}

    def _queue(self, op: _Op, fd: int, offset: int) -> None:
        check_request(op.token, fd, offset)
        if self._closed:
            raise KvCacheError("the ring is shut down")
        if op.token in self._flying:
            raise ValueError(f"token {op.token} is already in flight")
        self._flying[op.token] = op
        self._queued.append(op)

    def _work(self) -> None:
        while (op := self._inbox.get()) is not None:
            with self._lock:
                if op.claimed:
                    continue
                op.claimed = True
            try:
                result = op.call() or 0  # Python itself repeats a call that a signal interrupted
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except (TypeError, ValueError, OverflowError, BufferError):  # arguments the call refuses
                result = -errno.EINVAL
            self._finish(op, result)
            del op  # or an idle thread would hold the last buffer

    def _finish(self, op: _Op, result: int) -> None:
        with self._lock:
            if not self._closed:
                self._done.append(Completion(op.token, result))
                signal_event(self._wake_fd)
                return
        if op.opens and result >= 0:
            os.close(result)  # finished after shutdown: no one will ask for this descriptor
