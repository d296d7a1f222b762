"""Stores stop before the volume is full, whatever the order of events, and never exceed a day's budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.worker.watermark import CHECK_EVERY_S, FILES_A_BLOCK, DayBudget, Space, Watermark

USABLE = 1000


def space(used, usable=USABLE):
    return Space(used, usable)


def test_space_counts_as_df_does_without_the_blocks_kept_for_root():
    seen = Space.of(frsize=10, blocks=100, bfree=30, bavail=20, files=50, ffree=40)
    assert seen == Space(700, 900, 10, 50)


@pytest.mark.parametrize(("stop", "resume"), [(0.8, 0.9), (1.1, 0.5), (0.5, 0), (-1, -1)])
def test_marks_that_make_no_sense_are_refused(stop, resume):
    with pytest.raises(ValueError, match="watermarks"):
        Watermark(stop, resume)


def test_between_the_marks_the_state_stays_what_it_was():
    mark = Watermark(0.9, 0.8)
    states = []
    for used in (700, 850, 901, 850, 801, 800, 850, 901):
        mark.look(0, space(used))
        states.append(mark.paused)
    assert states == [False, False, True, True, True, False, False, True]


def test_inodes_count_like_bytes_where_there_is_a_limit_of_them():
    mark = Watermark(0.9, 0.8)
    mark.look(0, Space(0, USABLE, 95, 100))
    assert mark.paused
    mark.look(0, Space(0, USABLE, 80, 100))
    assert not mark.paused
    mark.look(0, Space(0, USABLE, 95, 0))
    assert not mark.paused


def test_inodes_are_counted_between_looks_like_bytes():
    mark = Watermark(0.9, 0.8)
    mark.look(0, Space(0, 1 << 40, used_files=10, usable_files=100))
    # 80 are left below the mark: each block may take three.
    admitted = 0
    while mark.admit(1):
        admitted += 1
        mark.finish(1, written=admitted % 2 == 0)
        if admitted % 2:
            assert mark.admit(1)
            mark.finish(1, written=False)
    assert admitted // 2 == 80 // FILES_A_BLOCK
    assert mark.paused


def test_the_volume_is_looked_at_before_a_quarter_of_its_free_inodes_is_used():
    mark = Watermark(0.9, 0.8)
    mark.look(0, Space(0, 1 << 40, used_files=10, usable_files=100))
    blocks = 0
    while not mark.is_due(0.1, 1):
        assert mark.admit(1)
        blocks += 1
    assert 1 <= blocks <= 80 // FILES_A_BLOCK // 4


def test_the_volume_is_looked_at_every_second_and_before_a_quarter_of_the_gap_is_used():
    mark = Watermark(0.9, 0.8)
    assert mark.is_due(0, 1)
    mark.look(0, space(500))  # the gap is 400
    assert not mark.is_due(0.5, 100)
    assert mark.is_due(0.5, 101)
    assert mark.is_due(CHECK_EVERY_S, 1)
    assert mark.admit(60)
    assert mark.admit(40)
    assert mark.is_due(0.5, 1)
    mark.finish(40, written=False)
    assert not mark.is_due(0.5, 40)
    mark.finish(60, written=True)
    assert mark.is_due(0.5, 41)


def test_bytes_in_flight_stay_counted_after_a_look_and_written_ones_do_not():
    mark = Watermark(0.9, 0.8)
    mark.look(0, space(500))
    assert mark.admit(100)
    assert mark.admit(100)
    mark.finish(100, written=True)
    mark.look(0, space(600))
    assert mark.in_flight == 100
    assert mark.admit(200)  # 600 + 100 in flight + 200 reach the mark
    assert not mark.admit(1)
    assert mark.paused


def test_a_look_that_failed_changes_nothing_but_is_not_repeated_at_once():
    mark = Watermark(0.9, 0.8)
    mark.look(0, space(950))
    mark.look(1, None)
    assert mark.paused
    assert not mark.is_due(1.5, 1)
    assert not mark.admit(1)
    fresh = Watermark(0.9, 0.8)
    fresh.look(0, None)
    assert fresh.admit(1)  # nothing known: the file system itself will say


def test_a_mark_at_the_very_top_never_pauses_and_never_looks():
    mark = Watermark(1.0, 1.0)
    assert not mark.is_due(0, 10**15)
    assert mark.admit(10**15)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "write", "drop", "evict", "wait"]), st.integers(1, 300)), max_size=200
)


@given(EVENTS, st.sampled_from([(0.9, 0.8), (0.5, 0.5), (0.99, 0.1)]))
def test_alone_on_a_volume_we_never_exceed_the_mark(events, marks):
    mark = Watermark(*marks)
    used, now, open_files, looks = 0, 0.0, [], [0.0]
    for what, size in events:
        if what == "ask":
            if mark.is_due(now, size):
                mark.look(now, space(used))
                looks.append(now)
            assert now - looks[-1] < CHECK_EVERY_S or mark.is_due(now, 0)
            if mark.admit(size):
                open_files.append(size)
        elif what in ("write", "drop") and open_files:
            done = open_files.pop(size % len(open_files))
            mark.finish(done, written=what == "write")
            used += done if what == "write" else 0
        elif what == "evict":
            used = max(0, used - size)
        else:
            now += size / 250
        assert used + sum(open_files) <= marks[0] * USABLE
        assert mark.in_flight == sum(open_files)


@given(st.lists(st.tuples(st.integers(0, 3 * 3600), st.integers(1, 60), st.booleans()), max_size=150))
def test_no_24_hours_see_more_than_the_budget(steps):
    budget, now, spent = DayBudget(100), 0, []
    for wait, nbytes, is_written in steps:
        now += wait
        if budget.admit(now, nbytes):
            if is_written:
                spent.append((now, nbytes))
            else:
                budget.give_back(nbytes)
    for start, _ in spent:
        assert sum(nbytes for when, nbytes in spent if start <= when < start + 86_400) <= 100


def test_a_spent_budget_comes_back_after_a_day_and_bytes_given_back_at_once():
    budget = DayBudget(100)
    assert budget.admit(0, 100)
    assert not budget.admit(10, 1)
    budget.give_back(30)
    assert budget.admit(10, 30)
    assert not budget.admit(23 * 3600, 1)
    assert budget.admit(25 * 3600, 100)


def test_zero_means_no_budget():
    budget = DayBudget(0)
    assert all(budget.admit(0, 10**15) for _ in range(10))
    budget.give_back(10**15)
    assert budget.admit(0, 1)
