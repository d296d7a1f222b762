"""File to device: open ahead, read into a slot, verify, copy in batches.

First job first, chain order within a job: n equal requests then finish one after the other, which halves
their mean time against serving them all at once.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from py_kvcache.errors import PROOF_OF_DAMAGE, BlockError, Fault, fault_of
from py_kvcache.layout import ALIGN
from py_kvcache.worker.budget import RateBudget
from py_kvcache.worker.checksum import verify_block
from py_kvcache.worker.core import MAX_RETRIES, RAN_SHORT
from py_kvcache.worker.jobs import Kind, Running, Transfer
from py_kvcache.worker.parts import SlotCopy, is_pending
from py_kvcache.worker.preload import Preloads
from py_kvcache.worker.sharing import Sharing
from py_kvcache.worker.staging import Use
from py_kvcache.worker.transfer import Event, LoadState, StoreState

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.parts import Copier, DeviceEvent
    from py_kvcache.worker.staging import Slot

log = logging.getLogger("vllm.py_kvcache.worker.loads")

# O_NONBLOCK: opening a FIFO in a block's place would otherwise hang. It is cleared after the open, since
# io_uring answers EAGAIN instead of waiting for such files. O_NOFOLLOW: a symbolic link could lead anywhere.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# How long an open that found no descriptor waits for others to be closed, doubled at each try: 0.6 s in all.
SHORT_WAIT_S = 0.0025
# Of a read rate: a whole prefix within a burst would come as if there were no limit, and the gate would
# learn a rate that the next one does not get.
_READ_BURST_S = 0.02

_STORING = (StoreState.COPYING, StoreState.HASHING, StoreState.CREATING, StoreState.WRITING)


class Loads:
    """The load direction. Reactor thread only."""

    def __init__(self, core: Core, device: Copier) -> None:
        self._core, self._device, self._settings = core, device, core.settings
        self._size = core.settings.file_bytes
        self._jobs: deque[Running] = deque()  # with blocks that have not begun
        self._opened: list[tuple[int, Transfer]] = []  # heap by serial; may hold blocks given up since
        self._short: list[tuple[float, Transfer]] = []  # when to open again; given-up ones included
        self._ready: list[Transfer] = []
        self._orphans: deque[Transfer] = deque()  # whose joined read came to nothing; given-up ones included
        self._sharing = Sharing(core, device, self._serve, self._orphans.append, self._hasten)
        self.preloads = Preloads(core, core.settings.preload_depth, self._sharing)
        self._copied_now: set[int] = set()  # slots: the device has room for one copy of each
        self._copies: list[tuple[DeviceEvent, list[Transfer], float]] = []
        self._budget = RateBudget(core.settings.read_bytes_per_s, _READ_BURST_S)

    # ---- what the reactor calls

    def add(self, run: Running) -> None:
        """Queue a job."""
        self._jobs.append(run)

    def schedule(self) -> None:
        """Begin all that may begin. The order is: what holds slots first, so that slots come back soonest."""
        self._sharing.follow()
        self._copy_ready()
        self._start_reads()
        self._start_opens()
        self._copy_ready()  # what was found in memory just now; nobody would wake the next pass for it
        self._start_preloads()

    @property
    def copying(self) -> bool:
        """Whether events must be polled."""
        return bool(self._copies)

    def in_flight(self) -> bool:
        """Whether the device still works on a copy of ours, as far as it can tell."""
        return any(is_pending(copy[0]) for copy in self._copies)

    def wait(self) -> float | None:
        """Seconds until rate limit or descriptors may allow what they hold back; None if nothing."""
        now = self._core.now
        waits = [self._budget.wait(now)] if self._opened else []
        waits.extend(when - now for when, _ in self._short)
        return min((wait for wait in waits if wait > 0), default=None)

    # ---- open

    def _start_opens(self) -> None:
        core, census, jobs = self._core, self._core.census, self._jobs
        self._open_the_short()
        if self._short:
            return  # to open more files would keep these waiting
        ahead = census[LoadState.OPENING] + census[LoadState.OPENED] + census[LoadState.OPENING_LOST]
        while self._orphans and ahead < self._settings.open_lookahead:
            t = self._orphans.popleft()
            if t.state is LoadState.QUEUED and not self._sharing.is_there(t):
                self._begin_open(t)
                ahead += 1
        while jobs and not self._sharing.full:
            run = jobs[0]
            if run.begun >= run.limit:
                jobs.popleft()
                continue
            full = ahead >= self._settings.open_lookahead
            if full and not self._sharing.serves(run.job.blocks[run.begun]):
                return
            t = core.begin(run)
            if not self._sharing.is_there(t):
                self._begin_open(t)
                ahead += 1

    def _start_preloads(self) -> None:
        """Behind all else: no block that a request waits for has yet to be opened or read."""
        preloads, census = self.preloads, self._core.census
        preloads.follow()
        if self._jobs or self._orphans or self._short:
            return
        jobs = self._core.jobs.values()
        if self._settings.preload_alone and any(run.job.kind is Kind.LOAD for run in jobs):
            return
        lookahead = self._settings.open_lookahead
        while census[LoadState.OPENING] + census[LoadState.OPENING_LOST] < lookahead:
            t = preloads.begin()
            if t is None:
                return
            self._sharing.remember(t)
            self._begin_open(t)

    def _hasten(self, t: Transfer) -> None:
        """Its serial is a smaller one now."""
        if t.state is LoadState.OPENED:
            heappush(self._opened, (t.serial, t))

    def _serve(self, t: Transfer, slot: Slot) -> None:
        """Its bytes are in a slot already, which it shares."""
        t.slot = slot
        self._core.move(t, Event.HIT)
        self._ready.append(t)

    def _open_the_short(self) -> None:
        now, waiting = self._core.now, self._short
        self._short = [(when, t) for when, t in waiting if t.state is LoadState.QUEUED and when > now]
        for when, t in waiting:
            if t.state is LoadState.QUEUED and when <= now:
                self._begin_open(t)

    def _ran_short(self, t: Transfer, code: int) -> None:
        core = self._core
        # While one waits no other file is opened: a preload must not do that to a load.
        if t.retries >= MAX_RETRIES or t.run.job.kind is Kind.PRELOAD:
            core.end_given_up(t, core.ran_short(t, "open", code))
            self._cut(t)
            return
        t.retries += 1
        core.counters.retries += 1
        core.move(t, Event.WAIT)
        self._short.append((core.now + SHORT_WAIT_S * 2 ** (t.retries - 1), t))

    def _begin_open(self, t: Transfer) -> None:
        self._core.move(t, Event.OPEN)
        self._open(t)

    def _open(self, t: Transfer) -> None:
        flags = _OPEN_FLAGS | os.O_DIRECT if t.direct else _OPEN_FLAGS
        token = self._core.expect(t)
        try:
            self._core.ring.openat(token, t.work.path, flags)
        except ValueError as error:  # a path that the kernel would take for another one
            self._core.answered(token)
            self._fail(t, "open", Fault.IO, errno.EINVAL, str(error))

    def opened(self, t: Transfer, result: int) -> None:
        """The ring's answer to an open."""
        core = self._core
        if result < 0:
            if -result in RAN_SHORT:
                self._ran_short(t, -result)
            elif core.again(t, -result):
                self._open(t)
            else:
                self._fail(t, "open", fault_of(-result), -result)
            return
        core.took_file(t, result)
        code = core.apply_flags(t)
        if code:
            self._fail(t, "open", Fault.IO, code, "no ordinary file")
            return
        core.move(t, Event.OPENED)
        heappush(self._opened, (t.serial, t))

    # ---- read

    def _start_reads(self) -> None:
        core, census, opened = self._core, self._core.census, self._opened
        while opened:
            t = opened[0][1]
            if t.state is not LoadState.OPENED:
                heappop(opened)
                continue
            reading = census[LoadState.READING]
            # The reserved slots' reads may always go: stores must not keep loads waiting, however full
            # the depth is of writes.
            busy = reading + sum(census[state] for state in _STORING)
            free = reading < core.staging.reserve_for_loads or busy < self._settings.io_depth
            if reading >= self._settings.io_depth or not free:
                return
            if not self._budget.allows(core.now):
                return
            slot = core.staging.take(Use.LOAD)
            if slot is None:
                return
            heappop(opened)
            t.slot = slot
            core.move(t, Event.READ)
            self._budget.spend(self._size, core.now)
            self._read(t, 0)

    def _read(self, t: Transfer, offset: int) -> None:
        core = self._core
        assert t.slot is not None
        t.offset = offset
        buffer = t.slot.buffer
        core.counters.reads.begin(core.now)
        core.ring.read(core.expect(t), t.fd, buffer[offset:] if offset else buffer, offset)

    def read(self, t: Transfer, result: int) -> None:
        """The ring's answer to a read."""
        core = self._core
        core.counters.reads.end(core.now, t.since, max(result, 0))
        core.journal.block(core.now, t, "read")
        if result < 0:
            if core.again(t, -result):
                self._read(t, t.offset)
            else:
                self._fail(t, "read", fault_of(-result), -result)
            return
        reached = t.offset + result
        if reached >= self._size:
            self._verify(t)
        elif reached <= t.reached:
            self._fail(t, "read", Fault.WRONG_SIZE, 0, f"{reached} bytes instead of {self._size}")
        else:
            # Short: the file may end here, or only this read did. Only a read that brings nothing new tells.
            t.reached = reached
            core.counters.retries += 1
            core.move(t, Event.AGAIN)
            self._read(t, reached - reached % ALIGN if t.direct else reached)

    # ---- verify and copy

    def _verify(self, t: Transfer) -> None:
        core = self._core
        if t.refused:
            core.proved_buffered(t)
        core.move(t, Event.FILLED)  # closes the file
        assert t.slot is not None
        if self._device.adds_up(t.work.pages):
            # Checked once, with the sums that come with the copy.
            core.move(t, Event.VERIFIED)
            self._ready.append(t)
            return
        core.checksum.verify(core.expect(t), t.slot.buffer, t.work.key, self._settings.payload_bytes)

    def verified(self, t: Transfer, fault: Fault | None, detail: str) -> None:
        """The checksum helper's answer."""
        core = self._core
        core.journal.block(core.now, t, "verify")
        if fault is not None:
            self._fail(t, "verify", fault, 0, detail)
            return
        assert t.slot is not None
        t.slot.proved = True
        core.move(t, Event.VERIFIED)
        self._ready.append(t)

    def _copy_ready(self) -> None:
        core, busy = self._core, self._copied_now
        batch, later = [], []
        for t in self._ready:
            if t.state is not LoadState.READY or t.slot is None:
                continue
            if t.run.job.kind is Kind.PRELOAD:
                self.preloads.filled(t)
            elif t.slot.index in busy:
                later.append(t)
            else:
                busy.add(t.slot.index)
                batch.append(t)
        self._ready = later
        if not batch:
            return
        slots = {t.slot.index for t in batch if t.slot is not None}
        copies = [SlotCopy(t.slot.buffer, t.work.pages, t.run.job.after) for t in batch if t.slot is not None]
        try:
            event = self._device.load(copies)
        except Exception as error:  # noqa: BLE001 - a driver raises what it likes; it costs these blocks only
            self._copied_now -= slots
            for t in batch:
                self._device_failed(t, error)
            return
        for t in batch:
            core.move(t, Event.COPY)
            t.run.copying += 1
            t.since = core.now
            core.counters.copies_in.begin(core.now)
        self._copies.append((event, batch, core.now))

    def poll(self) -> None:
        """Ask the device which copies ended."""
        if not self._copies:
            return
        left = []
        for copy in self._copies:
            event, batch, _ = copy
            try:
                if not event.done():
                    left.append(copy)
                    continue
                broken: Exception | None = None
            except Exception as error:  # noqa: BLE001 - see _copy_ready
                broken = error
            self._copied_now -= {t.slot.index for t in batch if t.slot is not None}
            for number, t in enumerate(batch):
                self._copied(t, broken, None if broken else event.sums(number))
        self._copies = left

    def _copied(self, t: Transfer, broken: Exception | None, sums: BlockSums | None) -> None:
        core, size = self._core, self._settings.payload_bytes
        t.run.copying -= 1
        core.counters.copies_in.end(core.now, t.since, 0 if broken else size)
        core.journal.block(core.now, t, "copy to device")
        if broken is not None:
            self._device_failed(t, broken)
            return
        if sums is None and self._device.adds_up(t.work.pages):
            # Nobody has looked at the payload then.
            self._device_failed(t, RuntimeError("the device gave no sums of the block"))
            return
        if sums is not None:
            assert t.slot is not None
            fault, detail = verify_block(t.slot.buffer, t.work.key, size, enabled=True, sums=sums)
            if fault is not None:
                # Nobody reads these pages: the job reports the block, and vLLM computes it.
                self._fail(t, "verify", fault, 0, detail)
                return
            t.slot.proved = True
        assert t.slot is not None
        core.tier.offer(t.work.path, t.slot)
        core.move(t, Event.COPIED)
        core.counters.loaded_blocks += 1
        core.counters.loaded_bytes += size
        core.succeed(t)

    # ---- failure

    def _device_failed(self, t: Transfer, error: Exception) -> None:
        if t.state in (LoadState.READY, LoadState.COPYING):
            self._fail(t, "copy", Fault.DEVICE, 0, repr(error))

    def _fail(self, t: Transfer, stage: str, fault: Fault, code: int, detail: str = "") -> None:
        core, path = self._core, t.work.path
        if fault in PROOF_OF_DAMAGE:
            core.tier.drop(path)
            core.publisher.quarantine(path, t.work.key, self._settings.payload_bytes)
        core.fail(t, stage, BlockError(fault, path, code, detail))
        self._cut(t)

    def _cut(self, t: Transfer) -> None:
        rest = BlockError(Fault.CANCELLED, t.work.path, 0, f"not loaded: block {t.ordinal} failed")
        self._core.cut(t.run, t.ordinal, rest)
