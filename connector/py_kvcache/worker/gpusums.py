"""Sums of blocks (digest.BlockSums) by the GPU, in the pages where vLLM has them.

On the CPU a check of every block takes three cores at 30 GB/s, and each one needs the interpreter a dozen
times, which vLLM's threads want too. The GPU reads the same bytes at 4 TB/s while they are there anyway. It
also proves more: a store is summed before it goes over the link, a load after it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from py_kvcache.digest import WORDS, BlockSums, sums_of
from py_kvcache.layout import ALIGN
from py_kvcache.worker.pages import Copies, Ints, Region

_ROWS = 16  # summed by one program: 64 KiB, enough loads in flight to be limited by memory only


# One compiled form for all models and batches: to compile another later would keep the reactor for seconds.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["per_chunk", "words_of_one", "rows_of_one"],
    do_not_specialize_on_alignment=["asked", "regions", "sums"],
)
def _add_up(  # type: ignore[no-untyped-def]
    asked, regions, sums, per_chunk, words_of_one, rows_of_one, some: tl.constexpr, words: tl.constexpr
):
    """One program: ``some`` rows of one page of one block. Grid: pages of a block, parts of a page, blocks.

    ``asked`` has a line for each block: place of its sums, then its engine blocks. ``regions`` has one for
    each region: address, stride in bytes, rows of a page, first row in the payload.
    """
    page, part, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    region, place = page // per_chunk, page % per_chunk
    line = asked + number * (per_chunk + 1)
    out = sums + tl.load(line) * words_of_one
    base = tl.load(regions + region * 4)
    stride = tl.load(regions + region * 4 + 1)
    rows = tl.load(regions + region * 4 + 2)
    begin = tl.load(regions + region * 4 + 3)
    data = (base + tl.load(line + 1 + place) * stride).to(tl.pointer_type(tl.int64))
    row = part * some + tl.arange(0, some)
    word = tl.arange(0, words)
    inside = row < rows
    values = tl.load(data + row[:, None] * words + word[None, :], mask=inside[:, None], other=0)
    tl.store(out + begin + place * rows + row, tl.sum(values, axis=1), mask=inside)
    # Whole numbers: the order of the additions does not matter.
    tl.atomic_add(out + rows_of_one + word, tl.sum(values, axis=0), sem="relaxed")


class GpuSums:
    """Memory and launches for the sums of up to ``slots`` blocks at a time. Reactor thread only.

    Each slot has its own lines, so that what is under way for one never meets another's. The caller copies
    ``asking`` before ``launch`` and ``answer`` after it, on the same stream.

    Raises:
        ValueError: pages are no multiple of 4,096 bytes, so that a row may lie in two of them.
        RuntimeError: the memory cannot be had, or the sums are wrong.
    """

    most_blocks: Final = 32  # in one question; each slot has room for one

    def __init__(self, regions: Sequence[Region], per_chunk: int, slots: int, device: torch.device) -> None:
        if any(region.page % ALIGN or region.base % 8 or region.stride % 8 for region in regions):
            raise ValueError(f"its pages are no multiple of {ALIGN} bytes")
        rows = np.array([region.page // ALIGN for region in regions], np.int64)
        begins = (np.cumsum(rows) - rows) * per_chunk
        columns = ([region.base for region in regions], [region.stride for region in regions], rows, begins)
        self._rows = int(rows.sum()) * per_chunk
        self._per_chunk = per_chunk
        self._pages, self._parts = len(regions) * per_chunk, -(-int(rows.max()) // _ROWS)
        self._words = self._rows + WORDS
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1).ravel()
        pinned = device.type == "cuda"
        # A question: the table, then a line for each block. Nothing on the GPU is relied on from one batch to
        # the next: vLLM may build us within its memory pool, whose contents a sleep of the engine discards.
        self._table, self._line = len(table), per_chunk + 1
        size = self._table + self.most_blocks * self._line
        self._asked = torch.empty((slots, size), dtype=torch.int64, device=device)
        self._asked_host = torch.zeros((slots, size), dtype=torch.int64, pin_memory=pinned)
        self._sums = torch.empty((slots, self._words), dtype=torch.int64, device=device)
        self._sums_host = torch.zeros((slots, self._words), dtype=torch.int64, pin_memory=pinned)
        self._zeros = torch.zeros(WORDS, dtype=torch.int64, pin_memory=pinned)
        self._asked_array, self._sums_array = self._asked_host.numpy(), self._sums_host.numpy()
        self._asked_array[:, : self._table] = table

    @classmethod
    def prove(cls, device: torch.device) -> None:
        """Compile, and compare with the CPU's sums. RuntimeError if they differ, or what Triton raises."""
        blocks, pages = 7, 3
        # Not torch's generator: its state is vLLM's, whose samples would be others than without us.
        words = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, (blocks, pages * WORDS), np.int64)
        memory = torch.from_numpy(words).to(device)
        region = Region(memory.data_ptr(), pages * ALIGN, pages * ALIGN)
        made = cls([region], 2, 3, device)
        ids = [np.array([5, 2]), np.array([1, 6])]
        slots = [2, 0]
        made.asking(slots, ids)
        made._asked.copy_(made._asked_host)
        made._sums.zero_()
        made.launch(slots)
        made._sums_host.copy_(made._sums)
        for slot, block_ids in zip(slots, ids, strict=True):
            payload = memory[torch.from_numpy(block_ids).to(device)].cpu().numpy().tobytes()
            if made.take(slot) != sums_of(payload):
                raise RuntimeError(f"sums made by {device} are wrong")

    def asking(self, slots: Sequence[int], block_ids: Sequence[Ints]) -> Copies:
        """What to copy to the device (``addresses``) from the host (``offsets``) for ``launch``.

        That is the question, and zeros where columns will be added up.

        Args:
            slots: of each block, ``most_blocks`` of them at most.
            block_ids: the engine blocks of each, ``per_chunk`` of them.
        """
        first, count = slots[0], len(slots)
        lines = self._asked_array[first, self._table :].reshape(self.most_blocks, self._line)
        lines[:count, 0] = slots
        lines[:count, 1:] = block_ids
        there = np.empty(count + 1, np.int64)
        there[:count] = np.array(slots, np.int64) * self._words * 8 + self._rows * 8 + self._sums.data_ptr()
        there[count] = self._asked[first].data_ptr()
        here = np.full(count + 1, self._zeros.data_ptr(), np.int64)
        here[count] = self._asked_host[first].data_ptr()
        lengths = np.full(count + 1, WORDS * 8, np.int64)
        lengths[count] = (self._table + count * self._line) * 8
        return Copies(there, here, lengths)

    def launch(self, slots: Sequence[int]) -> None:
        """Add up, on torch's current stream."""
        question = self._asked[slots[0]]
        _add_up[self._pages, self._parts, len(slots)](
            question[self._table :], question, self._sums, self._per_chunk, self._words, self._rows,
            some=_ROWS, words=WORDS,
        )  # fmt: skip

    def answer(self, slots: Sequence[int]) -> Copies:
        """What to copy from the device (``addresses``) to the host (``offsets``) after ``launch``."""
        offsets = np.array(slots, np.int64) * self._words * 8
        lengths = np.full(len(slots), self._words * 8, np.int64)
        return Copies(offsets + self._sums.data_ptr(), offsets + self._sums_host.data_ptr(), lengths)

    def take(self, slot: int) -> BlockSums:
        """The sums of a slot's block, once the answer has been copied."""
        line = self._sums_array[slot]
        return BlockSums(line[: self._rows].tobytes(), line[self._rows :].tobytes())
