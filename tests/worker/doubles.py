"""Doubles of device, checksummer and publisher over one World, and a rig with a reactor around them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from worker_world import FILE, HOLD, LOSE, PAYLOAD, Ask, Clock, FaultyRing, World, file_of, key_of, payload_of

from py_kvcache.digest import BlockSums, sums_of
from py_kvcache.errors import BlockError, Fault, fault_of
from py_kvcache.layout import padded
from py_kvcache.worker.checksum import ChecksumResult, seal_block, verify_block
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.parts import ReactorSettings, Timeline
from py_kvcache.worker.publish import Op, PublishResult
from py_kvcache.worker.reactor import Reactor
from py_kvcache.worker.staging import StagingPool

__all__ = ["FILE", "HOLD", "LOSE", "PAYLOAD", "Rig", "file_of", "key_of", "payload_of"]


class FakeEvent:
    def __init__(self) -> None:
        self.finished, self.error = False, ""
        self.added_up: list[BlockSums | None] = []

    def done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.finished


class FakeDevice:
    """Device memory is a dictionary: pages (any name) to payload.

    ``adds``: it gives the sums of what it copied. ``on_the_way`` damages what passes between slot and memory.
    """

    poll_s = None

    def __init__(self, world: World, *, adds: bool = False) -> None:
        self.world, self.adds = world, adds
        self.on_the_way: Callable[[bytes], bytes] = bytes
        self.forgets_sums = False
        self.parts: set[object] = set()  # jobs whose pages are parts of blocks: they are not added up
        self.memory: dict[object, bytes] = {}
        self.loads: list[list[object]] = []  # pages of each launch
        self.refuse: dict[str, Exception] = {}
        self.reported: set[int] = set()

    def adds_up(self, pages) -> bool:
        return self.adds and pages[0] not in self.parts

    def load(self, copies):
        self.loads.append([copy.pages for copy in copies])
        return self._launch("copy_in", copies)

    def store(self, copies):
        return self._launch("copy_out", copies)

    def _launch(self, op: str, copies) -> FakeEvent:
        if op in self.refuse:
            raise self.refuse[op]
        self._check(op, copies)
        event = FakeEvent()
        ask = Ask(op, path=" ".join(str(copy.pages) for copy in copies), extra=tuple(copies))
        ask.finish = lambda fate: self._end(ask, event, fate)
        self.world.ask(ask)
        return _Settling(self.world, op, event)

    def _end(self, ask: Ask, event: FakeEvent, fate: object) -> None:
        self._check(ask.op, ask.extra)
        if fate is not None:
            event.error = f"copy failed with {fate}"
            return
        for copy in ask.extra:
            if ask.op == "copy_in":
                self.memory[copy.pages] = self.on_the_way(bytes(copy.buffer[:PAYLOAD]))
                there = self.memory[copy.pages]
            else:
                there = self.memory.get(copy.pages, payload_of(copy.pages))
                copy.buffer[:PAYLOAD] = self.on_the_way(there)
            if self.adds and not self.forgets_sums:
                whole = self.adds_up(copy.pages)
                event.added_up.append(sums_of(there.ljust(padded(PAYLOAD), b"\0")) if whole else None)
        event.finished = True

    def _check(self, op: str, copies) -> None:
        for copy in copies:
            if copy.pages[0] in self.reported:
                self.world.wrong.append(f"{op} of {copy.pages} after its job was reported")


class _Settling:
    """An event that lets the rules decide when it is asked."""

    def __init__(self, world: World, op: str, event: FakeEvent) -> None:
        self._world, self._op, self._event = world, op, event

    def done(self) -> bool:
        self._world.settle(self._op)
        return self._event.done()

    def sums(self, number: int) -> BlockSums | None:
        return self._event.added_up[number] if self._event.added_up else None


class FakeSealer:
    """The real sums, done when the rules let them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._results: list[ChecksumResult] = []

    def seal(self, token, buffer, key, index, payload_bytes, sums=None) -> None:
        ask = Ask("seal", token, buffer=buffer)

        def finish(fate: object) -> None:
            seal_block(buffer, key, index, payload_bytes, enabled=True, sums=sums)
            self._results.append(ChecksumResult(token, fate if isinstance(fate, Fault) else None, "by rule"))

        ask.finish = finish
        self.world.ask(ask)

    def verify(self, token, buffer, key, payload_bytes) -> None:
        ask = Ask("verify", token, buffer=buffer)

        def finish(fate: object) -> None:
            fault, detail = verify_block(buffer, key, payload_bytes, enabled=True)
            self._results.append(ChecksumResult(token, fate if isinstance(fate, Fault) else fault, detail))

        ask.finish = finish
        self.world.ask(ask)

    def results(self) -> list[ChecksumResult]:
        self.world.settle("seal", "verify")
        results, self._results = self._results, []
        return results


class FakePublisher:
    """Create, commit and abandon on the world's files."""

    def __init__(self, world: World, *, direct: bool) -> None:
        self.world, self.direct = world, direct
        self._results: list[PublishResult] = []
        self.quarantined: list[str] = []
        self.published: list[str] = []
        self.abandoned: list[BlockError | None] = []
        self.refusing = False
        self._serial = 0

    def create(self, token: int, final: str, nbytes: int) -> None:
        def finish(fate: object) -> None:
            if isinstance(fate, Fault):
                self._results.append(PublishResult(token, Op.CREATE, error=BlockError(fate, final)))
            elif isinstance(fate, int):
                error = BlockError(fault_of(-fate), final, -fate)
                self._results.append(PublishResult(token, Op.CREATE, error=error))
            elif final in self.world.files:
                self._results.append(PublishResult(token, Op.CREATE, exists=True))
            else:
                self._serial += 1
                temp = f"{final}.{self._serial}.tmp"
                self.world.files[temp] = bytearray()
                fd = self.world.open_fd(temp, self.direct)
                self._results.append(PublishResult(token, Op.CREATE, fd, temp))

        self.world.ask(Ask("create", token, final, finish=finish))

    def commit(self, token: int, fd: int, temp: str, final: str, index: int) -> None:
        def finish(fate: object) -> None:
            self.world.close_fd(fd, "commit")
            content = self.world.files.pop(temp)
            error = BlockError(Fault.IO, final, -fate) if isinstance(fate, int) else None
            exists = final in self.world.files
            if error is None and not exists:
                self.world.files[final] = content
                self.published.append(final)
            self._results.append(PublishResult(token, Op.COMMIT, error=error, exists=exists))

        self.world.ask(Ask("commit", token, final, finish=finish))

    def abandon(self, token: int, fd: int, temp: str, error: BlockError | None = None) -> None:
        self.abandoned.append(error)

        def finish(fate: object) -> None:
            self.world.close_fd(fd, "abandon")
            del self.world.files[temp]
            self._results.append(PublishResult(token, Op.ABANDON))

        self.world.ask(Ask("abandon", token, temp, finish=finish))

    def quarantine(self, path: str, key: bytes, payload_bytes: int) -> None:
        self.quarantined.append(path)

    def refuses(self) -> bool:
        return self.refusing

    def results(self) -> list[PublishResult]:
        self.world.settle("create", "commit", "abandon")
        results, self._results = self._results, []
        return results


class Rig:
    """A reactor over the doubles, run pass by pass in virtual time."""

    def __init__(
        self, *, slots: int = 6, reserve: int = 2, io_depth: int = 4, lookahead: int = 4, direct: bool = True,
        trace: Timeline | None = None, adds: bool = False, **more,
    ) -> None:  # fmt: skip
        self.clock, self.world = Clock(), World()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.memory = bytearray(slots * FILE)
        self.world.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.ring = FaultyRing(self.world, self.wake_fd)
        self.staging = StagingPool(memoryview(self.memory), FILE, reserve_for_loads=reserve)
        self.device, self.sealer = FakeDevice(self.world, adds=adds), FakeSealer(self.world)
        self.publisher = FakePublisher(self.world, direct=direct)
        self.settings = ReactorSettings(
            PAYLOAD, FILE, io_depth=io_depth, open_lookahead=lookahead, direct=direct, **more
        )
        self.reactor = Reactor(
            ring=self.ring, staging=self.staging, device=self.device, checksum=self.sealer,
            publisher=self.publisher, settings=self.settings, clock=self.clock,
            set_flags=self.world.set_flags, trace=trace,
        )  # fmt: skip
        self.results: dict[int, JobResult] = {}
        self.timeout: float | None = None
        self.submitted: dict[int, Job] = {}
        self.origin: dict[int, int] = {}  # whose files a job loads, if not its own

    def close(self) -> None:
        os.close(self.wake_fd)

    # ---- jobs

    def path(self, job_id: int, n: int) -> str:
        return f"/cache/{job_id}/{n}"

    def job(self, job_id: int, kind: Kind, count: int, seconds: float = 30.0) -> Job:
        blocks = tuple(
            BlockWork(self.path(job_id, n), key_of((job_id, n)), n, (job_id, n)) for n in range(count)
        )
        return self.hand_in(Job(job_id, kind, blocks, None, self.clock.now + seconds))

    def hand_in(self, job: Job) -> Job:
        self.submitted[job.job_id] = job
        self.reactor.submit(job)
        return job

    def load(self, job_id: int, count: int, seconds: float = 30.0) -> Job:
        """A load whose files exist."""
        for n in range(count):
            self.world.files.setdefault(self.path(job_id, n), file_of((job_id, n), n))
        return self.job(job_id, Kind.LOAD, count, seconds)

    def again(self, job_id: int, of: int, count: int, seconds: float = 30.0) -> Job:
        """A load of another job's files, to other pages."""
        self.origin[job_id] = of
        blocks = tuple(BlockWork(self.path(of, n), key_of((of, n)), n, (job_id, n)) for n in range(count))
        return self.hand_in(Job(job_id, Kind.LOAD, blocks, None, self.clock.now + seconds))

    def store(self, job_id: int, count: int, seconds: float = 60.0) -> Job:
        return self.job(job_id, Kind.STORE, count, seconds)

    # ---- time

    def step(self, seconds: float = 0.0) -> None:
        """Advance the clock, then one pass."""
        self.clock.now += seconds
        self.timeout = self.reactor.run_pass()
        for result in self.reactor.take_finished():
            if result.job_id in self.results:
                self.world.wrong.append(f"job {result.job_id} finished twice")
            if any(copy.pages[0] == result.job_id for ask in self.world.pending for copy in ask.extra):
                self.world.wrong.append(f"job {result.job_id} was reported while its copy runs")
            self.results[result.job_id] = result
            self.device.reported.add(result.job_id)
        self.check_holdings()

    def run(self, passes: int = 60) -> None:
        """Passes without time going by."""
        for _ in range(passes):
            self.step()

    def live(self, until: Callable[[], bool], limit: int = 10_000) -> None:
        """Passes until the condition holds; time goes by only when nothing else can happen."""
        for _ in range(limit):
            if until():
                return
            self.step()
            if self.timeout and not self.world.pending:
                self.clock.now += self.timeout
        raise AssertionError("the condition never came true")

    # ---- verdicts

    def check_holdings(self) -> None:
        """What must hold after every pass."""
        if self.staging.free + self.staging.used + self.staging.kept != self.staging.total:
            self.world.wrong.append("slots do not add up")
        owned = {id(ask) for ask in self.world.owners.values()}
        if len(self.world.owners) > self.staging.used:
            self.world.wrong.append(f"{len(owned)} slots are in use, only {self.staging.used} are taken")

    def assert_well(self) -> None:
        assert not self.world.wrong, self.world.wrong
        assert self.reactor.snapshot().leaks == 0

    def assert_idle(self) -> None:
        """Everything came back."""
        self.assert_well()
        assert self.results.keys() == self.submitted.keys()
        wrong = self.staging.check_idle()
        assert wrong is None, wrong
        assert not self.world.fds, self.world.fds
        assert not self.world.pending, self.world.pending
        assert [path for path in self.world.files if path.endswith(".tmp")] == []
        snapshot = self.reactor.snapshot()
        assert (snapshot.open_files, snapshot.lost_now, snapshot.jobs_running) == (0, 0, 0)
        assert snapshot.queued == {"load": 0, "store": 0}
        assert (snapshot.reads.in_flight, snapshot.writes.in_flight) == (0, 0)

    def faults(self, job_id: int) -> dict[int, Fault]:
        return {ordinal: error.fault for ordinal, error in self.results[job_id].failed}

    def loaded(self, job_id: int, n: int) -> bool:
        """The device has this block's true bytes."""
        return self.device.memory.get((job_id, n)) == payload_of((self.origin.get(job_id, job_id), n))

    def stored(self, job_id: int, n: int) -> bool:
        """A file with this block's true bytes has the final name."""
        return self.world.files.get(self.path(job_id, n)) == file_of((job_id, n), n)
