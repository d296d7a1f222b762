"""System calls that never wait, made without letting go of the interpreter.

Python's own functions release the GIL around every system call. While another thread of vLLM's computes
(hashing a long prompt, launching a model's kernels) it takes 5 ms to get it back, for a call of 0.3 us; and
the reactor makes several for each block.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.lseek.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
_libc.lseek.restype = ctypes.c_int64
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))


def signal_event(fd: int) -> None:
    """Add one to a non-blocking eventfd. Raises OSError; a counter that is full wakes its reader anyway."""
    _check(_libc.eventfd_write(fd, 1))


def clear_event(fd: int) -> None:
    """Set a non-blocking eventfd to zero. Raises OSError."""
    _check(_libc.eventfd_read(fd, ctypes.byref(ctypes.c_uint64())))


def set_file_flags(fd: int, flags: int) -> None:
    """F_SETFL on a seekable file. Neither call leaves the kernel's own memory, so neither can hang.

    Raises OSError with ESPIPE for a FIFO, on which the read would wait for ever.
    """
    if _libc.lseek(fd, 0, os.SEEK_CUR) < 0 or _libc.fcntl(fd, fcntl.F_SETFL, flags) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check(answer: int) -> None:
    code = ctypes.get_errno()
    if answer < 0 and code != errno.EAGAIN:
        raise OSError(code, os.strerror(code))
