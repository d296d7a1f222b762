"""A faulty operating system behind the ring's interface.

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

from py_kvcache.layout import file_bytes
from py_kvcache.worker.checksum import seal_block
from py_kvcache.worker.ring import Completion

ON_RING = ("openat", "read", "write", "close")
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
        self.unseekable: set[str] = set()
        self.next_fd = 1000
        self.pending: list[Ask] = []
        self.rules: list[list] = []
        self.log: list[tuple[str, str]] = []
        self.asked: list[Ask] = []
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
        self.asked.append(ask)
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

    def address(self, buffer: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def slot_at(self, buffer: memoryview) -> int:
        return (self.address(buffer) - self.base) // self.slot_bytes

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
        if self.fds.get(fd) in self.unseekable:
            raise OSError(errno.ESPIPE, "no file")
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
        self._queue(
            Ask("openat", token, path, flags=flags, finish=lambda fate: self._open(token, path, flags, fate))
        )

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
        ask = Ask("close", token, self.world.fds.get(fd, ""))
        ask.finish = lambda fate: self._close(token, fd)
        self._queue(ask)

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
        self.world.settle(*ON_RING)
        done = list(self.done)
        self.done.clear()
        return done

    def fileno(self) -> int:
        return self._wake_fd

    def in_flight(self) -> int:
        return len(self.queued) + sum(ask.op in ON_RING for ask in self.world.pending)

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
