"""One block becomes one file: on real file systems, and with each system call refused in turn."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from py_kvcache.errors import BlockError, Fault
from py_kvcache.layout import block_path, parse_temp_name, part_dir
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.finalname import FinalNames
from py_kvcache.worker.publication import CREATE_ATTEMPTS, BlockFiles, FileSettings, publish_bytes

NAMESPACE = "m_0123456789ab"
DATA = bytes(range(256)) * 48


def key(number):
    return number.to_bytes(32, "little") + bytes(4)


def final_of(root, number=1):
    return block_path(part_dir(str(root), NAMESPACE, 0), key(number))


def files_under(root):
    return sorted(path for path in Path(root).rglob("*") if not path.is_dir() or path.is_symlink())


def temps_under(root):
    return [path for path in Path(root).rglob(".*") if parse_temp_name(path.name)]


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def fail(code, after=None):
    """A function that fails with ``code``, if wanted after having done its work."""

    def failing(*arguments, **named):
        if after is not None:
            after(*arguments, **named)
        raise OSError(code, os.strerror(code))

    return failing


@pytest.fixture
def ops():
    return FileOps()


@pytest.fixture
def files(ops, tmp_path):
    return BlockFiles(ops, FileSettings(str(tmp_path)))


def mounted(kind, base):
    """Mount options for ``kind`` below ``base``; the folder to use."""
    target = base / "mount"
    for name in ("mount", "lower", "upper", "work"):
        (base / name).mkdir()
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    done = subprocess.run(
        ["mount", "-t", kind, kind, "-o", options, str(target)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
    return target


@pytest.fixture(params=["ext4", "tmpfs", "overlay"])
def volume(request):
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if request.param == "tmpfs" else "/var/tmp"))
    root = mounted("overlay", base) if request.param == "overlay" else base
    yield root
    if root is not base:
        subprocess.run(["umount", str(root)], check=True)
    shutil.rmtree(base)


# ---- on real file systems


def test_a_block_becomes_one_complete_file_and_nothing_else(volume):
    before = descriptors()
    files = BlockFiles(FileOps(), FileSettings(str(volume)))
    assert files.publish(final_of(volume), DATA)
    assert [str(path) for path in files_under(volume)] == [final_of(volume)]
    assert Path(final_of(volume)).read_bytes() == DATA
    assert descriptors() == before
    assert files.counts.read() == {}


def test_the_second_writer_of_a_block_succeeds_and_changes_nothing(volume):
    files = BlockFiles(FileOps(), FileSettings(str(volume)))
    files.publish(final_of(volume), DATA)
    inode = os.stat(final_of(volume)).st_ino
    assert not files.publish(final_of(volume), b"other" * 100)
    assert Path(final_of(volume)).read_bytes() == DATA
    assert os.stat(final_of(volume)).st_ino == inode


@pytest.mark.parametrize("way", ["link", "rename", "plain"])
def test_the_loser_of_a_race_removes_its_own_file_only(volume, way):
    ops = FileOps()
    if way != "link":
        ops.link = fail(errno.EPERM)
    if way == "plain":
        ops.rename_noreplace = fail(errno.EINVAL)
    files = BlockFiles(ops, FileSettings(str(volume)))
    final = final_of(volume)
    fd, temp = files.create(final)
    os.write(fd, b"late")
    publish_bytes(FileOps(), final, DATA, FileSettings(str(volume)))
    assert files.commit(fd, temp, final, 0) is False
    assert [str(path) for path in files_under(volume)] == [final]
    assert Path(final).read_bytes() == DATA


@pytest.mark.parametrize("way", ["rename", "plain"])
def test_without_hard_links_files_are_published_by_rename(volume, way, caplog):
    ops = FileOps()
    links = []
    ops.link = lambda *names: links.append(names) or fail(errno.EPERM)()
    if way == "plain":
        ops.rename_noreplace = fail(errno.ENOSYS)
    files = BlockFiles(ops, FileSettings(str(volume)))
    for number in range(3):
        assert files.publish(final_of(volume, number), DATA)
    assert len(files_under(volume)) == 3
    assert temps_under(volume) == []
    assert len(links) == 1
    assert len([record for record in caplog.records if "no hard links" in record.message]) == 1


def test_names_and_modes_are_shared_with_the_group_whatever_the_umask(volume):
    part = Path(part_dir(str(volume), NAMESPACE, 0))
    part.mkdir(mode=0o700)
    old = os.umask(0o077)
    try:
        BlockFiles(FileOps(), FileSettings(str(volume))).publish(final_of(volume), DATA)
    finally:
        os.umask(old)
    made = Path(final_of(volume)).parent
    assert stat.S_IMODE(made.stat().st_mode) == 0o2775
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o2775
    assert stat.S_IMODE(os.stat(final_of(volume)).st_mode) == 0o664
    assert stat.S_IMODE(part.stat().st_mode) == 0o700  # not made by us


def test_later_blocks_of_a_chain_are_older_by_the_file_systems_own_clock(volume):
    ops, written = FileOps(), []
    ops.fstat = lambda fd: written.append(os.fstat(fd).st_mtime_ns) or os.fstat(fd)
    files = BlockFiles(ops, FileSettings(str(volume)))
    for index in (0, 1, 40):
        files.publish(final_of(volume, index), DATA, index)
    found = [os.stat(final_of(volume, index)).st_mtime_ns for index in (0, 1, 40)]
    assert found == [written[0], written[1] - 1_000_000, written[2] - 40_000_000]


def test_folders_removed_under_a_writer_are_made_again(volume):
    stop = threading.Event()

    def collect():
        # Without a pause it can take a folder away before each of sixteen attempts, on a busy machine.
        while not stop.wait(0.0005):
            for folder, _, _ in os.walk(volume, topdown=False):
                if folder != str(volume):
                    try:
                        os.rmdir(folder)
                    except OSError:
                        continue

    collector = threading.Thread(target=collect)
    collector.start()
    files = BlockFiles(FileOps(), FileSettings(str(volume)))
    try:
        for number in range(300):
            assert files.publish(final_of(volume, number), b"x")
            os.unlink(final_of(volume, number))
    finally:
        stop.set()
        collector.join()
    assert files_under(volume) == []


@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo"])
@pytest.mark.parametrize("moment", ["before", "during", "during, without links", "during, plain rename"])
def test_something_else_under_the_final_name_is_left_alone_and_said(volume, kind, moment):
    ops = FileOps()
    if "without" in moment or "plain" in moment:
        ops.link = fail(errno.ENOTSUP)
    if "plain" in moment:
        ops.rename_noreplace = fail(errno.EINVAL)
    files = BlockFiles(ops, FileSettings(str(volume)))
    final = final_of(volume)
    elsewhere = volume / "elsewhere"
    elsewhere.write_bytes(b"mine")
    before = descriptors()

    def put():
        os.makedirs(os.path.dirname(final), exist_ok=True)
        {"folder": os.mkdir, "fifo": os.mkfifo, "symlink": lambda at: os.symlink(elsewhere, at)}[kind](final)

    if moment == "before":
        put()
        with pytest.raises(BlockError) as caught:
            files.create(final)
    else:
        fd, temp = files.create(final)
        os.write(fd, DATA)
        put()
        with pytest.raises(BlockError) as caught:
            files.commit(fd, temp, final, 0)
    assert caught.value.fault is Fault.IO
    assert caught.value.code == errno.EEXIST
    assert kind.replace("symlink", "symbolic link").replace("fifo", "FIFO") in str(caught.value)
    assert not stat.S_ISREG(os.lstat(final).st_mode)
    assert elsewhere.read_bytes() == b"mine"
    assert temps_under(volume) == []
    assert descriptors() == before


# ---- every call refused in turn

STAGES = [
    ("lstat", errno.EIO, None),
    ("open", errno.EACCES, None),
    ("open", errno.ENOSPC, None),
    ("open", errno.EMFILE, None),
    ("mkdir", errno.EACCES, None),
    ("mkdir", errno.ENOSPC, None),
    ("write", errno.EIO, None),
    ("write", errno.EDQUOT, None),
    ("fstat", errno.ESTALE, None),
    ("utime", errno.EIO, None),
    ("fsync", errno.EIO, None),
    ("close", errno.EIO, os.close),
    ("close", errno.ENOSPC, os.close),
    ("link", errno.EIO, None),
    ("link", errno.ESTALE, None),
    ("link", errno.ENOENT, None),
    ("link", errno.EDQUOT, None),
]


@pytest.mark.parametrize(("call", "code", "after"), STAGES)
def test_a_store_that_fails_at_any_call_leaves_no_file_and_no_descriptor(tmp_path, ops, call, code, after):
    files = BlockFiles(ops, FileSettings(str(tmp_path), fsync=True))
    before = descriptors()
    setattr(ops, call, fail(code, after))
    with pytest.raises(BlockError) as caught:
        files.publish(final_of(tmp_path), DATA, 1)
    assert caught.value.code == code
    space = code in (errno.ENOSPC, errno.EDQUOT)
    assert caught.value.fault is (Fault.NO_SPACE if space else Fault.IO)
    assert files_under(tmp_path) == []
    assert descriptors() == before
    setattr(ops, call, getattr(FileOps(), call))
    assert files.publish(final_of(tmp_path), DATA, 1)


def test_short_writes_are_continued(tmp_path, ops, files):
    ops.write = lambda fd, data: os.write(fd, data[:1000])
    files.publish(final_of(tmp_path), DATA)
    assert Path(final_of(tmp_path)).read_bytes() == DATA


def test_the_descriptor_is_closed_before_the_name_exists(tmp_path, ops, files):
    # NFS tells at close that a buffered write failed.
    calls = []
    ops.close = lambda fd: calls.append("close") or os.close(fd)
    ops.link = lambda *names: calls.append("link") or os.link(*names)
    files.publish(final_of(tmp_path), DATA)
    assert calls == ["close", "link"]


def test_fsync_comes_before_the_name_and_only_if_asked_for(tmp_path, ops):
    calls = []
    ops.fsync = lambda fd: calls.append("fsync") or os.fsync(fd)
    ops.link = lambda *names: calls.append("link") or os.link(*names)
    publish_bytes(ops, final_of(tmp_path, 1), DATA, FileSettings(str(tmp_path)))
    publish_bytes(ops, final_of(tmp_path, 2), DATA, FileSettings(str(tmp_path), fsync=True))
    assert calls == ["link", "fsync", "link"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_link_is_not_tried_again_where_a_rename_worked_instead(tmp_path, ops, files, code):
    ops.link = fail(code)
    files.publish(final_of(tmp_path, 1), DATA)
    ops.link = lambda *_: pytest.fail("tried again")
    assert files.publish(final_of(tmp_path, 2), DATA)


def test_too_many_links_of_one_inode_say_nothing_about_the_next_file(tmp_path, ops, files):
    ops.link = fail(errno.EMLINK)
    assert files.publish(final_of(tmp_path, 1), DATA)
    tried = []
    ops.link = lambda *names: tried.append(names) or os.link(*names)
    assert files.publish(final_of(tmp_path, 2), DATA)
    assert len(tried) == 1


def test_a_folder_that_forbids_names_does_not_turn_links_off(tmp_path, ops, files):
    ops.link = ops.rename = ops.rename_noreplace = fail(errno.EPERM)
    with pytest.raises(BlockError):
        files.publish(final_of(tmp_path), DATA)
    assert files_under(tmp_path) == []
    ops.link = os.link
    ops.rename_noreplace = lambda *_: pytest.fail("links were given up")
    assert files.publish(final_of(tmp_path), DATA)


def test_a_name_evicted_between_link_and_look_is_taken_after_all(tmp_path, ops):
    names = FinalNames(ops, BlockFiles(ops, FileSettings(str(tmp_path))).counts)
    temp, final = str(tmp_path / "temp"), str(tmp_path / "final")
    Path(temp).write_bytes(DATA)
    answers = iter([fail(errno.EEXIST), os.link])
    ops.link = lambda temp, final: next(answers)(temp, final)  # noqa: PLW0108 - a new one each time
    assert names.give(temp, final) == (True, False)
    assert Path(final).read_bytes() == DATA


@pytest.mark.parametrize("now_too", [False, True])
def test_times_that_may_not_be_set_are_counted_and_the_block_is_published(tmp_path, ops, files, now_too):
    calls = []

    def utime(fd, **times):
        calls.append(times)
        if times or now_too:
            fail(errno.EPERM)()
        os.utime(fd)

    ops.utime = utime
    assert files.publish(final_of(tmp_path), DATA, 7)
    assert Path(final_of(tmp_path)).read_bytes() == DATA
    assert [bool(times) for times in calls] == [True, False]
    expected = {"utime_denied": 1, "utime_now_denied": 1} if now_too else {"utime_denied": 1}
    assert files.counts.read() == expected


def test_modes_that_may_not_be_set_are_counted_and_said_once(tmp_path, ops, files, caplog):
    ops.chmod = fail(errno.EPERM)
    for number in (0, 0x1234567, 0x7654321):
        assert files.publish(final_of(tmp_path, number), DATA)
    assert files.counts.read()["chmod_denied"] >= 3
    assert len([record for record in caplog.records if "cannot set mode" in record.message]) == 1


def test_refused_direct_io_leaves_no_name_and_is_not_asked_again(tmp_path, ops, caplog):
    asked = []

    def refuse(path, flags, mode):
        asked.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:  # as Linux: the name is made, then the open fails
            os.close(os.open(path, flags & ~os.O_DIRECT, mode))
            fail(errno.EINVAL)()
        return os.open(path, flags, mode)

    ops.open = refuse
    files = BlockFiles(ops, FileSettings(str(tmp_path)), direct=True)
    for number in (1, 2):
        os.makedirs(os.path.dirname(final_of(tmp_path, number)), exist_ok=True)
        fd, temp = files.create(final_of(tmp_path, number), direct=files.direct)
        assert files.commit(fd, temp, final_of(tmp_path, number), 0)
    assert asked == [True, False, False]
    assert len(files_under(tmp_path)) == 2
    assert temps_under(tmp_path) == []
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1


def test_direct_files_are_opened_direct_where_that_works():
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    files = BlockFiles(FileOps(), FileSettings(str(root)), direct=True)
    fd, temp = files.create(final_of(root), direct=True)
    with open(f"/proc/self/fdinfo/{fd}") as info:
        flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
    files.abandon(fd, temp)
    assert flags & os.O_DIRECT
    assert flags & os.O_CLOEXEC
    assert files_under(root) == []
    shutil.rmtree(root)


def test_a_temporary_name_left_by_a_predecessor_is_passed_over(tmp_path, ops, files):
    os.makedirs(os.path.dirname(final_of(tmp_path)))
    taken = []

    def open_(path, flags, mode):
        if not taken:
            Path(path).write_bytes(b"left")
            taken.append(path)
        return os.open(path, flags, mode)

    ops.open = open_
    assert files.publish(final_of(tmp_path), DATA)
    assert Path(taken[0]).read_bytes() == b"left"
    assert Path(final_of(tmp_path)).read_bytes() == DATA


def test_folders_that_vanish_for_ever_end_in_an_error(tmp_path, ops, files):
    calls = Counter()

    def open_(*_):
        calls["open"] += 1
        fail(errno.ENOENT)()

    ops.open = open_
    with pytest.raises(BlockError) as caught:
        files.publish(final_of(tmp_path), DATA)
    assert caught.value.fault is Fault.IO
    assert calls["open"] == CREATE_ATTEMPTS


def test_a_root_that_went_away_is_not_made_on_the_disk_below(tmp_path):
    root = tmp_path / "volume" / "cache"
    files = BlockFiles(FileOps(), FileSettings(str(root)))
    for made in ([], [root.parent]):
        for folder in made:
            folder.mkdir()
        with pytest.raises(BlockError) as caught:
            files.publish(final_of(root), DATA)
        assert caught.value.fault is Fault.IO
        assert caught.value.code == errno.ENOENT
        assert not root.exists()


def test_a_file_in_place_of_a_folder_fails_softly(tmp_path, files):
    Path(part_dir(str(tmp_path), NAMESPACE, 0)).write_bytes(b"")
    with pytest.raises(BlockError) as caught:
        files.publish(final_of(tmp_path), DATA)
    assert caught.value.code == errno.ENOTDIR


def test_a_temporary_that_cannot_be_removed_is_counted_and_the_block_is_there(tmp_path, ops, files):
    ops.unlink = fail(errno.EIO)
    assert files.publish(final_of(tmp_path), DATA)
    assert files.counts.read() == {"temp_left": 1}
    assert Path(final_of(tmp_path)).read_bytes() == DATA
    assert len(temps_under(tmp_path)) == 1


def test_a_hundred_thousand_blocks_crowd_no_folder():
    entries = Counter()
    seen = set()
    for number in range(100_000):
        name = hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(4)
        path = block_path("/part", name)
        while path != "/part" and path not in seen:
            seen.add(path)
            path = os.path.dirname(path)
            entries[path] += 1
    assert entries["/part"] == 4096
    assert max(entries.values()) == 4096
    del entries["/part"]
    assert max(entries.values()) <= 256
