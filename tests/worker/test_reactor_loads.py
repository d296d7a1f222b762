"""Loads through the reactor: order, batches, retries, and every way a block can fail."""

from __future__ import annotations

import errno

import pytest
from worker_doubles import FILE, HOLD, PAYLOAD, Rig, file_of, key_of

from py_kvcache.errors import Fault
from py_kvcache.worker.jobs import BlockWork, Job, Kind
from py_kvcache.worker.staging import Use


def opened(rig: Rig) -> list[str]:
    return [path for op, path in rig.world.log if op == "openat"]


def reads(rig: Rig) -> list[str]:
    return [path for op, path in rig.world.log if op == "read"]


# ---- when all is well


def test_a_load_puts_every_blocks_bytes_into_its_pages(rig):
    r = rig()
    r.load(1, 9)
    r.run()
    assert r.results[1].failed == ()
    assert r.results[1].bytes == 9 * PAYLOAD
    assert all(r.loaded(1, n) for n in range(9))
    r.assert_idle()


def test_a_job_without_blocks_finishes_at_once(rig):
    r = rig()
    r.job(1, Kind.LOAD, 0)
    r.job(2, Kind.STORE, 0)
    r.step()
    assert r.results.keys() == {1, 2}
    r.assert_idle()


def test_blocks_are_opened_and_read_first_job_first_in_chain_order(rig):
    r = rig()
    r.load(1, 6)
    r.load(2, 3)
    r.run()
    wanted = [r.path(1, n) for n in range(6)] + [r.path(2, n) for n in range(3)]
    assert opened(r) == wanted
    assert reads(r) == wanted
    r.assert_idle()


def test_a_block_whose_open_comes_late_is_still_read_before_those_behind_it(rig):
    r = rig(io_depth=1)
    r.world.rule("read", HOLD, path="/1/0")
    r.world.rule("openat", HOLD, path="/1/1", times=2)
    r.load(1, 4)
    r.run(3)
    r.world.rules.clear()
    r.run()
    assert reads(r) == [r.path(1, n) for n in range(4)]
    r.assert_idle()


def test_opens_run_ahead_of_the_reads_only_as_far_as_the_lookahead(rig):
    r = rig(lookahead=5, io_depth=2)
    r.world.rule("read", HOLD)
    r.load(1, 50)
    r.run(10)
    assert len(r.world.held("read")) == 2
    assert len(opened(r)) == 7  # two being read, five ahead
    assert len(r.world.fds) == 7


def test_a_slot_is_taken_only_for_a_read_that_is_submitted(rig):
    r = rig(slots=8, io_depth=3, lookahead=8)
    r.world.rule("read", HOLD)
    r.load(1, 20)
    r.run(10)
    assert r.staging.used == len(r.world.held("read")) == 3


def test_slots_held_by_copies_do_not_count_against_the_io_depth(rig):
    r = rig(slots=6, io_depth=2, lookahead=8)
    r.world.rule("copy_in", HOLD)
    r.load(1, 20)
    r.run(20)
    assert r.staging.used == 6
    r.world.release()
    r.run()
    assert r.results[1].failed == ()
    r.assert_idle()


def test_three_slots_serve_any_number_of_blocks(rig):
    r = rig(slots=3, reserve=1, io_depth=2)
    for job in range(6):
        r.load(job, 40)
    r.run(400)
    assert all(r.results[job].failed == () for job in range(6))
    assert r.world.peak["read"] <= 2
    r.assert_idle()


def test_all_that_became_ready_in_a_pass_is_one_launch_also_across_jobs(rig):
    r = rig(slots=6, io_depth=6, lookahead=8)
    r.world.rule("verify", HOLD)
    r.load(1, 3)
    r.load(2, 2)
    r.run(10)
    r.world.release()
    r.run()
    assert r.device.loads == [[(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]]
    r.assert_idle()


def test_a_slot_that_came_back_at_the_end_of_a_pass_is_used_without_waiting(rig):
    r = rig(slots=1, reserve=0)
    r.load(1, 2)
    while not r.device.loads:
        r.step()
    assert r.device.memory.keys() == {(1, 0)}  # the double's copies end within the pass that launched them
    assert r.timeout == 0.0
    r.run()
    r.assert_idle()


def test_an_idle_reactor_waits_for_ever(rig):
    r = rig()
    r.load(1, 3)
    r.run()
    assert r.timeout is None


# ---- what the kernel and the device are given


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.STORE])
def test_every_direct_transfer_is_aligned_though_the_payload_is_not(rig, kind):
    r = rig(direct=True)
    op = "read" if kind is Kind.LOAD else "write"
    r.world.rule(op, 5000, times=3)  # short, so that some are continued
    if kind is Kind.LOAD:
        r.load(1, 9)
    else:
        r.store(1, 9)
    r.run()
    assert r.results[1].failed == ()
    asked = [ask for ask in r.world.asked if ask.op == op]
    assert len(asked) == 12
    for ask in asked:
        start = r.world.address(ask.buffer) - r.world.base
        assert (start % 4096, len(ask.buffer) % 4096, ask.offset % 4096) == (0, 0, 0)


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.STORE])
def test_every_copy_gets_the_event_that_was_recorded_when_its_job_was_submitted(rig, kind):
    r = rig()
    for number in (1, 2):
        if kind is Kind.LOAD:
            r.world.files.update({r.path(number, n): file_of((number, n), n) for n in range(3)})
        blocks = tuple(BlockWork(r.path(number, n), key_of((number, n)), n, (number, n)) for n in range(3))
        r.hand_in(Job(10 + number, kind, blocks, f"event {number}", r.clock.now + 30))
    r.run()
    copies = [copy for ask in r.world.asked for copy in ask.extra]
    assert {(copy.pages, copy.after) for copy in copies} == {
        ((number, n), f"event {number}") for number in (1, 2) for n in range(3)
    }


# ---- short and interrupted reads


def test_a_short_read_is_continued_where_it_stopped(rig):
    r = rig(direct=False)
    r.world.rule("read", 1000, times=3)
    r.load(1, 2)
    r.run()
    assert r.results[1].failed == ()
    assert r.loaded(1, 0)
    assert r.reactor.snapshot().retries == 3
    r.assert_idle()


def test_a_short_direct_read_is_continued_at_an_aligned_offset(rig):
    r = rig(direct=True)
    r.world.rule("read", 5000, times=1)  # the double refuses unaligned offsets, as the kernel does
    r.load(1, 1)
    r.run()
    assert r.results[1].failed == ()
    assert r.loaded(1, 0)
    assert r.reactor.snapshot().retries == 1
    assert [ask.offset for ask in r.world.asked if ask.op == "read"] == [0, 4096]


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, FILE - 4096, FILE - 1])
@pytest.mark.parametrize("direct", [True, False])
def test_a_truncated_file_is_proved_to_be_too_short_and_quarantined(rig, size, direct):
    r = rig(direct=direct)
    r.load(1, 3)
    del r.world.files[r.path(1, 1)][size:]
    r.run()
    assert r.faults(1)[1] is Fault.WRONG_SIZE
    assert 0 not in r.faults(1)
    assert r.publisher.quarantined == [r.path(1, 1)]
    r.assert_idle()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("op", ["openat", "read"])
def test_an_interrupted_operation_is_issued_again_a_few_times(rig, op, code):
    r = rig()
    r.world.rule(op, -code, times=3)
    r.load(1, 1)
    r.run()
    assert r.results[1].failed == ()
    r.assert_idle()


@pytest.mark.parametrize("op", ["openat", "read"])
def test_an_operation_that_is_interrupted_for_ever_fails_in_the_end(rig, op):
    r = rig()
    r.world.rule(op, -errno.EAGAIN)
    r.load(1, 1)
    r.run(100)
    assert r.faults(1) == {0: Fault.IO}
    assert len([1 for name, _ in r.world.log if name == op]) == 9
    r.assert_idle()


def test_a_kernel_limit_on_one_transfer_is_no_limit_on_a_block(rig):
    r = rig()
    r.world.rule("read", 4096)
    r.world.rule("write", 4096)
    r.load(1, 3)
    r.store(2, 3)
    r.run()
    assert r.results[1].failed == r.results[2].failed == ()
    assert all(r.loaded(1, n) and r.stored(2, n) for n in range(3))
    r.assert_idle()


# ---- rate and counters


def test_reads_keep_to_the_configured_rate(rig):
    r = rig(read_bytes_per_s=FILE * 10, slots=8, io_depth=8, lookahead=16)
    r.load(1, 60, seconds=1e6)
    began = r.clock.now
    r.live(lambda: bool(r.results))
    assert 5.8 <= r.clock.now - began <= 6.1, "no burst: 60 blocks, ten a second"
    r.run(3)
    r.assert_idle()


def test_the_gauges_say_what_is_under_way(rig):
    r = rig(slots=6, io_depth=2, lookahead=3)
    r.world.rule("read", HOLD)
    r.load(1, 20)
    r.run(10)
    snapshot = r.reactor.snapshot()
    assert snapshot.slots == {"free": 4, "load": 2, "store": 0, "stuck": 0, "kept": 0}
    assert (snapshot.io_in_flight, snapshot.open_files) == (2, 5)
    assert snapshot.queued == {"load": 15, "store": 0}
    r.step(2.0)
    assert r.reactor.snapshot().reads.busy == pytest.approx(2.0)
    r.world.release()
    r.run()
    after = r.reactor.snapshot()
    assert (after.reads.count, after.reads.bytes) == (20, 20 * FILE)
    assert (after.loaded_blocks, after.loaded_bytes) == (20, 20 * PAYLOAD)
    assert after.reads.busy == pytest.approx(2.0)
    assert snapshot.reads.count == 0  # a copy


def test_an_answer_nobody_waits_for_is_counted_and_changes_nothing(rig):
    from py_kvcache.worker.ring import Completion

    r = rig()
    r.load(1, 1)
    r.ring.done.append(Completion(999_999, 5))
    r.run()
    assert r.results[1].failed == ()
    assert r.reactor.snapshot().strays == 1
    r.assert_idle()


def test_the_idle_check_reports_a_slot_that_is_missing(rig, caplog):
    r = rig()
    r.staging.take(Use.LOAD)
    r.load(1, 1)
    r.run()
    assert r.reactor.snapshot().leaks == 1
    assert "slots are in use, expected 0" in caplog.text


def test_the_keys_of_the_double_are_as_long_as_real_ones():
    assert len(key_of((1, 2))) == 36
