"""Requests that wait for a place on the GPU: they have come, or were preempted, and have no blocks yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Waiting:
    """In vLLM's order: first come, first served, and who was preempted goes first.

    Priorities, which vLLM can be told to go by, are not seen here.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._alive: dict[str, None] = {}  # running ones, too

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    @property
    def alive(self) -> Iterable[str]:
        """Requests that wait or run."""
        return self._alive

    def enter(self, request_id: str) -> None:
        """A new request."""
        self.leave(request_id)
        self._alive[request_id] = self._order[request_id] = None

    def admit(self, request_id: str) -> None:
        """It has got its first blocks."""
        self._order.pop(request_id, None)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """They have lost their blocks again."""
        first = {name: None for name in request_ids if name in self._alive}
        if first:
            self._order = first | self._order

    def leave(self, request_id: str) -> None:
        """It is over."""
        self._order.pop(request_id, None)
        self._alive.pop(request_id, None)
