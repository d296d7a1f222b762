"""The kernel that adds blocks up, run by Triton's interpreter; on a GPU: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

# In a process of its own: Triton decides when it is imported whether it interprets.
SCRIPT = """
import numpy as np, torch
from py_kvcache.digest import sums_of
from py_kvcache.worker.gpusums import GpuSums
from py_kvcache.worker.pages import PageMap, Region

cpu = torch.device("cpu")
state = torch.random.get_rng_state()
GpuSums.prove(cpu)
assert torch.equal(torch.random.get_rng_state(), state), "vLLM's random numbers are others now"
random = np.random.default_rng(3)
for pages, gap, per_chunk in (([4096], 0, 1), ([8192, 8192], 4096, 3), ([69632, 4096, 65536], 8, 2)):
    tensors = [random.integers(-(1 << 63), 1 << 63, (9 * (page + gap)) // 8, np.int64) for page in pages]
    regions = [Region(t.ctypes.data, page + gap, page) for t, page in zip(tensors, pages)]
    adder = GpuSums(regions, per_chunk, 4, cpu)
    ids = [random.permutation(9)[:per_chunk] for _ in range(3)]
    slots = [3, 0, 1]
    # What a sleep of the engine leaves of memory from vLLM's pool: anything.
    adder._sums.fill_(77)
    adder._asked.fill_(0x4141414141414141)
    copies = adder.asking(slots, ids)
    import ctypes
    for to, source, length in zip(*(c.tolist() for c in (copies.addresses, copies.offsets, copies.lengths))):
        ctypes.memmove(to, source, length)
    adder.launch(slots)
    copies = adder.answer(slots)
    for source, to, length in zip(*(c.tolist() for c in (copies.addresses, copies.offsets, copies.lengths))):
        ctypes.memmove(to, source, length)
    for slot, blocks in zip(slots, ids):
        payload = b"".join(
            t.tobytes()[b * (page + gap) : b * (page + gap) + page]
            for t, page in zip(tensors, pages)
            for b in blocks
        )
        assert adder.take(slot) == sums_of(payload), (pages, slot)
for bad in (Region(4096, 4100, 4100), Region(4, 4096, 4096), Region(0, 4100, 4096)):
    try:
        GpuSums([bad], 1, 1, cpu)
    except ValueError as error:
        assert "4096" in str(error)
    else:
        raise AssertionError(bad)
few, many = (GpuSums([Region(0, 4096, 4096)], 16, slots, cpu) for slots in (100, 1000))
assert many._asked.numel() == 10 * few._asked.numel(), "memory by the slot, not by its square"
print("equal")
"""


def test_the_kernel_adds_up_what_the_cpu_does_for_pages_of_any_size_and_stride():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "connector")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from py_kvcache.worker.gpusums import _add_up

pointers, numbers = ("asked", "regions", "sums"), ("per_chunk", "words_of_one", "rows_of_one")
constants = {"some": 16, "words": 512}
signature = {
    **dict.fromkeys(pointers, "*i64"), **dict.fromkeys(numbers, "i32"),
    **dict.fromkeys(constants, "constexpr"),
}
source = ASTSource(fn=_add_up, signature=signature, constexprs=constants)
for capability in (80, 90, 100):
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(capability, made.asm["ptx"].count("atom.") > 0, len(made.asm["cubin"]) > 0)
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
    assert done.stdout.splitlines() == [f"{n} True True" for n in (80, 90, 100)], done.stderr[-2000:]
