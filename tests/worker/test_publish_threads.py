"""The publisher as the reactor sees it: one result a call, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from worker_publisher import PAYLOAD, Bench, outcome_of

from py_kvcache.errors import Fault
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publish import Op

# ---- one result a call


def test_create_commit_and_a_second_create_answer_what_happened(tmp_path, benches):
    bench = benches(tmp_path)
    created = bench.create(1)
    assert (created.op, created.error, created.exists) == (Op.CREATE, None, False)
    os.write(created.fd, b"data")
    assert os.path.dirname(created.temp) == os.path.dirname(bench.final(1))
    committed = bench.commit(created, 1)
    assert (committed.op, committed.error, committed.exists) == (Op.COMMIT, None, False)
    again = bench.create(1)
    assert (again.op, again.fd, again.error, again.exists) == (Op.CREATE, -1, None, True)
    assert bench.files() == [bench.final(1)]


def test_abandon_closes_and_removes(tmp_path, benches):
    bench = benches(tmp_path)
    created = bench.create(1)
    assert bench.abandon(created).op is Op.ABANDON
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(created.fd)
    assert bench.files() == []


def test_a_commit_that_meets_another_writers_file_says_so(tmp_path, benches):
    bench, other = benches(tmp_path), benches(tmp_path)
    created = bench.create(1)
    other.store(1)
    assert outcome_of(bench.commit(created, 1)) == "exists"
    assert bench.is_hit(1)


def test_many_calls_from_many_threads_give_one_result_each(tmp_path, benches):
    bench = benches(tmp_path)

    def call(start):
        for token in range(start, start + 50):
            bench.publisher.create(token, bench.final(token), 10)

    callers = [threading.Thread(target=call, args=(start,)) for start in (0, 50, 100)]
    for caller in callers:
        caller.start()
    for _ in range(150):
        assert bench.wake.acquire(timeout=20)
    results = bench.publisher.results()
    assert sorted(result.token for result in results) == list(range(150))
    assert len({result.temp for result in results}) == 150
    for result in results:
        bench.publisher.abandon(result.token, result.fd, result.temp)
    assert bench.publisher.shutdown(20)
    assert bench.files() == []


def test_a_defect_in_a_step_becomes_a_failed_block_not_a_lost_one(tmp_path, benches, caplog):
    bench = benches(tmp_path, store_bytes_per_day=10)
    bench.ops.lstat = lambda path: 1 / 0
    assert outcome_of(bench.create(1, 10)) == (Fault.IO, errno.EIO)
    assert "ZeroDivisionError" in caplog.text
    bench.ops.lstat = os.lstat
    assert outcome_of(bench.create(2, 10)) == "done"  # what the defect had admitted was given back


def test_shutdown_finishes_what_is_owed_and_cancels_what_comes_later(tmp_path, benches):
    bench = benches(tmp_path)
    one, two = bench.create(1), bench.create(2)
    bench.publisher.commit(11, one.fd, one.temp, bench.final(1), 0)
    assert bench.publisher.shutdown(20)
    bench.publisher.create(12, bench.final(3), 10)
    bench.publisher.abandon(13, two.fd, two.temp)
    results = {result.token: result for result in bench.publisher.results()}
    assert set(results) == {11, 12, 13}
    assert results[12].error.fault is Fault.CANCELLED
    assert bench.files() == [bench.final(1)]


def test_shutdown_does_not_wait_for_a_call_that_hangs(tmp_path):
    release = threading.Event()
    bench = Bench(tmp_path)
    bench.ops.lstat = lambda path: release.wait(60)
    bench.publisher.create(1, bench.final(1), 10)
    assert not bench.publisher.shutdown(0.05)
    release.set()
    assert bench.publisher.shutdown(20)


# ---- a volume that fails for a while


class Brownout(FileOps):
    """Every call on the file system fails until the clock says that the minute is over."""

    def __init__(self, code, clock):
        super().__init__()
        self.unlinked = []
        names = "open pread fstat lstat link rename rename_noreplace mkdir statvfs utime fsync unlink"
        for name in names.split():
            setattr(self, name, self._guard(name, getattr(self, name), code, clock))

    def _guard(self, name, real, code, clock):
        def call(*arguments, **named):
            if name == "unlink" and str(arguments[0]).endswith(".bin"):
                self.unlinked.append(arguments[0])
            if clock.now < clock.good_again and name in clock.failing:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **named)

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("failing", ["everything", "open", "fstat", "pread", "lstat"])
def test_a_minute_of_errors_removes_nothing_and_afterwards_there_are_hits(tmp_path, benches, code, failing):
    bench = benches(tmp_path, store_stop_at=0.99, store_resume_at=0.98)
    clock = bench.clock
    clock.good_again = 0
    ops = Brownout(code, clock)
    clock.failing = set(vars(ops)) if failing == "everything" else {failing}
    bench.ops.__dict__.update(ops.__dict__)
    for number in range(3):
        assert outcome_of(bench.store(number, 8192)) == "done"
    clock.good_again = clock.now + 60
    while clock.now < clock.good_again:
        for number in range(3):
            # Even a load that is sure of its damage (bad memory, say) does not get a file removed now.
            outcome = bench.examine(number, 8192)
            assert not outcome.removed
            assert outcome.code == (code if failing != "lstat" else 0)
        new = bench.store(100 + int(clock.now), 8192)
        if failing == "everything":
            assert outcome_of(new) == (Fault.IO, code)
        clock.now += 5
    assert ops.unlinked == []
    assert all(bench.is_hit(number, 8192) for number in range(3))
    assert outcome_of(bench.store(0, 8192)) == "exists"
    assert outcome_of(bench.store(50, 8192)) == "done"
    assert bench.is_hit(50, 8192)


# ---- quarantine through the publisher


def test_a_damaged_file_is_removed_in_the_background_and_its_block_can_be_stored_again(tmp_path, benches):
    bench = benches(tmp_path)
    bench.store(1)
    with open(bench.final(1), "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe")
    outcome = bench.examine(1)
    assert outcome.removed
    assert outcome.fault is Fault.CHECKSUM
    assert outcome_of(bench.store(1)) == "done"
    assert bench.is_hit(1)


def test_a_second_look_that_hangs_does_not_stop_stores_and_is_asked_once(tmp_path, benches):
    release, opened = threading.Event(), []
    bench = benches(tmp_path)
    bench.store(1)
    real_open = bench.ops.open

    def open_(path, flags, *mode):
        if path == bench.final(1):
            opened.append(path)
            release.wait(60)
        return real_open(path, flags, *mode)

    bench.ops.open = open_
    for _ in range(1000):
        bench.publisher.quarantine(bench.final(1), bench.key(1), PAYLOAD)
    try:
        assert outcome_of(bench.store(2)) == "done"
    finally:
        release.set()
    assert bench.wake.acquire(timeout=20)
    deadline = time.monotonic() + 20
    while not bench.publisher.outcomes():
        assert time.monotonic() < deadline
    assert opened == [bench.final(1)]


def test_suspicions_are_bounded(tmp_path, benches):
    release = threading.Event()
    bench = benches(tmp_path)
    real_open = bench.ops.open
    bench.ops.open = lambda *arguments: release.wait(60) and real_open(*arguments)
    for number in range(1000):
        bench.publisher.quarantine(bench.final(number), bench.key(number), PAYLOAD)
    release.set()
    for _ in range(64):
        assert bench.wake.acquire(timeout=20)
    assert not bench.wake.acquire(timeout=0.2)
    assert len(bench.publisher.outcomes()) == 64
