"""Whole blocks on the GPU: one piece of memory there, as their file has them, to and from vLLM's pages.

Over the link a block goes as one copy, which costs the CPU 60 us; page by page it would be 300 us of the
reactor's thread. A kernel spreads or gathers the pages at 4 TB/s, and on the way adds them up for the
checksum (digest.BlockSums): CPU threads would take three cores for that at 30 GB/s, and the interpreter a
dozen times a block, which vLLM's threads want too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from py_kvcache.digest import WORDS, BlockSums, sums_of
from py_kvcache.layout import ALIGN
from py_kvcache.worker.pages import Copies, Ints, Region

_ROWS = 16  # moved by one program: 64 KiB, enough memory accesses in flight to be limited by memory only

# GPU memory beside vLLM's, which counts on none: as little as keeps the link busy while kernels have to wait.
_LOAD_BYTES, _MOST_LOADS = 128 << 20, 16
_STORE_BYTES, _MOST_STORES = 128 << 20, 8


# One compiled form for all models and batches: to compile another later would keep the reactor for seconds.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["per_chunk", "words_of_block", "words_of_sums", "rows_of_block"],
    do_not_specialize_on_alignment=["asked", "regions", "buffers", "sums"],
)
def _move(  # type: ignore[no-untyped-def]
    asked, regions, buffers, sums, per_chunk, words_of_block, words_of_sums, rows_of_block,
    gather: tl.constexpr, add: tl.constexpr, some: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """One program: ``some`` rows of one page of one block. Grid: pages of a block, parts of a page, blocks.

    ``asked`` has a line for each block: place of its sums, its buffer, then its engine blocks. ``regions``
    has one for each region: address, stride in bytes, rows of a page, first row in the payload.
    """
    page, part, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    region, place = page // per_chunk, page % per_chunk
    line = asked + number * (per_chunk + 2)
    base = tl.load(regions + region * 4)
    stride = tl.load(regions + region * 4 + 1)
    rows = tl.load(regions + region * 4 + 2)
    begin = tl.load(regions + region * 4 + 3)
    row = part * some + tl.arange(0, some)
    word = tl.arange(0, words)
    inside = row < rows
    in_block = begin + place * rows + row
    pages = (base + tl.load(line + 2 + place) * stride).to(tl.pointer_type(tl.int64))
    pages += row[:, None] * words + word[None, :]
    buffer = buffers + tl.load(line + 1) * words_of_block + in_block[:, None] * words + word[None, :]
    if gather:
        values = tl.load(pages, mask=inside[:, None], other=0)
        tl.store(buffer, values, mask=inside[:, None])
    else:
        values = tl.load(buffer, mask=inside[:, None], other=0)
        tl.store(pages, values, mask=inside[:, None])
    if add:
        out = sums + tl.load(line) * words_of_sums
        tl.store(out + in_block, tl.sum(values, axis=1), mask=inside)
        # Whole numbers: the order of the additions does not matter.
        tl.atomic_add(out + rows_of_block + word, tl.sum(values, axis=0), sem="relaxed")


class Lane:
    """Buffers that one direction uses in turns. Each may be filled again once its event has happened."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._events: list[Any] = [None] * count
        self._next = 0
        self.most = max(1, count // 2)  # in one launch: the other half is filled or emptied meanwhile

    def take(self, count: int) -> tuple[list[int], list[Any]]:
        """The next buffers, ``most`` at most, and the events to wait for before they are written."""
        turns = [(self._next + n) % len(self._events) for n in range(count)]
        self._next = (self._next + count) % len(self._events)
        waits = {id(event): event for turn in turns if (event := self._events[turn]) is not None}
        return [self._first + turn for turn in turns], list(waits.values())

    def busy(self, buffers: Sequence[int], event: Any) -> None:
        """They are read until this event."""
        for buffer in buffers:
            self._events[buffer - self._first] = event


class GpuBlocks:
    """Buffers, tables and launches. Reactor thread only.

    Each slot has its own lines for question and sums, so that what is under way for one never meets
    another's. The caller copies ``asking`` before ``launch`` and ``answer`` after it.

    Args:
        slots: places that the caller numbers blocks by, from 0 on.
        add: whether blocks are added up.
    Raises:
        ValueError: pages are no multiple of 4,096 bytes, so that a row may lie in two of them.
        RuntimeError: the memory cannot be had.
    """

    most_blocks: Final = _MOST_LOADS // 2  # in one question; each slot has room for one

    def __init__(
        self, regions: Sequence[Region], per_chunk: int, slots: int, device: torch.device, *, add: bool
    ) -> None:
        if any(region.page % ALIGN or region.base % 8 or region.stride % 8 for region in regions):
            raise ValueError(f"its pages are no multiple of {ALIGN} bytes")
        rows = np.array([region.page // ALIGN for region in regions], np.int64)
        begins = (np.cumsum(rows) - rows) * per_chunk
        columns = ([region.base for region in regions], [region.stride for region in regions], rows, begins)
        self.add, self._rows, self._per_chunk = add, int(rows.sum()) * per_chunk, per_chunk
        self._pages, self._parts = len(regions) * per_chunk, -(-int(rows.max()) // _ROWS)
        self.block_bytes = self._rows * ALIGN
        loads = min(_MOST_LOADS, max(2, _LOAD_BYTES // self.block_bytes))
        stores = min(_MOST_STORES, max(2, _STORE_BYTES // self.block_bytes))
        self.loads, self.stores = Lane(0, loads), Lane(loads, stores)
        self._buffers = torch.empty((loads + stores, self._rows * WORDS), dtype=torch.int64, device=device)
        self._words = self._rows + WORDS
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1).ravel()
        pinned = device.type == "cuda"
        # A question: the table, then a line for each block. Nothing on the GPU is relied on from one batch to
        # the next: vLLM may build us within its memory pool, whose contents a sleep of the engine discards.
        self._table, self._line = len(table), per_chunk + 2
        size = self._table + self.most_blocks * self._line
        self._asked = torch.empty((slots, size), dtype=torch.int64, device=device)
        self._asked_host = torch.zeros((slots, size), dtype=torch.int64, pin_memory=pinned)
        lines = slots if add else 1
        self._sums = torch.empty((lines, self._words), dtype=torch.int64, device=device)
        self._sums_host = torch.zeros((lines, self._words), dtype=torch.int64, pin_memory=pinned)
        self._zeros = torch.zeros(WORDS, dtype=torch.int64, pin_memory=pinned)
        self._asked_array, self._sums_array = self._asked_host.numpy(), self._sums_host.numpy()
        self._asked_array[:, : self._table] = table

    @classmethod
    def prove(cls, device: torch.device, *, add: bool) -> None:
        """Compile, and compare with what the CPU makes of it. RuntimeError if they differ, or Triton's."""
        blocks, pages = 7, 3
        # Not torch's generator: its state is vLLM's, whose samples would be others than without us.
        words = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, (blocks, pages * WORDS), np.int64)
        memory = torch.from_numpy(words).to(device, copy=True)
        region = Region(memory.data_ptr(), pages * ALIGN, pages * ALIGN)
        made = cls([region], 2, 3, device, add=add)
        slots, sources, targets = [2, 0], np.array([[5, 2], [1, 6]]), np.array([[0, 3], [4, 1]])
        for gather, ids in ((True, sources), (False, targets)):
            made.asking(slots, [4, 1], list(ids))
            made._asked.copy_(made._asked_host)
            made._sums.zero_()
            made.launch(slots, gather=gather)
            made._sums_host.copy_(made._sums)
            for slot, ids_of_one in zip(slots, sources, strict=True):
                if add and made.take(slot) != sums_of(words[ids_of_one]):
                    raise RuntimeError(f"sums made by {device} are wrong")
        words[targets] = words[sources]
        if not np.array_equal(memory.cpu().numpy(), words):
            raise RuntimeError(f"pages moved by {device} are wrong")

    def asking(self, slots: Sequence[int], buffers: Sequence[int], block_ids: Sequence[Ints]) -> Copies:
        """What to copy to the device (``addresses``) from the host (``offsets``) for ``launch``.

        That is the question, and zeros where columns will be added up.

        Args:
            slots: of each block, ``most_blocks`` of them at most.
            block_ids: the engine blocks of each, ``per_chunk`` of them.
        """
        first, count = slots[0], len(slots)
        lines = self._asked_array[first, self._table :].reshape(self.most_blocks, self._line)
        lines[:count, 0], lines[:count, 1], lines[:count, 2:] = slots, buffers, block_ids
        zeros = count if self.add else 0
        there = np.empty(zeros + 1, np.int64)
        columns = np.array(slots[:zeros], np.int64) * self._words + self._rows
        there[:zeros] = columns * 8 + self._sums.data_ptr()
        there[zeros] = self._asked[first].data_ptr()
        here = np.full(zeros + 1, self._zeros.data_ptr(), np.int64)
        here[zeros] = self._asked_host[first].data_ptr()
        lengths = np.full(zeros + 1, WORDS * 8, np.int64)
        lengths[zeros] = (self._table + count * self._line) * 8
        return Copies(there, here, lengths)

    def payloads(self, buffers: Sequence[int], slots: Sequence[int]) -> Copies:
        """The buffers (``addresses``) beside the blocks of these host addresses (``offsets``)."""
        there = np.array(buffers, np.int64) * self.block_bytes + self._buffers.data_ptr()
        return Copies(there, np.array(slots, np.int64), np.full(len(slots), self.block_bytes, np.int64))

    def launch(self, slots: Sequence[int], *, gather: bool) -> None:
        """From pages to buffers, or the other way, on torch's current stream."""
        question = self._asked[slots[0]]
        _move[self._pages, self._parts, len(slots)](
            question[self._table :], question, self._buffers, self._sums,
            self._per_chunk, self._rows * WORDS, self._words, self._rows,
            gather=gather, add=self.add, some=_ROWS, words=WORDS,
        )  # fmt: skip

    def answer(self, slots: Sequence[int]) -> Copies:
        """What to copy from the device (``addresses``) to the host (``offsets``) after ``launch``."""
        slots = slots if self.add else []
        offsets = np.array(slots, np.int64) * self._words * 8
        lengths = np.full(len(slots), self._words * 8, np.int64)
        return Copies(offsets + self._sums.data_ptr(), offsets + self._sums_host.data_ptr(), lengths)

    def take(self, slot: int) -> BlockSums:
        """The sums of a slot's block, once the answer has been copied."""
        line = self._sums_array[slot]
        return BlockSums(line[: self._rows].tobytes(), line[self._rows :].tobytes())
