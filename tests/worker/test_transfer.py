"""The table of a block's life."""

from __future__ import annotations

import pytest

from py_kvcache.worker import transfer
from py_kvcache.worker.transfer import (
    ENDED,
    HOLDS_FD,
    HOLDS_SLOT,
    LOST,
    TABLE,
    Event,
    LoadState,
    StoreState,
    step,
)

STATES = [*LoadState, *StoreState]
L, S, E = LoadState, StoreState, Event


def test_a_load_that_goes_well_takes_these_steps():
    state = L.QUEUED
    for event in (E.OPEN, E.OPENED, E.READ, E.AGAIN, E.FILLED, E.VERIFIED, E.COPY, E.COPIED):
        state = step(state, event)
    assert state is L.DONE


def test_a_store_that_goes_well_takes_these_steps():
    state = S.QUEUED
    for event in (E.COPY, E.COPIED, E.SEALED, E.CREATED, E.AGAIN, E.WRITTEN, E.PUBLISHED):
        state = step(state, event)
    assert state is S.DONE


def test_load_and_store_states_have_different_numbers():
    assert len({int(state) for state in STATES}) == len(STATES)
    assert sorted(int(state) for state in STATES) == list(range(len(STATES)))


@pytest.mark.parametrize("state", STATES, ids=str)
def test_every_event_that_is_not_in_the_table_raises(state):
    for event in Event:
        if event in TABLE[state]:
            assert type(step(state, event)) is type(state)
        else:
            with pytest.raises(transfer.IllegalStepError, match=event.name):
                step(state, event)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_every_state_can_end(state):
    seen, todo = set(), [state]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo.extend(TABLE[here].values())
    assert seen & ENDED


def test_the_ended_states_are_these_and_hold_nothing():
    assert {L.DONE, L.FAILED, S.DONE, S.FAILED} == ENDED
    assert not ENDED & (HOLDS_SLOT | HOLDS_FD)


def test_a_device_copy_cannot_be_dropped_or_lost():
    for state in (L.COPYING, S.COPYING):
        assert E.DROP not in TABLE[state]


def test_every_other_begun_state_can_be_dropped_at_any_time():
    for state in set(STATES) - ENDED - LOST - {L.COPYING, S.COPYING}:
        after = step(state, E.DROP)
        assert after in LOST or after in ENDED


def test_a_lost_block_only_waits_for_its_release():
    for state in LOST:
        assert list(TABLE[state]) == [E.RELEASED]
        assert step(state, E.RELEASED) in (L.FAILED, S.FAILED)


def test_what_the_kernel_may_still_write_to_or_read_from_keeps_its_slot():
    assert {L.READING_LOST, L.VERIFYING_LOST, S.HASHING_LOST, S.WRITING_LOST} == LOST & HOLDS_SLOT


def test_a_store_that_hangs_before_its_write_gives_its_slot_back_when_dropped():
    assert step(S.CREATING, E.DROP) not in HOLDS_SLOT


def test_no_event_takes_a_slot_but_the_read_the_copy_from_the_device_and_what_shares_one():
    takers = {
        (state, event)
        for state, row in TABLE.items()
        for event, after in row.items()
        if state not in HOLDS_SLOT and after in HOLDS_SLOT
    }
    shared = {(L.QUEUED, E.HIT), (L.JOINED, E.HIT)}
    assert takers == {(L.OPENED, E.READ), (S.QUEUED, E.COPY), *shared}


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        TABLE[L.DONE] = {}  # type: ignore[index]
