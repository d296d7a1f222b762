"""How fast loads are: rates that the ranks measured, and what has been planned and not come yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from py_kvcache.plan import Meters, Pace

# A rate is of the last reads that took so long or were so many, whichever is less: slow storage must not be
# remembered as fast for longer than it takes to notice.
_WINDOW_S, _WINDOW_BYTES = 0.25, 1 << 30
_LEAST_S = 1e-6  # less tells nothing of storage, and makes numbers that are none
_NEW_WEIGHT = 0.3  # of the last load's latency in the mean
_LONGEST_LATENCY_S = 5.0


@dataclass(slots=True)
class _Window:
    """Sums of bytes and busy seconds, as far back as a rate looks."""

    sums: deque[Meters] = field(default_factory=lambda: deque([(0, 0.0)]))

    def add(self, total: Meters) -> bool:
        """Whether there is anything new."""
        sums = self.sums
        if total[0] < sums[-1][0] or total[1] < sums[-1][1]:
            sums.clear()  # another process under the same rank
            sums.append((0, 0.0))
        if total[0] == sums[-1][0]:
            return False
        sums.append(total)
        while len(sums) > 2 and _enough(sums[1], total):
            sums.popleft()
        return True

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if unknown."""
        nbytes, seconds = (b - a for a, b in zip(self.sums[0], self.sums[-1], strict=True))
        return nbytes / seconds if seconds > _LEAST_S else 0.0


def _enough(since: Meters, total: Meters) -> bool:
    return total[1] - since[1] >= _WINDOW_S or total[0] - since[0] >= _WINDOW_BYTES


class LoadPace:
    """One per engine, in the scheduler process.

    Args:
        limit: bytes per second that a rank may read at most; 0 for no limit.
    """

    def __init__(self, limit: float = 0) -> None:
        self._limit = limit
        self._reads: dict[int, _Window] = {}
        self._writes: dict[int, _Window] = {}
        self.block_bytes = 0  # per rank; 0 until a worker has said it
        self.latency_s = 0.0
        self.measured_at = -1e9  # when a rank last read
        self._planned: dict[str, tuple[float, float, int]] = {}  # request -> when, with how much ahead, bytes
        self._free_at = 0.0  # when all that is planned will have come

    def heard(self, paces: Mapping[int, Pace], now: float) -> None:
        """What the ranks report with a step."""
        for rank, pace in paces.items():
            self.block_bytes = max(self.block_bytes, pace.block_bytes)
            if self._reads.setdefault(rank, _Window()).add(pace.reads):
                self.measured_at = now
            self._writes.setdefault(rank, _Window()).add(pace.writes)

    @property
    def ranks(self) -> Collection[int]:
        """Those that have said anything."""
        return self._reads.keys()

    @property
    def rate(self) -> float:
        """Bytes per second of the slowest rank; 0 is unknown.

        Before anything has been read, that of writes: storage reads no slower than it writes.
        """
        rates = []
        for rank, reads in self._reads.items():
            rate = reads.rate or self._writes[rank].rate
            rates.append(min(rate, self._limit) if self._limit else rate)
        return min(rates, default=0.0)

    def queued_bytes(self, now: float) -> int:
        """Of what was planned before and has probably not come yet."""
        return int(max(0.0, self._free_at - now) * self.rate) if self._planned else 0

    def planned(self, request_id: str, nbytes: int, now: float) -> None:
        """A load was begun."""
        rate = self.rate
        ahead = max(0.0, self._free_at - now) if self._planned else 0.0
        self._planned[request_id] = now, ahead, nbytes
        self._free_at = now + ahead + (nbytes / rate if rate else 0.0)

    def loading(self) -> Iterator[str]:
        """Requests whose loads are under way, in the order in which these began."""
        return iter(self._planned)

    def is_planned(self, request_id: str) -> bool:
        """Whether a load of the request is under way."""
        return request_id in self._planned

    def forget(self, request_id: str) -> None:
        """The request is over, whatever its load does."""
        self._planned.pop(request_id, None)

    def ended(self, request_id: str, now: float) -> None:
        """It ended on all ranks, well or not; nothing happens if it is unknown."""
        planned = self._planned.pop(request_id, None)
        if planned is None:
            return
        began, ahead, nbytes = planned
        rate = self.rate
        if rate:
            late = now - began - ahead - nbytes / rate
            late = min(max(0.0, late), _LONGEST_LATENCY_S)
            self.latency_s += _NEW_WEIGHT * (late - self.latency_s)
