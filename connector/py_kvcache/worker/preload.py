"""Blocks that waiting requests will want, read while nothing else is to be read.

The scheduler tells what it would like, most urgent first, and tells again when that changes; what is no
longer in the list is given back. Each block is a job of its own, which ends on the tier's shelf instead of
the device and is reported to nobody. A load that wants a block being preloaded joins its read, as it would
any other's, and makes it as urgent as itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.jobs import BlockWork, Job, Kind, Running, Transfer
from py_kvcache.worker.transfer import Event

if TYPE_CHECKING:
    from py_kvcache.worker.core import Core

# The number of each want, and its blocks.
Wanted = Sequence[tuple[int, tuple[BlockWork, ...]]]

# In the order of reads: behind all that a request waits for.
LAST = 1 << 60


class Preloads:
    """Reactor thread only.

    Args:
        depth: reads at once.
        joined: whether a load waits for this block's read.
        is_read: whether a file is being read, or its block copied.
    """

    def __init__(
        self,
        core: Core,
        depth: int,
        joined: Callable[[Transfer], bool],
        is_read: Callable[[str], bool],
    ) -> None:
        self._core, self._depth, self._joined, self._is_read = core, depth, joined, is_read
        self._wanted: dict[str, BlockWork] = {}
        self._todo: deque[BlockWork] = deque()
        self._under_way: dict[str, tuple[Running, Transfer]] = {}
        self._numbers = 0
        self._wanted_by: dict[str, list[int]] = {}
        self.held: dict[int, int] = {}  # of each want, blocks in memory; read by other threads, never changed

    def __len__(self) -> int:
        return len(self._under_way)

    def want(self, wants: Wanted) -> None:
        """The whole list, in the order in which requests will want them."""
        core = self._core
        # Blocks that requests share are wanted by the first of them.
        self._wanted, self._wanted_by = {}, {}
        for number, works in wants:
            for work in works:
                self._wanted.setdefault(work.path, work)
                self._wanted_by.setdefault(work.path, []).append(number)
        self.held = {number: sum(core.tier.has(work.path) for work in works) for number, works in wants}
        self._todo = deque(self._wanted.values())
        core.tier.expect({path: place for place, path in enumerate(self._wanted)})
        core.tier.clear_shelf(self._wanted)
        self._cancel_all_but(self._wanted)

    def make_way(self, paths: Container[str]) -> None:
        """A request waits for these files now: reads of others end, as far as the kernel lets them."""
        self._cancel_all_but(paths)

    def begin(self) -> Transfer | None:
        """The next block to open, if there is one and a place for it."""
        core = self._core
        while self._todo and len(self._under_way) < self._depth:
            work = self._todo[0]
            if work.path in self._under_way or core.tier.has(work.path) or self._is_read(work.path):
                self._todo.popleft()
                continue
            if not core.tier.promise():
                return None
            self._todo.popleft()
            self._numbers -= 1
            run = Running(Job(self._numbers, Kind.PRELOAD, (work,), None, 0.0), core.now, 1)
            core.jobs[run.job.job_id] = run
            core.queued[Kind.PRELOAD] += 1
            t = core.begin(run)
            t.serial += LAST
            self._under_way[work.path] = run, t
            return t
        return None

    def filled(self, t: Transfer) -> None:
        """The block is in its slot, which goes to the shelf."""
        assert t.slot is not None
        del self._under_way[t.work.path]
        if t.slot.holders > 1:
            # A load has it already, and offers it when it has copied it.
            self._core.tier.break_promise()
            self._core.tier.claimed += 1
        else:
            self._core.tier.shelve(t.work.path, t.slot)
        for number in self._wanted_by.get(t.work.path, ()):
            self.held = {**self.held, number: self.held[number] + 1}
        self._core.move(t, Event.SHELVE)
        self._core.succeed(t)

    def follow(self) -> None:
        """Blocks that ended otherwise keep no place."""
        for path, (run, _) in list(self._under_way.items()):
            if run.finished:
                del self._under_way[path]
                self._core.tier.break_promise()
                self._core.counters.preloads_lost += 1

    def _cancel_all_but(self, paths: Container[str]) -> None:
        for path, (run, t) in reversed(list(self._under_way.items())):
            if path not in paths and not self._joined(t):
                if path in self._wanted:
                    self._todo.appendleft(t.work)
                self._core.give_up(run, BlockError(Fault.CANCELLED, path, 0, "nobody waits for it any more"))
        self.follow()
