"""A few functions of the CUDA driver, by ctypes: no compiler is needed.

Signatures are those of CUDA 12.8, which cuGetProcAddress gives on every later driver too.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py_kvcache.worker.pages import Ints

_ABI = 12080
_LIBRARY = "libcuda.so.1"
# A call takes about 1 us an entry. To release the GIL for it can cost 5 ms, if a thread of vLLM's takes it;
# so only batches that would keep vLLM waiting do.
_RELEASE_FROM = 100
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE


class DriverError(RuntimeError):
    """What the driver answered, in its words."""


class Access(IntEnum):
    """CUmemcpySrcAccessOrder: when the source may be read."""

    STREAM = 1
    ANY = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for managed memory and stay 0."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class Batch:
    """What one call copies, with the driver's pointers made once: a block's trip is the same every time.

    Args:
        targets, sources, lengths: contiguous arrays of 64-bit integers, addresses and bytes. They stay as
            they are, and the batch alive, until the copies have ended.
        order: when the sources may be read.
    """

    __slots__ = ("_keep", "count", "order", "pointers")

    def __init__(self, targets: Ints, sources: Ints, lengths: Ints, order: Access) -> None:
        self._keep = targets, sources, lengths
        self.count, self.order = len(lengths), order
        self.pointers = tuple(ctypes.c_void_p(array.ctypes.data) for array in self._keep)


class Driver:
    """Any thread may call; copies and ``current_context`` use the calling thread's context.

    Raises:
        DriverError: no driver, or one older than 12.8 (which has no batched copies).
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._lib: Any = ctypes.CDLL(_LIBRARY) if library is None else library
            self._quick: Any = ctypes.PyDLL(_LIBRARY) if library is None else library  # keeps the GIL
        except OSError as error:
            raise DriverError(f"{_LIBRARY} cannot be loaded: {error}") from error
        address = self._find(b"cuMemcpyBatchAsync")
        self._copy = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        self._copy_few = ctypes.PYFUNCTYPE(ctypes.c_int)(address)  # keeps the GIL
        self._held = {order: _Attributes(order=int(order)) for order in Access}, ctypes.c_size_t(0)
        self._attributes = {order: ctypes.byref(made) for order, made in self._held[0].items()}
        self._zero = ctypes.byref(self._held[1])  # one set of attributes, from entry 0 on

    def current_context(self) -> int:
        """Of the calling thread."""
        context = ctypes.c_void_p()
        self._check(self._lib.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if not context.value:
            raise DriverError("this thread has no CUDA context")
        return context.value

    def enter(self, context: int) -> None:
        """Make it the calling thread's."""
        self._check(self._lib.cuCtxSetCurrent(ctypes.c_void_p(context)), "cuCtxSetCurrent")

    def pin(self, address: int, nbytes: int) -> None:
        """Lock memory for the GPU, for every context of the process.

        By the driver, not the runtime: that keeps an error until torch's next call, which then fails with it.
        """
        code = self._lib.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        )
        self._check(code, "cuMemHostRegister")

    def unpin(self, address: int) -> None:
        """Undo ``pin``; waits for copies."""
        self._check(self._lib.cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")

    def wait_event(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on waits for the event; the caller does not."""
        code = self._quick.cuStreamWaitEvent(
            ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0)
        )
        self._check(code, "cuStreamWaitEvent")

    def copy(self, batch: Batch, stream: int) -> None:
        """Queue the copies on a stream (not the default one)."""
        if not batch.count:
            return
        failed = ctypes.c_size_t(0)
        copy = self._copy if batch.count >= _RELEASE_FROM else self._copy_few
        code = copy(
            *batch.pointers,
            ctypes.c_size_t(batch.count),
            self._attributes[batch.order],
            self._zero,
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        if code:
            self._check(code, f"cuMemcpyBatchAsync of {batch.count} pieces")

    def _find(self, name: bytes) -> int:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._lib.cuGetProcAddress_v2(
            name, ctypes.byref(address), _ABI, ctypes.c_uint64(0), ctypes.byref(status)
        )
        if code or not address.value:
            raise DriverError(
                f"the NVIDIA driver has no {name.decode()}: version 570 (CUDA 12.8) or later is needed"
            )
        return address.value

    def _check(self, code: int, what: str) -> None:
        if not code:
            return
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        raise DriverError(f"{what}: {said} (CUDA error {code})")
