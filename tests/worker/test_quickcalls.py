"""The calls do what Python's own do, errors included, and the interpreter stays with the caller."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time

import pytest

from py_kvcache.worker.quickcalls import clear_event, set_file_flags, signal_event


@pytest.fixture
def event():
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def test_an_event_counts_signals_and_is_cleared_at_once(event):
    for _ in range(3):
        signal_event(event)
    assert os.eventfd_read(event) == 3
    signal_event(event)
    clear_event(event)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)


def test_a_full_or_an_empty_event_is_no_error(event):
    full = 2**64 - 2
    os.eventfd_write(event, full)
    signal_event(event)
    assert os.eventfd_read(event) == full
    clear_event(event)
    signal_event(event)
    assert os.eventfd_read(event) == 1


@pytest.mark.parametrize("call", [signal_event, clear_event, lambda fd: set_file_flags(fd, 0)])
def test_a_closed_descriptor_is_an_error(call):
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        call(2**30)
    assert caught.value.errno == errno.EBADF


def test_flags_are_set_on_a_file_and_refused_for_a_pipe(tmp_path):
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
    set_file_flags(fd, 0)
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(fd)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with pytest.raises(OSError) as caught:
        set_file_flags(reader, 0)
    assert caught.value.errno == errno.ESPIPE
    assert fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(reader)
    os.close(writer)


def test_nobody_else_gets_the_interpreter_during_a_call(event, tmp_path):
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(10.0)  # from here on a thread keeps the interpreter until it lets go of it
    try:
        time.sleep(0)  # the other one may come in before, but not between
        before = counted[0]
        for _ in range(200):
            signal_event(event)
            clear_event(event)
            set_file_flags(fd, 0)
        after = counted[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
        os.close(fd)
    assert after == before
