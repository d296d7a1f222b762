"""Blocks of LoRA requests that cannot be stored when vLLM offers them, and can be some steps later.

vLLM offers blocks with the step that computes them. Two things are unknown then: what adapter it is, if this
is also the step in which the workers read it; and, where there are several, whether one of them has just read
other weights than the rest. It would store nothing, but the others' parts carry its mistakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from py_kvcache import vllm_api
from py_kvcache.scheduler.adapters import Adapters
from py_kvcache.scheduler.names import Names
from py_kvcache.scheduler.requests import RequestState


class Postponed:
    """Requests with such blocks, until the workers have said what they computed with, or it is over."""

    def __init__(self, names: Names, adapters: Adapters) -> None:
        self._names, self._adapters = names, adapters
        self._states: dict[str, RequestState] = {}

    def certain(self, state: RequestState, keys: Collection[bytes], step: int) -> Sequence[bytes]:
        """Those of the offered blocks that can be stored now; the others will be offered again.

        Args:
            state: of a request with an adapter.
            keys: in chain order.
            step: the one that is put together now; it computes the last of these blocks.
        """
        sure, state.sure = state.sure, frozenset()
        if state.space is None:
            sure = frozenset()
        elif self._adapters.is_alone or vllm_api.ended_by_itself(state.facts):
            # One rank is asked again when it stores. vLLM ends a request when it has heard of its last step.
            sure = frozenset(keys)
        chosen = list(itertools.takewhile(sure.__contains__, keys))
        rest = list(keys)[len(chosen) :]
        if rest and state.facts is not None:
            state.postponed += rest
            state.postponed_at = step
            self._states[state.facts.request_id] = state
        return chosen

    def take(self) -> dict[str, bytes]:
        """Requests of which enough is known now, and the first block to be offered again of each."""
        found: dict[str, bytes] = {}
        for name, state in list(self._states.items()):
            known = state.space or self._names.space_of(state.adapter)
            if known is not None and self._adapters.have_spoken(state.postponed_at):
                found[name] = state.postponed[0]
                state.sure, state.offered_again, state.postponed = frozenset(state.postponed), True, []
                del self._states[name]
        return found

    def forget(self, state: RequestState) -> None:
        """What it had computed before a preemption or a reset says nothing about what it will compute."""
        state.sure, state.postponed = frozenset(), []
        if state.facts is not None:
            self._states.pop(state.facts.request_id, None)

    def end(self, state: RequestState) -> int:
        """The request is over. Returns how many blocks are lost."""
        if self._states.get(state.request_id) is not state:
            return 0
        del self._states[state.request_id]
        return len(state.postponed)
