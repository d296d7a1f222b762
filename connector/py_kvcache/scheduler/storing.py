"""Which computed blocks are stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from py_kvcache import metrics, vllm_api
from py_kvcache.scheduler.known import Known
from py_kvcache.scheduler.lookup import Presence
from py_kvcache.scheduler.requests import RequestState

_MOST_TOUCHED = 1 << 18  # blocks that were offered once: 20 MB or so


class Storing:
    """One per engine; called by vLLM's scheduler thread only.

    Args:
        pays: whether any hit can be worth loading at a time.
    """

    def __init__(self, known: Known, pays: Callable[[float], bool]) -> None:
        self._known, self._config, self._index, self._pays = known, known.config, known.index, pays
        self._touched: OrderedDict[tuple[str, bytes], None] = OrderedDict()

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
        if self._config.store_policy == "break_even" and not self._pays(now):
            state.hole = True
            self.drop("never_pays", len(keys))
            return []
        if state.adapter is not None:
            keys = self._known.postponed.certain(state, keys, step)
        space = state.space or ""
        first = self._touch(space, keys) if self._config.store_policy == "second_touch" else ()
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
            elif key in first:
                reason = "first_touch"
            if reason is not None:
                # What follows could not be found without this block.
                state.hole = True
                self.drop(reason, len(keys) - position)
                break
            chosen.append(key)
        return chosen

    def _touch(self, space: str, keys: Collection[bytes]) -> set[bytes]:
        """Remember that a request had these blocks. Returns those that none had before."""
        first = {key for key in keys if (space, key) not in self._touched}
        for key in keys:
            self._touched[space, key] = None
            self._touched.move_to_end((space, key))
        while len(self._touched) > _MOST_TOUCHED:
            self._touched.popitem(last=False)
        return first
