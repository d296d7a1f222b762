"""What both directions share: who waits for whom, who holds what, and how blocks and jobs end.

Every change of a block's state goes through ``move``, which also gives back what the new state no longer
holds. So each slot is released and each descriptor closed exactly once, on whatever path the block ends.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.counters import Counters
from py_kvcache.worker.jobs import FIRST_STATE, JobResult, Kind, Running, Transfer
from py_kvcache.worker.journal import Journal
from py_kvcache.worker.tier import Tier
from py_kvcache.worker.transfer import (
    COPYING,
    HOLDS_FD,
    HOLDS_SLOT,
    LOST,
    Event,
    LoadState,
    State,
    StoreState,
    step,
)

if TYPE_CHECKING:
    from py_kvcache.worker.parts import FilePublisher, ReactorSettings, Sealer, Timeline
    from py_kvcache.worker.ring import Ring
    from py_kvcache.worker.staging import StagingPool

log = logging.getLogger("vllm.py_kvcache.worker.core")

MAX_RETRIES = 8  # of one operation that was interrupted or refused for the moment
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})
# At an open or create: about this process or machine, nothing is said about the block.
RAN_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
SPARE_DESCRIPTORS = 64  # beside the files: ring, eventfds, threads, closes and folders under way
# The gate says these once for the whole volume; each block would say them again.
_OF_THE_VOLUME = frozenset({Fault.PAUSED, Fault.NO_SPACE})
# Lost blocks that only the ring can bring back; what helpers do cannot be cancelled.
_ON_RING = frozenset({LoadState.OPENING_LOST, LoadState.READING_LOST, StoreState.WRITING_LOST})
_STATES = len(LoadState) + len(StoreState)


class Core:
    """State of one reactor. All methods: reactor thread only."""

    def __init__(
        self,
        ring: Ring,
        staging: StagingPool,
        checksum: Sealer,
        publisher: FilePublisher,
        settings: ReactorSettings,
        trace: Timeline | None,
        set_flags: Callable[[int, int], None],
        on_finished: Callable[[int], None],
    ) -> None:
        self.ring, self.staging, self.checksum, self.publisher = ring, staging, checksum, publisher
        self.tier = Tier(staging, settings.memory_tier, settings.tier_slots, settings.preload_slots)
        self.settings, self.journal, self.set_flags = settings, Journal(trace), set_flags
        self.counters = Counters()
        self.now = 0.0
        self.direct = settings.direct
        self.jobs: dict[int, Running] = {}
        self.results: deque[JobResult] = deque()
        self.news = threading.Event()  # set after each result
        self._on_finished = on_finished  # called before the result can be taken
        self.census = [0] * _STATES  # blocks by state, those given up included
        self.queued = dict.fromkeys(Kind, 0)  # blocks not begun
        self.open_files = 0
        self.endings = 0  # grows whenever a slot, descriptor or place may have become free
        self._waiting: dict[int, Transfer] = {}
        self._closing: set[int] = set()
        self._abandoning: set[int] = set()
        self._tokens = 0
        self._serials = 0

    # ---- operations

    def expect(self, t: Transfer) -> int:
        """A fresh token under which somebody will answer for this block."""
        self._tokens = token = self._tokens + 1
        t.token, t.since = token, self.now
        self._waiting[token] = t
        return token

    def answered(self, token: int) -> Transfer | None:
        """Whose token this is; None, after counting it, if nobody waits for it."""
        t = self._waiting.pop(token, None)
        if t is not None:
            return t
        if token in self._closing:
            self._closing.discard(token)
        elif token in self._abandoning:
            self._abandoning.discard(token)
        else:
            self.counters.strays += 1
        return None

    def again(self, t: Transfer, code: int) -> bool:
        """Whether to issue the operation that ended with this errno once more; prepares the block for it."""
        if code == errno.EINVAL and t.direct:
            # Not yet the file system's fault: a folder or FIFO in a file's place answers so too. The
            # switch for all is made when the same file gives its bytes without O_DIRECT.
            t.direct, t.refused = False, code
            if t.fd >= 0 and self.apply_flags(t):
                return False
        elif code not in _TRANSIENT or t.retries >= MAX_RETRIES:
            return False
        t.retries += 1
        self.counters.retries += 1
        self.move(t, Event.AGAIN)
        return True

    def ran_short(self, t: Transfer, stage: str, code: int) -> BlockError:
        """What a block ends with when this process had no descriptor or memory for its file; warns."""
        limits = self.settings
        needed = limits.open_lookahead + limits.io_depth + limits.store_files + SPARE_DESCRIPTORS
        self.journal.warn(
            self.now,
            ("ran short", errno.errorcode.get(code, "?")),
            f"no file could be opened for a {t.run.job.kind.value} [{errno.errorcode.get(code, code)}] "
            f"{os.strerror(code)}: raise `ulimit -n`, py-kvcache alone needs {needed} descriptors",
        )
        return BlockError(Fault.CANCELLED, t.work.path, code, stage)

    def apply_flags(self, t: Transfer) -> int:
        """Make the open file blocking, and direct if the block is. Returns an errno, 0 if all is well."""
        try:
            self.set_flags(t.fd, os.O_DIRECT if t.direct else 0)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def proved_buffered(self, t: Transfer) -> None:
        """A whole file went through buffered after O_DIRECT was refused: the file system does not do it."""
        if not self.direct:
            return
        self.direct = self.publisher.direct = False
        self.counters.direct_refused += 1
        log.warning(
            "py-kvcache: the file system refused O_DIRECT with %s (%s) for %s; files are read and written "
            "through the page cache from now on",
            errno.errorcode.get(t.refused, t.refused), os.strerror(t.refused), t.work.path,
        )  # fmt: skip

    # ---- blocks

    def begin(self, run: Running) -> Transfer:
        """Take the next block of a job."""
        ordinal = run.begun
        run.begun = ordinal + 1
        self.queued[run.job.kind] -= 1
        self._serials += 1
        job = run.job
        t = Transfer(run, ordinal, job.blocks[ordinal], FIRST_STATE[job.kind], self._serials, self.direct)
        self.census[t.state] += 1
        run.active.add(t)
        return t

    def move(self, t: Transfer, event: Event) -> State:
        """Change the block's state and give back what it no longer holds."""
        old, new = t.state, step(t.state, event)
        t.state = new
        self.census[old] -= 1
        self.census[new] += 1
        if t.slot is not None and new not in HOLDS_SLOT:
            self.staging.release(t.slot)
            t.slot = None
            self.endings += 1
        if t.fd >= 0 and new not in HOLDS_FD:
            self._let_file_go(t)
        return new

    def took_file(self, t: Transfer, fd: int, temp: str = "") -> None:
        """The block owns a descriptor from here on."""
        t.fd, t.temp = fd, temp
        self.open_files += 1

    def gave_file(self, t: Transfer) -> tuple[int, str]:
        """The block's descriptor and temporary name, which somebody else owns from here on."""
        fd, temp = t.fd, t.temp
        t.fd, t.temp = -1, ""
        self.open_files -= 1
        return fd, temp

    def succeed(self, t: Transfer) -> None:
        """The block has just reached DONE."""
        run = t.run
        run.active.discard(t)
        run.done += 1
        self.endings += 1
        self._finish_if_over(run)

    def fail(self, t: Transfer, stage: str, error: BlockError) -> None:
        """End a block with an error of its own."""
        kind = t.run.job.kind.value
        t.error = error
        self.move(t, Event.FAIL)
        if error.fault is Fault.CHECKSUM:
            self.counters.checksum_failures += 1
        what = (kind, stage, error.fault.value, error.errno_name)
        self.counters.failure(*what)
        if error.fault not in _OF_THE_VOLUME and error.code != errno.EROFS:
            self.journal.warn(self.now, what, f"{kind} failed at {stage}: {error}")
        self._ended_badly(t, error)

    def end_given_up(self, t: Transfer, error: BlockError) -> None:
        """End a block that nobody holds, for a reason that is not its own: its job was given up, say."""
        t.error = error
        self.move(t, Event.FAIL)
        self._count_drop(t.run, error, 1)
        self._ended_badly(t, error)

    def drop(self, t: Transfer, error: BlockError) -> None:
        """Give a block up. What others have stays theirs until they answer; a device copy goes on."""
        if t.state in COPYING:
            return
        new = self.move(t, Event.DROP)
        if new in LOST:
            self.counters.lost += 1
            if t.slot is not None:
                self.staging.mark_stuck(t.slot)
            if new in _ON_RING:
                self.ring.cancel(t.token)
        self._count_drop(t.run, error, 1)
        self._ended_badly(t, error)

    def let_go(self, t: Transfer) -> None:
        """Whoever had a lost block answered: now its slot and descriptor really are ours."""
        self.move(t, Event.RELEASED)
        self.endings += 1

    # ---- jobs

    def skip_rest(self, run: Running, error: BlockError, keep: int = 0) -> None:
        """Never begin the blocks that have not begun, but ``keep`` of them. They share one error."""
        first = min(run.limit, run.begun + keep)
        count = run.limit - first
        if count:
            for ordinal in range(first, run.limit):
                run.failed[ordinal] = error
            run.limit = first
            self.queued[run.job.kind] -= count
            self._count_drop(run, error, count)
            self.endings += 1
        self._finish_if_over(run)

    def cut(self, run: Running, ordinal: int, error: BlockError) -> None:
        """Give up everything behind a failed block: vLLM computes from there on, whatever we load."""
        for t in [t for t in run.active if t.ordinal > ordinal]:
            self.drop(t, error)
        self.skip_rest(run, error)

    def give_up(self, run: Running, error: BlockError) -> None:
        """End a job as soon as the device lets go of it."""
        if run.finished or run.over is not None:
            return
        run.over = error
        for t in list(run.active):
            self.drop(t, error)
        self.skip_rest(run, error)

    def answer_anyway(self, run: Running, error: BlockError) -> None:
        """Report a job whose blocks nobody will follow any more: at the end of the thread only."""
        for t in run.active:
            run.failed[t.ordinal] = error
            self._count_drop(run, error, 1)
        run.active.clear()
        self.skip_rest(run, error)

    # ---- audit

    @property
    def lost_now(self) -> int:
        """Blocks given up that kernel or helpers still have."""
        return sum(self.census[state] for state in LOST)

    @property
    def quiet(self) -> bool:
        """True if nobody owes an answer."""
        return not (self._waiting or self._closing or self._abandoning)

    def audit(self) -> str | None:
        """None if all is accounted for while no job is running, else what is missing, in words."""
        stuck = sum(1 for t in self._waiting.values() if t.slot is not None)
        held = sum(1 for t in self._waiting.values() if t.fd >= 0)
        wrong = self.staging.check_idle(stuck)
        if wrong is None and self.open_files != held:
            wrong = f"{self.open_files} descriptors are open, expected {held}"
        if wrong is None and any(self.queued.values()):
            wrong = f"queue counts are {self.queued} without a job"
        return wrong

    def _let_file_go(self, t: Transfer) -> None:
        fd, temp = self.gave_file(t)
        self._tokens = token = self._tokens + 1
        self.endings += 1
        if temp:
            self._abandoning.add(token)
            self.publisher.abandon(token, fd, temp, t.error)
        else:
            self._closing.add(token)
            self.ring.close(token, fd)

    def _ended_badly(self, t: Transfer, error: BlockError) -> None:
        run = t.run
        run.active.discard(t)
        run.failed[t.ordinal] = error
        self.endings += 1
        self._finish_if_over(run)

    def _count_drop(self, run: Running, error: BlockError, blocks: int) -> None:
        self.counters.drop(run.job.kind.value, error.fault.value, blocks)

    def _finish_if_over(self, run: Running) -> None:
        if run.finished or run.active or run.begun < run.limit:
            return
        run.finished = True
        job = run.job
        self.jobs.pop(job.job_id, None)
        if job.kind is Kind.PRELOAD:
            return
        seconds = self.now - run.arrived
        self.counters.finish(job.kind.value, seconds)
        self.journal.job(self.now, run)
        failed = tuple(sorted(run.failed.items()))
        self._on_finished(job.job_id)
        self.results.append(
            JobResult(job.job_id, job.kind, failed, run.done * self.settings.payload_bytes, seconds)
        )
        self.news.set()
