"""The reactor with its thread, real rings, files, checksums and publishers; only the device is a double."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from py_kvcache.errors import Fault
from py_kvcache.layout import block_path, file_bytes, part_dir
from py_kvcache.worker.checksum import Checksummer
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.inbox import Inbox
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.parts import ReactorSettings
from py_kvcache.worker.probe import probe_direct, probe_ring
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Publisher, PublishSettings
from py_kvcache.worker.quickcalls import set_file_flags
from py_kvcache.worker.reactor import Reactor
from py_kvcache.worker.ring import UringRing
from py_kvcache.worker.staging import StagingPool
from py_kvcache.worker.threads import ThreadRing

PAYLOAD = 1_100_000  # above the size from which requests go to kernel workers, and no multiple of 4,096
SLOTS = 6


class Memory:
    """A device whose copies are done when the call returns."""

    poll_s = 0.001

    def __init__(self) -> None:
        self.pages: dict[object, bytes] = {}

    def load(self, copies):
        for copy in copies:
            self.pages[copy.pages] = bytes(copy.buffer[:PAYLOAD])
        return self

    def store(self, copies):
        for copy in copies:
            copy.buffer[:PAYLOAD] = self.pages[copy.pages]
        return self

    def done(self) -> bool:
        return True

    def adds_up(self, pages) -> bool:
        return False

    def sums(self, number: int) -> None:
        return None


@pytest.fixture(scope="module")
def has_io_uring(tmp_path_factory):
    return probe_ring(str(tmp_path_factory.mktemp("probe")))


class Worker:
    def __init__(self, root: Path, kind: str, shift: int = 0, **more) -> None:
        self.root = root
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.waker: Inbox[None] = Inbox(self.wake_fd)
        self.ring = UringRing(64, self.wake_fd) if kind == "io_uring" else ThreadRing(6, self.wake_fd)
        size = file_bytes(PAYLOAD)
        direct = probe_direct(str(root)).direct
        self.memory = memoryview(mmap.mmap(-1, shift + SLOTS * size))[shift:]
        self.staging = StagingPool(self.memory, size, reserve_for_loads=3)
        self.device = Memory()
        self.checksum = Checksummer(2, self.waker.wake)
        settings = PublishSettings(
            FileSettings(str(root)), direct=direct, store_stop_at=1.0, store_resume_at=1.0
        )
        self.publisher = Publisher(FileOps(), settings, self.waker.wake)
        self.reactor = Reactor(
            ring=self.ring, staging=self.staging, device=self.device, checksum=self.checksum,
            publisher=self.publisher, settings=ReactorSettings(PAYLOAD, size, io_depth=4, direct=direct),
            **more,
        )  # fmt: skip
        self.reactor.start()
        self.results: dict[int, JobResult] = {}

    def blocks(self, chain: int, count: int) -> tuple[BlockWork, ...]:
        folder = part_dir(str(self.root), "model_0123456789ab", 0)
        keys = [bytes([chain, n]) * 16 + bytes(4) for n in range(count)]
        return tuple(BlockWork(block_path(folder, key), key, n, (chain, n)) for n, key in enumerate(keys))

    def submit(self, job_id: int, kind: Kind, blocks: tuple[BlockWork, ...], seconds: float = 60.0) -> None:
        self.reactor.submit(Job(job_id, kind, blocks, None, time.monotonic() + seconds))

    def wait(self, *job_ids: int, seconds: float = 60.0) -> None:
        ends = time.monotonic() + seconds
        while not self.results.keys() >= set(job_ids):
            assert time.monotonic() < ends, f"only {self.results} came"
            self.results.update({result.job_id: result for result in self.reactor.take_finished()})
            time.sleep(0.001)

    def close(self) -> bool:
        clean = self.reactor.stop(5)
        self.checksum.shutdown()
        self.publisher.shutdown(5)
        self.waker.close()
        os.close(self.wake_fd)
        return clean


@pytest.fixture(params=["io_uring", "threads"])
def worker(request, tmp_path, has_io_uring):
    if request.param == "io_uring" and not has_io_uring.ok:
        pytest.skip(has_io_uring.reason)
    made = Worker(tmp_path, request.param)
    yield made
    made.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_blocks_come_back_as_they_were_stored(worker):
    blocks = worker.blocks(1, 20)
    saved = {block.pages: os.urandom(PAYLOAD) for block in blocks}
    worker.device.pages.update(saved)
    worker.submit(1, Kind.STORE, blocks)
    worker.wait(1)
    assert worker.results[1].failed == ()
    worker.device.pages.clear()
    worker.submit(2, Kind.LOAD, blocks)
    worker.submit(3, Kind.LOAD, blocks[:7])
    worker.wait(2, 3)
    assert worker.results[2].failed == worker.results[3].failed == ()
    assert worker.device.pages == saved
    assert all(os.stat(block.path).st_size == file_bytes(PAYLOAD) for block in blocks)
    assert list(worker.root.rglob("*.tmp")) == []


def test_after_a_stop_no_descriptor_and_no_slot_is_missing(tmp_path):
    before = descriptors()
    worker = Worker(tmp_path, "threads")
    blocks = worker.blocks(1, 9)
    worker.device.pages.update({block.pages: bytes(PAYLOAD) for block in blocks})
    worker.submit(1, Kind.STORE, blocks)
    worker.submit(2, Kind.LOAD, worker.blocks(2, 30))  # none exists
    worker.wait(2)
    assert worker.close()
    assert worker.staging.check_idle() is None
    assert descriptors() == before


def harm(path: str, how: str) -> None:
    target = Path(path)
    if how == "truncated":
        os.truncate(path, 4096 * 3)
    elif how == "flipped":
        with target.open("r+b") as file:
            file.seek(70_000)
            byte = file.read(1)[0]
            file.seek(70_000)
            file.write(bytes([byte ^ 1]))
    else:
        target.unlink()
        if how == "folder":
            target.mkdir()
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "symlink":
            target.symlink_to("/etc/passwd")
        elif how == "empty":
            target.touch()


@pytest.mark.parametrize(
    ("how", "faults"),
    [
        ("deleted", {Fault.MISSING}),
        ("truncated", {Fault.WRONG_SIZE}),
        ("empty", {Fault.WRONG_SIZE}),
        ("flipped", {Fault.CHECKSUM}),
        ("folder", {Fault.IO}),
        ("symlink", {Fault.IO}),
        ("fifo", {Fault.IO}),
    ],
)
def test_a_file_harmed_between_lookup_and_load_fails_its_block_and_those_behind(worker, how, faults):
    blocks = worker.blocks(1, 6)
    worker.device.pages.update({block.pages: os.urandom(PAYLOAD) for block in blocks})
    worker.submit(1, Kind.STORE, blocks)
    worker.wait(1)
    harm(blocks[2].path, how)
    worker.submit(2, Kind.LOAD, blocks)
    worker.wait(2)
    failed = dict(worker.results[2].failed)
    assert min(failed) == 2
    assert failed[2].fault in faults
    worker.submit(3, Kind.LOAD, blocks[:2])
    worker.wait(3)
    assert worker.results[3].failed == ()
    assert worker.reactor.snapshot().leaks == 0


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_a_file_that_is_deleted_while_it_is_open_is_still_loaded(tmp_path, has_io_uring, kind):
    if kind == "io_uring" and not has_io_uring.ok:
        pytest.skip(has_io_uring.reason)
    deleted = []

    def delete(fd: int, flags: int) -> None:  # after the open, before the read
        path = os.readlink(f"/proc/self/fd/{fd}")
        os.unlink(path)
        deleted.append(path)
        set_file_flags(fd, flags)

    worker = Worker(tmp_path, kind, set_flags=delete)
    blocks = worker.blocks(1, 8)
    saved = {block.pages: os.urandom(PAYLOAD) for block in blocks}
    worker.device.pages.update(saved)
    worker.submit(1, Kind.STORE, blocks)
    worker.wait(1)
    worker.device.pages.clear()
    worker.submit(2, Kind.LOAD, blocks)
    worker.wait(2)
    assert sorted(deleted) == sorted(block.path for block in blocks)
    assert worker.results[2].failed == ()
    assert worker.device.pages == saved
    assert worker.close()
    assert worker.staging.check_idle() is None


def takes_memory_at(root: Path, shift: int) -> bool:
    """Whether a direct read here goes into memory that is so far from alignment."""
    path = root / "trial"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.preadv(fd, [memoryview(mmap.mmap(-1, 8192))[shift : shift + 4096]], 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


@pytest.mark.parametrize("shift", [1, 512])
def test_misaligned_staging_memory_costs_direct_io_and_nothing_else(tmp_path, has_io_uring, caplog, shift):
    if not probe_direct(str(tmp_path)).direct:
        pytest.skip("no O_DIRECT here")
    if not has_io_uring.ok:
        pytest.skip(has_io_uring.reason)
    accepted = takes_memory_at(tmp_path, shift)
    assert shift != 1 or not accepted
    worker = Worker(tmp_path, "io_uring", shift=shift)
    blocks = worker.blocks(1, 12)
    saved = {block.pages: os.urandom(PAYLOAD) for block in blocks}
    worker.device.pages.update(saved)
    with caplog.at_level(logging.WARNING):
        worker.submit(1, Kind.STORE, blocks)
        worker.wait(1)
        worker.device.pages.clear()
        worker.submit(2, Kind.LOAD, blocks)
        worker.wait(2)
    assert worker.results[1].failed == worker.results[2].failed == ()
    assert worker.device.pages == saved
    said = [record.message for record in caplog.records if "O_DIRECT" in record.message]
    assert len(said) == (0 if accepted else 1)
    assert all("EINVAL" in text and str(tmp_path) in text for text in said)
    assert worker.close()


def test_a_read_that_hangs_in_the_kernel_ends_its_job_at_the_deadline(tmp_path, has_io_uring):
    if not has_io_uring.ok:
        pytest.skip(has_io_uring.reason)
    # Without the test for seekable files, a FIFO with a writer is a read that waits for ever.
    worker = Worker(tmp_path, "io_uring", set_flags=lambda fd, flags: fcntl.fcntl(fd, fcntl.F_SETFL, flags))
    blocks = worker.blocks(1, 4)
    worker.device.pages.update({block.pages: os.urandom(PAYLOAD) for block in blocks})
    worker.submit(1, Kind.STORE, blocks)
    worker.wait(1)
    harm(blocks[0].path, "fifo")
    writer = os.open(blocks[0].path, os.O_RDWR)
    try:
        worker.submit(2, Kind.LOAD, blocks[:1], seconds=0.3)
        worker.submit(3, Kind.LOAD, blocks[1:])
        worker.wait(2, 3)
        assert [error.fault for _, error in worker.results[2].failed] == [Fault.TIMEOUT]
        assert worker.results[3].failed == ()
        assert worker.close()  # the cancelled read came back
        assert worker.staging.check_idle() is None
    finally:
        os.close(writer)


def test_flush_from_another_thread_returns_and_the_stores_still_arrive(worker):
    blocks = worker.blocks(1, 5)
    worker.device.pages.update({block.pages: os.urandom(PAYLOAD) for block in blocks})
    worker.submit(1, Kind.STORE, blocks)
    thread = threading.Thread(target=worker.reactor.flush, args=({1, 77}, 30.0))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    worker.wait(1)
    assert worker.results[1].failed == ()


def test_jobs_from_many_threads_all_finish_once(worker):
    blocks = worker.blocks(1, 3)
    worker.device.pages.update({block.pages: bytes(PAYLOAD) for block in blocks})
    worker.submit(0, Kind.STORE, blocks)
    worker.wait(0)

    def submit(first: int) -> None:
        for job_id in range(first, first + 25):
            worker.submit(job_id, Kind.LOAD, blocks)

    threads = [threading.Thread(target=submit, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [first + n for first in (100, 200, 300) for n in range(25)]
    worker.wait(*wanted)
    assert all(worker.results[job_id].failed == () for job_id in wanted)
