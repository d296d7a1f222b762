"""Requests that wait for a place on the GPU: they have come, or were preempted, and have no blocks yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Waiting:
    """In vLLM's order: first come, first served, and who was preempted goes first.

    Priorities, which vLLM can be told to go by, are not seen here.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._known: dict[str, int] = {}  # running ones, too
        self.tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    @property
    def known(self) -> int:
        """Requests that wait or run."""
        return len(self._known)

    def enter(self, request_id: str, tokens: int) -> None:
        """A new request, of so many prompt tokens."""
        self.leave(request_id)
        self._known[request_id] = self._tokens[request_id] = tokens
        self.tokens += tokens

    def admit(self, request_id: str) -> None:
        """It has got its blocks."""
        self.tokens -= self._tokens.pop(request_id, 0)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """They have lost their blocks again."""
        first = {name: self._known[name] for name in request_ids if name in self._known}
        if first:
            self._tokens = first | self._tokens
            self.tokens = sum(self._tokens.values())

    def leave(self, request_id: str) -> None:
        """It is over."""
        self.admit(request_id)
        self._known.pop(request_id, None)
