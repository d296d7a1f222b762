"""The memory tier: blocks whose slots stay filled, so that the next use needs no disk.

Loads and stores both leave their blocks here, and preloads put on the *shelf* what a waiting request will
want. There are ``capacity`` slots beyond those that are under way for both, so keeping a block never takes a
slot from a read or a store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from py_kvcache.worker.retention import Retention, make_retention

if TYPE_CHECKING:
    from py_kvcache.worker.staging import Slot, StagingPool


class Tier:
    """Reactor thread only. Blocks are known by the path of their file, which holds namespace and shard.

    Args:
        policy: name of a retention policy. It knows nothing of the shelf: a block there has not been used.
        capacity: slots that may be kept; 0 keeps nothing.
        shelf: how many of them preloads may take.
    """

    def __init__(self, staging: StagingPool, policy: str, capacity: int, shelf: int = 0) -> None:
        self._staging, self._capacity = staging, capacity
        self._retention: Retention | None = make_retention(policy, capacity, shelf) if capacity else None
        self._slots: dict[str, Slot] = {}
        self._shelf: dict[str, Slot] = {}
        self._shelf_capacity = min(shelf, capacity)
        self._promised = 0  # places for blocks that are being read
        self._awaited: set[str] = set()  # a load that is on its way here will use them
        self.kept = 0  # blocks that were ever kept
        self.given_up = 0
        self.claimed = 0  # preloaded blocks that a load wanted
        self.wasted = 0  # and those that none did
        self.losses = 0  # grows whenever a block leaves, that others may look again
        # Block and whether it came or left, in order; another thread takes them out, to tell the scheduler.
        self.moves: deque[tuple[str, bool]] = deque()

    def __len__(self) -> int:
        return len(self._slots) + len(self._shelf)

    def has(self, path: str, *, proved: bool = False) -> bool:
        """Whether ``find`` would give a slot."""
        slot = self._shelf.get(path) or self._slots.get(path)
        return slot is not None and (slot.proved or not proved)

    def find(self, path: str, *, proved: bool = False) -> Slot | None:
        """The block's slot, which the caller shares from now on; None if it is not here.

        ``proved``: it must be so that nobody needs to check it.
        """
        if self._retention is None:
            return None
        resident = self._retention.hit(path)
        self._awaited.discard(path)
        slot = self._slots[path] if resident else self._shelf.get(path)
        if slot is None or (proved and not slot.proved):
            return None
        self._staging.share(slot)
        if not resident:
            # From here on it is the caller's, who offers it like any block that was loaded.
            del self._shelf[path]
            self._staging.let_go(slot)
            self.claimed += 1
            self.moves.append((path, False))
        return slot

    def offer(self, path: str, slot: Slot) -> None:
        """Take a block that the caller still holds, whole and proved good, if it is worth another's place."""
        retention = self._retention
        if retention is None or path in self._slots or path in self._shelf:
            return
        while not self._has_room:
            victim = retention.evict(path, _Busy(self._slots, self._awaited))
            if victim is None or victim == path:
                return
            self._give_up(victim)
        retention.admit(path)
        self._slots[path] = slot
        self._staging.keep(slot)
        self.kept += 1
        self.moves.append((path, True))

    def drop(self, path: str) -> None:
        """The block is not what it should be."""
        if self._retention is not None and path in self._slots:
            self._retention.drop(path)
            self._staging.let_go(self._slots.pop(path))
            self._lost(path)
        self._waste(path)

    def expect(self, waiting: Mapping[str, int]) -> None:
        """See Retention.expect."""
        if self._retention is not None:
            self._retention.expect(waiting)

    def wait_for_use(self, more: set[str], still: set[str]) -> None:
        """Blocks that loads will use: not given up before they have.

        Args:
            more: those that were not told before.
            still: all that are told now, used or not.
        """
        self._awaited = (self._awaited & still) | more

    # ---- the shelf

    def promise(self, pinned: Container[str] = ()) -> bool:
        """Whether a block that is to be read may come; then ``shelve`` or ``break_promise`` follows.

        ``pinned`` blocks are not given up for it.
        """
        if self._retention is None or len(self._shelf) + self._promised >= self._shelf_capacity:
            return False
        while not self._has_room:
            victim = self._retention.evict(None, _Busy(self._slots, pinned, self._awaited))
            if victim is None:
                return False
            self._give_up(victim)
        self._promised += 1
        return True

    def break_promise(self) -> None:
        """The block did not come."""
        self._promised -= 1

    def shelve(self, path: str, slot: Slot) -> None:
        """The promised block is here; the caller still holds its slot."""
        self._promised -= 1
        if path in self._slots or path in self._shelf:
            self.wasted += 1  # somebody brought it meanwhile
            return
        self._shelf[path] = slot
        self._staging.keep(slot)
        self.moves.append((path, True))

    def clear_shelf(self, wanted: Container[str]) -> None:
        """Give back what nobody waits for any more."""
        for path in [path for path in self._shelf if path not in wanted]:
            self._waste(path)

    def _waste(self, path: str) -> None:
        slot = self._shelf.pop(path, None)
        if slot is not None:
            self._staging.let_go(slot)
            self.wasted += 1
            self._lost(path)

    @property
    def _has_room(self) -> bool:
        return len(self._slots) + len(self._shelf) + self._promised < self._capacity

    def _give_up(self, path: str) -> None:
        self._staging.let_go(self._slots.pop(path))
        self.given_up += 1
        self._lost(path)

    def _lost(self, path: str) -> None:
        self.losses += 1
        self.moves.append((path, False))


class _Busy:
    """The blocks that somebody is copying just now, and others."""

    def __init__(self, slots: Mapping[str, Slot], *others: Container[str]) -> None:
        self._slots, self._others = slots, others

    def __contains__(self, path: object) -> bool:
        if any(path in some for some in self._others):
            return True
        slot = self._slots.get(path)  # type: ignore[call-overload]
        return slot is not None and slot.holders > 0
