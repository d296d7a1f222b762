"""The memory tier: blocks whose slots stay filled, so that the next use needs no disk.

Loads and stores both leave their blocks here. There are ``capacity`` slots beyond those that are under way,
so keeping a block never takes a slot from a read or a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from py_kvcache.worker.retention import Retention, make_retention

if TYPE_CHECKING:
    from py_kvcache.worker.staging import Slot, StagingPool


class Tier:
    """Reactor thread only. Blocks are known by the path of their file, which holds namespace and shard.

    Args:
        policy: name of a retention policy.
        capacity: slots that may be kept; 0 keeps nothing.
    """

    def __init__(self, staging: StagingPool, policy: str, capacity: int) -> None:
        self._staging = staging
        self._retention: Retention | None = make_retention(policy, capacity) if capacity else None
        self._slots: dict[str, Slot] = {}
        self.kept = 0  # blocks that were ever kept
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, path: str, *, proved: bool = False) -> bool:
        """Whether ``find`` would give a slot."""
        slot = self._slots.get(path)
        return slot is not None and (slot.proved or not proved)

    def find(self, path: str, *, proved: bool = False) -> Slot | None:
        """The block's slot, which the caller shares from now on; None if it is not here.

        ``proved``: it must be so that nobody needs to check it.
        """
        if self._retention is None or not self._retention.hit(path):
            return None
        slot = self._slots[path]
        if proved and not slot.proved:
            return None
        self._staging.share(slot)
        return slot

    def offer(self, path: str, slot: Slot) -> None:
        """Take a block that the caller still holds, whole and proved good, if it is worth another's place."""
        retention = self._retention
        if retention is None or path in self._slots:
            return
        while len(retention) >= retention.capacity:
            victim = retention.evict(path, _Busy(self._slots))
            if victim is None or victim == path:
                return
            self._let_go(victim)
            self.given_up += 1
        retention.admit(path)
        self._slots[path] = slot
        self._staging.keep(slot)
        self.kept += 1

    def drop(self, path: str) -> None:
        """The block is not what it should be."""
        if self._retention is not None and path in self._slots:
            self._retention.drop(path)
            self._let_go(path)

    def expect(self, waiting: Mapping[str, int]) -> None:
        """See Retention.expect."""
        if self._retention is not None:
            self._retention.expect(waiting)

    def _let_go(self, path: str) -> None:
        self._staging.let_go(self._slots.pop(path))


class _Busy:
    """The blocks that somebody is copying just now."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots

    def __contains__(self, path: object) -> bool:
        slot = self._slots.get(path)  # type: ignore[call-overload]
        return slot is not None and slot.holders > 0
