"""What to measure next: a pure function of what was measured, and of the time that is left.

A visit is to one prefix length P: the time to compute P tokens, and to load them. Visits begin with a grid
from short to long, go on where the two curves cross, and repeat what is least sure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GRID = 6  # lengths of the first grid
LEAST_ROUNDS, MOST_ROUNDS = 3, 12
_NARROW = 0.1  # of a length: the bracket of a crossing need not be narrower
_CLEAR = 2.0  # spreads that two medians are apart to be told from each other


@dataclass(frozen=True)
class Seen:
    """What was measured at one length, in seconds, by round."""

    compute: tuple[float, ...]
    load: tuple[float, ...]

    @property
    def rounds(self) -> int:
        """Of which both are known."""
        return min(len(self.compute), len(self.load))

    @property
    def gain(self) -> float:
        """What loading saves, by medians."""
        return statistics.median(self.compute) - statistics.median(self.load)

    @property
    def doubt(self) -> float:
        """0: loading is surely faster, or surely slower; 1 and more: who knows."""
        if self.rounds < 2:
            return math.inf
        spread = _spread(self.compute) + _spread(self.load)
        return _CLEAR * spread / abs(self.gain) if self.gain else math.inf


def _spread(values: Sequence[float]) -> float:
    """Median distance from the median, over the root of how many there are."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values) / math.sqrt(len(values))


def end_of_storage(now: float, last: float, start_s: float, share: float) -> float:
    """Until when loads from storage are measured, so that memory gets its turn; all in seconds.

    Args:
        last: when the budget ends.
        start_s: what the engine took to start; memory is measured with another one, which takes as long.
        share: memory's, of the time in which anything is measured.
    """
    left = max(0.0, last - now)
    return now + max(left / 2, (1 - share) * (left - start_s))


def first_grid(block: int, longest: int, count: int = GRID) -> tuple[int, ...]:
    """Prefix lengths from one block to ``longest`` tokens, whole blocks, about evenly spaced by ratio.

    Empty if not one block fits.
    """
    blocks = longest // block
    if blocks < 1:
        return ()
    wanted = {round(blocks ** (n / (count - 1))) for n in range(count)}
    return tuple(block * n for n in sorted(wanted | {1, blocks}))


def next_prefix(
    seen: Mapping[int, Seen], grid: Sequence[int], block: int, seconds_left: float, costs: Mapping[int, float]
) -> int | None:
    """The prefix length to visit now; None if all is known well enough, or nothing fits into the time.

    Args:
        costs: what a visit to a length would take, for those of ``grid`` and of ``seen``; others are between.
    """

    def fits(prefix: int) -> bool:
        return _cost(costs, prefix) <= seconds_left

    for prefix in grid:
        if prefix not in seen and fits(prefix):
            return prefix
    known = sorted(prefix for prefix, what in seen.items() if what.rounds)
    for low, high in pairwise(known):
        if (seen[low].gain > 0) == (seen[high].gain > 0) or high - low <= max(block, _NARROW * high):
            continue
        # Both ends must be sure, or it is refined in the wrong place.
        for end in (low, high):
            if seen[end].doubt > 1 and seen[end].rounds < LEAST_ROUNDS and fits(end):
                return end
        middle = (low + high) // 2 // block * block
        if middle not in seen and middle > low and fits(middle):
            return middle
    fewest = [prefix for prefix in known if seen[prefix].rounds < LEAST_ROUNDS and fits(prefix)]
    if fewest:
        return min(fewest, key=lambda prefix: (seen[prefix].rounds, prefix))
    unsure = [p for p in known if seen[p].doubt > 1 and seen[p].rounds < MOST_ROUNDS and fits(p)]
    return max(unsure, key=lambda prefix: seen[prefix].doubt / seen[prefix].rounds, default=None)


def _cost(costs: Mapping[int, float], prefix: int) -> float:
    """Of a length between others: as the next longer one, if there is one."""
    longer = (costs[known] for known in sorted(costs) if known >= prefix)
    return next(longer, max(costs.values(), default=0.0))


def suffix_points(seen: Mapping[int, Seen], block: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Up to three (prefix, tokens behind it) at which the rule that saving a prefix saves f(P) is checked."""
    known = sorted(prefix for prefix, what in seen.items() if what.rounds)
    if len(known) < 2:
        return ()
    places = {known[len(known) // 3], known[len(known) // 2], known[-2]}
    room = [(prefix, min(prefix, longest - prefix) // block * block) for prefix in sorted(places)]
    return tuple((prefix, suffix) for prefix, suffix in room if suffix >= block)
