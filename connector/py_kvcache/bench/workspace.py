"""A folder of a benchmark's own under the root, always removed, and what the results were measured on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from py_kvcache import __version__
from py_kvcache.errors import ConfigError, RootError
from py_kvcache.layout import part_dir, safe_hostname
from py_kvcache.worker.leftovers import pid_is_alive
from py_kvcache.worker.probe import filesystem_name

# done steps, all steps, what is being done now
Progress = Callable[[int, int, str], None]

MOST_ROUNDS, MOST_SECONDS, MOST_VALUES = 1000, 600.0, 16
_PREFIX = ".py-kvcache-bench"


def no_progress(done: int, total: int, text: str) -> None:
    """Tell nobody."""


class Steps:
    """Counts the parts of a measurement; each call says which begins. ``about`` stands before its text."""

    def __init__(self, on_progress: Progress, total: int) -> None:
        self._on_progress, self._total, self._done = on_progress, total, 0
        self.about = ""

    def __call__(self, text: str) -> None:
        """The next part begins."""
        self._on_progress(self._done, self._total, self.about + text)
        self._done += 1


def judged(report: dict[str, Any], below_target: list[str]) -> dict[str, Any]:
    """The report with what it misses, and whether that is nothing."""
    return {**report, "below_target": below_target, "good": not below_target}


def check_passes(rounds: int, seconds: float) -> None:
    """Raise ConfigError for what would never end, or never begin."""
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ConfigError(f"rounds must be from 1 to {MOST_ROUNDS:,}")
    if not 0 < seconds <= MOST_SECONDS:  # nor NaN
        raise ConfigError(f"seconds must be above 0 and {MOST_SECONDS:g} at most")


@contextlib.contextmanager
def workspace(root: str, need_bytes: int, need_files: int = 0) -> Iterator[str]:
    """Yield a new folder under ``root`` with at least that much free space and inodes; remove it at the end.

    Who interrupts the removal after a complete run ends the removal only.

    Raises:
        RootError: root is no folder that can be written to, or has too little space.
    """
    if not root:
        raise ConfigError("ROOT is empty; give the folder of the cache, or set PY_KVCACHE_ROOT")
    if "\0" in root or not Path(root).is_dir():
        raise RootError(errno.ENOTDIR, "not a folder", root)
    remove_leftovers(root)  # before the space is counted
    space = os.statvfs(root)
    free = space.f_bavail * space.f_frsize
    if free < need_bytes:
        raise RootError(
            errno.ENOSPC, f"the benchmark needs {need_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", root
        )
    # Some file systems (btrfs) have no fixed number and say 0.
    if space.f_files and space.f_favail < need_files:
        raise RootError(
            errno.ENOSPC, f"the benchmark needs {need_files:,} inodes, {space.f_favail:,} are free", root
        )
    name = f"{_PREFIX}.{safe_hostname(socket.gethostname())}.{os.getpid()}.{secrets.token_hex(4)}"
    folder = os.path.join(os.path.abspath(root), name)
    try:
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:
            text = f"cannot be written to ({error.strerror}): give a folder on the same volume that can be"
            raise RootError(error.errno or 0, text, root) from error
        lock = _lock(folder)
        try:
            yield folder
        finally:
            if lock is not None:
                os.close(lock)
    except BaseException:
        remove_tree(folder)
        raise
    try:
        remove_tree(folder)
    except KeyboardInterrupt:
        # A million files take a minute to remove; what was measured is worth more than that they are gone.
        print(f"interrupted: the next benchmark there removes the rest of {folder}", file=sys.stderr)


def _lock(folder: str) -> int | None:
    """A descriptor that holds the folder's lock; None if another process does, or nobody can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def remove_leftovers(root: str) -> list[str]:
    """Remove workspaces of this host's dead processes (killed, or gone with the machine); return their names.

    Others are left alone: of other hosts nobody knows here, and pods that share the node's name do not see
    each other's processes, but the lock of a live one.
    """
    host = re.escape(safe_hostname(socket.gethostname()))
    ours = re.compile(rf"{re.escape(_PREFIX)}\.{host}\.([0-9]{{1,9}})\.[0-9a-f]{{8}}")
    removed = []
    for name in os.listdir(root):
        found = ours.fullmatch(name)
        if found is None or pid_is_alive(int(found[1])):
            continue
        folder = os.path.join(os.path.abspath(root), name)
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or no folder
            lock = _lock(folder)
            if lock is not None:
                remove_tree(folder)
                os.close(lock)
                removed.append(name)
    return removed


def remove_tree(folder: str) -> None:
    """Remove a folder, also one of millions of entries."""
    # Several times faster than shutil.rmtree, which is a minute for a million files.
    with contextlib.suppress(OSError):
        subprocess.run(["rm", "-rf", "--", folder], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def flush(folder: str) -> None:
    """Write out the folder's file system, so that no measurement pays for the writes of the one before."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def block_key(number: int) -> bytes:
    """A key (32-byte hash, group 0) that spreads over the folders as real ones do."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def part_of(folder: str) -> str:
    """The part folder that a benchmark's blocks lie in, as if its folder were a root."""
    return part_dir(folder, "bench_000000000000", 0)


def machine(root: str) -> dict[str, Any]:
    """What a figure means nothing without."""
    return {
        "py_kvcache": __version__,
        "python": platform.python_version(),
        "liburing": _version("liburing"),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "root": root,
        "file_system": filesystem_name(root),
        "command": " ".join(sys.argv),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
