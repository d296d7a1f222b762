"""What doctor says about vLLM, GPU, Triton and huge pages."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from py_kvcache.tools import doctor_engine
from py_kvcache.tools.checks import Status
from py_kvcache.tools.doctor_engine import Gpus, check_gpu, check_huge_pages, check_triton, check_vllm


class FakeDriver:
    """libcuda with this many GPUs; without batched copies when it is older than 12.8."""

    def __init__(self, count: int, version: int = 13000, init: int = 0) -> None:
        self.count, self.version, self.init = count, version, init

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return self.init

    def cuDriverGetVersion(self, into: Any) -> int:  # noqa: N802
        into._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, into: Any) -> int:  # noqa: N802
        into._obj.value = self.count
        return 0

    def cuDeviceGet(self, into: Any, number: int) -> int:  # noqa: N802
        into._obj.value = number
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: Any) -> int:  # noqa: N802
        buffer.value = b"NVIDIA H200"
        return 0

    def cuGetProcAddress_v2(self, name: bytes, into: Any, *_: Any) -> int:  # noqa: N802
        if self.version >= 12080:
            into._obj.value = ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0), ctypes.c_void_p).value
        return 0


def test_gpus_are_named_with_the_drivers_version() -> None:
    check = check_gpu(Gpus(FakeDriver(2)))
    assert (check.status, check.text) == (Status.OK, "2 x NVIDIA H200, driver for CUDA 13.0")


def test_a_driver_without_batched_copies_is_a_problem() -> None:
    check = check_gpu(Gpus(FakeDriver(1, version=12040)))
    assert check.status is Status.PROBLEM
    assert "570" in check.text and check.remedy


@pytest.mark.parametrize(
    ("driver", "said"), [(FakeDriver(0), "no GPU"), (FakeDriver(1, init=100), "no GPU"),
                         (FakeDriver(1, init=999), "CUDA error 999")],
)  # fmt: skip
def test_without_a_gpu_it_is_a_cpu_engine_and_that_is_no_problem(driver: FakeDriver, said: str) -> None:
    check = check_gpu(Gpus(driver))
    assert check.status is Status.NOTE
    assert said in check.text


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.26.0", Status.OK), ("0.33.1+cpu", Status.OK), ("0.25.9", Status.PROBLEM),
     ("0.34.0rc1", Status.PROBLEM), ("1.0.0", Status.PROBLEM), ("dev", Status.PROBLEM), (None, Status.NOTE)],
)  # fmt: skip
def test_only_supported_versions_of_vllm_are_good(version: str | None, status: Status) -> None:
    check = check_vllm(version)
    assert check.status is status
    assert status is Status.OK or "0.26 to 0.33" in check.remedy or version is None


def test_the_vllm_that_is_installed_is_the_one_that_would_be_imported() -> None:
    vllm = pytest.importorskip("vllm")
    assert doctor_engine.installed_vllm() == vllm.__version__


def test_without_triton_or_huge_pages_it_is_slower() -> None:
    assert check_triton(True).status is check_huge_pages("madvise").status is Status.OK
    for check in (check_triton(False), check_huge_pages("never"), check_huge_pages("")):
        assert check.status is Status.SLOW
        assert check.remedy
