"""Both rings do real I/O on real file systems and mean the same."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import select
import shutil
import stat
import subprocess
import tempfile
import threading
import tracemalloc
import weakref
from pathlib import Path

import pytest

from py_kvcache.worker import ring as ring_module
from py_kvcache.worker import threads as threads_module
from py_kvcache.worker.iovecs import IovecCache
from py_kvcache.worker.ring import UringRing
from py_kvcache.worker.threads import ThreadRing

MIB = 1 << 20


class Driver:
    """Runs a ring as the reactor does: submit, select on the eventfd, drain."""

    def __init__(self, kind, size=32, workers=None):
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ring = UringRing(size, self.wake, workers) if kind == "io_uring" else ThreadRing(size, self.wake)

    def wait(self, count):
        """Results of the next ``count`` completions by token; fails after 20 s or on a repeated token."""
        results = {}
        self.ring.submit()
        while len(results) < count:
            ready, _, _ = select.select([self.ring.fileno()], [], [], 20)
            assert ready, f"only {results} completed"
            os.eventfd_read(self.wake)
            for token, result in self.ring.completions():
                assert token not in results
                results[token] = result
            self.ring.submit()
        return results

    def one(self, operation, *arguments):
        getattr(self.ring, operation)(77, *arguments)
        return self.wait(1)[77]

    def close(self):
        self.ring.shutdown()
        os.close(self.wake)


@pytest.fixture(params=["io_uring", "threads"])
def kind(request):
    return request.param


@pytest.fixture
def driver(kind):
    made = Driver(kind)
    yield made
    made.close()


def _mount_overlay(base):
    for part in ("lower", "upper", "work", "merged"):
        (base / part).mkdir()
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(base / "merged")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(params=["/var/tmp", "/dev/shm", "overlay"])
def folder(request):
    """An empty folder on ext4 (or whatever /var/tmp is), tmpfs or an overlay."""
    if request.param != "overlay":
        with tempfile.TemporaryDirectory(dir=request.param) as made:
            yield Path(made)
        return
    errors = []
    # An overlay cannot lie on another one, which /var/tmp may be in a container.
    for below in ("/var/tmp", "/dev/shm"):
        base = Path(tempfile.mkdtemp(dir=below))
        mounted = _mount_overlay(base)
        if mounted.returncode == 0:
            yield base / "merged"
            subprocess.run(["umount", str(base / "merged")], check=True)
            shutil.rmtree(base)
            return
        errors.append(mounted.stderr)
        shutil.rmtree(base)
    pytest.skip(f"overlay cannot be mounted here: {errors}")


def aligned(size, fill=None):
    memory = memoryview(mmap.mmap(-1, size))
    if fill is not None:
        memory[:] = fill
    return memory


def open_file(driver, path, flags, mode=0o600):
    fd = driver.one("openat", str(path), flags | os.O_CLOEXEC, mode)
    assert fd >= 0, os.strerror(-fd)
    return fd


@pytest.mark.parametrize("size", [4096, MIB - 4096, MIB, 5 * MIB + 4096])
@pytest.mark.parametrize("direct", [os.O_DIRECT, 0], ids=["direct", "buffered"])
def test_bytes_come_back_as_they_were_written(driver, folder, direct, size):
    content = os.urandom(size)
    path = folder / "block.bin"
    fd = open_file(driver, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | direct)
    assert driver.one("write", fd, aligned(size, content), 0) == size
    assert driver.one("fsync", fd) == 0
    back = aligned(size)
    assert driver.one("read", fd, back, 0) == size
    assert back == content
    assert driver.one("close", fd) == 0
    assert path.read_bytes() == content
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_offsets_and_parts_of_a_buffer_are_honoured(driver, folder):
    path = folder / "block.bin"
    path.write_bytes(bytes(4096) + b"a" * 4096 + b"b" * 4096)
    fd = open_file(driver, path, os.O_RDWR)
    slot = aligned(16384, bytes(16384))
    assert driver.one("read", fd, slot[4096:12288], 4096) == 8192
    assert slot == bytes(4096) + b"a" * 4096 + b"b" * 4096 + bytes(4096)
    assert driver.one("write", fd, slot[8192:12288], 0) == 4096
    assert path.read_bytes() == b"b" * 4096 + b"a" * 4096 + b"b" * 4096
    assert driver.one("read", fd, slot[:8192], 8192) == 4096, "short at the end of the file"
    assert driver.one("read", fd, slot[:4096], 12288) == 0
    os.close(fd)


def test_open_creates_with_the_given_mode_and_close_on_exec(driver, tmp_path):
    before = os.umask(0)
    try:
        fd = open_file(driver, tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o664
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_failures_are_negative_errnos(driver, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    read_only = os.O_RDONLY | os.O_CLOEXEC
    assert driver.one("openat", f"{tmp_path}/absent", read_only) == -errno.ENOENT
    assert driver.one("openat", f"{tmp_path}/file/below", read_only) == -errno.ENOTDIR
    assert driver.one("openat", f"{tmp_path}/link", read_only | os.O_NOFOLLOW) == -errno.ELOOP
    exists = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    assert driver.one("openat", f"{tmp_path}/file", exists, 0o600) == -errno.EEXIST
    directory = open_file(driver, tmp_path, os.O_RDONLY)
    assert driver.one("read", directory, aligned(4096), 0) == -errno.EISDIR
    reader = open_file(driver, tmp_path / "file", os.O_RDONLY)
    assert driver.one("write", reader, aligned(4096), 0) == -errno.EBADF
    for fd in (directory, reader):
        assert driver.one("close", fd) == 0
        assert driver.one("close", fd) == -errno.EBADF
        assert driver.one("fsync", fd) == -errno.EBADF
    assert driver.ring.in_flight() == 0


def test_a_misaligned_direct_read_is_einval(driver):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "block.bin")
        path.write_bytes(bytes(8192))
        fd = driver.one("openat", str(path), os.O_RDONLY | os.O_DIRECT)
        if fd == -errno.EINVAL:
            pytest.skip("/var/tmp takes no O_DIRECT here")
        assert driver.one("read", fd, aligned(8192)[:4096], 100) == -errno.EINVAL
        os.close(fd)


def test_one_bad_request_does_not_hold_up_the_rest_of_its_batch(driver, tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(b"k" * 4096)
    good = os.open(path, os.O_RDONLY)
    buffers = [aligned(4096) for _ in range(9)]
    for token, buffer in enumerate(buffers):
        driver.ring.read(token, 1_000_000 if token % 2 else good, buffer, 0)
    results = driver.wait(9)
    assert results == {token: -errno.EBADF if token % 2 else 4096 for token in range(9)}
    os.close(good)


def test_a_full_queue_flushes_and_goes_on(kind, tmp_path):
    path = tmp_path / "block.bin"
    content = os.urandom(200 * 512)
    path.write_bytes(content)
    driver = Driver(kind, size=4)  # io_uring: 4 submission and 8 completion entries
    fd = os.open(path, os.O_RDONLY)
    buffers = [aligned(512) for _ in range(200)]
    for token, buffer in enumerate(buffers):
        driver.ring.read(token, fd, buffer, 512 * token)
    assert driver.ring.in_flight() == 200
    assert driver.wait(200) == dict.fromkeys(range(200), 512)
    assert b"".join(buffers) == content
    assert driver.ring.in_flight() == 0
    os.close(fd)
    driver.close()


def test_a_transfer_above_the_limit_is_a_short_count_that_can_be_continued(driver, folder, monkeypatch):
    monkeypatch.setattr(ring_module, "MAX_TRANSFER", MIB)
    monkeypatch.setattr(threads_module, "MAX_TRANSFER", MIB)
    path = folder / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(3 * MIB)
        file.seek(3 * MIB - 4)
        file.write(b"tail")
    fd = open_file(driver, path, os.O_RDWR)
    slot = aligned(3 * MIB, b"\xff" * (3 * MIB))
    got = []
    while sum(got) < 3 * MIB:
        got.append(driver.one("read", fd, slot[sum(got) :], sum(got)))
    assert got == [MIB] * 3
    assert bytes(slot) == path.read_bytes()
    assert driver.one("write", fd, slot, 0) == MIB
    os.close(fd)


def test_the_limit_is_below_the_kernels_and_a_multiple_of_a_page():
    assert ring_module.MAX_TRANSFER <= 0x7FFFF000
    assert ring_module.MAX_TRANSFER % 4096 == 0


@pytest.mark.parametrize("name", ["/tmp/a\0b", "/tmp/\udcff", "relative/name", ""])
def test_a_name_the_kernel_would_read_differently_is_refused(driver, name, tmp_path):
    with pytest.raises(ValueError, match="path"):
        driver.ring.openat(1, name, os.O_RDONLY)
    assert driver.ring.in_flight() == 0
    # Nothing half-made was left in the queue: the next submit runs exactly one operation.
    (tmp_path / "é").write_bytes(b"x")
    os.close(open_file(driver, tmp_path / "é", os.O_RDONLY))
    assert driver.ring.completions() == []


def test_impossible_numbers_are_refused_before_anything_is_queued(driver):
    buffer = aligned(4096)
    for call in (
        lambda: driver.ring.read(1, -1, buffer, 0),
        lambda: driver.ring.write(1, 0, buffer, -1),
        lambda: driver.ring.read(-1, 0, buffer, 0),
        lambda: driver.ring.close(1 << 63, 0),
    ):
        with pytest.raises(ValueError, match="token|negative"):
            call()
    assert driver.ring.in_flight() == 0


def test_a_token_in_flight_is_refused_a_second_time(driver, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    driver.ring.openat(5, f"{tmp_path}/a", os.O_RDONLY)
    with pytest.raises(ValueError, match="already in flight"):
        driver.ring.openat(5, f"{tmp_path}/a", os.O_RDONLY)
    os.close(driver.wait(1)[5])
    os.close(open_file(driver, tmp_path / "a", os.O_RDONLY))


def test_paths_live_until_the_kernel_has_read_them(kind, tmp_path):
    driver = Driver(kind, size=64)
    names = [f"block-{number:03d}" for number in range(50)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    for token, name in enumerate(names):
        driver.ring.openat(token, str(tmp_path / name), os.O_RDONLY)
    gc.collect()
    length = len(str(tmp_path / names[0]))
    trash = ["x" * (length - 4) + f"{number:04d}" for number in range(2000)]  # takes over freed strings
    opened = driver.wait(50)
    assert trash
    for token, name in enumerate(names):
        assert os.read(opened[token], 100) == name.encode()
        os.close(opened[token])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    driver.close()


def test_buffers_live_until_completion_and_not_longer_than_the_ring(driver, tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(b"k" * 8192)
    fd = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(-1, 8192)
    alive = weakref.ref(memory)
    driver.ring.read(1, fd, memoryview(memory), 0)
    driver.ring.read(2, fd, memoryview(memory)[:4096], 0)
    del memory
    gc.collect()
    assert alive() is not None
    iovec_sized = [bytearray(16) for _ in range(500)]  # takes over freed iovecs
    assert driver.wait(2) == {1: 8192, 2: 4096}
    assert iovec_sized[0] == bytes(16)
    driver.ring.shutdown()
    gc.collect()
    assert alive() is None
    os.close(fd)


def test_requests_on_the_same_slots_leave_no_objects_behind(driver, tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(b"k" * 8192)
    fd = os.open(path, os.O_RDONLY)
    slots = aligned(4 * 8192)

    def use_each_slot():
        for number in range(4):
            assert driver.one("read", fd, slots[number * 8192 : (number + 1) * 8192], 0) == 8192
            assert driver.one("read", fd, slots[number * 8192 : number * 8192 + 4096], 4096) == 4096

    use_each_slot()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        use_each_slot()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, "800 requests that leave a memoryview each would be 150,000"
    os.close(fd)


def test_iovecs_are_shared_bounded_and_never_dropped_while_in_flight():
    cache = IovecCache(lambda views: views[0], limit=4)
    memory = aligned(16 * 4096)
    parts = [memory[i * 4096 : (i + 1) * 4096] for i in range(16)]
    first = cache.get(parts[0], [])
    assert cache.get(memory[:4096], []) is first
    assert cache.get(memory[:8192], []) is not first
    seen = [cache.get(part, [first]) for part in parts[1:]]
    memory[0], memory[4096] = 7, 9
    assert (first.iovec[0], seen[0].iovec[0]) == (7, 9), "over the same memory"
    assert first.view.nbytes == 4096, "in flight, so not released"
    assert cache.get(parts[0], []) is first
    cache.drop([])
    for pinned in (first, *seen):
        with pytest.raises(ValueError, match="released"):
            pinned.view.tobytes()
    assert parts[0].nbytes == 4096, "the caller's own views stay"


def test_completions_can_be_read_only_once_and_never_wait(driver, tmp_path):
    assert driver.ring.completions() == []
    driver.ring.openat(1, f"{tmp_path}/absent", os.O_RDONLY)
    assert driver.ring.completions() == [], "nothing runs before submit"
    assert driver.wait(1) == {1: -errno.ENOENT}
    assert driver.ring.completions() == []


def test_cancelling_what_is_unknown_or_finished_does_nothing(driver, tmp_path):
    driver.ring.cancel(9)
    assert driver.one("openat", f"{tmp_path}/absent", os.O_RDONLY) == -errno.ENOENT
    driver.ring.cancel(77)
    assert driver.one("openat", f"{tmp_path}/absent", os.O_RDONLY) == -errno.ENOENT
    assert driver.ring.completions() == []


def test_a_cancelled_operation_completes_exactly_once(driver, tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(bytes(4 * MIB))
    fd = os.open(path, os.O_RDONLY)
    for token in range(20):
        driver.ring.read(token, fd, aligned(4 * MIB), 0)
        driver.ring.cancel(token)
    results = driver.wait(20)
    assert set(results.values()) <= {4 * MIB, -errno.ECANCELED, -errno.EINTR}
    assert driver.ring.in_flight() == 0
    assert driver.ring.completions() == []
    os.close(fd)


def test_a_hung_read_can_be_cancelled_on_io_uring():
    driver = Driver("io_uring")
    reader, writer = os.pipe()
    driver.ring.read(1, reader, aligned(4096), 0)
    driver.ring.submit()
    assert driver.ring.completions() == []
    driver.ring.cancel(1)
    assert driver.wait(1)[1] in (-errno.ECANCELED, -errno.EINTR)
    driver.close()
    os.close(reader)
    os.close(writer)


def test_threads_drop_what_has_not_begun_when_cancelled(tmp_path):
    driver = Driver("threads", size=1)
    os.mkfifo(tmp_path / "fifo")
    driver.ring.openat(1, f"{tmp_path}/fifo", os.O_RDONLY)  # hangs until someone opens the other end
    driver.ring.openat(2, f"{tmp_path}/made", os.O_WRONLY | os.O_CREAT, 0o600)
    driver.ring.submit()
    driver.ring.cancel(2)
    assert driver.wait(1) == {2: -errno.ECANCELED}
    other_end = os.open(tmp_path / "fifo", os.O_WRONLY)
    os.close(driver.wait(1)[1])
    os.close(other_end)
    assert driver.one("openat", f"{tmp_path}/absent", os.O_RDONLY) == -errno.ENOENT
    assert not (tmp_path / "made").exists()
    driver.close()


def test_shutdown_does_not_wait_for_a_hung_operation_and_its_buffer_stays(driver, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    driver.ring.openat(1, f"{tmp_path}/fifo", os.O_RDONLY)
    driver.ring.submit()
    driver.ring.shutdown()
    driver.ring.shutdown()
    driver.ring.submit()
    driver.ring.cancel(1)
    assert [c for c in driver.ring.completions() if c.result >= 0] == []
    assert driver.ring.in_flight() == 0
    with pytest.raises(Exception, match="shut down"):
        driver.ring.openat(2, f"{tmp_path}/fifo", os.O_RDONLY)
    # Let the thread end; the kernel's reader may already be gone (ENXIO).
    with contextlib.suppress(OSError):
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))


def test_what_finished_before_shutdown_is_still_handed_out(driver, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    driver.ring.openat(1, f"{tmp_path}/a", os.O_RDONLY)
    driver.ring.submit()
    select.select([driver.wake], [], [], 20)
    driver.ring.shutdown()
    (completion,) = driver.ring.completions()
    os.close(completion.result)
    assert driver.ring.completions() == []


def test_a_late_thread_writes_to_no_descriptor_after_shutdown(tmp_path):
    driver = Driver("threads", size=1)
    os.mkfifo(tmp_path / "fifo")
    driver.ring.openat(1, f"{tmp_path}/fifo", os.O_RDONLY)
    driver.ring.submit()
    while not driver.ring._flying[1].claimed:
        select.select([], [], [], 0.001)
    driver.close()
    before = len(os.listdir("/proc/self/fd"))
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    assert victim == driver.wake, "the eventfd's number is in use again"
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
    for thread in driver.ring._threads:
        thread.join(20)
        assert not thread.is_alive()
    assert os.fstat(victim).st_size == 0
    os.close(victim)
    assert len(os.listdir("/proc/self/fd")) == before, "the late descriptor was closed"


def test_a_thread_ring_without_threads_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ThreadRing(0, 0)


class Stubborn:
    """The liburing module, except that the kernel takes nothing the first ``refusals`` times."""

    def __init__(self, lib, code, refusals):
        self.lib, self.code, self.refusals = lib, code, refusals

    def __getattr__(self, name):
        return getattr(self.lib, name)

    def io_uring_submit(self, ring):
        if self.refusals:
            self.refusals -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self.lib.io_uring_submit(ring)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.ENOMEM])
def test_a_kernel_that_takes_nothing_now_is_asked_again(tmp_path, code):
    driver = Driver("io_uring")
    driver.ring._lib = Stubborn(driver.ring._lib, code, 3)
    driver.ring.openat(1, f"{tmp_path}/absent", os.O_RDONLY)
    assert driver.wait(1) == {1: -errno.ENOENT}, "each refusal woke the caller for another try"
    assert driver.ring._lib.refusals == 0
    driver.close()


def test_what_finds_no_place_in_a_full_queue_completes_as_eagain_and_a_close_is_done(tmp_path):
    driver = Driver("io_uring", size=2)
    driver.ring._lib = Stubborn(driver.ring._lib, errno.EAGAIN, 8)
    fd = os.open(tmp_path, os.O_RDONLY)
    for token in range(4):
        driver.ring.openat(token, f"{tmp_path}/absent", os.O_RDONLY)
    driver.ring.close(4, fd)
    expected = {0: -errno.ENOENT, 1: -errno.ENOENT, 2: -errno.EAGAIN, 3: -errno.EAGAIN, 4: 0}
    assert driver.wait(5) == expected
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    driver.close()


def test_an_error_of_submit_that_is_a_defect_is_not_hidden(tmp_path):
    driver = Driver("io_uring")
    driver.ring._lib = Stubborn(driver.ring._lib, errno.EBADF, 1)
    driver.ring.openat(1, f"{tmp_path}/absent", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        driver.ring.submit()
    driver.close()


class Spying:
    """The liburing module, and the submission entries that were taken from it."""

    def __init__(self, lib):
        self.lib, self.taken = lib, []

    def __getattr__(self, name):
        return getattr(self.lib, name)

    def io_uring_get_sqe(self, ring):
        self.taken.append(self.lib.io_uring_get_sqe(ring))
        return self.taken[-1]


def test_entries_are_encoded_as_the_kernel_wants_them_and_large_ones_go_to_its_workers(tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(bytes(MIB))
    fd, closing = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    driver = Driver("io_uring")
    driver.ring._lib = spy = Spying(driver.ring._lib)
    slot, asynchronous = aligned(MIB), spy.IOSQE_ASYNC
    driver.ring.openat(1, str(path), os.O_RDONLY)
    driver.ring.read(2, fd, slot, 0)
    driver.ring.read(3, fd, slot[: MIB - 4096], 4096)
    driver.ring.write(4, fd, slot, 0)
    driver.ring.write(5, fd, slot[:4096], 0)
    driver.ring.fsync(6, fd)
    driver.ring.close(7, closing)
    driver.ring.cancel(2)
    # Operation numbers of linux/io_uring.h.
    readv, writev, fsync, cancel, openat, close = 1, 2, 3, 14, 18, 19
    assert [(sqe.opcode, sqe.user_data, sqe.flags & asynchronous != 0) for sqe in spy.taken] == [
        (openat, 1, True),
        (readv, 2, True),
        (readv, 3, False),
        (writev, 4, True),
        (writev, 5, False),
        (fsync, 6, True),
        (close, 7, False),
        (cancel, 1 << 63, False),
    ]
    assert [sqe.fd for sqe in spy.taken[1:7]] == [fd] * 5 + [closing]
    results = driver.wait(7)
    os.close(results[1])
    assert [results[token] for token in (3, 5, 6, 7)] == [MIB - 4096, 4096, 0, 0]
    driver.close()
    os.close(fd)


def test_the_kernel_has_as_many_workers_for_files_as_it_was_told_whoever_uses_the_ring(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(2 << 20))
    driver = Driver("io_uring", workers=3)
    counts = (ctypes.c_uint * 2)(0, 0)

    def work():
        fd = open_file(driver, path, os.O_RDONLY)
        assert driver.one("read", fd, aligned(2 << 20), 0) == 2 << 20
        os.close(fd)
        # 427: io_uring_register, 19: IORING_REGISTER_IOWQ_MAX_WORKERS; zeros change nothing, and it tells.
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.syscall(427, driver.ring._ring.ring_fd, 19, ctypes.byref(counts), 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    driver.close()
    assert counts[0] == 3
    assert counts[1] > 64
