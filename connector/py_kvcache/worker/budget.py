"""A rate limit that never splits a block: spend first, wait afterwards. Pure."""

from __future__ import annotations


class RateBudget:
    """At most ``bytes_per_s`` on average, after a burst of so many seconds. 0 means no limit."""

    def __init__(self, bytes_per_s: float, burst_s: float) -> None:
        self._rate, self._burst_s = bytes_per_s, burst_s
        # The time by which everything spent so far has been earned, less the burst.
        self._paid_at = float("-inf")

    def allows(self, now: float) -> bool:
        """True if the next block may go, whatever its size."""
        return not self._rate or self._paid_at <= now

    def spend(self, nbytes: int, now: float) -> None:
        """Charge one block."""
        if self._rate:
            self._paid_at = max(self._paid_at, now - self._burst_s) + nbytes / self._rate

    def wait(self, now: float) -> float:
        """Seconds until ``allows`` is true; 0 if it is."""
        return max(0.0, self._paid_at - now) if self._rate else 0.0
