"""Stores stop where they must, on real volumes: full, at the mark, read-only, another user's."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from worker_publisher import MIB, NAMESPACE, Bench, outcome_of

import py_kvcache
from py_kvcache.errors import BlockError, Fault
from py_kvcache.layout import part_dir


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


def test_a_volume_that_flips_around_its_mark_is_worth_one_warning_in_ten_minutes(small, benches, caplog):
    bench = benches(small, store_stop_at=0.5, store_resume_at=0.5)
    said = []
    for wait in (0, 2, 200, 600, 2):
        bench.clock.now += wait
        number = 0
        while outcome_of(bench.store(number)) != (Fault.PAUSED, 0):
            number += 1
        said.append(len(caplog.records))
        for number in range(3):
            os.unlink(bench.final(number))
        bench.clock.now += 2
        assert outcome_of(bench.store(0)) == "done"
    assert said == [1, 1, 1, 2, 2]


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
    assert not bench.publisher.paused
    assert outcome_of(bench.store(4)) == (Fault.PAUSED, 0)
    assert bench.publisher.refuses()
    assert bench.publisher.paused
    bench.clock.now += 26 * 3600
    assert not bench.publisher.refuses()
    assert not bench.publisher.paused
    assert outcome_of(bench.store(4)) == "done"


def test_a_budget_that_got_bytes_back_pauses_nothing(tmp_path, benches):
    bench = benches(tmp_path, store_bytes_per_day=MIB)
    created = bench.create(1)
    assert outcome_of(bench.store(2)) == (Fault.PAUSED, 0)
    assert bench.publisher.refuses()
    bench.abandon(created)
    assert not bench.publisher.refuses()
    assert outcome_of(bench.store(2)) == "done"


# ---- a root that is not there any more


def swap(root, other):
    """What unmounting and mounting do to a path."""
    aside = root.with_name("aside")
    root.rename(aside)
    if other is not None:
        other.rename(root)
    return aside


@pytest.mark.parametrize("has_folders", [False, True])
def test_below_a_bare_mount_point_nothing_is_written_and_stores_go_on_when_the_volume_is_back(
    tmp_path, benches, caplog, has_folders
):
    root, bare = tmp_path / "root", tmp_path / "bare"
    root.mkdir()
    bench = benches(root)
    assert outcome_of(bench.store(1)) == "done"
    bare.mkdir()
    if has_folders:
        (bare / Path(bench.final(2)).relative_to(root)).parent.mkdir(parents=True)
    volume = swap(root, bare)
    if has_folders:
        bench.clock.now += 1.5  # a look a second is all there is, as no call fails here
    before = sorted(root.rglob("*"))
    for number in range(2, 6):
        assert outcome_of(bench.store(number))[0] is Fault.PAUSED
    assert bench.publisher.paused
    assert bench.publisher.refuses()
    bench.clock.now += 5
    assert not bench.publisher.refuses(), "somebody must look again"
    assert outcome_of(bench.store(2))[0] is Fault.PAUSED
    assert sorted(root.rglob("*")) == before

    root.rename(tmp_path / "bare")
    volume.rename(root)
    bench.clock.now += 1.5
    assert outcome_of(bench.store(2)) == "done"
    assert not bench.publisher.paused
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert str(root) in said[0]
    assert "unmounted or replaced" in said[0]


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_while_the_root_is_gone_stores_are_paused_with_one_warning(tmp_path, benches, caplog, instead):
    root = tmp_path / "root"
    root.mkdir()
    bench = benches(root)
    volume = swap(root, None)
    if instead == "a file":
        root.touch()
    for number in range(4):
        assert outcome_of(bench.store(number))[0] is Fault.PAUSED
        bench.clock.now += 0.6
    assert bench.publisher.paused
    assert len([record for record in caplog.records if str(root) in record.getMessage()]) == 1
    if instead == "a file":
        root.unlink()
    volume.rename(root)
    bench.clock.now += 1.5
    assert outcome_of(bench.store(1)) == "done"


def test_a_file_whose_root_went_away_while_it_was_written_is_paused_and_no_failure(tmp_path, benches):
    root, bare = tmp_path / "root", tmp_path / "bare"
    root.mkdir()
    bare.mkdir()
    bench = benches(root)
    created = bench.create(1)
    volume = swap(root, bare)
    assert outcome_of(bench.commit(created, 1)) == (Fault.PAUSED, errno.ENOENT)
    assert list(root.iterdir()) == []
    assert bench.publisher.refuses()
    assert volume.exists()


def test_a_real_unmount_pauses_stores_until_the_volume_is_mounted_again(small_ext4, tmp_path, benches):
    bench = benches(small_ext4)
    assert outcome_of(bench.store(1)) == "done"
    source = subprocess.run(["findmnt", "-no", "SOURCE", str(small_ext4)], capture_output=True, text=True)
    held = tmp_path / "held"  # keeps the loop device, and with it st_dev, while the root is unmounted
    held.mkdir()
    subprocess.run(["mount", "--bind", str(small_ext4), str(held)], check=True)
    try:
        subprocess.run(["umount", str(small_ext4)], check=True)
        assert outcome_of(bench.store(2))[0] is Fault.PAUSED
        assert list(small_ext4.iterdir()) == []
        subprocess.run(["mount", source.stdout.strip(), str(small_ext4)], check=True)
    finally:
        subprocess.run(["umount", str(held)], check=True)
    bench.clock.now += 1.5
    assert bench.is_hit(1)
    assert outcome_of(bench.store(2)) == "done"


def test_a_root_that_cannot_be_looked_at_for_a_moment_changes_nothing(tmp_path, benches):
    bench = benches(tmp_path)

    def broken(path):
        raise OSError(errno.EIO, "Input/output error", path)

    bench.ops.stat = broken
    bench.clock.now += 1.5
    assert outcome_of(bench.store(1)) == "done"
    assert not bench.publisher.paused


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
