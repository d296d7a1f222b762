"""The operating system's calls behind one injectable object, so that a test can fault each of them."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def _load_renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """glibc has the wrapper since 2.28, musl since 1.2.6; elsewhere None."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    typed: Callable[[int, bytes, int, bytes, int], int] = function
    return typed


_renameat2 = _load_renameat2()


def rename_noreplace(source: str, target: str) -> None:
    """Rename unless ``target`` exists, in one atomic step.

    Raises:
        FileExistsError: ``target`` exists.
        OSError: ENOSYS or EINVAL where kernel or file system cannot do it.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)


class FileOps:
    """Exactly Python's functions of the same names, as attributes: no frame between caller and kernel.

    A test replaces single attributes of an instance. Nothing here decides anything.
    """

    def __init__(self) -> None:
        self.open = os.open
        self.close = os.close
        self.pread = os.pread
        self.write = os.write
        self.fsync = os.fsync
        self.fstat = os.fstat
        self.fchmod = os.fchmod
        self.utime = os.utime
        self.fadvise = os.posix_fadvise
        self.stat = os.stat
        self.lstat = os.lstat
        self.access = os.access
        self.mkdir = os.mkdir
        self.chmod = os.chmod
        self.link = os.link
        self.rename = os.rename
        self.rename_noreplace = rename_noreplace
        self.unlink = os.unlink
        self.scandir = os.scandir
        self.statvfs = os.statvfs
