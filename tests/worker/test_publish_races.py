"""Several processes, and processes that die: a final name is absent or complete at every moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import py_kvcache
from py_kvcache.layout import block_path, file_bytes, parse_block_path, parse_temp_name, part_dir
from py_kvcache.worker.checksum import verify_block
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.leftovers import remove_own_dead_temps

NAMESPACE = "m_0123456789ab"
PAYLOAD = 50_000
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(py_kvcache.__file__).parents[1])}

PRELUDE = f"""
import json, os, random, select, signal, sys, time
from py_kvcache.layout import block_path, file_bytes, part_dir
from py_kvcache.worker.checksum import seal_block
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import BlockFiles, FileSettings

root, way = sys.argv[1:3]
ops = FileOps()
if way == "rename":
    def link(*names):
        raise OSError(95, "no links")
    ops.link = link
files = BlockFiles(ops, FileSettings(root))

def block(number, fill):
    key = number.to_bytes(32, "little") + bytes(4)
    data = bytearray(file_bytes({PAYLOAD}))
    data[:{PAYLOAD}] = bytes([fill]) * {PAYLOAD}
    seal_block(memoryview(data), key, 3, {PAYLOAD}, enabled=True)
    return block_path(part_dir(root, "{NAMESPACE}", 0), key), data
"""

SAME_KEYS = """
print("ready", flush=True)
sys.stdin.readline()
won = sum(files.publish(*block(number, int(sys.argv[3])), 3) for number in range(200))
print(json.dumps({"won": won, "counts": files.counts.read()}))
"""

# Forked children share the interpreter's start, so that 200 deaths take seconds. Each child publishes for
# ever, in pieces, and counts its system calls in shared memory; the parent kills it once it has made a random
# number of them, so wherever it then is. Output: the signal of each death.
DIES = """
import mmap
random.seed(int(sys.argv[3]))
calls = memoryview(mmap.mmap(-1, 8)).cast("Q")

def counted(function):
    def call(*arguments, **named):
        calls[0] += 1
        return function(*arguments, **named)
    return call

for name, function in list(vars(ops).items()):
    setattr(ops, name, counted(function))
files = BlockFiles(ops, FileSettings(root))
signals = []
for life in range(200):
    calls[0], last = 0, random.randint(1, 150)
    child = os.fork()
    if child == 0:
        number = life * 1000
        while True:
            final, data = block(number, life % 256)
            fd, temp = files.create(final)
            for start in range(0, len(data), 4096):
                ops.write(fd, data[start:start + 4096])
            files.commit(fd, temp, final, 3)
            number += 1
    while calls[0] < last:
        time.sleep(0.0001)
    os.kill(child, signal.SIGKILL)
    signals.append(os.WTERMSIG(os.waitpid(child, 0)[1]))
print(json.dumps(signals))
"""


def files_under(root):
    return [path for path in Path(root).rglob("*") if path.is_file()]


def assert_complete(path):
    parsed = parse_block_path(str(path))
    assert parsed is not None
    data = path.read_bytes()
    assert len(data) == file_bytes(PAYLOAD)
    assert verify_block(memoryview(data), parsed.key, PAYLOAD, enabled=True) == (None, "")
    assert len(set(data[:PAYLOAD])) == 1  # one writer's


@pytest.fixture(params=["/var/tmp", "/dev/shm"])
def root(request):
    made = tempfile.mkdtemp(dir=request.param)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("way", ["link", "rename"])
def test_two_processes_that_publish_the_same_keys_leave_one_complete_file_each(root, way):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + SAME_KEYS, root, way, str(fill)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )
        for fill in (1, 2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    results = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert sum(result["won"] for result in results) == 200  # each name has exactly one winner
    assert len(files_under(root)) == 200
    for path in files_under(root):
        assert_complete(path)


def test_a_writer_killed_at_two_hundred_moments_leaves_complete_files_and_temporaries_only(root):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + DIES, root, "link", "7"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [9] * 200
    temps = [path for path in files_under(root) if path.name.endswith(".tmp")]
    finals = [path for path in files_under(root) if not path.name.endswith(".tmp")]
    for path in finals:
        assert_complete(path)
    assert all(parse_temp_name(path.name) for path in temps)
    # The deaths came at different moments: some with a file half written, some after many were published.
    assert len(finals) >= 50
    assert len({path.stat().st_size for path in temps}) > 3

    tidied = remove_own_dead_temps(FileOps(), root, NAMESPACE, min_age_s=0)
    assert tidied.removed == len(temps)
    assert tidied.complete
    assert sorted(files_under(root)) == sorted(finals)


def test_a_reader_never_sees_a_partial_file(root):
    path = block_path(part_dir(root, NAMESPACE, 0), (1).to_bytes(32, "little") + bytes(4))
    script = """
for turn in range(300):
    files.publish(*block(1, turn % 256))
    os.unlink(block(1, 0)[0])
"""
    writer = subprocess.Popen([sys.executable, "-c", PRELUDE + script, root, "link"], env=ENVIRONMENT)
    seen = 0
    while writer.poll() is None:
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            continue
        seen += 1
        parsed = parse_block_path(path)
        assert verify_block(memoryview(data), parsed.key, PAYLOAD, enabled=True) == (None, "")
    assert writer.returncode == 0
    assert seen > 0
