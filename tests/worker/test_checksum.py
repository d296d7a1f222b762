"""What is sealed verifies, and nothing else does."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.digest import digest_of
from py_kvcache.errors import PROOF_OF_DAMAGE, Fault
from py_kvcache.footer import ALGO_NONE, ALGO_SUMS, FOOTER_USED_BYTES, digest_header, unpack_footer
from py_kvcache.layout import FOOTER_BYTES, file_bytes, padded
from py_kvcache.worker.checksum import Checksummer, seal_block, verify_block

KEY = bytes(range(32)) + bytes(4)
PAYLOAD = 10_000
END = padded(PAYLOAD)


def sealed(payload=PAYLOAD, enabled=True, key=KEY):
    data = bytearray(b"\xa5" * file_bytes(payload))
    seal_block(memoryview(data), key, 9, payload, enabled=enabled)
    return data


@pytest.mark.parametrize("payload", [1, 4095, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_sealed_block_verifies_with_checksums_on_and_off(payload, enabled):
    data = memoryview(sealed(payload, enabled))
    assert verify_block(data, KEY, payload, enabled=enabled) == (None, "")
    assert verify_block(data, KEY, payload, enabled=False) == (None, "")


def test_a_block_without_a_digest_is_not_served_to_one_who_wants_digests_and_is_left_alone():
    fault, _ = verify_block(memoryview(sealed(enabled=False)), KEY, PAYLOAD, enabled=True)
    assert fault is Fault.FOREIGN
    assert fault not in PROOF_OF_DAMAGE


def test_the_digest_covers_the_padded_payload_and_the_footers_fields():
    data = sealed()
    footer = unpack_footer(data[END:])
    assert (footer.key, footer.index, footer.payload_bytes) == (KEY, 9, PAYLOAD)
    assert footer.digest == digest_of(ALGO_SUMS, bytes(data[:END]), digest_header(footer))
    assert unpack_footer(sealed(enabled=False)[END:]).algorithm == ALGO_NONE


def test_bytes_of_an_earlier_block_in_the_padding_do_not_reach_the_disk():
    data = sealed()
    assert data[:PAYLOAD] == b"\xa5" * PAYLOAD
    assert not any(data[PAYLOAD:END])
    assert not any(data[END + FOOTER_USED_BYTES :])


@given(st.integers(0, END + FOOTER_USED_BYTES - 1), st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_found(position, bit):
    data = sealed()
    data[position] ^= 1 << bit
    fault, detail = verify_block(memoryview(data), KEY, PAYLOAD, enabled=True)
    assert fault is Fault.CHECKSUM
    assert detail


def test_with_checksums_off_the_payload_is_trusted_but_not_the_footer():
    data = sealed()
    data[0] ^= 1
    assert verify_block(memoryview(data), KEY, PAYLOAD, enabled=False) == (None, "")
    data[END + 20] ^= 1
    assert verify_block(memoryview(data), KEY, PAYLOAD, enabled=False)[0] is Fault.CHECKSUM


@pytest.mark.parametrize("enabled", [True, False])
def test_another_blocks_file_under_this_name_is_found(enabled):
    data = sealed(key=KEY[::-1])
    assert verify_block(memoryview(data), KEY, PAYLOAD, enabled=enabled)[0] is Fault.WRONG_KEY
    data = sealed()
    assert verify_block(memoryview(data), KEY, PAYLOAD + 1, enabled=enabled)[0] is Fault.WRONG_KEY


@pytest.mark.parametrize(
    ("footer", "fault"), [(bytes(FOOTER_BYTES), Fault.CHECKSUM), (b"x" * FOOTER_BYTES, Fault.FOREIGN)]
)
def test_a_zero_footer_is_damage_and_a_strange_one_is_foreign(footer, fault):
    data = sealed()
    data[END:] = footer
    assert verify_block(memoryview(data), KEY, PAYLOAD, enabled=True)[0] is fault


class Waiter:
    def __init__(self, **settings):
        self.wake = threading.Semaphore(0)
        self.sums = Checksummer(2, self.wake.release, **settings)

    def wait(self, count):
        for _ in range(count):
            assert self.wake.acquire(timeout=20)
        return self.sums.results()


@pytest.fixture
def waiter():
    waiter = Waiter()
    yield waiter
    assert waiter.sums.shutdown(20)


def test_every_call_gets_one_result_with_its_token(waiter):
    blocks = [bytearray(file_bytes(PAYLOAD)) for _ in range(40)]
    for token, data in enumerate(blocks):
        waiter.sums.seal(token, memoryview(data), KEY, token, PAYLOAD)
    results = waiter.wait(40)
    assert sorted(result.token for result in results) == list(range(40))
    assert all(result.fault is None for result in results)
    blocks[7][0] ^= 1
    for token, data in enumerate(blocks):
        waiter.sums.verify(token, memoryview(data), KEY, PAYLOAD)
    faults = {result.token: result.fault for result in waiter.wait(40)}
    assert faults == {token: Fault.CHECKSUM if token == 7 else None for token in range(40)}
    assert waiter.sums.results() == []


def test_bytes_of_a_slot_behind_the_block_are_not_touched(waiter):
    slot = bytearray(b"\xee" * (file_bytes(PAYLOAD) + 5000))
    waiter.sums.seal(1, memoryview(slot), KEY, 0, PAYLOAD)
    waiter.wait(1)
    assert slot[file_bytes(PAYLOAD) :] == b"\xee" * 5000
    waiter.sums.verify(2, memoryview(slot), KEY, PAYLOAD)
    assert waiter.wait(1)[0].fault is None


def test_a_buffer_that_is_too_short_is_refused_at_once(waiter):
    short = memoryview(bytearray(file_bytes(PAYLOAD) - 1))
    with pytest.raises(ValueError, match="too short"):
        waiter.sums.verify(1, short, KEY, PAYLOAD)
    with pytest.raises(ValueError, match="too short"):
        waiter.sums.seal(1, short, KEY, 0, PAYLOAD)


def test_a_defect_in_a_helper_fails_its_block_and_the_helpers_go_on(waiter, caplog):
    read_only = memoryview(bytes(file_bytes(PAYLOAD)))
    for token in range(3):
        waiter.sums.seal(token, read_only, KEY, 0, PAYLOAD)
    assert [result.fault for result in waiter.wait(3)] == [Fault.IO] * 3
    assert "read-only" in caplog.text
    waiter.sums.seal(9, memoryview(bytearray(file_bytes(PAYLOAD))), KEY, 0, PAYLOAD)
    assert waiter.wait(1)[0].fault is None


def test_without_digests_the_answer_is_there_at_once_and_needs_neither_thread_nor_wake():
    threads = threading.active_count()
    sums, data = (
        Checksummer(2, lambda: pytest.fail("nobody waits"), enabled=False),
        bytearray(file_bytes(PAYLOAD)),
    )
    assert threading.active_count() == threads
    sums.seal(1, memoryview(data), KEY, 0, PAYLOAD)
    assert [result.token for result in sums.results()] == [1]
    sums.verify(2, memoryview(data), bytes(36), PAYLOAD)
    assert [(result.token, result.fault) for result in sums.results()] == [(2, Fault.WRONG_KEY)]


def test_shutdown_finishes_what_was_asked():
    waiter = Waiter()
    for token in range(20):
        waiter.sums.seal(token, memoryview(bytearray(file_bytes(PAYLOAD))), KEY, 0, PAYLOAD)
    assert waiter.sums.shutdown(20)
    assert len(waiter.sums.results()) == 20
