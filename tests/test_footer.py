"""Footers: round trips, and nothing that a stranger wrote or a disk broke is taken for ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache import layout
from py_kvcache.errors import PROOF_OF_DAMAGE, Fault
from py_kvcache.footer import (
    ALGO_NONE,
    ALGORITHMS,
    FOOTER_USED_BYTES,
    MAGIC,
    Footer,
    FooterError,
    check_footer,
    digest_header,
    make_footer,
    pack_footer,
    unpack_footer,
)

KEYS = st.binary(min_size=12, max_size=68)
FOOTERS = st.builds(
    lambda key, index, size, algorithm, digest: replace(
        make_footer(key, index, size, algorithm), digest=digest
    ),
    KEYS,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.sampled_from(sorted(ALGORITHMS)),
    st.binary(min_size=32, max_size=32),
)
KEY = bytes(range(32)) + (3).to_bytes(4, "big")


@given(FOOTERS)
def test_a_footer_reads_back_as_written(footer: Footer) -> None:
    packed = pack_footer(footer)
    assert len(packed) == layout.FOOTER_BYTES
    assert packed.startswith(MAGIC)
    assert unpack_footer(memoryview(packed)) == footer
    assert packed.startswith(digest_header(footer) + footer.digest)


@given(FOOTERS, st.integers(0, 8 * FOOTER_USED_BYTES - 1))
def test_any_flipped_bit_of_the_footer_is_noticed_and_is_proof_of_damage(footer: Footer, bit: int) -> None:
    packed = bytearray(pack_footer(footer))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FooterError) as caught:
        unpack_footer(packed)
    assert caught.value.kind == "torn"
    assert caught.value.fault in PROOF_OF_DAMAGE


@given(st.binary(min_size=1, max_size=600).filter(lambda b: any(b) and MAGIC not in b), st.booleans())
def test_strange_bytes_are_a_foreign_file_and_no_proof_of_damage(some: bytes, at_end: bool) -> None:
    data = some.rjust(4096, b"\0") if at_end else some.ljust(4096, b"\0")
    with pytest.raises(FooterError) as caught:
        unpack_footer(data)
    assert caught.value.kind == "absent"
    assert caught.value.fault not in PROOF_OF_DAMAGE


def test_an_all_zero_footer_is_damage() -> None:
    with pytest.raises(FooterError) as caught:
        unpack_footer(bytes(4096))
    assert (caught.value.kind, caught.value.fault in PROOF_OF_DAMAGE) == ("zero", True)


def test_zeros_with_one_late_byte_are_foreign() -> None:
    with pytest.raises(FooterError) as caught:
        unpack_footer(bytes(4095) + b"x")
    assert caught.value.kind == "absent"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4097])
def test_a_footer_of_another_length_is_no_footer(size: int) -> None:
    packed = pack_footer(make_footer(KEY, 0, 100)) + b"\0"
    with pytest.raises(FooterError) as caught:
        unpack_footer(packed[:size])
    assert caught.value.kind == "absent"


@pytest.mark.parametrize("change", [{"version": 2}, {"algorithm": 7}])
def test_a_newer_footer_is_left_alone(change: dict[str, int]) -> None:
    newer = replace(make_footer(KEY, 0, 100), **change)  # type: ignore[arg-type]
    with pytest.raises(FooterError) as caught:
        unpack_footer(pack_footer(newer))
    assert caught.value.kind == "version"
    assert caught.value.fault not in PROOF_OF_DAMAGE


@pytest.mark.parametrize(
    "change",
    [{"padded_bytes": 100}, {"digest": b"short"}, {"key": b"short"}, {"index": -1}, {"version": 1 << 16}],
)
def test_a_footer_whose_fields_do_not_fit_is_not_written(change: dict[str, object]) -> None:
    footer = replace(make_footer(KEY, 0, 100), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        pack_footer(footer)


def test_a_footer_belongs_to_one_key_and_one_length() -> None:
    footer = make_footer(KEY, 5, 5000)
    assert check_footer(footer, KEY, 5000) is None
    assert check_footer(footer, KEY[:-1] + b"\4", 5000) is Fault.WRONG_KEY
    assert check_footer(footer, KEY, 5001) is Fault.WRONG_KEY
    assert check_footer(footer, KEY[1:], 5000) is Fault.WRONG_KEY


def test_the_digest_covers_key_index_and_lengths() -> None:
    footer = make_footer(KEY, 5, 5000)
    others = (
        replace(footer, key=KEY[1:]),
        replace(footer, index=6),
        replace(footer, payload_bytes=5001),
        replace(footer, algorithm=ALGO_NONE),
    )
    assert len({digest_header(f) for f in (footer, *others)}) == 5
