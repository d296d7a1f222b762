"""Where io_uring is refused, the thread ring serves and one sentence says why."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap

import pytest

from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.worker import probe as probe_module
from py_kvcache.worker import ring as ring_module
from py_kvcache.worker.probe import RingProbe, probe_ring, run_probe
from py_kvcache.worker.ring import make_ring

# A classic BPF filter: io_uring_setup (425 on every architecture) returns the errno, all else is allowed.
SECCOMP = """
import ctypes, struct
def deny_io_uring_setup(action):
    code = b"".join(struct.pack("HBBI", *step) for step in (
        (0x20, 0, 0, 0),           # load the system call's number
        (0x15, 0, 1, 425),         # equal to io_uring_setup?
        (0x06, 0, 0, action),
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ))
    text = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", 4, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0       # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, filter
"""

USE = """
import json, mmap, os, select, sys
from py_kvcache.errors import KvCacheError
from py_kvcache.worker.ring import make_ring
def use(kind, folder):
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        ring, reason = make_ring(kind, 64, 4, wake, folder)
    except KvCacheError as error:
        return print(json.dumps({"refused": str(error)}))
    def run(operation, *arguments):
        getattr(ring, operation)(1, *arguments)
        ring.submit()
        while True:
            select.select([wake], [], [], 20)
            for _, result in ring.completions():
                return result
    fd = run("openat", folder + "/block.bin", os.O_RDWR | os.O_CREAT, 0o600)
    wrote, back = memoryview(mmap.mmap(-1, 8192)), memoryview(mmap.mmap(-1, 8192))
    wrote[:] = os.urandom(8192)
    counts = run("write", fd, wrote, 0), run("read", fd, back, 0), run("close", fd)
    print(json.dumps({"name": ring.name, "reason": reason, "counts": counts, "same": wrote == back}))
    ring.shutdown()
"""


def in_child(code, *arguments):
    """Run code in a fresh process; its last line of output is JSON."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def use_with_denied_setup(action, kind, folder):
    code = SECCOMP + USE + "deny_io_uring_setup(int(sys.argv[1])); use(sys.argv[2], sys.argv[3])"
    return in_child(code, action, kind, folder)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EPERM, "seccomp"),
        (errno.EACCES, "SELinux"),
        (errno.ENOSYS, "Linux 5.10"),
        (errno.ENOMEM, "ulimit -l"),
    ],
)
def test_a_refused_ring_falls_back_to_threads_and_says_how_to_allow_it(tmp_path, code, remedy):
    said = use_with_denied_setup(0x00050000 | code, "auto", tmp_path)
    assert said["name"] == "threads"
    assert remedy in said["reason"]
    assert errno.errorcode[code] in said["reason"]
    assert said["counts"] == [8192, 8192, 0]
    assert said["same"]


def test_a_refused_ring_that_was_asked_for_is_an_error_with_the_reason(tmp_path):
    said = use_with_denied_setup(0x00050000 | errno.EPERM, "io_uring", tmp_path)
    assert "ring is set to io_uring" in said["refused"]
    assert "seccomp" in said["refused"]


def test_a_filter_that_kills_kills_only_the_probe(tmp_path):
    said = use_with_denied_setup(0x80000000, "auto", tmp_path)  # SECCOMP_RET_KILL_PROCESS
    assert said["name"] == "threads"
    assert "Bad system call" in said["reason"]
    assert said["counts"] == [8192, 8192, 0]


def test_without_refusal_io_uring_is_used_and_nothing_is_said(tmp_path):
    if not probe_ring(str(tmp_path)).ok:
        pytest.skip("no io_uring on this machine")
    said = in_child(USE + "use(sys.argv[1], sys.argv[2])", "auto", tmp_path)
    assert (said["name"], said["reason"], said["counts"]) == ("io_uring", None, [8192, 8192, 0])
    assert said["same"]


def test_a_small_memlock_limit_needs_no_registered_memory(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    said = in_child(code + USE + "use(sys.argv[1], sys.argv[2])", "auto", tmp_path)
    # Kernels before 5.12 count the ring itself; then the threads serve.
    assert said["name"] == "io_uring" or "ulimit -l" in said["reason"]
    assert said["counts"] == [8192, 8192, 0]
    assert said["same"]


def test_nothing_of_liburing_is_loaded_before_the_probe_said_yes(tmp_path):
    code = """
    import json, os, sys
    from py_kvcache.worker import probe, ring, threads
    probe.probe_ring = lambda directory: probe.RingProbe(False, "told so")
    wake = os.eventfd(0)
    made, reason = ring.make_ring("auto", 64, 2, wake, sys.argv[1])
    made.shutdown()
    print(json.dumps([made.name, reason, "liburing" in sys.modules]))
    """
    assert in_child(code, tmp_path) == ["threads", "told so", False]


def test_the_probe_child_loads_no_engine(tmp_path):
    code = """
    import json, sys
    from py_kvcache.worker.probe import child_main
    status = child_main(sys.argv[1])
    print(json.dumps([status, sorted({"vllm", "torch", "numpy"} & set(sys.modules))]))
    """
    assert in_child(code, tmp_path)[1] == []


def test_the_probe_leaves_no_file_behind(tmp_path):
    probe_ring(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_probe_in_a_folder_that_is_not_there_says_so(tmp_path):
    probed = probe_ring(str(tmp_path / "absent"))
    assert not probed.ok
    assert str(tmp_path / "absent") in probed.reason
    assert "ENOENT" in probed.reason


def test_an_illegal_instruction_in_the_probe_is_reported_with_its_cause():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    probed = run_probe([sys.executable, "-c", code], 60)
    assert not probed.ok
    assert "AVX-512" in probed.reason
    assert "SIGILL" in probed.reason


def test_any_other_end_of_the_probe_is_reported():
    segfault = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert "Segmentation fault" in run_probe([sys.executable, "-c", segfault], 60).reason
    broken = "raise RuntimeError('the oddest thing')"
    assert "the oddest thing" in run_probe([sys.executable, "-c", broken], 60).reason
    assert "could not be started" in run_probe(["/no/such/python"], 60).reason
    assert "status 3" in run_probe([sys.executable, "-c", "print('{}'); raise SystemExit(3)"], 60).reason


def test_a_probe_that_hangs_is_killed_and_reported():
    probed = run_probe([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert not probed.ok
    assert "did not finish" in probed.reason


def test_a_missing_package_is_named(tmp_path):
    code = "import sys; sys.modules['liburing'] = None\n"
    code += "from py_kvcache.worker.probe import child_main; sys.exit(child_main(sys.argv[1]))"
    probed = run_probe([sys.executable, "-c", code, str(tmp_path)], 60)
    assert "pip install liburing" in probed.reason


def test_a_data_error_in_the_trial_is_no_success(tmp_path):
    code = """
    import sys
    from py_kvcache.worker import probe
    class Lying(probe.UringRing):
        def write(self, token, fd, buffer, offset):
            super().write(token, fd, memoryview(bytearray(len(buffer))), offset)
    probe.UringRing = Lying
    sys.exit(probe.child_main(sys.argv[1]))
    """
    probed = run_probe([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], 60)
    assert "comparing" in probed.reason


def test_threads_are_used_without_a_probe_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_module, "probe_ring", lambda directory: pytest.fail("probed"))
    ring, reason = make_ring("threads", 64, 2, os.eventfd(0), str(tmp_path))
    assert (ring.name, reason) == ("threads", None)
    ring.shutdown()


def test_a_ring_refused_after_a_good_probe_falls_back_too(tmp_path, monkeypatch):
    def refuse(entries, wake_fd, workers):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(probe_module, "probe_ring", lambda directory: RingProbe(True, ""))
    monkeypatch.setattr(ring_module, "UringRing", refuse)
    ring, reason = make_ring("auto", 4096, 2, os.eventfd(0), str(tmp_path))
    assert ring.name == "threads"
    assert reason == "io_uring with 4096 entries: Cannot allocate memory"
    ring.shutdown()
    with pytest.raises(KvCacheError, match="4096 entries"):
        make_ring("io_uring", 4096, 2, os.eventfd(0), str(tmp_path))


def test_an_unknown_kind_of_ring_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="epoll"):
        make_ring("epoll", 64, 2, 0, str(tmp_path))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("stage", ["creating a file", "openat", "write"])
def test_a_volume_that_cannot_take_the_trial_file_says_nothing_about_the_ring(
    tmp_path, monkeypatch, capsys, code, stage
):
    tried = []

    def trial(folder):
        tried.append(folder)
        if folder == str(tmp_path):
            raise probe_module._StageError(stage, code)

    monkeypatch.setattr(probe_module, "_try_ring", trial)
    assert probe_module.child_main(str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out)["stage"] == "done"
    assert len(tried) == 2


@pytest.mark.parametrize(("stage", "code"), [("setup", errno.EPERM), ("read", errno.EIO)])
def test_what_is_about_the_ring_is_tried_in_no_other_folder(tmp_path, monkeypatch, capsys, stage, code):
    tried = []

    def trial(folder):
        tried.append(folder)
        raise probe_module._StageError(stage, code)

    monkeypatch.setattr(probe_module, "_try_ring", trial)
    assert probe_module.child_main(str(tmp_path)) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["stage"], said["errno"]) == (stage, code)
    assert tried == [str(tmp_path)]


def test_where_no_folder_can_take_the_trial_file_the_first_reason_is_told(tmp_path, monkeypatch, capsys):
    def trial(folder):
        raise probe_module._StageError(
            f"creating a file in {folder}", errno.ENOSPC if folder == str(tmp_path) else errno.EROFS
        )

    monkeypatch.setattr(probe_module, "_try_ring", trial)
    assert probe_module.child_main(str(tmp_path)) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["stage"], said["errno"]) == (f"creating a file in {tmp_path}", errno.ENOSPC)
