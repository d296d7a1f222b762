"""Blocks that waiting requests will want, read while nothing else is to be read.

The scheduler tells what it would like, most urgent first, and tells again when that changes; what is no
longer in the list is given back. Each block is a job of its own, which ends on the tier's shelf instead of
the device and is reported to nobody. A load that wants a block being preloaded joins its read, as it would
any other's, and makes it as urgent as itself.

A read that has begun is never given up: the device would do it all the same, for nothing, and while a file
hangs it must not be read once more. Its slot is one of the tier's, so that no load lacks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from py_kvcache.errors import BlockError, Fault
from py_kvcache.worker.jobs import BlockWork, Job, Kind, Running, Transfer
from py_kvcache.worker.transfer import Event, LoadState

if TYPE_CHECKING:
    from py_kvcache.worker.core import Core
    from py_kvcache.worker.sharing import Sharing


class Wanted(NamedTuple):
    """Blocks of one request. ``held``: it loads by now, so that only what was read already is of use."""

    works: tuple[BlockWork, ...]
    held: bool = False


# In the order of reads: behind all that a request waits for.
LAST = 1 << 60
# A file that could not be read is left alone so long: on a bad disk each try takes seconds.
NOT_AGAIN_FOR_S = 60.0


class Preloads:
    """Reactor thread only.

    Args:
        depth: reads at once.
    """

    def __init__(self, core: Core, depth: int, sharing: Sharing) -> None:
        self._core, self._depth, self._sharing = core, depth, sharing
        self._held: set[str] = set()  # what loads will claim
        self._awaited: dict[str, BlockWork] = {}  # what requests wait for, the first wanted first
        self._wanted: set[str] = set()  # both
        self._todo: deque[BlockWork] = deque()
        self._under_way: dict[str, tuple[Running, Transfer]] = {}
        self._failed: dict[str, float] = {}  # path -> until when it is left alone
        self._numbers = 0
        self._losses = 0  # of the tier, when it was looked at last

    def want(self, wants: Sequence[Wanted]) -> None:
        """The whole list, in the order in which requests will want them."""
        core = self._core
        # Blocks that requests share are wanted by the first of them.
        self._awaited, held = {}, set[str]()
        for wanted in wants:
            for work in wanted.works:
                if wanted.held:
                    held.add(work.path)
                else:
                    self._awaited.setdefault(work.path, work)
        self._wanted = held | self._awaited.keys()
        self._failed = {path: until for path, until in self._failed.items() if path in self._wanted}
        core.tier.wait_for_use(held - self._held, held)
        self._held = held
        core.tier.expect({path: place for place, path in enumerate(self._awaited)})
        core.tier.clear_shelf(self._wanted)
        for path, (run, t) in list(self._under_way.items()):
            if path not in self._wanted and t.state is LoadState.OPENED and not self._sharing.is_joined(t):
                core.give_up(run, BlockError(Fault.CANCELLED, path, 0, "nobody waits for it any more"))
        self._look()

    def begin(self) -> Transfer | None:
        """The next block to open, if there is one and a place for it."""
        core = self._core
        if self._awaited and core.tier.losses != self._losses:
            self._look()
        while self._todo and len(self._under_way) < self._depth:
            work = self._todo[0]
            path = work.path
            if path in self._under_way or core.tier.has(path) or self._sharing.is_read(path):
                self._todo.popleft()
                continue
            if core.now < self._failed.get(path, 0.0):
                self._todo.popleft()
                continue
            # What is wanted makes no room for what is wanted later, or both would be read for ever.
            if not core.tier.promise(self._awaited):
                return None
            self._todo.popleft()
            self._numbers -= 1
            run = Running(Job(self._numbers, Kind.PRELOAD, (work,), None, 0.0), core.now, 1)
            core.jobs[run.job.job_id] = run
            core.queued[Kind.PRELOAD] += 1
            t = core.begin(run)
            t.serial += LAST
            self._under_way[path] = run, t
            return t
        return None

    def filled(self, t: Transfer) -> None:
        """The block is in its slot, which goes to the shelf."""
        assert t.slot is not None
        tier, path = self._core.tier, t.work.path
        del self._under_way[path]
        if t.slot.holders > 1:
            # A load has it already, and offers it when it has copied it.
            tier.break_promise()
            tier.claimed += 1
        elif path in self._wanted or self._sharing.is_joined(t):
            tier.shelve(path, t.slot)
        else:
            tier.break_promise()
            tier.wasted += 1
        self._core.move(t, Event.SHELVE)
        self._core.succeed(t)

    def follow(self) -> None:
        """Blocks that ended otherwise keep no place."""
        for path, (run, _) in list(self._under_way.items()):
            if run.finished:
                del self._under_way[path]
                self._core.tier.break_promise()
                self._core.counters.preloads_lost += 1
                if any(error.fault is not Fault.CANCELLED for error in run.failed.values()):
                    self._failed[path] = self._core.now + NOT_AGAIN_FOR_S
        if not self._wanted and not self._core.census[LoadState.JOINED]:
            # Left for loads that had joined, and gave up.
            self._core.tier.clear_shelf(())

    def _look(self) -> None:
        """What is to be read: a load reads its own."""
        tier = self._core.tier
        self._losses = tier.losses
        self._todo = deque(
            work for path, work in self._awaited.items() if not (path in self._held or tier.has(path))
        )
