"""One read serves all: blocks that stay in memory, and reads that others join."""

from __future__ import annotations

import errno

import pytest
from worker_doubles import HOLD

from py_kvcache.errors import Fault


@pytest.fixture
def tiered(rig):
    """A rig with slots for ``keep`` blocks that stay."""

    def make(keep: int = 8, **settings):
        slots = settings.pop("slots", 6)
        return rig(slots=slots + keep, tier_slots=keep, memory_tier=settings.pop("policy", "lru"), **settings)

    return make


def reads(r) -> int:
    return sum(op == "read" for op, _ in r.world.log)


@pytest.mark.parametrize("adds", [False, True])
def test_what_was_loaded_once_is_loaded_again_without_a_read(tiered, adds):
    r = tiered(adds=adds)
    r.load(1, 8)
    r.run()
    assert reads(r) == 8
    r.again(2, 1, 8)
    r.run()
    assert reads(r) == 8
    assert all(r.loaded(2, n) for n in range(8))
    assert r.reactor.snapshot().without_read == {"memory": 8}
    assert r.staging.kept == 8
    r.assert_idle()


@pytest.mark.parametrize("adds", [False, True])
def test_what_was_stored_is_loaded_without_a_read_also_when_another_wrote_the_file(tiered, adds):
    r = tiered(adds=adds)
    r.store(1, 3)
    r.run()
    r.load(2, 1)  # makes a file that job 3 finds
    r.run()
    before = reads(r)
    r.again(4, 1, 3)
    r.run()
    assert reads(r) == before
    assert all(r.loaded(4, n) for n in range(3))
    r.assert_idle()


def test_without_slots_for_it_nothing_stays(rig):
    r = rig()
    for job in (1, 2):
        r.load(1, 4) if job == 1 else r.again(2, 1, 4)
        r.run()
    assert reads(r) == 8
    assert r.staging.by_use()["kept"] == 0
    r.assert_idle()


@pytest.mark.parametrize("keep", [0, 8])
@pytest.mark.parametrize("adds", [False, True])
def test_requests_that_come_together_read_each_block_once(tiered, rig, keep, adds):
    r, count = (tiered(keep, adds=adds), 8) if keep else (rig(adds=adds), 4)
    r.load(1, count)
    r.again(2, 1, count)
    r.again(3, 1, count)
    r.run(120)
    assert reads(r) == count
    assert all(r.loaded(job, n) for job in (1, 2, 3) for n in range(count))
    r.assert_idle()


def test_a_block_is_copied_by_one_at_a_time(tiered):
    r = tiered()
    r.load(1, 1)
    r.run()
    r.world.rule("copy_in", HOLD)
    for job in (2, 3, 4):
        r.again(job, 1, 1)
    r.run(10)
    assert len(r.world.held("copy_in")) == 1
    r.world.release()
    r.run()
    assert all(r.loaded(job, 0) for job in (2, 3, 4))
    r.assert_idle()


@pytest.mark.parametrize("stage", ["openat", "read"])
def test_who_joined_a_read_that_fails_reads_itself(tiered, stage):
    r = tiered()
    r.world.rule(stage, HOLD)
    r.load(1, 1)
    r.again(2, 1, 1)
    r.run(10)
    (held,) = r.world.held(stage)
    r.world.complete(held, -errno.EIO)
    r.world.release()
    r.run()
    assert r.faults(1) == {0: Fault.IO}
    assert r.loaded(2, 0)
    r.assert_idle()


def test_who_joined_a_read_whose_job_is_given_up_reads_itself(tiered):
    r = tiered()
    r.world.rule("read", HOLD)
    r.load(1, 1, seconds=1)
    r.again(2, 1, 1, seconds=100)
    r.run(10)
    r.step(5)
    assert r.faults(1) == {0: Fault.TIMEOUT}
    r.world.release()
    r.run()
    assert r.loaded(2, 0)
    r.assert_idle()


def test_who_joined_and_is_given_up_leaves_the_read_alone(tiered):
    r = tiered()
    r.world.rule("read", HOLD)
    r.load(1, 2, seconds=100)
    r.again(2, 1, 2, seconds=1)
    r.run(10)
    r.step(5)
    assert set(r.faults(2).values()) == {Fault.TIMEOUT}
    r.world.release()
    r.run()
    assert r.loaded(1, 0) and r.loaded(1, 1)
    r.assert_idle()


def test_a_block_found_damaged_does_not_stay(tiered):
    r = tiered()
    r.load(1, 2)
    r.world.files[r.path(1, 1)][5] ^= 1
    r.run()
    assert r.faults(1) == {1: Fault.CHECKSUM}
    assert r.staging.kept == 1
    r.again(2, 1, 2)
    r.run()
    assert r.faults(2) == {1: Fault.CHECKSUM}
    r.assert_idle()


def test_a_kept_block_that_the_device_finds_wrong_is_read_from_its_file_the_next_time(tiered):
    r = tiered(adds=True)
    r.load(1, 1)
    r.run()
    r.device.on_the_way = lambda data: bytes([data[0] ^ 1]) + data[1:]
    r.again(2, 1, 1)
    r.run()
    assert r.faults(2) == {0: Fault.CHECKSUM}
    assert r.staging.kept == 0
    r.device.on_the_way = bytes
    r.again(3, 1, 1)
    r.run()
    assert r.loaded(3, 0)
    assert reads(r) == 2
    r.assert_idle()


def test_a_request_longer_than_memory_and_slots_is_served_by_both(tiered):
    r = tiered(keep=5, policy="lirs")
    r.load(1, 40)
    r.run(300)
    r.again(2, 1, 40)
    r.run(300)
    assert all(r.loaded(2, n) for n in range(40))
    assert reads(r) < 80
    assert r.staging.kept == 5
    r.assert_idle()


def test_blocks_that_stay_take_no_slot_from_reads_and_stores(tiered):
    r = tiered(keep=4, slots=5, io_depth=4)
    r.load(1, 4)
    r.run()
    r.world.rule("read", HOLD)
    r.load(2, 20)
    r.run(10)
    assert len(r.world.held("read")) == 4
    assert r.staging.by_use() == {"free": 1, "load": 4, "store": 0, "stuck": 0, "kept": 4}
    r.world.release()
    r.run(200)
    r.assert_idle()


def test_thousands_of_blocks_at_hand_are_begun_some_at_a_time(tiered):
    r = tiered(keep=1000)
    r.load(1, 1000)
    r.live(lambda: 1 in r.results)
    r.world.rule("copy_in", HOLD)
    r.again(2, 1, 1000)
    r.run(5)
    assert sum(len(ask.extra) for ask in r.world.held("copy_in")) <= 128
    r.world.release()
    r.live(lambda: 2 in r.results)
    assert all(r.loaded(2, n) for n in range(1000))
    r.assert_idle()


def one_bit_off(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("policy", ["lru", "arc", "lirs"])
@pytest.mark.parametrize("keep", [4, 64])
def test_blocks_come_to_stay_while_all_that_stay_are_in_use(tiered, policy, keep):
    r = tiered(keep, policy=policy)
    r.load(1, keep)
    r.live(lambda: 1 in r.results)
    r.world.rule("copy_in", HOLD)
    r.again(2, 1, keep)
    r.run(10)
    r.store(3, 6)
    r.run(60)
    assert r.results[3].failed == ()
    r.world.release()
    r.live(lambda: 2 in r.results)
    assert all(r.loaded(2, n) for n in range(keep))
    r.assert_idle()


@pytest.mark.parametrize("keep", [0, 4])
def test_a_part_of_a_block_never_shares_bytes_that_only_the_device_checks(tiered, rig, keep):
    """It is not added up itself: it would take what the whole block's check refuses a moment later."""
    r = tiered(keep, adds=True) if keep else rig(adds=True)
    r.device.parts = {2, 3}
    r.load(1, 1)
    r.world.files[r.path(1, 0)][9] ^= 1
    r.again(2, 1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.CHECKSUM} == r.faults(2)
    r.again(3, 1, 1)
    r.run()
    assert r.faults(3) == {0: Fault.CHECKSUM}
    assert r.staging.kept == 0
    r.assert_idle()


def test_parts_of_a_block_join_each_other_and_use_what_was_proved(tiered):
    r = tiered(adds=True)
    r.device.parts = {1, 2, 4}
    r.load(1, 2)
    r.again(2, 1, 2)
    r.again(3, 1, 2)  # whole: checks itself
    r.run()
    r.again(4, 1, 2)
    r.run()
    assert reads(r) == 2
    assert all(r.loaded(job, n) for job in (1, 2, 3, 4) for n in range(2))
    r.assert_idle()


def test_what_the_link_damaged_on_its_way_to_a_slot_is_no_part_of_a_block(tiered):
    r = tiered(adds=True)
    r.device.on_the_way = one_bit_off
    r.store(1, 1)
    r.run()
    r.device.on_the_way = bytes
    r.device.parts = {2}
    r.again(2, 1, 1)
    r.again(3, 1, 1)
    r.run()
    assert r.faults(2) == {0: Fault.CHECKSUM}
    assert not r.loaded(3, 0)
    r.assert_idle()


def test_of_those_who_joined_a_read_that_fails_one_reads_for_all(tiered):
    r = tiered()
    r.world.rule("read", HOLD)
    r.load(1, 1)
    for job in range(2, 10):
        r.again(job, 1, 1)
    r.run(10)
    (held,) = r.world.held("read")
    r.world.complete(held, -errno.EIO)
    r.world.release()
    r.run()
    assert reads(r) == 2
    assert all(r.loaded(job, 0) for job in range(2, 10))
    assert r.reactor.snapshot().without_read == {"joined": 7}
    r.assert_idle()


def test_one_read_that_hangs_keeps_nobody_else_waiting_however_many_joined_it(tiered):
    r = tiered()
    r.world.rule("read", HOLD, path="/cache/1/0")
    r.load(1, 1, seconds=1000)
    for job in range(2, 302):
        r.again(job, 1, 1, seconds=1000)
    r.load(1000, 3)
    r.run(60)
    assert 1000 in r.results and r.results[1000].failed == ()
    r.world.release()
    r.live(lambda: len(r.results) == 302)
    assert reads(r) == 4
    r.assert_idle()


def test_who_comes_while_the_reader_is_copied_shares_its_slot_at_once(rig):
    r = rig()
    r.world.rule("copy_in", HOLD)
    r.load(1, 1)
    r.run(10)
    r.again(2, 1, 1)
    r.step()
    r.world.release()
    r.run()
    assert reads(r) == 1
    assert r.loaded(2, 0)
    r.assert_idle()
