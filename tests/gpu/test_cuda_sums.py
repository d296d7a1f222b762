"""Sums of blocks by a real GPU: those of the CPU, of what the device has. Skipped without one."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the CUDA device is built on torch")

import torch

from py_kvcache.digest import sums_of
from py_kvcache.worker.device import make_device, regions_of
from py_kvcache.worker.pages import Chunk, PageMap
from py_kvcache.worker.parts import SlotCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCKS, SLOTS = 64, 6


class Rig:
    """A device that adds up, over random tensors of some page sizes."""

    def __init__(self, pages: list[int], per_chunk: int, gap: int = 0, *, checksum: bool = True) -> None:
        tensors, refs = [], []
        for number, page in enumerate(pages):
            memory = torch.randint(-128, 128, (BLOCKS * (page + gap),), dtype=torch.int8)
            strided = memory.cuda().as_strided((BLOCKS, page), (page + gap, 1))
            tensors.append(SimpleNamespace(tensor=strided))
            refs.append(SimpleNamespace(tensor_idx=number, page_size_bytes=page))
        kv: Any = SimpleNamespace(tensors=tensors, group_data_refs=[refs])
        self.map = PageMap(regions_of(kv, 0), per_chunk)
        self.device = make_device(kv, self.map, lambda: None, checksum=checksum)
        self.size = self.map.payload_bytes + 4096
        self.memory = self.device.allocate(SLOTS * self.size)
        self.kv = kv

    def slot(self, n: int) -> memoryview:
        return self.memory[n * self.size : (n + 1) * self.size]

    def payload(self, n: int) -> bytes:
        return bytes(self.slot(n)[: self.map.payload_bytes])


def wait(event: Any) -> None:
    end = time.monotonic() + 30
    while not event.done():
        assert time.monotonic() < end, "the copy never ended"
        time.sleep(0.0005)


SHAPES = [([4096], 1, 0), ([65536] * 28, 16, 0), ([69632, 4096], 3, 0), ([8192, 8192], 2, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stores_come_with_the_sums_that_the_cpu_makes(shape):
    rig, random = Rig(*shape), np.random.default_rng(1)
    for turn in range(2 * SLOTS):
        n, chunk = turn % SLOTS, Chunk(random.permutation(BLOCKS)[: rig.map.blocks_per_chunk], 0)
        assert rig.device.adds_up(chunk)
        event = rig.device.store([SlotCopy(rig.slot(n), chunk, rig.device.record())])
        wait(event)
        assert event.sums(0) == sums_of(rig.payload(n))
    rig.device.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_block_of_a_batch_of_loads_has_its_own_sums(shape):
    rig, random = Rig(*shape), np.random.default_rng(2)
    for slots in ([4, 1, 3], [0], [5, 4, 3]):
        np.frombuffer(rig.memory, np.uint8)[:] = random.integers(0, 256, len(rig.memory), np.uint8)
        ids = random.permutation(BLOCKS)
        copies = []
        for n in slots:
            chunk, ids = Chunk(ids[: rig.map.blocks_per_chunk], 0), ids[rig.map.blocks_per_chunk :]
            copies.append(SlotCopy(rig.slot(n), chunk, rig.device.record()))
        event = rig.device.load(copies)
        wait(event)
        assert [event.sums(k) for k in range(len(slots))] == [sums_of(rig.payload(n)) for n in slots]
    rig.device.close()


def test_a_part_of_a_block_has_no_sums_and_does_not_disturb_those_of_others():
    rig = Rig([8192] * 3, 4)
    part, whole = Chunk(np.array([1, 2]), 1), Chunk(np.array([9, 7, 8, 3]), 0)
    assert not rig.device.adds_up(part)
    np.frombuffer(rig.memory, np.uint8)[:] = 9
    event = rig.device.load([SlotCopy(rig.slot(0), part, None), SlotCopy(rig.slot(1), whole, None)])
    wait(event)
    assert event.sums(0) is None
    assert event.sums(1) == sums_of(rig.payload(1))
    rig.device.close()


def test_sums_are_of_what_the_kernels_before_the_event_left():
    rig = Rig([1 << 20] * 2, 3)
    torch.cuda._sleep(200_000_000)
    for tensor in rig.kv.tensors:
        tensor.tensor.fill_(77)
    event = rig.device.store([SlotCopy(rig.slot(0), Chunk(np.array([1, 2, 3]), 0), rig.device.record())])
    wait(event)
    assert event.sums(0) == sums_of(bytes([77]) * rig.map.payload_bytes)
    rig.device.close()


@pytest.mark.parametrize("pages", [[4097, 4096], [64, 64]], ids=str)
def test_pages_that_are_no_whole_rows_are_left_to_the_cpu_and_said_so(pages, caplog):
    with caplog.at_level(logging.WARNING):
        rig = Rig(pages, 2)
    assert "CPU threads" in caplog.text
    assert not rig.device.adds_up(Chunk(np.array([1, 2]), 0))
    event = rig.device.store([SlotCopy(rig.slot(0), Chunk(np.array([1, 2]), 0), None)])
    wait(event)
    assert event.sums(0) is None
    rig.device.close()


def test_without_checksums_nothing_is_added_up():
    rig = Rig([4096], 1, checksum=False)
    assert not rig.device.adds_up(Chunk(np.array([1]), 0))
    rig.device.close()
