"""Our side of a measurement: real reactor, ring, checksums and publisher, and a device that does nothing.

So it is all that a block goes through between staging memory and file, and nothing of a GPU.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from py_kvcache.bench.workspace import block_key, part_of
from py_kvcache.config import CHECKSUM_THREADS
from py_kvcache.errors import KvCacheError
from py_kvcache.layout import FOOTER_BYTES, block_path, file_bytes
from py_kvcache.worker.checksum import Checksummer
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.hostmemory import host_memory
from py_kvcache.worker.inbox import Inbox
from py_kvcache.worker.parts import ReactorSettings, SlotCopy
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Publisher, PublishSettings
from py_kvcache.worker.reactor import BlockWork, Job, JobResult, Kind, Reactor
from py_kvcache.worker.ring import Ring, make_ring
from py_kvcache.worker.staging import StagingPool, plan_slots

COPY_HEADROOM = 4
LOOKAHEAD = 32
_POLL_S = 0.003  # seldom, as vLLM's steps are: each look costs the reactor the interpreter
_AHEAD_BYTES = 256 << 20
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Pass:
    """One measured pass. ``cpu_s``: user plus system time of this process, kernel workers included."""

    bytes: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """Core-seconds for 10**9 bytes."""
        return self.cpu_s / self.bytes * 1e9


class _Done:
    def done(self) -> bool:
        return True

    def sums(self, number: int) -> None:
        return None


class NullDevice:
    """Copies nothing; every event has happened."""

    poll_s = 0.0  # ask again at once

    def adds_up(self, pages: object) -> bool:
        """See parts.Copier."""
        return False

    def load(self, copies: Sequence[SlotCopy]) -> _Done:
        """See parts.Copier."""
        return _Done()

    def store(self, copies: Sequence[SlotCopy]) -> _Done:
        """See parts.Copier."""
        return _Done()


class TimedRing:
    """Another ring, and what each submit of something took its caller: seconds by the clock, and of CPU."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._queued = 0
        self.submits: list[tuple[float, float]] = []
        self.name = ring.name
        self.cancel, self.completions = ring.cancel, ring.completions
        self.fileno, self.in_flight, self.shutdown = ring.fileno, ring.in_flight, ring.shutdown

    def openat(self, token: int, path: str, flags: int, mode: int = 0) -> None:
        """See Ring."""
        self._queued += 1
        self._ring.openat(token, path, flags, mode)

    def read(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring."""
        self._queued += 1
        self._ring.read(token, fd, buffer, offset)

    def write(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """See Ring."""
        self._queued += 1
        self._ring.write(token, fd, buffer, offset)

    def close(self, token: int, fd: int) -> None:
        """See Ring."""
        self._queued += 1
        self._ring.close(token, fd)

    def fsync(self, token: int, fd: int) -> None:
        """See Ring."""
        self._queued += 1
        self._ring.fsync(token, fd)

    def submit(self) -> None:
        """See Ring."""
        if not self._queued:
            return self._ring.submit()
        self._queued = 0
        begin, cpu = time.perf_counter(), time.thread_time()
        self._ring.submit()
        self.submits.append((time.perf_counter() - begin, time.thread_time() - cpu))
        return None


@dataclass(frozen=True)
class Block:
    """A block and the file it is, or is to become."""

    key: bytes
    path: str


class Engine:
    """Reactor and parts for files of one size. Close it, or threads and staging memory stay.

    Args:
        folder: an existing one that takes the part folder.
        size: of one file in bytes, payload and footer; a multiple of 4,096.
    """

    def __init__(
        self,
        folder: str,
        size: int,
        *,
        direct: bool,
        depth: int = 16,
        ring: str = "auto",
        checksum: bool = False,
    ) -> None:
        self.folder, self.size, self.direct, self.depth = folder, size, direct, depth
        self.payload = size - FOOTER_BYTES
        assert file_bytes(self.payload) == size
        # As the worker's defaults have it: twice as many are handed in as the kernel works on at once.
        plan = plan_slots(size, io_depth=2 * depth, copy_headroom=COPY_HEADROOM)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waker: Inbox[None] = Inbox(self._wake)  # only its wake(), safe against a closed eventfd
        entries = 2 * (2 * depth + LOOKAHEAD) + 64
        made, self.ring_note = make_ring(ring, entries, depth, self._wake, folder)
        self.ring = TimedRing(made)
        self._publisher = Publisher(
            FileOps(),
            # The benchmark itself made sure of the space.
            PublishSettings(FileSettings(folder), direct=direct, store_stop_at=1.0, store_resume_at=1.0),
            self._waker.wake,
        )
        self._checksum = Checksummer(CHECKSUM_THREADS, self._waker.wake, enabled=checksum)
        self._reactor = Reactor(
            ring=self.ring,
            staging=StagingPool(_memory(plan.nbytes), size, reserve_for_loads=plan.reserve_for_loads),
            device=NullDevice(),
            checksum=self._checksum,
            publisher=self._publisher,
            settings=ReactorSettings(
                payload_bytes=self.payload,
                file_bytes=size,
                io_depth=plan.io_depth,
                store_depth=max(1, depth - COPY_HEADROOM),
                open_lookahead=LOOKAHEAD,
                max_queued_stores=1_000_000,
                direct=direct,
            ),
        )
        self._reactor.start()
        self._job_ids = 0
        self._sizes: dict[int, int] = {}  # of the jobs under way, in blocks

    def close(self) -> None:
        """End all threads and free the staging memory."""
        self._reactor.stop(10.0)
        self._checksum.shutdown()
        self._publisher.shutdown(10.0)
        self._waker.close()
        os.close(self._wake)

    def new_block(self, number: int) -> Block:
        """A block whose file lies where the layout wants it."""
        key = block_key(number)
        return Block(key, block_path(part_of(self.folder), key))

    def store(self, blocks: Sequence[Block]) -> Pass:
        """Write and publish each block once."""
        return self._run(Kind.STORE, iter(blocks), lambda: False)

    def load(self, blocks: Sequence[Block], seconds: float) -> Pass:
        """Read the blocks over and over for that long, and what was begun to its end."""
        end = time.monotonic() + seconds

        def cycle() -> Iterator[Block]:
            while True:
                yield from blocks

        return self._run(Kind.LOAD, cycle(), lambda: time.monotonic() >= end)

    def _run(self, kind: Kind, blocks: Iterator[Block], is_over: Callable[[], bool]) -> Pass:
        per_job = max(self.depth // 2, min(64, (32 << 20) // self.size))
        # Handed in ahead, so that the pipeline never drains between two looks.
        enough = max(2 * self.depth, 3 * per_job, _AHEAD_BYTES // self.size)
        waiting = moved = 0
        more = True
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while more or waiting:
            while more and waiting < enough:
                batch = [block for _, block in zip(range(per_job), blocks, strict=False)]
                more = len(batch) == per_job and not is_over()
                if batch:
                    waiting += len(batch)
                    self._submit(kind, batch)
            for result in self._reactor.take_finished():
                count = self._count(result)
                waiting -= count
                moved += count
            if waiting >= enough or (waiting and not more):
                time.sleep(_POLL_S)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Pass(moved * self.size, seconds, cpu)

    def _submit(self, kind: Kind, batch: Sequence[Block]) -> None:
        self._job_ids += 1
        works = tuple(BlockWork(block.path, block.key, n, None) for n, block in enumerate(batch))
        self._sizes[self._job_ids] = len(works)
        self._reactor.submit(Job(self._job_ids, kind, works, None, time.monotonic() + _DEADLINE_S))

    def _count(self, result: JobResult) -> int:
        if result.failed:
            raise KvCacheError(f"the benchmark's own {result.kind.value} failed: {result.failed[0][1]}")
        return self._sizes.pop(result.job_id)


def _memory(nbytes: int) -> memoryview:
    """As the CPU device has it, every page touched: the first pass would pay for it otherwise."""
    memory = host_memory(nbytes)
    for start in range(0, nbytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory
