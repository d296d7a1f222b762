"""The CUDA device: pinned staging, streams of its own, block copies by the copy engines.

The copy engines move scattered pages at the rate of the link and leave compute alone; kernels that read
pinned memory slow it by half (measured: docs/performance.md). One call of cuMemcpyBatchAsync takes all pages
of all slots of a pass. Blocks are added up for their checksums on the way (gpusums.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.cudriver import Access, Driver, DriverError
from py_kvcache.worker.hostmemory import address_of, host_memory
from py_kvcache.worker.pages import Chunk, Copies, Ints, PageMap

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.worker.gpusums import GpuSums
    from py_kvcache.worker.parts import SlotCopy

log = logging.getLogger("vllm.py_kvcache.worker")

_Places = Sequence["int | None"]  # of each block of a batch: where its sums go, if it is added up

_MEMLOCK_HINT = (
    "set staging_bytes or io_depth lower, or raise the memory limit of the container and the locked-memory "
    "limit (ulimit -l)"
)


class CopyEvent:
    """The end of one batch on its stream; see parts.DeviceEvent.

    Args:
        keep: the arrays of addresses, which the driver may read until then.
        places: for each block of the batch, the place of its sums; None where they are not added up.
    """

    __slots__ = ("_adder", "_event", "_keep", "_places")

    def __init__(
        self, event: torch.cuda.Event, keep: object, places: Sequence[int | None], adder: GpuSums | None
    ) -> None:
        self._event, self._keep, self._places, self._adder = event, keep, places, adder

    def done(self) -> bool:
        """Never blocks; RuntimeError with CUDA's words if the copy, or anything before it, failed."""
        return bool(self._event.query())

    def sums(self, number: int) -> BlockSums | None:
        """See parts.DeviceEvent."""
        place = self._places[number]
        return None if place is None or self._adder is None else self._adder.take(place)


class CudaDevice:
    """KV cache in GPU memory. See device.Device for the methods.

    Loads share one stream, so that a pass is one launch; each slot has a store stream of its own, so that one
    block's store waits for no other's. Neither is the compute stream: copies run beside the model's kernels.
    Loads are added up on a third one: a sum may have to wait for a kernel of the model's, the next copy not.
    """

    # Half of what a copy of 28 MiB takes. To be woken instead would need the interpreter twice for each copy.
    poll_s: float | None = 0.0005

    def __init__(self, page_map: PageMap, device: torch.device, *, checksum: bool = False) -> None:
        """Called in vLLM's thread, whose context the reactor thread then uses. Raises KvCacheError.

        ``checksum``: add blocks up while they are copied, if this GPU and these pages allow it.
        """
        self._map, self._device, self._checksum = page_map, device, checksum
        try:
            self._driver = Driver()
            with torch.cuda.device(device):
                torch.cuda.current_stream().query()  # makes the context, if nothing has yet
                self._context = self._driver.current_context()
        except DriverError as error:
            raise KvCacheError(f"copies to {device} cannot be set up: {error}") from error
        # Of high priority, for the sake of the sums: a kernel of vLLM's with many waves would keep them, and
        # the slot with them, for milliseconds.
        self._loads = torch.cuda.Stream(device, priority=-1)
        self._checks = torch.cuda.Stream(device, priority=-1)
        self._stores: dict[int, torch.cuda.Stream] = {}  # by the slot's address
        self._entered = threading.local()
        self._memory: memoryview | None = None
        self._adder: GpuSums | None = None

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
        if self._checksum:
            self._adder = _make_adder(self._map, nbytes // self._map.payload_bytes + 1, self._device)
        return memory

    def record(self) -> torch.cuda.Event:
        """An event behind all that vLLM has launched so far on its stream. vLLM's thread only."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def adds_up(self, pages: Chunk) -> bool:
        """Only whole blocks: of others a part lies in pages that this copy leaves alone."""
        return self._adder is not None and len(pages.block_ids) == self._map.blocks_per_chunk

    def load(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Slots to device, one launch."""
        return self._launch(copies, self._loads, to_device=True)

    def store(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Device to slots, on the stream of the first slot."""
        first = address_of(copies[0].buffer)
        stream = self._stores.get(first)
        if stream is None:
            stream = self._stores[first] = torch.cuda.Stream(self._device, priority=-1)
        return self._launch(copies, stream, to_device=False)

    def _launch(self, copies: Sequence[SlotCopy], stream: torch.cuda.Stream, *, to_device: bool) -> CopyEvent:
        self._enter()
        for after in {id(copy.after): copy.after for copy in copies if copy.after is not None}.values():
            self._driver.wait_event(stream.cuda_stream, after.cuda_event)
        pages = [self._entries(copy) for copy in copies]
        places = [self._place(copy) if self.adds_up(copy.pages) else None for copy in copies]
        steps = _Steps(self._driver, stream)
        groups = _groups(self._adder, copies, places)
        try:
            if to_device:
                # Questions go with the pages: behind them they would wait for the next block's copy.
                steps.copy_in([*pages, *(group.question() for group in groups)])
                if groups:
                    steps.go_on(self._checks)
                    steps.add_up(groups)
                    steps.copy_out([group.answer() for group in groups])
            else:
                if groups:
                    steps.copy_in([group.question() for group in groups])
                    steps.add_up(groups)
                steps.copy_out([*pages, *(group.answer() for group in groups)])
            event = steps.event()
        except Exception:
            # Some of the batch may be under way, and who gets an error takes slot and pages for free.
            _wait_for(stream, self._checks)
            raise
        return CopyEvent(event, steps.keep, places, self._adder)

    def _place(self, copy: SlotCopy) -> int:
        """A number that no other slot has: slots are no shorter than a payload."""
        assert self._memory is not None
        return (address_of(copy.buffer) - address_of(self._memory)) // self._map.payload_bytes

    def _entries(self, copy: SlotCopy) -> Copies:
        """Of one block: addresses on the device, addresses in staging memory, bytes."""
        buffer, pages, _ = copy
        assert isinstance(pages, Chunk)
        runs = self._map.runs(pages.block_ids, pages.first)
        return Copies(runs.addresses, runs.offsets + address_of(buffer), runs.lengths)

    def _enter(self) -> None:
        """The driver's calls go to the calling thread's context, and ours has none at first."""
        if not getattr(self._entered, "done", False):
            self._driver.enter(self._context)
            torch.cuda.set_device(self._device)  # Triton launches on torch's device
            self._entered.done = True

    def close(self) -> None:
        """Wait for copies, then unpin and free the staging memory; twice is once."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if not _wait_for(self._loads, self._checks, *self._stores.values()):
            _still_pinned.append(memory)
            return
        self._adder = None  # not before: its memory, too, is the streams' until then
        try:
            # Another thread may close than the one that built this.
            self._driver.enter(self._context)
            self._driver.unpin(address_of(memory))
        except DriverError as error:
            # The driver still has the pages: memory that is given back now could become somebody else's.
            _still_pinned.append(memory)
            log.warning("py-kvcache: staging memory could not be unpinned: %s", error)


class _Group(NamedTuple):
    """Blocks of a batch that are added up, as many as one question has room for."""

    adder: GpuSums
    places: list[int]
    block_ids: list[Ints]

    def question(self) -> Copies:
        return self.adder.asking(self.places, self.block_ids)

    def answer(self) -> Copies:
        return self.adder.answer(self.places)


def _groups(adder: GpuSums | None, copies: Sequence[SlotCopy], places: _Places) -> list[_Group]:
    if adder is None:
        return []
    slots = [place for place in places if place is not None]
    whole = [copy.pages.block_ids for copy, place in zip(copies, places, strict=True) if place is not None]
    most = adder.most_blocks
    return [_Group(adder, slots[n : n + most], whole[n : n + most]) for n in range(0, len(slots), most)]


def _wait_for(*streams: torch.cuda.Stream) -> bool:
    """For all of them. False if one cannot be waited for: the GPU has failed, and its context with it."""
    good = True
    for stream in streams:
        try:
            stream.synchronize()
        except RuntimeError as error:
            good = False
            log.warning("py-kvcache: the GPU's copies cannot be waited for: %s", error)
    return good


class _Steps:
    """The steps of one batch, one after the other, and the arrays that have to live until its end."""

    def __init__(self, driver: Driver, stream: torch.cuda.Stream) -> None:
        self._driver, self._stream = driver, stream
        self.keep: list[tuple[Ints, Ints, Ints]] = []

    def copy_in(self, parts: list[Copies]) -> None:
        """To the device. What is copied does not change until the end, so it may be read in any order."""
        there, here, lengths = _join(parts)
        self._copy(there, here, lengths, Access.ANY)

    def copy_out(self, parts: list[Copies]) -> None:
        """From the device, whose memory is only right behind what is on the stream."""
        there, here, lengths = _join(parts)
        self._copy(here, there, lengths, Access.STREAM)

    def add_up(self, groups: list[_Group]) -> None:
        with torch.cuda.stream(self._stream):
            for group in groups:
                group.adder.launch(group.places)

    def go_on(self, stream: torch.cuda.Stream) -> None:
        """Do what follows on another stream."""
        reached = self.event()  # a name of its own, or it would be destroyed before the driver has its handle
        self._driver.wait_event(stream.cuda_stream, reached.cuda_event)
        self._stream = stream

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _copy(self, targets: Ints, sources: Ints, lengths: Ints, access: Access) -> None:
        self.keep.append((targets, sources, lengths))
        self._driver.copy_batch(targets, sources, lengths, access, self._stream.cuda_stream)


def _join(parts: list[Copies]) -> tuple[Ints, Ints, Ints]:
    columns = zip(*((part.addresses, part.offsets, part.lengths) for part in parts), strict=True)
    there, here, lengths = (
        np.ascontiguousarray(column[0]) if len(column) == 1 else np.concatenate(column) for column in columns
    )
    return there, here, lengths


def _make_adder(page_map: PageMap, slots: int, device: torch.device) -> GpuSums | None:
    try:
        from py_kvcache.worker.gpusums import GpuSums

        GpuSums.prove(device)
        return GpuSums(page_map.regions, page_map.blocks_per_chunk, slots, device)
    except Exception as error:  # noqa: BLE001 - Triton raises whatever its compiler does
        log.warning(
            "py-kvcache: %s cannot check blocks, CPU threads do so instead, at about 15 GB/s: %s",
            device, error,
        )  # fmt: skip
        return None


_still_pinned: list[memoryview] = []
