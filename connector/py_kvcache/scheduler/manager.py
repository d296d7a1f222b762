"""The scheduler side: which blocks a request can load, which it may store, what failed.

vLLM's stock offloading scheduler calls the methods of OffloadingManager within its step; connector.py
brackets each look-up with begin_lookup and end_lookup. No method touches the file system.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from py_kvcache import metrics, vllm_api
from py_kvcache.config import Config
from py_kvcache.errors import Fault
from py_kvcache.namespace import Spaces
from py_kvcache.plan import Failures, TransferPlan, WorkerReport
from py_kvcache.scheduler.adapters import Adapters
from py_kvcache.scheduler.lookup import Index, Presence
from py_kvcache.scheduler.names import Names
from py_kvcache.scheduler.postponed import Postponed
from py_kvcache.scheduler.probe import ChainQuestion, Prober
from py_kvcache.scheduler.requests import RequestState
from py_kvcache.vllm_api import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestFacts,
    RequestOffloadingContext,
    storage_hit_source,
    to_stats,
)

logger = logging.getLogger("vllm.py_kvcache.manager")

# A negative answer holds so long for the same request, which may be asked every step while it waits.
ABSENT_FOR_S = 1.0
# A step without computation waits so long at most for an answer. vLLM would make hundreds of such steps, and
# each system call of a probe's thread would have to win the interpreter back from them. Short, since a step
# with a long look-up has taken 5 to 9 ms already; a local file system answers in less.
IDLE_WAIT_S = 0.001
# While the file system owes an answer, so often one request may ask and wait all the same.
HUNG_RETRY_S = 5.0


class Manager(OffloadingManager):  # type: ignore[misc]
    """One per engine, in the scheduler process; called by one thread."""

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        parts: tuple[int, ...],
        hashes_per_block: int,
        ranks: int = 1,
        prober: Prober | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._parts = config, parts
        self._hashes_per_block = hashes_per_block
        self._prober = prober or Prober()
        self._adapters = Adapters(ranks)
        self._names = Names(config, spaces, self._prober, self._adapters)
        self._step = 0
        self._clock = clock
        self._now = clock()
        self._index = Index()
        self._requests: dict[str, RequestState] = {}
        self._asking: dict[int, str] = {}
        self._postponed = Postponed(self._names, self._adapters)
        # Finished in this step and in the one before: 0.26 finishes a request before it stores its last
        # blocks, later versions after.
        self._ended: list[RequestState] = []
        self._ended_before: list[RequestState] = []
        self._tickets = itertools.count(1)
        # The file system owes an answer for longer than a look-up may take: nobody waits for it then.
        self._hung = False
        self._ask_again_at = 0.0
        self._samples = metrics.Samples()
        for metric in metrics.ALL:
            # Counters without labels of their own are exported from the start, as zero.
            if metric.kind is metrics.Kind.COUNTER and not metric.labels:
                self._samples.add(metric, 0)

    # ---- life of a request

    def admit(self, request: RequestFacts) -> None:
        """Before on_new_request: hand over what ReqContext lacks (hashes, LoRA adapter)."""
        state = RequestState(facts=request, hashes_per_block=self._hashes_per_block)
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            state.adapter = self._adapters.ask(lora, self._step + 1)
        self._requests[request.request_id] = state

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """vLLM: a request is known; may come without admit() for one that is already over."""
        state = self._requests.setdefault(
            req_context.req_id, RequestState(facts=None, hashes_per_block=self._hashes_per_block)
        )
        state.choose(req_context.kv_transfer_params)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """vLLM: nothing more will be submitted for the request after the coming step."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        if state.ticket is not None:
            self._asking.pop(state.ticket, None)
        state.request_id = req_context.req_id
        self._ended.append(state)

    def next_step(self) -> int:
        """Number of the step whose message to the workers is put together now."""
        self._step += 1
        return self._step

    def on_schedule_end(self, context: Any) -> None:
        """vLLM: once a step; before its stores up to 0.32."""
        for state in self._ended_before:
            self._drop("not_ready", self._postponed.end(state))
            # A new request may have come under the same id.
            if self._requests.get(state.request_id) is state:
                del self._requests[state.request_id]
        self._ended_before, self._ended = self._ended, []

    def allocated(self, request: RequestFacts, external_tokens: int) -> None:
        """The request was admitted to run: count what it got from us, once."""
        state = self._requests.get(request.request_id)
        if state is None or state.counted:
            return
        state.counted = True
        missed = max(0, request.num_prompt_tokens - external_tokens - state.local_tokens)
        result = "hit" if external_tokens else "miss"
        if external_tokens and missed >= self._config.block_tokens:
            result = "partial"
        elif not state.load:
            result = "opt_out"
        elif state.gave_up:
            result = "timeout"
        self._samples.add(metrics.LOOKUPS, 1, result)
        self._samples.add(metrics.HIT_TOKENS, external_tokens, "disk")
        self._samples.add(metrics.MISSED_TOKENS, missed)

    def stores(self, request_id: str) -> bool:
        """Whether blocks of the request may still be on their way to storage, or go there."""
        state = self._requests.get(request_id)
        return state is not None and state.store

    # ---- look-up

    def begin_lookup(self, request_id: str, local_tokens: int) -> None:
        """Before a pass of lookup() calls for one request: take answers, settle deadlines.

        ``local_tokens`` are already in the engine's own prefix cache.
        """
        self._now = self._clock()
        self._take_answers()
        state = self._requests.get(request_id)
        if state is None:
            return
        state.local_tokens = local_tokens
        if state.space is None:
            state.space = self._names.space_of(state.adapter)
        state.may_load = state.load and self._adapters.may_load(state.adapter)
        state.unknown.clear()
        state.deferred = False
        self._postponed.forget(state)
        if state.waits_since is not None and self._now - state.waits_since >= self._config.lookup_deadline_s:
            state.gave_up = True
            if state.ticket is not None and not self._hung:
                self._hung, self._ask_again_at = True, self._now + HUNG_RETRY_S
        elif self._hung and state.ticket is None:
            # One request in a while may still ask and wait: only one thread or one folder may hang.
            state.gave_up = self._now < self._ask_again_at
            if not state.gave_up:
                self._ask_again_at = self._now + HUNG_RETRY_S

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """vLLM: one block of the chain. HIT, MISS, or wait (RETRY: asked; HIT_PENDING: being stored)."""
        state = self._requests[req_context.req_id]
        if not state.may_load:
            return LookupResult.MISS
        space = state.space
        if space is None:
            # An adapter that no worker has in memory is read by the step that computes with it.
            in_vain = state.adapter is not None and self._adapters.is_in_vain(state.adapter)
            return LookupResult.MISS if state.gave_up or in_vain else self._later(state)
        presence = self._index.presence((space, key), self._now)
        if presence is Presence.SEEN:
            return LookupResult.HIT
        if presence is Presence.BANNED or state.gave_up:
            return LookupResult.MISS
        if presence is Presence.STORING:
            state.deferred = True
            return LookupResult.HIT_PENDING
        stale = self._now >= state.absent_until
        if state.ticket is None and (stale or key not in state.absent):
            state.unknown.append(key)
        # While a stale no is asked again it still stands: a request at the head of the queue is
        # looked up in every step and must not wait each time.
        return LookupResult.MISS if key in state.absent else self._later(state)

    @staticmethod
    def _later(state: RequestState) -> LookupResult:
        state.deferred = True
        return LookupResult.RETRY

    def end_lookup(self, request_id: str, tokens: int | None) -> None:
        """After the pass: ask about what was unknown; ``tokens`` is vLLM's answer (None: wait)."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if tokens is not None or not state.deferred:
            # Without a deferred block vLLM waits for something else, such as a load of the same blocks
            # by another request, which has a deadline of its own.
            state.waits_since = None
        elif state.waits_since is None:
            state.waits_since = self._now
        if state.unknown and state.ticket is None and state.space is not None:
            state.ticket = next(self._tickets)
            state.asked = list(state.unknown)
            self._asking[state.ticket] = request_id
            self._prober.ask(
                ChainQuestion(state.ticket, self._config.root_path, state.space, self._parts, state.asked)
            )

    def wait_if_asking(self) -> None:
        """In a step that computes nothing: until the file system answers, or a moment."""
        if self._asking and not self._hung:
            self._prober.wait(IDLE_WAIT_S)

    def _take_answers(self) -> None:
        for answer in self._prober.answers():
            self._hung = False
            if answer.code:
                self._samples.add(metrics.PROBE_ERRORS, 1, errno.errorcode.get(answer.code, "other"))
            state = self._requests.get(self._asking.pop(answer.ticket, ""))
            if state is None or state.ticket != answer.ticket or state.space is None:
                continue
            space = state.space
            self._index.saw(((space, key) for key in state.asked[: answer.present]), self._now)
            state.absent = set(state.asked[answer.present :])
            state.absent_until = self._now + ABSENT_FOR_S
            # The file system has answered. How long vLLM then takes to ask again (its steps may be full with
            # other requests) is not a wait for us.
            state.ticket, state.asked, state.waits_since = None, [], None

    # ---- loads and stores

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> TransferPlan:
        """vLLM: these blocks will be loaded."""
        state = self._requests[req_context.req_id]
        assert state.space is not None, "a load of blocks that no look-up found"
        indices = tuple(state.index_of(key) for key in keys)
        return TransferPlan(state.space, tuple(keys), indices, state.adapter_note)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """vLLM: these blocks were computed. Blocks left out of the answer are never offered again."""
        state = self._requests[req_context.req_id]
        self._now = self._clock()
        chosen = self._choose_stores(state, keys)
        for key in chosen:
            self._index.store_began((state.space or "", key), self._now + self._config.store_deadline_s)
        indices = [state.index_of(key) for key in chosen]
        plan = TransferPlan(state.space or "", chosen, indices, state.adapter_note)
        return PrepareStoreOutput(keys_to_store=list(chosen), store_spec=plan, evicted_keys=[])

    def _choose_stores(self, state: RequestState, keys: Collection[bytes]) -> list[bytes]:
        self._take_answers()
        if state.space is None:
            state.space = self._names.space_of(state.adapter)
        gone = state.offered_again and vllm_api.was_aborted(state.facts)
        may = state.store and not gone and self._adapters.trusts(state.adapter)
        if not may or (state.space is None and state.adapter is None):
            state.hole = True
            self._drop("opt_out" if not state.store else "not_ready", len(keys))
            return []
        if state.adapter is not None:
            keys = self._postponed.certain(state, keys, self._step + 1)
        space = state.space or ""
        chosen: list[bytes] = []
        for position, key in enumerate(keys):
            presence = self._index.presence((space, key), self._now)
            if presence in (Presence.SEEN, Presence.STORING):
                continue
            reason = None
            if self._index.storing + len(chosen) >= self._config.max_queued_stores:
                reason = "queue_full"
            elif state.hole:
                reason = "after_hole"
            elif self._index.store_refused((space, key), self._now):
                reason = "failed_before"
            if reason is not None:
                # What follows could not be found without this block.
                state.hole = True
                self._drop(reason, len(keys) - position)
                break
            chosen.append(key)
        return chosen

    def take_postponed(self) -> dict[str, bytes]:
        """Requests whose blocks can be stored now, after all, and the first of these blocks."""
        return self._postponed.take()

    def _drop(self, reason: str, blocks: int) -> None:
        if blocks:
            self._samples.add(metrics.STORES_DROPPED, blocks, reason)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """vLLM: a load job ended on all ranks; failures came before, with note_report()."""

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """vLLM: a store job ended on all ranks; failures came before, with note_report()."""
        state = self._requests.get(req_context.req_id)
        # A request that is gone says no more where its blocks were; only one of a few names has them.
        spaces = (state.space,) if state is not None and state.space else self._index.storing_spaces
        now = self._clock()
        for key in keys:
            for space in spaces:
                if self._index.store_ended((space, key), now):
                    break

    def note_report(self, report: WorkerReport) -> None:
        """What the ranks reported this step, before vLLM handles the completed jobs."""
        now = self._clock()
        if report.layouts:
            self._names.set_layouts(report.layouts)
        self._adapters.heard(report.adapters)
        for failures in report.failed_loads.values():
            self._note_failed_load(failures, now)
            self._samples.add(metrics.RECOMPUTED_BLOCKS, len(failures.faults))
        for failures in report.failed_stores.values():
            for key, fault in failures.faults.items():
                self._index.store_failed((failures.space, key), fault)
        self._samples.merge_step(report.samples)

    def _note_failed_load(self, failures: Failures, now: float) -> None:
        space, faults = failures.space, failures.faults
        if Fault.ADAPTER.value in faults.values():
            self._index.set_aside(((space, key) for key in faults), Fault.ADAPTER.value, now)
            return
        tried = {key: fault for key, fault in faults.items() if fault != Fault.CANCELLED.value}
        # Wholly cancelled, it would be found and loaded again at once, for ever.
        banned = tried or faults
        self._index.forget((space, key) for key in faults.keys() - banned.keys())
        lengths = [self._index.load_failed((space, key), fault, now) for key, fault in banned.items()]
        first = next(iter(banned), b"")
        logger.warning(
            "py-kvcache: %d blocks of %s could not be loaded (the first: %s, %s); they are computed again, "
            "and those that failed themselves (%d) are taken for missing for %.0f s or more",
            len(faults), space, first[:8].hex(), banned.get(first, ""), len(banned), min(lengths, default=0),
        )  # fmt: skip

    def set_layouts(self, layouts: Iterable[Mapping[str, Any]]) -> None:
        """The workers described their KV tensors: from now on namespaces are known."""
        self._names.set_layouts(layouts)

    # ---- the rest of OffloadingManager

    def reset_cache(self) -> None:
        """vLLM: cached blocks are no longer valid (weights changed, say)."""
        self._names.new_epoch()
        self._index.clear()
        self._asking.clear()
        for state in self._requests.values():
            state.space, state.ticket, state.hole = None, None, False
            state.asked, state.absent = [], set()
            self._postponed.forget(state)
            # What it has computed so far was computed before; vLLM offers it once more.
            state.store = state.store and not state.counted

    def on_reset_flushed(self) -> None:
        """0.33: jobs from before a reset have ended; their names are of the old epoch."""

    def config_info(self) -> list[dict[str, str]]:
        """0.33: labels of vLLM's own info metric; ours stand in our own metrics."""
        return [{}]

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """0.32: where a hit came from, in vLLM's terms."""
        return storage_hit_source()

    def get_stats(self) -> Any:
        """vLLM: what was counted since the last call; None if nothing."""
        late = self._index.expire_stores(self._clock())
        self._drop("deadline", len(late))
        if self._samples.is_empty():
            return None
        stats = to_stats(self._samples)
        self._samples = metrics.Samples()
        return stats

    def shutdown(self) -> None:
        """vLLM: the engine ends."""
        self._prober.shutdown()
