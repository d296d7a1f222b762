"""A starting engine removes its dead predecessor's temporaries, and nobody else's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from py_kvcache.layout import block_path, part_dir, temp_path
from py_kvcache.worker import leftovers
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.leftovers import pid_is_alive, remove_own_dead_temps
from py_kvcache.worker.publication import INCARNATION

NAMESPACE, OTHER = "m_0123456789ab", "m_ba9876543210"
DEAD, ALIVE = 4_194_305, 1  # above the largest pid_max; init


def final_of(root, namespace=NAMESPACE, part=0, number=1):
    return block_path(part_dir(str(root), namespace, part), number.to_bytes(32, "little") + bytes(4))


def temp(root, host="me", pid=DEAD, token="cafebabe-1", age=100.0, **where):
    path = Path(temp_path(final_of(root, **where), hostname=host, pid=pid, token=token))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    when = path.stat().st_mtime - age
    os.utime(path, (when, when))
    return path


def tidy(root, ops=None, **named):
    return remove_own_dead_temps(ops or FileOps(), str(root), NAMESPACE, hostname="me", **named)


def test_temporaries_of_dead_processes_of_this_host_are_removed_in_all_parts(tmp_path):
    paths = [temp(tmp_path, part=part, number=number) for part in (0, 3) for number in (1, 0x123456)]
    final = Path(final_of(tmp_path))
    final.write_bytes(b"whole")
    assert tidy(tmp_path).removed == 4
    assert not any(path.exists() for path in paths)
    assert final.read_bytes() == b"whole"


LEFT = {
    "another host's": {"host": "you"},
    "a host whose name begins alike": {"host": "me2"},
    "a living process's": {"pid": ALIVE},
    "our own": {"pid": os.getpid(), "token": f"{INCARNATION}-5"},
    "another namespace's": {"namespace": OTHER},
    "one that grew a second ago": {"age": 1.0},
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_may_be_in_use_is_left(tmp_path, kind):
    path = temp(tmp_path, **LEFT[kind])
    decoy = temp(tmp_path, number=2)
    assert tidy(tmp_path).removed == 1
    assert path.exists()
    assert not decoy.exists()


def test_a_predecessor_with_our_own_pid_is_dead(tmp_path):
    path = temp(tmp_path, pid=os.getpid(), token="0badcafe-0")
    assert tidy(tmp_path).removed == 1
    assert not path.exists()


def test_host_names_are_compared_as_they_are_written(tmp_path):
    path = temp(tmp_path, host="räck 7")
    assert remove_own_dead_temps(FileOps(), str(tmp_path), NAMESPACE, hostname="räck 7").removed == 1
    assert not path.exists()


def test_names_that_are_not_ours_are_not_touched(tmp_path):
    folder = temp(tmp_path).parent
    strange = [folder / ".x.me.5.tmp", folder / "notes.tmp", folder / f".{'0' * 64}.me.nan.t.tmp"]
    for path in strange:
        path.write_bytes(b"")
    for place in ("mine", "000/mine", "000/00_g0/deeper", "00_g0/00_g0"):
        outside = Path(part_dir(str(tmp_path), NAMESPACE, 0), place, temp(tmp_path).name)
        outside.parent.mkdir(parents=True)
        outside.write_bytes(b"")
        os.utime(outside, (0, 0))
        strange.append(outside)
    tidy(tmp_path)
    assert all(path.exists() for path in strange)


def test_no_clock_file_stays_behind(tmp_path):
    temp(tmp_path)
    tidy(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["open", "scandir", "unlink", "lstat"])
def test_errors_end_in_nothing_removed_not_in_an_exception(tmp_path, call, code):
    path = temp(tmp_path)
    ops = FileOps()

    def failing(*_):
        raise OSError(code, os.strerror(code))

    setattr(ops, call, failing)
    assert tidy(tmp_path, ops).removed == 0
    assert path.exists()


def test_a_missing_root_is_nothing_to_tidy(tmp_path):
    result = tidy(tmp_path / "nowhere")
    assert (result.removed, result.complete) == (0, True)


def test_the_walk_ends_at_its_limits(tmp_path, monkeypatch):
    for number in range(6):
        temp(tmp_path, number=number << 16 | number)
    ticks = iter(range(1000))
    limited = tidy(tmp_path, clock=lambda: next(ticks) * 100.0)
    assert not limited.complete
    assert limited.removed == 0
    monkeypatch.setattr(leftovers, "MAX_ENTRIES", 2)
    assert not tidy(tmp_path).complete
    monkeypatch.undo()
    result = tidy(tmp_path)
    assert result.complete


def test_a_process_of_another_user_counts_as_alive(monkeypatch):
    def denied(pid, signal):
        raise PermissionError(errno.EPERM, "")

    assert pid_is_alive(os.getpid())
    assert not pid_is_alive(DEAD)
    assert not pid_is_alive(10**9)
    monkeypatch.setattr("py_kvcache.worker.leftovers.os.kill", denied)
    assert pid_is_alive(DEAD)
