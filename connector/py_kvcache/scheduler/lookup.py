"""Which blocks exist, as far as this process knows: seen, being stored, or proved unusable.

Pure bookkeeping over (space, key); time is passed in. One instance lives in the scheduler process.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from py_kvcache.errors import Fault
from py_kvcache.layout import BlockId

SEEN_FOR_S = 60.0
FIRST_BAN_S = 30.0
LONGEST_BAN_S = 3_600.0
SET_ASIDE_S = 1.0
# After a store that failed by itself: short, since most such faults are the volume's and pass.
FIRST_REFUSAL_S = 5.0
LONGEST_REFUSAL_S = 600.0
MAX_SEEN = 1 << 20
MAX_BANNED = 1 << 16

# After this fault a good file stands under the name as soon as one was stored. After proved damage that
# is not so: the store may have found the damaged file still there and left it.
_HEALED_BY_STORE = frozenset({Fault.MISSING.value})

# A store that failed so would fail again at once: a folder, a FIFO or a link has the name, a folder of the
# cache belongs to somebody else, the disk is sick. Other faults are about the moment or the whole volume,
# which the worker watches itself.
_STORE_REFUSED = frozenset({Fault.IO.value})


class Presence(Enum):
    """What is known of one block."""

    SEEN = "seen"  # existed when last looked at, not long ago
    STORING = "storing"  # this engine is writing it
    BANNED = "banned"  # a load of it failed; answer MISS or the request would loop for ever
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Ban:
    until: float
    length: float
    strikes: int
    fault: str


@dataclass(slots=True)
class _Store:
    deadline: float
    failed: str | None = None


class Index:
    """Four books: seen (LRU, expiring), storing (with deadlines), banned and refused (both doubling)."""

    def __init__(self, max_seen: int = MAX_SEEN, max_banned: int = MAX_BANNED) -> None:
        self._seen: OrderedDict[BlockId, float] = OrderedDict()
        self._banned: OrderedDict[BlockId, _Ban] = OrderedDict()
        self._refused: OrderedDict[BlockId, _Ban] = OrderedDict()
        self._storing: dict[BlockId, _Store] = {}
        self._storing_in: Counter[str] = Counter()  # blocks being stored, by namespace
        self._max_seen, self._max_banned = max_seen, max_banned

    @property
    def storing(self) -> int:
        """Number of blocks being stored."""
        return len(self._storing)

    @property
    def storing_spaces(self) -> tuple[str, ...]:
        """Namespaces with blocks being stored."""
        return tuple(self._storing_in)

    def presence(self, block: BlockId, now: float) -> Presence:
        """What to answer for one block; dictionary look-ups only."""
        if self._banned and (ban := self._banned.get(block)) is not None and now < ban.until:
            return Presence.BANNED
        if (store := self._storing.get(block)) is not None:
            return Presence.STORING if now < store.deadline else Presence.UNKNOWN
        expires = self._seen.get(block)
        if expires is not None and now < expires:
            return Presence.SEEN
        return Presence.UNKNOWN

    def saw(self, blocks: Iterable[BlockId], now: float) -> None:
        """The blocks exist."""
        for block in blocks:
            self._seen[block] = now + SEEN_FOR_S
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Look again next time."""
        for block in blocks:
            self._seen.pop(block, None)

    def load_failed(self, block: BlockId, fault: str, now: float) -> float:
        """A load failed: answer MISS for 30 s, doubling with each strike. Returns the ban's length."""
        self._seen.pop(block, None)
        return self._strike(self._banned, block, fault, now, FIRST_BAN_S, LONGEST_BAN_S)

    def set_aside(self, blocks: Iterable[BlockId], fault: str, now: float) -> None:
        """A load failed for a reason that is not the blocks': answer MISS for a moment."""
        for block in blocks:
            self._seen.pop(block, None)
            ban = self._banned.setdefault(block, _Ban(now, SET_ASIDE_S, 0, fault))
            ban.until = max(ban.until, now + SET_ASIDE_S)
        while len(self._banned) > self._max_banned:
            self._banned.popitem(last=False)

    def _strike(
        self,
        book: OrderedDict[BlockId, _Ban],
        block: BlockId,
        fault: str,
        now: float,
        first: float,
        longest: float,
    ) -> float:
        old = book.pop(block, None)
        # A block that was left alone for twice its ban may have been evicted and stored many times since.
        again = old is not None and now < old.until + 2 * old.length
        strikes = old.strikes + 1 if old is not None and again else 1
        length = min(first * 2.0 ** min(strikes - 1, 16), longest)
        book[block] = _Ban(now + length, length, strikes, fault)
        while len(book) > self._max_banned:
            book.popitem(last=False)
        return length

    def store_began(self, block: BlockId, deadline: float) -> None:
        """This engine has begun to store the block."""
        if block not in self._storing:
            self._storing_in[block[0]] += 1
        self._storing[block] = _Store(deadline)

    def _no_longer_storing(self, block: BlockId) -> _Store | None:
        store = self._storing.pop(block, None)
        if store is not None:
            self._storing_in[block[0]] -= 1
            if not self._storing_in[block[0]]:
                del self._storing_in[block[0]]
        return store

    def store_failed(self, block: BlockId, fault: str) -> None:
        """One rank did not store its part; remembered until the job ends on all ranks."""
        if (store := self._storing.get(block)) is not None:
            store.failed = fault

    def store_ended(self, block: BlockId, now: float) -> bool:
        """All ranks are done with the block. Returns True if it is stored."""
        store = self._no_longer_storing(block)
        if store is None:
            return False
        if store.failed is not None:
            if store.failed in _STORE_REFUSED:
                self._strike(self._refused, block, store.failed, now, FIRST_REFUSAL_S, LONGEST_REFUSAL_S)
            return False
        self._refused.pop(block, None)
        ban = self._banned.get(block)
        if ban is not None and ban.fault in _HEALED_BY_STORE:
            # The strikes stay: should the new file fail too, the ban goes on doubling.
            ban.until = now
        self.saw((block,), now)
        return True

    def store_refused(self, block: BlockId, now: float) -> bool:
        """Whether the last store of the block failed not long ago in a way that would come again."""
        ban = self._refused.get(block) if self._refused else None
        return ban is not None and now < ban.until

    def expire_stores(self, now: float) -> list[BlockId]:
        """Give up stores past their deadline (a worker that never reported); returns them."""
        late = [block for block, store in self._storing.items() if now >= store.deadline]
        for block in late:
            self._no_longer_storing(block)
        return late

    def clear(self) -> None:
        """Forget everything (reset_cache)."""
        self._seen.clear()
        self._banned.clear()
        self._refused.clear()
        self._storing.clear()
        self._storing_in.clear()
