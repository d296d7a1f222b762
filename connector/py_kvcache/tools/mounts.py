"""Which mount a path lies on, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_ESCAPE = re.compile(r"\\([0-7]{3})")
_FIELDS_BEFORE = 6  # mount id, parent, major:minor, root, mount point, options; then optional fields, "-"
NFS = frozenset({"nfs", "nfs4"})
NETWORK = NFS | {"ceph", "lustre", "gpfs", "cifs", "smb3", "9p", "beegfs", "glusterfs", "afs", "virtiofs"}


@dataclass(frozen=True)
class Mount:
    """One line; options of the mount and of the file system joined, in order."""

    point: str
    fstype: str
    source: str
    device: str  # major:minor
    options: tuple[str, ...]

    @property
    def is_nfs(self) -> bool:
        return self.fstype in NFS

    @property
    def is_network(self) -> bool:
        return self.fstype in NETWORK or self.fstype.startswith("fuse.")

    def option(self, name: str) -> str | None:
        """Value of ``name=value``, "" for a bare ``name``, None if absent. The last one counts."""
        for option in reversed(self.options):
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


def parse_mountinfo(text: str) -> list[Mount]:
    """All mounts, in order of mounting; lines that are not understood are left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < _FIELDS_BEFORE or len(right) < 2:
            continue
        options = left[5].split(",") + (right[2].split(",") if len(right) > 2 else [])
        if "ro" in options:  # the file system and each of its mounts have a say
            options = [option for option in options if option != "rw"]
        mounts.append(
            Mount(_plain(left[4]), right[0], _plain(right[1]), left[2], tuple(dict.fromkeys(options)))
        )
    return mounts


def find_mount(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that an absolute path without links lies on: the deepest, and of equals the last mounted."""
    best = None
    for mount in mounts:
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_of(path: str) -> Mount | None:
    """find_mount() for a path of this process; None where /proc does not tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return find_mount(os.path.realpath(path), parse_mountinfo(file.read()))
    except OSError:
        return None


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
