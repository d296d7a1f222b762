"""The publisher as the reactor sees it: one result a call, and stores that stop where they must."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import py_kvcache
from py_kvcache.errors import BlockError, Fault
from py_kvcache.layout import block_path, file_bytes, part_dir
from py_kvcache.worker.checksum import seal_block, verify_block
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Op, Publisher, PublishSettings

NAMESPACE = "m_0123456789ab"
MIB = 1 << 20
PAYLOAD = MIB - 4096  # so that a file is 1 MiB


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Bench:
    """A publisher, and the calls a reactor makes, one after the other."""

    def __init__(self, root, ops=None, **settings):
        self.root, self.ops, self.clock = str(root), ops or FileOps(), Clock()
        self.wake = threading.Semaphore(0)
        settings = {"store_stop_at": 1.0, "store_resume_at": 1.0} | settings
        settings = PublishSettings(FileSettings(self.root), **settings)
        self.publisher = Publisher(self.ops, settings, self.wake.release, self.clock)
        self.token = 0

    def final(self, number):
        return block_path(part_dir(self.root, NAMESPACE, 0), self.key(number))

    @staticmethod
    def key(number):
        return number.to_bytes(32, "little") + bytes(4)

    def data(self, number, payload=PAYLOAD):
        buffer = bytearray(number.to_bytes(4, "big") * (file_bytes(payload) // 4))
        seal_block(memoryview(buffer), self.key(number), 0, payload, enabled=True)
        return buffer

    def answer(self):
        assert self.wake.acquire(timeout=20), "no result came"
        (result,) = self.publisher.results()
        assert result.token == self.token
        return result

    def create(self, number, nbytes=MIB):
        self.token += 1
        self.publisher.create(self.token, self.final(number), nbytes)
        return self.answer()

    def commit(self, created, number):
        self.token += 1
        self.publisher.commit(self.token, created.fd, created.temp, self.final(number), 0)
        return self.answer()

    def abandon(self, created, error=None):
        self.token += 1
        self.publisher.abandon(self.token, created.fd, created.temp, error)
        return self.answer()

    def store(self, number, payload=PAYLOAD):
        """Create, write, commit or abandon; the last result, or the errno of the write."""
        created = self.create(number, file_bytes(payload))
        if created.error or created.exists:
            return created
        rest = memoryview(self.data(number, payload))
        try:
            while rest:
                rest = rest[os.write(created.fd, rest) :]
        except OSError as error:
            self.abandon(created)
            return error
        return self.commit(created, number)

    def examine(self, number, payload=PAYLOAD):
        self.publisher.quarantine(self.final(number), self.key(number), payload)
        assert self.wake.acquire(timeout=20), "no outcome came"
        (outcome,) = self.publisher.outcomes()
        return outcome

    def is_hit(self, number, payload=PAYLOAD):
        data = memoryview(Path(self.final(number)).read_bytes())
        return verify_block(data, self.key(number), payload, enabled=True) == (None, "")

    def files(self):
        return sorted(str(path) for path in Path(self.root).rglob("*") if path.is_file())


def outcome_of(result):
    return (
        (result.error.fault, result.error.code) if result.error else ("exists" if result.exists else "done")
    )


@pytest.fixture
def benches():
    made = []

    def make(*arguments, **named):
        made.append(Bench(*arguments, **named))
        return made[-1]

    yield make
    for bench in made:
        assert bench.publisher.shutdown(20)


def mount_tmpfs(options):
    target = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount tmpfs here: {done.stderr.strip()}")
    return target


@pytest.fixture
def small():
    """A volume of 16 MiB."""
    target = mount_tmpfs("size=16m")
    yield target
    subprocess.run(["umount", str(target)], check=True)
    target.rmdir()


@pytest.fixture
def small_ext4(tmp_path):
    image, target = tmp_path / "image", tmp_path / "volume"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a loop device here: {done.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


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
        for name in ("open", "pread", "fstat", "lstat", "link", "rename", "rename_noreplace", "mkdir", "statvfs",
                     "utime", "fsync", "unlink"):  # fmt: skip
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


# ---- a full volume


@pytest.mark.parametrize("kind", ["small", "small_ext4"])
def test_a_full_volume_fails_stores_softly_and_leaves_nothing(request, benches, kind):
    bench = benches(request.getfixturevalue(kind))
    results = []
    for number in range(40):
        bench.clock.now += 10  # past the pause that follows each ENOSPC
        results.append(bench.store(number))
    failed = [result for result in results if isinstance(result, OSError) or result.error]
    done = [number for number, result in enumerate(results) if result not in failed]
    assert len(done) >= 8
    assert len(failed) >= 20
    for result in failed:
        code = result.errno if isinstance(result, OSError) else result.error.code
        assert code == errno.ENOSPC
        assert isinstance(result, OSError) or result.error.fault is Fault.NO_SPACE
    assert bench.files() == sorted(bench.final(number) for number in done)
    assert all(bench.is_hit(number) for number in done)
    for number in done[:3]:
        os.unlink(bench.final(number))
    assert outcome_of(bench.store(99)) == "done"


def test_a_volume_without_inodes_fails_stores_softly_and_leaves_nothing(benches):
    target = mount_tmpfs("size=16m,nr_inodes=40")
    try:
        bench = benches(target)
        results = []
        for number in range(0, 40 * 0x10001, 0x10001):
            bench.clock.now += 10
            results.append(outcome_of(bench.store(number, 4096)))
        assert set(results) == {"done", (Fault.NO_SPACE, errno.ENOSPC)}
        assert len(bench.files()) == results.count("done")
        assert bench.publisher.shutdown(20)
    finally:
        subprocess.run(["umount", str(target)], check=True)
        target.rmdir()


def test_no_space_pauses_stores_for_a_second(small, benches, caplog):
    bench = benches(small)
    created = bench.create(1)
    bench.abandon(created, BlockError(Fault.NO_SPACE, bench.final(1), errno.EDQUOT))
    assert bench.publisher.refuses()
    assert bench.publisher.paused
    assert outcome_of(bench.create(2)) == (Fault.PAUSED, errno.EDQUOT)
    bench.clock.now += 1.5
    assert not bench.publisher.refuses()
    assert outcome_of(bench.store(2)) == "done"
    assert len([record for record in caplog.records if "EDQUOT" in record.message]) == 1


def test_stores_stop_at_the_watermark_and_go_on_below_the_lower_one(small, benches, caplog):
    bench = benches(small, store_stop_at=0.5, store_resume_at=0.25)
    results = [outcome_of(bench.store(number)) for number in range(16)]
    stored = results.count("done")
    assert stored in (7, 8)
    assert results == ["done"] * stored + [(Fault.PAUSED, 0)] * (16 - stored)
    used = sum(os.path.getsize(path) for path in bench.files())
    assert used <= 8 * MIB
    assert bench.publisher.paused
    assert bench.publisher.refuses()

    for number in range(3):
        os.unlink(bench.final(number))
    bench.clock.now += 2
    assert outcome_of(bench.store(20)) == (Fault.PAUSED, 0)  # between the two marks
    for number in range(3, 5):
        os.unlink(bench.final(number))
    bench.clock.now += 2
    assert not bench.publisher.refuses()
    assert outcome_of(bench.store(20)) == "done"
    assert not bench.publisher.paused
    assert len([record for record in caplog.records if "filled to the mark" in record.message]) == 1


def test_files_being_written_count_against_the_watermark(small, benches):
    bench = benches(small, store_stop_at=0.5, store_resume_at=0.5)
    opened = []
    for number in range(16):
        result = bench.create(number)
        if not result.error:
            opened.append(result)
    assert len(opened) <= 8  # nothing is written yet, so statvfs alone would have allowed all
    assert len(opened) >= 7
    for result in opened:
        bench.abandon(result)
    bench.clock.now += 2
    assert outcome_of(bench.store(1)) == "done"


def test_the_daily_budget_stops_stores_and_blocks_not_written_cost_nothing(tmp_path, benches):
    bench = benches(tmp_path, store_bytes_per_day=3 * MIB)
    assert outcome_of(bench.store(1)) == "done"
    assert outcome_of(bench.store(1)) == "exists"
    bench.abandon(bench.create(2))
    assert outcome_of(bench.store(2)) == "done"
    assert outcome_of(bench.store(3)) == "done"
    assert outcome_of(bench.store(4)) == (Fault.PAUSED, 0)
    bench.clock.now += 26 * 3600
    assert outcome_of(bench.store(4)) == "done"


# ---- a volume that cannot be written to


def test_a_read_only_volume_turns_stores_off_with_one_warning_and_is_still_read(small, benches, caplog):
    bench = benches(small)
    assert outcome_of(bench.store(1)) == "done"
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    opened = []
    real_open = bench.ops.open
    bench.ops.open = lambda *arguments: opened.append(arguments) or real_open(*arguments)
    assert outcome_of(bench.store(2)) == (Fault.IO, errno.EROFS)
    tries = len(opened)
    for number in range(3, 10):
        assert outcome_of(bench.store(number)) == (Fault.PAUSED, errno.EROFS)
    assert len(opened) == tries  # not even asked
    assert bench.publisher.paused
    assert bench.is_hit(1)
    bench.clock.now += 61
    assert outcome_of(bench.store(2)) == (Fault.IO, errno.EROFS)
    assert len([record for record in caplog.records if "EROFS" in record.message]) == 1

    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    bench.clock.now += 61
    assert outcome_of(bench.store(2)) == "done"
    assert not bench.publisher.paused


FOREIGN_USER = """
import os, sys, threading
sys.path.insert(0, sys.argv[2])
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import FileSettings
from py_kvcache.worker.publish import Publisher, PublishSettings
from py_kvcache.layout import block_path, part_dir
os.setgroups([]); os.setgid(65532); os.setuid(65532)
wake = threading.Semaphore(0)
publisher = Publisher(FileOps(), PublishSettings(FileSettings(sys.argv[1])), wake.release)
for token, number in enumerate(map(int, sys.argv[3:])):
    key = number.to_bytes(32, "little") + bytes(4)
    publisher.create(token, block_path(part_dir(sys.argv[1], "m_0123456789ab", 0), key), 10)
    wake.acquire()
    result, = publisher.results()
    print(result.error.fault.value if result.error else "done", result.error.code if result.error else 0)
"""


def as_foreign_user(root, *numbers):
    package = str(Path(py_kvcache.__file__).parents[1])
    command = [sys.executable, "-c", FOREIGN_USER, str(root), package, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def open_root():
    """A folder that another user can reach (pytest's own are private)."""
    made = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(made, 0o755)
    yield Path(made)
    shutil.rmtree(made)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_a_root_of_another_user_turns_stores_off(open_root):
    lines, warnings = as_foreign_user(open_root, 1, 2, 3)
    assert lines == ["io 13", "paused 13", "paused 13"]
    assert warnings.count("cannot be written to") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_one_folder_of_another_user_fails_its_blocks_only(open_root, benches):
    os.chmod(open_root, 0o777)
    part = Path(part_dir(str(open_root), NAMESPACE, 0))
    part.mkdir()
    os.chmod(part, 0o777)
    bench = Bench(open_root)
    first = Path(bench.final(1)).parent
    os.makedirs(first)
    os.chmod(first.parent, 0o777)
    os.chmod(first, 0o755)
    lines, _ = as_foreign_user(open_root, 1, 2, 1)
    assert lines == ["io 13", "done 0", "io 13"]
    assert bench.publisher.shutdown(20)


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
