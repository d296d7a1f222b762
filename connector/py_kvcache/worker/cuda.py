"""The CUDA device: pinned staging, streams of its own, block copies by the copy engines.

The copy engines move memory at the rate of the link and leave compute alone; kernels that read pinned memory
slow it by half (measured: docs/performance.md). A whole block goes over the link in one piece, to or from a
buffer on the GPU beside vLLM's pages (gpublocks.py); what that cannot take goes page by page, in one call of
cuMemcpyBatchAsync.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.cudriver import Access, Driver, DriverError
from py_kvcache.worker.hostmemory import address_of, host_memory
from py_kvcache.worker.pages import Chunk, Copies, Ints, PageMap

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.worker.gpublocks import GpuBlocks, Lane
    from py_kvcache.worker.parts import SlotCopy

log = logging.getLogger("vllm.py_kvcache.worker")

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

    __slots__ = ("_blocks", "_event", "_keep", "_places")

    def __init__(
        self, event: torch.cuda.Event, keep: object, places: Sequence[int | None], blocks: GpuBlocks | None
    ) -> None:
        self._event, self._keep, self._places, self._blocks = event, keep, places, blocks

    def done(self) -> bool:
        """Never blocks; RuntimeError with CUDA's words if the copy, or anything before it, failed."""
        return bool(self._event.query())

    def sums(self, number: int) -> BlockSums | None:
        """See parts.DeviceEvent."""
        place = self._places[number]
        return None if place is None or self._blocks is None else self._blocks.take(place)


class CudaDevice:
    """KV cache in GPU memory. See device.Device for the methods.

    Loads share one stream for the link and one for the kernel that spreads them over the pages: that may have
    to wait for a kernel of the model's, the next copy not. Each slot has a store stream of its own, so that
    one block's store waits for no other's. None is the compute stream: copies run beside the model's kernels.
    """

    # Half of what a copy of 28 MiB takes. To be woken instead would need the interpreter twice for each copy.
    poll_s: float | None = 0.0005

    def __init__(self, page_map: PageMap, device: torch.device, *, checksum: bool = False) -> None:
        """Called in vLLM's thread, whose context the reactor thread then uses. Raises KvCacheError.

        ``checksum``: add whole blocks up while they are copied, if this GPU and these pages allow it.
        """
        self._map, self._device, self._checksum = page_map, device, checksum
        try:
            self._driver = Driver()
            with torch.cuda.device(device):
                torch.cuda.current_stream().query()  # makes the context, if nothing has yet
                self._context = self._driver.current_context()
        except DriverError as error:
            raise KvCacheError(f"copies to {device} cannot be set up: {error}") from error
        # Of high priority, for the sake of the kernels: one of vLLM's with many waves would keep them, and
        # the slot with them, for milliseconds.
        self._loads, self._moves, self._answers = (torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self._stores: dict[int, torch.cuda.Stream] = {}  # by the slot's address
        self._entered = threading.local()
        self._memory: memoryview | None = None
        self._blocks: GpuBlocks | None = None

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
        slots = nbytes // self._map.payload_bytes + 1
        self._blocks = _make_blocks(self._map, slots, self._device, add=self._checksum)
        return memory

    def record(self) -> torch.cuda.Event:
        """An event behind all that vLLM has launched so far on its stream. vLLM's thread only."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def adds_up(self, pages: Chunk) -> bool:
        """Only whole blocks: of others a part lies in pages that this copy leaves alone."""
        return self._blocks is not None and self._blocks.add and self._is_whole(pages)

    def load(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Slots to device, one launch."""
        return self._launch(copies, self._loads, self._load)

    def store(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Device to slots, on the stream of the first slot."""
        first = address_of(copies[0].buffer)
        stream = self._stores.get(first)
        if stream is None:
            stream = self._stores[first] = torch.cuda.Stream(self._device, priority=-1)
        return self._launch(copies, stream, self._store)

    def _launch(self, copies: Sequence[SlotCopy], stream: torch.cuda.Stream, way: _Way) -> CopyEvent:
        self._enter()
        steps = _Steps(self._driver)
        try:
            event = way(steps, copies, stream)
        except Exception:
            # Some of the batch may be under way, and who gets an error takes slot and pages for free.
            _wait_for(stream, self._moves, self._answers)
            raise
        places = [self._place(copy) if self.adds_up(copy.pages) else None for copy in copies]
        return CopyEvent(event, steps.keep, places, self._blocks)

    def _load(self, steps: _Steps, copies: Sequence[SlotCopy], link: torch.cuda.Stream) -> torch.cuda.Event:
        parts, whole = self._split(copies)
        if parts:
            steps.wait(link, _owners(parts))
            steps.copy_in(link, [self._entries(copy) for copy in parts])
        if self._blocks is None or not whole:
            return steps.event(link)
        ends = [
            self._spread(steps, self._blocks, group, link) for group in _groups(whole, self._blocks.loads)
        ]
        return ends[-1]

    def _spread(
        self, steps: _Steps, blocks: GpuBlocks, group: Sequence[SlotCopy], link: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """Whole blocks to their pages, behind what is on the link already. Returns the end of it all."""
        places, (buffers, free) = [self._place(copy) for copy in group], blocks.loads.take(len(group))
        steps.wait(link, free)
        question = _question(blocks, group, places, buffers)
        steps.copy_in(link, [_payloads(blocks, group, buffers), question])
        # Only the pages are the last owner's: buffers fill while it still uses them.
        steps.wait(self._moves, [steps.event(link), *_owners(group)])
        steps.move(self._moves, blocks, places, gather=False)
        moved = steps.event(self._moves)
        blocks.loads.busy(buffers, moved)
        if not blocks.add:
            return moved
        # On a stream of their own: behind a store's copy they would keep the next block's kernel.
        steps.wait(self._answers, [moved])
        steps.copy_out(self._answers, [blocks.answer(places)])
        return steps.event(self._answers)

    def _store(self, steps: _Steps, copies: Sequence[SlotCopy], link: torch.cuda.Stream) -> torch.cuda.Event:
        parts, whole = self._split(copies)
        steps.wait(link, _owners(copies))
        if parts:
            steps.copy_out(link, [self._entries(copy) for copy in parts])
        if self._blocks is None:
            return steps.event(link)
        blocks, lane = self._blocks, self._blocks.stores
        for group in _groups(whole, lane):
            places, (buffers, free) = [self._place(copy) for copy in group], lane.take(len(group))
            steps.wait(link, free)
            steps.copy_in(link, [_question(blocks, group, places, buffers)])
            steps.move(link, blocks, places, gather=True)
            steps.copy_out(link, [_payloads(blocks, group, buffers), blocks.answer(places)])
            lane.busy(buffers, steps.event(link))
        return steps.event(link)

    def _split(self, copies: Sequence[SlotCopy]) -> tuple[list[SlotCopy], list[SlotCopy]]:
        """Those that go page by page, and whole blocks where there are buffers for them."""
        if self._blocks is None:
            return list(copies), []
        parts = [copy for copy in copies if not self._is_whole(copy.pages)]
        return parts, [copy for copy in copies if self._is_whole(copy.pages)]

    def _is_whole(self, pages: Chunk) -> bool:
        return len(pages.block_ids) == self._map.blocks_per_chunk

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
        if not _wait_for(self._loads, self._moves, self._answers, *self._stores.values()):
            _still_pinned.append(memory)
            return
        self._blocks = None  # not before: its memory, too, is the streams' until then
        try:
            # Another thread may close than the one that built this.
            self._driver.enter(self._context)
            self._driver.unpin(address_of(memory))
        except DriverError as error:
            # The driver still has the pages: memory that is given back now could become somebody else's.
            _still_pinned.append(memory)
            log.warning("py-kvcache: staging memory could not be unpinned: %s", error)


def _groups(copies: Sequence[SlotCopy], lane: Lane) -> list[Sequence[SlotCopy]]:
    return [copies[n : n + lane.most] for n in range(0, len(copies), lane.most)]


def _owners(copies: Sequence[SlotCopy]) -> list[torch.cuda.Event]:
    """The events behind which the pages are free to be read or written; each once."""
    return list({id(copy.after): copy.after for copy in copies if copy.after is not None}.values())


def _payloads(blocks: GpuBlocks, group: Sequence[SlotCopy], buffers: Sequence[int]) -> Copies:
    return blocks.payloads(buffers, [address_of(copy.buffer) for copy in group])


def _question(
    blocks: GpuBlocks, group: Sequence[SlotCopy], places: Sequence[int], buffers: Sequence[int]
) -> Copies:
    return blocks.asking(places, buffers, [copy.pages.block_ids for copy in group])


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
    """Queues what a launch takes on streams, and keeps the arrays that have to live until its end."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.keep: list[tuple[Ints, Ints, Ints]] = []

    def wait(self, stream: torch.cuda.Stream, events: Iterable[torch.cuda.Event]) -> None:
        for event in events:
            self._driver.wait_event(stream.cuda_stream, event.cuda_event)

    def copy_in(self, stream: torch.cuda.Stream, parts: list[Copies]) -> None:
        """To the device. What is copied does not change until the end, so it may be read in any order."""
        there, here, lengths = _join(parts)
        self._copy(there, here, lengths, Access.ANY, stream)

    def copy_out(self, stream: torch.cuda.Stream, parts: list[Copies]) -> None:
        """From the device, whose memory is only right behind what is on the stream."""
        there, here, lengths = _join(parts)
        self._copy(here, there, lengths, Access.STREAM, stream)

    def move(
        self, stream: torch.cuda.Stream, blocks: GpuBlocks, places: Sequence[int], *, gather: bool
    ) -> None:
        with torch.cuda.stream(stream):
            blocks.launch(places, gather=gather)

    def event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _copy(
        self, targets: Ints, sources: Ints, lengths: Ints, access: Access, stream: torch.cuda.Stream
    ) -> None:
        self.keep.append((targets, sources, lengths))
        self._driver.copy_batch(targets, sources, lengths, access, stream.cuda_stream)


_Way = Callable[[_Steps, Sequence["SlotCopy"], Any], Any]


def _join(parts: list[Copies]) -> tuple[Ints, Ints, Ints]:
    columns = zip(*((part.addresses, part.offsets, part.lengths) for part in parts), strict=True)
    there, here, lengths = (
        np.ascontiguousarray(column[0]) if len(column) == 1 else np.concatenate(column) for column in columns
    )
    return there, here, lengths


def _make_blocks(page_map: PageMap, slots: int, device: torch.device, *, add: bool) -> GpuBlocks | None:
    try:
        from py_kvcache.worker.gpublocks import GpuBlocks

        GpuBlocks.prove(device, add=add)
        return GpuBlocks(page_map.regions, page_map.blocks_per_chunk, slots, device, add=add)
    except Exception as error:  # noqa: BLE001 - Triton raises whatever its compiler does
        log.warning(
            "py-kvcache: blocks go to and from %s page by page%s: %s",
            device, ", CPU threads check them, at about 15 GB/s" if add else "", error,
        )  # fmt: skip
        return None


_still_pinned: list[memoryview] = []
