"""One pass of the reactor: receive, complete, expire, schedule, answer, submit. No thread, no waiting.

Passes are bounded: by the number of messages taken, by what can be in flight, and by what slots and
lookahead let begin. Everything that can hang happens elsewhere: file-system calls in the kernel or in
publisher threads, copies on the device, digests in helpers. So a deadline is met whatever the storage does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.jobs import Job, Kind, Running, Transfer
from py_kvcache.worker.loads import Loads
from py_kvcache.worker.preload import Wanted
from py_kvcache.worker.stores import Stores
from py_kvcache.worker.transfer import LoadState, StoreState

if TYPE_CHECKING:
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.inbox import Inbox
    from py_kvcache.worker.parts import Copier
    from py_kvcache.worker.publish import PublishResult

log = logging.getLogger("vllm.py_kvcache.worker.loop")

MESSAGES_PER_PASS = 64
DEVICE_GRACE_S = 5.0  # how much longer than its timeout a stop waits for copies on the device
STOP_POLL_S = 0.05


@dataclass(eq=False)
class Flush:
    """A question to the reactor: when does none of these jobs touch device memory any more?"""

    ids: set[int]
    give_up_at: float  # what is not being copied by then is given up
    answered: threading.Event = field(default_factory=threading.Event)
    gave_up: bool = False


@dataclass(frozen=True)
class Stop:
    """Begin nothing more; what has begun may go on until ``at``."""

    at: float


@dataclass(frozen=True)
class Wants:
    """All that waiting requests will want, most urgent first; takes the place of the last one."""

    wants: Sequence[Wanted]


Message = Job | Flush | Stop | Wants


class Loop:
    """The reactor's thread works through this alone; tests do so without a thread.

    ``stopped`` becomes true in the pass that ends a stop; ``clean`` then tells whether nobody else has
    staging memory.
    """

    def __init__(self, core: Core, device: Copier, inbox: Inbox[Message]) -> None:
        self._core, self._device, self._inbox = core, device, inbox
        self._loads, self._stores = Loads(core, device), Stores(core, device)
        self._deadlines: list[tuple[float, int, Running]] = []
        self._arrivals = 0
        self._flushes: list[Flush] = []
        self._stop: Stop | None = None
        self._audited = 0  # value of core.endings at the last audit
        self.stopped = False
        self.clean = True

    def run_pass(self, now: float) -> float | None:
        """Returns for how long nothing can happen without a wake, in seconds; None: for ever."""
        core = self._core
        core.now = now
        core.counters.passes += 1
        self._receive()
        self._complete()
        self._expire()
        before = core.endings
        self._loads.schedule()
        self._stores.schedule()
        self._poll_device()
        self._answer_flushes()
        self._submit()
        again = core.endings != before or len(self._inbox) > 0
        if not again:
            self._check_idle()
        self._end_if_stopped()
        return 0.0 if again or self.stopped else self._patience()

    @property
    def device_busy(self) -> bool:
        """Whether the device still works on our copies, as far as it can tell."""
        return self._loads.in_flight() or self._stores.in_flight()

    def finish(self, why: str) -> None:
        """Answer every job and flush and let the ring go; after this there are no more passes."""
        self.stopped = True
        core = self._core
        for run in list(core.jobs.values()):
            core.answer_anyway(run, BlockError(Fault.CANCELLED, first_path(run.job), 0, why))
        for question in self._flushes:
            question.answered.set()
        core.ring.shutdown()
        # Opens that ended while the ring was shut down: nobody else knows these descriptors.
        for token, result in core.ring.completions():
            t = core.answered(token)
            if t is not None and t.state is LoadState.OPENING_LOST and result >= 0:
                os.close(result)

    def _submit(self) -> None:
        core = self._core
        if core.journal.trace is None:
            core.ring.submit()
            return
        began = time.monotonic()
        core.ring.submit()
        core.journal.submit(began, time.monotonic())
        core.journal.slots(core.now, core.staging.by_use())

    # ---- receive

    def _receive(self) -> None:
        for message in self._inbox.drain(MESSAGES_PER_PASS):
            if isinstance(message, Job):
                self._accept(message)
            elif isinstance(message, Flush):
                self._flushes.append(message)
                self._stores.hurry(message.ids)
            elif isinstance(message, Wants):
                if self._stop is None:
                    self._loads.preloads.want(message.wants)
            else:
                self._begin_stop(message)

    def _accept(self, job: Job) -> None:
        core, count = self._core, len(job.blocks)
        run = Running(job, core.now, count)
        core.jobs[job.job_id] = run
        core.queued[job.kind] += count
        if self._stop is not None or not count:
            core.skip_rest(run, BlockError(Fault.CANCELLED, first_path(job), 0, "the worker is stopping"))
            return
        if job.kind is Kind.STORE:
            room = max(0, core.settings.max_queued_stores - (core.queued[Kind.STORE] - count))
            if room < count:
                # The head of a chain is worth more than its tail: without the head nobody finds the tail.
                core.skip_rest(run, BlockError(Fault.QUEUE_FULL, job.blocks[room].path), keep=room)
                core.journal.warn(
                    core.now,
                    ("queue_full",),
                    f"{core.settings.max_queued_stores} blocks wait to be stored, {count - room} more will "
                    "not be stored: storage is slower than the engine computes",
                )
            if run.finished:
                return
        (self._loads if job.kind is Kind.LOAD else self._stores).add(run)
        self._arrivals += 1
        heappush(self._deadlines, (job.deadline, self._arrivals, run))

    # ---- complete

    def _complete(self) -> None:
        core, loads, stores = self._core, self._loads, self._stores
        for token, result in core.ring.completions():
            t = core.answered(token)
            if t is None:
                continue
            state = t.state
            if state is LoadState.READING:
                loads.read(t, result)
            elif state is LoadState.OPENING:
                loads.opened(t, result)
            elif state is StoreState.WRITING:
                stores.wrote(t, result)
            else:
                self._ring_let_go(t, result)
        for answer in core.publisher.results():
            self._published(answer)
        self._poll_device()

    def _ring_let_go(self, t: Transfer, result: int) -> None:
        core = self._core
        if t.state is LoadState.OPENING_LOST:
            if result >= 0:
                core.took_file(t, result)
        else:
            meter = core.counters.writes if t.state is StoreState.WRITING_LOST else core.counters.reads
            meter.end(core.now, t.since, max(result, 0))
        core.let_go(t)

    def _published(self, answer: PublishResult) -> None:
        core = self._core
        t = core.answered(answer.token)
        if t is None:
            return
        if t.state is StoreState.CREATING:
            self._stores.created(t, answer)
        elif t.state is StoreState.PUBLISHING:
            self._stores.published(t, answer)
        else:
            if t.state is StoreState.CREATING_LOST and answer.temp:
                core.took_file(t, answer.fd, answer.temp)
            core.let_go(t)

    def _poll_device(self) -> None:
        core, loads, stores = self._core, self._loads, self._stores
        loads.poll()
        stores.poll()
        # Last: what was read or copied just now may have been checked on the spot, without a wake.
        for checked in core.checksum.results():
            t = core.answered(checked.token)
            if t is None:
                continue
            if t.state is LoadState.VERIFYING:
                loads.verified(t, checked.fault, checked.detail)
            elif t.state is StoreState.HASHING:
                stores.sealed(t, checked.fault, checked.detail)
            else:
                core.let_go(t)

    # ---- expire

    def _expire(self) -> None:
        core, heap = self._core, self._deadlines
        while heap and (heap[0][2].finished or heap[0][0] <= core.now):
            run = heappop(heap)[2]
            if not run.finished:
                error = BlockError(Fault.TIMEOUT, first_path(run.job), 0, "the job's deadline passed")
                kind = run.job.kind.value
                core.journal.warn(core.now, ("deadline", kind), f"{kind} given up: {error}")
                core.give_up(run, error)
        if self._stop is not None and core.now >= self._stop.at:
            for run in list(core.jobs.values()):
                core.give_up(run, BlockError(Fault.CANCELLED, first_path(run.job), 0, "the worker stopped"))

    # ---- flush

    def _answer_flushes(self) -> None:
        core = self._core
        waiting = []
        for question in self._flushes:
            late = not question.gave_up and core.now >= question.give_up_at
            question.gave_up |= late
            busy = set()
            for job_id in question.ids:
                run = core.jobs.get(job_id)
                if run is None:
                    continue
                if late:
                    flushed = BlockError(Fault.CANCELLED, first_path(run.job), 0, "flushed")
                    if run.job.kind is Kind.STORE:
                        core.skip_rest(run, flushed)
                    else:
                        # Only its copies touch device memory: storage that is slow must not stall the engine.
                        core.give_up(run, flushed)
                if run.touches_device:
                    busy.add(job_id)
            question.ids = busy
            if busy:
                waiting.append(question)
            else:
                question.answered.set()
        self._flushes = waiting

    # ---- wait, idle, stop

    def _patience(self) -> float | None:
        now = self._core.now
        times = [question.give_up_at - now for question in self._flushes if not question.gave_up]
        if self._deadlines:
            times.append(self._deadlines[0][0] - now)
        if self._stop is not None:
            times.append(self._stop.at - now if now < self._stop.at else STOP_POLL_S)
        if self._device.poll_s is not None and (self._loads.copying or self._stores.copying):
            times.append(self._device.poll_s)
        times.extend(wait for wait in (self._loads.wait(), self._stores.wait()) if wait is not None)
        return max(0.0, min(times)) if times else None

    def _check_idle(self) -> None:
        core = self._core
        if core.jobs or core.endings == self._audited:
            return
        self._audited = core.endings
        core.journal.rest()
        wrong = core.audit()
        if wrong is not None:
            core.counters.leaks += 1
            log.error("py-kvcache: idle, but %s; this is a defect, please report it", wrong)

    def _begin_stop(self, stop: Stop) -> None:
        self._stop = self._stop or stop
        self._loads.preloads.want(())
        for run in list(self._core.jobs.values()):
            error = BlockError(Fault.CANCELLED, first_path(run.job), 0, "the worker is stopping")
            if run.job.kind is not Kind.STORE:
                self._core.give_up(run, error)
            else:
                self._core.skip_rest(run, error)

    def _end_if_stopped(self) -> None:
        stop, core = self._stop, self._core
        if stop is None or self.stopped:
            return
        if core.jobs and core.now < stop.at + DEVICE_GRACE_S:
            return
        if not core.quiet and core.now < stop.at:
            return
        self.clean = not core.jobs and core.quiet and core.audit() is None
        self.finish("the worker stopped")


def first_path(job: Job) -> str:
    """A path to name in an error about a whole job."""
    return job.blocks[0].path if job.blocks else ""
