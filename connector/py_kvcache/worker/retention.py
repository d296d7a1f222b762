"""Which blocks stay in memory: policies without I/O, without slots, without a clock.

A policy orders keys; who uses it has the memory. One use of a block is ``hit``; if that says no, the block is
read, ``evict`` is asked for as long as there is no room, and ``admit`` makes it resident. Between these calls
others may come: reads take time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Protocol

Key = str  # the path of a block's file, say
NOTHING: frozenset[Key] = frozenset()


class Retention(Protocol):
    """``capacity`` blocks are to be resident at most; a policy that remembers others remembers as many."""

    capacity: int

    def __len__(self) -> int:
        """Resident blocks."""

    def __contains__(self, key: object) -> bool:
        """Whether a block is resident; no use of it."""

    def hit(self, key: Key) -> bool:
        """Note a use. Returns whether the block is resident."""

    def admit(self, key: Key) -> None:
        """The block is resident from now on. Raises ValueError if it is already."""

    def evict(self, coming: Key | None = None, pinned: Container[Key] = NOTHING) -> Key | None:
        """Give up the resident block that is worth least.

        Args:
            coming: for which room is made; a policy may answer with it: it is not worth another's place.
            pinned: blocks that somebody is using just now.
        Returns:
            The block, which is resident no more; None if all are pinned.
        """

    def drop(self, key: Key) -> None:
        """A block is gone for another reason: as if it had never been seen."""

    def expect(self, waiting: Mapping[Key, int]) -> None:
        """What requests in the queue will use: the position of the first of them, 0 soonest."""


class Lru:
    """The least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def hit(self, key: Key) -> bool:
        """See Retention.hit."""
        if key not in self._order:
            return False
        self._order.move_to_end(key)
        return True

    def admit(self, key: Key) -> None:
        """See Retention.admit."""
        if key in self._order:
            raise ValueError("the block is resident already")
        self._order[key] = None

    def evict(self, coming: Key | None = None, pinned: Container[Key] = NOTHING) -> Key | None:
        """See Retention.evict."""
        key = first_unpinned(self._order, pinned)
        if key is not None:
            del self._order[key]
        return key

    def drop(self, key: Key) -> None:
        """See Retention.drop."""
        self._order.pop(key, None)

    def expect(self, waiting: Mapping[Key, int]) -> None:
        """Not looked at."""


class Arc:
    """Adaptive replacement: N. Megiddo, D. S. Modha, FAST 2003, fig. 4.

    Blocks used once and blocks used more than once have a list each, and so have those that were lately
    given up from either. A use of a block given up says which list is too short.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1, least recently used first
        self._often: OrderedDict[Key, None] = OrderedDict()  # T2
        self._gone_once: OrderedDict[Key, None] = OrderedDict()  # B1
        self._gone_often: OrderedDict[Key, None] = OrderedDict()  # B2
        self._target = 0.0  # p: how long the first list should be

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    @property
    def remembered(self) -> int:
        """Blocks that are not resident and still known."""
        return len(self._gone_once) + len(self._gone_often)

    def hit(self, key: Key) -> bool:
        """See Retention.hit."""
        if key in self:
            self._once.pop(key, None)
            self._often[key] = None
            self._often.move_to_end(key)
            return True
        once, often = len(self._gone_once), len(self._gone_often)
        if key in self._gone_once:
            self._target = min(self.capacity, self._target + max(often / once, 1.0))
        elif key in self._gone_often:
            self._target = max(0.0, self._target - max(once / often, 1.0))
        return False

    def admit(self, key: Key) -> None:
        """See Retention.admit."""
        if key in self:
            raise ValueError("the block is resident already")
        known = key in self._gone_once or key in self._gone_often
        self._forget(key)
        (self._often if known else self._once)[key] = None
        while self._gone_once and len(self._once) + len(self._gone_once) > self.capacity:
            self._gone_once.popitem(last=False)
        while self._gone_often and len(self) + self.remembered > 2 * self.capacity:
            self._gone_often.popitem(last=False)

    def evict(self, coming: Key | None = None, pinned: Container[Key] = NOTHING) -> Key | None:
        """See Retention.evict; REPLACE of the paper."""
        long = len(self._once)
        first = long > self._target or (coming in self._gone_often and long == self._target)
        lists = [(self._once, self._gone_once), (self._often, self._gone_often)]
        for resident, gone in lists if first else reversed(lists):
            key = first_unpinned(resident, pinned)
            if key is None:
                continue
            del resident[key]
            # A list as long as the whole memory: nothing is remembered of what leaves it (case IV i).
            if not (resident is self._once and long >= self.capacity):
                gone[key] = None
            return key
        return None

    def drop(self, key: Key) -> None:
        """See Retention.drop."""
        self._once.pop(key, None)
        self._often.pop(key, None)
        self._forget(key)

    def expect(self, waiting: Mapping[Key, int]) -> None:
        """Not looked at."""

    def _forget(self, key: Key) -> None:
        self._gone_once.pop(key, None)
        self._gone_often.pop(key, None)


def first_unpinned(order: OrderedDict[Key, None], pinned: Container[Key]) -> Key | None:
    """The first key that may go."""
    return next((key for key in order if key not in pinned), None)


def make_retention(kind: str, capacity: int, lent: int = 0) -> Retention:
    """Build the policy that a setting asks for. Raises KeyError.

    ``lent``: so many places others may take, one with each ``evict`` for no block.
    """
    from py_kvcache.worker.lirs import Lirs

    kinds: dict[str, Callable[[int], Retention]] = {
        "lru": Lru, "arc": Arc, "lirs": lambda places: Lirs(places, lent)
    }  # fmt: skip
    return kinds[kind](capacity)
