"""`python -m py_kvcache.bench.copies`: slots to and from the pages of a GPU, alone and beside a prefill.

Every way moves the same blocks: 28 layers of 64 KiB pages, scattered over the KV memory, 28 MiB a block. One
contiguous copy is the link's own rate. Prints one JSON object; takes about 20 * rounds * seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from py_kvcache.bench.workspace import machine
from py_kvcache.worker.cuda import CudaDevice
from py_kvcache.worker.device import regions_of
from py_kvcache.worker.pages import Chunk, PageMap
from py_kvcache.worker.parts import SlotCopy

SCHEMA = "py-kvcache.bench.copies/1"
AHEAD = 8  # blocks under way: two for each lane, as when reads come faster than the link takes them


@dataclass(frozen=True)
class Shape:
    """KV memory and blocks: Llama 3.2 3B in fp16, 256 tokens a block, by default."""

    layers: int = 28
    page: int = 65536
    pages_per_block: int = 16
    blocks: int = 8192  # pages of one layer
    slots: int = 20

    @property
    def block_bytes(self) -> int:
        """Of one storage block."""
        return self.layers * self.page * self.pages_per_block


class Rig:
    """KV memory on the GPU, pinned slots, and the ways to copy between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        device = torch.device("cuda", torch.cuda.current_device())
        layers = [
            torch.zeros((shape.blocks, shape.page), dtype=torch.int8, device=device)
            for _ in range(shape.layers)
        ]
        kv = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=layer) for layer in layers],
            group_data_refs=[
                [SimpleNamespace(tensor_idx=n, page_size_bytes=shape.page) for n in range(shape.layers)]
            ],
        )
        self.map = PageMap(regions_of(kv, 0), shape.pages_per_block)
        self.device = CudaDevice(self.map, device)
        self.memory = self.device.allocate(shape.slots * shape.block_bytes)
        self.adding = CudaDevice(self.map, device, checksum=True)
        self.adding_memory = self.adding.allocate(shape.slots * shape.block_bytes)
        self.flat = torch.zeros(shape.block_bytes, dtype=torch.int8, device=device)
        self.stream = torch.cuda.Stream()
        self._kv, self._number = kv, 0
        self._order = np.random.default_rng(0).permutation(shape.blocks).astype(np.int64)

    def slot(self, number: int, memory: memoryview | None = None) -> memoryview:
        """One block of staging memory."""
        size = self.shape.block_bytes
        start = number % self.shape.slots * size
        return (self.memory if memory is None else memory)[start : start + size]

    def pages(self, number: int) -> Chunk:
        """Scattered pages, others for each block."""
        each = self.shape.pages_per_block
        start = number * each % (self.shape.blocks - each)
        return Chunk(self._order[start : start + each], 0)

    def ours(self, *, to_device: bool) -> Callable[[], Any]:
        """What the worker does with checksums off."""
        return self._through(self.device, self.memory, to_device)

    def checked(self, *, to_device: bool) -> Callable[[], Any] | None:
        """What the worker does with checksums on: the GPU adds each block up. None where it cannot."""
        if not self.adding.adds_up(self.pages(0)):
            return None
        return self._through(self.adding, self.adding_memory, to_device)

    def _through(self, device: CudaDevice, memory: memoryview, to_device: bool) -> Callable[[], Any]:
        way = device.load if to_device else device.store

        def launch() -> Any:
            self._number += 1
            return way([SlotCopy(self.slot(self._number, memory), self.pages(self._number), None)])

        return launch

    def contiguous(self, *, to_device: bool) -> Callable[[], Any]:
        """One copy of the same bytes: the link's rate."""

        def launch() -> Any:
            self._number += 1
            here = torch.from_numpy(np.frombuffer(self.slot(self._number), np.int8))
            with torch.cuda.stream(self.stream):
                if to_device:
                    self.flat.copy_(here, non_blocking=True)
                else:
                    here.copy_(self.flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            return SimpleNamespace(done=event.query)

        return launch

    def vllms(self, *, to_device: bool) -> Callable[[], Any] | None:
        """vLLM's batched swap op, None where there is no vLLM with it."""
        try:
            from vllm import _custom_ops
        except ImportError:
            return None
        if not hasattr(_custom_ops, "swap_blocks_batch"):
            return None

        def launch() -> Any:
            self._number += 1
            copy = SlotCopy(self.slot(self._number), self.pages(self._number), None)
            entries = self.device._entries(copy)
            there, here, lengths = (
                torch.from_numpy(np.ascontiguousarray(column, np.int64))
                for column in (entries.addresses, entries.offsets, entries.lengths)
            )
            source, target = (here, there) if to_device else (there, here)
            with torch.cuda.stream(self.stream):
                _custom_ops.swap_blocks_batch(source, target, lengths, is_src_access_order_any=to_device)
                event = torch.cuda.Event()
                event.record()
            return SimpleNamespace(done=event.query, keep=(source, target, lengths))

        return launch


class Prefill:
    """The kernels of a prefill of ``tokens`` tokens at Llama 3.2 3B's dimensions, some layers of it."""

    def __init__(self, tokens: int = 8192, layers: int = 28) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float16, device="cuda") * 0.02

        self.tokens, self.layers = tokens, layers
        self.x = weights(tokens, 3072)
        self.qkv, self.out = weights(3072, 5120), weights(3072, 3072)
        self.up, self.down = weights(3072, 16384), weights(8192, 3072)

    def launch(self) -> None:
        """Asynchronous, on the current stream."""
        for _ in range(self.layers):
            q, k, v = (self.x @ self.qkv).split([3072, 1024, 1024], dim=1)
            heads = [t.view(1, self.tokens, -1, 128).transpose(1, 2) for t in (q, k, v)]
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            y = mixed.transpose(1, 2).reshape(self.tokens, 3072) @ self.out
            gate, up = (y @ self.up).chunk(2, dim=1)
            torch.mm(torch.nn.functional.silu(gate) * up, self.down)


def pump(launch: Callable[[], Any], is_over: Callable[[], bool]) -> tuple[int, float, float]:
    """Keep AHEAD blocks under way until ``is_over``. Returns blocks, seconds, CPU seconds of this thread."""
    under_way: list[Any] = []
    blocks, begin, cpu = 0, time.perf_counter(), time.thread_time()
    while not is_over():
        under_way = [event for event in under_way if not event.done()]
        if len(under_way) < AHEAD:
            under_way.append(launch())
            blocks += 1
        else:
            time.sleep(0.0001)
    while under_way:
        under_way = [event for event in under_way if not event.done()]
    return blocks, time.perf_counter() - begin, time.thread_time() - cpu


def alone(launch: Callable[[], Any], seconds: float) -> tuple[int, float, float]:
    """For that long."""
    end = time.perf_counter() + seconds
    return pump(launch, lambda: time.perf_counter() >= end)


def prefill_seconds(prefill: Prefill, times: int, launch: Callable[[], Any] | None) -> tuple[float, int]:
    """GPU seconds of ``times`` prefills, and the blocks copied meanwhile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        prefill.launch()
    end.record()
    blocks = pump(launch, end.query)[0] if launch else 0
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, blocks


def measure(rig: Rig, prefill: Prefill, rounds: int, seconds: float) -> dict[str, Any]:
    """All ways in turns; medians over the rounds."""
    size = rig.shape.block_bytes
    ways: dict[str, Callable[[], Any]] = {}
    makers = {
        "contiguous": rig.contiguous, "ours": rig.ours, "ours_checked": rig.checked, "vllm_swap": rig.vllms
    }  # fmt: skip
    for name, make in makers.items():
        for to_device in (True, False):
            launch = make(to_device=to_device)
            if launch is not None:
                ways[f"{name}_{'h2d' if to_device else 'd2h'}"] = launch
    once, _ = prefill_seconds(prefill, 2, None)
    times = max(1, round(seconds / (once / 2)))
    found: dict[str, dict[str, list[float]]] = {
        name: {"alone_gb_s": [], "beside_gb_s": [], "slow_down": [], "cpu_ms_a_block": []} for name in ways
    }
    for number in range(rounds):
        quiet, _ = prefill_seconds(prefill, times, None)
        for name, launch in ways.items() if number % 2 == 0 else reversed(list(ways.items())):
            blocks, took, cpu = alone(launch, seconds)
            found[name]["alone_gb_s"].append(blocks * size / took / 1e9)
            found[name]["cpu_ms_a_block"].append(cpu / blocks * 1e3)
            busy, blocks = prefill_seconds(prefill, times, launch)
            found[name]["beside_gb_s"].append(blocks * size / busy / 1e9)
            found[name]["slow_down"].append(busy / quiet - 1)
    ways_found = {
        name: {what: round(statistics.median(values), 4) for what, values in one.items()}
        for name, one in found.items()
    }
    for name, one in ways_found.items():
        link = ways_found[f"contiguous_{name.rsplit('_', 1)[1]}"]["alone_gb_s"]
        one["alone_of_link"] = round(one["alone_gb_s"] / link, 4)
        one["beside_of_link"] = round(one["beside_gb_s"] / link, 4)
    return {"ways": ways_found, "prefill_s": round(once / 2, 5), "raw": found}


def main(arguments: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m py_kvcache.bench.copies", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one pass")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("py-kvcache bench copies: no CUDA device here", file=sys.stderr)
        return 2
    rig = Rig(Shape())
    report = {
        "schema": SCHEMA,
        "machine": {**machine("/"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
        "shape": {**asdict(rig.shape), "block_bytes": rig.shape.block_bytes},
        **measure(rig, Prefill(), given.rounds, given.seconds),
    }
    rig.device.close()
    rig.adding.close()
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
