"""Blocks that could not be stored when vLLM offered them, and can be a step later.

vLLM offers blocks with the step that computes them. The first step of a LoRA adapter is also the one in
which the workers read it, so nobody knows yet what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from py_kvcache.scheduler.adapters import AdapterQuestion
from py_kvcache.scheduler.requests import RequestState


class Postponed:
    """Requests with such blocks, until their adapter is known or they are over."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def add(self, state: RequestState, keys: Collection[bytes]) -> None:
        """Remember where to begin again."""
        if keys and state.facts is not None:
            state.postponed_from = state.postponed_from or next(iter(keys))
            state.postponed += len(keys)
            self._states[state.facts.request_id] = state

    def take(self, space_of: Callable[[AdapterQuestion | None], str | None]) -> dict[str, bytes]:
        """Requests whose namespace is known now, and the first block to be offered again of each."""
        found: dict[str, bytes] = {}
        for name, state in list(self._states.items()):
            if state.postponed_from is not None and space_of(state.adapter) is not None:
                found[name] = state.postponed_from
                state.postponed_from, state.postponed, state.offered_again = None, 0, True
                del self._states[name]
        return found

    def end(self, state: RequestState) -> int:
        """The request is over. Returns how many blocks are lost."""
        if self._states.get(state.request_id) is not state:
            return 0
        del self._states[state.request_id]
        return state.postponed
