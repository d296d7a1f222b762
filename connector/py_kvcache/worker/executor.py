"""The worker side of vLLM's offloading interface: plans in, finished jobs out.

Runs in vLLM's own thread and never waits, except where vLLM asks it to (``wait``). Nothing here raises
into vLLM: a job that cannot even be submitted ends as a failed one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from py_kvcache.adapters import Book
from py_kvcache.config import Config
from py_kvcache.errors import BlockError, Fault
from py_kvcache.layout import block_id_of, block_path, part_dir
from py_kvcache.plan import Failures, Moves, Pace, StepNote, TransferPlan, Want, WorkerReport
from py_kvcache.vllm_api import GPULoadStoreSpec, OffloadingWorker, OffloadingWorkerMetadata, TransferResult
from py_kvcache.worker import assembly
from py_kvcache.worker.counters import Counters
from py_kvcache.worker.device import regions_of
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.holds import Holds
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.leftovers import remove_own_dead_temps
from py_kvcache.worker.loop import Flush
from py_kvcache.worker.pages import Chunk, PageMap, split_chunks
from py_kvcache.worker.preload import Wanted
from py_kvcache.worker.report import Reporter

log = logging.getLogger("vllm.py_kvcache.worker")

# vLLM waits for jobs whose blocks are about to be reused, and for all when it resets its cache. So long they
# may go on; what has not been copied then is neither stored nor loaded, since a stalled engine costs
# everybody more.
FLUSH_PATIENCE_S = 0.02
# Blocks of a request that ended are kept for so long at most when others may want them.
HOLD_PATIENCE_S = 0.2
# A step without computation waits so long at most for a transfer to end. vLLM would make thousands of such
# steps, and the reactor would wait for the interpreter as often. A new request waits as long at worst.
IDLE_WAIT_S = 0.005
# What the memory tier took in and gave up is told in so many steps as it takes: 2 us a block.
MOST_MOVES = 1_000
STOP_TIMEOUT_S = 10.0
SHORTEST_STEP_S = 1e-3
_MOST_TIDIED = 4096
_OTHER_WEIGHTS = "this worker has other weights of the adapter"


@dataclass(frozen=True, slots=True)
class _Submitted:
    plan: TransferPlan
    chunks: tuple[Chunk, ...]


class Executor(OffloadingWorker):  # type: ignore[misc]
    """One per worker process."""

    def __init__(
        self,
        config: Config,
        kv_caches: Any,
        *,
        blocks_per_chunk: int,
        part: int,
        writes: bool,
        rank: int = 0,
        build: Callable[..., assembly.Parts] = assembly.build,
        adapters: Book | None = None,
    ) -> None:
        self._config, self._part, self._writes = config, part, writes
        self._per_chunk, self._rank, self._adapters = blocks_per_chunk, rank, adapters
        pages = PageMap(regions_of(kv_caches, 0), blocks_per_chunk)
        self._block_bytes = pages.payload_bytes
        self._parts = build(config, kv_caches, pages, rank)
        self._parts.reactor.start()
        self._jobs: dict[int, _Submitted] = {}
        self._refused: list[JobResult] = []
        self._invalid: set[int] = set()
        self._failed_loads: dict[int, Failures] = {}
        self._failed_stores: dict[int, Failures] = {}
        self._reporter = Reporter()
        self._quarantined = 0
        self._layouts: tuple[dict[str, Any], ...] = ()
        self._tidied: set[str] = set()
        self._step_began = 0.0
        self._idle = False
        self._step = 0
        self._holds = Holds(self._ask_about)
        self._wanted: dict[tuple[str, tuple[bytes, ...]], tuple[BlockWork, ...]] = {}
        # Which pages a preload will go to nobody knows; that it will be whole ones decides who checks it.
        self._whole = Chunk(np.zeros(blocks_per_chunk, np.int64), 0)
        self._all_count = True  # gauges are asked for in this step
        self._job_ended = False
        self._before_step: Any = None  # a device event, or the exception instead of one

    # ---- vLLM's interface

    def submit_load(
        self, job_id: int, src_spec: TransferPlan, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Files to KV blocks. Always True: the stock worker asserts it."""
        return self._submit(job_id, Kind.LOAD, src_spec, dst_spec, self._config.load_deadline_s)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: TransferPlan) -> bool:
        """KV blocks to files. Always True."""
        self._holds.submitted(job_id)
        return self._submit(job_id, Kind.STORE, dst_spec, src_spec, self._config.store_deadline_s)

    def get_finished(self) -> list[TransferResult]:
        """Every job ends as a success for vLLM; what failed is told beside it (design: "A failed load")."""
        results, self._refused = [*self._refused, *self._parts.reactor.take_finished()], []
        self._job_ended = bool(results)
        return [self._settle(result) for result in results]

    def wait(self, job_ids: set[int]) -> None:
        """Return when the jobs no longer touch KV blocks; ids may be of loads or long finished."""
        self._parts.reactor.flush(set(job_ids) & self._jobs.keys(), FLUSH_PATIENCE_S)

    def shutdown(self) -> None:
        """End the threads; may be called twice."""
        self._parts.close(STOP_TIMEOUT_S)

    # ---- called by the connector

    def describe(self, layouts: tuple[dict[str, Any], ...]) -> None:
        """What the KV tensors look like; goes to the scheduler with the first report."""
        self._layouts = layouts

    def take_invalid_blocks(self) -> set[int]:
        """Engine block ids that jobs finished since the last call failed to load."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self, base: OffloadingWorkerMetadata | None) -> WorkerReport:
        """This step's message to the scheduler, around what the stock worker has to say."""
        report = WorkerReport() if base is None else WorkerReport(base.completed_jobs, base.transfer_stats)
        report.failed_loads, self._failed_loads = self._failed_loads, {}
        report.failed_stores, self._failed_stores = self._failed_stores, {}
        report.layouts, self._layouts = self._layouts, ()
        if self._adapters is not None:
            report.adapters = {self._rank: self._adapters.held(self._step, again=self._idle)}
        report.step = self._step
        report.moves = self._moves()
        if self._all_count or self._job_ended:
            self._count(report)
        return report

    def _count(self, report: WorkerReport) -> None:
        """Rates and counters, and gauges where all ranks tell theirs."""
        parts = self._parts
        self._quarantined += sum(outcome.removed for outcome in parts.publisher.outcomes())
        counters = parts.reactor.snapshot()
        report.paces = {self._rank: self._pace(counters)}
        fallbacks = {**parts.fallbacks, **({"buffered": ""} if counters.direct_refused else {})}
        report.samples = self._reporter.samples(
            counters, fallbacks, parts.publisher.paused, self._quarantined, gauges=self._all_count
        )

    def step_began(self, note: StepNote | None) -> None:
        """vLLM begins a forward step, and has launched none of it yet."""
        if note is not None:
            self._idle, self._step, self._all_count = note.idle, note.number, note.count
            self._holds.add(note.held, pressed=note.pressed)
            if note.wants is not None:
                self._want(note.wants)
        self._step_began = time.monotonic()
        try:
            self._before_step = self._parts.device.record()
        except Exception as error:  # noqa: BLE001 - a driver raises what it likes; it costs this step's loads only
            self._before_step = error

    def wait_if_idle(self) -> None:
        """In a step that computes nothing: until a transfer ends, or a moment."""
        if self._idle and self._jobs and not self._refused:
            self._parts.reactor.wait_finished(IDLE_WAIT_S)

    def take_released(self) -> set[str]:
        """Requests that ended, and whose blocks are no longer needed."""
        return self._holds.take_released()

    def step_ended(self) -> None:
        """For the timeline."""
        begin, now = self._step_began, time.monotonic()
        # vLLM steps without a pause while requests wait for loads: thousands of empty steps tell nothing.
        if self._parts.trace is not None and now - begin >= SHORTEST_STEP_S:
            self._parts.trace.complete("forward", "engine", begin * 1e6, (now - begin) * 1e6, "engine")

    # ---- inside

    def _moves(self) -> dict[int, Moves]:
        # Of several of one block the last one counts.
        moves = dict(self._parts.reactor.take_moves(MOST_MOVES))
        came, left = (
            tuple(block_id_of(path) for path, here in moves.items() if here is side) for side in (True, False)
        )
        return {self._rank: Moves(came, left)} if moves else {}

    def _pace(self, counters: Counters) -> Pace:
        reads, writes = counters.reads, counters.writes
        return Pace((reads.bytes, reads.busy), (writes.bytes, writes.busy), self._block_bytes)

    def _want(self, wants: tuple[Want, ...]) -> None:
        """Hand the list to the reactor; what was in the last one is not put together again."""
        known, self._wanted = self._wanted, {}
        told = []
        for want in wants:
            blocks = want.space, want.keys
            works = known.get(blocks)
            if works is None:
                folder = part_dir(self._config.root_path, want.space, self._part)
                works = tuple(
                    BlockWork(block_path(folder, key), key, index, self._whole)
                    for index, key in enumerate(want.keys)
                )
            self._wanted[blocks] = works
            told.append(Wanted(works, want.held))
        self._parts.reactor.want(tuple(told))

    def _ask_about(self, jobs: frozenset[int], pressed: bool) -> Flush:
        patience = HOLD_PATIENCE_S if pressed else self._config.store_deadline_s
        return self._parts.reactor.ask(set(jobs), patience)

    def _submit(
        self, job_id: int, kind: Kind, plan: TransferPlan, blocks: GPULoadStoreSpec, deadline_s: float
    ) -> bool:
        try:
            self._tidy(plan.space)
            chunks = self._chunks(plan, blocks, kind)
            self._jobs[job_id] = _Submitted(plan, chunks)
            # Also on a rank that writes nothing: it has computed its share of the block. That the files of
            # others stay is no harm: the scheduler stores when all ranks have said what they computed with,
            # and ranks that differ have a namespace of their own (scheduler/postponed.py, adapters.py).
            if self._has_other_adapter(kind, plan):
                self._refuse(job_id, kind, plan, blocks, Fault.ADAPTER, _OTHER_WEIGHTS)
                return True
            if kind is Kind.STORE and not self._writes:
                # Another rank holds the same bytes and writes them.
                self._refused.append(JobResult(job_id, kind, (), 0, 0.0))
                return True
            folder = part_dir(self._config.root_path, plan.space, self._part)
            work = tuple(
                BlockWork(block_path(folder, key), key, index, chunk)
                for key, index, chunk in zip(plan.keys, plan.indices, chunks, strict=True)
            )
            # Blocks that are loaded may still be in use by the steps before (their last owner's), but not by
            # this one, whose kernels vLLM has launched already when it hands loads in (since 0.29).
            after = self._before_step if kind is Kind.LOAD else self._parts.device.record()
            if isinstance(after, Exception):
                raise after
            self._parts.reactor.submit(Job(job_id, kind, work, after, time.monotonic() + deadline_s))
        except Exception as error:
            # The stock worker asserts success, so whatever is wrong becomes a failed job.
            log.exception("py-kvcache: %s job %d could not be submitted", kind.value, job_id)
            self._refuse(job_id, kind, plan, blocks, Fault.CANCELLED, str(error))
        return True

    def _has_other_adapter(self, kind: Kind, plan: TransferPlan) -> bool:
        """Whether this worker's weights of the adapter are not those that the namespace is for."""
        if plan.adapter is None:
            return False
        if self._adapters is None:
            return True
        same = self._adapters.will_make if kind is Kind.LOAD else self._adapters.made
        return not same(plan.adapter)

    def _chunks(self, plan: TransferPlan, blocks: GPULoadStoreSpec, kind: Kind) -> tuple[Chunk, ...]:
        """The engine blocks of each storage block, in the plan's order."""
        # What is stored are whole chunks, perhaps with gaps between them; only a load may begin inside one.
        start = int(blocks.block_indices[0]) if kind is Kind.LOAD else 0
        chunks = tuple(split_chunks(blocks.block_ids, start, self._per_chunk))
        if len(chunks) != len(plan.keys):
            raise ValueError(f"{len(plan.keys)} keys for {len(chunks)} chunks")
        return chunks

    def _refuse(
        self,
        job_id: int,
        kind: Kind,
        plan: TransferPlan,
        blocks: GPULoadStoreSpec,
        fault: Fault,
        detail: str,
    ) -> None:
        if kind is Kind.LOAD:
            self._invalid.update(int(block) for block in blocks.block_ids)
        self._jobs[job_id] = _Submitted(plan, ())
        failed = BlockError(fault, plan.space, detail=detail)
        self._refused.append(
            JobResult(job_id, kind, tuple((n, failed) for n in range(len(plan.keys))), 0, 0.0)
        )

    def _settle(self, result: JobResult) -> TransferResult:
        submitted = self._jobs.pop(result.job_id)
        plan = submitted.plan
        if result.kind is Kind.LOAD and submitted.chunks and self._has_other_adapter(Kind.LOAD, plan):
            # It came while the load was under way; the request has not begun to compute.
            other = BlockError(Fault.ADAPTER, plan.space, detail=_OTHER_WEIGHTS)
            result = replace(result, failed=tuple((n, other) for n in range(len(plan.keys))), bytes=0)
        if result.failed:
            faults = {plan.keys[ordinal]: error.fault.value for ordinal, error in result.failed}
            book = self._failed_loads if result.kind is Kind.LOAD else self._failed_stores
            book[result.job_id] = Failures(plan.space, faults)
        if result.kind is Kind.LOAD:
            self._invalid.update(_block_ids(submitted.chunks, (ordinal for ordinal, _ in result.failed)))
        return TransferResult(result.job_id, True, result.bytes, result.seconds)

    def _tidy(self, space: str) -> None:
        """Once per namespace, in a thread: remove what a dead predecessor on this host left half-written."""
        if not self._writes or not space or space in self._tidied:
            return
        if len(self._tidied) >= _MOST_TIDIED:
            self._tidied.clear()  # to do it again is harmless
        self._tidied.add(space)
        self._parts.run_aside(lambda: remove_own_dead_temps(FileOps(), self._config.root_path, space))


def _block_ids(chunks: tuple[Chunk, ...], ordinals: Iterable[int]) -> set[int]:
    return {
        int(block) for ordinal in ordinals if ordinal < len(chunks) for block in chunks[ordinal].block_ids
    }
