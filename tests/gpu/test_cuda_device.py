"""Copies between pinned slots and the memory of a real GPU, byte for byte. Skipped without one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("torch", reason="the CUDA device is built on torch")

import torch
from rig import Rig, wait

from py_kvcache.errors import KvCacheError
from py_kvcache.worker import cuda, cudriver
from py_kvcache.worker.hostmemory import address_of
from py_kvcache.worker.pages import Chunk
from py_kvcache.worker.parts import SlotCopy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCKS = 12


def make(pages: list[int], gap: int = 0) -> Rig:
    return Rig(pages, 3, gap, blocks=BLOCKS, slots=3, tail=17)


@pytest.fixture(
    params=[
        ([64, 64], 0),
        ([65536] * 4, 0),
        ([8192, 4096], 4096),
        ([1000, 1000, 1000], 0),
        ([96, 8, 33], 0),
        ([64, 64], 32),
    ],
    ids=str,
)
def rig(request: pytest.FixtureRequest):
    rig = make(*request.param)
    yield rig
    rig.device.close()


@pytest.mark.parametrize("ids", [[7, 2, 11], [4, 5, 6], [1, 2, 0]], ids=str)
def test_a_store_puts_the_pages_into_the_slot_layer_by_layer_and_touches_no_byte_more(
    rig: Rig, ids: list[int]
):
    chunk = Chunk(np.array(ids), 0)
    wait(rig.device.store([SlotCopy(rig.slots[1], chunk, rig.device.record())]))
    assert bytes(rig.slots[1][: rig.map.payload_bytes]) == rig.expected(chunk)
    assert bytes(rig.slots[1][rig.map.payload_bytes :]) == bytes(17)
    assert not any(rig.slots[0]) and not any(rig.slots[2])


def test_a_load_of_several_slots_is_one_batch_and_touches_no_other_block(rig: Rig):
    before = [tensor.tensor.clone() for tensor in rig.kv.tensors]
    sources = [Chunk(np.array([0, 1, 2]), 0), Chunk(np.array([3, 8, 10]), 0)]
    targets = [Chunk(np.array([9, 4, 6]), 0), Chunk(np.array([11, 5]), 1)]
    for slot, source in zip(rig.slots, sources, strict=False):
        wait(rig.device.store([SlotCopy(slot, source, rig.device.record())]))
    event = rig.device.record()
    copies = [SlotCopy(slot, target, event) for slot, target in zip(rig.slots, targets, strict=False)]
    wait(rig.device.load(copies))
    origin = {9: 0, 4: 1, 6: 2, 11: 8, 5: 10}
    for tensor, old in zip(rig.kv.tensors, before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(tensor.tensor[block], old[origin.get(block, block)]), block


def test_a_store_waits_for_the_kernels_before_its_event():
    rig = make([1 << 20] * 2)
    torch.cuda._sleep(200_000_000)  # about 0.1 s of GPU time, on vLLM's stream
    for tensor in rig.kv.tensors:
        tensor.tensor.fill_(77)
    event = rig.device.store([SlotCopy(rig.slots[0], Chunk(np.array([1, 2, 3]), 0), rig.device.record())])
    wait(event)
    assert set(bytes(rig.slots[0][: rig.map.payload_bytes])) == {77}
    rig.device.close()


def test_a_load_waits_for_the_last_owner_of_its_blocks():
    rig = make([1 << 20] * 2)
    np.frombuffer(rig.slots[0], np.uint8)[:] = 5
    torch.cuda._sleep(200_000_000)
    for tensor in rig.kv.tensors:
        tensor.tensor.fill_(77)
    wait(rig.device.load([SlotCopy(rig.slots[0], Chunk(np.array([1, 2, 3]), 0), rig.device.record())]))
    torch.cuda.synchronize()
    for tensor in rig.kv.tensors:
        assert set(tensor.tensor[1:4].flatten().tolist()) == {5}
        assert set(tensor.tensor[4].tolist()) == {77}
    rig.device.close()


def test_a_copy_from_another_thread_uses_the_same_context():
    rig, seen = make([64, 64]), []
    chunk = Chunk(np.array([7, 2, 11]), 0)
    after = rig.device.record()

    def work() -> None:
        wait(rig.device.store([SlotCopy(rig.slots[0], chunk, after)]))
        seen.append(bytes(rig.slots[0][: rig.map.payload_bytes]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [rig.expected(chunk)]
    rig.device.close()


def test_staging_memory_is_pinned_until_close_and_closing_twice_is_fine():
    rig = make([64, 64])
    driver, address, nbytes = rig.device._driver, address_of(rig.memory), len(rig.memory)
    assert torch.from_numpy(np.frombuffer(rig.memory, np.uint8)).is_pinned()
    with pytest.raises(cudriver.DriverError, match="cuMemHostRegister"):
        driver.pin(address, nbytes)  # it is already
    rig.device.close()
    rig.device.close()
    driver.pin(address, nbytes)
    driver.unpin(address)


def test_more_than_can_be_pinned_is_one_error_with_the_remedy_and_torch_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    rig = make([64, 64])
    monkeypatch.setattr(cuda, "host_memory", lambda nbytes: rig.memory)  # pinned already: CUDA refuses
    with pytest.raises(KvCacheError, match=r"cannot be pinned: cuMemHostRegister.+; set memory_bytes"):
        rig.device.allocate(len(rig.memory))
    assert int(torch.zeros(1, device="cuda").add_(1)) == 1
    rig.device.close()
