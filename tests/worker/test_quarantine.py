"""Only proof removes a file: every kind of damage does, every kind of doubt does not."""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from py_kvcache.errors import PROOF_OF_DAMAGE, Fault
from py_kvcache.footer import make_footer, pack_footer
from py_kvcache.layout import FOOTER_BYTES, file_bytes, padded
from py_kvcache.worker.checksum import seal_block
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.quarantine import MAX_UNLINKS, WINDOW_S, Quarantine

KEY = bytes(range(32)) + bytes(4)
PAYLOAD = 2_500_000  # more than one chunk
END = padded(PAYLOAD)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def ops():
    return FileOps()


@pytest.fixture
def quarantine(ops):
    return Quarantine(ops, clock=Clock())


def block(key=KEY, payload=PAYLOAD, enabled=True):
    data = bytearray(os.urandom(1000) * (file_bytes(payload) // 1000 + 1))[: file_bytes(payload)]
    seal_block(memoryview(data), key, 5, payload, enabled=enabled)
    return data


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "block.bin"
    path.write_bytes(block())
    return path


def change(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, offset):
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


DAMAGE = {
    "empty": (Fault.WRONG_SIZE, lambda path: os.truncate(path, 0)),
    "cut in the payload": (Fault.WRONG_SIZE, lambda path: os.truncate(path, 4096)),
    "without its footer": (Fault.WRONG_SIZE, lambda path: os.truncate(path, END)),
    "one byte short": (Fault.WRONG_SIZE, lambda path: os.truncate(path, END + FOOTER_BYTES - 1)),
    "something appended": (Fault.WRONG_SIZE, lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "first bit": (Fault.CHECKSUM, lambda path: flip(path, 0)),
    "last bit of the payload": (Fault.CHECKSUM, lambda path: flip(path, PAYLOAD - 1)),
    "padding": (Fault.CHECKSUM, lambda path: flip(path, END - 1)),
    "zero footer": (Fault.CHECKSUM, lambda path: change(path, END, bytes(FOOTER_BYTES))),
    "torn footer": (Fault.CHECKSUM, lambda path: flip(path, END + 100)),
    "another block's": (Fault.WRONG_KEY, lambda path: path.write_bytes(block(KEY[::-1]))),
    "another length's": (
        Fault.WRONG_KEY,
        lambda path: change(path, END, pack_footer(make_footer(KEY, 5, PAYLOAD - 1))),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_proved_damaged_is_removed(path, quarantine, damage):
    fault, do = DAMAGE[damage]
    do(path)
    outcome = quarantine.examine(str(path), KEY, PAYLOAD)
    assert outcome.removed
    assert outcome.fault is fault
    assert fault in PROOF_OF_DAMAGE
    assert not path.exists()


def newer_version(path):
    footer = bytearray(pack_footer(make_footer(KEY, 5, PAYLOAD)))
    footer[8] += 1
    footer[508:512] = zlib.crc32(bytes(footer[:508])).to_bytes(4, "little")
    change(path, END, bytes(footer))


LEFT = {
    "good": (None, lambda path: None),
    "foreign footer": (Fault.FOREIGN, lambda path: change(path, END, os.urandom(FOOTER_BYTES))),
    "newer version": (Fault.FOREIGN, newer_version),
    "larger and foreign": (Fault.FOREIGN, lambda path: path.write_bytes(os.urandom(END + 3 * FOOTER_BYTES))),
    "no checksum in it": (None, lambda path: path.write_bytes(block(enabled=False))),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_good_or_foreign_file_is_left_alone(path, quarantine, kind):
    fault, do = LEFT[kind]
    do(path)
    before = path.read_bytes()
    outcome = quarantine.examine(str(path), KEY, PAYLOAD)
    assert (outcome.removed, outcome.fault) == (False, fault)
    assert path.read_bytes() == before


def test_without_checksums_a_payload_proves_nothing_but_a_length_does(path, ops):
    quarantine = Quarantine(ops, checksum=False)
    flip(path, 0)
    assert not quarantine.examine(str(path), KEY, PAYLOAD).removed
    os.truncate(path, 4096)
    assert quarantine.examine(str(path), KEY, PAYLOAD).removed


@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo", "nothing"])
def test_what_is_no_regular_file_is_left_alone_and_does_not_hang(path, quarantine, kind):
    target = path.rename(path.with_name("target"))
    os.truncate(target, 0)  # a damaged file, if it were followed
    if kind != "nothing":
        make = {"folder": os.mkdir, "fifo": os.mkfifo, "symlink": lambda at: os.symlink(target, at)}[kind]
        make(path)
    outcome = quarantine.examine(str(path), KEY, PAYLOAD)
    assert not outcome.removed
    assert outcome.code == {"symlink": errno.ELOOP, "nothing": errno.ENOENT}.get(kind, 0)
    assert os.path.lexists(path) == (kind != "nothing")
    assert target.exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.EINTR])
@pytest.mark.parametrize("call", ["open", "fstat", "pread", "lstat", "unlink"])
def test_an_errno_proves_nothing(path, ops, quarantine, call, code):
    flip(path, 0)
    descriptors = os.listdir("/proc/self/fd")

    def failing(*_):
        raise OSError(code, os.strerror(code))

    setattr(ops, call, failing)
    outcome = quarantine.examine(str(path), KEY, PAYLOAD)
    assert (outcome.removed, outcome.fault, outcome.code) == (False, Fault.IO, code)
    assert path.exists()
    assert os.listdir("/proc/self/fd") == descriptors


def test_reads_that_end_early_prove_nothing(path, ops, quarantine):
    flip(path, 0)
    ops.pread = lambda fd, size, offset: os.pread(fd, size, offset) if offset >= END else b""
    assert not quarantine.examine(str(path), KEY, PAYLOAD).removed
    assert path.exists()


def test_short_reads_are_continued(path, ops, quarantine):
    ops.pread = lambda fd, size, offset: os.pread(fd, min(size, 333_333), offset)
    assert quarantine.examine(str(path), KEY, PAYLOAD).fault is None
    flip(path, PAYLOAD - 1)
    assert quarantine.examine(str(path), KEY, PAYLOAD).removed


def test_a_file_replaced_during_the_second_look_is_left_alone(path, ops, quarantine):
    flip(path, 0)

    def replaced_meanwhile(fd, size, offset):
        fresh = path.with_name("fresh")
        if not fresh.exists() and offset > 0:
            fresh.write_bytes(block())
            os.replace(fresh, path)
        return os.pread(fd, size, offset)

    ops.pread = replaced_meanwhile
    outcome = quarantine.examine(str(path), KEY, PAYLOAD)
    assert not outcome.removed
    assert outcome.detail == "replaced meanwhile"
    assert path.exists()


def test_the_disk_is_asked_not_the_page_cache(path, ops, quarantine):
    advised = []
    ops.fadvise = lambda *arguments: advised.append(arguments[3])
    quarantine.examine(str(path), KEY, PAYLOAD)
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_at_most_ten_files_are_removed_a_minute(tmp_path, ops):
    clock = Clock()
    quarantine = Quarantine(ops, clock=clock)
    paths = [tmp_path / f"{number}.bin" for number in range(25)]
    for path in paths:
        path.write_bytes(b"")

    def examine_all():
        return sum(quarantine.examine(str(path), KEY, PAYLOAD).removed for path in paths if path.exists())

    assert MAX_UNLINKS == 10
    assert examine_all() == 10
    clock.now = WINDOW_S - 1
    assert examine_all() == 0
    clock.now = WINDOW_S
    assert examine_all() == 10
    clock.now = 2 * WINDOW_S
    assert examine_all() == 5


def test_good_files_do_not_use_up_the_limit(tmp_path, ops, path):
    quarantine = Quarantine(ops, clock=Clock())
    for _ in range(30):
        quarantine.examine(str(path), KEY, PAYLOAD)
    flip(path, 0)
    assert quarantine.examine(str(path), KEY, PAYLOAD).removed


def test_the_footer_of_another_digest_is_damage_though_its_crc_is_right(path, quarantine):
    footer = replace(make_footer(KEY, 5, PAYLOAD), digest=bytes(32))
    change(Path(path), END, pack_footer(footer))
    assert quarantine.examine(str(path), KEY, PAYLOAD).fault is Fault.CHECKSUM
