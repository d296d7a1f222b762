"""What other threads hand to the reactor: append and wake, nothing else."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from py_kvcache.worker.quickcalls import signal_event

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue from any thread to one.

    Args:
        wake_fd: an eventfd (non-blocking) that the reader waits on; the ring signals the same one. It
            belongs to the caller, who closes it after ``close``.
    """

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self._messages: deque[T] = deque()
        # Held for two system calls at most. Without it a late wake could write its eight bytes into
        # whatever file has got the number of the closed eventfd.
        self._lock = threading.Lock()
        self._closed = False

    def post(self, message: T) -> bool:
        """Append and wake. False if nobody will read it any more."""
        with self._lock:
            if self._closed:
                return False
            self._messages.append(message)
            self._signal()
            return True

    def wake(self) -> None:
        """Make the reader look at everything it polls; for helper threads and device callbacks."""
        with self._lock:
            if not self._closed:
                self._signal()

    def drain(self, limit: int) -> list[T]:
        """Take at most ``limit`` messages, oldest first; reader's thread only."""
        messages = self._messages
        return [messages.popleft() for _ in range(min(limit, len(messages)))]

    def __len__(self) -> int:
        return len(self._messages)

    def close(self) -> list[T]:
        """Refuse further messages and return those that were not read."""
        with self._lock:
            self._closed = True
            rest = list(self._messages)
            self._messages.clear()
            return rest

    def _signal(self) -> None:
        signal_event(self._wake_fd)
