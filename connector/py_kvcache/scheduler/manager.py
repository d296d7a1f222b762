"""The scheduler side: which blocks a request can load, which it may store, what failed.

vLLM's stock offloading scheduler calls the methods of OffloadingManager within its step; connector.py
brackets each look-up with begin_lookup and end_lookup. No method touches the file system.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from py_kvcache import metrics
from py_kvcache.config import Config
from py_kvcache.errors import Fault
from py_kvcache.namespace import Spaces
from py_kvcache.plan import Failures, TransferPlan, Want, WorkerReport
from py_kvcache.scheduler.adapters import Adapters
from py_kvcache.scheduler.foresight import Foresight
from py_kvcache.scheduler.gate import Gate, Hit
from py_kvcache.scheduler.known import Known
from py_kvcache.scheduler.lookup import Index
from py_kvcache.scheduler.lookups import Lookups
from py_kvcache.scheduler.names import Names
from py_kvcache.scheduler.policy import Mode
from py_kvcache.scheduler.postponed import Postponed
from py_kvcache.scheduler.prefill import Span
from py_kvcache.scheduler.probe import Prober
from py_kvcache.scheduler.requests import RequestState
from py_kvcache.scheduler.storing import Storing
from py_kvcache.scheduler.thresholds import ThresholdsFile
from py_kvcache.scheduler.waiting import Waiting
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
T = TypeVar("T")
# How often workers report gauges and counters; the latter also when a job ends. Putting them together takes
# 0.2 ms, much of a short step.
COUNT_EVERY_S = 0.05


class Manager(OffloadingManager):  # type: ignore[misc]
    """One per engine, in the scheduler process; called by one thread."""

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        parts: tuple[int, ...],
        hashes_per_block: int,
        ranks: int = 1,
        longest: int = 1 << 20,
        prober: Prober | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._hashes_per_block = hashes_per_block
        self._prober = prober or Prober()
        self._adapters = Adapters(ranks)
        self._names = Names(config, spaces, self._prober, self._adapters)
        self._step = 0
        self._count_at = 0.0
        self._defects: set[str] = set()
        self._clock = clock
        self._index = Index()
        self._requests: dict[str, RequestState] = {}
        self._waiting = Waiting()
        self._postponed = Postponed(self._names, self._adapters)
        known = Known(config, self._names, self._adapters, self._index, self._postponed, self._count)
        self._lookups = Lookups(known, self._requests, self._prober, parts)
        self._file = ThresholdsFile(config.thresholds, spaces.engine, self._prober.run)
        self._gate = Gate(Mode(config.gate), config.block_tokens, config.read_bytes_per_s, self._file.current)
        self._storing = Storing(known, lambda now: self._gate.can_pay(longest, now))
        self._foresight = Foresight(known, self._requests, self._waiting, self._lookups, self._gate)
        # Finished in this step and in the one before: 0.26 finishes a request before it stores its last
        # blocks, later versions after.
        self._ended: list[RequestState] = []
        self._ended_before: list[RequestState] = []
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
        self._waiting.enter(request.request_id)

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
        self._lookups.forget(state)
        self._waiting.leave(req_context.req_id)
        self._gate.pace.forget(req_context.req_id)
        state.request_id = req_context.req_id
        self._ended.append(state)

    def next_step(self, spans: Iterable[Span] = ()) -> int:
        """Number of the step whose message to the workers is put together now.

        ``spans``: for each request in it, how many tokens are computed before and after it.
        """
        self._step += 1
        learner = self._gate.prefill
        self._guess("prefills", lambda: learner.step_began(self._step, spans, self._clock()), None)
        return self._step

    def on_schedule_end(self, context: Any) -> None:
        """vLLM: once a step; before its stores up to 0.32."""
        for state in self._ended_before:
            self._storing.drop("not_ready", self._postponed.end(state))
            # A new request may have come under the same id.
            if self._requests.get(state.request_id) is state:
                del self._requests[state.request_id]
        self._ended_before, self._ended = self._ended, []

    def allocated(self, request: RequestFacts, external_tokens: int) -> None:
        """The request was admitted to run: count what it got from us, once."""
        name, pace = request.request_id, self._gate.pace
        self._waiting.admit(name)
        state = self._requests.get(name)
        if state is None:
            return
        total = state.local_tokens + external_tokens
        in_memory = self._in_memory(state, state.local_tokens, total) if external_tokens else 0
        if external_tokens and not pace.is_planned(name):
            hit = Hit(request.num_prompt_tokens, state.local_tokens, total, in_memory)
            pace.planned(name, self._gate.load_bytes(hit), self._clock())
        if state.counted:
            return
        state.counted = True
        decision = state.decision
        if decision is not None:
            self._gate.counted(decision)
            self._count(metrics.GATE, 1, "load" if decision.load else "decline", decision.reason.value)
        missed = max(0, request.num_prompt_tokens - external_tokens - state.local_tokens)
        result = "hit" if external_tokens else "miss"
        if external_tokens and missed >= self._config.block_tokens:
            result = "partial"
        elif not state.load:
            result = "opt_out"
        elif state.gave_up:
            result = "timeout"
        elif decision is not None and not decision.load:
            result = "declined"
        self._samples.add(metrics.LOOKUPS, 1, result)
        from_memory = min(external_tokens, in_memory * self._config.block_tokens)
        self._samples.add(metrics.HIT_TOKENS, external_tokens - from_memory, "disk")
        self._samples.add(metrics.HIT_TOKENS, from_memory, "memory")
        self._samples.add(metrics.MISSED_TOKENS, missed)

    def stores(self, request_id: str) -> bool:
        """Whether blocks of the request may still be on their way to storage, or go there."""
        state = self._requests.get(request_id)
        return state is not None and state.store

    def is_time_to_count(self, idle: bool) -> bool:
        """Whether the workers are to report gauges and counters in this step.

        Also where nothing is computed: such a step may be the last for long, and its gauges stand as long.
        """
        now = self._clock()
        due = idle or now >= self._count_at
        if due:
            self._count_at = now + COUNT_EVERY_S
        return due

    def know_cached(self, is_cached: Callable[[bytes], bool]) -> None:
        """Whether the engine's own prefix cache has the block of a hash."""
        self._foresight.is_cached = is_cached

    def wants(self) -> tuple[Want, ...] | None:
        """What waiting requests will want, for the workers; None if nothing has changed."""
        now = self._clock()
        self._lookups.take_answers(now)
        return self._guess("preload", lambda: self._foresight.wants(now), None)

    def _guess(self, what: str, do: Callable[[], T], otherwise: T) -> T:
        """What only makes things faster must not end the engine. A defect of ours is told once for each."""
        try:
            return do()
        except Exception:
            if what not in self._defects:
                logger.exception("py-kvcache: the %s failed; this is a defect, please report it", what)
                self._defects.add(what)
            return otherwise

    def preempted(self, request_ids: Iterable[str]) -> None:
        """vLLM took these requests' blocks for others; they wait again."""
        self._waiting.preempt(request_ids)

    def needs_blocks(self, free_tokens: int, block_tokens: int) -> bool:
        """Whether so much free KV memory is less than what requests have yet to compute, and a block each.

        After a preemption that is prompt and answer, in a chunked prefill the rest of the prompt.
        """
        need = 0
        for name in self._waiting.alive:
            state = self._requests.get(name)
            need += block_tokens
            # Who loads has his blocks, of which vLLM says that nothing is computed until all have come.
            if state is not None and state.facts is not None and not self._gate.pace.is_planned(name):
                need += max(0, state.facts.num_tokens - state.facts.num_computed_tokens)
            if free_tokens < need:
                return True
        return False

    # ---- look-up

    def begin_lookup(self, request_id: str, local_tokens: int) -> None:
        """Before a pass of lookup() calls for one request: take answers, settle deadlines.

        ``local_tokens`` are already in the engine's own prefix cache.
        """
        self._lookups.begin(self._requests.get(request_id), local_tokens, self._clock())

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """vLLM: one block of the chain. HIT, MISS, or wait (RETRY: asked; HIT_PENDING: being stored)."""
        return self._lookups.lookup(self._requests[req_context.req_id], key)

    def end_lookup(self, request_id: str, tokens: int | None) -> None:
        """After the pass: ask about what was unknown; ``tokens`` is vLLM's answer (None: wait)."""
        state = self._requests.get(request_id)
        if state is not None:
            self._lookups.end(request_id, state, tokens)

    def pays(self, request: RequestFacts, local_tokens: int, external_tokens: int) -> bool:
        """Whether to load what a look-up found; else all of it is computed."""
        state = self._requests.get(request.request_id)
        if state is None:
            return True
        total = local_tokens + external_tokens
        in_memory = self._in_memory(state, local_tokens, total)
        hit = Hit(request.num_prompt_tokens, local_tokens, total, in_memory)
        before = state.decision
        state.decision = self._guess("gate", lambda: self._gate.judge(hit, before, self._clock()), None)
        return state.decision is None or state.decision.load

    def _in_memory(self, state: RequestState, first: int, end: int) -> int:
        return self._guess("residency", lambda: self._foresight.in_memory(state, first, end), 0)

    def wait_if_asking(self) -> None:
        """In a step that computes nothing: until the file system answers, or a moment."""
        self._lookups.wait_if_asking()

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
        now = self._clock()
        self._lookups.take_answers(now)
        chosen = self._storing.choose(state, keys, now, self._step + 1)
        indices = [state.index_of(key) for key in chosen]
        plan = TransferPlan(state.space or "", chosen, indices, state.adapter_note)
        return PrepareStoreOutput(keys_to_store=list(chosen), store_spec=plan, evicted_keys=[])

    def take_postponed(self) -> dict[str, bytes]:
        """Requests whose blocks can be stored now, after all, and the first of these blocks."""
        return self._postponed.take()

    def _count(self, metric: metrics.Metric, amount: float, *labels: str) -> None:
        self._samples.add(metric, amount, *labels)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """vLLM: a load job ended on all ranks; failures came before, with note_report()."""
        self._gate.pace.ended(req_context.req_id, self._clock())

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
            self.set_layouts(report.layouts)
        self._adapters.heard(report.adapters)
        self._guess("pace", lambda: self._gate.pace.heard(report.paces, now), None)
        self._guess("residency", lambda: self._foresight.heard(report.moves), None)
        if report.step:
            learner = self._gate.prefill
            self._guess("prefills", lambda: learner.step_ended(report.step, now), None)
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
        # Whose thresholds are meant is known, too: they are wanted with the first request.
        self._file.current(self._clock())

    # ---- the rest of OffloadingManager

    def reset_cache(self) -> None:
        """vLLM: cached blocks are no longer valid (weights changed, say)."""
        self._names.new_epoch()
        self._index.clear()
        self._lookups.clear()
        for state in self._requests.values():
            state.space, state.ticket, state.hole = None, None, False
            state.asked, state.absent, state.foreseen, state.want = [], set(), 0, None
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
        self._storing.drop("deadline", len(late))
        if self._samples.is_empty():
            return None
        stats = to_stats(self._samples)
        self._samples = metrics.Samples()
        return stats

    def shutdown(self) -> None:
        """vLLM: the engine ends."""
        self._prober.shutdown()
