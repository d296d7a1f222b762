"""Stores through the reactor: loads go first, a failure publishes nothing and leaves nothing behind."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace

import pytest
from worker_doubles import FILE, HOLD, LOSE, PAYLOAD, Rig, file_of, payload_of

from py_kvcache.errors import Fault
from py_kvcache.worker.jobs import Job, Kind


def ops(rig: Rig, *names: str) -> list[tuple[str, str]]:
    return [entry for entry in rig.world.log if entry[0] in names]


# ---- when all is well


def test_a_store_publishes_every_block_with_its_bytes_and_footer(rig):
    r = rig()
    r.store(1, 9)
    r.run()
    assert r.results[1].failed == ()
    assert r.results[1].bytes == 9 * PAYLOAD
    assert all(r.stored(1, n) for n in range(9))
    r.assert_idle()


def test_what_was_stored_can_be_loaded(rig):
    r = rig()
    r.store(1, 5)
    r.run()
    blocks = tuple(replace(block, pages=(2, n)) for n, block in enumerate(r.submitted[1].blocks))
    r.hand_in(Job(2, Kind.LOAD, blocks, None, r.clock.now + 30))
    r.run()
    assert r.results[2].failed == ()
    assert [r.device.memory[2, n] for n in range(5)] == [payload_of((1, n)) for n in range(5)]
    r.assert_idle()


def test_a_file_that_is_there_already_is_success_without_a_write(rig):
    r = rig()
    r.world.files[r.path(1, 1)] = file_of((1, 1), 1)
    r.store(1, 3)
    r.run()
    assert r.results[1].failed == ()
    assert sorted(r.publisher.published) == [r.path(1, 0), r.path(1, 2)]
    assert len(ops(r, "write")) == 2
    assert r.reactor.snapshot().existed == 1
    r.assert_idle()


def test_losing_the_race_at_the_end_is_success_too(rig):
    r = rig()
    r.world.rule("commit", HOLD)
    r.store(1, 1)
    r.run(10)
    r.world.files[r.path(1, 0)] = file_of((1, 0))
    r.world.release()
    r.run()
    assert r.results[1].failed == ()
    assert r.publisher.published == []
    r.assert_idle()


def test_a_slot_comes_back_as_soon_as_its_write_has_ended(rig):
    r = rig()
    r.world.rule("commit", HOLD)
    r.store(1, 3)
    r.run(20)
    assert r.staging.used == 0
    assert 1 not in r.results
    r.world.release()
    r.run()
    r.assert_idle()


def test_stores_leave_the_reserved_slots_alone_and_keep_to_the_io_depth(rig):
    r = rig(slots=10, reserve=7, io_depth=16)
    r.world.rule("write", HOLD)
    r.store(1, 50)
    r.run(20)
    assert (r.staging.free, r.staging.used) == (7, 3)
    r = rig(slots=20, reserve=2, io_depth=6)
    r.world.rule("write", HOLD)
    r.store(1, 50)
    r.run(20)
    assert len(r.world.held("write")) == 6


def test_stores_leave_some_of_the_rings_workers_to_reads(rig):
    r = rig(slots=20, reserve=2, io_depth=16, store_depth=3, lookahead=16)
    r.world.rule("write", HOLD)
    r.store(1, 50)
    r.run(20)
    assert len(r.world.held("write")) == 3
    r.load(2, 30)
    r.run(20)
    assert r.results[2].failed == ()


@pytest.mark.parametrize(("reserve", "reads"), [(8, 8), (3, 3), (12, 8)])
def test_hung_writes_leave_loads_their_reserve_and_no_more(rig, reserve, reads):
    r = rig(slots=20, reserve=reserve, io_depth=8, lookahead=16)
    r.world.rule("write", HOLD)
    r.world.rule("read", HOLD)
    r.store(1, 50)
    r.run(20)
    r.load(2, 50)
    r.run(20)
    assert (len(r.world.held("write")), len(r.world.held("read"))) == (8, reads)


def test_unfinished_files_are_bounded_however_slow_publishing_is(rig):
    r = rig(store_files=7)
    r.world.rule("commit", HOLD)
    r.store(1, 100)
    r.run(60)
    assert len(r.world.held("commit")) == 7
    assert len(r.world.fds) == 7
    r.world.release()
    r.run(300)
    assert r.results[1].failed == ()
    r.assert_idle()


# ---- loads first


def test_a_read_behind_five_hundred_queued_writes_is_next(rig):
    r = rig(slots=6, reserve=3, io_depth=4)
    r.world.rule("write", HOLD)
    for job in range(500):
        r.store(job, 1)
    r.run(40)
    writing = len(ops(r, "write"))
    r.load(1000, 1)
    r.run(10)
    assert r.results[1000].failed == ()
    assert len(ops(r, "write")) == writing
    r.world.release()


@pytest.mark.parametrize("depth", [1, 2, 16])
def test_loads_go_on_while_every_write_hangs_for_ever(rig, depth):
    r = rig(slots=3, reserve=1, io_depth=depth)
    r.world.rule("write", LOSE)
    r.store(1, 20)
    r.run(10)
    for job in range(2, 12):
        r.load(job, 5)
    r.run(300)
    assert all(r.results[job].failed == () for job in range(2, 12))
    r.assert_well()


def test_a_store_is_not_begun_while_loads_fill_the_depth(rig):
    r = rig(slots=12, reserve=4, io_depth=4, lookahead=8)
    r.world.rule("read", HOLD)
    r.load(1, 30)
    r.run(5)
    r.store(2, 5)
    r.run(20)
    # One store may always go on, else stores would wait for a pause between loads.
    assert len(ops(r, "copy_out")) <= 5
    assert len(r.world.held("read")) == 4
    assert r.reactor.snapshot().io_in_flight <= 5


# ---- the bounded queue


def test_the_store_queue_is_bounded_and_what_is_dropped_is_counted(rig):
    r = rig(max_queued_stores=10)
    r.world.rule("write", HOLD)
    for job in range(1000):
        r.store(job, 1)
        if job % 50 == 0:
            r.step()
        assert r.reactor.snapshot().queued["store"] <= 10
    r.run(40)
    dropped = [job for job in range(1000) if job in r.results and r.faults(job) == {0: Fault.QUEUE_FULL}]
    assert len(dropped) > 950
    assert r.reactor.snapshot().dropped == {("store", "queue_full"): len(dropped)}
    r.world.release()
    r.run(300)
    assert len(r.results) == 1000
    r.assert_idle()


def test_of_a_job_that_does_not_fit_the_head_of_the_chain_is_kept(rig):
    r = rig(max_queued_stores=4)
    r.store(1, 10)
    r.run()
    assert r.faults(1) == dict.fromkeys(range(4, 10), Fault.QUEUE_FULL)
    assert [r.stored(1, n) for n in range(4)] == [True] * 4
    r.assert_idle()


def test_a_thousand_blocks_at_a_megabyte_a_second_stay_in_bounds_and_no_load_waits_for_them(rig):
    r = rig(slots=12, io_depth=8, max_queued_stores=100, store_bytes_per_s=1_000_000)
    began, most, loads = r.clock.now, 0, 0
    for number in range(1000):  # ten times as fast as they are written
        r.store(number, 1, seconds=1e6)
        r.step(FILE / 10_000_000)
        most = max(most, r.reactor.snapshot().queued["store"])
        if number % 100 == 50:
            r.load(5000 + number, 20)
            r.run(60)
            assert r.results[5000 + number].failed == ()
            loads += 1
    dropped = r.reactor.snapshot().dropped[("store", "queue_full")]
    assert (most, loads) == (100, 10)
    assert len([job for job in r.results if job < 5000 and r.faults(job)]) == dropped > 500
    r.live(lambda: len(r.results) == 1010)
    written = 1000 - dropped
    assert sum(r.stored(job, 0) for job in range(1000)) == written
    # After a burst of one second at most.
    assert written * FILE <= 1_000_000 * (r.clock.now - began + 1) + FILE
    r.assert_idle()


# ---- failures


@pytest.mark.parametrize(
    ("op", "fate", "fault"),
    [
        ("copy_out", "gone", Fault.DEVICE),
        ("seal", Fault.IO, Fault.IO),
        ("create", -errno.EACCES, Fault.IO),
        ("create", -errno.ENOSPC, Fault.NO_SPACE),
        ("create", Fault.PAUSED, Fault.PAUSED),
        ("write", -errno.EIO, Fault.IO),
        ("write", -errno.ENOSPC, Fault.NO_SPACE),
        ("write", -errno.EDQUOT, Fault.NO_SPACE),
        ("write", 0, Fault.IO),
        ("commit", -errno.EIO, Fault.IO),
    ],
)
def test_a_store_that_fails_at_any_stage_leaves_nothing_behind(rig, op, fate, fault):
    r = rig()
    r.world.rule(op, fate, path="/1/2" if op in ("create", "commit", "write") else "", times=1)
    r.store(1, 5)
    r.run()
    assert fault in r.faults(1).values()
    for ordinal in r.faults(1):
        assert r.path(1, ordinal) not in r.world.files
    r.assert_idle()
    r.world.release()
    r.store(2, 5)
    r.run()
    assert r.results[2].failed == ()
    r.assert_idle()


def test_an_error_on_the_second_write_of_a_block_publishes_nothing(rig):
    r = rig(direct=False)
    r.world.rule("write", 4096, times=1)
    r.world.rule("write", -errno.EIO, times=1)
    r.store(1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    assert r.publisher.published == []
    assert r.world.files == {}
    r.assert_idle()


@pytest.mark.parametrize("direct", [True, False])
def test_einval_at_every_write_is_an_error_and_no_endless_retry(rig, direct):
    r = rig(direct=direct)
    r.world.rule("write", -errno.EINVAL)
    r.store(1, 1)
    r.run(200)
    assert r.faults(1) == {0: Fault.IO}
    assert len(ops(r, "write")) == (2 if direct else 1), "once more without O_DIRECT"
    assert r.reactor.snapshot().direct is direct, "nothing was proved about O_DIRECT"
    assert r.world.files == {}
    r.assert_idle()


def test_short_writes_are_continued_until_all_bytes_are_there(rig):
    for direct in (False, True):
        r = rig(direct=direct)
        r.world.rule("write", 5000, times=3)
        r.store(1, 2)
        r.run()
        assert r.results[1].failed == ()
        assert all(r.stored(1, n) for n in range(2))
        assert r.reactor.snapshot().retries == 3
        r.assert_idle()


def test_a_full_volume_ends_the_job_instead_of_copying_the_rest_for_nothing(rig):
    r = rig()
    r.world.rule("create", -errno.ENOSPC)
    r.store(1, 100)
    r.run(200)
    assert set(r.faults(1).values()) == {Fault.NO_SPACE}
    assert len(ops(r, "copy_out")) <= 4
    r.assert_idle()


def test_while_stores_are_paused_nothing_is_copied(rig):
    r = rig()
    r.publisher.refusing = True
    r.store(1, 5)
    r.run()
    assert set(r.faults(1).values()) == {Fault.PAUSED}
    assert ops(r, "copy_out") == []
    assert r.reactor.snapshot().dropped == {("store", "paused"): 5}
    r.assert_idle()


def test_the_publisher_is_told_that_the_volume_is_full(rig):
    r = rig()
    r.world.rule("write", -errno.ENOSPC)
    r.store(1, 1)
    r.run()
    assert [error.fault for error in r.publisher.abandoned] == [Fault.NO_SPACE]


def test_a_launch_that_raises_fails_the_block_only(rig):
    r = rig()
    r.device.refuse["copy_out"] = RuntimeError("no device")
    r.store(1, 2)
    r.run()
    assert set(r.faults(1).values()) == {Fault.DEVICE}
    r.assert_idle()


def test_where_direct_writes_are_refused_stores_go_buffered_with_one_warning(rig, caplog):
    r = rig(slots=12, io_depth=12)
    r.world.refuse_direct = "write"
    with caplog.at_level(logging.WARNING):
        r.store(1, 20)
        r.run(200)
    assert r.results[1].failed == ()
    assert all(r.stored(1, n) for n in range(20))
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1
    assert not r.publisher.direct
    r.assert_idle()


# ---- deadlines


@pytest.mark.parametrize("op", ["seal", "create", "write", "commit"])
def test_a_store_that_hangs_is_reported_at_its_deadline_and_cleaned_up_afterwards(rig, op):
    r = rig()
    r.world.rule(op, HOLD)
    r.store(1, 20, seconds=60)
    r.run(20)
    r.step(59)
    assert 1 not in r.results
    r.step(2)
    assert set(r.faults(1).values()) == {Fault.TIMEOUT}
    r.world.release()
    r.run()
    r.assert_idle()
    if op != "commit":  # a commit that was under way may still win, with bytes that are all there
        assert r.world.files == {}


def test_a_copy_from_the_device_is_waited_for_past_the_deadline(rig):
    r = rig()
    r.world.rule("copy_out", HOLD)
    r.store(1, 20, seconds=60)
    r.run(5)
    r.step(61)
    assert 1 not in r.results
    r.world.release()
    r.run()
    assert set(r.faults(1).values()) == {Fault.TIMEOUT}
    assert r.world.files == {}
    assert ops(r, "seal") == []
    r.assert_idle()


def test_a_file_created_after_the_deadline_is_abandoned(rig):
    r = rig()
    r.world.rule("create", HOLD)
    r.store(1, 2)
    r.run(10)
    r.step(61)
    assert r.staging.used == 0  # a hung create holds no memory
    r.world.release()
    r.run()
    assert r.world.files == {}
    r.assert_idle()


def test_a_write_that_hangs_keeps_its_slot_and_is_abandoned_when_the_kernel_lets_go(rig):
    r = rig()
    r.world.rule("write", HOLD)
    r.store(1, 1)
    r.run(10)
    r.step(61)
    assert r.faults(1) == {0: Fault.TIMEOUT}
    assert r.staging.by_use()["stuck"] == 1
    (ask,) = r.world.held("write")
    r.world.complete(ask)  # even if it went through: its job was told otherwise
    r.run(5)
    assert r.world.files == {}
    r.assert_idle()


# ---- rate


def test_stores_keep_to_the_configured_rate_and_copies_wait_with_them(rig):
    r = rig(store_bytes_per_s=FILE * 10, slots=12, io_depth=16)
    r.store(1, 60, seconds=1e6)
    began = r.clock.now
    r.live(lambda: bool(r.results))
    assert 4.8 <= r.clock.now - began <= 5.1
    r.assert_idle()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_store_without_a_descriptor_is_dropped_and_no_failure(rig, caplog, code):
    r = rig()
    r.world.rule("create", -code, times=2)
    r.store(1, 4)
    r.run()
    assert sorted(r.faults(1).values(), key=str) == [Fault.CANCELLED] * 2
    snapshot = r.reactor.snapshot()
    assert (snapshot.failures, snapshot.dropped) == ({}, {("store", "cancelled"): 2})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "ulimit -n" in warning
    r.assert_idle()


def test_a_store_that_the_gate_turns_away_after_its_copy_is_dropped_and_no_failure(rig):
    r = rig()
    r.world.rule("create", Fault.PAUSED)
    r.store(1, 9)
    r.run()
    assert r.faults(1) == dict.fromkeys(range(9), Fault.PAUSED)
    snapshot = r.reactor.snapshot()
    assert (snapshot.failures, snapshot.dropped) == ({}, {("store", "paused"): 9})
    r.assert_idle()


def test_writes_that_hang_take_no_more_of_the_rings_workers_when_they_are_given_up(rig):
    r = rig(slots=36, reserve=4, io_depth=32, store_depth=12, lookahead=32)
    r.world.rule("write", HOLD)
    for job in range(3):
        r.store(job, 30)
        r.run(20)
        assert len(r.world.held("write")) <= 12
        r.step(61)
        r.run(5)
        assert set(r.results) == set(range(job + 1)), "each is answered at its deadline"
    r.world.release()
    r.run()
    r.store(7, 2)
    r.run()
    assert not r.results[7].failed
    r.assert_idle()
