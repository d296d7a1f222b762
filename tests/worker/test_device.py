"""Copies between slots and KV memory on the CPU, byte for byte."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the device module copies torch tensors")

import torch

from py_kvcache.errors import KvCacheError
from py_kvcache.layout import ALIGN
from py_kvcache.worker.device import CpuDevice, as_bytes, make_device, regions_of
from py_kvcache.worker.pages import Chunk, PageMap, split_chunks

BLOCKS = 12


def caches(pages: list[int], gap: int = 0) -> Any:
    """vLLM's CanonicalKVCaches: one random tensor per layer, the pages perhaps strided."""
    tensors, refs = [], []
    generator = torch.Generator().manual_seed(1)
    for number, page in enumerate(pages):
        memory = torch.randint(-128, 128, (BLOCKS * (page + gap),), dtype=torch.int8, generator=generator)
        tensors.append(SimpleNamespace(tensor=memory.as_strided((BLOCKS, page), (page + gap, 1))))
        refs.append(SimpleNamespace(tensor_idx=number, page_size_bytes=page))
    return SimpleNamespace(tensors=tensors, group_data_refs=[refs])


class Rig:
    """A device over some tensors, with two slots."""

    def __init__(self, kv: Any, per_chunk: int) -> None:
        self.kv, self.map = kv, PageMap(regions_of(kv, 0), per_chunk)
        self.woken = threading.Event()
        self.device = make_device(kv, self.map, self.woken.set)
        self.slot_bytes = self.map.payload_bytes + 17
        self.memory = self.device.allocate(2 * self.slot_bytes)
        self.slots = [self.memory[: self.slot_bytes], self.memory[self.slot_bytes :]]

    def wait(self, event: Any) -> None:
        while not event.done():
            assert self.woken.wait(10), "the copy never ended"
            time.sleep(0.001)

    def expected(self, chunk: Chunk) -> bytes:
        """What the slot of a whole chunk holds: layer by layer, block by block."""
        layers = [self.kv.tensors[ref.tensor_idx].tensor for ref in self.kv.group_data_refs[0]]
        return b"".join(layer[int(b)].numpy().tobytes() for layer in layers for b in chunk.block_ids)


@pytest.fixture(params=[([64, 64], 0), ([1000, 1000, 1000], 0), ([96, 8, 33], 0), ([64, 64], 32)], ids=str)
def rig(request: pytest.FixtureRequest):
    rig = Rig(caches(*request.param), per_chunk=3)
    yield rig
    rig.device.close()


def test_a_store_puts_the_pages_into_the_slot_layer_by_layer(rig: Rig):
    chunk = Chunk(np.array([7, 2, 11]), 0)
    rig.wait(rig.device.store([(rig.slots[1], chunk, None)]))
    assert bytes(rig.slots[1][: rig.map.payload_bytes]) == rig.expected(chunk)
    assert bytes(rig.slots[1][rig.map.payload_bytes :]) == bytes(17), "the rest of the slot is left alone"
    assert not any(rig.slots[0])


def test_a_load_brings_back_the_same_bytes_to_other_blocks_and_touches_no_others(rig: Rig):
    before = [tensor.tensor.clone() for tensor in rig.kv.tensors]
    source, target = Chunk(np.array([0, 1, 2]), 0), Chunk(np.array([9, 4, 6]), 0)
    rig.wait(rig.device.store([(rig.slots[0], source, None)]))
    rig.wait(rig.device.load([(rig.slots[0], target, None)]))
    for tensor, old in zip(rig.kv.tensors, before, strict=True):
        for block in range(BLOCKS):
            origin = {9: 0, 4: 1, 6: 2}.get(block, block)
            assert torch.equal(tensor.tensor[block], old[origin])


def test_a_partial_chunk_loads_its_part_of_the_slot(rig: Rig):
    before = [tensor.tensor.clone() for tensor in rig.kv.tensors]
    rig.wait(rig.device.store([(rig.slots[0], Chunk(np.array([0, 1, 2]), 0), None)]))
    rig.wait(rig.device.load([(rig.slots[0], Chunk(np.array([8]), 2), None)]))
    for tensor, old in zip(rig.kv.tensors, before, strict=True):
        assert torch.equal(tensor.tensor[8], old[2])
        assert torch.equal(tensor.tensor[7], old[7])


def test_many_chunks_are_one_batch(rig: Rig):
    first, second = split_chunks([3, 4, 5, 6, 7, 8], 0, 3)
    rig.wait(rig.device.store([(rig.slots[0], first, None), (rig.slots[1], second, None)]))
    for slot, chunk in zip(rig.slots, (first, second), strict=True):
        assert bytes(slot[: rig.map.payload_bytes]) == rig.expected(chunk)


def test_a_block_of_1500_pages_is_copied_whole():
    """More pieces than an iovec array takes: pages are gathered in the slot, and the file is one piece."""
    rig = Rig(caches([24] * 500), per_chunk=3)
    source, target = Chunk(np.array([2, 0, 5]), 0), Chunk(np.array([8, 7, 9]), 0)
    before = [tensor.tensor.clone() for tensor in rig.kv.tensors]
    rig.wait(rig.device.store([(rig.slots[0], source, None)]))
    assert bytes(rig.slots[0][: rig.map.payload_bytes]) == rig.expected(source)
    rig.wait(rig.device.load([(rig.slots[0], target, None)]))
    for tensor, old in zip(rig.kv.tensors, before, strict=True):
        assert torch.equal(tensor.tensor[target.block_ids], old[source.block_ids])
    rig.device.close()


def test_gaps_between_strided_pages_are_never_written():
    rig = Rig(caches([64], gap=32), per_chunk=3)
    whole = rig.kv.tensors[0].tensor.as_strided((BLOCKS, 96), (96, 1))
    gaps = whole[:-1, 64:].clone()
    rig.memory[:] = bytes([255]) * len(rig.memory)
    rig.wait(rig.device.load([(rig.slots[0], Chunk(np.array([0, 5, 10]), 0), None)]))
    assert torch.equal(whole[:-1, 64:], gaps)
    rig.device.close()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 100_001])
def test_staging_memory_is_aligned_zeroed_and_as_long_as_asked(nbytes: int):
    device = CpuDevice(PageMap(regions_of(caches([64]), 0), 1), lambda: None)
    memory = device.allocate(nbytes)
    assert (len(memory), memory.format, memory.ndim) == (nbytes, "B", 1)
    assert as_bytes(memory).ctypes.data % ALIGN == 0
    assert not as_bytes(memory).any()
    device.close()


def test_too_much_staging_memory_is_refused_with_the_settings_to_lower():
    device = CpuDevice(PageMap(regions_of(caches([64]), 0), 1), lambda: None)
    with pytest.raises(KvCacheError, match="set memory_bytes, staging_bytes or io_depth lower"):
        device.allocate(1 << 55)
    device.close()


def test_a_device_may_be_closed_twice_and_ends_its_thread():
    device = CpuDevice(PageMap(regions_of(caches([64]), 0), 1), lambda: None)
    device.close()
    device.close()
    assert not device._thread.is_alive()


def test_copies_begun_before_the_close_are_finished():
    rig = Rig(caches([64, 64]), per_chunk=3)
    chunk = Chunk(np.array([1, 2, 3]), 0)
    event = rig.device.store([(rig.slots[0], chunk, None)])
    rig.device.close()
    assert event.done()
    assert bytes(rig.slots[0][: rig.map.payload_bytes]) == rig.expected(chunk)


def test_the_end_of_a_copy_wakes_the_reactor_and_there_is_no_event_to_wait_for_on_a_cpu():
    rig = Rig(caches([64]), per_chunk=3)
    assert rig.device.poll_s is None
    assert rig.device.record() is None
    rig.device.store([(rig.slots[0], Chunk(np.array([1]), 0), None)])
    assert rig.woken.wait(10)
    rig.device.close()


def test_a_copy_that_failed_raises_from_its_event():
    rig = Rig(caches([64]), per_chunk=1)
    event = rig.device.store([])
    rig.wait(event)
    broken = type(event)([(object(), object(), 8)])
    broken.run()
    with pytest.raises(RuntimeError, match="copy failed"):
        broken.done()
    rig.device.close()


def test_regions_follow_each_reference_of_the_group_with_stride_and_element_size():
    memory = torch.zeros((BLOCKS, 40), dtype=torch.int16)
    kv = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=memory[:, :20])],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=30)] * 2],
    )
    regions = regions_of(kv, 0)
    assert len(regions) == 2
    assert (regions[0].base, regions[0].stride, regions[0].page) == (memory.data_ptr(), 80, 30)


def test_memory_that_is_not_on_the_cpu_is_refused_in_a_sentence():
    kv = SimpleNamespace(tensors=[SimpleNamespace(tensor=torch.zeros((2, 2), device="meta"))])
    with pytest.raises(KvCacheError, match="KV cache on meta is not supported; it must be in CPU memory"):
        make_device(kv, PageMap(regions_of(caches([64]), 0), 1), lambda: None)
