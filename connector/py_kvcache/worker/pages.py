"""Where the bytes of a storage block lie: on the device as pages, in its file as one payload.

The payload holds, for each layer reference of the group, the pages of the block's engine blocks in
order (layer-major, as vLLM's CPU tier lays out a chunk). Pure arithmetic on addresses; numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """One layer reference: engine block b starts at ``base + b * stride``, ``page`` bytes count."""

    base: int
    stride: int
    page: int


@dataclass(frozen=True, slots=True)
class Copies:
    """One entry per page: address on the device, offset in the slot, length, all in bytes."""

    addresses: Ints
    offsets: Ints
    lengths: Ints


class PageMap:
    """Addresses of the pages of one KV-cache group.

    Args:
        regions: the group's layer references, in the order that the payload has them.
        blocks_per_chunk: engine blocks in one storage block.
    """

    def __init__(self, regions: Sequence[Region], blocks_per_chunk: int) -> None:
        if not regions or blocks_per_chunk < 1:
            raise ValueError(f"{len(regions)} regions of {blocks_per_chunk} blocks hold nothing")
        self.regions = tuple(regions)
        self.blocks_per_chunk = blocks_per_chunk
        pages = np.array([region.page for region in regions], np.int64)
        self._bases = np.array([region.base for region in regions], np.int64)[:, None]
        self._strides = np.array([region.stride for region in regions], np.int64)[:, None]
        self._pages = pages[:, None]
        self._dense = all(region.stride == region.page for region in regions)
        self._starts = (np.cumsum(pages) - pages)[:, None] * blocks_per_chunk
        self.payload_bytes = int(pages.sum()) * blocks_per_chunk

    def copies(self, block_ids: Ints, first: int) -> Copies:
        """Entries for engine blocks ``block_ids``, the first of which is number ``first`` in its chunk."""
        if not 0 <= first <= first + len(block_ids) <= self.blocks_per_chunk:
            raise ValueError(f"{len(block_ids)} blocks from {first} on do not fit {self.blocks_per_chunk}")
        ids = np.asarray(block_ids, np.int64)
        inside = np.arange(first, first + len(ids), dtype=np.int64)
        return self._entries(ids, inside, np.ones(len(ids), np.int64))

    def runs(self, block_ids: Ints, first: int) -> Copies:
        """As ``copies``, but engine blocks that follow each other in the pool are one entry a layer.

        vLLM hands out consecutive blocks while its pool is fresh; an entry costs the driver about 1 us.
        """
        ids = np.asarray(block_ids, np.int64)
        begins = np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1
        if not self._dense or len(begins) + 1 >= len(ids):
            return self.copies(block_ids, first)
        if not 0 <= first <= first + len(ids) <= self.blocks_per_chunk:
            raise ValueError(f"{len(ids)} blocks from {first} on do not fit {self.blocks_per_chunk}")
        starts = np.concatenate(([0], begins))
        return self._entries(ids[starts], first + starts, np.diff(np.append(starts, len(ids))))

    def _entries(self, ids: Ints, inside: Ints, counts: Ints) -> Copies:
        """One entry per layer and run: its first block, that block's place in the chunk, its blocks."""
        return Copies(
            (self._bases + ids * self._strides).ravel(),
            (self._starts + inside * self._pages).ravel(),
            (self._pages * counts).ravel(),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """The engine blocks of one storage block, and the place of the first among them."""

    block_ids: Ints
    first: int


def split_chunks(block_ids: Any, start: int, blocks_per_chunk: int) -> list[Chunk]:
    """Cut consecutive engine blocks, the first at logical position ``start``, at chunk borders."""
    ids = np.asarray(block_ids, np.int64)
    chunks = []
    position = 0
    while position < len(ids):
        first = (start + position) % blocks_per_chunk
        count = min(blocks_per_chunk - first, len(ids) - position)
        chunks.append(Chunk(ids[position : position + count], first))
        position += count
    return chunks
