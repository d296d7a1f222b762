"""Off-thread questions to the file system: which blocks of a chain exist.

The scheduler's step never waits for a file system: it hands over a chain, answers RETRY and takes
the answer in a later step.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from py_kvcache.layout import block_path, part_dir

logger = logging.getLogger("vllm.py_kvcache.probe")

Exists = Callable[[int], bool]


def longest_prefix(length: int, exists: Exists) -> int:
    """Number of leading blocks that exist, for presence that is nearly monotone along the chain.

    Storing goes from the head on and GC evicts tails first, so a chain has its head if it has its
    tail. Asks about 2 log2(length) times: the ends first (the usual answers), then gallop, then
    halve. A hole before the answer is found by the load, which confirms each block by opening it.
    """
    if length == 0 or not exists(0):
        return 0
    if length == 1 or exists(length - 1):
        return length
    low, step = 0, 1  # block `low` exists
    high = length - 1  # block `high` does not
    while low + step < high:
        if not exists(low + step):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if exists(middle):
            low = middle
        else:
            high = middle
    return low + 1


@dataclass(frozen=True, slots=True)
class ChainQuestion:
    """Blocks of one request, in chain order, that have not been seen yet."""

    ticket: int
    root: str
    space: str
    parts: tuple[int, ...]
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ChainAnswer:
    """How many leading blocks exist on every part, and the errno that cut the search short (0: none)."""

    ticket: int
    present: int
    code: int


def answer(question: ChainQuestion, lstat: Callable[[str], os.stat_result] = os.lstat) -> ChainAnswer:
    """Look the chain up; an error of the file system ends it there, which is a miss and no harm."""
    folders = [part_dir(question.root, question.space, part) for part in question.parts]
    code = 0

    def exists(position: int) -> bool:
        nonlocal code
        for folder in folders:
            try:
                status = lstat(block_path(folder, question.keys[position]))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    code = error.errno or errno.EIO
                return False
            if not stat.S_ISREG(status.st_mode):
                return False
        return True

    return ChainAnswer(question.ticket, longest_prefix(len(question.keys), exists), code)


class Prober:
    """A few daemon threads that answer chain questions and run small jobs; results are polled."""

    def __init__(self, threads: int = 4, lstat: Callable[[str], os.stat_result] = os.lstat) -> None:
        self._lstat = lstat
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[ChainAnswer] = queue.SimpleQueue()
        self._news = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name=f"py-kvcache-probe-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, question: ChainQuestion) -> None:
        """Queue a question; never blocks. Each gets exactly one answer, unless the file system hangs."""

        def task() -> None:
            reply = ChainAnswer(question.ticket, 0, errno.EIO)
            try:
                reply = answer(question, self._lstat)
            finally:
                self._answers.put(reply)
                self._news.set()

        self._tasks.put(task)

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job that handles its own errors; never blocks."""
        self._tasks.put(job)

    def answers(self) -> list[ChainAnswer]:
        """Take all answers that are ready."""
        ready = []
        while True:
            try:
                ready.append(self._answers.get_nowait())
            except queue.Empty:
                return ready

    def wait(self, timeout_s: float) -> None:
        """Return when there is an answer to take, or after the timeout. One thread at a time."""
        self._news.clear()
        if self._answers.empty():
            self._news.wait(timeout_s)

    def shutdown(self) -> None:
        """Let the threads end once they get to it; a hung file system keeps them, as daemons."""
        for _ in self._threads:
            self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                # Who asked falls back at its deadline; a thread less would cost all that come after.
                logger.exception("py-kvcache: a probe failed")
