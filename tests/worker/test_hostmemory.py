"""Staging memory: zeroed, aligned, private, and on huge pages where the kernel has them."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from py_kvcache.errors import KvCacheError
from py_kvcache.worker import hostmemory
from py_kvcache.worker.hostmemory import HUGE_PAGE, address_of, host_memory


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is not mapped")


def test_it_is_zeroed_writable_and_as_long_as_asked():
    memory = host_memory(3 * HUGE_PAGE + 12345)
    assert (len(memory), memory.itemsize, memory.ndim, memory.readonly) == (
        3 * HUGE_PAGE + 12345,
        1,
        1,
        False,
    )
    assert not any(memory)
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1])
def test_it_is_aligned_to_huge_pages_whatever_its_length(nbytes: int):
    assert address_of(host_memory(nbytes)) % HUGE_PAGE == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without transparent huge pages"
)
def test_the_kernel_is_asked_for_huge_pages_of_private_memory():
    memory = host_memory(2 * HUGE_PAGE)
    flags = flags_of(address_of(memory))
    assert "hg" in flags
    assert "sh" not in flags, "shared memory is a tmpfs file, for which huge pages are mostly off"


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch):
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, os.strerror(22))

    monkeypatch.setattr(hostmemory.mmap, "mmap", Plain)
    memory = host_memory(HUGE_PAGE)
    assert address_of(memory) % HUGE_PAGE == 0
    assert not any(memory)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_more_than_there_is_gives_one_error_with_the_remedy(nbytes: int):
    with pytest.raises(
        KvCacheError,
        match=r"no [0-9]+ MiB for staging: .*; set memory_bytes, staging_bytes or io_depth lower",
    ):
        host_memory(nbytes)
