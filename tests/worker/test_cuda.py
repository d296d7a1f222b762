"""What the CUDA device does when the driver fails; with a driver that is not NVIDIA's."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the CUDA device is built on torch")

from py_kvcache.worker import cuda
from py_kvcache.worker.hostmemory import host_memory
from py_kvcache.worker.pages import Chunk, Copies, PageMap, Region
from py_kvcache.worker.parts import SlotCopy


class Gpu:
    """Streams, events and driver in one; notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.no_events = False
        self.broken: set[str] = set()

    def stream(self, name: str) -> Any:
        def synchronize() -> None:
            self.log.append(f"wait for {name}")
            if name in self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return SimpleNamespace(cuda_stream=7, synchronize=synchronize)

    def event(self) -> Any:
        def record(stream: Any) -> None:
            if self.no_events:
                raise RuntimeError("CUDA error: out of memory")

        return SimpleNamespace(record=record, cuda_event=9, query=lambda: True)

    def copy_batch(self, *arguments: Any) -> None:
        self.log.append("copy")

    def wait_event(self, stream: int, event: int) -> None:
        return None

    def unpin(self, address: int) -> None:
        self.log.append("unpin")

    def enter(self, context: int) -> None:
        return None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    torch = SimpleNamespace(
        stream=contextlib.nullcontext,
        Event=made.event,
        set_device=lambda device: None,
        Stream=lambda *a, **k: made.stream("store"),
    )
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=torch))
    return made


@pytest.fixture
def device(gpu: Gpu) -> cuda.CudaDevice:
    made = object.__new__(cuda.CudaDevice)
    made._map, made._device, made._checksum, made._adder = (
        PageMap([Region(0, 4096, 4096)], 1),
        None,
        False,
        None,
    )
    made._driver, made._context, made._entered = gpu, 0, threading.local()
    made._loads, made._checks, made._stores = gpu.stream("loads"), gpu.stream("checks"), {}
    made._memory = host_memory(1 << 20)
    return made


def copies(device: cuda.CudaDevice) -> list[SlotCopy]:
    return [SlotCopy(device._memory[:8192], Chunk(np.array([3]), 0), None)]


def test_a_load_whose_end_cannot_be_marked_raises_only_when_nothing_is_in_flight(gpu, device):
    gpu.no_events = True
    with pytest.raises(RuntimeError, match="out of memory"):
        device.load(copies(device))
    assert gpu.log == ["copy", "wait for loads", "wait for checks"]


def test_the_first_error_is_told_though_a_stream_cannot_be_waited_for(gpu, device):
    gpu.no_events, gpu.broken = True, {"store"}
    with pytest.raises(RuntimeError, match="out of memory"):
        device.store(copies(device))
    assert gpu.log == ["copy", "wait for store", "wait for checks"]


def test_a_device_that_failed_closes_and_keeps_the_memory_that_it_may_still_write(gpu, device, monkeypatch):
    kept: list[memoryview] = []
    monkeypatch.setattr(cuda, "_still_pinned", kept)
    memory, gpu.broken = device._memory, {"loads"}
    device.close()
    device.close()
    assert kept == [memory]
    assert gpu.log == ["wait for loads", "wait for checks"]


def test_a_sound_device_waits_for_every_stream_and_unpins_once(gpu, device):
    device.store(copies(device))
    device.close()
    device.close()
    assert gpu.log == ["copy", "wait for loads", "wait for checks", "wait for store", "unpin"]


class Adder:
    """Notes launches; its questions and answers are copies of one entry."""

    most_blocks = 2

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def asking(self, slots: list[int], block_ids: list[Any]) -> Copies:
        return Copies(*(np.full(len(slots), 8, np.int64) for _ in range(3)))

    def answer(self, slots: list[int]) -> Copies:
        return self.asking(slots, [])

    def launch(self, slots: list[int]) -> None:
        self.gpu.log.append(f"add up {slots}")


def test_loads_are_added_up_behind_their_pages_and_stores_before_in_groups_and_parts_not_at_all(gpu, device):
    device._map, device._adder = PageMap([Region(0, 4096, 4096)], 2), Adder(gpu)
    whole, part = Chunk(np.array([3, 4]), 0), Chunk(np.array([5]), 1)
    slots = [device._memory[n * 12288 : (n + 1) * 12288] for n in range(4)]
    event = device.load([SlotCopy(slot, whole, None) for slot in slots[:3]])
    assert gpu.log == ["copy", "add up [0, 1]", "add up [3]", "copy"]
    assert event._places == [0, 1, 3]
    gpu.log.clear()
    device.store([SlotCopy(slots[1], whole, None)])
    assert gpu.log == ["copy", "add up [1]", "copy"]
    gpu.log.clear()
    assert device.load([SlotCopy(slots[0], part, None)]).sums(0) is None
    device.store([SlotCopy(slots[0], part, None)])
    assert gpu.log == ["copy", "copy"]
