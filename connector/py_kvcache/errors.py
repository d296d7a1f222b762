"""Errno to our errors: one exception family, and what each errno means for a cached block."""

from __future__ import annotations

import errno
import os
from enum import Enum


class KvCacheError(Exception):
    """Base of all errors raised on purpose by py-kvcache; its text is one sentence with the remedy."""


class ConfigError(KvCacheError, ValueError):
    """A setting is unknown, malformed or impossible here."""


class UnsupportedError(KvCacheError, ValueError):
    """A model or engine setting that the connector does not serve."""


class RootError(KvCacheError, OSError):
    """The cache root cannot be used at all; carries errno and path like OSError."""

    def __str__(self) -> str:
        text = os.strerror(self.errno) if self.errno else ""
        reason = self.args[1] if len(self.args) > 1 else text
        return f"{self.filename or ''}: {reason} [{errno.errorcode.get(self.errno or 0, self.errno)}]"


class Fault(Enum):
    """Why one block was not loaded or stored. The value is the label used in metrics and traces."""

    MISSING = "missing"  # ENOENT: evicted or never there
    WRONG_SIZE = "wrong_size"  # a complete read ended before the footer's end
    FOREIGN = "foreign"  # right size, but the trailing 4 KiB is no footer of ours: left alone
    WRONG_KEY = "wrong_key"  # our footer, another block's key or lengths
    CHECKSUM = "checksum"  # our footer, payload does not match its digest
    IO = "io"  # any errno of the file system: says nothing about the file
    TIMEOUT = "timeout"  # deadline passed; the kernel may still own the buffer
    CANCELLED = "cancelled"  # dropped by us: abort, flush, shutdown
    NO_SPACE = "no_space"  # ENOSPC, EDQUOT
    PAUSED = "paused"  # stores stopped at the volume's watermark or by a budget
    QUEUE_FULL = "queue_full"  # bounded store queue
    DEVICE = "device"  # the copy between slot and device failed
    ADAPTER = "adapter"  # other weights of the LoRA adapter than the block's, or none in memory


# Only these say that the bytes on disk are wrong; an errno never does (an NFS brown-out must not
# make every reader delete the shared cache).
PROOF_OF_DAMAGE = frozenset({Fault.WRONG_SIZE, Fault.WRONG_KEY, Fault.CHECKSUM})

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class BlockError(KvCacheError):
    """One block's failure: what kind, which errno (0 if none) and which path."""

    def __init__(self, fault: Fault, path: str, code: int = 0, detail: str = "") -> None:
        self.fault, self.path, self.code, self.detail = fault, path, code, detail
        name = f" [{errno.errorcode.get(code, code)}] {os.strerror(code)}" if code else ""
        super().__init__(f"{fault.value}: {path}{name}{': ' + detail if detail else ''}")

    @property
    def errno_name(self) -> str:
        """Symbolic errno such as ``EIO``, or ``none``; bounded, so usable as a metric label."""
        return errno.errorcode.get(self.code, "none") if self.code else "none"


def fault_of(code: int) -> Fault:
    """Map a positive errno from open, read or write of a block file to its fault."""
    if code == errno.ENOENT:
        return Fault.MISSING
    if code in _NO_SPACE:
        return Fault.NO_SPACE
    return Fault.IO
