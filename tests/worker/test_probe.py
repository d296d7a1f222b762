"""The O_DIRECT trial tells what the file system does, not what it promises."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from py_kvcache.worker.probe import filesystem_magic, filesystem_name, probe_direct


@pytest.fixture
def disk_folder():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield made


def test_a_disk_file_system_is_direct(disk_folder):
    if filesystem_name(disk_folder) not in ("ext4", "xfs", "btrfs"):
        pytest.skip(f"/var/tmp is {filesystem_name(disk_folder)}")
    probed = probe_direct(disk_folder)
    assert (probed.ok, probed.direct, probed.reason, probed.errno) == (True, True, "", 0)
    assert os.listdir(disk_folder) == []


def test_tmpfs_accepts_it_without_being_direct():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        probed = probe_direct(folder)
        assert os.listdir(folder) == []
    assert not probed.direct
    assert probed.filesystem == "tmpfs"
    if probed.ok:
        assert "accepted but not direct" in probed.reason
    else:  # before Linux 6.6
        assert probed.errno == errno.EINVAL


@pytest.mark.parametrize("stage", ["open for writing", "write", "read"])
def test_a_refusal_at_any_stage_names_stage_errno_and_folder(disk_folder, monkeypatch, stage):
    real_open = os.open

    def refuse(*arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    def open_(path, flags, *rest):
        if flags & os.O_DIRECT and stage == "open for writing":
            refuse()
        return real_open(path, flags & ~os.O_DIRECT, *rest)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        if stage != "open for writing":
            patch.setattr(os, "pwritev" if stage == "write" else "preadv", refuse)
        probed = probe_direct(disk_folder)
    assert not probed.ok
    assert not probed.direct
    assert probed.errno == errno.EINVAL
    for part in (stage, "EINVAL", disk_folder):
        assert part in probed.reason
    assert os.listdir(disk_folder) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_bytes_than_were_written_are_a_failure(disk_folder, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: len(buffers[0]))
    probed = probe_direct(disk_folder)
    assert not probed.ok
    assert "other bytes" in probed.reason


def test_a_folder_that_is_not_there_is_no_crash(tmp_path):
    probed = probe_direct(str(tmp_path / "absent"))
    assert (probed.ok, probed.errno) == (False, errno.ENOENT)


def test_the_file_system_is_named_as_the_kernel_names_it(disk_folder):
    for folder in (disk_folder, "/dev/shm"):
        found = subprocess.run(["stat", "-f", "-c", "%t", folder], capture_output=True, text=True, check=True)
        assert filesystem_magic(folder) == int(found.stdout, 16)
    assert filesystem_name("/dev/shm") == "tmpfs"
    assert filesystem_magic(str(Path(disk_folder) / "absent")) == 0
