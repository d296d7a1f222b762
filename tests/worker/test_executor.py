"""Plans in, finished jobs out: every job ends as a success for vLLM, and what failed is told beside it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the executor is a subclass of vLLM's worker")

import torch

from py_kvcache import metrics
from py_kvcache.config import parse_config
from py_kvcache.errors import BlockError, Fault
from py_kvcache.layout import block_path, parse_block_path, part_dir
from py_kvcache.plan import Adapter, Held, Moves, StepNote, TransferPlan, Want, WorkerReport
from py_kvcache.vllm_api import GPULoadStoreSpec, OffloadingWorkerMetadata
from py_kvcache.worker.counters import Counters
from py_kvcache.worker.executor import (
    FLUSH_PATIENCE_S,
    HOLD_PATIENCE_S,
    IDLE_WAIT_S,
    SHORTEST_STEP_S,
    Executor,
)
from py_kvcache.worker.jobs import Job, JobResult, Kind

SPACE = "model_0123456789abcdef"
PER_CHUNK = 4


class HandReactor:
    """Takes jobs and ends them when the test says so."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.finished: list[JobResult] = []
        self.flushed: list[tuple[set[int], float]] = []
        self.started = 0
        self.counters = Counters()
        self.broken: Exception | None = None
        self.waited: list[float] = []
        self.asked: list[Any] = []
        self.moves: list[tuple[str, bool]] = []
        self.wanted: list[Any] = []

    def take_moves(self, most: int) -> list[tuple[str, bool]]:
        moves, self.moves = self.moves[:most], self.moves[most:]
        return moves

    def want(self, wants: Any) -> None:
        self.wanted.append(wants)

    def start(self) -> None:
        self.started += 1

    def submit(self, job: Job) -> None:
        if self.broken is not None:
            raise self.broken
        self.jobs[job.job_id] = job

    def take_finished(self) -> list[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    def flush(self, job_ids: set[int], patience_s: float) -> None:
        self.flushed.append((set(job_ids), patience_s))

    def wait_finished(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)

    def ask(self, job_ids: set[int], patience_s: float) -> Any:
        question = SimpleNamespace(ids=job_ids, patience_s=patience_s, answered=threading.Event())
        self.asked.append(question)
        return question

    def snapshot(self) -> Counters:
        return self.counters.copy(0)

    def end(self, job_id: int, *failed: tuple[int, Fault]) -> None:
        job = self.jobs.pop(job_id)
        errors = tuple((n, BlockError(fault, job.blocks[n].path)) for n, fault in failed)
        self.finished.append(JobResult(job_id, job.kind, errors, 100, 0.5))


class Rig:
    """An executor over hand-driven parts."""

    def __init__(self, **given: Any) -> None:
        self.reactor = HandReactor()
        self.bars: list[tuple[Any, ...]] = []
        self.parts = SimpleNamespace(
            reactor=self.reactor,
            device=SimpleNamespace(record=lambda: "event"),
            publisher=SimpleNamespace(outcomes=list, paused=False),
            trace=None,
            fallbacks={},
            aside=[],
            closed=[],
        )
        self.parts.run_aside = self.parts.aside.append
        self.parts.close = self.parts.closed.append
        memory = torch.zeros((64, 32), dtype=torch.int8)
        caches = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=memory)],
            group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=32)]],
        )
        options = {"part": 0, "writes": True, **given}
        self.executor = Executor(
            parse_config({"root": "/cache", "load_deadline_s": 30, "store_deadline_s": 60}, {}),
            caches,
            blocks_per_chunk=PER_CHUNK,
            build=lambda *args: self.parts,
            **options,
        )

    def load(self, job: int, chunks: int, blocks: list[int], start: int = 0) -> TransferPlan:
        plan = TransferPlan(SPACE, [bytes([n]) * 32 + bytes(4) for n in range(chunks)], range(chunks))
        assert self.executor.submit_load(job, plan, gpu(blocks, start)) is True
        return plan

    def store(self, job: int, chunks: int, blocks: list[int]) -> TransferPlan:
        plan = TransferPlan(SPACE, [bytes([n]) * 32 + bytes(4) for n in range(chunks)], range(5, 5 + chunks))
        assert self.executor.submit_store(job, gpu(blocks, 20), plan) is True
        return plan

    def step(self, base: OffloadingWorkerMetadata | None = None) -> tuple[list[int], set[int], WorkerReport]:
        """What vLLM asks for at the end of a step, in its order."""
        results = self.executor.get_finished()
        assert all(result.success for result in results), "the stock worker asserts it"
        ended = [result.job_id for result in results]
        return ended, self.executor.take_invalid_blocks(), self.executor.report(base)


def gpu(blocks: list[int], start: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[start])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_load_becomes_a_job_with_one_block_per_key_in_order(rig: Rig):
    before = time.monotonic()
    rig.executor.step_began(None)
    rig.parts.device.record = lambda: "after the step's own kernels"
    plan = rig.load(7, chunks=2, blocks=list(range(10, 18)))
    job = rig.reactor.jobs[7]
    assert (job.kind, job.after, len(job.blocks)) == (Kind.LOAD, "event", 2)
    assert [block.key for block in job.blocks] == list(plan.keys)
    assert [block.index for block in job.blocks] == [0, 1]
    parsed = [parse_block_path(block.path) for block in job.blocks]
    assert [(p.namespace, p.part, p.key) for p in parsed] == [(SPACE, 0, key) for key in plan.keys]
    assert [(b.pages.block_ids.tolist(), b.pages.first) for b in job.blocks] == [
        ([10, 11, 12, 13], 0),
        ([14, 15, 16, 17], 0),
    ]
    assert before + 30 <= job.deadline <= time.monotonic() + 30


def test_a_store_has_its_own_deadline_and_takes_whole_chunks(rig: Rig):
    before = time.monotonic()
    rig.store(3, chunks=2, blocks=[9, 8, 7, 6, 1, 2, 3, 4])
    job = rig.reactor.jobs[3]
    assert job.kind is Kind.STORE
    assert [block.index for block in job.blocks] == [5, 6]
    assert [(b.pages.block_ids.tolist(), b.pages.first) for b in job.blocks] == [
        ([9, 8, 7, 6], 0),
        ([1, 2, 3, 4], 0),
    ]
    assert job.deadline >= before + 60


def test_a_load_that_begins_inside_a_chunk_reads_only_its_part_of_the_first(rig: Rig):
    rig.load(1, chunks=2, blocks=[10, 11, 12, 13, 14, 15], start=6)
    pages = [block.pages for block in rig.reactor.jobs[1].blocks]
    assert [(page.first, page.block_ids.tolist()) for page in pages] == [(2, [10, 11]), (0, [12, 13, 14, 15])]


def test_a_load_of_nothing_is_a_job_without_blocks(rig: Rig):
    rig.load(1, chunks=0, blocks=[], start=4)
    assert rig.reactor.jobs[1].blocks == ()


def test_jobs_go_to_the_ranks_own_part_of_the_namespace():
    rig = Rig(part=3)
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    assert parse_block_path(rig.reactor.jobs[1].blocks[0].path).part == 3


def test_a_load_that_worked_reports_no_block_and_no_failure(rig: Rig):
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    assert rig.step()[0] == []
    rig.reactor.end(1)
    ended, invalid, report = rig.step()
    assert (ended, invalid, report.failed_loads) == ([1], set(), {})


def test_the_blocks_of_a_failed_load_are_reported_in_the_step_that_ends_it_and_never_twice(rig: Rig):
    plan = rig.load(1, chunks=3, blocks=list(range(10, 22)))
    rig.reactor.end(1, (1, Fault.CHECKSUM), (2, Fault.CANCELLED))
    ended, invalid, report = rig.step()
    assert ended == [1]
    assert invalid == {14, 15, 16, 17, 18, 19, 20, 21}, "what was loaded before the failure stays valid"
    assert report.failed_loads[1].space == SPACE
    assert report.failed_loads[1].faults == {plan.keys[1]: "checksum", plan.keys[2]: "cancelled"}
    ended, invalid, report = rig.step()
    assert (ended, invalid, report.failed_loads) == ([], set(), {})


def test_only_the_loaded_part_of_a_partial_chunk_is_reported(rig: Rig):
    rig.load(1, chunks=2, blocks=[10, 11, 12, 13, 14, 15], start=6)
    rig.reactor.end(1, (0, Fault.MISSING))
    assert rig.step()[1] == {10, 11}


def test_blocks_of_several_failed_loads_are_reported_together(rig: Rig):
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    rig.load(2, chunks=1, blocks=[5, 6, 7, 8])
    rig.reactor.end(1, (0, Fault.IO))
    rig.reactor.end(2, (0, Fault.TIMEOUT))
    ended, invalid, report = rig.step()
    assert (sorted(ended), invalid) == ([1, 2], set(range(1, 9)))
    assert {fault for failures in report.failed_loads.values() for fault in failures.faults.values()} == {
        "io",
        "timeout",
    }


def test_a_failed_store_is_a_success_for_vllm_and_invalidates_no_block(rig: Rig):
    plan = rig.store(4, chunks=2, blocks=list(range(1, 9)))
    rig.reactor.end(4, (1, Fault.NO_SPACE))
    ended, invalid, report = rig.step()
    assert (ended, invalid) == ([4], set())
    assert report.failed_stores[4].faults == {plan.keys[1]: "no_space"}
    assert report.failed_loads == {}


def test_a_rank_that_does_not_write_acknowledges_a_store_without_doing_it():
    rig = Rig(writes=False)
    rig.store(4, chunks=1, blocks=[1, 2, 3, 4])
    assert rig.reactor.jobs == {}
    ended, invalid, report = rig.step()
    assert (ended, invalid, report.failed_stores) == ([4], set(), {})
    assert rig.step()[0] == []
    assert rig.parts.aside == [], "and removes nobody's leftovers"


def test_a_rank_that_does_not_write_loads_like_the_others():
    rig = Rig(writes=False, part=2)
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    assert 1 in rig.reactor.jobs


@pytest.mark.parametrize("what", ["reactor", "device", "count", "space", "key"])
def test_a_load_that_cannot_be_submitted_is_a_failed_one(
    rig: Rig, what: str, caplog: pytest.LogCaptureFixture
):
    blocks, keys, space = [1, 2, 3, 4], [bytes(36)], SPACE
    if what == "reactor":
        rig.reactor.broken = RuntimeError("no")
    elif what == "device":
        rig.parts.device.record = lambda: 1 / 0
        rig.executor.step_began(None)
    elif what == "count":
        blocks = [1, 2, 3, 4, 5]
    elif what == "space":
        space = "../escape"
    else:
        keys = [b"short"]
    plan = TransferPlan(space, keys, [0])
    assert rig.executor.submit_load(9, plan, gpu(blocks)) is True
    assert rig.reactor.jobs == {}
    ended, invalid, report = rig.step()
    assert (ended, invalid) == ([9], set(blocks))
    assert list(report.failed_loads[9].faults) == keys
    assert rig.step()[:2] == ([], set())
    assert "could not be submitted" in caplog.text
    rig.parts.device.record = lambda: "event"
    rig.executor.step_began(None)
    rig.reactor.broken = None
    rig.load(10, chunks=1, blocks=[1, 2, 3, 4])
    assert 10 in rig.reactor.jobs, "the next step is not bound by it"


def test_a_store_that_cannot_be_submitted_is_a_failed_one(rig: Rig):
    rig.reactor.broken = RuntimeError("no")
    plan = rig.store(9, chunks=1, blocks=[1, 2, 3, 4])
    ended, invalid, report = rig.step()
    assert (ended, invalid) == ([9], set())
    assert list(report.failed_stores[9].faults) == list(plan.keys)


class HandWatch:
    """What the worker has of each adapter, set by the test."""

    def __init__(self) -> None:
        self.before = self.next = True

    def made(self, adapter: Adapter) -> bool:
        assert adapter == ADAPTER
        return self.before

    def will_make(self, adapter: Adapter) -> bool:
        assert adapter == ADAPTER
        return self.next

    def held(self, step: int, again: bool) -> Held:
        return Held(step, {7: ("name", "identity")} if again else None)


ADAPTER = Adapter(7, "name", ("identity",))


@pytest.mark.parametrize("kind", ["load", "store"])
def test_blocks_of_an_adapter_move_only_while_the_worker_has_its_weights(kind: str):
    watch = HandWatch()
    rig = Rig(adapters=watch)
    for job, (before, coming) in enumerate(((True, False), (False, True))):
        watch.before, watch.next = before, coming
        plan = TransferPlan(SPACE, [bytes(36)], (0,), ADAPTER)
        if kind == "load":
            assert rig.executor.submit_load(job, plan, gpu([1, 2, 3, 4]))
        else:
            assert rig.executor.submit_store(job, gpu([1, 2, 3, 4]), plan)
        allowed = coming if kind == "load" else before
        assert (job in rig.reactor.jobs) is allowed
        if not allowed:
            ended, invalid, report = rig.step()
            assert ended == [job] and invalid == ({1, 2, 3, 4} if kind == "load" else set())
            failures = report.failed_loads if kind == "load" else report.failed_stores
            assert failures[job].faults == {plan.keys[0]: "adapter"}


def test_a_load_that_other_weights_overtook_is_computed_again():
    watch = HandWatch()
    rig = Rig(adapters=watch)
    plan = TransferPlan(SPACE, [bytes(36), b"1" * 36], (0, 1), ADAPTER)
    assert rig.executor.submit_load(1, plan, gpu([1, 2, 3, 4, 5, 6, 7, 8]))
    watch.next = False
    rig.reactor.end(1)
    ended, invalid, report = rig.step()
    assert ended == [1] and invalid == {1, 2, 3, 4, 5, 6, 7, 8}
    assert report.failed_loads[1].faults == dict.fromkeys(plan.keys, "adapter")


def test_a_rank_that_writes_nothing_says_too_that_it_had_other_weights():
    watch = HandWatch()
    rig = Rig(adapters=watch, writes=False)
    plan = TransferPlan(SPACE, [bytes(36)], (0,), ADAPTER)
    for job, watch.before in ((1, True), (2, False)):
        assert rig.executor.submit_store(job, gpu([1, 2, 3, 4]), plan)
    ended, _, report = rig.step()
    assert (ended, rig.reactor.jobs) == ([1, 2], {})
    assert {job: failures.faults for job, failures in report.failed_stores.items()} == {
        2: {plan.keys[0]: "adapter"}
    }


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_worker_that_watches_no_adapters_moves_no_block_of_one(kind: str):
    rig = Rig()
    plan = TransferPlan(SPACE, [bytes(36)], (0,), ADAPTER)
    if kind == "load":
        assert rig.executor.submit_load(1, plan, gpu([1, 2, 3, 4]))
    else:
        assert rig.executor.submit_store(1, gpu([1, 2, 3, 4]), plan)
    assert rig.reactor.jobs == {} and rig.step()[0] == [1]


def test_every_report_says_of_which_step_it_is_and_idle_ones_say_all():
    rig = Rig(adapters=HandWatch(), rank=3)
    rig.executor.step_began(StepNote(False, {}, 5))
    assert rig.step()[2].adapters == {3: Held(5, None)}
    rig.executor.step_began(StepNote(True, {}, 6))
    assert rig.step()[2].adapters == {3: Held(6, {7: ("name", "identity")})}
    assert Rig().step()[2].adapters == {}


def test_what_waiting_requests_will_want_goes_to_the_reactor_as_paths_of_this_ranks_part():
    rig = Rig(rank=1)
    keys = tuple(bytes([n]) * 32 + bytes(4) for n in range(3))
    first, second = Want(SPACE, keys), Want(SPACE, keys[:1])
    rig.executor.step_began(StepNote(False, {}, 1, wants=(first,)))
    ((works, held),) = rig.reactor.wanted.pop()
    assert not held
    folder = part_dir("/cache", SPACE, 0)
    assert [work.path for work in works] == [block_path(folder, key) for key in keys]
    assert [work.index for work in works] == [0, 1, 2]
    assert all(len(work.pages.block_ids) == PER_CHUNK for work in works), "whole blocks, wherever they go"
    rig.executor.step_began(StepNote(False, {}, 2))
    assert rig.reactor.wanted == [], "nothing has changed"
    loading = Want(SPACE, keys, held=True)
    rig.executor.step_began(StepNote(False, {}, 3, wants=(loading, second)))
    same, fresh = rig.reactor.wanted.pop()
    assert same.works is works and same.held
    assert len(fresh.works) == 1 and not fresh.held
    rig.executor.step_began(StepNote(False, {}, 4, wants=()))
    assert rig.reactor.wanted == [()]


def test_what_came_into_memory_and_left_it_is_reported_once_and_what_was_moved_always():
    rig = Rig(rank=2)
    rig.executor.step_began(StepNote(False, {}, 4))
    first, second, third = (bytes([n]) * 32 + bytes(4) for n in range(3))
    folder = part_dir("/cache", SPACE, 0)
    for key, here in ((first, True), (second, True), (second, False), (third, False), (third, True)):
        rig.reactor.moves.append((block_path(folder, key), here))
    rig.reactor.counters.reads.bytes, rig.reactor.counters.reads.busy = 4096, 0.5
    report = rig.step()[2]
    assert report.moves == {2: Moves(((SPACE, first), (SPACE, third)), ((SPACE, second),))}
    assert report.step == 4
    assert report.paces[2].reads == (4096, 0.5) and report.paces[2].block_bytes == PER_CHUNK * 32
    assert rig.step()[2].moves == {}
    rig.reactor.moves = [(block_path(folder, n.to_bytes(32, "big") + bytes(4)), True) for n in range(2_500)]
    assert [len(rig.step()[2].moves[2].came) for _ in range(3)] == [1_000, 1_000, 500]


def test_when_no_thread_can_be_started_a_submission_still_does_not_raise(rig: Rig):
    def no_thread(work: Any) -> None:
        raise RuntimeError("can't start new thread")

    rig.parts.run_aside = no_thread
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    assert rig.step()[0] == [1]


def test_leftovers_are_looked_for_once_per_namespace_and_not_in_the_step(rig: Rig):
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    rig.store(2, chunks=1, blocks=[1, 2, 3, 4])
    assert len(rig.parts.aside) == 1


def test_waiting_asks_the_reactor_about_live_jobs_only(rig: Rig):
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    rig.store(2, chunks=1, blocks=[5, 6, 7, 8])
    rig.load(3, chunks=1, blocks=[1, 2, 3, 4])
    rig.reactor.end(3)
    rig.step()
    rig.executor.wait({1, 2, 3, 99})
    assert rig.reactor.flushed == [({1, 2}, FLUSH_PATIENCE_S)]


@pytest.mark.parametrize("ids", [set(), {99}, {3}])
def test_waiting_for_unknown_or_finished_jobs_returns(rig: Rig, ids: set[int]):
    rig.load(3, chunks=1, blocks=[1, 2, 3, 4])
    rig.reactor.end(3)
    rig.step()
    rig.executor.wait(ids)
    assert all(jobs == set() for jobs, _ in rig.reactor.flushed)


def test_a_report_carries_what_the_stock_worker_had_to_say(rig: Rig):
    report = rig.step(OffloadingWorkerMetadata(completed_jobs={5: 1}))[2]
    assert isinstance(report, WorkerReport)
    assert report.completed_jobs == {5: 1}


def test_every_step_has_a_report_of_our_type_even_if_nothing_happened(rig: Rig):
    assert isinstance(rig.step(None)[2], WorkerReport)
    assert rig.step(None)[2].completed_jobs == {}


def test_layouts_go_with_the_first_report_only(rig: Rig):
    rig.executor.describe(({"slab": False},))
    assert rig.step()[2].layouts == ({"slab": False},)
    assert rig.step()[2].layouts == ()


def test_gauges_are_told_when_all_ranks_are_asked_and_counters_also_when_a_job_ends(rig: Rig):
    def step(*, count: bool = False) -> WorkerReport:
        rig.executor.step_began(StepNote(False, {}, 1, count=count))
        return rig.step()[2]

    assert step(count=True).samples.gauges
    assert step().samples.is_empty() and not step().paces
    rig.reactor.counters.loaded_bytes = 10
    rig.load(7, chunks=1, blocks=[1, 2, 3, 4])
    assert not step().paces, "it is under way"
    rig.reactor.end(7)
    report = step()
    assert report.samples.counters[metrics.LOAD_BYTES.name, ()] == 10 and report.paces
    assert not report.samples.gauges, "another rank's job has not ended, perhaps: half a sum is none"
    assert not step().paces
    assert step(count=True).samples.gauges


def test_samples_are_increments_and_quarantined_files_are_summed(rig: Rig):
    rig.reactor.counters.loaded_bytes = 10
    rig.parts.publisher.outcomes = lambda: [SimpleNamespace(removed=True), SimpleNamespace(removed=False)]
    first, second = rig.step()[2].samples, rig.step()[2].samples
    assert first.counters[metrics.LOAD_BYTES.name, ()] == 10
    assert (metrics.LOAD_BYTES.name, ()) not in second.counters
    assert second.counters[metrics.QUARANTINED.name, ()] == 1


def test_a_refused_direct_read_shows_as_a_fallback(rig: Rig):
    assert rig.step()[2].samples.gauges[metrics.FALLBACK.name, ("buffered",)] == 0
    rig.reactor.counters.direct_refused = 1
    assert rig.step()[2].samples.gauges[metrics.FALLBACK.name, ("buffered",)] == 1


def test_steps_are_drawn_on_the_timeline_when_there_is_one_and_empty_ones_are_left_out(rig: Rig):
    rig.executor.step_ended()
    rig.parts.trace = SimpleNamespace(complete=lambda *bar: rig.bars.append(bar))
    rig.executor.step_began(None)
    rig.executor._step_began += 60  # however slow this machine is, that step was short
    rig.executor.step_ended()
    rig.executor.step_began(None)
    time.sleep(2 * SHORTEST_STEP_S)
    rig.executor.step_ended()
    name, _lane, begin, duration, _ = rig.bars[0]
    assert (len(rig.bars), name) == (1, "forward")
    assert begin > 0
    assert duration >= 0


def test_the_reactor_is_started_once_and_the_parts_are_closed_at_shutdown(rig: Rig):
    assert rig.reactor.started == 1
    rig.executor.shutdown()
    rig.executor.shutdown()
    assert len(rig.parts.closed) == 2, "closing twice is the parts' own affair"


def test_the_interface_of_vllm_is_complete():
    assert not Executor.__abstractmethods__


def idle(held: dict[str, frozenset[int]] | None = None, *, is_idle: bool = True) -> StepNote:
    return StepNote(is_idle, held or {})


def test_a_step_without_computation_waits_for_transfers_and_only_then(rig: Rig):
    rig.executor.step_began(idle())
    rig.executor.wait_if_idle()
    assert rig.reactor.waited == [], "nothing is under way"
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    rig.executor.wait_if_idle()
    assert rig.reactor.waited == [IDLE_WAIT_S]
    rig.executor.step_began(idle(is_idle=False))
    rig.executor.wait_if_idle()
    assert rig.reactor.waited == [IDLE_WAIT_S], "other requests are being computed"


def test_a_result_that_is_there_already_is_not_waited_for(rig: Rig):
    rig.executor.step_began(idle())
    rig.load(1, chunks=1, blocks=[1, 2, 3, 4])
    rig.reactor.broken = RuntimeError("no")
    rig.load(2, chunks=1, blocks=[5, 6, 7, 8])
    rig.executor.wait_if_idle()
    assert rig.reactor.waited == []


def test_blocks_of_an_ended_request_are_let_go_when_its_stores_have_copied_them(rig: Rig):
    rig.store(3, chunks=1, blocks=[1, 2, 3, 4])
    rig.executor.step_began(idle({"a": frozenset({3, 4})}))
    assert rig.executor.take_released() == set()
    rig.executor.step_began(idle())
    assert rig.executor.take_released() == set(), "job 4 has not been handed in yet"
    assert rig.reactor.asked == []
    rig.store(4, chunks=1, blocks=[5, 6, 7, 8])
    assert rig.executor.take_released() == set()
    (question,) = rig.reactor.asked
    assert (question.ids, question.patience_s) == ({3, 4}, HOLD_PATIENCE_S)
    question.answered.set()
    assert rig.executor.take_released() == {"a"}
    assert rig.executor.take_released() == set(), "vLLM is told once"


def test_a_request_without_stores_is_let_go_in_the_next_step_but_not_in_the_same(rig: Rig):
    rig.executor.step_began(idle({"a": frozenset()}))
    assert rig.executor.take_released() == set()
    assert rig.executor.take_released() == set()
    (question,) = rig.reactor.asked
    question.answered.set()
    assert rig.executor.take_released() == {"a"}
