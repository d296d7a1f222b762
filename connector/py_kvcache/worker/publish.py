"""The reactor's publisher: file-system work that would block the ring thread, in a few daemon threads.

create, commit and abandon give exactly one result each; quarantine gives an outcome. What they do is in
publication.py and quarantine.py, whether a store may begin at all is in gate.py.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.gate import StoreGate
from py_kvcache.worker.publication import BlockFiles, FileSettings
from py_kvcache.worker.quarantine import Outcome, Quarantine
from py_kvcache.worker.rootwatch import RootWatch
from py_kvcache.worker.watermark import DayBudget, Watermark

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_kvcache.worker.fileops import FileOps

log = logging.getLogger(f"vllm.{__name__}")

MAX_SUSPECTS = 64
_T = TypeVar("_T")


class Op(Enum):
    """Which call a result answers."""

    CREATE = "create"
    COMMIT = "commit"
    ABANDON = "abandon"


@dataclass(frozen=True)
class PublishResult:
    """Outcome of one call, matched by token and op.

    CREATE: without error and not ``exists``: ``fd`` is open for writing, ``temp`` is its name, and the
    caller owes exactly one commit or abandon. ``exists``: a complete file is there, nothing is owed.
    With error (PAUSED, NO_SPACE, IO, CANCELLED): nothing was left behind, nothing is owed.
    COMMIT: fd is closed and temp gone in every case. Without error the final name is complete;
    ``exists``: another writer was first.
    ABANDON: fd closed, temp removed as far as possible (counted where not); never an error.
    """

    token: int
    op: Op
    fd: int = -1
    temp: str = ""
    error: BlockError | None = None
    exists: bool = False


@dataclass(frozen=True)
class PublishSettings:
    """``files`` says how files look, the last three when to stop storing (see watermark.py)."""

    files: FileSettings
    threads: int = 4
    direct: bool = False
    checksum: bool = True
    store_stop_at: float = 0.90
    store_resume_at: float = 0.85
    store_bytes_per_day: int = 0


class Publisher:
    """All methods may be called from any thread and never block (but ``shutdown``).

    Args:
        on_done: called from a publisher thread after each result or outcome; must only wake somebody.
    """

    def __init__(
        self,
        ops: FileOps,
        settings: PublishSettings,
        on_done: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        watch = RootWatch(ops, settings.files.root)
        self.files = BlockFiles(ops, settings.files, direct=settings.direct, watch=watch)
        self.gate = StoreGate(
            ops,
            settings.files.root,
            Watermark(settings.store_stop_at, settings.store_resume_at),
            DayBudget(settings.store_bytes_per_day),
            clock,
            watch,
        )
        self._on_done = on_done
        self._quarantine = Quarantine(ops, checksum=settings.checksum, clock=clock)
        self._lock = threading.Lock()
        self._owed: dict[str, int] = {}  # temporary name -> bytes admitted
        self._suspects: dict[str, tuple[bytes, int]] = {}
        self._closed = False
        self._results: deque[PublishResult] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._suspicion: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [self._start(self._work, f"publish-{i}") for i in range(settings.threads)]
        # Its own thread: a re-read that hangs must not stop publications.
        self._suspect_thread = self._start(self._suspicion, "quarantine")

    @property
    def direct(self) -> bool:
        """Whether files are created with O_DIRECT; may be set, becomes False when refused."""
        return self.files.direct

    @direct.setter
    def direct(self, value: bool) -> None:
        self.files.direct = value

    def create(self, token: int, final: str, nbytes: int) -> None:
        """Open a temporary file for ``nbytes`` that shall become ``final``."""
        self._submit(token, Op.CREATE, final, lambda: self._create(token, final, nbytes))

    def commit(self, token: int, fd: int, temp: str, final: str, index: int) -> None:
        """Publish the completely written file; ``index`` is the block's position in its chain."""
        self._submit(token, Op.COMMIT, final, lambda: self._commit(token, fd, temp, final, index))

    def abandon(self, token: int, fd: int, temp: str, error: BlockError | None = None) -> None:
        """Give the file up. ``error``, where given, says why: NO_SPACE pauses stores for a moment."""
        self._submit(token, Op.ABANDON, temp, lambda: self._abandon(token, fd, temp, error))

    def quarantine(self, path: str, key: bytes, payload_bytes: int) -> None:
        """Have a file examined that a load found damaged. Dropped if already waiting or too many are."""
        with self._lock:
            if self._closed or path in self._suspects or len(self._suspects) >= MAX_SUSPECTS:
                return
            self._suspects[path] = (key, payload_bytes)
        self._suspicion.put(lambda: self._examine(path, key, payload_bytes))

    def results(self) -> list[PublishResult]:
        """Everything that is done since the last call."""
        return _drain(self._results)

    def outcomes(self) -> list[Outcome]:
        """What quarantine did since the last call."""
        return _drain(self._outcomes)

    def refuses(self) -> bool:
        """True if a create would be refused now without asking the volume: spare the copy."""
        return self.gate.refuses()

    @property
    def paused(self) -> bool:
        """True while stores are off: volume at its mark, full, read-only or gone, or budget spent."""
        return self.gate.paused

    def counters(self) -> dict[str, int]:
        """Rare events since the start, by name (utime_denied, link_unsupported, temp_left, ...)."""
        return self.files.counts.read()

    def shutdown(self, timeout_s: float) -> bool:
        """Finish what is queued, as far as the timeout allows; False if a thread still runs. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for _ in self._threads:
                self._work.put(None)
            self._suspicion.put(None)
        end = time.monotonic() + timeout_s
        for thread in [*self._threads, self._suspect_thread]:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in [*self._threads, self._suspect_thread])

    # ---- in the threads

    def _create(self, token: int, final: str, nbytes: int) -> PublishResult:
        try:
            self.gate.enter(final, nbytes)
        except BlockError as error:
            return PublishResult(token, Op.CREATE, error=error)
        try:
            created = self.files.create(final, direct=self.files.direct)
        except BlockError as error:
            self.gate.leave(nbytes, written=False)
            self.gate.failed(error)
            return PublishResult(token, Op.CREATE, error=error)
        except BaseException:
            self.gate.leave(nbytes, written=False)
            raise
        if created is None:
            self.gate.leave(nbytes, written=False)
            return PublishResult(token, Op.CREATE, exists=True)
        self.gate.opened()
        fd, temp = created
        with self._lock:
            self._owed[temp] = nbytes
        return PublishResult(token, Op.CREATE, fd, temp)

    def _commit(self, token: int, fd: int, temp: str, final: str, index: int) -> PublishResult:
        won = False
        try:
            won = self.files.commit(fd, temp, final, index)
        except BlockError as error:
            self.gate.failed(error)
            return PublishResult(token, Op.COMMIT, error=error)
        finally:
            self._settle(temp, written=won)
        return PublishResult(token, Op.COMMIT, exists=not won)

    def _abandon(self, token: int, fd: int, temp: str, error: BlockError | None) -> PublishResult:
        self.files.abandon(fd, temp)
        self._settle(temp, written=False)
        if error is not None:
            self.gate.failed(error)
        return PublishResult(token, Op.ABANDON)

    def _settle(self, temp: str, *, written: bool) -> None:
        with self._lock:
            nbytes = self._owed.pop(temp, None)
        if nbytes is not None:
            self.gate.leave(nbytes, written=written)

    def _examine(self, path: str, key: bytes, payload_bytes: int) -> None:
        if self._closed:
            return
        try:
            outcome = self._quarantine.examine(path, key, payload_bytes)
        finally:
            with self._lock:
                self._suspects.pop(path, None)
        self._outcomes.append(outcome)
        self._on_done()

    # ---- plumbing

    def _submit(self, token: int, op: Op, path: str, work: Callable[[], PublishResult]) -> None:
        def task() -> None:
            try:
                result = work()
            except Exception as error:
                # A defect of ours must not cost a slot: the block fails and its job ends.
                log.exception("py-kvcache: %s of %s failed", op.value, path)
                result = PublishResult(token, op, error=BlockError(Fault.IO, path, errno.EIO, repr(error)))
            self._results.append(result)
            self._on_done()

        with self._lock:
            if not self._closed:
                self._work.put(task)
                return
        if op is Op.CREATE:
            late = BlockError(Fault.CANCELLED, path, detail="the publisher is shut down")
            self._results.append(PublishResult(token, op, error=late))
            self._on_done()
        else:
            task()  # a descriptor and a temporary are owed: here and now rather than never

    @staticmethod
    def _start(work: queue.SimpleQueue[Callable[[], None] | None], name: str) -> threading.Thread:
        def serve() -> None:
            while (task := work.get()) is not None:
                task()

        thread = threading.Thread(target=serve, name=f"py-kvcache-{name}", daemon=True)
        thread.start()
        return thread


def _drain(items: deque[_T]) -> list[_T]:
    done: list[_T] = []
    while items:
        done.append(items.popleft())
    return done
