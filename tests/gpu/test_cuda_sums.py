"""Sums of blocks by a real GPU: those of the CPU, of what the device has. Skipped without one."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("torch", reason="the CUDA device is built on torch")

import torch
from rig import Rig, wait

from py_kvcache.digest import sums_of
from py_kvcache.worker.pages import Chunk
from py_kvcache.worker.parts import SlotCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCKS, SLOTS = 64, 6

SHAPES = [([4096], 1, 0), ([65536] * 28, 16, 0), ([69632, 4096], 3, 0), ([8192, 8192], 2, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stores_come_with_the_sums_that_the_cpu_makes(shape):
    rig, random = Rig(*shape), np.random.default_rng(1)
    for turn in range(2 * SLOTS):
        n, chunk = turn % SLOTS, Chunk(random.permutation(BLOCKS)[: rig.map.blocks_per_chunk], 0)
        assert rig.device.adds_up(chunk)
        event = rig.device.store([SlotCopy(rig.slots[n], chunk, rig.device.record())])
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
            copies.append(SlotCopy(rig.slots[n], chunk, rig.device.record()))
        event = rig.device.load(copies)
        wait(event)
        assert [event.sums(k) for k in range(len(slots))] == [sums_of(rig.payload(n)) for n in slots]
    rig.device.close()


def test_a_part_of_a_block_has_no_sums_and_does_not_disturb_those_of_others():
    rig = Rig([8192] * 3, 4)
    part, whole = Chunk(np.array([1, 2]), 1), Chunk(np.array([9, 7, 8, 3]), 0)
    assert not rig.device.adds_up(part)
    np.frombuffer(rig.memory, np.uint8)[:] = 9
    event = rig.device.load([SlotCopy(rig.slots[0], part, None), SlotCopy(rig.slots[1], whole, None)])
    wait(event)
    assert event.sums(0) is None
    assert event.sums(1) == sums_of(rig.payload(1))
    rig.device.close()


def test_sums_are_of_what_the_kernels_before_the_event_left():
    rig = Rig([1 << 20] * 2, 3)
    torch.cuda._sleep(200_000_000)
    for tensor in rig.kv.tensors:
        tensor.tensor.fill_(77)
    event = rig.device.store([SlotCopy(rig.slots[0], Chunk(np.array([1, 2, 3]), 0), rig.device.record())])
    wait(event)
    assert event.sums(0) == sums_of(bytes([77]) * rig.map.payload_bytes)
    rig.device.close()


@pytest.mark.parametrize("pages", [[4097, 4096], [64, 64]], ids=str)
def test_pages_that_are_no_whole_rows_are_left_to_the_cpu_and_said_so(pages, caplog):
    with caplog.at_level(logging.WARNING):
        rig = Rig(pages, 2)
    assert "page by page, CPU threads check them" in caplog.text
    assert not rig.device.adds_up(Chunk(np.array([1, 2]), 0))
    event = rig.device.store([SlotCopy(rig.slots[0], Chunk(np.array([1, 2]), 0), None)])
    wait(event)
    assert event.sums(0) is None
    rig.device.close()


def test_without_checksums_nothing_is_added_up():
    rig = Rig([4096], 1, checksum=False)
    assert not rig.device.adds_up(Chunk(np.array([1]), 0))
    rig.device.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_more_blocks_than_buffers_come_and_go_unharmed_while_kernels_run(checksum):
    rig, random = Rig([65536] * 28, 4, slots=12, checksum=checksum), np.random.default_rng(4)
    for _ in range(10):
        torch.cuda._sleep(2_000_000)
        ids = random.permutation(BLOCKS)[:48].reshape(12, 4)
        rows = random.integers(0, 256, (12, rig.map.payload_bytes), np.uint8)
        for slot, row in zip(rig.slots, rows, strict=True):
            np.frombuffer(slot, np.uint8)[: len(row)] = row
        after = rig.device.record()
        events = [
            rig.device.load([SlotCopy(rig.slots[n], Chunk(ids[n], 0), after) for n in some])
            for some in ([0], [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])
        ]
        for event in events:
            wait(event)
        assert [rig.expected(Chunk(of_one, 0)) for of_one in ids] == [bytes(row) for row in rows]
        np.frombuffer(rig.memory, np.uint8)[:] = 0
        torch.cuda._sleep(2_000_000)
        after = rig.device.record()
        events = [
            rig.device.store([SlotCopy(slot, Chunk(of_one, 0), after)])
            for slot, of_one in zip(rig.slots, ids, strict=True)
        ]
        for event in events:
            wait(event)
        assert [rig.payload(n) for n in range(12)] == [bytes(row) for row in rows]
    rig.device.close()
