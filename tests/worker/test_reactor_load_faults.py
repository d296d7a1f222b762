"""Every way in which a load can fail: what is reported, what comes back, what goes on."""

from __future__ import annotations

import errno
import logging

import pytest
from worker_doubles import HOLD, LOSE, PAYLOAD, Rig

from py_kvcache.errors import Fault


def opened(rig: Rig) -> list[str]:
    return [path for op, path in rig.world.log if op == "openat"]


def reads(rig: Rig) -> list[str]:
    return [path for op, path in rig.world.log if op == "read"]


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
    assert r.staging.by_use() == {"free": 3, "load": 0, "store": 0, "stuck": 1, "kept": 0}
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


# ---- given up, or no room: nothing is wrong with the block


@pytest.mark.parametrize("stage", ["openat", "read", "verify"])
@pytest.mark.parametrize("lookahead", [1, 4])
def test_every_block_given_up_at_a_deadline_is_counted_once_wherever_it_was(rig, stage, lookahead):
    r = rig(slots=4, reserve=1, io_depth=2, lookahead=lookahead)
    r.world.rule(stage, LOSE)
    r.load(1, 8, seconds=1)
    r.run(10)
    r.step(2)
    assert r.faults(1) == dict.fromkeys(range(8), Fault.TIMEOUT)
    assert r.reactor.snapshot().dropped == {("load", "timeout"): 8}


def test_every_block_behind_a_failed_one_is_counted_once(rig):
    r = rig(slots=4, reserve=1, io_depth=2, lookahead=4)
    r.world.rule("read", -errno.EIO, path="/1/0")
    r.world.rule("read", HOLD)
    r.load(1, 8)
    r.run(10)
    assert len(r.results[1].failed) == 8
    assert r.reactor.snapshot().dropped == {("load", "cancelled"): 7}


def test_blocks_that_a_defect_of_ours_ends_are_counted_once(rig):
    r = rig(io_depth=2, lookahead=2)
    r.world.rule("read", HOLD)
    r.load(1, 8)
    r.run(10)
    r.reactor._finish("a defect")
    assert r.reactor.snapshot().dropped == {("load", "cancelled"): 8}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_an_open_without_a_descriptor_comes_again_when_others_were_closed(rig, code):
    r = rig()
    r.world.rule("openat", -code, path="/1/1", times=3)
    r.load(1, 6)
    r.run(10)
    assert 1 not in r.results, "it must wait, not spin"
    r.live(lambda: 1 in r.results)
    assert r.faults(1) == {}
    assert all(r.loaded(1, n) for n in range(6))
    r.run(5)
    r.assert_idle()


def test_a_load_that_never_gets_a_descriptor_is_cancelled_with_one_warning_that_says_how_many_it_takes(
    rig, caplog
):
    r = rig(io_depth=4, lookahead=4, store_files=8)
    r.world.rule("openat", -errno.EMFILE)
    for job in range(3):
        r.load(job, 5)
    r.live(lambda: len(r.results) == 3)
    assert all(r.faults(job) == dict.fromkeys(range(5), Fault.CANCELLED) for job in range(3))
    snapshot = r.reactor.snapshot()
    assert (snapshot.failures, snapshot.dropped) == ({}, {("load", "cancelled"): 15})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "ulimit -n" in warning
    assert f" {4 + 4 + 8 + 64} " in warning
    r.run(5)
    r.assert_idle()


def test_a_load_that_waits_for_a_descriptor_still_ends_at_its_deadline(rig):
    r = rig()
    r.world.rule("openat", -errno.EMFILE)
    r.load(1, 3, seconds=0.1)
    r.run(5)
    r.step(0.2)
    assert r.faults(1) == dict.fromkeys(range(3), Fault.TIMEOUT)
    r.world.release()
    r.load(2, 3)
    r.live(lambda: 2 in r.results)
    assert r.faults(2) == {}
    r.run(5)
    r.assert_idle()
