"""The books of what exists: seen, being stored, banned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.errors import Fault
from py_kvcache.scheduler import lookup
from py_kvcache.scheduler.lookup import (
    FIRST_BAN_S,
    LONGEST_BAN_S,
    SEEN_FOR_S,
    SET_ASIDE_S,
    Index,
    Presence,
)

A, B, C = ("space", b"a"), ("space", b"b"), ("space", b"c")
HEALED = [Fault.MISSING]
NOT_HEALED = [fault for fault in Fault if fault not in HEALED]


def test_nothing_is_known_at_first():
    assert Index().presence(A, 0) is Presence.UNKNOWN


def test_a_seen_block_is_remembered_and_looked_at_again_when_that_expires():
    index = Index()
    index.saw([A], 10)
    assert index.presence(A, 10 + SEEN_FOR_S - 0.001) is Presence.SEEN
    assert index.presence(A, 10 + SEEN_FOR_S) is Presence.UNKNOWN
    assert index.presence(("other space", b"a"), 10) is Presence.UNKNOWN


def test_seeing_a_block_again_extends_its_time():
    index = Index()
    index.saw([A], 0)
    index.saw([A], 50)
    assert index.presence(A, SEEN_FOR_S + 49) is Presence.SEEN


def test_the_book_of_seen_blocks_is_bounded_and_drops_the_oldest():
    index = Index(max_seen=2)
    index.saw([A, B], 0)
    index.saw([A], 1)
    index.saw([C], 2)
    assert [index.presence(block, 3) for block in (A, B, C)] == [
        Presence.SEEN,
        Presence.UNKNOWN,
        Presence.SEEN,
    ]


def test_a_forgotten_block_is_asked_for_again():
    index = Index()
    index.saw([A], 0)
    index.forget([A, B])
    assert index.presence(A, 0) is Presence.UNKNOWN


def test_a_block_under_way_is_storing_until_its_deadline_and_then_unknown():
    index = Index()
    index.store_began(A, deadline=60)
    assert index.presence(A, 59.9) is Presence.STORING
    assert index.presence(A, 60) is Presence.UNKNOWN
    assert index.storing == 1


def test_a_stored_block_is_seen_at_once():
    index = Index()
    index.store_began(A, 60)
    assert index.store_ended(A, 1) is True
    assert index.presence(A, 1) is Presence.SEEN
    assert index.storing == 0


def test_a_block_that_one_rank_failed_to_store_is_not_seen():
    index = Index()
    index.store_began(A, 60)
    index.store_failed(A, "no_space")
    assert index.store_ended(A, 1) is False
    assert index.presence(A, 1) is Presence.UNKNOWN


def test_the_end_of_a_store_that_nobody_began_says_nothing():
    index = Index()
    index.store_failed(A, "io")
    assert index.store_ended(A, 1) is False
    assert index.presence(A, 1) is Presence.UNKNOWN


def test_only_late_stores_are_given_up():
    index = Index()
    index.store_began(A, 10)
    index.store_began(B, 20)
    assert index.expire_stores(10) == [A]
    assert index.storing == 1
    assert index.store_ended(A, 11) is False


def test_a_failed_load_is_a_miss_for_30_seconds_and_then_asked_for_again():
    index = Index()
    index.saw([A], 0)
    assert index.load_failed(A, "io", 0) == FIRST_BAN_S == 30
    assert index.presence(A, 29.9) is Presence.BANNED
    assert index.presence(A, 30) is Presence.UNKNOWN


def test_the_ban_doubles_with_each_failure_up_to_an_hour():
    index = Index()
    now, lengths = 0.0, []
    for _ in range(20):
        lengths.append(index.load_failed(A, "io", now))
        now += lengths[-1]
    assert lengths[:5] == [30, 60, 120, 240, 480]
    assert lengths[-1] == LONGEST_BAN_S


def test_a_block_left_alone_for_twice_its_ban_begins_with_a_short_one_again():
    index = Index()
    assert [index.load_failed(A, "missing", now) for now in (0, 30, 90)] == [30, 60, 120]
    assert index.load_failed(A, "missing", 90 + 120 + 239) == 240
    assert index.load_failed(A, "missing", 449 + 240 + 480) == 30


def test_namespaces_are_listed_while_they_have_blocks_being_stored():
    index = Index()
    index.store_began(("a", b"1"), 60)
    index.store_began(("a", b"1"), 60)
    index.store_began(("b", b"1"), 10)
    assert set(index.storing_spaces) == {"a", "b"}
    index.expire_stores(10)
    assert index.storing_spaces == ("a",)
    index.store_ended(("a", b"1"), 11)
    assert index.storing_spaces == ()
    index.store_began(("c", b"1"), 60)
    index.clear()
    assert index.storing_spaces == ()


def test_a_ban_is_stronger_than_a_sighting_and_than_a_store_under_way():
    index = Index()
    index.load_failed(A, "checksum", 0)
    index.saw([A], 1)
    assert index.presence(A, 1) is Presence.BANNED
    index.store_began(A, 60)
    assert index.presence(A, 1) is Presence.BANNED


@pytest.mark.parametrize("fault", HEALED)
def test_a_store_heals_a_ban_for_absence(fault: Fault):
    index = Index()
    index.load_failed(A, fault.value, 0)
    index.store_began(A, 60)
    index.store_ended(A, 1)
    assert index.presence(A, 1) is Presence.SEEN


@pytest.mark.parametrize("fault", NOT_HEALED)
def test_a_store_does_not_heal_another_ban_since_it_may_have_found_the_damaged_file_still_there(fault: Fault):
    index = Index()
    index.load_failed(A, fault.value, 0)
    index.store_began(A, 60)
    index.store_ended(A, 1)
    assert index.presence(A, 1) is Presence.BANNED


def test_a_failed_store_heals_nothing():
    index = Index()
    index.load_failed(A, "checksum", 0)
    index.store_began(A, 60)
    index.store_failed(A, "no_space")
    index.store_ended(A, 1)
    assert index.presence(A, 1) is Presence.BANNED


def fail_store(index: Index, fault: str, now: float) -> None:
    index.store_began(A, now + 60)
    index.store_failed(A, fault)
    index.store_ended(A, now)


def test_a_store_that_failed_by_itself_is_refused_for_5_seconds_and_then_for_twice_as_long():
    index, now = Index(), 0.0
    for length in (5, 10, 20, 40, 80, 160, 320, 600, 600):
        assert not index.store_refused(A, now)
        fail_store(index, "io", now)
        assert index.store_refused(A, now + length - 0.1)
        now += length
    assert index.presence(A, now) is Presence.UNKNOWN, "a refused store says nothing about loads"


def test_a_store_that_works_ends_the_refusals():
    index = Index()
    for now in (0, 5):
        fail_store(index, "io", now)
    index.store_began(A, 60)
    index.store_ended(A, 20)
    fail_store(index, "io", 30)
    assert index.store_refused(A, 34) and not index.store_refused(A, 35)


@pytest.mark.parametrize("fault", ["paused", "no_space", "queue_full", "cancelled", "timeout", "device"])
def test_a_store_that_failed_for_another_reason_may_be_tried_at_once(fault: str):
    index = Index()
    fail_store(index, fault, 0)
    assert not index.store_refused(A, 0)


def test_a_reset_forgets_refusals():
    index = Index()
    fail_store(index, "io", 0)
    index.clear()
    assert not index.store_refused(A, 0)


def test_a_healed_block_that_fails_again_is_banned_for_longer():
    index = Index()
    index.load_failed(A, "checksum", 0)
    index.store_began(A, 60)
    index.store_ended(A, 1)
    assert index.load_failed(A, "checksum", 2) == 60


def test_the_book_of_bans_is_bounded():
    index = Index(max_banned=2)
    for block in (A, B, C):
        index.load_failed(block, "io", 0)
    assert index.presence(A, 1) is Presence.UNKNOWN
    assert index.presence(C, 1) is Presence.BANNED


def test_a_reset_forgets_everything():
    index = Index()
    index.saw([A], 0)
    index.load_failed(B, "io", 0)
    index.store_began(C, 60)
    index.clear()
    assert {index.presence(block, 0) for block in (A, B, C)} == {Presence.UNKNOWN}
    assert index.storing == 0


EVENTS = st.lists(
    st.tuples(st.sampled_from(["saw", "forget", "failed", "began", "ended", "lost"]), st.integers(0, 3)),
    max_size=40,
)


@given(EVENTS)
def test_no_history_makes_a_block_both_banned_and_answered_as_present(events: list[tuple[str, int]]):
    index, banned_until = Index(), dict.fromkeys(range(4), 0.0)
    for now, (what, number) in enumerate(events):
        block = ("s", bytes([number]))
        if what == "saw":
            index.saw([block], now)
        elif what == "forget":
            index.forget([block])
        elif what == "failed":
            banned_until[number] = now + index.load_failed(block, "io", now)
        elif what == "began":
            index.store_began(block, now + 5)
        elif what == "lost":
            index.store_failed(block, "io")
        else:
            index.store_ended(block, now)
        for other in range(4):
            present = index.presence(("s", bytes([other])), now)
            assert (present is Presence.BANNED) == (now < banned_until[other])


def test_seen_blocks_are_looked_at_again_within_a_minute_since_others_evict():
    assert lookup.SEEN_FOR_S <= 60


def test_a_block_is_set_aside_each_time_and_a_longer_ban_stays():
    index = Index()
    for now in (0.0, 100.0):
        index.saw([A], now)
        index.set_aside([A], "adapter", now)
        assert index.presence(A, now + SET_ASIDE_S - 0.001) is Presence.BANNED
        assert index.presence(A, now + SET_ASIDE_S) is Presence.UNKNOWN
    index.load_failed(B, "io", 0)
    index.set_aside([B], "adapter", 1)
    assert index.presence(B, FIRST_BAN_S - 1) is Presence.BANNED
