"""Whole blocks on the GPU: one piece of memory there, as their file has them, to and from vLLM's pages.

Over the link a block goes as one copy, which costs the CPU some 10 us; page by page it would be 300 us of the
reactor's thread. A kernel spreads or gathers the pages at 4 TB/s, and on the way adds them up for the
checksum (digest.BlockSums): CPU threads would take three cores for that at 30 GB/s, and the interpreter a
dozen times a block, which vLLM's threads want too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

from py_kvcache.digest import WORDS, BlockSums, sums_of
from py_kvcache.layout import ALIGN
from py_kvcache.worker.pages import Copies, Ints, Region

_ROWS = 16  # moved by one program: 64 KiB, enough memory accesses in flight to be limited by memory only

# GPU memory beside vLLM's, which counts on none: as little as keeps the link busy while kernels have to wait.
_LANE_BYTES, _MOST_LANES = 128 << 20, 8


# One compiled form for all models and batches: to compile another later would keep the reactor for seconds.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["per_chunk", "words_of_block", "words_of_sums", "rows_of_block"],
    do_not_specialize_on_alignment=["asked", "regions", "buffers", "sums"],
)
def _move(  # type: ignore[no-untyped-def]
    asked, regions, buffers, sums, per_chunk, words_of_block, words_of_sums, rows_of_block,
    gather: tl.constexpr, add: tl.constexpr, some: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """One program: ``some`` rows of one page. Grid: pages of a block, parts of a page.

    ``asked``: place of the block's sums, its buffer, then its engine blocks. ``regions`` has a line for each
    region: address, stride in bytes, rows of a page, first row in the payload.
    """
    page, part = tl.program_id(0), tl.program_id(1)
    region, place = page // per_chunk, page % per_chunk
    base = tl.load(regions + region * 4)
    stride = tl.load(regions + region * 4 + 1)
    rows = tl.load(regions + region * 4 + 2)
    begin = tl.load(regions + region * 4 + 3)
    row = part * some + tl.arange(0, some)
    word = tl.arange(0, words)
    inside = row < rows
    in_block = begin + place * rows + row
    pages = (base + tl.load(asked + 2 + place) * stride).to(tl.pointer_type(tl.int64))
    pages += row[:, None] * words + word[None, :]
    buffer = buffers + tl.load(asked + 1) * words_of_block + in_block[:, None] * words + word[None, :]
    if gather:
        values = tl.load(pages, mask=inside[:, None], other=0)
        tl.store(buffer, values, mask=inside[:, None])
    else:
        values = tl.load(buffer, mask=inside[:, None], other=0)
        tl.store(pages, values, mask=inside[:, None])
    if add:
        out = sums + tl.load(asked) * words_of_sums
        tl.store(out + in_block, tl.sum(values, axis=1), mask=inside)
        # Whole numbers: the order of the additions does not matter.
        tl.atomic_add(out + rows_of_block + word, tl.sum(values, axis=0), sem="relaxed")


class GpuBlocks:
    """Buffers, tables and launches. Reactor thread only.

    A block's way to its pages: ``ask``, the copies of ``incoming``, ``launch``, those of ``outgoing``; from
    them: the same, and the payload goes out instead of in. All on one stream for each buffer, so that nothing
    has to wait for events of its own. Each place has its own lines for question and sums, so that what is
    under way for one slot never meets another's.

    Args:
        places: of slots, which the caller numbers from 0 on.
        add: whether blocks are added up.
    Attributes:
        loads, stores: the buffers of each direction.
    Raises:
        ValueError: pages are no multiple of 4,096 bytes, so that a row may lie in two of them.
        RuntimeError: the memory cannot be had.
    """

    def __init__(
        self, regions: Sequence[Region], per_chunk: int, places: int, device: torch.device, *, add: bool
    ) -> None:
        if any(region.page % ALIGN or region.base % 8 or region.stride % 8 for region in regions):
            raise ValueError(f"its pages are no multiple of {ALIGN} bytes")
        rows = np.array([region.page // ALIGN for region in regions], np.int64)
        begins = (np.cumsum(rows) - rows) * per_chunk
        columns = ([region.base for region in regions], [region.stride for region in regions], rows, begins)
        self.add, self._rows = add, int(rows.sum()) * per_chunk
        self._grid = len(regions) * per_chunk, -(-int(rows.max()) // _ROWS), 1
        self.block_bytes = self._rows * ALIGN
        lanes = min(_MOST_LANES, max(2, _LANE_BYTES // self.block_bytes))
        self.loads, self.stores = range(lanes), range(lanes, 2 * lanes)
        self._buffers = torch.empty((2 * lanes, self._rows * WORDS), dtype=torch.int64, device=device)
        self._words = self._rows + WORDS
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1).ravel()
        pinned = device.type == "cuda"
        # A question: the table, then the block's line. Nothing on the GPU is relied on from one block to the
        # next: vLLM may build us within its memory pool, whose contents a sleep of the engine discards.
        size = len(table) + 2 + per_chunk
        self._asked = torch.empty((places, size), dtype=torch.int64, device=device)
        self._asked_host = torch.zeros((places, size), dtype=torch.int64, pin_memory=pinned)
        lines = places if add else 1
        self._sums = torch.empty((lines, self._words), dtype=torch.int64, device=device)
        self._sums_host = torch.zeros((lines, self._words), dtype=torch.int64, pin_memory=pinned)
        self._zeros = torch.zeros(WORDS, dtype=torch.int64, pin_memory=pinned)
        cut = self._rows * 8
        lasting = [memoryview(line).cast("B") for line in self._sums_host.numpy()]
        self._answers = [BlockSums(view[:cut], view[cut:]) for view in lasting]
        asked = self._asked_host.numpy()
        asked[:, : len(table)] = table
        self._lines = [line[len(table) :] for line in asked]
        # Sliced once: each slicing of a tensor costs 2 us.
        self._arguments = [
            (
                question[len(table) :], question, self._buffers, self._sums,
                per_chunk, self._rows * WORDS, self._words, self._rows,
            )
            for question in self._asked
        ]  # fmt: skip
        self._compiled: dict[bool, Callable[..., None]] = {}

    @classmethod
    def prove(cls, device: torch.device, *, add: bool) -> None:
        """Compile, and compare with what the CPU makes of it. RuntimeError if they differ, or Triton's."""
        blocks, pages = 7, 3
        # Not torch's generator: its state is vLLM's, whose samples would be others than without us.
        words = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, (blocks, pages * WORDS), np.int64)
        memory = torch.from_numpy(words).to(device, copy=True)
        region = Region(memory.data_ptr(), pages * ALIGN, pages * ALIGN)
        made = cls([region], 2, 3, device, add=add)
        sources, targets = np.array([[5, 2], [1, 6]]), np.array([[0, 3], [4, 1]])
        for gather, ids in ((True, sources), (False, targets)):
            # The second time in the way of all later times: without Triton's look at each argument.
            for place, buffer, ids_of_one, source in zip((2, 0), (1, 0), ids, sources, strict=True):
                made.ask(place, buffer, ids_of_one)
                made._asked.copy_(made._asked_host)
                made._sums.zero_()
                made.launch(place, None, gather=gather)
                made._sums_host.copy_(made._sums)
                if add and made.take(place) != sums_of(words[source]):
                    raise RuntimeError(f"sums made by {device} are wrong")
        words[targets] = words[sources]
        if not np.array_equal(memory.cpu().numpy(), words):
            raise RuntimeError(f"pages moved by {device} are wrong")

    def ask(self, place: int, buffer: int, block_ids: Ints) -> None:
        """Say which engine blocks (``per_chunk`` of them) ``launch`` will move to or from which buffer."""
        line = self._lines[place]
        line[0], line[1], line[2:] = place, buffer, block_ids

    def incoming(self, place: int, buffer: int, slot: int, *, payload: bool) -> Copies:
        """What goes to the device (``addresses``) from the host (``offsets``) before ``launch``.

        That is the question, zeros where columns will be added up, and the payload, if it goes that way;
        ``slot`` is its address.
        """
        entries = [self._entry(self._asked[place], self._asked_host[place])]
        if self.add:
            entries.append(self._entry(self._sums[place, self._rows :], self._zeros))
        if payload:
            entries.insert(0, self._payload(buffer, slot))
        return _copies(entries)

    def outgoing(self, place: int, buffer: int, slot: int, *, payload: bool) -> Copies:
        """What goes from the device (``addresses``) to the host (``offsets``) after ``launch``, if any."""
        entries = [self._payload(buffer, slot)] if payload else []
        if self.add:
            entries.append(self._entry(self._sums[place], self._sums_host[place]))
        return _copies(entries)

    def launch(self, place: int, stream: torch.cuda.Stream | None, *, gather: bool) -> None:
        """From pages to the buffer, or the other way; without a stream on torch's current one."""
        arguments = (*self._arguments[place], gather, self.add, _ROWS, WORDS)
        run = self._compiled.get(gather)
        if run is not None:
            run(*arguments, stream=None if stream is None else stream.cuda_stream)
            return
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            kernel = _move[self._grid](*arguments)
        if kernel is not None:  # none from Triton's interpreter
            self._compiled[gather] = kernel[self._grid]

    def take(self, place: int) -> BlockSums:
        """The sums of a place's block: once ``outgoing`` is copied, until the place is used again."""
        return self._answers[place]

    def _payload(self, buffer: int, slot: int) -> tuple[int, int, int]:
        return self._buffers[buffer].data_ptr(), slot, self.block_bytes

    @staticmethod
    def _entry(there: torch.Tensor, here: torch.Tensor) -> tuple[int, int, int]:
        return there.data_ptr(), here.data_ptr(), here.numel() * 8


def _copies(entries: Sequence[tuple[int, int, int]]) -> Copies:
    there, here, lengths = np.array(entries, np.int64).reshape(-1, 3).T.copy()
    return Copies(there, here, lengths)
