"""A policy that neither a scan nor a loop empties, and that looks at who is waiting.

Inter-reference recency: S. Jiang, X. Zhang, SIGMETRICS 2002. Most of the memory is for blocks whose last two
uses were close together (*steady*), a small part for all others (*passing*). A loop over twice the memory
then keeps hitting the same half, where LRU and ARC have always just given up what comes next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping

from py_kvcache.worker.retention import NOTHING, Key

_PASSING_SHARE = 32  # one in so many


class Lirs:
    """See retention.Retention.

    A block that a waiting request will use goes last, the later it is wanted the sooner; without such a queue
    it is plain LIRS.
    """

    def __init__(self, capacity: int, lent: int = 0) -> None:
        self.capacity = capacity
        self._least_passing = max(1, capacity // _PASSING_SHARE)
        self._most_steady = capacity - self._least_passing
        # Others take no more for long; else one moment in which all else was in use would count for ever.
        self._least_steady = max(1, self._most_steady - lent)
        self._calm = 0  # blocks given up for others like them, since room was asked for without one
        # By last use, oldest first: steady blocks, and all others used since the oldest steady one. True:
        # steady. What is in neither list of residents is remembered only.
        self._recent: OrderedDict[Key, bool] = OrderedDict()
        self._passing: OrderedDict[Key, None] = OrderedDict()  # resident, first to go first
        self._steady = 0
        self._waiting: Mapping[Key, int] = {}

    def __len__(self) -> int:
        return self._steady + len(self._passing)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (key in self._passing or self._recent.get(key, False))

    @property
    def remembered(self) -> int:
        """Blocks that are not resident and still known."""
        return len(self._recent) - self._steady - sum(key in self._recent for key in self._passing)

    def hit(self, key: Key) -> bool:
        """See Retention.hit."""
        if self._recent.get(key, False):
            self._recent.move_to_end(key)
            self._prune()
            return True
        if key not in self._passing:
            return False
        if key in self._recent:
            del self._passing[key]
            self._make_steady(key)
        else:
            self._recent[key] = False
            self._passing.move_to_end(key)
        return True

    def admit(self, key: Key) -> None:
        """See Retention.admit."""
        if key in self:
            raise ValueError("the block is resident already")
        if key in self._recent or self._steady < self._most_steady:
            self._make_steady(key)
        else:
            self._recent[key] = False
            self._passing[key] = None
        self._forget_oldest()

    def evict(self, coming: Key | None = None, pinned: Container[Key] = NOTHING) -> Key | None:
        """See Retention.evict."""
        waiting = self._waiting
        latest: Key | None = None
        for key in self._candidates(coming):
            if key != coming and key in pinned:
                continue
            if key not in waiting:
                latest = key
                break
            if latest is None or waiting[key] > waiting[latest]:
                latest = key
        if latest is None:
            return None
        self._divide(coming, latest)
        return coming if latest == coming else self._give_up(latest)

    def drop(self, key: Key) -> None:
        """See Retention.drop."""
        if self._recent.pop(key, False):
            self._steady -= 1
        self._passing.pop(key, None)
        self._prune()

    def expect(self, waiting: Mapping[Key, int]) -> None:
        """See Retention.expect. The mapping is looked at until the next call."""
        self._waiting = waiting

    def _divide(self, coming: Key | None, victim: Key) -> None:
        """How many may be steady.

        Who asks for room for no block of ours (preloads do) asks again and again. If blocks that come
        between became steady, each time would give up the oldest steady ones, which in a loop are the next
        to be used. So there are as many as were left then, until nobody has asked for long.
        """
        if coming is None:
            self._calm = 0
            if victim not in self._passing:
                self._most_steady = max(self._least_steady, self._steady - 1)
            return
        self._calm += 1
        if self._calm > self.capacity and len(self._passing) > self._least_passing:
            self._most_steady = min(self._most_steady + 1, self.capacity - self._least_passing)

    def _candidates(self, coming: Key | None) -> Iterator[Key]:
        """Residents, least valuable first; a block that would only pass through is between the two kinds."""
        yield from self._passing
        if coming is not None and coming not in self._recent and self._steady >= self._most_steady:
            yield coming
        yield from (key for key, steady in self._recent.items() if steady)

    def _give_up(self, key: Key) -> Key:
        if key in self._passing:
            del self._passing[key]  # remembered if it is among the recent
        else:
            self._recent[key] = False
            self._steady -= 1
            self._prune()
        return key

    def _make_steady(self, key: Key) -> None:
        if not self._recent.get(key, False):
            self._steady += 1
        self._recent[key] = True
        self._recent.move_to_end(key)
        if self._steady > self._most_steady:
            oldest = next(other for other, steady in self._recent.items() if steady)
            self._recent[oldest] = False
            self._steady -= 1
            self._passing[oldest] = None
        self._prune()

    def _prune(self) -> None:
        """The oldest of the recent is a steady one: what is older says nothing."""
        recent = self._recent
        while recent and not recent[oldest := next(iter(recent))]:
            del recent[oldest]

    def _forget_oldest(self) -> None:
        """Remember no more than twice what the memory holds; looked at once in as many admissions."""
        if len(self._recent) <= 3 * self.capacity:
            return
        gone = [key for key, steady in self._recent.items() if not steady and key not in self._passing]
        for key in gone[: len(self._recent) - 2 * self.capacity]:
            del self._recent[key]
