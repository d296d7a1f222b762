"""What waiting requests will want, so that the workers can read it before it is their turn.

vLLM looks up a request when it may run. Here the first of those that wait are looked up before, which also
answers vLLM's own question at once, and the workers are told what the gate would load of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from py_kvcache import vllm_api
from py_kvcache.layout import file_bytes
from py_kvcache.plan import Moves, Want
from py_kvcache.scheduler.gate import Gate, Hit
from py_kvcache.scheduler.known import Known
from py_kvcache.scheduler.lookup import Presence
from py_kvcache.scheduler.lookups import Lookups
from py_kvcache.scheduler.requests import RequestState
from py_kvcache.scheduler.residency import Residency
from py_kvcache.scheduler.waiting import Waiting

# How often it is looked again though the queue has not changed: rates have, perhaps.
_AGAIN_S = 0.5
# How long what was counted of a request's chain stands; it only grows meanwhile.
_COUNT_AGAIN_S = 20.0


class Foresight:
    """One per engine; vLLM's scheduler thread only."""

    def __init__(
        self,
        known: Known,
        requests: Mapping[str, RequestState],
        waiting: Waiting,
        lookups: Lookups,
        gate: Gate,
    ) -> None:
        self._known, self._requests, self._waiting = known, requests, waiting
        self._lookups, self._gate = lookups, gate
        self._lookahead = 1 if known.config.preload == "alone" else known.config.preload_requests
        self._last: tuple[Want, ...] = ()
        self._told: dict[str, int] = {}  # by request, how many blocks were told of it while it waited
        self._seen: object = None
        self._looked_at = 0.0
        self._residency = Residency()
        # Whether the engine's own prefix cache has a block of that hash; None where there is no such cache.
        self.is_cached: Callable[[bytes], bool] | None = None

    def wants(self, now: float) -> tuple[Want, ...] | None:
        """The whole list, most urgent first; None if it is the one that was told last."""
        most = self._most_blocks()
        if not most:
            return None
        loading = [name for name in self._gate.pace.loading() if name in self._requests]
        names = list(self._candidates(loading))
        seen = loading, names, self._lookups.answered
        if seen == self._seen and now - self._looked_at < _AGAIN_S:
            return None
        self._seen, self._looked_at = seen, now
        found = self._hold(loading)
        for name in names:
            want = self._want(name, self._requests[name], now, most)
            if want is None:
                continue
            found.append(Want(want.space, want.keys[:most]))
            self._told[name] = len(found[-1].keys)
            most -= len(want.keys)
            if most <= 0:
                break
        wants = tuple(found)
        if wants == self._last:
            return None
        self._last = wants
        return wants

    def heard(self, moves: Mapping[int, Moves]) -> None:
        """What the ranks' memories have taken in and given up."""
        self._residency.heard(moves)

    def in_memory(self, state: RequestState, first: int, end: int) -> int:
        """Blocks with the prompt's tokens from ``first`` to ``end`` that every rank has in memory."""
        if state.facts is None or state.space is None:
            return 0
        space, tokens = state.space, self._known.config.block_tokens
        last = -(-end // tokens)
        keys = self._chain(state, last)[first // tokens : last]
        # Who has said nothing has nothing.
        return self._residency.count(((space, key) for key in keys), len(self._gate.pace.ranks))

    def _most_blocks(self) -> int:
        payload = self._gate.pace.block_bytes
        return self._known.config.preload_blocks(file_bytes(payload)) if payload else 0

    def _hold(self, loading: Sequence[str]) -> list[Want]:
        """Who loads claims what was read for him, and has no part in what may be read for those who wait."""
        self._told = {name: count for name, count in self._told.items() if name in self._requests}
        found = []
        for name in loading:
            want = self._requests[name].want
            if want is not None and name in self._told:
                found.append(Want(want.space, want.keys[: self._told[name]], held=True))
        return found

    def _candidates(self, loading: Container[str]) -> Iterator[str]:
        """Who waits, in order."""
        for place, name in enumerate(self._waiting):
            if place >= self._lookahead:
                return
            if name in self._requests and name not in loading:
                yield name

    def _want(self, name: str, state: RequestState, now: float, most: int) -> Want | None:
        """What of this request is stored and would be loaded; None if nothing is, or nobody knows yet."""
        facts = state.facts
        if facts is None or not state.load or state.adapter is not None:
            return None
        if state.space is None:
            state.space = self._known.names.space_of(None)
        if state.space is None:
            return None
        local = self._count_cached(state, facts)
        keys = self._chain(state, local + most)
        present = self._count(state, keys, local, now)
        if present < len(keys):
            self._lookups.foresee(name, state, keys[present:], now)
            if state.want is not None and state.ticket is not None:
                return state.want  # it was there a minute ago, and is looked for again
        if present <= local:
            return None
        tokens = self._known.config.block_tokens
        first = state.local_tokens if self.is_cached is None else local * tokens
        total = present * tokens
        hit = Hit(facts.num_prompt_tokens, first, total, self.in_memory(state, first, total))
        if not self._gate.is_likely(hit, now):
            return None
        state.want = Want(state.space, tuple(keys[local:present]))
        return state.want

    def _count_cached(self, state: RequestState, facts: vllm_api.RequestFacts) -> int:
        """Blocks at the head of the chain that need no load: vLLM gives up the last of a prefix first."""
        if self.is_cached is None:
            return 0
        hashes, per, is_cached = facts.block_hashes, state.hashes_per_block, self.is_cached
        whole = min((facts.num_prompt_tokens - 1) // self._known.config.block_tokens, len(hashes) // per)
        return bisect_left(range(whole), True, key=lambda block: not is_cached(hashes[(block + 1) * per - 1]))

    def _count(self, state: RequestState, keys: list[bytes], local: int, now: float) -> int:
        """Where the blocks end that are stored, behind the first ``local``.

        A long chain is not counted anew in each step.
        """
        if now >= state.foreseen_until or state.foreseen > len(keys) or local < state.foreseen_from:
            state.foreseen, state.foreseen_until = 0, now + _COUNT_AGAIN_S
        if local > state.foreseen:
            state.foreseen = state.foreseen_from = local
        elif not state.foreseen:
            state.foreseen_from = 0
        present, index, space = state.foreseen, self._known.index, state.space or ""
        while present < len(keys) and index.presence((space, keys[present]), now) is Presence.SEEN:
            present += 1
        state.foreseen = present
        return present

    def _chain(self, state: RequestState, most: int) -> list[bytes]:
        """Keys of the blocks of the prompt that vLLM would load: the last token is always computed.

        The first ``most`` of them, or more if they are known already.
        """
        facts = state.facts
        assert facts is not None
        whole = (facts.num_prompt_tokens - 1) // self._known.config.block_tokens
        known, wanted = state.chain, min(whole, most)
        if len(known) < wanted:
            more = state.chain_hashes(len(known), wanted)
            known.extend(vllm_api.key_of(block_hash) for block_hash in more)
        return known
