"""Messages between scheduler and workers."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("vllm", reason="plans are subclasses of vLLM's own messages")

from py_kvcache import metrics
from py_kvcache.plan import Failures, Held, TransferPlan, WorkerReport
from py_kvcache.vllm_api import LoadStoreSpec, OffloadingWorkerMetadata

KEYS = [bytes([n]) * 36 for n in range(3)]


def report(jobs: dict[int, int] | None = None) -> WorkerReport:
    return WorkerReport(completed_jobs=dict(jobs or {}))


def test_a_plan_travels_as_vllms_own_type_and_survives_pickling():
    plan = TransferPlan("space", KEYS, [4, 5, 6])
    copy = pickle.loads(pickle.dumps(plan))
    assert isinstance(copy, LoadStoreSpec)
    assert (copy.space, copy.keys, copy.indices) == ("space", tuple(KEYS), (4, 5, 6))


def test_a_plan_costs_about_forty_bytes_a_block():
    def size(blocks: int) -> int:
        keys = [n.to_bytes(32, "big") + bytes(4) for n in range(blocks)]
        return len(pickle.dumps(TransferPlan("space", keys, range(blocks))))

    assert (size(4_000) - size(2_000)) / 2_000 < 45


def test_a_plan_whose_lists_differ_in_length_is_refused():
    with pytest.raises(ValueError, match="3 keys but 2 indices"):
        TransferPlan("space", KEYS, [0, 1])


def test_a_plan_shows_its_size_and_not_its_bytes():
    assert repr(TransferPlan("space", KEYS, [0, 1, 2])) == "TransferPlan(space, 3 blocks)"


def test_a_report_survives_pickling():
    mine = report({1: 1})
    mine.failed_loads[1] = Failures("space", {KEYS[0]: "io"})
    mine.layouts = ({"slab": False},)
    mine.samples.add(metrics.LOAD_BYTES, 3)
    copy = pickle.loads(pickle.dumps(mine))
    assert copy.failed_loads[1].faults == {KEYS[0]: "io"}
    assert copy.layouts == ({"slab": False},)
    assert copy.samples == mine.samples


def test_joining_ranks_counts_a_job_once_for_each():
    joined = report({1: 1, 2: 1}).aggregate(report({1: 1}))
    assert isinstance(joined, WorkerReport)
    assert joined.completed_jobs == {1: 2, 2: 1}


def test_a_block_that_failed_on_any_rank_has_failed():
    mine, other = report(), report()
    mine.failed_loads = {1: Failures("space", {KEYS[0]: "io"}), 2: Failures("space", {KEYS[2]: "io"})}
    other.failed_loads = {
        1: Failures("space", {KEYS[1]: "missing"}),
        3: Failures("space", {KEYS[0]: "timeout"}),
    }
    mine.failed_stores = {7: Failures("space", {KEYS[0]: "no_space"})}
    joined = mine.aggregate(other)
    assert joined.failed_loads[1].faults == {KEYS[0]: "io", KEYS[1]: "missing"}
    assert set(joined.failed_loads) == {1, 2, 3}
    assert joined.failed_stores[7].faults == {KEYS[0]: "no_space"}
    assert mine.failed_loads[1].faults == {KEYS[0]: "io"}, "the ranks' own reports stay as they were"


def test_joining_ranks_keeps_what_each_said_of_its_adapters():
    mine, other = report(), report()
    mine.adapters = {0: Held(3, {1: ("name", "one")})}
    other.adapters = {1: Held(3, None)}
    assert mine.aggregate(other).adapters == {0: Held(3, {1: ("name", "one")}), 1: Held(3, None)}


def test_samples_are_summed_over_ranks_and_flags_are_the_largest():
    mine, other = report(), report()
    for rank, flag in ((mine, 0), (other, 1)):
        rank.samples.add(metrics.LOAD_BYTES, 10)
        rank.samples.set(metrics.STORES_PAUSED, flag)
    joined = mine.aggregate(other).samples
    assert joined.counters[metrics.LOAD_BYTES.name, ()] == 20
    assert joined.gauges[metrics.STORES_PAUSED.name, ()] == 1


def test_layouts_of_all_ranks_arrive():
    mine, other = report(), report()
    mine.layouts, other.layouts = ({"rank": 0},), ({"rank": 1},)
    assert mine.aggregate(other).layouts == ({"rank": 0}, {"rank": 1})


def test_three_ranks_join_like_two():
    ranks = [report({5: 1}) for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.failed_stores = {5: Failures("space", {KEYS[number]: "io"})}
    joined = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert joined.completed_jobs == {5: 3}
    assert set(joined.failed_stores[5].faults) == set(KEYS)


def test_a_rank_that_sends_vllms_stock_message_is_joined_too():
    mine = report({1: 1})
    mine.failed_loads = {1: Failures("space", {KEYS[0]: "io"})}
    joined = mine.aggregate(OffloadingWorkerMetadata(completed_jobs={1: 1}))
    assert joined.completed_jobs == {1: 2}
    assert joined.failed_loads[1].faults == {KEYS[0]: "io"}
