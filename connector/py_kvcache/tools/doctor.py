"""`py-kvcache doctor ROOT`: what this file system, kernel and CPU allow, and what will be used."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from py_kvcache import layout
from py_kvcache.errors import ConfigError, RootError
from py_kvcache.tools import doctor_engine, doctor_fs, doctor_host, doctor_settings
from py_kvcache.tools.checks import FULL, Check, Status
from py_kvcache.tools.doctor_settings import Settings
from py_kvcache.tools.mounts import mount_of
from py_kvcache.tools.show import errno_text
from py_kvcache.worker.probe import DirectProbe, RingProbe, choose_direct, probe_direct, probe_ring

SCHEMA = "py-kvcache/doctor/1"


@dataclass
class DoctorReport:
    """Findings in the order of the checks, and what follows from them."""

    root: str
    settings: Settings
    checks: list[Check] = field(default_factory=list)
    ring: str = ""  # "io_uring" | "threads"
    io: str = ""  # "direct" | "buffered"
    mode: str = ""  # "loads and stores" | "loads only" | "nothing"
    publish: str = ""  # "link" | "rename" | ""
    is_full: bool = False  # no byte or file could be made, so what needs one is not tried

    @property
    def is_good(self) -> bool:
        """True for exit code 0: slower ways are good, problems are not."""
        return not any(c.status is Status.PROBLEM for c in self.checks)

    @property
    def faster(self) -> list[str]:
        """What to change for the faster way, one sentence each."""
        return [f"{c.name}: {c.remedy}" for c in self.checks if c.status is Status.SLOW and c.remedy]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "root": self.root,
            "good": self.is_good,
            "will_use": {"ring": self.ring, "io": self.io, "mode": self.mode, "publish": self.publish},
            "settings": {**self.settings._asdict(), "dir_mode": f"{self.settings.dir_mode:04o}"},
            "checks": [c.to_json() for c in self.checks],
            "faster": self.faster,
        }


def as_json(report: DoctorReport) -> str:
    """One object, for scripts."""
    return json.dumps(report.to_json(), indent=2)


def examine(
    root: str, config: Mapping[str, Any] | None = None, around: tuple[str, str] | None = None
) -> DoctorReport:
    """Run all checks. Leaves nothing behind. Raises RootError when the root cannot be used at all.

    Args:
        root: "" takes that of ``config``.
        config: a kv_connector_extra_config to check as vLLM's start would.
        around: what is wrong with the --kv-transfer-config around it, and the remedy.
    """
    if not root and config is not None:
        root = doctor_settings.root_of(config)
    if not root:
        raise ConfigError("ROOT is empty; give the folder of the cache, or set PY_KVCACHE_ROOT")
    if "\0" in root:
        raise RootError(errno.EINVAL, "not a path", root)
    given, root = root, os.path.abspath(root)
    settings, checks = doctor_settings.read(root, config)
    if around is not None:
        others = [check for check in checks if check.status is not Status.OK]
        checks = [Check("settings", Status.PROBLEM, *around), *others]
    report = DoctorReport(root, settings, checks)
    with _root_folder(root) as existed:
        report.checks.append(_root_check(root, given, existed))
        report.checks += doctor_fs.check_mount(mount_of(root))
        report.checks += doctor_fs.check_space(root, settings.store_stop_at)
        _examine_inside(report, root)
    return report


def _examine_inside(report: DoctorReport, root: str) -> None:
    try:
        with doctor_fs.scratch_folder(root) as scratch:
            report.checks.append(doctor_fs.check_permissions(scratch, root, report.settings.dir_mode))
            published = list(doctor_fs.check_publication(scratch))
            report.checks += published
            report.checks.append(doctor_fs.check_times(scratch))
            direct = probe_direct(scratch, layout.ALIGN)
            report.checks.append(doctor_fs.check_direct(direct, scratch, root))
            ring = probe_ring(scratch)
            report.publish = "rename" if published[0].status is not Status.OK else "link"
            if direct.errno in FULL:
                raise OSError(direct.errno, os.strerror(direct.errno))
    except OSError as error:
        report.checks.append(_cannot_write(root, error))
        report.is_full = error.errno in FULL
        report.mode = "loads only"
        report.publish = ""
        direct = probe_direct(root, layout.ALIGN)
        # The ring is the kernel's; where its trial lies matters little.
        with tempfile.TemporaryDirectory(dir=_where_there_is_space()) as elsewhere:
            ring = probe_ring(elsewhere)
    report.checks += doctor_host.host_checks(ring)
    report.checks += doctor_engine.engine_checks()
    _conclude(report, ring, direct)


def _conclude(report: DoctorReport, ring: RingProbe, direct: DirectProbe) -> None:
    wanted = report.settings
    report.ring = "io_uring" if ring.ok and wanted.ring != "threads" else "threads"
    try:
        is_direct, _ = choose_direct(wanted.direct_io, direct)
        # accepted there, but never direct, and that is known without a trial
        is_direct = is_direct and (direct.ok or direct.filesystem not in doctor_fs.IN_MEMORY)
    except ConfigError as error:
        is_direct = False
        report.checks.append(Check("settings", Status.PROBLEM, str(error), "see direct I/O above"))
    report.io = "direct" if is_direct else "buffered"
    report.mode = report.mode or "loads and stores"
    if wanted.ring == "io_uring" and not ring.ok:
        report.checks.append(
            Check("settings", Status.PROBLEM, "ring=io_uring is set, but io_uring does not work here",
                  "set ring to auto or threads, or see io_uring above")
        )  # fmt: skip


def _where_there_is_space() -> str | None:
    """A folder for the ring's trial: in memory if the usual one is on the full volume too."""
    usual = tempfile.gettempdir()
    space = os.statvfs(usual)
    return "/dev/shm" if not space.f_bavail and os.access("/dev/shm", os.W_OK) else usual


@contextmanager
def _root_folder(root: str) -> Iterator[bool]:
    """Yields whether the root exists; one that does not is made for the examination and removed again."""
    try:
        existed = not layout.make_dir(root)
    except FileNotFoundError:
        parent = os.path.dirname(root)
        raise RootError(
            errno.ENOENT,
            f"neither it nor its parent {parent} exists; mount the volume, or: mkdir -p {root}",
            root,
        ) from None
    except NotADirectoryError:
        raise RootError(
            errno.ENOTDIR, "a part of the path is not a folder; give another path", root
        ) from None
    except OSError as error:
        if not os.path.lexists(root):
            raise RootError(
                error.errno or 0,
                f"does not exist and uid {os.geteuid()} cannot make it ({os.strerror(error.errno or 0)}); "
                "make it as its owner, or mount the volume there",
                root,
            ) from None
        existed = True
    try:
        _must_be_usable(root)
        yield existed
    finally:
        if not existed:
            with suppress(OSError):
                os.rmdir(root)


def _must_be_usable(root: str) -> None:
    if not os.path.isdir(root):
        raise RootError(errno.ENOTDIR, "exists, but is not a folder; give another path", root)
    try:
        with os.scandir(root) as entries:
            next(entries, None)
    except OSError as error:
        text = (
            f"cannot be read as uid {os.geteuid()} ({os.strerror(error.errno or 0)}); run this under the "
            "identity of the vLLM container, or mount the volume again"
        )
        raise RootError(error.errno or 0, text, root) from None


def _root_check(root: str, given: str, existed: bool) -> Check:
    data = {"existed": existed, "symbolic_link": os.path.islink(root)}
    if not existed:
        return Check(
            "root",
            Status.NOTE,
            "does not exist; the parent does, so it will be made at start, on the parent's file system",
            "if a volume should be here: mount it first",
            data=data,
        )
    if os.path.islink(root):
        return Check("root", Status.OK, f"a symbolic link to {os.path.realpath(root)}", data=data)
    if not os.path.isabs(given):
        remedy = f'give vLLM the absolute path: "root": "{root}"'
        return Check("root", Status.NOTE, "exists; the path given here is a relative one", remedy, data)
    return Check("root", Status.OK, "exists", data=data)


def _cannot_write(root: str, error: OSError) -> Check:
    code = error.errno or 0
    data = {"errno": errno.errorcode.get(code, str(code)), "uid": os.geteuid()}
    if code == errno.EROFS:
        remedy = "fine for a replica that only reads; else mount it read-write (readOnly: false)"
        text = "mounted read-only: blocks are loaded, none stored"
        return Check("permissions", Status.NOTE, text, remedy, data)
    if code in FULL:
        text = f"the volume is full ({errno_text(code)}): blocks are loaded, none stored"
        remedy = "free space or inodes, or raise the quota; then run this again for what could not be tried"
        return Check("permissions", Status.PROBLEM, text, remedy, data)
    seen = os.stat(root)
    text = (
        f"uid {os.geteuid()} gid {os.getegid()} cannot write: {errno_text(code)}; root is "
        f"{seen.st_mode & 0o7777:04o} of {seen.st_uid}:{seen.st_gid}; blocks are loaded, none stored"
    )
    remedy = f"chgrp it to a group of the pods (fsGroup) and chmod 2775 {root}"
    return Check("permissions", Status.PROBLEM, text, remedy, data)
