"""Device to file: copy into a slot, seal, create, write, publish. One block's copy never waits for another's.

The copy comes first, since vLLM may only reuse the device memory after it, and a store that is slow or
fails afterwards costs nobody anything.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault, fault_of
from py_kvcache.layout import ALIGN
from py_kvcache.worker.budget import RateBudget
from py_kvcache.worker.core import RAN_SHORT
from py_kvcache.worker.jobs import Running, Transfer
from py_kvcache.worker.parts import SlotCopy, is_pending
from py_kvcache.worker.staging import Use
from py_kvcache.worker.transfer import Event, LoadState, StoreState

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.parts import Copier, DeviceEvent
    from py_kvcache.worker.publish import PublishResult

log = logging.getLogger("vllm.py_kvcache.worker.stores")

# Of a write rate: what one request stores may go at once.
_STORE_BURST_S = 1.0
_IN_SLOT = (StoreState.COPYING, StoreState.HASHING, StoreState.CREATING, StoreState.WRITING)
_UNDER_WAY = (
    *_IN_SLOT, StoreState.PUBLISHING, StoreState.HASHING_LOST, StoreState.CREATING_LOST,
    StoreState.WRITING_LOST, StoreState.PUBLISHING_LOST,
)  # fmt: skip

# About the volume, not about one file: the rest of the job would be copied and refused as well.
_VOLUME_FAULTS = frozenset({Fault.NO_SPACE, Fault.PAUSED})


class Stores:
    """The store direction. Reactor thread only."""

    def __init__(self, core: Core, device: Copier) -> None:
        self._core, self._device, self._settings = core, device, core.settings
        self._size = core.settings.file_bytes
        self._jobs: deque[Running] = deque()
        self._copies: list[tuple[DeviceEvent, Transfer]] = []
        self._budget = RateBudget(core.settings.store_bytes_per_s, _STORE_BURST_S)

    # ---- what the reactor calls

    def add(self, run: Running) -> None:
        """Queue a job."""
        self._jobs.append(run)

    def hurry(self, runs: set[int]) -> None:
        """Take these jobs first: vLLM waits for them."""
        self._jobs = deque(sorted(self._jobs, key=lambda run: run.job.job_id not in runs))

    @property
    def copying(self) -> bool:
        """Whether events must be polled."""
        return bool(self._copies)

    def in_flight(self) -> bool:
        """Whether the device still works on a copy of ours, as far as it can tell."""
        return any(is_pending(copy[0]) for copy in self._copies)

    def wait(self) -> float | None:
        """Seconds until the rate limit allows what it holds back now; None if it holds back nothing."""
        return self._budget.wait(self._core.now) or None if self._jobs else None

    def schedule(self) -> None:
        """Launch copies while there are slots, depth and rate for them."""
        core, census, jobs = self._core, self._core.census, self._jobs
        while jobs:
            run = jobs[0]
            if run.begun >= run.limit:
                jobs.popleft()
                continue
            in_slot = sum(census[state] for state in _IN_SLOT)
            # A store counts from the launch of its copy, so that no slot waits for depth afterwards.
            if in_slot and in_slot + census[LoadState.READING] >= self._settings.io_depth:
                return
            # A write that was given up still has its worker of the ring; all of them would be taken so.
            if in_slot + census[StoreState.WRITING_LOST] >= self._settings.store_depth:
                return
            if sum(census[state] for state in _UNDER_WAY) >= self._settings.store_files:
                return
            if not self._budget.allows(core.now):
                return
            if core.publisher.refuses():
                core.skip_rest(run, BlockError(Fault.PAUSED, run.job.blocks[run.begun].path))
                continue
            slot = core.staging.take(Use.STORE)
            if slot is None:
                return
            t = core.begin(run)
            t.slot = slot
            self._budget.spend(self._size, core.now)
            self._copy(t)

    # ---- copy

    def _copy(self, t: Transfer) -> None:
        core, slot = self._core, t.slot
        assert slot is not None
        core.move(t, Event.COPY)
        t.since = core.now
        core.counters.copies_out.begin(core.now)
        t.run.copying += 1
        try:
            event = self._device.store([SlotCopy(slot.buffer, t.work.pages, t.run.job.after)])
        except Exception as error:  # noqa: BLE001 - a driver raises what it likes; it costs this block only
            self._copied(t, error)
            return
        self._copies.append((event, t))

    def poll(self) -> None:
        """Ask the device which copies ended."""
        if not self._copies:
            return
        left = []
        for copy in self._copies:
            event, t = copy
            try:
                if not event.done():
                    left.append(copy)
                    continue
                broken: Exception | None = None
            except Exception as error:  # noqa: BLE001 - see _copy
                broken = error
            self._copied(t, broken, None if broken else event.sums(0))
        self._copies = left

    def _copied(self, t: Transfer, broken: Exception | None, sums: BlockSums | None = None) -> None:
        core, slot = self._core, t.slot
        assert slot is not None
        t.run.copying -= 1
        core.counters.copies_out.end(core.now, t.since, 0 if broken else self._settings.payload_bytes)
        core.journal.block(core.now, t, "copy from device")
        if broken is not None:
            core.fail(t, "copy", BlockError(Fault.DEVICE, t.work.path, 0, repr(broken)))
        elif t.run.over is not None:
            core.end_given_up(t, t.run.over)
        else:
            core.move(t, Event.COPIED)
            work, size = t.work, self._settings.payload_bytes
            # With the device's sums nobody looks at the bytes that came over the link.
            slot.proved = sums is None
            core.checksum.seal(core.expect(t), slot.buffer, work.key, work.index, size, sums)

    # ---- file

    def sealed(self, t: Transfer, fault: Fault | None, detail: str) -> None:
        """The checksum helper's answer."""
        core = self._core
        core.journal.block(core.now, t, "seal")
        if fault is not None:
            core.fail(t, "seal", BlockError(fault, t.work.path, 0, detail))
            return
        core.move(t, Event.SEALED)
        t.direct = core.direct and core.publisher.direct
        core.publisher.create(core.expect(t), t.work.path, self._size)

    def created(self, t: Transfer, answer: PublishResult) -> None:
        """The publisher's answer to create."""
        core = self._core
        if answer.error is not None:
            self._fail(t, "create", answer.error)
        elif answer.exists:
            self._offer(t)
            core.move(t, Event.EXISTS)
            core.counters.existed += 1
            core.succeed(t)
        else:
            core.took_file(t, answer.fd, answer.temp)
            core.move(t, Event.CREATED)
            self._write(t, 0)

    def _write(self, t: Transfer, offset: int) -> None:
        core = self._core
        assert t.slot is not None
        t.offset = offset
        buffer = t.slot.buffer
        core.counters.writes.begin(core.now)
        core.ring.write(core.expect(t), t.fd, buffer[offset:] if offset else buffer, offset)

    def wrote(self, t: Transfer, result: int) -> None:
        """The ring's answer to a write."""
        core = self._core
        core.counters.writes.end(core.now, t.since, max(result, 0))
        core.journal.block(core.now, t, "write")
        if result < 0:
            if core.again(t, -result):
                self._write(t, t.offset)
            else:
                self._fail(t, "write", BlockError(fault_of(-result), t.work.path, -result))
            return
        reached = t.offset + result
        if reached >= self._size:
            self._publish(t)
        elif reached <= t.reached:
            self._fail(t, "write", BlockError(Fault.IO, t.work.path, errno.EIO, "the write made no progress"))
        else:
            t.reached = reached
            core.counters.retries += 1
            core.move(t, Event.AGAIN)
            self._write(t, reached - reached % ALIGN if t.direct else reached)

    def _publish(self, t: Transfer) -> None:
        core = self._core
        if t.refused:
            core.proved_buffered(t)
        fd, temp = core.gave_file(t)
        self._offer(t)
        core.move(t, Event.WRITTEN)  # the slot is free from here on, or the tier's
        core.publisher.commit(core.expect(t), fd, temp, t.work.path, t.work.index)

    def published(self, t: Transfer, answer: PublishResult) -> None:
        """The publisher's answer to commit."""
        core = self._core
        core.journal.block(core.now, t, "publish")
        if answer.error is not None:
            self._fail(t, "publish", answer.error)
            return
        core.move(t, Event.PUBLISHED)
        if answer.exists:
            core.counters.existed += 1
        else:
            core.counters.stored_blocks += 1
            core.counters.stored_bytes += self._settings.payload_bytes
        core.succeed(t)

    def _offer(self, t: Transfer) -> None:
        assert t.slot is not None
        self._core.tier.offer(t.work.path, t.slot)

    # ---- failure

    def _fail(self, t: Transfer, stage: str, error: BlockError) -> None:
        core = self._core
        if stage == "create" and error.code in RAN_SHORT:
            core.end_given_up(t, core.ran_short(t, stage, error.code))
        elif error.fault is Fault.PAUSED:
            core.end_given_up(t, error)  # the gate closed after the copy had begun
        else:
            core.fail(t, stage, error)
        if error.fault in _VOLUME_FAULTS:
            core.skip_rest(t.run, error)
