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
from py_kvcache.worker.gpublocks import Lane
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
    made._map, made._device = PageMap([Region(0, 4096, 4096)], 1), None
    made._checksum, made._blocks = False, None
    made._driver, made._context, made._entered = gpu, 0, threading.local()
    made._loads, made._moves, made._answers = (gpu.stream(name) for name in ("loads", "moves", "answers"))
    made._stores = {}
    made._memory = host_memory(1 << 20)
    return made


def copies(device: cuda.CudaDevice) -> list[SlotCopy]:
    return [SlotCopy(device._memory[:8192], Chunk(np.array([3]), 0), None)]


def test_a_load_whose_end_cannot_be_marked_raises_only_when_nothing_is_in_flight(gpu, device):
    gpu.no_events = True
    with pytest.raises(RuntimeError, match="out of memory"):
        device.load(copies(device))
    assert gpu.log == ["copy", "wait for loads", "wait for moves", "wait for answers"]


def test_the_first_error_is_told_though_a_stream_cannot_be_waited_for(gpu, device):
    gpu.no_events, gpu.broken = True, {"store"}
    with pytest.raises(RuntimeError, match="out of memory"):
        device.store(copies(device))
    assert gpu.log == ["copy", "wait for store", "wait for moves", "wait for answers"]


def test_a_device_that_failed_closes_and_keeps_the_memory_that_it_may_still_write(gpu, device, monkeypatch):
    kept: list[memoryview] = []
    monkeypatch.setattr(cuda, "_still_pinned", kept)
    memory, gpu.broken = device._memory, {"loads"}
    device.close()
    device.close()
    assert kept == [memory]
    assert gpu.log == ["wait for loads", "wait for moves", "wait for answers"]


def test_a_sound_device_waits_for_every_stream_and_unpins_once(gpu, device):
    device.store(copies(device))
    device.close()
    device.close()
    assert gpu.log == [
        "copy",
        "wait for loads",
        "wait for moves",
        "wait for answers",
        "wait for store",
        "unpin",
    ]


class Blocks:
    """Notes launches; its questions, payloads and answers are copies of one entry a block."""

    def __init__(self, gpu: Gpu, *, add: bool) -> None:
        self.gpu, self.add = gpu, add
        self.loads, self.stores = Lane(0, 4), Lane(4, 2)

    def asking(self, slots: list[int], buffers: list[int], block_ids: list[Any]) -> Copies:
        self.gpu.log.append(f"blocks {slots} in buffers {buffers}")
        return Copies(*(np.full(len(slots), 8, np.int64) for _ in range(3)))

    def payloads(self, buffers: list[int], slots: list[int]) -> Copies:
        return Copies(*(np.full(len(slots), 8, np.int64) for _ in range(3)))

    def answer(self, slots: list[int]) -> Copies:
        return Copies(*(np.full(len(slots) if self.add else 0, 8, np.int64) for _ in range(3)))

    def launch(self, slots: list[int], *, gather: bool) -> None:
        self.gpu.log.append(f"{'gather' if gather else 'spread'} {slots}")


@pytest.mark.parametrize("add", [True, False])
def test_whole_blocks_go_through_buffers_half_of_them_at_a_time_and_parts_page_by_page(gpu, device, add):
    device._map, device._blocks = PageMap([Region(0, 4096, 4096)], 2), Blocks(gpu, add=add)
    whole, part = Chunk(np.array([3, 4]), 0), Chunk(np.array([5]), 1)
    slots = [device._memory[n * 12288 : (n + 1) * 12288] for n in range(4)]
    answers = ["copy"] if add else []
    event = device.load([SlotCopy(slot, whole, None) for slot in slots[:3]])
    assert gpu.log == [
        "blocks [0, 1] in buffers [0, 1]", "copy", "spread [0, 1]", *answers,
        "blocks [3] in buffers [2]", "copy", "spread [3]", *answers,
    ]  # fmt: skip
    assert event._places == ([0, 1, 3] if add else [None] * 3)
    gpu.log.clear()
    device.store([SlotCopy(slots[1], whole, None)])
    assert gpu.log == ["blocks [1] in buffers [4]", "copy", "gather [1]", "copy"]
    gpu.log.clear()
    event = device.load([SlotCopy(slots[0], whole, None), SlotCopy(slots[1], part, None)])
    assert gpu.log == ["copy", "blocks [0] in buffers [3]", "copy", "spread [0]", *answers]
    assert event.sums(1) is None
    gpu.log.clear()
    assert device.load([SlotCopy(slots[0], part, None)]).sums(0) is None
    device.store([SlotCopy(slots[0], part, None)])
    assert gpu.log == ["copy", "copy"]


def test_a_buffer_is_filled_again_only_behind_the_event_that_ends_its_last_use():
    lane = Lane(4, 4)
    first, free = lane.take(2)
    assert (first, free) == ([4, 5], [])
    lane.busy(first, "a")
    second, free = lane.take(2)
    assert (second, free) == ([6, 7], [])
    lane.busy(second, "b")
    assert lane.take(1) == ([4], ["a"])
    assert lane.take(2) == ([5, 6], ["a", "b"])
    assert lane.take(2) == ([7, 4], ["b", "a"])
