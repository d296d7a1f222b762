"""What the sums see: any changed bit, and pages or words in other places."""

from __future__ import annotations

import random
import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.digest import SumsDigest, digest_of, new_digest
from py_kvcache.footer import ALGO_BLAKE3, ALGO_NONE, ALGO_SUMS
from py_kvcache.layout import ALIGN

PAGES = 70
PAYLOAD = random.Random(1).randbytes(PAGES * ALIGN)
HEADER = b"header of 20 bytes.."


def digest(payload: bytes, header: bytes = HEADER) -> bytes:
    return digest_of(ALGO_SUMS, payload, header)


def by_hand(payload: bytes, header: bytes) -> bytes:
    """The definition, word by word."""
    words = struct.unpack(f"<{len(payload) // 8}Q", payload)
    rows = [sum(words[i : i + 512]) % 2**64 for i in range(0, len(words), 512)]
    columns = [sum(words[i::512]) % 2**64 for i in range(512)]
    return blake3(struct.pack(f"<{len(rows)}Q", *rows) + struct.pack("<512Q", *columns) + header).digest()


def test_the_digest_is_what_its_definition_says():
    assert digest(PAYLOAD) == by_hand(PAYLOAD, HEADER)


@given(st.integers(0, PAGES * ALIGN - 1), st.integers(0, 7))
def test_one_changed_bit_is_seen(position: int, bit: int):
    changed = bytearray(PAYLOAD)
    changed[position] ^= 1 << bit
    assert digest(bytes(changed)) != digest(PAYLOAD)


@given(st.integers(0, PAGES - 1), st.integers(0, PAGES - 1))
def test_two_pages_in_each_others_place_are_seen(one: int, other: int):
    pages = [PAYLOAD[n * ALIGN : (n + 1) * ALIGN] for n in range(PAGES)]
    pages[one], pages[other] = pages[other], pages[one]
    assert (digest(b"".join(pages)) == digest(PAYLOAD)) == (one == other)


@given(st.integers(0, PAGES * 512 - 2))
def test_two_words_in_each_others_place_are_seen(at: int):
    words = [PAYLOAD[n : n + 8] for n in range(0, len(PAYLOAD), 8)]
    words[at], words[at + 1] = words[at + 1], words[at]
    assert digest(b"".join(words)) != digest(PAYLOAD)


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_a_page_that_never_arrived_is_seen(fill: bytes):
    for page in range(PAGES):
        changed = PAYLOAD[: page * ALIGN] + fill * ALIGN + PAYLOAD[(page + 1) * ALIGN :]
        assert digest(changed) != digest(PAYLOAD)


def test_a_payload_moved_by_a_page_and_one_that_is_shorter_are_seen():
    zeros = bytes(ALIGN)
    assert len({digest(PAYLOAD + zeros), digest(zeros + PAYLOAD), digest(PAYLOAD)}) == 3


def test_the_header_counts_and_an_empty_payload_has_a_digest_too():
    assert digest(PAYLOAD, b"another header......") != digest(PAYLOAD)
    assert digest(b"") == by_hand(b"", HEADER)


@given(st.lists(st.integers(0, PAGES * ALIGN), max_size=6))
def test_it_does_not_matter_in_what_portions_the_bytes_come(cuts: list[int]):
    made, position = SumsDigest(), 0
    for cut in [*sorted(cuts), len(PAYLOAD)]:
        made.update(PAYLOAD[position:cut])
        position = cut
    made.update(HEADER)
    assert made.digest() == digest(PAYLOAD)


def test_each_algorithm_of_a_footer_has_its_own_and_none_has_none():
    assert digest_of(ALGO_BLAKE3, PAYLOAD, HEADER) == blake3(PAYLOAD + HEADER).digest()
    assert new_digest(ALGO_NONE) is None
    with pytest.raises(ValueError, match="no digest"):
        digest_of(ALGO_NONE, PAYLOAD, HEADER)
