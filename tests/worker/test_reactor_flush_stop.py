"""flush and stop: bounded whatever hangs, and never before the device has let go."""

from __future__ import annotations

import pytest
from worker_doubles import HOLD, LOSE, PAYLOAD

from py_kvcache.errors import Fault
from py_kvcache.worker.jobs import Job, Kind

# ---- flush


def test_unknown_and_finished_ids_need_no_wait(rig):
    r = rig()
    r.load(1, 2)
    r.run()
    assert r.reactor.ask({1, 2, 3}, 1.0).answered.is_set()


def test_a_flush_is_answered_when_all_copies_are_done_though_the_files_are_not(rig):
    r = rig(slots=8, reserve=2, io_depth=16)
    r.world.rule("write", HOLD)
    r.store(1, 4)
    flush = r.reactor.ask({1}, 1.0)
    r.run(10)
    assert flush.answered.is_set()
    assert 1 not in r.results
    r.world.release()
    r.run()
    assert r.results[1].failed == ()
    r.assert_idle()


def test_a_flush_waits_for_a_copy_from_the_device_however_long_it_takes(rig):
    r = rig()
    r.world.rule("copy_out", HOLD)
    r.store(1, 1)
    flush = r.reactor.ask({1}, 0.5)
    r.run(5)
    r.step(100)
    assert not flush.answered.is_set()
    r.world.release()
    r.run(5)
    assert flush.answered.is_set()


def test_with_a_full_queue_and_hung_storage_a_flush_is_answered_after_its_patience(rig):
    r = rig()
    r.world.rule("write", LOSE)
    r.world.rule("create", LOSE)
    for job in range(50):
        r.store(job, 8)
    r.run(20)
    flush = r.reactor.ask(set(range(50)), 0.5)
    r.run(20)
    assert not flush.answered.is_set()
    assert r.timeout == pytest.approx(0.5)
    r.step(0.51)
    r.run(3)
    assert flush.answered.is_set()
    assert set(r.faults(49).values()) == {Fault.CANCELLED}
    r.assert_well()


def test_a_flush_drops_only_what_was_not_copied_in_time(rig):
    r = rig(slots=4, reserve=1, io_depth=4)
    r.world.rule("write", HOLD)
    r.store(1, 6)
    r.run(10)
    flush = r.reactor.ask({1}, 0.5)
    r.run(3)
    r.step(1.0)
    assert flush.answered.is_set()
    r.world.release()
    r.run()
    assert r.faults(1) == dict.fromkeys(range(3, 6), Fault.CANCELLED)
    assert [r.stored(1, n) for n in range(3)] == [True, True, True]
    r.assert_idle()


def test_flushed_stores_go_before_others(rig):
    r = rig(slots=4, reserve=1, io_depth=2)
    r.world.rule("write", HOLD)
    for job in range(5):
        r.store(job, 2)
    r.run(10)
    r.reactor.ask({4}, 100.0)
    r.world.release()
    r.run(40)
    copied = [path for op, path in r.world.log if op == "copy_out"]
    assert copied[:2] == ["(0, 0)", "(0, 1)"]
    assert copied[2:4] == ["(4, 0)", "(4, 1)"]


@pytest.mark.parametrize("stage", ["openat", "read", "verify"])
def test_a_load_that_has_not_reached_the_device_is_given_up_after_the_patience_of_a_flush(rig, stage):
    r = rig(lookahead=2)
    r.world.rule(stage, LOSE)
    r.load(1, 8, seconds=30)
    r.load(2, 1, seconds=30)
    flush = r.reactor.ask({1}, 0.5)
    r.run(10)
    assert not flush.answered.is_set()
    assert r.timeout == pytest.approx(0.5)
    r.step(0.51)
    assert flush.answered.is_set()
    assert r.faults(1) == dict.fromkeys(range(8), Fault.CANCELLED)
    assert 2 not in r.results
    r.assert_well()


def test_a_flush_of_a_load_waits_for_the_copies_that_the_device_has_begun_and_for_nothing_else(rig):
    r = rig()
    r.world.rule("copy_in", HOLD)
    r.world.rule("read", LOSE, path="/1/1")
    r.load(1, 2)
    flush = r.reactor.ask({1}, 0.5)
    r.run(10)
    r.step(20)
    assert not flush.answered.is_set()
    assert 1 not in r.results
    r.world.release()
    r.run(3)
    assert flush.answered.is_set()
    assert r.faults(1) == {1: Fault.CANCELLED}
    assert r.loaded(1, 0)
    r.assert_well()


def test_jobs_that_were_not_named_are_not_dropped(rig):
    r = rig()
    r.world.rule("write", HOLD)
    r.store(1, 8)
    r.store(2, 8)
    r.reactor.ask({1}, 0.5)
    r.run(10)
    r.step(1)
    r.world.release()
    r.run(100)
    assert r.results[2].failed == ()


# ---- stop


def test_stopping_when_idle_ends_at_once_and_shuts_the_ring(rig):
    r = rig()
    r.load(1, 2)
    r.run()
    r.reactor.request_stop(10)
    r.run(2)
    assert r.reactor.stopped
    assert r.ring.closed
    assert r.reactor.stop(10)


def test_stopping_finishes_begun_stores_and_cancels_the_rest(rig):
    r = rig(slots=4, reserve=1, io_depth=4)
    r.world.rule("write", HOLD)
    r.store(1, 6)
    r.load(2, 3)
    r.world.rule("read", HOLD)
    r.run(10)
    r.reactor.request_stop(10)
    r.run(3)
    assert not r.reactor.stopped
    assert set(r.faults(2).values()) == {Fault.CANCELLED}
    r.world.release()
    r.run(20)
    assert r.reactor.stopped
    assert r.faults(1) == dict.fromkeys(range(3, 6), Fault.CANCELLED)
    assert [r.stored(1, n) for n in range(3)] == [True, True, True]
    assert r.reactor.stop(0)
    r.assert_idle()


def test_stopping_ends_at_its_timeout_when_storage_hangs_and_says_that_memory_is_in_use(rig):
    r = rig()
    r.world.rule("write", LOSE)
    r.world.rule("read", LOSE)
    r.store(1, 6)
    r.load(2, 3)
    r.run(10)
    r.reactor.request_stop(10)
    r.run(5)
    assert not r.reactor.stopped
    assert r.timeout == pytest.approx(10)
    r.step(11)
    assert r.reactor.stopped
    assert r.results.keys() == {1, 2}
    assert not r.reactor.stop(0)


def test_stopping_waits_for_the_device_a_little_longer_but_not_for_ever(rig):
    r = rig()
    r.world.rule("copy_in", LOSE)
    r.load(1, 1)
    r.run(10)
    r.reactor.request_stop(1)
    r.run(2)
    r.step(2)
    assert not r.reactor.stopped
    r.clock.now += 10
    r.reactor.run_pass()
    assert r.reactor.stopped
    assert [result.job_id for result in r.reactor.take_finished()] == [1]
    assert not r.reactor.stop(0)


def test_jobs_and_flushes_after_the_end_are_answered_at_once(rig):
    r = rig()
    r.reactor.request_stop(0)
    r.run(2)
    job = r.load(5, 3)
    assert [result.job_id for result in r.reactor.take_finished()] == [5]
    assert r.reactor.ask({5}, 10).answered.is_set()
    r.reactor.submit(job)
    assert [len(result.failed) for result in r.reactor.take_finished()] == [3]


def test_jobs_that_arrive_while_stopping_are_cancelled(rig):
    r = rig()
    r.world.rule("write", HOLD)
    r.store(1, 1)
    r.run(10)
    r.reactor.request_stop(10)
    r.run(1)
    r.load(2, 3)
    r.store(3, 3)
    r.run(3)
    assert set(r.faults(2).values()) == set(r.faults(3).values()) == {Fault.CANCELLED}
    r.world.release()
    r.run(20)
    assert r.reactor.stopped
    r.assert_idle()


def test_a_reactor_that_never_ran_still_answers_when_stopped(rig):
    r = rig()
    r.load(1, 2)
    flush = r.reactor.ask({1}, 10)
    assert r.reactor.stop(1)
    assert [result.job_id for result in r.reactor.take_finished()] == [1]
    assert flush.answered.is_set()


# ---- a defect of our own


def test_when_the_reactor_itself_fails_every_job_is_answered_and_later_ones_too(rig, caplog):
    r = rig()
    r.world.rule("read", HOLD)
    r.world.rule("write", HOLD)
    r.load(1, 4)
    r.store(2, 2)
    r.run(3)
    flush = r.reactor.ask({1, 2}, 100)

    def broken() -> list[object]:
        raise LookupError("a defect")

    r.sealer.results = broken
    r.reactor.start()
    r.reactor._thread.join(20)
    assert flush.answered.is_set()
    results = {result.job_id: result for result in r.reactor.take_finished()}
    assert results.keys() == {1, 2}
    assert len(results[1].failed) == 4
    assert "a defect" in caplog.text
    r.reactor.submit(Job(3, Kind.LOAD, r.submitted[1].blocks, None, 1e9))
    assert [result.job_id for result in r.reactor.take_finished()] == [3]
    r.reactor.flush({1, 2, 3}, 10)
    assert not r.reactor.stop(0)


def test_blocks_that_were_done_when_the_reactor_failed_are_not_reported_as_failed(rig):
    r = rig(slots=4, io_depth=1, lookahead=1)
    r.world.rule("read", HOLD, path="/1/2")
    r.load(1, 4)
    r.run(20)
    r.reactor._loop.clean = False
    r.reactor._finish("a defect")
    (result,) = r.reactor.take_finished()
    assert [ordinal for ordinal, _ in result.failed] == [2, 3]
    assert result.bytes == 2 * PAYLOAD
