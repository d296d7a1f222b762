"""Digests of block payloads.

A load at 30 GB/s leaves no cores for blake3 over every byte (3.5 GB/s a core). New blocks are summed instead,
at memory speed (9 GB/s a core), and blake3 covers the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from blake3 import blake3

from py_kvcache.footer import ALGO_BLAKE3, ALGO_SUMS
from py_kvcache.layout import ALIGN

WORDS = ALIGN // 8  # in a row


class Digest(Protocol):
    """Takes the padded payload in order, then the footer's header."""

    def update(self, data: Any) -> Any:
        """The next bytes, of any length."""

    def digest(self) -> bytes:
        """32 bytes. Nothing may follow."""


class BlockSums(NamedTuple):
    """What SumsDigest adds up of one payload, little-endian 64-bit words each.

    Args:
        rows: one word a page.
        columns: 512 words.
    """

    rows: bytes | memoryview
    columns: bytes | memoryview


def sums_of(pages: Any) -> BlockSums:
    """Of whole pages. The GIL is free while numpy adds.

    Two calls for all of it, not some for each piece that fits a cache: between two calls the GIL has to be
    taken, and while a thread of vLLM's is busy that takes 5 ms, longer than the sums.
    """
    rows = np.frombuffer(pages, "<u8").reshape(-1, WORDS)
    return BlockSums(np.add.reduce(rows, axis=1).tobytes(), np.add.reduce(rows, axis=0).tobytes())


class SumsDigest:
    """blake3(sums of each page || sums of each place in the pages || the rest).

    The payload is seen as rows of 512 little-endian 64-bit words, one row a page of 4,096 bytes. Every row
    and every column is added up modulo 2**64. A changed bit, a page that is zero, torn, stale or in another's
    place changes a row's sum, words that change places within a row change columns' sums. What could pass
    are four or more changes in the corners of rectangles that cancel out in both directions: what chance does
    with 2**-64 at most, and somebody who may write to the volume could forge any unkeyed digest.
    """

    def __init__(self) -> None:
        self._hash = blake3()
        self._columns = np.zeros(WORDS, "<u8")
        self._rest = b""

    def update(self, data: Any) -> SumsDigest:
        """See Digest."""
        view = memoryview(data).cast("B")
        if self._rest or len(view) % ALIGN:
            view = memoryview(self._rest + bytes(view))
            whole = len(view) - len(view) % ALIGN
            self._rest, view = bytes(view[whole:]), view[:whole]
        sums = sums_of(view)
        self._hash.update(sums.rows)
        self._columns += np.frombuffer(sums.columns, "<u8")
        return self

    def digest(self) -> bytes:
        """See Digest."""
        return bytes(self._hash.update(self._columns.tobytes()).update(self._rest).digest())


def new_digest(algorithm: int) -> Digest | None:
    """For a footer's algorithm; None if it stands for no digest."""
    if algorithm == ALGO_SUMS:
        return SumsDigest()
    return blake3() if algorithm == ALGO_BLAKE3 else None


def digest_of_sums(sums: BlockSums, header: bytes) -> bytes:
    """As ``digest_of(ALGO_SUMS, ...)`` of a payload that somebody else has added up."""
    return bytes(blake3(sums.rows).update(sums.columns).update(header).digest())


def digest_of(algorithm: int, payload: Any, header: bytes) -> bytes:
    """Of a whole padded payload and the footer's header (layout.digest_header)."""
    made = new_digest(algorithm)
    if made is None:
        raise ValueError(f"algorithm {algorithm} has no digest")
    made.update(payload)
    made.update(header)
    return made.digest()
