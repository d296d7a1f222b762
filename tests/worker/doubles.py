"""A faulty operating system, device, checksummer and publisher for the reactor, and a rig around them.

Nothing here waits or runs by itself: what is asked for lies in ``pending`` until it is completed, by rule, by
hand, or at once where no rule says otherwise. Every double notes what the reactor must never do in ``wrong``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from py_kvcache.errors import BlockError, Fault, fault_of
from py_kvcache.layout import file_bytes
from py_kvcache.worker.checksum import ChecksumResult, seal_block, verify_block
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.parts import ReactorSettings
from py_kvcache.worker.publish import Op, PublishResult
from py_kvcache.worker.reactor import Reactor
from py_kvcache.worker.ring import Completion
from py_kvcache.worker.staging import StagingPool

PAYLOAD = 5000
FILE = file_bytes(PAYLOAD)


def key_of(name: object) -> bytes:
    return repr(name).encode().rjust(12, b"0")[-12:].rjust(32, b"k") + bytes(4)


def payload_of(name: object) -> bytes:
    seed = repr(name).encode()
    return (seed * (PAYLOAD // len(seed) + 1))[:PAYLOAD]


def file_of(name: object, index: int = 0) -> bytearray:
    content = bytearray(FILE)
    content[:PAYLOAD] = payload_of(name)
    seal_block(memoryview(content), key_of(name), index, PAYLOAD, enabled=True)
    return content


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hold:
    """A rule's answer: leave it pending."""


HOLD = Hold()
LOSE = Hold()  # never completes, also not when everything held is released


@dataclass(eq=False)
class Ask:
    """Something the reactor asked for. ``op`` is openat, read, write, close, copy_in, copy_out, seal, ..."""

    op: str
    token: int = -1
    path: str = ""
    fd: int = -1
    buffer: memoryview | None = None
    offset: int = 0
    flags: int = 0
    cancelled: bool = False
    lost: bool = False
    extra: tuple = ()
    finish: Callable[[object], None] = field(default=lambda fate: None)


class World:
    """Files, descriptors, who owns which bytes of staging, and what is pending."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.fds: dict[int, str] = {}
        self.direct_fds: set[int] = set()
        self.next_fd = 1000
        self.pending: list[Ask] = []
        self.rules: list[list] = []
        self.log: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self.owners: dict[int, Ask] = {}
        self.base = 0
        self.slot_bytes = FILE
        self.peak: Counter[str] = Counter()
        self.refuse_direct: str = ""  # "open", "read", "write"

    # ---- rules

    def rule(self, op: str, fate: object, *, path: str = "", times: int = -1) -> None:
        """Decide how asks end: an errno (negative), a byte count, a callable(ask), HOLD or LOSE."""
        self.rules.append([op, path, fate, times])

    def fate_of(self, ask: Ask) -> object:
        for rule in self.rules:
            op, path, fate, times = rule
            if op == ask.op and path in ask.path and times:
                rule[3] -= 1
                return fate(ask) if callable(fate) else fate
        return None

    def ask(self, ask: Ask) -> None:
        self.log.append((ask.op, ask.path))
        self._own(ask)
        self.pending.append(ask)
        self.peak[ask.op] = max(self.peak[ask.op], sum(1 for a in self.pending if a.op == ask.op))
        self.peak["fds"] = max(self.peak["fds"], len(self.fds))

    def settle(self, *ops: str) -> None:
        """Complete what is pending according to the rules."""
        for ask in list(self.pending):
            if ask in self.pending and (not ops or ask.op in ops) and not ask.lost:
                fate = self.fate_of(ask)
                if ask.cancelled and not isinstance(fate, Hold):  # what is held cannot be cancelled
                    fate = -errno.ECANCELED
                if fate is LOSE:
                    ask.lost = True
                if not isinstance(fate, Hold):
                    self.complete(ask, fate)

    def complete(self, ask: Ask, fate: object = None) -> None:
        self.pending.remove(ask)
        self._disown(ask)
        ask.finish(fate)

    def release(self) -> None:
        """Forget the rules; what is held goes on, but what was lost stays lost."""
        self.rules.clear()

    def held(self, op: str) -> list[Ask]:
        return [ask for ask in self.pending if ask.op == op]

    # ---- ownership of staging bytes

    def slot_at(self, buffer: memoryview) -> int:
        return (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) - self.base) // self.slot_bytes

    def _own(self, ask: Ask) -> None:
        for buffer in [ask.buffer, *(copy.buffer for copy in ask.extra)]:
            if buffer is None:
                continue
            slot = self.slot_at(buffer)
            if slot in self.owners:
                self.wrong.append(f"slot {slot} given to {ask.op} while {self.owners[slot].op} has it")
            self.owners[slot] = ask

    def _disown(self, ask: Ask) -> None:
        for slot, owner in list(self.owners.items()):
            if owner is ask:
                del self.owners[slot]

    # ---- descriptors

    def open_fd(self, path: str, direct: bool) -> int:
        fd = self.next_fd
        self.next_fd += 1
        self.fds[fd] = path
        if direct:
            self.direct_fds.add(fd)
        return fd

    def close_fd(self, fd: int, who: str) -> None:
        if self.fds.pop(fd, None) is None:
            self.wrong.append(f"{who} closed descriptor {fd}, which is not open")
        self.direct_fds.discard(fd)
        if any(ask.fd == fd for ask in self.pending):
            self.wrong.append(f"{who} closed descriptor {fd} while it is in use")

    def set_flags(self, fd: int, flags: int) -> None:
        if fd not in self.fds:
            self.wrong.append(f"F_SETFL on {fd}, which is not open")
        if not flags & os.O_DIRECT:
            self.direct_fds.discard(fd)


class FaultyRing:
    """The ring's interface over the world."""

    name = "faulty"

    def __init__(self, world: World, wake_fd: int) -> None:
        self.world, self._wake_fd = world, wake_fd
        self.done: deque[Completion] = deque()
        self.queued: list[Ask] = []
        self.closed = False

    def openat(self, token: int, path: str, flags: int, mode: int = 0) -> None:
        if "\0" in path:
            raise ValueError(f"not a path: {path!r}")
        self._queue(Ask("openat", token, path, flags=flags, finish=lambda fate: self._open(token, path, flags, fate)))

    def read(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        path = self.world.fds.get(fd, "")
        ask = Ask("read", token, path, fd, buffer, offset)
        ask.finish = lambda fate: self._transfer(ask, fate)
        self._queue(ask)

    def write(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        path = self.world.fds.get(fd, "")
        ask = Ask("write", token, path, fd, buffer, offset)
        ask.finish = lambda fate: self._transfer(ask, fate)
        self._queue(ask)

    def close(self, token: int, fd: int) -> None:
        self._queue(Ask("close", token, self.world.fds.get(fd, ""), finish=lambda fate: self._close(token, fd)))

    def fsync(self, token: int, fd: int) -> None:
        raise AssertionError("the publisher syncs")

    def cancel(self, token: int) -> None:
        for ask in self.world.pending:
            if ask.token == token and ask.op in ("openat", "read", "write"):
                ask.cancelled = True

    def submit(self) -> None:
        queued, self.queued = self.queued, []
        for ask in queued:
            self.world.ask(ask)

    def completions(self) -> list[Completion]:
        self.world.settle("openat", "read", "write", "close")
        done = list(self.done)
        self.done.clear()
        return done

    def fileno(self) -> int:
        return self._wake_fd

    def in_flight(self) -> int:
        return len(self.queued) + len([a for a in self.world.pending if a.op in ("openat", "read", "write", "close")])

    def shutdown(self) -> None:
        self.submit()
        self.closed = True

    def _queue(self, ask: Ask) -> None:
        if self.closed:
            self.world.wrong.append(f"{ask.op} after the ring was shut down")
        if ask.op in ("read", "write") and ask.fd not in self.world.fds:
            self.world.wrong.append(f"{ask.op} on {ask.fd}, which is not open")
        self.queued.append(ask)

    def _open(self, token: int, path: str, flags: int, fate: object) -> None:
        world, direct = self.world, bool(flags & os.O_DIRECT)
        if isinstance(fate, int) and fate < 0:
            self.done.append(Completion(token, fate))
        elif direct and world.refuse_direct == "open":
            self.done.append(Completion(token, -errno.EINVAL))
        elif path not in world.files:
            self.done.append(Completion(token, -errno.ENOENT))
        else:
            self.done.append(Completion(token, world.open_fd(path, direct)))

    def _transfer(self, ask: Ask, fate: object) -> None:
        world, buffer, offset = self.world, ask.buffer, ask.offset
        assert buffer is not None
        direct = ask.fd in world.direct_fds
        if isinstance(fate, int) and fate < 0:
            result = fate
        elif direct and (world.refuse_direct == ask.op or offset % 4096):
            result = -errno.EINVAL
        elif ask.op == "read":
            content = world.files.get(ask.path, bytearray())[offset : offset + len(buffer)]
            content = content[: fate if isinstance(fate, int) else None]
            buffer[: len(content)] = content
            result = len(content)
        else:
            result = len(buffer) if fate is None else min(len(buffer), int(fate))  # type: ignore[call-overload]
            target = world.files[ask.path]
            target[offset : offset + result] = buffer[:result]
        self.done.append(Completion(ask.token, result))

    def _close(self, token: int, fd: int) -> None:
        self.world.close_fd(fd, "ring")
        self.done.append(Completion(token, 0))


class FakeEvent:
    def __init__(self) -> None:
        self.finished, self.error = False, ""

    def done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.finished


class FakeDevice:
    """Device memory is a dictionary: pages (any name) to payload."""

    poll_s = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory: dict[object, bytes] = {}
        self.loads: list[list[object]] = []  # pages of each launch
        self.refuse: dict[str, Exception] = {}
        self.reported: set[int] = set()

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
                self.memory[copy.pages] = bytes(copy.buffer[:PAYLOAD])
            else:
                copy.buffer[:PAYLOAD] = self.memory.get(copy.pages, payload_of(copy.pages))
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


class FakeSealer:
    """The real sums, done when the rules let them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._results: list[ChecksumResult] = []

    def seal(self, token: int, buffer: memoryview, key: bytes, index: int, payload_bytes: int) -> None:
        ask = Ask("seal", token, buffer=buffer)

        def finish(fate: object) -> None:
            seal_block(buffer, key, index, payload_bytes, enabled=True)
            self._results.append(ChecksumResult(token, fate if isinstance(fate, Fault) else None, "by rule"))

        ask.finish = finish
        self.world.ask(ask)

    def verify(self, token: int, buffer: memoryview, key: bytes, payload_bytes: int) -> None:
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
            if isinstance(fate, int) or isinstance(fate, Fault):
                error = (
                    BlockError(fate, final) if isinstance(fate, Fault) else BlockError(fault_of(-fate), final, -fate)
                )
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
        self, *, slots: int = 6, reserve: int = 2, io_depth: int = 4, lookahead: int = 4, direct: bool = True, **more
    ) -> None:
        self.clock, self.world = Clock(), World()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.memory = bytearray(slots * FILE)
        self.world.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.ring = FaultyRing(self.world, self.wake_fd)
        self.staging = StagingPool(memoryview(self.memory), FILE, reserve_for_loads=reserve)
        self.device, self.sealer = FakeDevice(self.world), FakeSealer(self.world)
        self.publisher = FakePublisher(self.world, direct=direct)
        self.settings = ReactorSettings(
            PAYLOAD, FILE, io_depth=io_depth, open_lookahead=lookahead, direct=direct, **more
        )
        self.reactor = Reactor(
            ring=self.ring, staging=self.staging, device=self.device, checksum=self.sealer,
            publisher=self.publisher, settings=self.settings, clock=self.clock, set_flags=self.world.set_flags,
        )  # fmt: skip
        self.results: dict[int, JobResult] = {}
        self.timeout: float | None = None
        self.submitted: dict[int, Job] = {}

    def close(self) -> None:
        os.close(self.wake_fd)

    # ---- jobs

    def path(self, job_id: int, n: int) -> str:
        return f"/cache/{job_id}/{n}"

    def job(self, job_id: int, kind: Kind, count: int, seconds: float = 30.0) -> Job:
        blocks = tuple(
            BlockWork(self.path(job_id, n), key_of((job_id, n)), n, (job_id, n)) for n in range(count)
        )
        job = Job(job_id, kind, blocks, None, self.clock.now + seconds)
        self.submitted[job_id] = job
        self.reactor.submit(job)
        return job

    def load(self, job_id: int, count: int, seconds: float = 30.0) -> Job:
        """A load whose files exist."""
        for n in range(count):
            self.world.files.setdefault(self.path(job_id, n), file_of((job_id, n), n))
        return self.job(job_id, Kind.LOAD, count, seconds)

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
            busy = bool(self.world.pending or self.ring.queued or self.ring.done)
            self.step()
            if self.timeout and not busy:
                self.clock.now += self.timeout
        raise AssertionError("the condition never came true")

    # ---- verdicts

    def check_holdings(self) -> None:
        """What must hold after every pass."""
        if self.staging.free + self.staging.used != self.staging.total:
            self.world.wrong.append("slots do not add up")
        owned = {id(ask) for ask in self.world.owners.values()}
        if len(self.world.owners) > self.staging.used:
            self.world.wrong.append(f"{len(owned)} slots are in use, only {self.staging.used} are taken")

    def assert_well(self) -> None:
        assert self.world.wrong == []
        assert self.reactor.snapshot().leaks == 0

    def assert_idle(self) -> None:
        """Everything came back."""
        self.assert_well()
        assert self.results.keys() == self.submitted.keys()
        assert self.staging.check_idle() is None
        assert self.world.fds == {}
        assert self.world.pending == []
        assert [path for path in self.world.files if path.endswith(".tmp")] == []
        snapshot = self.reactor.snapshot()
        assert (snapshot.open_files, snapshot.lost_now, snapshot.jobs_running) == (0, 0, 0)
        assert snapshot.queued == {"load": 0, "store": 0}
        assert (snapshot.reads.in_flight, snapshot.writes.in_flight) == (0, 0)

    def faults(self, job_id: int) -> dict[int, Fault]:
        return {ordinal: error.fault for ordinal, error in self.results[job_id].failed}

    def loaded(self, job_id: int, n: int) -> bool:
        """The device has this block's true bytes."""
        return self.device.memory.get((job_id, n)) == payload_of((job_id, n))

    def stored(self, job_id: int, n: int) -> bool:
        """A file with this block's true bytes has the final name."""
        return self.world.files.get(self.path(job_id, n)) == file_of((job_id, n), n)
