"""Loads through the reactor: order, batches, retries, and every way a block can fail."""

from __future__ import annotations

import errno
import logging

import pytest
from worker_doubles import FILE, HOLD, LOSE, PAYLOAD, Rig, key_of

from py_kvcache.errors import Fault
from py_kvcache.worker.jobs import Kind
from py_kvcache.worker.staging import Use


@pytest.fixture
def rig():
    rigs = []

    def make(**settings) -> Rig:
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


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


# ---- failures


@pytest.mark.parametrize("op", ["openat", "read"])
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (errno.ENOENT, Fault.MISSING),
        (errno.EIO, Fault.IO),
        (errno.ESTALE, Fault.IO),
        (errno.EACCES, Fault.IO),
        (errno.ELOOP, Fault.IO),
        (errno.EISDIR, Fault.IO),
        (errno.ECANCELED, Fault.IO),
        (errno.EINVAL, Fault.IO),
    ],
)
def test_an_errno_fails_the_block_and_everything_comes_back(rig, op, code, fault):
    r = rig()
    r.world.rule(op, -code, path="/1/2")
    r.load(1, 8)
    r.load(2, 2)
    r.run()
    assert r.faults(1)[2] is fault
    assert set(r.faults(1)) >= {2, 6, 7}
    assert min(r.faults(1)) == 2
    assert all(r.loaded(1, n) for n in range(2))
    assert r.results[2].failed == ()
    assert r.publisher.quarantined == []  # an errno proves nothing about the file
    r.assert_idle()


def test_a_file_that_vanished_is_missing_and_counted_with_its_errno(rig):
    r = rig()
    r.load(1, 2)
    del r.world.files[r.path(1, 0)]
    r.run()
    assert r.faults(1) == {0: Fault.MISSING, 1: Fault.CANCELLED}
    assert r.reactor.snapshot().failures == {("load", "open", "missing", "ENOENT"): 1}
    r.assert_idle()


def test_one_wrong_byte_is_found_and_quarantined(rig):
    r = rig()
    r.load(1, 2)
    r.world.files[r.path(1, 0)][17] ^= 1
    r.run()
    assert r.faults(1)[0] is Fault.CHECKSUM
    assert r.publisher.quarantined == [r.path(1, 0)]
    assert r.reactor.snapshot().checksum_failures == 1
    assert not any((1, 0) in launch for launch in r.device.loads)
    r.assert_idle()


def test_another_blocks_file_is_found_by_its_key(rig):
    r = rig()
    r.load(1, 1)
    r.load(2, 1)
    r.world.files[r.path(1, 0)] = r.world.files[r.path(2, 0)]
    r.run()
    assert r.faults(1) == {0: Fault.WRONG_KEY}
    assert r.results[2].failed == ()
    r.assert_idle()


def test_a_file_without_our_footer_is_refused_but_left_alone(rig):
    r = rig()
    r.load(1, 1)
    r.world.files[r.path(1, 0)][-4096:] = b"x" * 4096
    r.run()
    assert r.faults(1) == {0: Fault.FOREIGN}
    assert r.publisher.quarantined == []
    r.assert_idle()


def test_a_fifo_in_a_files_place_is_refused_before_the_read(rig):
    r = rig()
    r.world.unseekable.add(r.path(1, 0))
    r.load(1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    assert r.results[1].failed[0][1].code == errno.ESPIPE
    assert reads(r) == []
    r.assert_idle()


def test_a_path_that_the_ring_refuses_fails_the_block(rig):
    r = rig()
    job = r.load(1, 1)
    object.__setattr__(job.blocks[0], "path", "/cache/\0")
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    r.assert_idle()


def test_blocks_before_the_failed_one_are_loaded_and_those_behind_it_are_not_begun(rig):
    r = rig(lookahead=4, io_depth=2)
    r.load(1, 100)
    del r.world.files[r.path(1, 3)]
    r.run()
    assert min(r.faults(1)) == 3
    assert set(r.faults(1)) == set(range(3, 100))
    assert len(opened(r)) < 12
    assert r.results[1].bytes == 3 * PAYLOAD
    r.assert_idle()


def test_a_failure_behind_an_earlier_failure_cuts_nothing_more(rig):
    r = rig(slots=8, io_depth=8, lookahead=8)
    r.world.rule("read", HOLD)
    r.load(1, 6)
    r.run(5)
    late, early = (next(a for a in r.world.held("read") if a.path == r.path(1, n)) for n in (4, 1))
    r.world.complete(late, -errno.EIO)
    r.step()
    r.world.complete(early, -errno.EIO)
    r.step()
    r.world.release()
    r.run()
    assert r.faults(1) == {
        1: Fault.IO, 2: Fault.CANCELLED, 3: Fault.CANCELLED, 4: Fault.IO, 5: Fault.CANCELLED,
    }  # fmt: skip
    assert r.loaded(1, 0)
    r.assert_idle()


def test_a_cancelled_read_keeps_its_slot_until_the_kernel_lets_go(rig):
    r = rig(slots=4, io_depth=4, lookahead=4)
    r.world.rule("read", HOLD)
    r.load(1, 2)
    r.run(5)
    first, second = r.world.held("read")
    r.world.complete(first, -errno.EIO)
    r.run(3)
    assert r.faults(1) == {0: Fault.IO, 1: Fault.CANCELLED}
    assert second.cancelled
    assert r.staging.by_use() == {"free": 3, "load": 0, "store": 0, "stuck": 1}
    r.world.complete(second)
    r.run(3)
    r.assert_idle()


def test_a_launch_that_raises_fails_its_blocks_only(rig):
    r = rig()
    r.device.refuse["copy_in"] = RuntimeError("no device")
    r.load(1, 3)
    r.run()
    assert r.faults(1)[0] is Fault.DEVICE
    del r.device.refuse["copy_in"]
    r.load(2, 3)
    r.run()
    assert r.results[2].failed == ()
    r.assert_idle()


def test_copies_that_fail_on_the_device_fail_their_blocks(rig):
    r = rig()
    r.world.rule("copy_in", "ECC", times=1)
    r.load(1, 2)
    r.load(2, 2)
    r.run()
    failed = r.faults(1) | r.faults(2)
    assert Fault.DEVICE in failed.values()
    r.assert_idle()


@pytest.mark.parametrize("op", ["openat", "read", "verify", "copy_in"])
def test_slots_and_descriptors_are_all_back_whatever_stage_fails(rig, op):
    fates = {"openat": -errno.EIO, "read": -errno.EIO, "verify": Fault.CHECKSUM, "copy_in": "gone"}
    r = rig()
    r.world.rule(op, fates[op])
    for job in range(10):
        r.load(job, 7)
    r.run(300)
    assert len(r.results) == 10
    assert all(result.failed for result in r.results.values())
    r.world.release()
    r.load(99, 7)
    r.run()
    assert r.results[99].failed == ()
    r.assert_idle()


def test_a_job_that_is_handed_in_twice_is_loaded_once(rig):
    r = rig()
    job = r.load(1, 2)
    r.reactor.submit(job)
    r.run()
    assert len(opened(r)) == 2
    r.assert_idle()


# ---- O_DIRECT that does not work


@pytest.mark.parametrize("where", ["open", "read"])
def test_where_direct_io_is_refused_everything_goes_buffered_with_one_warning(rig, where, caplog):
    r = rig(lookahead=3)
    r.world.refuse_direct = where
    with caplog.at_level(logging.WARNING):
        r.load(1, 30)
        r.run(200)
    assert r.results[1].failed == ()
    assert all(r.loaded(1, n) for n in range(30))
    warnings = [record.message for record in caplog.records if "O_DIRECT" in record.message]
    assert len(warnings) == 1
    assert "EINVAL" in warnings[0]
    assert "/cache/1/" in warnings[0]
    snapshot = r.reactor.snapshot()
    assert (snapshot.direct, snapshot.direct_refused, r.publisher.direct) == (False, 1, False)
    assert snapshot.retries <= 3 + 4  # those under way when the first one showed it
    r.assert_idle()


def test_one_file_that_refuses_direct_io_does_not_make_all_others_buffered(rig):
    r = rig()
    r.world.rule("openat", lambda ask: -errno.EINVAL if ask.flags & 0o40000 else None, path="/1/0")
    r.world.rule("read", -errno.EISDIR, path="/1/0")  # a folder: EINVAL for O_DIRECT, then EISDIR
    r.load(1, 1)
    r.load(2, 4)
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    assert r.results[2].failed == ()
    assert r.reactor.snapshot().direct
    r.assert_idle()


def test_einval_on_a_buffered_file_is_an_error_and_no_endless_retry(rig):
    r = rig(direct=False)
    r.world.rule("read", -errno.EINVAL)
    r.load(1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    assert len(reads(r)) == 1
    r.assert_idle()


# ---- deadlines


@pytest.mark.parametrize("op", ["openat", "read", "verify"])
def test_a_load_that_hangs_is_reported_at_its_deadline(rig, op):
    r = rig()
    r.world.rule(op, HOLD)
    r.load(1, 20, seconds=30)
    r.run(10)
    assert 1 not in r.results
    assert r.timeout == pytest.approx(30.0)
    r.step(29.9)
    assert 1 not in r.results
    r.step(0.2)
    assert set(r.faults(1).values()) == {Fault.TIMEOUT}
    assert len(r.results[1].failed) == 20
    r.world.release()
    r.run()
    r.assert_idle()


def test_a_block_being_copied_is_waited_for_past_the_deadline(rig):
    r = rig(slots=3, lookahead=1, io_depth=1)
    r.world.rule("copy_in", HOLD)
    r.load(1, 5, seconds=30)
    r.run(20)
    r.step(31)
    assert 1 not in r.results
    r.world.release()
    r.run()
    assert Fault.TIMEOUT in r.faults(1).values()
    assert 0 not in r.faults(1)
    assert r.loaded(1, 0)
    r.assert_idle()


def test_a_lost_completion_costs_one_slot_and_no_request(rig):
    r = rig(slots=4, io_depth=3)
    r.world.rule("read", LOSE, path="/1/1")
    r.load(1, 3)
    r.run(10)
    r.step(31)
    assert r.faults(1)[1] is Fault.TIMEOUT
    for job in range(2, 8):
        r.load(job, 5)
    r.run(200)
    assert all(r.results[job].failed == () for job in range(2, 8))
    r.assert_well()
    snapshot = r.reactor.snapshot()
    assert (snapshot.slots["stuck"], snapshot.lost_now, snapshot.open_files) == (1, 1, 1)


def test_storage_that_hangs_and_comes_back_serves_again(rig):
    r = rig()
    r.world.rule("openat", LOSE)
    r.world.rule("read", HOLD)
    for job in range(4):
        r.load(job, 10, seconds=10 + job)
        r.run(3)
    for _ in range(5):
        r.step(10)
    assert len(r.results) == 4
    for ask in r.world.pending:
        ask.lost = False
    r.world.release()
    r.run()
    r.load(9, 10)
    r.run()
    assert r.results[9].failed == ()
    r.assert_idle()


def test_hung_opens_never_exceed_the_lookahead(rig):
    r = rig(lookahead=4)
    r.world.rule("openat", LOSE)
    for job in range(20):
        r.load(job, 10, seconds=5)
        r.run(2)
        r.step(6)
    assert len(r.world.held("openat")) == 4
    assert len(r.results) == 20


def test_a_descriptor_that_comes_after_the_deadline_is_closed(rig):
    r = rig()
    r.world.rule("openat", HOLD)
    r.load(1, 2)
    r.run(3)
    r.step(31)
    for ask in r.world.held("openat"):
        r.world.complete(ask)  # not cancelled in time: the open succeeded
    r.run(5)
    r.assert_idle()


def test_a_read_that_ends_after_its_deadline_never_reaches_the_device(rig):
    r = rig()
    r.world.rule("read", HOLD)
    r.load(1, 2)
    r.run(5)
    r.step(31)
    for ask in r.world.held("read"):
        r.world.complete(ask)
    r.run(5)
    assert r.device.loads == []
    r.assert_idle()


# ---- rate and counters


def test_reads_keep_to_the_configured_rate(rig):
    r = rig(read_bytes_per_s=FILE * 10, slots=8, io_depth=8, lookahead=16)
    r.load(1, 60, seconds=1e6)
    began = r.clock.now
    r.live(lambda: bool(r.results))
    assert 4.8 <= r.clock.now - began <= 5.1
    r.run(3)
    r.assert_idle()


def test_the_gauges_say_what_is_under_way(rig):
    r = rig(slots=6, io_depth=2, lookahead=3)
    r.world.rule("read", HOLD)
    r.load(1, 20)
    r.run(10)
    snapshot = r.reactor.snapshot()
    assert snapshot.slots == {"free": 4, "load": 2, "store": 0, "stuck": 0}
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


def test_a_thousand_failures_of_one_kind_are_one_warning_a_minute(rig, caplog):
    r = rig()
    r.world.rule("read", -errno.EIO)
    for job in range(100):
        r.load(job, 1)
    r.run(200)
    assert [record.message.count("EIO") for record in caplog.records] == [1]
    assert "/cache/0/0" in caplog.text
    r.clock.now += 61
    r.load(100, 1)
    r.run()
    assert len(caplog.records) == 2
    assert "99 more" in caplog.records[1].message


def test_a_missed_deadline_is_said(rig, caplog):
    r = rig()
    r.world.rule("read", HOLD)
    r.load(1, 3)
    r.run(5)
    r.step(31)
    assert "load given up: timeout: /cache/1/0" in caplog.text


class Recorder:
    def __init__(self) -> None:
        self.bars: list[tuple[str, str, float]] = []
        self.samples: list[dict[str, float]] = []

    def complete(self, name, cat, ts_us, dur_us, lane, **args):
        self.bars.append((name, lane, dur_us))

    def counter(self, name, ts_us, **values):
        self.samples.append(values)


def test_the_timeline_has_every_operation_and_the_slots(rig):
    recorder = Recorder()
    r = rig(trace=recorder)
    r.world.rule("read", HOLD)
    r.load(1, 1)
    r.store(2, 1)
    r.run(10)
    r.clock.now += 0.25
    r.world.release()
    r.run()
    named = {name for name, _, _ in recorder.bars}
    assert named == {
        "read", "verify", "copy to device", "copy from device", "seal", "write", "publish", "submit",
    }  # fmt: skip
    (read,) = [bar for bar in recorder.bars if bar[0] == "read"]
    assert read[1].startswith("slot ")
    assert read[2] == pytest.approx(250_000)
    assert recorder.samples[0]["load"] + recorder.samples[0]["store"] >= 1
    assert recorder.samples[-1] == {"free": 6, "load": 0, "store": 0, "stuck": 0}
