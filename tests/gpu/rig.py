"""A CUDA device over random tensors, for the tests of this folder."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from py_kvcache.worker.device import make_device, regions_of
from py_kvcache.worker.pages import Chunk, PageMap


class Rig:
    """KV memory of ``blocks`` engine blocks with one random tensor for each page size, and some slots.

    ``gap``: bytes between two pages; ``tail``: bytes of a slot behind its payload.
    """

    def __init__(
        self, pages: list[int], per_chunk: int = 3, gap: int = 0, *,
        blocks: int = 64, slots: int = 6, tail: int = 4096, checksum: bool = True,
    ) -> None:  # fmt: skip
        tensors, refs = [], []
        generator = torch.Generator().manual_seed(1)
        for number, page in enumerate(pages):
            memory = torch.randint(-128, 128, (blocks * (page + gap),), dtype=torch.int8, generator=generator)
            strided = memory.cuda().as_strided((blocks, page), (page + gap, 1))
            tensors.append(SimpleNamespace(tensor=strided))
            refs.append(SimpleNamespace(tensor_idx=number, page_size_bytes=page))
        self.kv: Any = SimpleNamespace(tensors=tensors, group_data_refs=[refs])
        self.map = PageMap(regions_of(self.kv, 0), per_chunk)
        self.device: Any = make_device(self.kv, self.map, lambda: None, checksum=checksum)
        self.size = self.map.payload_bytes + tail
        self.memory = self.device.allocate(slots * self.size)
        self.slots = [self.memory[n * self.size : (n + 1) * self.size] for n in range(slots)]

    def payload(self, n: int) -> bytes:
        """What a slot holds, without its tail."""
        return bytes(self.slots[n][: self.map.payload_bytes])

    def expected(self, chunk: Chunk) -> bytes:
        """What the slot of a whole chunk holds: layer by layer, block by block."""
        layers = [self.kv.tensors[ref.tensor_idx].tensor for ref in self.kv.group_data_refs[0]]
        return b"".join(layer[int(b)].cpu().numpy().tobytes() for layer in layers for b in chunk.block_ids)


def wait(event: Any) -> None:
    """Until it has happened."""
    end = time.monotonic() + 30
    while not event.done():
        assert time.monotonic() < end, "the copy never ended"
        time.sleep(0.0005)
