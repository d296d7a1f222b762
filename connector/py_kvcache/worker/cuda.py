"""The CUDA device: pinned staging, streams of its own, block copies by the copy engines.

The copy engines move scattered pages at the rate of the link and leave compute alone; kernels that read
pinned memory slow it by half (measured: docs/performance.md). One call of cuMemcpyBatchAsync takes all pages
of all slots of a pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.cudriver import Access, Driver, DriverError
from py_kvcache.worker.hostmemory import address_of, host_memory
from py_kvcache.worker.pages import Chunk, PageMap

if TYPE_CHECKING:
    from py_kvcache.worker.parts import SlotCopy

log = logging.getLogger("vllm.py_kvcache.worker")

_MEMLOCK_HINT = (
    "set staging_bytes or io_depth lower, or raise the memory limit of the container and the locked-memory "
    "limit (ulimit -l)"
)


class CopyEvent:
    """The end of one batch on its stream; see parts.DeviceEvent."""

    __slots__ = ("_event", "_keep")

    def __init__(self, event: torch.cuda.Event, keep: object) -> None:
        self._event, self._keep = event, keep  # the arrays of addresses, which the driver may read until then

    def done(self) -> bool:
        """Never blocks; RuntimeError with CUDA's words if the copy, or anything before it, failed."""
        return bool(self._event.query())


class CudaDevice:
    """KV cache in GPU memory. See device.Device for the methods.

    Loads share one stream, so that a pass is one launch; each slot has a store stream of its own, so that one
    block's store waits for no other's. Neither is the compute stream: copies run beside the model's kernels.
    """

    # Half of what a copy of 28 MiB takes. To be woken instead would need the interpreter twice for each copy.
    poll_s: float | None = 0.0005

    def __init__(self, page_map: PageMap, device: torch.device, driver: Driver | None = None) -> None:
        """Called in vLLM's thread, whose context the reactor thread then uses. Raises KvCacheError."""
        self._map, self._device = page_map, device
        try:
            self._driver = Driver() if driver is None else driver
            with torch.cuda.device(device):
                torch.cuda.current_stream().query()  # makes the context, if nothing has yet
                self._context = self._driver.current_context()
        except DriverError as error:
            raise KvCacheError(f"copies to {device} cannot be set up: {error}") from error
        self._loads = torch.cuda.Stream(device)
        self._stores: dict[int, torch.cuda.Stream] = {}  # by the slot's address
        self._entered = threading.local()
        self._memory: memoryview | None = None

    def allocate(self, nbytes: int) -> memoryview:
        """One registration of ``nbytes``. Raises KvCacheError beyond the memory or the locks to be had."""
        memory = host_memory(nbytes)
        try:
            self._driver.pin(address_of(memory), nbytes)
        except DriverError as error:
            raise KvCacheError(
                f"the {nbytes >> 20} MiB of staging memory cannot be pinned: {error}; {_MEMLOCK_HINT}"
            ) from error
        self._memory = memory
        return memory

    def record(self) -> torch.cuda.Event:
        """An event behind all that vLLM has launched so far on its stream. vLLM's thread only."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Slots to device, one launch."""
        return self._launch(copies, self._loads, to_device=True)

    def store(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Device to slots, on the stream of the first slot."""
        first = address_of(copies[0].buffer)
        stream = self._stores.get(first)
        if stream is None:
            stream = self._stores[first] = torch.cuda.Stream(self._device)
        return self._launch(copies, stream, to_device=False)

    def _launch(self, copies: Sequence[SlotCopy], stream: torch.cuda.Stream, *, to_device: bool) -> CopyEvent:
        self._enter()
        for after in {id(copy.after): copy.after for copy in copies if copy.after is not None}.values():
            stream.wait_event(after)
        there, here, lengths = self._entries(copies)
        ends = (there, here) if to_device else (here, there)
        # A slot is complete before its load is launched and untouched until the end, so that the driver may
        # read it in any order; device memory is only right behind the events just waited for.
        access = Access.ANY if to_device else Access.STREAM
        try:
            self._driver.copy_batch(*ends, lengths, access, stream.cuda_stream)
        except DriverError:
            # Some of the batch may be under way, and who gets an error takes slot and pages for free.
            stream.synchronize()
            raise
        event = torch.cuda.Event()
        event.record(stream)
        return CopyEvent(event, (*ends, lengths))

    def _entries(self, copies: Sequence[SlotCopy]) -> tuple[Any, Any, Any]:
        """Addresses on the device, addresses in staging memory, bytes: three arrays of 64-bit numbers."""
        parts = []
        for buffer, pages, _after in copies:
            assert isinstance(pages, Chunk)
            entries = self._map.runs(pages.block_ids, pages.first)
            parts.append((entries.addresses, entries.offsets + address_of(buffer), entries.lengths))
        if len(parts) == 1:
            columns = parts[0]
        else:
            columns = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        there, here, lengths = (np.ascontiguousarray(column) for column in columns)
        return there, here, lengths

    def _enter(self) -> None:
        """The driver's calls go to the calling thread's context, and ours has none at first."""
        if not getattr(self._entered, "done", False):
            self._driver.enter(self._context)
            self._entered.done = True

    def close(self) -> None:
        """Wait for copies, then unpin and free the staging memory; twice is once."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        for stream in (self._loads, *self._stores.values()):
            stream.synchronize()
        try:
            # Another thread may close than the one that built this.
            self._driver.enter(self._context)
            self._driver.unpin(address_of(memory))
        except DriverError as error:
            # The driver still has the pages: memory that is given back now could become somebody else's.
            _still_pinned.append(memory)
            log.warning("py-kvcache: staging memory could not be unpinned: %s", error)


_still_pinned: list[memoryview] = []
