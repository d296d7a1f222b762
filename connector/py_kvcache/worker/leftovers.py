"""A starting engine removes the temporary files of its predecessor: own host, dead process, own namespace.

All others are GC's to collect once they are old; a living writer's file lost costs that writer one store.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from py_kvcache.layout import (
    is_leaf_dir,
    is_top_dir,
    parse_namespace_dir,
    parse_temp_name,
    safe_hostname,
    temp_path,
)
from py_kvcache.worker.publication import INCARNATION, next_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from py_kvcache.worker.fileops import FileOps

log = logging.getLogger(f"vllm.{__name__}")

MAX_ENTRIES = 500_000
MAX_SECONDS = 60.0
# Pods with hostNetwork share the node's name and do not see each other's processes. A file that grows is
# alive whatever /proc says; a predecessor's is older than an engine's start takes.
MIN_AGE_S = 5.0


@dataclass
class Tidied:
    """``complete`` False: the walk ended at its limit, GC does the rest."""

    removed: int = 0
    failed: int = 0
    seen: int = 0
    complete: bool = True


def pid_is_alive(pid: int) -> bool:
    """True also for a process of another user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError as error:
        return error.errno != errno.ESRCH
    except OverflowError:
        return False
    return True


def remove_own_dead_temps(
    ops: FileOps,
    root: str,
    namespace: str,
    *,
    hostname: str | None = None,
    min_age_s: float = MIN_AGE_S,
    alive: Callable[[int], bool] = pid_is_alive,
    clock: Callable[[], float] = time.monotonic,
) -> Tidied:
    """Walk this namespace's parts, at most MAX_ENTRIES names and MAX_SECONDS. Never raises OSError.

    Blocks on I/O: meant for a background thread, a million folders take a minute on a local disk.
    """
    tidied, until = Tidied(), clock() + MAX_SECONDS
    own_host = safe_hostname(socket.gethostname() if hostname is None else hostname)
    for part in _parts(ops, root, namespace):
        now = _file_system_now(ops, part, own_host)
        if now is None:
            continue  # not writable: nothing could be removed either
        for folder in _leaves(ops, part):
            entries = _entries(ops, folder)
            tidied.seen += 1 + len(entries)
            if tidied.seen > MAX_ENTRIES or clock() > until:
                tidied.complete = False
                return tidied
            for entry in entries:
                temp = parse_temp_name(entry.name)
                if temp is None or temp.hostname != own_host or not _is_dead(temp.pid, temp.token, alive):
                    continue
                _remove(ops, entry.path, now - min_age_s, tidied)
    return tidied


def _is_dead(pid: int, token: str, alive: Callable[[int], bool]) -> bool:
    # In a container the predecessor often had our own pid.
    if pid == os.getpid():
        return not token.startswith(INCARNATION)
    return not alive(pid)


def _remove(ops: FileOps, path: str, older_than: float, tidied: Tidied) -> None:
    try:
        if ops.lstat(path).st_mtime > older_than:
            return
        ops.unlink(path)
        tidied.removed += 1
    except FileNotFoundError:
        return
    except OSError as error:
        tidied.failed += 1
        log.debug("removal of %s: %s", path, error)


def _parts(ops: FileOps, root: str, namespace: str) -> Iterator[str]:
    for entry in _entries(ops, root):
        parsed = parse_namespace_dir(entry.name)
        if parsed is not None and parsed.namespace == namespace and parsed.part is not None:
            yield entry.path


def _leaves(ops: FileOps, part: str) -> Iterator[str]:
    for top in _entries(ops, part):
        if is_top_dir(top.name):
            for leaf in _entries(ops, top.path):
                if is_leaf_dir(leaf.name):
                    yield leaf.path


def _entries(ops: FileOps, folder: str) -> list[os.DirEntry[str]]:
    """Empty where there is nothing to see: gone, a file, not readable."""
    try:
        with ops.scandir(folder) as found:
            return list(found)
    except OSError as error:
        log.debug("scan of %s: %s", folder, error)
        return []


def _file_system_now(ops: FileOps, folder: str, hostname: str) -> float | None:
    """The file system's clock, asked with an empty file; None if it cannot be made."""
    # A temporary like any other, so that GC knows it if we die here.
    name = temp_path(f"{folder}/{'0' * 16}.bin", hostname=hostname, pid=os.getpid(), token=next_token())
    try:
        fd = ops.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.debug("clock file in %s: %s", folder, error)
        return None
    try:
        return ops.fstat(fd).st_mtime
    except OSError as error:
        log.debug("clock file in %s: %s", folder, error)
        return None
    finally:
        with contextlib.suppress(OSError):
            ops.close(fd)
        with contextlib.suppress(OSError):  # GC's, then
            ops.unlink(name)
