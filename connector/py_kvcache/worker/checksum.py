"""Seals and checks whole blocks in a few helper threads: 28 MiB take 3 ms, too long for the reactor.

The GIL is free meanwhile. The digest covers the padded payload and the footer's fields. Where the device has
added up the payload while copying it (gpublocks.py), what is left takes microseconds and needs no thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from py_kvcache.digest import BlockSums, digest_of, digest_of_sums
from py_kvcache.errors import Fault
from py_kvcache.footer import (
    ALGO_NONE,
    ALGO_SUMS,
    Footer,
    FooterError,
    check_footer,
    digest_header,
    make_footer,
    pack_footer,
    unpack_footer,
)
from py_kvcache.layout import FOOTER_BYTES, file_bytes, padded

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(f"vllm.{__name__}")

Verdict = tuple[Fault | None, str]


@dataclass(frozen=True)
class ChecksumResult:
    """``fault`` None: sealed, or proved good. Else what is wrong with the block, and in words."""

    token: int
    fault: Fault | None = None
    detail: str = ""


def read_footer(raw: bytes | memoryview, key: bytes, payload_bytes: int) -> tuple[Footer | None, Verdict]:
    """The footer if it belongs to this block, else None and why not."""
    try:
        footer = unpack_footer(raw)
    except FooterError as error:
        return None, (error.fault, f"footer {error.kind}: {error}")
    fault = check_footer(footer, key, payload_bytes)
    if fault is not None:
        return None, (fault, f"footer is for key {footer.key.hex()}, {footer.payload_bytes} bytes")
    return footer, (None, "")


def seal_block(
    buffer: memoryview,
    key: bytes,
    index: int,
    payload_bytes: int,
    *,
    enabled: bool,
    sums: BlockSums | None = None,
) -> None:
    """Zero the padding behind the payload and write the footer, in place.

    ``buffer`` is 1-D uint8 of at least ``file_bytes(payload_bytes)``. ``sums`` are of the padded payload, if
    somebody has added it up already.
    """
    end = padded(payload_bytes)
    # A slot is used again and again: without this, bytes of an earlier block would go to disk.
    buffer[payload_bytes:end] = bytes(end - payload_bytes)
    footer = make_footer(key, index, payload_bytes, ALGO_SUMS if enabled else ALGO_NONE)
    if enabled:
        header = digest_header(footer)
        digest = digest_of(ALGO_SUMS, buffer[:end], header) if sums is None else digest_of_sums(sums, header)
        footer = replace(footer, digest=digest)
    buffer[end : end + FOOTER_BYTES] = pack_footer(footer)


def verify_block(
    buffer: memoryview, key: bytes, payload_bytes: int, *, enabled: bool, sums: BlockSums | None = None
) -> Verdict:
    """Check a block that was read completely: footer and key always, the digest if enabled.

    ``sums`` are of the payload, if somebody has added it up: then what they are of is checked, not the
    buffer. A block without a digest is refused. It cannot be one of this namespace, which names the
    algorithm, so it is left alone like any file of somebody else's.
    """
    end = padded(payload_bytes)
    footer, verdict = read_footer(buffer[end : end + FOOTER_BYTES], key, payload_bytes)
    if footer is None or not enabled:
        return verdict
    if footer.algorithm == ALGO_NONE:
        return Fault.FOREIGN, "the block has no digest, and checksums are on"
    header = digest_header(footer)
    if sums is None:
        digest = digest_of(footer.algorithm, buffer[:end], header)
    elif footer.algorithm == ALGO_SUMS:
        digest = digest_of_sums(sums, header)
    else:
        return Fault.FOREIGN, "the block's digest is not one of sums, as this namespace's are"
    if digest != footer.digest:
        return Fault.CHECKSUM, "payload does not match its digest"
    return None, ""


class Checksummer:
    """Any thread may call; nothing blocks. One result for each seal and verify, in any order.

    Args:
        on_done: called from a helper thread after each result (only there); must only wake somebody.
        enabled: False writes ALGO_NONE and checks no digests (keys and lengths still). What is left takes
            microseconds then, less than to wake a thread: the caller does it, and finds the result at once.
    """

    def __init__(self, threads: int, on_done: Callable[[], None], *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._on_done = on_done
        self._work: queue.SimpleQueue[Callable[[], ChecksumResult] | None] = queue.SimpleQueue()
        self._results: deque[ChecksumResult] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"py-kvcache-sum-{i}", daemon=True)
            for i in range(threads if enabled else 0)
        ]
        for thread in self._threads:
            thread.start()

    def seal(
        self,
        token: int,
        buffer: memoryview,
        key: bytes,
        index: int,
        payload_bytes: int,
        sums: BlockSums | None = None,
    ) -> None:
        """Write padding and footer into the buffer, which nobody else touches until the result."""

        def work() -> ChecksumResult:
            seal_block(buffer, key, index, payload_bytes, enabled=self.enabled, sums=sums)
            return ChecksumResult(token)

        self._submit(token, buffer, payload_bytes, work, at_once=sums is not None)

    def verify(self, token: int, buffer: memoryview, key: bytes, payload_bytes: int) -> None:
        """Check a buffer of ``file_bytes(payload_bytes)`` bytes that was read completely."""

        def work() -> ChecksumResult:
            return ChecksumResult(token, *verify_block(buffer, key, payload_bytes, enabled=self.enabled))

        self._submit(token, buffer, payload_bytes, work, at_once=False)

    def results(self) -> list[ChecksumResult]:
        """Everything that is done since the last call."""
        done: list[ChecksumResult] = []
        while self._results:
            done.append(self._results.popleft())
        return done

    def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Finish what is queued; False if that took longer than the timeout."""
        for _ in self._threads:
            self._work.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(
        self,
        token: int,
        buffer: memoryview,
        payload_bytes: int,
        work: Callable[[], ChecksumResult],
        *,
        at_once: bool,
    ) -> None:
        if len(buffer) < file_bytes(payload_bytes):
            raise ValueError(f"a buffer of {len(buffer)} bytes is too short for a payload of {payload_bytes}")

        def guarded() -> ChecksumResult:
            try:
                return work()
            except Exception as error:
                # A defect of ours must not cost the slot: the block fails and its job ends.
                log.exception("py-kvcache: checksum of one block failed")
                return ChecksumResult(token, Fault.IO, repr(error))

        if self.enabled and not at_once:
            self._work.put(guarded)
        else:
            self._results.append(guarded())

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            self._results.append(work())
            self._on_done()
