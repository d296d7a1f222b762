"""What the file system under the root allows: tried for real, in a folder that is removed again."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from py_kvcache import layout
from py_kvcache.tools.checks import FULL, Check, Status
from py_kvcache.tools.mounts import Mount
from py_kvcache.tools.show import errno_text, human_age, human_bytes
from py_kvcache.tools.volume import volume_space
from py_kvcache.worker.fileops import rename_noreplace
from py_kvcache.worker.probe import DirectProbe

_SKEW_S = 5.0
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_OF_THE_KERNEL = frozenset(
    {
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "debugfs",
        "tracefs",
        "securityfs",
        "bpf",
        "mqueue",
    }
)


@contextmanager
def scratch_folder(root: str) -> Iterator[str]:
    """A folder in the root for trials, removed with what is directly in it. Raises OSError."""
    host = layout.safe_hostname(socket.gethostname())
    path = f"{root}/.py-kvcache-doctor.{host}.{os.getpid()}.{secrets.token_hex(4)}"
    layout.make_dir(path)
    try:
        yield path
    finally:
        with suppress(OSError):
            for name in os.listdir(path):
                os.unlink(f"{path}/{name}")
            os.rmdir(path)


def check_mount(mount: Mount | None) -> Iterator[Check]:
    """Type and options; advice for those that make a bad home for a cache."""
    if mount is None:
        yield Check("file system", Status.NOTE, "the mount of the root is not known: /proc does not tell")
        return
    kept = [o for o in mount.options if not o.startswith(("lowerdir", "upperdir", "workdir"))]
    text = f"{mount.fstype} from {mount.source}, mounted at {mount.point} ({','.join(kept)})"
    data = {
        "type": mount.fstype, "source": mount.source, "mount_point": mount.point,
        "options": list(mount.options), "network": mount.is_network,
    }  # fmt: skip
    status, remedy = Status.OK, ""
    if mount.fstype in _OF_THE_KERNEL:
        status, remedy = Status.PROBLEM, "the kernel's own, no place for files: give a folder of a volume"
    elif mount.fstype == "overlay":
        status = Status.NOTE
        remedy = "the container's own layer: lost with the container and shared with nobody; mount a volume"
    elif mount.fstype in IN_MEMORY:
        status = Status.NOTE
        remedy = "this is memory: lost at restart, and it counts against the pod's limit; fine for trials"
    yield Check("file system", status, text, remedy, data)
    if mount.is_nfs:
        yield check_nfs(mount)


def check_nfs(mount: Mount) -> Check:
    """A client that caches absent names for up to 60 s does not see what other nodes store."""
    lookup = mount.option("lookupcache")
    found = f"lookupcache={lookup or 'all (default)'}, {'noatime' if _noatime(mount) else 'atime kept'}"
    found += f", vers={mount.option('vers') or '?'}, {'soft' if mount.option('soft') is not None else 'hard'}"
    missing = []
    if lookup not in ("pos", "positive", "none"):
        missing.append("lookupcache=positive")
    if not _noatime(mount):
        missing.append("noatime")
    data = {"missing": missing, "lookupcache": lookup, "nconnect": mount.option("nconnect")}
    if missing:
        remedy = f"mount with {','.join(missing)} (mountOptions of the PersistentVolume or StorageClass)"
        if "lookupcache=positive" in missing:
            found += ": new blocks of other nodes stay unseen for up to 60 s"
        return Check("nfs options", Status.SLOW, found, remedy, data)
    return Check("nfs options", Status.OK, found, data=data)


def _noatime(mount: Mount) -> bool:
    return mount.option("noatime") is not None


def check_space(root: str, stop_at: float) -> Iterator[Check]:
    """Bytes and inodes (a block needs two) against the watermark at which stores stop."""
    space = volume_space(os.statvfs(root))
    free = space.usable_bytes - space.used_bytes
    used = space.used_bytes / max(1, space.usable_bytes)
    text = f"{human_bytes(free)} of {human_bytes(space.usable_bytes)} free, {used:.0%} used"
    data = {
        "usable_bytes": space.usable_bytes, "free_bytes": free, "used": round(used, 4),
        "store_stop_at": stop_at,
    }  # fmt: skip
    full = f": stores stop at {stop_at:.0%}, so nothing is stored now"
    if space.usable_bytes and used >= stop_at:
        remedy = "free space, run the garbage collector, or raise store_stop_at"
        yield Check("space", Status.PROBLEM, text + full, remedy, data)
    else:
        yield Check("space", Status.OK, f"{text}; stores stop at {stop_at:.0%}", data=data)
    if not space.usable_files:
        yield Check("inodes", Status.OK, "no fixed number", data={"total": 0})
        return
    left = space.usable_files - space.used_files
    text, inodes = f"{left:,} of {space.usable_files:,} free", {"total": space.usable_files, "free": left}
    if space.used_files >= stop_at * space.usable_files:
        remedy = (
            "a block needs two (file and folder): collect garbage, or make the file system with more inodes"
        )
        yield Check("inodes", Status.PROBLEM, text + full, remedy, inodes)
    else:
        yield Check("inodes", Status.OK, text, data=inodes)


def check_permissions(scratch: str, root: str, dir_mode: int) -> Check:
    """Would another replica's identity, or the garbage collector's, be able to work here?"""
    mask = os.umask(0)
    os.umask(mask)
    seen, made = os.stat(root), os.stat(scratch)
    mode = stat.S_IMODE(made.st_mode)
    data = {
        "uid": os.geteuid(), "gid": os.getegid(), "umask": f"{mask:04o}",
        "root_mode": f"{stat.S_IMODE(seen.st_mode):04o}",
        "root_uid": seen.st_uid, "root_gid": seen.st_gid, "folder_mode": f"{mode:04o}",
    }  # fmt: skip
    text = (
        f"uid {os.geteuid()} may write; root is {data['root_mode']} of {seen.st_uid}:{seen.st_gid}, "
        f"umask {mask:04o}, new folders get {mode:04o}"
    )
    if mode & dir_mode != dir_mode:
        remedy = (
            f"the file system does not keep mode {dir_mode:04o}: run all replicas and the garbage collector "
            "under one uid"
        )
        return Check("permissions", Status.NOTE, text, remedy, data)
    if not seen.st_mode & stat.S_ISGID and not seen.st_mode & stat.S_IWOTH and os.geteuid() != 0:
        remedy = f"only for pods with several uids: chmod g+ws {root}, and one fsGroup for all"
        return Check("permissions", Status.NOTE, text + "; no set-group-id bit on the root", remedy, data)
    return Check("permissions", Status.OK, text, data=data)


def check_publication(scratch: str) -> Iterator[Check]:
    """link and rename that refuse to replace, and who of them will be used. Raises OSError if full."""
    link = _tries_to_replace(scratch, "link", os.link)
    rename = _tries_to_replace(scratch, "rename", rename_noreplace)
    if link == 0:
        yield Check("link", Status.OK, "hard links work and refuse to replace: used to publish")
    elif rename == 0:
        text = f"no hard links ({_outcome(link)}): blocks are published by rename instead"
        yield Check("link", Status.NOTE, text, data={"errno": link})
    else:
        text = f"no hard links ({_outcome(link)}) and no rename that refuses to replace ({_outcome(rename)})"
        remedy = (
            "two writers of one block may replace each other's file: use another file system for shared roots"
        )
        yield Check("link", Status.PROBLEM, text, remedy, {"errno": link})
    if rename == 0:
        yield Check("rename", Status.OK, "RENAME_NOREPLACE works" + ("; not needed" if link == 0 else ""))
    else:
        status = Status.NOTE if link == 0 else Status.PROBLEM
        not_needed = "; not needed, links work" if link == 0 else ""
        yield Check(
            "rename", status, f"no RENAME_NOREPLACE ({_outcome(rename)}){not_needed}", data={"errno": rename}
        )


def _outcome(code: int) -> str:
    return "it replaced a file that was there" if code < 0 else errno_text(code)


def _tries_to_replace(scratch: str, name: str, publish: Callable[[str, str], None]) -> int:
    """0 if publishing works and does not replace, -1 if it replaces, else the errno."""
    source, final = f"{scratch}/{name}.tmp", f"{scratch}/{name}"
    try:
        for _ in range(2):
            fd = os.open(source, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            os.close(fd)
            publish(source, final)
    except FileExistsError:
        return 0
    except OSError as error:
        if error.errno in FULL:
            raise
        return error.errno or errno.EIO
    return -1


def check_times(scratch: str) -> Check:
    """mtime carries last use and chain order, so it must be settable; clocks are compared on the way."""
    path, now = f"{scratch}/time", time.time()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        made = os.fstat(fd).st_mtime
        skew = made - now
        data = {"skew_s": round(skew, 3)}
        try:
            os.utime(fd, (made - 5, made - 5))
            kept = abs(os.fstat(fd).st_mtime - (made - 5)) < 1
        except OSError as error:
            text = f"mtime cannot be set ({errno_text(error.errno or 0)})"
            return Check("times", Status.NOTE, text, "eviction then follows the time of writing alone", data)
    finally:
        os.close(fd)
    if not kept:
        text = "mtime that was set is not kept"
        return Check("times", Status.NOTE, text, "eviction then follows the time of writing alone", data)
    text = f"mtime can be set; the file system's clock is {human_age(skew)} from this host's"
    if abs(skew) > _SKEW_S:
        remedy = "harmless here (ages are taken by the file system's clock), but look at NTP"
        return Check("times", Status.NOTE, text, remedy, data)
    return Check("times", Status.OK, "mtime can be set; clocks agree", data=data)


def check_direct(probe: DirectProbe, scratch: str, root: str) -> Check:
    """Outcome of the trial with the alignment that is really used, told of the root, not of the folder."""
    reason = probe.reason.replace(scratch, root)
    data = {
        "ok": probe.ok, "direct": probe.direct, "errno": probe.errno, "alignment": layout.ALIGN,
        "filesystem": probe.filesystem,
    }  # fmt: skip
    if probe.ok and probe.direct:
        return Check(
            "direct I/O", Status.OK, f"O_DIRECT works at {layout.ALIGN:,} bytes alignment", data=data
        )
    if probe.ok:
        return Check("direct I/O", Status.NOTE, reason, "nothing to do: the data is in memory anyway", data)
    if probe.filesystem in IN_MEMORY:
        text = f"{probe.filesystem} is memory: O_DIRECT is not direct there, buffered I/O is used"
        return Check("direct I/O", Status.NOTE, text, "nothing to do: the data is in memory anyway", data)
    if probe.errno in FULL:
        text = f"cannot be tried, the volume is full ({errno_text(probe.errno)}): reads find out"
        return Check("direct I/O", Status.NOTE, text, data=data)
    if probe.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        text = f"cannot be tried without writing ({errno_text(probe.errno)}): reads find out"
        return Check("direct I/O", Status.NOTE, text, data=data)
    remedy = "buffered I/O is used; for direct I/O put the root on ext4, xfs, NFS or Lustre"
    return Check("direct I/O", Status.SLOW, reason, remedy, data)
