"""What the scheduler side remembers of one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from py_kvcache import vllm_api
from py_kvcache.plan import Adapter, Want
from py_kvcache.scheduler.policy import Decision

if TYPE_CHECKING:
    from py_kvcache.scheduler.adapters import AdapterQuestion

logger = logging.getLogger("vllm.py_kvcache.requests")

PARAMS_KEY = "py_kvcache"


def wanted(params: Mapping[str, Any] | None, what: str) -> bool:
    """Whether a request may load or store: kv_transfer_params {"py_kvcache": {"load": false, ...}}.

    Whatever is not plainly a yes counts as the no that its sender will have meant ("false", 0).
    """
    ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    return not isinstance(ours, Mapping) or ours.get(what, True) in (True, "true", "on", "yes", None)


@lru_cache(maxsize=64)
def _say_once(keys: str) -> None:
    logger.warning(
        "py-kvcache: a request's kv_transfer_params have %r within %r, which says nothing to us; known: "
        "load, store", keys, PARAMS_KEY,
    )  # fmt: skip


def complain(params: Any) -> None:
    """Warn, once for each kind: who misspells "store" believes that nothing of the request is stored."""
    ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    if ours is None:
        return
    unknown = sorted(set(map(str, ours)) - {"load", "store"}) if isinstance(ours, Mapping) else [repr(ours)]
    if unknown:
        _say_once(", ".join(unknown)[:200])


@dataclass(slots=True)
class RequestState:
    """One request from on_new_request to on_request_finished."""

    facts: vllm_api.RequestFacts | None
    hashes_per_block: int
    load: bool = True
    store: bool = True
    adapter: AdapterQuestion | None = None
    space: str | None = None
    # One question at a time: what was asked, when the request began to wait, what was answered.
    ticket: int | None = None
    asked: list[bytes] = field(default_factory=list)
    unknown: list[bytes] = field(default_factory=list)
    waits_since: float | None = None
    absent: set[bytes] = field(default_factory=set)
    absent_until: float = 0.0
    gave_up: bool = False
    may_load: bool = True  # in the present pass of look-ups
    deferred: bool = False  # this pass met a block to wait for
    request_id: str = ""
    # A chunk of this request was dropped: what follows in the chain could never be found.
    hole: bool = False
    # Blocks to be offered again, in chain order, and the step that computes the last (see postponed.py);
    # then those of the next offer that may be stored.
    postponed: list[bytes] = field(default_factory=list)
    postponed_at: int = 0
    sure: frozenset[bytes] = frozenset()
    offered_again: bool = False
    counted: bool = False
    chain: list[bytes] = field(default_factory=list)  # keys, as far as they were asked for
    foreseen: int = 0  # so many of them are stored, but for the first ones, which the GPU had:
    foreseen_from: int = 0
    foreseen_until: float = 0.0  # when they are counted anew
    want: Want | None = None  # what the workers were told of it
    decision: Decision | None = None  # the gate's, of the last look-up that found something
    local_tokens: int = 0
    _positions: dict[bytes, int] = field(default_factory=dict)

    def choose(self, params: Any) -> None:
        """Take the request's own wishes (kv_transfer_params)."""
        # In later turns of a streaming-input session vLLM's stock scheduler appends all KV blocks to those it
        # had listed already (0.26 to 0.33): what it then offers as one block lies in another.
        known = not vllm_api.is_session(self.facts)
        complain(params)
        self.load, self.store = known and wanted(params, "load"), known and wanted(params, "store")

    @property
    def adapter_note(self) -> Adapter | None:
        """What the workers compare with what they have loaded."""
        return None if self.adapter is None else self.adapter.note

    def chain_hashes(self, first: int, end: int) -> list[bytes]:
        """Of some blocks of the request, by position: each is the hash of its last engine block."""
        if self.facts is None:
            return []
        per = self.hashes_per_block
        return list(self.facts.block_hashes[(first + 1) * per - 1 : end * per : per])

    def index_of(self, key: bytes) -> int:
        """Position of a block in the request's chain; 0 if the chain does not have it."""
        block_hash = key[:-4]
        if block_hash not in self._positions and self.facts is not None:
            hashes, per = self.facts.block_hashes, self.hashes_per_block
            for position in range(len(self._positions), len(hashes) // per):
                self._positions[hashes[(position + 1) * per - 1]] = position
        return self._positions.get(block_hash, 0)
