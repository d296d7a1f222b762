"""Walk a root in constant memory, without following a symbolic link or leaving the root.

Each folder is opened relative to its parent's descriptor with O_NOFOLLOW: a folder that is swapped for a
link while we walk gives an error entry, not a walk through somebody's home. Shared by inspect and verify.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from py_kvcache import layout
from py_kvcache.errors import ConfigError, RootError
from py_kvcache.tools.show import counted

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WHAT = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
_VANISHED = (errno.ENOENT, errno.ESTALE)


class Kind(Enum):
    """What an entry of the tree is."""

    BLOCK = "block"  # a regular file under a block's name
    TEMPORARY = "temporary"
    CONFIG = "config"
    NAMESPACE = "namespace"  # a folder directly under the root; comes before all that is in it
    FOLDER = "folder"  # a leaf folder after its files; size is the number of entries in it
    UNKNOWN = "unknown"  # not ours, or not a regular file; folders of this kind are not entered
    ERROR = "error"  # a folder or entry that could not be read; code is the errno


@dataclass(frozen=True)
class Entry:
    """One finding; path is relative to the root, mtime in seconds, size and allocated in bytes."""

    kind: Kind
    path: str
    namespace: layout.NamespaceDir | None = None
    block: layout.ParsedBlock | None = None  # also set when something else lies under a block's name
    size: int = 0
    allocated: int = 0
    mtime: float = 0.0
    what: str = ""
    code: int = 0


class Clock(NamedTuple):
    """Now, by the file system's clock where a probe file could be made, else by this host's."""

    now: float
    source: str  # "file system" | "this host"


Want = Callable[[layout.NamespaceDir], bool]


@contextmanager
def opened_root(root: str) -> Iterator[int]:
    """Descriptor of the root. Raises RootError, whose text has the remedy."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None) or errno.EINVAL
        remedy = {
            errno.ENOENT: "no such folder; check the path or the mount (py-kvcache doctor says more)",
            errno.ENOTDIR: "not a folder; give the folder that the connector has as its root",
            errno.EACCES: f"uid {os.geteuid()} may not read it; run this as the vLLM container's user",
            errno.ESTALE: "stale NFS handle; mount the volume again",
            errno.EINVAL: "not a path",
        }.get(code, os.strerror(code))
        raise RootError(code, remedy, root) from None
    try:
        yield fd
    finally:
        os.close(fd)


def file_system_clock(root_fd: int) -> Clock:
    """Ages must not depend on how well this host's clock agrees with a file server's."""
    here = f"/proc/self/fd/{root_fd}"
    with suppress(OSError):
        # a file without a name leaves nothing behind, even when we are killed here
        fd = os.open(here, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            return Clock(os.fstat(fd).st_mtime, "file system")
        finally:
            os.close(fd)
    name = f".clock.{layout.safe_hostname(socket.gethostname())}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    with suppress(OSError):
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
        try:
            return Clock(os.fstat(fd).st_mtime, "file system")
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=root_fd)
    return Clock(time.time(), "this host")


def open_parent(root_fd: int, path: str) -> int:
    """Descriptor of the folder that holds the entry, reached without any link. Raises OSError."""
    fd = os.dup(root_fd)
    try:
        for name in path.split("/")[:-1]:
            below = os.open(name, _DIR_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def wrong_root(root_fd: int, root: str) -> str:
    """A sentence if this looks like somebody else's folder, else "". Raises RootError for a part of a cache.

    Hidden entries (trials of our own tools, snapshots) and lost+found are in many a volume's fresh root.
    """
    with os.scandir(root_fd) as entries:
        names = [entry.name for entry in entries]
    if any(layout.parse_namespace_dir(name) for name in names):
        return ""
    path = os.path.realpath(root)
    if names and layout.parse_namespace_dir(os.path.basename(path)):
        parent = os.path.dirname(path)
        raise RootError(errno.EINVAL, f"this is a namespace of the cache; give its parent {parent}", root)
    others = sum(not name.startswith(".") and name != "lost+found" for name in names)
    if not others:
        return ""
    entries_text = counted(others, "other entry", "other entries")
    return f"no namespace of py-kvcache here, but {entries_text}: is this the cache's root?"


def want_namespaces(root_fd: int, pattern: str) -> Want:
    """A filter from ``--namespace``: name, digest or shell pattern. Raises ConfigError if none matches."""

    def want(found: layout.NamespaceDir) -> bool:
        if not pattern or found.digest == pattern:
            return True
        return fnmatch.fnmatchcase(found.namespace, pattern) or fnmatch.fnmatchcase(found.model, pattern)

    with os.scandir(root_fd) as entries:
        parsed = [p for e in entries if (p := layout.parse_namespace_dir(e.name)) is not None]
    if pattern and not any(want(p) for p in parsed):
        names = sorted({p.namespace for p in parsed})[:10]
        raise ConfigError(
            f"no namespace matches {pattern!r}; there are: {', '.join(names)}"
            if names
            else f"no namespace matches {pattern!r}: the root has none"
        )
    return want


def scan(root_fd: int, want: Want = lambda _: True) -> Iterator[Entry]:
    """All entries below the root, namespaces in order of their names. Raises OSError for the root alone."""
    namespaces = []
    with os.scandir(root_fd) as entries:
        for entry in entries:
            parsed = layout.parse_namespace_dir(entry.name)
            if parsed is not None and entry.is_dir(follow_symlinks=False):
                namespaces.append((parsed.namespace, -1 if parsed.part is None else parsed.part, entry.name))
            else:
                yield from _other(entry, entry.name, None)
    for _, _, name in sorted(namespaces):
        found = layout.parse_namespace_dir(name)
        if found is not None and want(found):
            yield Entry(Kind.NAMESPACE, name, found)
            yield from _walk(root_fd, name, name, found, 0)


def _walk(parent_fd: int, name: str, path: str, found: layout.NamespaceDir, depth: int) -> Iterator[Entry]:
    """One folder; depth 0 is the part (or the namespace's config folder), 2 a leaf."""
    try:
        fd = os.open(name, _DIR_FLAGS, dir_fd=parent_fd)
    except OSError as error:
        if error.errno not in _VANISHED:
            yield Entry(Kind.ERROR, path, found, code=error.errno or 0)
        return
    count = 0
    is_ours = (layout.is_top_dir, layout.is_leaf_dir, None)[depth] if found.part is not None else None
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                count += 1
                below = f"{path}/{entry.name}"
                if is_ours and is_ours(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield from _walk(fd, entry.name, below, found, depth + 1)
                else:
                    yield from _other(entry, below, found)
    except OSError as error:
        yield Entry(Kind.ERROR, path, found, code=error.errno or 0)
    finally:
        os.close(fd)
    if is_ours is None and found.part is not None:
        yield Entry(Kind.FOLDER, path, found, size=count)


def _other(entry: os.DirEntry[str], path: str, found: layout.NamespaceDir | None) -> Iterator[Entry]:
    """Anything but a folder of ours."""
    try:
        seen = entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno not in _VANISHED:
            yield Entry(Kind.ERROR, path, found, code=error.errno or 0)
        return
    block = layout.parse_block_path(path) if found is not None else None
    kind = Kind.UNKNOWN
    if stat.S_ISREG(seen.st_mode) and found is not None:
        if block is not None:
            kind = Kind.BLOCK
        elif layout.parse_temp_name(entry.name) is not None:
            kind = Kind.TEMPORARY
        elif found.part is None and path == f"{found.namespace}/{layout.CONFIG_NAME}":
            kind = Kind.CONFIG
    what = _WHAT.get(stat.S_IFMT(seen.st_mode), "other")
    yield Entry(kind, path, found, block, seen.st_size, seen.st_blocks * 512, seen.st_mtime, what)
