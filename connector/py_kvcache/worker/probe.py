"""Trial I/O at start: may this process use io_uring, and is O_DIRECT direct on this file system?

Only a real write and read tells: io_uring is refused by seccomp, sysctl and memory limits, the liburing
wheel dies by SIGILL on CPUs without AVX-512, and some file systems accept O_DIRECT and then fail the read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from py_kvcache.errors import ConfigError
from py_kvcache.worker.ring import Ring, UringRing

_PROBE_BYTES = 8192
_CHILD = "import sys; from py_kvcache.worker.probe import child_main; sys.exit(child_main(sys.argv[1]))"

# linux/magic.h
_TMPFS, _RAMFS, _HUGETLBFS, _OVERLAY = 0x01021994, 0x858458F6, 0x958458F6, 0x794C7630
_NAMES = {
    _TMPFS: "tmpfs", _RAMFS: "ramfs", _HUGETLBFS: "hugetlbfs", _OVERLAY: "overlay", 0xEF53: "ext4",
    0x58465342: "xfs", 0x9123683E: "btrfs", 0x6969: "nfs", 0x2FC12FC1: "zfs", 0x65735546: "fuse",
    0xFF534D42: "cifs", 0x00C36400: "ceph", 0x0BD00BD0: "lustre", 0x47504653: "gpfs", 0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs", 0x01021997: "9p",
}  # fmt: skip
_IN_MEMORY = frozenset({_TMPFS, _RAMFS, _HUGETLBFS})

# A root that we may not write to says nothing about O_DIRECT; reads try it and fall back by themselves. Nor
# does it say anything about the ring, which is then tried in another folder.
_UNTRIED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")

_REMEDY = {
    errno.EPERM: (
        "io_uring is forbidden here (seccomp profile of the container runtime, or kernel.io_uring_disabled): "
        "allow io_uring_setup, io_uring_enter and io_uring_register in the pod's seccomp profile, "
        "or set the sysctl to 0"
    ),
    errno.EACCES: "a security module forbids io_uring here: allow it in the SELinux or AppArmor profile",
    errno.ENOSYS: (
        "this kernel or seccomp profile has no io_uring: use Linux 5.10 or later built with CONFIG_IO_URING, "
        "and a seccomp profile that allows io_uring_setup"
    ),
    errno.ENOMEM: "the locked-memory limit is too small for a ring: raise `ulimit -l` (memlock)",
    errno.EMFILE: "no descriptor is left for a ring: raise `ulimit -n`",
}


@dataclass(frozen=True)
class RingProbe:
    """``reason`` is empty when ok, else one sentence with the remedy."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class DirectProbe:
    """What O_DIRECT does in one directory.

    ``ok``: open, write and read with O_DIRECT work. ``direct``: and they bypass the page cache, as far as
    the file system's type tells. ``errno`` and ``reason`` say what failed, or why it is not direct.
    """

    ok: bool
    reason: str
    errno: int = 0
    direct: bool = False
    filesystem: str = "unknown"


def probe_ring(directory: str, timeout_s: float = 10.0) -> RingProbe:
    """Set up a ring, write and read a file in ``directory``, all in a child process that may die of it.

    Where ``directory`` is full or not to be written to, a temporary one serves as well.
    """
    if not sys.executable:
        return RingProbe(False, "this Python does not know its own executable, so io_uring cannot be tried")
    return run_probe([sys.executable, "-c", _CHILD, directory], timeout_s)


def run_probe(command: list[str], timeout_s: float) -> RingProbe:
    """Run a probe child and put its end into a sentence. Never raises, never waits much longer than told."""
    # The child must find this package even when the parent's path was changed at run time (vLLM's workers).
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return RingProbe(False, f"the io_uring probe could not be started ({error})")
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        # Stuck in the kernel it is not ours to wait for; it is reaped when this process ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
        return RingProbe(
            False,
            f"the io_uring probe did not finish in {timeout_s:g} s: "
            "the file system hangs or the machine is overloaded",
        )
    return _judge(child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def _judge(status: int, out: str, err: str) -> RingProbe:
    if status == -signal.SIGILL:
        return RingProbe(
            False,
            "the liburing package needs a CPU with AVX-512 (its wheel died by SIGILL here): "
            "use one, or build liburing from source on this machine",
        )
    if status < 0:
        return RingProbe(False, f"the io_uring probe died by signal {signal.strsignal(-status) or -status}")
    try:
        said = json.loads(out.strip().splitlines()[-1])
        stage, code, text = str(said["stage"]), int(said["errno"]), str(said["text"])
    except (ValueError, LookupError, TypeError):
        last = (err.strip().splitlines() or ["no output"])[-1]
        return RingProbe(False, f"the io_uring probe ended with status {status}: {last}")
    if stage == "done":
        return RingProbe(True, "")
    if stage == "import":
        return RingProbe(
            False, f"the liburing package cannot be imported ({text}): `pip install liburing` (x86_64 only)"
        )
    name = errno.errorcode.get(code, str(code))
    if stage == "setup" and code in _REMEDY:
        return RingProbe(False, f"{_REMEDY[code]} [{name}]")
    return RingProbe(False, f"io_uring failed its trial at {stage}: {text} [{name}]")


def child_main(directory: str) -> int:
    """The probe child: one JSON line {stage, errno, text} on stdout; stage ``done`` means all worked."""
    stage, code, text = "done", 0, ""
    try:
        _try_ring_somewhere(directory)
    except ImportError as error:
        stage, text = "import", str(error)
    except _StageError as error:
        stage, code, text = error.stage, error.code, os.strerror(error.code)
    print(json.dumps({"stage": stage, "errno": code, "text": text}), flush=True)
    return 0 if stage == "done" else 1


class _StageError(Exception):
    def __init__(self, stage: str, code: int) -> None:
        super().__init__(stage, code)
        self.stage, self.code = stage, code


def _try_ring_somewhere(directory: str) -> None:
    try:
        _try_ring(directory)
    except _StageError as error:
        if error.stage == "setup" or error.code not in _UNTRIED:
            raise
        for folder in filter(None, [os.environ.get("TMPDIR"), *_TEMPORARY]):
            with contextlib.suppress(_StageError):
                return _try_ring(folder)
        raise


def _try_ring(directory: str) -> None:
    try:
        fd, path = tempfile.mkstemp(prefix=".py-kvcache-probe.", dir=directory)
    except OSError as error:
        raise _StageError(f"creating a file in {directory}", error.errno or 0) from error
    os.close(fd)
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        ring = UringRing(8, wake)
        try:
            _round_trip(ring, wake, os.path.abspath(path))
        finally:
            ring.shutdown()
    except OSError as error:
        raise _StageError("setup", error.errno or 0) from error
    finally:
        os.close(wake)
        os.unlink(path)


def _round_trip(ring: Ring, wake: int, path: str) -> None:
    wrote, back = memoryview(mmap.mmap(-1, _PROBE_BYTES)), memoryview(mmap.mmap(-1, _PROBE_BYTES))
    wrote[:] = os.urandom(_PROBE_BYTES)
    ring.openat(1, path, os.O_RDWR | os.O_CLOEXEC)
    fd = _await(ring, wake, "openat")
    ring.write(2, fd, wrote, 0)
    written = _await(ring, wake, "write")
    if written < _PROBE_BYTES:
        raise _StageError("write", errno.ENOSPC)  # short in a file of our own: there was no room for the rest
    ring.read(3, fd, back, 0)
    read = _await(ring, wake, "read")
    ring.close(4, fd)
    _await(ring, wake, "close")
    if written != _PROBE_BYTES or read != _PROBE_BYTES or wrote != back:
        raise _StageError("comparing what was read with what was written", errno.EIO)


def _await(ring: Ring, wake: int, stage: str) -> int:
    ring.submit()
    while True:
        select.select([wake], [], [])  # the parent bounds the time
        os.eventfd_read(wake)
        for completion in ring.completions():
            if completion.result < 0:
                raise _StageError(stage, -completion.result)
            return completion.result


def probe_direct(directory: str, alignment: int = 4096) -> DirectProbe:
    """Write and read two aligned blocks with O_DIRECT in a temporary file of ``directory``."""
    kind = filesystem_magic(directory)
    name = filesystem_name(directory)
    path = Path(directory) / f".py-kvcache-probe.{os.getpid()}.{time.monotonic_ns()}"
    stage = "open for writing"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            stage = "write"
            data = memoryview(mmap.mmap(-1, 2 * alignment))  # anonymous pages: aligned to 4,096 or better
            data[:] = os.urandom(2 * alignment)
            written = os.pwritev(fd, [data], 0)
            stage = "read"
            back = memoryview(mmap.mmap(-1, alignment))
            read = os.preadv(fd, [back], alignment)
        finally:
            os.close(fd)
    except OSError as error:
        code = error.errno or 0
        named = errno.errorcode.get(code, str(code))
        return DirectProbe(
            False,
            f"O_DIRECT fails at {stage} on {directory} ({name}): {os.strerror(code)} [{named}]",
            code,
            filesystem=name,
        )
    finally:
        # a read-only file system says EROFS to this too, whether the name exists or not
        with contextlib.suppress(OSError):
            path.unlink()
    if written != len(data) or read != len(back) or back != data[alignment:]:
        return DirectProbe(
            False, f"O_DIRECT on {directory} ({name}) gave back other bytes than were written", errno.EIO,
            filesystem=name,
        )  # fmt: skip
    if kind in _IN_MEMORY:
        return DirectProbe(
            True, f"O_DIRECT is accepted but not direct: {directory} is {name}", 0, False, name
        )
    return DirectProbe(True, "", 0, True, name)


def choose_direct(setting: str, probe: DirectProbe) -> tuple[bool, str | None]:
    """Whether the worker opens with O_DIRECT, and why not if the user would have liked it.

    ``setting`` is direct_io: auto, on or off. Raises ConfigError when it is on and cannot be.
    """
    if setting == "off":
        return False, None
    if probe.ok and (probe.direct or setting == "on"):
        return True, None
    if not probe.ok and probe.errno in _UNTRIED:
        return True, None
    if setting == "on":
        raise ConfigError(
            f"direct_io is on, but {probe.reason}; set direct_io to auto, or use another volume"
        )
    return False, probe.reason


def filesystem_magic(directory: str) -> int:
    """f_type of statfs(2), 0 if unknown; os.statvfs leaves it out."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # larger than struct statfs on every Linux, f_type comes first
    if libc.statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        return 0
    return int(buffer[0]) & 0xFFFFFFFF


def filesystem_name(directory: str) -> str:
    """Name of the file system a directory lies on, for people."""
    kind = filesystem_magic(directory)
    return _NAMES.get(kind, f"type {kind:#x}")
