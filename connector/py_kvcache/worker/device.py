"""Copies between staging slots and the memory that holds the KV cache.

A device copies pages in batches, asynchronously, and says through events when it is done. The CUDA device
is in cuda.py.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.hostmemory import address_of, host_memory
from py_kvcache.worker.pages import Chunk, Copies, PageMap, Region
from py_kvcache.worker.parts import Copier, DeviceEvent, SlotCopy


class Device(Copier, Protocol):
    """What a worker needs of a device. load and store are called by the reactor thread only."""

    def allocate(self, nbytes: int) -> memoryview:
        """Staging memory: one-dimensional uint8, aligned to 4,096 bytes, pinned where that matters."""

    def record(self) -> Any:
        """In vLLM's thread, at submission: an event behind all work launched so far, or None."""

    def close(self) -> None:
        """End copies and free the staging memory; may be called twice."""


class _Batch:
    """A batch of memory copies for the copy thread; also its own event."""

    __slots__ = ("_error", "_finished", "moves")

    def __init__(self, moves: list[tuple[int, int, int]]) -> None:
        self.moves = moves  # (destination, source, bytes)
        self._finished = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for destination, source, length in self.moves:
                # ctypes releases the GIL for the call, so neither vLLM nor the reactor waits for a copy.
                ctypes.memmove(destination, source, length)
        except (TypeError, ValueError, ctypes.ArgumentError) as error:
            self._error = error
        self._finished = True

    def done(self) -> bool:
        if self._error is not None:
            raise RuntimeError(f"copy failed: {self._error}")
        return self._finished

    def sums(self, number: int) -> None:
        return None


class CpuDevice:
    """KV cache in ordinary memory: one thread copies, so that the reactor never waits for memory.

    Compute on a CPU is synchronous within a step, so there is nothing to record: what was submitted
    in a step may be read or written at once.
    """

    poll_s: float | None = None

    def __init__(self, page_map: PageMap, on_copy_done: Callable[[], None]) -> None:
        self._map = page_map
        self._on_copy_done = on_copy_done
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="py-kvcache-copy", daemon=True)
        self._thread.start()

    def allocate(self, nbytes: int) -> memoryview:
        """See hostmemory: zeroed, so that a read past a short file never shows another process's bytes."""
        return host_memory(nbytes)

    def record(self) -> None:
        return None

    def adds_up(self, pages: Chunk) -> bool:
        return False

    def load(self, copies: Sequence[SlotCopy]) -> DeviceEvent:
        return self._launch(copies, to_device=True)

    def store(self, copies: Sequence[SlotCopy]) -> DeviceEvent:
        return self._launch(copies, to_device=False)

    def _launch(self, copies: Sequence[SlotCopy], to_device: bool) -> DeviceEvent:
        moves: list[tuple[int, int, int]] = []
        for buffer, pages, _after in copies:
            assert isinstance(pages, Chunk)
            entries: Copies = self._map.runs(pages.block_ids, pages.first)
            slots = entries.offsets + address_of(buffer)
            ends = (entries.addresses, slots) if to_device else (slots, entries.addresses)
            moves += zip(*(column.tolist() for column in (*ends, entries.lengths)), strict=True)
        batch = _Batch(moves)
        self._batches.put(batch)
        return batch

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.run()
            self._on_copy_done()

    def close(self) -> None:
        if self._thread.is_alive():
            self._batches.put(None)
            self._thread.join(timeout=10)


def regions_of(kv_caches: Any, group: int) -> list[Region]:
    """Layer references of one group of vLLM's CanonicalKVCaches as address ranges.

    Address of engine block b is ``data_ptr + b * stride(0)``; from 0.30 tensors may be strided, so
    the stride is not the page.
    """
    regions = []
    for ref in kv_caches.group_data_refs[group]:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        regions.append(
            Region(
                int(tensor.data_ptr()),
                int(tensor.stride(0)) * tensor.element_size(),
                int(ref.page_size_bytes),
            )
        )
    return regions


def make_device(
    kv_caches: Any, page_map: PageMap, on_copy_done: Callable[[], None], *, checksum: bool = True
) -> Device:
    """The device for the memory that the KV cache lives in; ``checksum``: whether sums are of use."""
    kinds = {tensor.tensor.device.type for tensor in kv_caches.tensors}
    if kinds == {"cpu"}:
        return CpuDevice(page_map, on_copy_done)
    devices = {tensor.tensor.device for tensor in kv_caches.tensors}
    if kinds == {"cuda"} and len(devices) == 1:
        # Imported here: it needs torch, which a CPU worker has no use for.
        from py_kvcache.worker.cuda import CudaDevice

        return CudaDevice(page_map, devices.pop(), checksum=checksum)
    names = ", ".join(sorted(map(str, devices)))
    raise KvCacheError(f"KV cache on {names} is not supported; it must be in CPU memory or on one NVIDIA GPU")


def as_bytes(memory: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A numpy view of staging memory, for tests that compare bytes."""
    return np.frombuffer(memory, np.uint8)
