"""Staging memory of the host, on huge pages where the kernel has them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from py_kvcache.errors import KvCacheError

# Direct I/O pins the pages of each request, and the kernel copies or describes them one by one: on pages of
# 2 MiB a read costs a tenth of the CPU time (see docs/tuning.md), and a GPU registers them faster too.
HUGE_PAGE = 2 << 20


def host_memory(nbytes: int) -> memoryview:
    """Zeroed private memory, 1-D uint8 of ``nbytes``, aligned to 2 MiB; freed with its last view.

    Huge pages are asked for, not required: a kernel without them gives ordinary pages.

    Raises:
        KvCacheError: there is not that much memory.
    """
    try:
        # Private: the pages of a shared mapping are a tmpfs file's, for which huge pages are mostly off.
        area = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (
        OSError,
        OverflowError,
        ValueError,
    ) as error:  # beyond what a C size holds, too
        raise KvCacheError(
            f"no {nbytes >> 20} MiB for staging: {error}; set memory_bytes, staging_bytes or io_depth lower"
        ) from error
    # EINVAL from a kernel that was built without them: what we have is right then, only slower.
    with suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    shift = -address_of(memoryview(area)) % HUGE_PAGE
    return memoryview(area)[shift : shift + nbytes]


def address_of(buffer: memoryview) -> int:
    """Of the first byte of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
