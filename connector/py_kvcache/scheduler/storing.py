"""Which computed blocks are stored."""

from __future__ import annotations

from collections.abc import Collection

from py_kvcache import metrics, vllm_api
from py_kvcache.scheduler.known import Known
from py_kvcache.scheduler.lookup import Presence
from py_kvcache.scheduler.requests import RequestState


class Storing:
    """One per engine; called by vLLM's scheduler thread only."""

    def __init__(self, known: Known) -> None:
        self._known, self._config, self._index = known, known.config, known.index

    def choose(self, state: RequestState, keys: Collection[bytes], now: float, step: int) -> list[bytes]:
        """Those that will be stored, in chain order; from here on they count as under way.

        Args:
            keys: of one request, in chain order. Those left out are not offered again.
            step: the one that is put together now.
        """
        chosen = self._pick(state, keys, now, step)
        for key in chosen:
            self._index.store_began((state.space or "", key), now + self._config.store_deadline_s)
        return chosen

    def drop(self, reason: str, blocks: int) -> None:
        """Count blocks that will not be stored."""
        if blocks:
            self._known.count(metrics.STORES_DROPPED, blocks, reason)

    def _pick(self, state: RequestState, keys: Collection[bytes], now: float, step: int) -> list[bytes]:
        if state.space is None:
            state.space = self._known.names.space_of(state.adapter)
        gone = state.offered_again and vllm_api.was_aborted(state.facts)
        may = state.store and not gone and self._known.adapters.trusts(state.adapter)
        if not may or (state.space is None and state.adapter is None):
            state.hole = True
            self.drop("opt_out" if not state.store else "not_ready", len(keys))
            return []
        if state.adapter is not None:
            keys = self._known.postponed.certain(state, keys, step)
        space = state.space or ""
        chosen: list[bytes] = []
        for position, key in enumerate(keys):
            presence = self._index.presence((space, key), now)
            if presence in (Presence.SEEN, Presence.STORING):
                continue
            reason = None
            if self._index.storing + len(chosen) >= self._config.max_queued_stores:
                reason = "queue_full"
            elif state.hole:
                reason = "after_hole"
            elif self._index.store_refused((space, key), now):
                reason = "failed_before"
            if reason is not None:
                # What follows could not be found without this block.
                state.hole = True
                self.drop(reason, len(keys) - position)
                break
            chosen.append(key)
        return chosen
