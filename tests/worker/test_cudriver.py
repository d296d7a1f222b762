"""The driver's functions as C sees them, behind a library that is not NVIDIA's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from py_kvcache.worker.cudriver import Access, Batch, Driver, DriverError

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)


class Library:
    """libcuda with a copy function that notes what it was given and then answers ``code``."""

    def __init__(self, code: int = 0, context: int = 77, has_batches: bool = True) -> None:
        self.code, self.context, self.has_batches = code, context, has_batches
        self.copies: list[tuple[Any, ...]] = []
        self.entered: list[int] = []
        self.pinned: list[Any] = []
        self.waits: list[Any] = []
        self._callback = _BATCH(self._copy)

    def _copy(
        self, to: int, source: int, sizes: int, count: int, what: int, which: int, sets: int, *rest: int
    ):
        def numbers(address: int) -> list[int]:
            return list((ctypes.c_uint64 * count).from_address(address))

        order = ctypes.c_int.from_address(what).value
        first = ctypes.c_size_t.from_address(which).value
        self.copies.append((numbers(to), numbers(source), numbers(sizes), order, first, sets, rest[1]))
        return self.code

    def cuGetProcAddress_v2(self, name: bytes, address: Any, abi: int, flags: Any, status: Any) -> int:  # noqa: N802
        assert (name, abi) == (b"cuMemcpyBatchAsync", 12080)
        if self.has_batches:
            address._obj.value = ctypes.cast(self._callback, _POINTER).value
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.entered.append(context.value)
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:  # noqa: N802
        self.waits.append((stream.value, event.value, flags.value))
        return self.code

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:  # noqa: N802
        self.pinned.append((address.value, nbytes.value, flags.value))
        return self.code

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        self.pinned.append(address.value)
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid argument" if code == 1 else None
        return 0


def arrays(*columns: list[int]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in columns]


@pytest.mark.parametrize(("order", "number"), [(Access.STREAM, 1), (Access.ANY, 3)])
def test_a_batch_reaches_the_driver_entry_by_entry_with_one_set_of_attributes(order: Access, number: int):
    library = Library()
    Driver(library).copy(Batch(*arrays([1 << 40, 5], [7, 1 << 46], [65536, 3]), order), 0xABC)
    assert library.copies == [([1 << 40, 5], [7, 1 << 46], [65536, 3], number, 0, 1, 0xABC)]


def test_a_batch_of_many_entries_is_one_call():
    library, count = Library(), 448
    columns = [list(range(start, start + count)) for start in (1 << 40, 1 << 30, 1)]
    Driver(library).copy(Batch(*arrays(*columns), Access.ANY), 1)
    assert library.copies == [(*columns, 3, 0, 1, 1)]


def test_an_empty_batch_is_no_call():
    library = Library()
    Driver(library).copy(Batch(*arrays([], [], []), Access.ANY), 1)
    assert library.copies == []


def test_a_refused_batch_says_the_drivers_words_and_number():
    with pytest.raises(
        DriverError, match=r"^cuMemcpyBatchAsync of 2 pieces: invalid argument \(CUDA error 1\)$"
    ):
        Driver(Library(code=1)).copy(Batch(*arrays([1, 2], [3, 4], [5, 6]), Access.ANY), 1)
    with pytest.raises(DriverError, match=r"unknown \(CUDA error 999\)"):
        Driver(Library(code=999)).copy(Batch(*arrays([1], [3], [5]), Access.ANY), 1)


def test_memory_is_pinned_for_every_context_and_unpinned_by_its_address():
    library = Library()
    driver = Driver(library)
    driver.pin(1 << 40, 1 << 30)
    driver.unpin(1 << 40)
    assert library.pinned == [(1 << 40, 1 << 30, 1), 1 << 40]
    library.code = 1
    for call, name in ((lambda: driver.pin(1, 2), "Register"), (lambda: driver.unpin(1), "Unregister")):
        with pytest.raises(DriverError, match=rf"cuMemHost{name}: invalid argument \(CUDA error 1\)"):
            call()


def test_a_thread_enters_the_context_of_another():
    library = Library()
    driver = Driver(library)
    driver.enter(driver.current_context())
    assert library.entered == [77]


def test_what_is_missing_is_said_with_what_is_needed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DriverError, match="no cuMemcpyBatchAsync: version 570"):
        Driver(Library(has_batches=False))
    with pytest.raises(DriverError, match="no CUDA context"):
        Driver(Library(context=0)).current_context()
    monkeypatch.setattr("py_kvcache.worker.cudriver._LIBRARY", "libcuda-of-nobody.so.1")
    with pytest.raises(DriverError, match=r"libcuda-of-nobody\.so\.1 cannot be loaded"):
        Driver()


def test_a_stream_waits_for_an_event_and_an_error_is_said():
    library = Library()
    Driver(library).wait_event(0xABC, 1 << 47)
    assert library.waits == [(0xABC, 1 << 47, 0)]
    with pytest.raises(DriverError, match="cuStreamWaitEvent: invalid argument"):
        Driver(Library(code=1)).wait_event(1, 2)
