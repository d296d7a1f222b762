"""Iovecs made once per piece of memory, because each one that is made leaks.

liburing 2026.3.30's ``Iovec([memoryview])`` takes a buffer export that it never gives back: some 200 bytes
for each request, which a server that reads for weeks cannot afford, and the staging memory itself could not
be freed as long as the process lives. So the same address and length get the same Iovec, and it is made over
an alias of the memory that does not own it; what owns it is a view of ours, kept beside.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Pinned(NamedTuple):
    """An Iovec and the view that keeps its memory; both must outlive the request."""

    iovec: Any
    view: memoryview


class IovecCache:
    """Maps (address, bytes) to its Iovec. An entry holds its memory, so an address cannot change hands.

    ``limit`` bounds the entries: slots, those of the memory tier too, times the lengths in use (whole reads,
    rests of short ones).
    """

    def __init__(self, make: Callable[[list[memoryview]], Any], limit: int = 1 << 16) -> None:
        self._make = make
        self._limit = limit
        self._entries: dict[tuple[int, int], Pinned] = {}

    def get(self, buffer: memoryview, in_flight: Iterable[object]) -> Pinned:
        """The Iovec for a writable, contiguous buffer. ``in_flight`` are entries that may not be dropped."""
        # from_buffer is what says the address; it refuses read-only memory, which no slot is.
        key = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= self._limit:
                self.drop(in_flight)
            address, size = key
            alias = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            found = self._entries[key] = Pinned(self._make([alias]), buffer[:])
        return found

    def drop(self, in_flight: Iterable[object]) -> None:
        """Forget and release every entry that is not in flight."""
        busy = {id(entry) for entry in in_flight}
        for key, entry in list(self._entries.items()):
            if id(entry) not in busy:
                del self._entries[key]
                entry.view.release()
