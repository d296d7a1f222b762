"""What the kernel, the CPU and the limits of this process allow."""

from __future__ import annotations

import errno
import os
import platform
import resource
from collections.abc import Iterable

from py_kvcache.tools.checks import FULL, Check, Status
from py_kvcache.tools.show import human_bytes
from py_kvcache.worker.probe import RingProbe

_FILES_NEEDED = 1_024
_SECCOMP_FILTER = "2"
_MIN_KERNEL = (5, 10)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _status_field(name: str) -> str:
    for line in _read("/proc/self/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Flags of the first processor; empty on machines that list none under this name (arm64)."""
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def host_checks(ring: RingProbe) -> Iterable[Check]:
    """CPU, kernel, ring, memlock and open files, in this order."""
    yield check_cpu(platform.machine(), cpu_flags(_read("/proc/cpuinfo")), ring)
    disabled = _read("/proc/sys/kernel/io_uring_disabled").strip()
    yield check_kernel(platform.release(), disabled)
    yield check_ring(ring, disabled, _status_field("Seccomp") == _SECCOMP_FILTER)
    yield check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], ring)
    yield check_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def check_cpu(machine: str, flags: frozenset[str], ring: RingProbe) -> Check:
    """The liburing wheel is for x86_64 and has AVX-512 instructions in it."""
    data = {"machine": machine, "avx512": "avx512f" in flags, "cores": os.cpu_count()}
    if machine != "x86_64":
        text = f"{machine}: the liburing package has a wheel for x86_64 only"
        return Check("cpu", Status.NOTE, text, "nothing to do: the thread pool serves this machine", data)
    if "avx512f" in flags:
        return Check("cpu", Status.OK, f"x86_64 with AVX-512, {os.cpu_count()} cores", data=data)
    text = "x86_64 without AVX-512, which the liburing wheel needs"
    if ring.ok:
        return Check("cpu", Status.OK, f"{text}; the installed one works all the same", data=data)
    return Check("cpu", Status.SLOW, text, "use a CPU with AVX-512 or build liburing from source", data)


def check_kernel(release: str, disabled: str) -> Check:
    """Version and the sysctl."""
    data = {"release": release, "io_uring_disabled": disabled or None}
    parts = release.split(".")
    version = tuple(int(p) if p.isdigit() else 0 for p in (*parts[:2], "0")[:2])
    if version < _MIN_KERNEL:
        return Check(
            "kernel", Status.SLOW, f"Linux {release} is older than 5.10", "use Linux 5.10 or later", data
        )
    if disabled in ("1", "2"):
        text = f"Linux {release}, kernel.io_uring_disabled={disabled}"
        remedy = "on the node: sysctl -w kernel.io_uring_disabled=0"
        return Check("kernel", Status.SLOW, text, remedy, data)
    return Check("kernel", Status.OK, f"Linux {release}", data=data)


def check_ring(ring: RingProbe, disabled: str, seccomp: bool) -> Check:
    """Outcome of the trial in a child process."""
    data = {"ok": ring.ok, "reason": ring.reason, "seccomp": seccomp}
    if ring.ok:
        return Check("io_uring", Status.OK, "ring set-up, write and read work", data=data)
    for code in FULL:
        if f"[{errno.errorcode[code]}]" in ring.reason:
            text = (
                f"could not be tried: no space for its file ({errno.errorcode[code]}); threads until it can"
            )
            return Check("io_uring", Status.NOTE, text, "free space, then run this again", data)
    reason, _, remedy = ring.reason.partition(": ")
    if reason.count("(") != reason.count(")"):
        reason, remedy = ring.reason, ""  # the colon was an error message's
    if "EPERM" in ring.reason and disabled not in ("1", "2") and seccomp:
        reason = "forbidden by this container's seccomp profile [EPERM]"
        remedy = (
            "give the pod a Localhost seccomp profile that allows io_uring_setup, io_uring_enter and "
            "io_uring_register (containerd's RuntimeDefault denies them)"
        )
    return Check("io_uring", Status.SLOW, reason, remedy, data)


def check_memlock(limit: int, ring: RingProbe) -> Check:
    """Rings count against it before Linux 5.12; memory that the CUDA driver pins does not."""
    unlimited = limit == resource.RLIM_INFINITY
    text = f"locked memory limit {'none' if unlimited else human_bytes(limit)}; what CUDA pins does not count"
    data = {"limit_bytes": None if unlimited else limit}
    if not ring.ok and "ENOMEM" in ring.reason:
        remedy = "raise it: ulimit -l unlimited (LimitMEMLOCK=infinity in the container runtime's unit)"
        return Check("memlock", Status.SLOW, text + ", too small for a ring", remedy, data)
    return Check("memlock", Status.OK, text, data=data)


def check_files(soft: int, hard: int) -> Check:
    """Each block in flight holds one descriptor."""
    data = {"soft": soft, "hard": hard}
    text = f"{'unlimited' if soft == resource.RLIM_INFINITY else f'{soft:,}'} open files allowed"
    if soft != resource.RLIM_INFINITY and soft < _FILES_NEEDED:
        remedy = f"raise it to {_FILES_NEEDED:,} or more: ulimit -n"
        return Check("open files", Status.NOTE, text, remedy, data)
    return Check("open files", Status.OK, text, data=data)
