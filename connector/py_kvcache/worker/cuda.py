"""The CUDA device: pinned staging, streams of its own, block copies by the copy engines.

The copy engines move memory at the rate of the link and leave compute alone; kernels that read pinned memory
slow it by half (measured: docs/performance.md). A whole block goes over the link in one piece, to or from a
buffer on the GPU beside vLLM's pages (gpublocks.py); what that cannot take goes page by page, in one call of
cuMemcpyBatchAsync.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from py_kvcache.errors import KvCacheError
from py_kvcache.worker.cudriver import Access, Batch, Driver, DriverError
from py_kvcache.worker.hostmemory import address_of, host_memory
from py_kvcache.worker.pages import Chunk, Copies, PageMap

if TYPE_CHECKING:
    from py_kvcache.digest import BlockSums
    from py_kvcache.worker.gpublocks import GpuBlocks
    from py_kvcache.worker.parts import SlotCopy

log = logging.getLogger("vllm.py_kvcache.worker")

_MEMLOCK_HINT = (
    "set memory_bytes, staging_bytes or io_depth lower, or raise the memory limit of the container and the "
    "locked-memory limit (ulimit -l)"
)


class CopyEvent:
    """The end of one batch on its streams; see parts.DeviceEvent.

    Args:
        events: one for each stream; with it, if it is a lane's, the lane and how many blocks go through it.
            Those that have happened go to ``spare``, to be used again.
        keep: what the driver may read until then.
        places: for each block of the batch, the place of its sums; None where they are not added up.
    """

    __slots__ = ("_blocks", "_events", "_keep", "_places", "_spare")

    def __init__(
        self,
        events: list[tuple[torch.cuda.Event, _Lane | None, int]],
        spare: list[torch.cuda.Event],
        keep: object,
        places: Sequence[int | None],
        blocks: GpuBlocks | None,
    ) -> None:
        self._events, self._spare, self._keep = events, spare, keep
        self._places, self._blocks = places, blocks

    def done(self) -> bool:
        """Never blocks; RuntimeError with CUDA's words if the copy, or anything before it, failed."""
        left = []
        for entry in self._events:
            event, lane, blocks = entry
            if not event.query():
                left.append(entry)
                continue
            self._spare.append(event)
            if lane is not None:
                lane.queued -= blocks
                lane.moved = time.monotonic()
        self._events = left
        return not left

    def sums(self, number: int) -> BlockSums | None:
        """See parts.DeviceEvent."""
        place = self._places[number]
        return None if place is None or self._blocks is None else self._blocks.take(place)


@dataclass(frozen=True, slots=True)
class _Trip:
    """What takes the block of one slot through one lane."""

    place: int
    incoming: Batch
    outgoing: Batch


@dataclass(slots=True)
class _Lane:
    """A buffer on the GPU and the stream on which blocks go through it, one behind the other."""

    buffer: int
    stream: torch.cuda.Stream
    queued: int = 0  # blocks that have not come through, as far as is known
    moved: float = 0.0  # when one last did
    after: torch.cuda.Event | None = None  # the last one that the stream was told to wait for
    trips: dict[int, _Trip] = field(default_factory=dict)  # by the slot's address


class CudaDevice:
    """KV cache in GPU memory. See device.Device for the methods.

    A whole block takes the lane of its direction that has the fewest: while one waits for a kernel of the
    model's, the link is another's. And the driver has only a few queues for each copy engine, which streams
    share: a copy of vLLM's that waits for the end of a forward stops the lanes on the same queue for as long
    (190 ms of a long prefill: measured), and were they to take turns, all of them. What goes page by page has
    one stream for loads and one for each slot's stores, so that one block's store waits for no other's. None
    is the compute stream: copies run beside the model.
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
        self._loads = self._stream()
        self._stores: dict[int, torch.cuda.Stream] = {}  # by the slot's address
        self._lanes: dict[bool, list[_Lane]] = {False: [], True: []}  # from pages: True
        self._spare: list[torch.cuda.Event] = []
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
        self._blocks = blocks = _make_blocks(self._map, slots, self._device, add=self._checksum)
        if blocks is not None:
            for gather, buffers in ((False, blocks.loads), (True, blocks.stores)):
                self._lanes[gather] = [_Lane(buffer, self._stream()) for buffer in buffers]
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
        """Slots to device."""
        return self._launch(copies, gather=False)

    def store(self, copies: Sequence[SlotCopy]) -> CopyEvent:
        """Device to slots."""
        return self._launch(copies, gather=True)

    def _launch(self, copies: Sequence[SlotCopy], *, gather: bool) -> CopyEvent:
        self._enter()
        parts: list[SlotCopy] = []
        places: list[int | None] = []
        used: dict[int, tuple[_Lane, int]] = {}
        keep: list[Batch] = []
        blocks = self._blocks
        try:
            for copy in copies:
                if blocks is None or not self._is_whole(copy.pages):
                    parts.append(copy)
                    places.append(None)
                    continue
                lane = min(self._lanes[gather], key=_turn)
                lane.queued += 1
                used[lane.buffer] = lane, used.get(lane.buffer, (lane, 0))[1] + 1
                place = self._move(blocks, lane, copy, gather=gather)
                places.append(place if blocks.add else None)
            events: list[tuple[torch.cuda.Event, _Lane | None, int]] = [
                (self._event(lane.stream), lane, count) for lane, count in used.values()
            ]
            if parts:
                events.append((self._event(self._move_parts(parts, keep, gather=gather)), None, 0))
        except Exception:
            # Some of the batch may be under way, and who gets an error takes slot and pages for free.
            _wait_for(*self._streams())
            for lane, count in used.values():
                lane.queued -= count
            raise
        return CopyEvent(events, self._spare, keep, places, blocks)

    def _move(self, blocks: GpuBlocks, lane: _Lane, copy: SlotCopy, *, gather: bool) -> int:
        """A whole block, queued on the lane's stream. Returns its place."""
        address, stream = address_of(copy.buffer), lane.stream
        trip = lane.trips.get(address)
        if trip is None:
            trip = lane.trips[address] = self._plan(blocks, lane.buffer, address, gather=gather)
        blocks.ask(trip.place, lane.buffer, copy.pages.block_ids)
        self._driver.copy(trip.incoming, stream.cuda_stream)
        # Only the pages are the last owner's: the buffer fills while it still uses them.
        if copy.after is not None and copy.after is not lane.after:
            self._driver.wait_event(stream.cuda_stream, copy.after.cuda_event)
            lane.after = copy.after
        blocks.launch(trip.place, stream, gather=gather)
        self._driver.copy(trip.outgoing, stream.cuda_stream)
        return trip.place

    def _plan(self, blocks: GpuBlocks, buffer: int, address: int, *, gather: bool) -> _Trip:
        assert self._memory is not None
        # A number that no other slot has: slots are no shorter than a payload.
        place = (address - address_of(self._memory)) // self._map.payload_bytes
        into = blocks.incoming(place, buffer, address, payload=not gather)
        out = blocks.outgoing(place, buffer, address, payload=gather)
        return _Trip(place, _copy_in(into), _copy_out(out))

    def _move_parts(self, parts: Sequence[SlotCopy], keep: list[Batch], *, gather: bool) -> torch.cuda.Stream:
        """Page by page, in one call."""
        stream = self._store_stream(address_of(parts[0].buffer)) if gather else self._loads
        for after in {id(part.after): part.after for part in parts if part.after is not None}.values():
            self._driver.wait_event(stream.cuda_stream, after.cuda_event)
        entries = _join([self._entries(part) for part in parts])
        keep.append(_copy_out(entries) if gather else _copy_in(entries))
        self._driver.copy(keep[-1], stream.cuda_stream)
        return stream

    def _stream(self) -> torch.cuda.Stream:
        # Of high priority, for the sake of the kernels: one of vLLM's with many waves would keep them, and
        # the slot with them, for milliseconds.
        return torch.cuda.Stream(self._device, priority=-1)

    def _store_stream(self, address: int) -> torch.cuda.Stream:
        stream = self._stores.get(address)
        if stream is None:
            stream = self._stores[address] = self._stream()
        return stream

    def _streams(self) -> list[torch.cuda.Stream]:
        lanes = [lane.stream for lanes in self._lanes.values() for lane in lanes]
        return [self._loads, *lanes, *self._stores.values()]

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(stream)
        return event

    def _is_whole(self, pages: Chunk) -> bool:
        return len(pages.block_ids) == self._map.blocks_per_chunk

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
        if not _wait_for(*self._streams()):
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


def _join(parts: Sequence[Copies]) -> Copies:
    columns = zip(*((part.addresses, part.offsets, part.lengths) for part in parts), strict=True)
    return Copies(*(np.concatenate(column) for column in columns))


def _copy_in(copies: Copies) -> Batch:
    """To the device. What is copied does not change until the end, so it may be read in any order."""
    return Batch(copies.addresses, copies.offsets, copies.lengths, Access.ANY)


def _copy_out(copies: Copies) -> Batch:
    """From the device, whose memory is only right behind what is on the stream."""
    return Batch(copies.offsets, copies.addresses, copies.lengths, Access.STREAM)


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


def _turn(lane: _Lane) -> tuple[int, float]:
    # Of equal ones the one that moved last: one that is stopped must not get its share.
    return lane.queued, -lane.moved


_still_pinned: list[memoryview] = []
