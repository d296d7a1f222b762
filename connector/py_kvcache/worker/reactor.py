"""The worker's only thread on the ring, and what other threads may ask of it."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.core import Core
from py_kvcache.worker.inbox import Inbox
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.loop import DEVICE_GRACE_S, Flush, Loop, Message, Stop, Wants, first_path
from py_kvcache.worker.parts import ReactorSettings
from py_kvcache.worker.preload import Wanted
from py_kvcache.worker.quickcalls import clear_event, set_file_flags

if TYPE_CHECKING:
    from py_kvcache.worker.counters import Counters
    from py_kvcache.worker.parts import Copier, FilePublisher, Sealer, Timeline
    from py_kvcache.worker.ring import Ring
    from py_kvcache.worker.staging import StagingPool

__all__ = ["BlockWork", "Flush", "Job", "JobResult", "Kind", "Reactor", "ReactorSettings"]

log = logging.getLogger("vllm.py_kvcache.worker.reactor")


class Reactor:
    """Moves blocks between files and the device.

    Everything public may be called from any thread, but ``run_pass``, which tests call instead of ``start``.

    Args:
        wake_fd: the eventfd that the ring, and all helpers and devices, signal when something ended. It
            belongs to the caller, who closes it after ``stop``. Default: the ring's own.
        clock: seconds, monotonic; the jobs' deadlines are by it.
        set_flags: F_SETFL on a descriptor; OSError if it is not one of a seekable file.
    """

    def __init__(
        self,
        *,
        ring: Ring,
        staging: StagingPool,
        device: Copier,
        checksum: Sealer,
        publisher: FilePublisher,
        settings: ReactorSettings,
        wake_fd: int | None = None,
        trace: Timeline | None = None,
        clock: Callable[[], float] = time.monotonic,
        set_flags: Callable[[int, int], None] = set_file_flags,
    ) -> None:
        self._clock = clock
        self._wake_fd = ring.fileno() if wake_fd is None else wake_fd
        self._inbox: Inbox[Message] = Inbox(self._wake_fd)
        self._core = Core(ring, staging, checksum, publisher, settings, trace, set_flags, self._forget)
        self._loop = Loop(self._core, device, self._inbox)
        # Ids that were submitted and whose results are not out yet. Changed by both sides, one step each.
        self._live: set[int] = set()
        self._refused: deque[JobResult] = deque()  # of jobs that came after the end
        self._thread: threading.Thread | None = None

    # ---- jobs

    def submit(self, job: Job) -> None:
        """Hand a job in; its result comes exactly once. Never blocks, never raises."""
        if job.job_id in self._live:
            log.error("py-kvcache: job %d was handed in twice; the second is ignored", job.job_id)
            return
        self._live.add(job.job_id)
        if not self._inbox.post(job):
            self._refuse(job)

    def take_finished(self) -> list[JobResult]:
        """Results since the last call."""
        finished: list[JobResult] = []
        for results in (self._core.results, self._refused):
            while results:
                finished.append(results.popleft())
        return finished

    def wait_finished(self, timeout_s: float) -> None:
        """Return when there are results to take, or after the timeout. One thread at a time."""
        news = self._core.news
        news.clear()
        if not self._core.results and not self._refused:
            news.wait(timeout_s)

    def flush(self, job_ids: set[int], patience_s: float) -> None:
        """Return when none of these jobs touches device memory any more, and none will.

        After ``patience_s`` stores that have not been copied are dropped and loads are given up; from then
        on only copies on the device are waited for. Ids that are unknown or finished count as done.
        """
        question = self.ask(job_ids, patience_s)
        while not question.answered.wait(0.5):
            if self._thread is None or not self._thread.is_alive():
                return

    def ask(self, job_ids: set[int], patience_s: float) -> Flush:
        """``flush`` without the wait."""
        ids = {job_id for job_id in job_ids if job_id in self._live}
        question = Flush(ids, self._clock() + patience_s)
        if not ids or not self._inbox.post(question):
            question.answered.set()
        return question

    def want(self, wants: Sequence[Wanted]) -> None:
        """What waiting requests will want, most urgent first; replaces what was said before. Never blocks."""
        self._inbox.post(Wants(wants))

    def take_moves(self, most: int) -> list[tuple[str, bool]]:
        """Blocks (their files) that came into memory, or left it, in order; the rest with the next call."""
        moves = self._core.tier.moves
        return [moves.popleft() for _ in range(min(most, len(moves)))]

    def snapshot(self) -> Counters:
        """Counters and gauges; what belongs together may be a pass apart."""
        core = self._core
        counters = core.counters.copy(self._clock())
        counters.slots = core.staging.by_use()
        counters.io_in_flight = counters.reads.in_flight + counters.writes.in_flight
        counters.queued = {kind.value: core.queued[kind] for kind in (Kind.LOAD, Kind.STORE)}
        counters.jobs_running = len(core.jobs)
        counters.lost_now = core.lost_now
        counters.open_files = core.open_files
        counters.direct = core.direct
        tier = core.tier
        counters.preloads = {
            "claimed": tier.claimed, "wasted": tier.wasted, "cancelled": counters.preloads_lost
        }  # fmt: skip
        return counters

    # ---- life

    def start(self) -> None:
        """Begin working."""
        self._thread = threading.Thread(target=self._main, name="py-kvcache-reactor", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Cancel what has not begun, finish device copies and begun stores up to the timeout, end the thread.

        Returns:
            False if kernel, helpers or device still have staging memory: it must not be freed then.
        """
        self.request_stop(timeout_s)
        if self._thread is None:
            if not self.stopped:
                self._finish("the worker never started")
            return self._loop.clean
        self._thread.join(timeout_s + DEVICE_GRACE_S + 5.0)
        return self._loop.clean and not self._thread.is_alive()

    def request_stop(self, timeout_s: float) -> None:
        """``stop`` without the wait."""
        self._inbox.post(Stop(self._clock() + timeout_s))

    @property
    def stopped(self) -> bool:
        """True once nothing will happen any more."""
        return self._loop.stopped

    def run_pass(self) -> float | None:
        """One pass. Returns for how long nothing can happen without a wake, in seconds; None: for ever."""
        timeout = self._loop.run_pass(self._clock())
        if self._loop.stopped:
            self._refuse_the_rest()
        return timeout

    def _main(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._wake_fd, select.POLLIN)
            while not self.stopped:
                self._sleep(poll, self.run_pass())
        except Exception as error:
            # A defect of ours. The engine must go on without a cache: every job ends, also later ones.
            log.exception("py-kvcache: the reactor failed; this process goes on without its cache")
            self._break_down(error)

    def _sleep(self, poll: select.poll, timeout: float | None) -> None:
        if timeout is not None and timeout < 1e-3:
            # poll() counts in milliseconds, a copy to a GPU takes less.
            if timeout > 0:
                time.sleep(timeout)
        else:
            poll.poll(None if timeout is None else min(timeout, 3600.0) * 1e3)
        # Before the queues are drained, so that what comes in between wakes the next wait.
        clear_event(self._wake_fd)

    def _break_down(self, error: Exception) -> None:
        """After a defect our own state is not trusted: slots stay where they are, every job is answered."""
        self._loop.clean = False
        ends = time.monotonic() + DEVICE_GRACE_S
        # Results must not come while the device still works on their memory.
        while self._loop.device_busy and time.monotonic() < ends:
            time.sleep(0.002)
        self._finish(f"the reactor failed: {error!r}")

    def _finish(self, why: str) -> None:
        try:
            self._loop.finish(why)
        except Exception:
            self._loop.clean = False
            log.exception("py-kvcache: the ring could not be shut down")
        self._refuse_the_rest()

    def _refuse_the_rest(self) -> None:
        for message in self._inbox.close():
            if isinstance(message, Job):
                self._refuse(message)
            elif isinstance(message, Flush):
                message.answered.set()

    def _refuse(self, job: Job) -> None:
        error = BlockError(Fault.CANCELLED, first_path(job), 0, "the worker has stopped")
        self._forget(job.job_id)
        self._refused.append(
            JobResult(job.job_id, job.kind, tuple((i, error) for i in range(len(job.blocks))), 0, 0.0)
        )

    def _forget(self, job_id: int) -> None:
        self._live.discard(job_id)
