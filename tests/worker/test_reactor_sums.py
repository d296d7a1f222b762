"""Blocks that the device adds up: checked by what it has, and sealed by what it had."""

from __future__ import annotations

import pytest
from worker_doubles import FILE, PAYLOAD, payload_of

from py_kvcache.digest import digest_of
from py_kvcache.errors import Fault
from py_kvcache.footer import ALGO_BLAKE3, ALGO_NONE, digest_header, make_footer, pack_footer
from py_kvcache.layout import FOOTER_BYTES
from py_kvcache.worker.checksum import verify_block


def one_bit_off(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def test_sound_blocks_are_loaded_and_no_helper_reads_their_payload(rig):
    r = rig(adds=True)
    r.load(1, 8)
    r.run()
    assert r.results[1].failed == ()
    assert all(r.loaded(1, n) for n in range(8))
    r.assert_idle()


def test_one_wrong_byte_in_a_file_is_found_on_the_device_and_quarantined(rig):
    r = rig(adds=True)
    r.load(1, 3)
    r.world.files[r.path(1, 1)][17] ^= 1
    r.run()
    assert r.faults(1)[1] is Fault.CHECKSUM
    assert r.loaded(1, 0)
    assert r.publisher.quarantined == [r.path(1, 1)]
    assert r.reactor.snapshot().checksum_failures == 1
    assert r.reactor.snapshot().failures == {("load", "verify", "checksum", "none"): 1}
    r.assert_idle()


def test_blocks_of_a_batch_are_judged_one_by_one(rig):
    r = rig(adds=True, slots=8, io_depth=6)
    for job in range(4):
        r.load(job, 1)
    r.world.files[r.path(2, 0)][0] ^= 1
    r.run()
    assert [r.faults(job) for job in range(4)] == [{}, {}, {0: Fault.CHECKSUM}, {}]
    assert max(len(launch) for launch in r.device.loads) > 1
    r.assert_idle()


def test_what_the_link_damages_is_a_failed_load_though_the_file_is_sound(rig):
    r = rig(adds=True)
    r.device.on_the_way = one_bit_off
    r.load(1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.CHECKSUM}
    r.assert_idle()


def test_what_the_link_damages_on_its_way_to_a_file_never_verifies(rig):
    r = rig(adds=True)
    r.device.on_the_way = one_bit_off
    r.store(1, 1)
    r.run()
    stored = memoryview(r.world.files[r.path(1, 0)])
    assert bytes(stored[:PAYLOAD]) == one_bit_off(payload_of((1, 0)))
    block = r.submitted[1].blocks[0]
    assert verify_block(stored, block.key, PAYLOAD, enabled=True)[0] is Fault.CHECKSUM


def test_a_block_sealed_by_the_devices_sums_is_one_that_anybody_can_check(rig):
    r = rig(adds=True)
    r.store(1, 2)
    r.run()
    for n, block in enumerate(r.submitted[1].blocks):
        assert r.stored(1, n)
        assert verify_block(memoryview(r.world.files[block.path]), block.key, PAYLOAD, enabled=True) == (
            None,
            "",
        )


@pytest.mark.parametrize("algorithm", [ALGO_NONE, ALGO_BLAKE3])
def test_a_digest_that_is_not_of_sums_is_left_alone(rig, algorithm):
    r = rig(adds=True)
    r.load(1, 1)
    block = r.submitted[1].blocks[0]
    content = r.world.files[block.path]
    footer = make_footer(block.key, 0, PAYLOAD, algorithm)
    if algorithm != ALGO_NONE:
        digest = digest_of(algorithm, bytes(content[: FILE - FOOTER_BYTES]), digest_header(footer))
        footer = type(footer)(*[getattr(footer, name) for name in footer.__dataclass_fields__][:-1], digest)
    content[FILE - FOOTER_BYTES :] = pack_footer(footer)
    r.run()
    assert r.faults(1) == {0: Fault.FOREIGN}
    assert r.publisher.quarantined == []
    r.assert_idle()


def test_another_blocks_footer_fails_the_block_and_the_other_block_is_served(rig):
    r = rig(adds=True)
    r.load(1, 1)
    r.load(2, 1)
    r.world.files[r.path(1, 0)] = r.world.files[r.path(2, 0)]
    r.run()
    assert r.faults(1) == {0: Fault.WRONG_KEY}
    assert r.faults(2) == {}
    assert r.loaded(2, 0)
    r.assert_idle()


def test_a_block_whose_sums_never_came_is_not_served(rig):
    r = rig(adds=True)
    r.device.forgets_sums = True
    r.load(1, 1)
    r.run()
    assert r.faults(1) == {0: Fault.DEVICE}
    assert r.publisher.quarantined == []
    r.assert_idle()
