"""Which blocks every rank has in memory, as the ranks have said: no read is needed for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from py_kvcache.layout import BlockId
from py_kvcache.plan import Moves


class Residency:
    """Pure bookkeeping. What ranks say is a step or more old, so an answer is a good guess."""

    def __init__(self) -> None:
        self._of_rank: dict[int, set[BlockId]] = {}
        self._ranks_with: Counter[BlockId] = Counter()

    def heard(self, moves: Mapping[int, Moves]) -> None:
        """What the ranks' memories have taken in and given up."""
        for rank, (came, left) in moves.items():
            mine = self._of_rank.setdefault(rank, set())
            for block in left:
                if block in mine:
                    mine.remove(block)
                    self._ranks_with[block] -= 1
                    if not self._ranks_with[block]:
                        del self._ranks_with[block]
            for block in came:
                if block not in mine:
                    mine.add(block)
                    self._ranks_with[block] += 1

    def count(self, blocks: Iterable[BlockId], ranks: int) -> int:
        """How many of the blocks at least so many ranks have."""
        if not self._ranks_with:
            return 0
        known = self._ranks_with.get
        return sum(known(block, 0) >= ranks for block in blocks)
