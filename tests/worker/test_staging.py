"""Slots: counted, reserved, released exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.errors import ConfigError
from py_kvcache.worker.staging import StagingPool, Use, plan_slots

SLOT = 8192


def pool(slots: int = 5, reserve: int = 2) -> StagingPool:
    return StagingPool(memoryview(bytearray(slots * SLOT + 100)), SLOT, reserve_for_loads=reserve)


def test_slots_are_disjoint_aligned_pieces_of_the_memory():
    staging = pool()
    slots = [staging.take(Use.LOAD) for _ in range(5)]
    assert sorted(slot.offset for slot in slots) == [n * SLOT for n in range(5)]
    assert all(slot.buffer.nbytes == SLOT and slot.offset % 4096 == 0 for slot in slots)
    slots[0].buffer[:] = b"\xff" * SLOT
    assert all(not any(slot.buffer) for slot in slots[1:])


def test_a_slot_size_that_direct_io_cannot_use_is_refused():
    with pytest.raises(ValueError, match="4096"):
        StagingPool(memoryview(bytearray(50_000)), 5000, reserve_for_loads=1)


def test_a_reserve_that_leaves_nothing_for_stores_is_refused():
    with pytest.raises(ValueError, match="none for stores"):
        pool(slots=3, reserve=3)


def test_stores_never_take_the_slots_reserved_for_loads():
    staging = pool(slots=5, reserve=2)
    assert [staging.take(Use.STORE) is not None for _ in range(4)] == [True, True, True, False]
    assert [staging.take(Use.LOAD) is not None for _ in range(3)] == [True, True, False]


def test_releasing_a_slot_twice_raises_and_changes_nothing():
    staging = pool()
    slot = staging.take(Use.LOAD)
    staging.release(slot)
    with pytest.raises(RuntimeError, match="already free"):
        staging.release(slot)
    assert (staging.free, staging.used) == (5, 0)
    assert staging.check_idle() is None


def test_a_stuck_slot_counts_as_used_until_it_is_released():
    staging = pool()
    slot = staging.take(Use.LOAD)
    staging.mark_stuck(slot)
    assert staging.by_use() == {"free": 4, "load": 0, "store": 0, "stuck": 1, "kept": 0}
    assert staging.check_idle() == "1 of 5 slots are in use, expected 0"
    assert staging.check_idle(1) is None
    staging.release(slot)
    assert staging.check_idle() is None


def test_the_idle_check_notices_a_slot_that_was_changed_behind_the_counts():
    staging = pool()
    staging.take(Use.LOAD).use = Use.FREE
    assert "disagree" in staging.check_idle()


@given(st.lists(st.sampled_from(["load", "store", "release", "stuck"]), max_size=60), st.integers(0, 4))
def test_free_and_used_always_add_up(actions, reserve):
    staging, held = pool(5, reserve), []
    for action in actions:
        if action == "release" and held:
            staging.release(held.pop(0))
        elif action == "stuck" and held:
            staging.mark_stuck(held[-1])
        elif action in ("load", "store"):
            before = staging.free
            slot = staging.take(Use[action.upper()])
            assert (slot is None) == (before <= (reserve if action == "store" else 0))
            if slot is not None:
                assert slot not in held
                held.append(slot)
        assert staging.free + staging.used == staging.total
        assert staging.used == len(held)
        assert staging.check_idle(len(held)) is None


# ---- counting


def test_by_default_there_is_a_slot_for_each_read_and_each_copy():
    plan = plan_slots(SLOT, io_depth=16, copy_headroom=4)
    assert (plan.slots, plan.io_depth, plan.copy_headroom, plan.warnings) == (20, 16, 4, ())
    assert plan.nbytes == 20 * SLOT


def test_given_bytes_are_divided_and_the_depth_is_clamped_with_a_warning():
    plan = plan_slots(SLOT, io_depth=16, copy_headroom=4, staging_bytes=10 * SLOT + 5)
    assert (plan.slots, plan.io_depth, plan.copy_headroom) == (10, 7, 3)
    assert "10 slots" in plan.warnings[0]


def test_more_bytes_than_needed_become_more_slots_for_copies():
    plan = plan_slots(SLOT, io_depth=4, copy_headroom=2, staging_bytes=32 * SLOT)
    assert (plan.slots, plan.io_depth, plan.copy_headroom, plan.warnings) == (32, 4, 28, ())


@pytest.mark.parametrize("given_bytes", [0, SLOT, 3 * SLOT - 1])
def test_fewer_than_three_slots_are_refused_with_the_number_that_would_do(given_bytes):
    with pytest.raises(ConfigError, match=str(3 * SLOT)):
        plan_slots(SLOT, io_depth=16, copy_headroom=4, staging_bytes=given_bytes)


def test_settings_that_come_to_two_slots_are_refused():
    with pytest.raises(ConfigError, match="io_depth 1"):
        plan_slots(SLOT, io_depth=1, copy_headroom=1)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(3, 200))
def test_every_plan_leaves_slots_for_reads_for_copies_and_for_stores(depth, headroom, slots):
    plan = plan_slots(SLOT, io_depth=depth, copy_headroom=headroom, staging_bytes=slots * SLOT)
    assert 1 <= plan.io_depth <= depth
    assert plan.copy_headroom >= 1
    assert plan.io_depth + plan.copy_headroom == plan.slots == slots
    assert 1 <= plan.reserve_for_loads < slots


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 16])
def test_slots_that_are_exactly_enough_are_used_as_asked_and_no_warning(depth):
    for given_bytes in (None, (depth + 4) * SLOT):
        plan = plan_slots(SLOT, io_depth=depth, copy_headroom=4, staging_bytes=given_bytes)
        assert (plan.slots, plan.io_depth, plan.copy_headroom) == (depth + 4, depth, 4)
        assert plan.warnings == ()
        assert plan.reserve_for_loads < plan.slots
