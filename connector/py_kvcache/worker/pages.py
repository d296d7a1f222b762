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
        self.blocks_per_chunk = blocks_per_chunk
        pages = np.array([region.page for region in regions], np.int64)
        self._bases = np.array([region.base for region in regions], np.int64)[:, None]
        self._strides = np.array([region.stride for region in regions], np.int64)[:, None]
        self._pages = pages[:, None]
        self._starts = (np.cumsum(pages) - pages)[:, None] * blocks_per_chunk
        self.payload_bytes = int(pages.sum()) * blocks_per_chunk

    def copies(self, block_ids: Ints, first: int) -> Copies:
        """Entries for engine blocks ``block_ids``, the first of which is number ``first`` in its chunk."""
        if not 0 <= first <= first + len(block_ids) <= self.blocks_per_chunk:
            raise ValueError(f"{len(block_ids)} blocks from {first} on do not fit {self.blocks_per_chunk}")
        ids = np.asarray(block_ids, np.int64)[None, :]
        inside = np.arange(first, first + ids.shape[1], dtype=np.int64)[None, :]
        shape = (len(self._bases), ids.shape[1])
        return Copies(
            (self._bases + ids * self._strides).ravel(),
            (self._starts + inside * self._pages).ravel(),
            np.broadcast_to(self._pages, shape).ravel(),
        )


def merged(entries: Copies) -> Copies:
    """The same bytes in fewer entries: engine blocks that follow each other on both sides are one copy.

    vLLM hands out consecutive blocks while its pool is fresh; a copy's set-up then costs more than its bytes.
    """
    addresses, offsets, lengths = entries.addresses, entries.offsets, entries.lengths
    begins = np.empty(len(addresses), bool)
    begins[:1] = True
    follows = addresses[1:] == addresses[:-1] + lengths[:-1]
    follows &= offsets[1:] == offsets[:-1] + lengths[:-1]
    begins[1:] = ~follows
    if begins.all():
        return entries
    starts = np.flatnonzero(begins)
    return Copies(addresses[starts], offsets[starts], np.add.reduceat(lengths, starts))


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
