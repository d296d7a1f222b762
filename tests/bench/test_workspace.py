"""A benchmark's folder goes with it, however it ends, and what a killed one left goes with the next."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from py_kvcache.bench.workspace import remove_leftovers, workspace
from py_kvcache.layout import safe_hostname

SOURCE = Path(__file__).parents[2] / "connector"
HOST = safe_hostname(socket.gethostname())


@pytest.fixture
def tmp_path():
    """On tmpfs: a thousand folders are quick to make and to remove there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def left_by(root, host, pid):
    folder = root / f".py-kvcache-bench.{host}.{pid}.0123abcd"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    return folder


def started(root):
    """A benchmark of look-ups that has its folder and files in it."""
    child = subprocess.Popen(
        # Under nohup, or in the background of a script, we inherited signals that are ignored.
        ["env", "--default-signal=HUP,INT,TERM", sys.executable, "-m", "py_kvcache", "bench", "metadata",
         "--root", str(root), "--files", "50", "--processes", "2", "--rounds", "1",
         "--seconds", "20", "--json"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    for line in child.stderr:
        if "look-ups by 2" in line:
            return child
    pytest.fail("the benchmark ended early")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_removes_its_folder(tmp_path, number):
    child = started(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert os.listdir(tmp_path) == []
    assert '"interrupted"' in out
    assert "Traceback" not in err


def test_the_next_benchmark_removes_what_a_killed_one_left(tmp_path):
    child = started(tmp_path)
    child.kill()
    child.communicate(timeout=60)
    assert len(os.listdir(tmp_path)) == 1
    with workspace(str(tmp_path), 0) as folder:
        assert os.listdir(tmp_path) == [os.path.basename(folder)]
    assert os.listdir(tmp_path) == []


def test_only_folders_of_this_hosts_dead_processes_are_removed(tmp_path, dead_pid):
    dead = left_by(tmp_path, HOST, dead_pid)
    kept = [left_by(tmp_path, HOST, os.getppid()), left_by(tmp_path, "elsewhere", dead_pid)]
    for name in (".py-kvcache-bench.x", f".py-kvcache-bench.{HOST}.{dead_pid}.mine", "model_0123456789ab"):
        kept.append(tmp_path / name)
        kept[-1].mkdir()
    target = left_by(tmp_path / "outside", HOST, 1)
    link = tmp_path / f".py-kvcache-bench.{HOST}.{dead_pid}.00000000"
    link.symlink_to(target)
    assert remove_leftovers(str(tmp_path)) == [dead.name]
    assert not dead.exists()
    assert all(folder.exists() for folder in [*kept, link, target / "deep" / "file"])


def test_a_folder_whose_lock_is_held_belongs_to_a_process_we_do_not_see(tmp_path, dead_pid):
    folder = left_by(tmp_path, HOST, dead_pid)
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert remove_leftovers(str(tmp_path)) == []
    os.close(fd)
    assert remove_leftovers(str(tmp_path)) == [folder.name]


def test_who_interrupts_the_removal_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    def interrupted(folder: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("py_kvcache.bench.workspace.remove_tree", interrupted)
        with workspace(str(tmp_path), 0) as folder:
            measured = 7
    assert measured == 7
    assert f"removes the rest of {folder}" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), workspace(str(tmp_path), 0):
        raise KeyboardInterrupt
