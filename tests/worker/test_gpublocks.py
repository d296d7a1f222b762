"""The kernel that moves blocks and adds them up, run by Triton's interpreter; on a GPU: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

# In a process of its own: Triton decides when it is imported whether it interprets.
SCRIPT = """
import ctypes
import numpy as np, torch
from py_kvcache.digest import sums_of
from py_kvcache.worker.gpublocks import GpuBlocks
from py_kvcache.worker.pages import PageMap, Region

def copy(entries, *, back=False):
    columns = (entries.addresses, entries.offsets, entries.lengths)
    for there, here, length in zip(*(column.tolist() for column in columns)):
        ctypes.memmove(*((here, there) if back else (there, here)), length)

cpu = torch.device("cpu")
state = torch.random.get_rng_state()
for add in (True, False):
    GpuBlocks.prove(cpu, add=add)
assert torch.equal(torch.random.get_rng_state(), state), "vLLM's random numbers are others now"
random = np.random.default_rng(3)
for pages, gap, per_chunk, add in (
    ([4096], 0, 1, True), ([8192, 8192], 4096, 3, True), ([69632, 4096, 65536], 8, 2, True),
    ([8192] * 2, 8, 3, False),
):
    tensors = [random.integers(-(1 << 63), 1 << 63, (9 * (page + gap)) // 8, np.int64) for page in pages]
    regions = [Region(t.ctypes.data, page + gap, page) for t, page in zip(tensors, pages)]
    def payload(ids):
        return b"".join(
            t.tobytes()[b * (page + gap) : b * (page + gap) + page]
            for t, page in zip(tensors, pages)
            for b in ids
        )
    blocks = GpuBlocks(regions, per_chunk, 4, cpu, add=add)
    # What a sleep of the engine leaves of memory from vLLM's pool: anything.
    for memory in (blocks._sums, blocks._asked, blocks._buffers):
        memory.fill_(0x4141414141414141)
    ids, places = random.permutation(9)[: 3 * per_chunk].reshape(3, per_chunk), [3, 0, 1]
    wanted = [payload(of_one) for of_one in ids]
    host = np.zeros((3, blocks.block_bytes), np.uint8)

    def trip(n, buffer, *, gather):
        slot = host[n].ctypes.data
        blocks.ask(places[n], buffer, ids[n])
        copy(blocks.incoming(places[n], buffer, slot, payload=not gather))
        blocks.launch(places[n], None, gather=gather)
        copy(blocks.outgoing(places[n], buffer, slot, payload=gather), back=True)

    for n, buffer in enumerate([*blocks.stores, blocks.stores[0]][-3:]):
        trip(n, buffer, gather=True)
    assert [bytes(row) for row in host] == wanted
    assert not add or [blocks.take(place) for place in places] == [sums_of(one) for one in wanted]

    before = [t.copy() for t in tensors]
    host[:] = random.integers(0, 256, host.shape, np.uint8)
    for n, buffer in enumerate([blocks.loads[0], blocks.loads[1], blocks.loads[0]]):
        trip(n, buffer, gather=False)
    assert [payload(of_one) for of_one in ids] == [bytes(row) for row in host]
    assert not add or [blocks.take(place) for place in places] == [sums_of(bytes(row)) for row in host]
    others = np.setdiff1d(np.arange(9), ids)
    for t, old, page in zip(tensors, before, pages):
        for b in others:
            at = slice(b * (page + gap) // 8, (b + 1) * (page + gap) // 8)
            assert np.array_equal(t[at], old[at]), "a block that was not asked for"
        for b in ids.ravel():
            at = slice((b * (page + gap) + page) // 8, (b + 1) * (page + gap) // 8)
            assert np.array_equal(t[at], old[at]), "bytes between two pages"
for bad in (Region(4096, 4100, 4100), Region(4, 4096, 4096), Region(0, 4100, 4096)):
    try:
        GpuBlocks([bad], 1, 1, cpu, add=True)
    except ValueError as error:
        assert "4096" in str(error)
    else:
        raise AssertionError(bad)
few, many = (GpuBlocks([Region(0, 4096, 4096)], 16, slots, cpu, add=True) for slots in (100, 1000))
assert many._asked.numel() == 10 * few._asked.numel(), "memory by the slot"
assert many._buffers.numel() == few._buffers.numel(), "buffers by what the link needs, not by the slots"
print("equal")
"""


def test_the_kernel_moves_what_was_asked_for_and_adds_up_what_the_cpu_does():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "connector")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from py_kvcache.worker.gpublocks import _move

pointers = ("asked", "regions", "buffers", "sums")
numbers = ("per_chunk", "words_of_block", "words_of_sums", "rows_of_block")
for capability, gather, add in ((80, True, False), (90, True, True), (100, False, True)):
    constants = {"gather": gather, "add": add, "some": 16, "words": 512}
    signature = {
        **dict.fromkeys(pointers, "*i64"), **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(fn=_move, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(capability, (made.asm["ptx"].count("atom.") > 0) == add, len(made.asm["cubin"]) > 0)
"""


def test_the_kernel_compiles_for_gpus_though_there_is_none(tmp_path):
    env = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2] / "connector"),
    }
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=300
    )
    good = [f"{capability} True True" for capability in (80, 90, 100)]
    assert done.stdout.splitlines() == good, done.stderr[-2000:]
