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
from py_kvcache.worker.cudriver import Batch
from py_kvcache.worker.hostmemory import host_memory
from py_kvcache.worker.pages import Chunk, Copies, PageMap, Region
from py_kvcache.worker.parts import SlotCopy


class Gpu:
    """Streams, events and driver in one; notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.no_events = False
        self.broken: set[str] = set()
        self.happened = True
        self.made = 0

    def stream(self, name: str) -> Any:
        def synchronize() -> None:
            self.log.append(f"wait for {name}")
            if name in self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return SimpleNamespace(cuda_stream=name, synchronize=synchronize)

    def event(self) -> Any:
        self.made += 1

        def record(stream: Any) -> None:
            if self.no_events:
                raise RuntimeError("CUDA error: out of memory")

        return SimpleNamespace(record=record, cuda_event=9, query=lambda: self.happened)

    def copy(self, batch: Batch, stream: str) -> None:
        if batch.count:
            self.log.append(f"{stream}: copy {batch.count}")

    def wait_event(self, stream: str, event: str) -> None:
        self.log.append(f"{stream}: after {event}")

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
    made._loads, made._stores, made._spare = gpu.stream("loads"), {}, []
    made._lanes = {False: [], True: []}
    made._memory = host_memory(1 << 20)
    return made


def copies(device: cuda.CudaDevice) -> list[SlotCopy]:
    return [SlotCopy(device._memory[:8192], Chunk(np.array([3]), 0), None)]


def test_a_load_whose_end_cannot_be_marked_raises_only_when_nothing_is_in_flight(gpu, device):
    gpu.no_events = True
    with pytest.raises(RuntimeError, match="out of memory"):
        device.load(copies(device))
    assert gpu.log == ["loads: copy 1", "wait for loads"]


def test_the_first_error_is_told_though_a_stream_cannot_be_waited_for(gpu, device):
    gpu.no_events, gpu.broken = True, {"store"}
    with pytest.raises(RuntimeError, match="out of memory"):
        device.store(copies(device))
    assert gpu.log == ["store: copy 1", "wait for loads", "wait for store"]


def test_a_device_that_failed_closes_and_keeps_the_memory_that_it_may_still_write(gpu, device, monkeypatch):
    kept: list[memoryview] = []
    monkeypatch.setattr(cuda, "_still_pinned", kept)
    memory, gpu.broken = device._memory, {"loads"}
    device.close()
    device.close()
    assert kept == [memory]
    assert gpu.log == ["wait for loads"]


def test_a_sound_device_waits_for_every_stream_and_unpins_once(gpu, device):
    with_lanes(gpu, device, add=True)
    device.store([SlotCopy(device._memory[:8192], Chunk(np.array([5]), 1), None)])
    gpu.log.clear()
    device.close()
    device.close()
    assert gpu.log == [
        *(f"wait for {name}" for name in ("loads", "in 0", "in 1", "out 2", "out 3", "store")), "unpin",
    ]  # fmt: skip


class Blocks:
    """Notes questions and launches; each copy has as many entries as a real one."""

    def __init__(self, gpu: Gpu, *, add: bool) -> None:
        self.gpu, self.add = gpu, add

    def ask(self, place: int, buffer: int, block_ids: Any) -> None:
        self.gpu.log.append(f"slot {place}, buffer {buffer}, blocks {block_ids.tolist()}")

    def incoming(self, place: int, buffer: int, slot: int, *, payload: bool) -> Copies:
        return entries(1 + self.add + payload)

    def outgoing(self, place: int, buffer: int, slot: int, *, payload: bool) -> Copies:
        return entries(self.add + payload)

    def launch(self, place: int, stream: Any, *, gather: bool) -> None:
        self.gpu.log.append(f"{stream.cuda_stream}: {'gather' if gather else 'spread'} {place}")

    def take(self, place: int) -> str:
        return f"sums of {place}"


def entries(count: int) -> Copies:
    return Copies(*(np.full(count, 8, np.int64) for _ in range(3)))


def with_lanes(gpu: Gpu, device: cuda.CudaDevice, *, add: bool) -> None:
    device._map, device._blocks = PageMap([Region(0, 4096, 4096)], 2), Blocks(gpu, add=add)
    for gather, name, buffers in ((False, "in", (0, 1)), (True, "out", (2, 3))):
        device._lanes[gather] = [cuda._Lane(buffer, gpu.stream(f"{name} {buffer}")) for buffer in buffers]


def slots(device: cuda.CudaDevice, count: int) -> list[memoryview]:
    return [device._memory[n * 8200 : (n + 1) * 8200] for n in range(count)]


WHOLE, PART = Chunk(np.array([3, 4]), 0), Chunk(np.array([5]), 1)


@pytest.mark.parametrize("add", [True, False])
def test_whole_blocks_take_turns_on_the_lanes_of_their_direction_and_parts_go_page_by_page(gpu, device, add):
    with_lanes(gpu, device, add=add)
    room = slots(device, 3)
    event = device.load([SlotCopy(slot, WHOLE, None) for slot in room])
    trips = []
    for place, lane in ((0, 0), (1, 1), (2, 0)):
        trips += [f"slot {place}, buffer {lane}, blocks [3, 4]", f"in {lane}: copy {2 + add}"]
        trips += [f"in {lane}: spread {place}", *([f"in {lane}: copy 1"] if add else [])]
    assert gpu.log == trips
    assert [event.sums(n) for n in range(3)] == [f"sums of {n}" if add else None for n in range(3)]
    gpu.log.clear()
    device.store([SlotCopy(room[1], WHOLE, None)])
    assert gpu.log == [
        "slot 1, buffer 2, blocks [3, 4]", f"out 2: copy {1 + add}",
        "out 2: gather 1", f"out 2: copy {1 + add}",
    ]  # fmt: skip
    gpu.log.clear()
    event = device.load([SlotCopy(room[1], PART, None), SlotCopy(room[0], WHOLE, None)])
    assert [line for line in gpu.log if "copy" in line][-1] == "loads: copy 1"
    assert [event.sums(n) for n in range(2)] == [None, "sums of 0" if add else None]


def test_a_batch_has_ended_when_all_its_lanes_have_and_its_events_are_used_again(gpu, device):
    with_lanes(gpu, device, add=True)
    gpu.happened = False
    batch = [SlotCopy(slot, WHOLE, None) for slot in slots(device, 5)]
    event = device.load(batch)
    assert gpu.made == 2, "one for each lane, not for each block"
    assert not event.done()
    gpu.happened = True
    assert event.done() and event.done()
    device.load(batch)
    assert gpu.made == 2


def test_a_lane_that_is_stopped_gets_no_more_than_it_must(gpu, device):
    with_lanes(gpu, device, add=False)
    one, two, three = (SlotCopy(slot, WHOLE, None) for slot in slots(device, 3))
    stopped = [device.store([one])]
    gpu.happened = False
    for copy in (two, three, two, three):
        gpu.log.clear()
        event = device.store([copy])
        assert gpu.log[0].startswith(f"slot {1 if copy is two else 2}, buffer 3"), "while 2 is stopped"
        gpu.happened = True
        assert event.done()
        gpu.happened = False
    # Also where both have one; only with more would a block wait longer there.
    events = [device.store([copy]) for copy in (two, three)]
    assert [lane.queued for lane in device._lanes[True]] == [1, 2]
    events.append(device.store([two]))
    assert [lane.queued for lane in device._lanes[True]] == [2, 2]
    gpu.happened = True
    assert all(event.done() for event in stopped + events)
    assert [lane.queued for lane in device._lanes[True]] == [0, 0]


def test_pages_are_written_behind_their_last_owner_but_buffers_are_filled_before(gpu, device):
    with_lanes(gpu, device, add=False)
    first, second = (SimpleNamespace(cuda_event=name) for name in ("A", "B"))
    room = slots(device, 5)
    for slot, after in zip(room, (first, first, first, second, first), strict=True):
        device.load([SlotCopy(slot, WHOLE, after)])
    assert [line for line in gpu.log if line.startswith("in 0")] == [
        "in 0: copy 2", "in 0: after A", "in 0: spread 0",
        "in 0: copy 2", "in 0: spread 2",  # a stream waits for good
        "in 0: copy 2", "in 0: spread 4",
    ]  # fmt: skip
    assert [line for line in gpu.log if line.startswith("in 1")] == [
        "in 1: copy 2", "in 1: after A", "in 1: spread 1", "in 1: copy 2", "in 1: after B", "in 1: spread 3",
    ]  # fmt: skip


def test_a_launch_that_fails_waits_for_the_blocks_before_it(gpu, device, monkeypatch):
    with_lanes(gpu, device, add=False)

    def fail(place: int, stream: Any, *, gather: bool) -> None:
        if place == 1:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(device._blocks, "launch", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        device.load([SlotCopy(slot, WHOLE, None) for slot in slots(device, 2)])
    assert gpu.log[-5:] == [f"wait for {name}" for name in ("loads", "in 0", "in 1", "out 2", "out 3")]
    assert [lane.queued for lane in device._lanes[False]] == [0, 0]
