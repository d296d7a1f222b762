"""Append and wake."""

from __future__ import annotations

import os
import select
import threading

import pytest

from py_kvcache.worker.budget import RateBudget
from py_kvcache.worker.inbox import Inbox


@pytest.fixture
def wake_fd():
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_messages_come_out_in_order_and_at_most_so_many(wake_fd):
    inbox: Inbox[int] = Inbox(wake_fd)
    assert all(inbox.post(n) for n in range(5))
    assert inbox.drain(3) == [0, 1, 2]
    assert len(inbox) == 2
    assert inbox.drain(3) == [3, 4]
    assert inbox.drain(3) == []


def test_posting_wakes_the_reader(wake_fd):
    inbox: Inbox[int] = Inbox(wake_fd)
    assert not readable(wake_fd)
    inbox.post(1)
    assert readable(wake_fd)


def test_a_full_wake_counter_is_no_error(wake_fd):
    os.eventfd_write(wake_fd, 0xFFFFFFFFFFFFFFFE)
    inbox: Inbox[int] = Inbox(wake_fd)
    assert inbox.post(1)
    inbox.wake()
    assert inbox.drain(9) == [1]


def test_a_closed_inbox_returns_what_was_not_read_and_refuses_the_rest(wake_fd):
    inbox: Inbox[int] = Inbox(wake_fd)
    inbox.post(1)
    assert inbox.close() == [1]
    assert not inbox.post(2)
    assert inbox.close() == []


def test_a_late_wake_does_not_write_into_the_file_that_got_the_closed_number():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    inbox: Inbox[int] = Inbox(fd)
    inbox.close()
    os.close(fd)
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.dup2(other, fd)
        inbox.wake()
        inbox.post(1)
        assert not readable(fd)
    finally:
        os.close(other)
        if other != fd:
            os.close(fd)


def test_no_message_of_many_threads_is_lost(wake_fd):
    inbox: Inbox[tuple[int, int]] = Inbox(wake_fd)
    threads = [
        threading.Thread(target=lambda n=n: [inbox.post((n, i)) for i in range(200)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = inbox.drain(10_000)
    assert len(got) == 800
    for n in range(4):
        assert [i for m, i in got if m == n] == list(range(200))


# ---- the rate limit


def test_without_a_limit_everything_may_go_at_once():
    budget = RateBudget(0, 1.0)
    budget.spend(1 << 40, 0.0)
    assert budget.allows(0.0)
    assert budget.wait(0.0) == 0.0


@pytest.mark.parametrize(("burst_s", "least"), [(1.0, 1100), (0.0, 1000)])
def test_after_a_burst_the_rate_holds(burst_s: float, least: int):
    budget, now, sent = RateBudget(100, burst_s), 50.0, 0
    while now < 60.0:
        while budget.allows(now):
            budget.spend(30, now)
            sent += 30
        now += budget.wait(now)
    assert least - 30 <= sent <= least + 30


def test_a_block_larger_than_a_second_of_rate_still_goes_and_is_paid_for_afterwards():
    budget = RateBudget(10, 1.0)
    assert budget.allows(5.0)
    budget.spend(100, 5.0)
    assert not budget.allows(13.9)
    assert budget.wait(13.0) == pytest.approx(1.0)
    assert budget.allows(14.0)
