"""The last 4 KiB of a block file: what it says, packed and checked. Standard library only.

    magic 8s | version H | algorithm H | key length H | 0 H | block index Q | payload bytes Q | padded bytes Q
    | key 68s | digest 32s | zeros | crc32 of all before it, at 508 | zeros to 4,096. Little endian.

All of it lies in one 512-byte sector, which disks write whole. Magic, version and crc keep their places
in every version, so that an older reader takes a newer file for what it is, not for a torn one to delete.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from py_kvcache.errors import Fault
from py_kvcache.layout import FOOTER_BYTES, KEY_BYTES, padded

ALGO_NONE: Final = 0
ALGO_BLAKE3: Final = 1
ALGO_SUMS: Final = 2  # see digest.py
ALGORITHMS: Final = {ALGO_NONE: "none", ALGO_BLAKE3: "blake3", ALGO_SUMS: "sums-blake3"}

MAGIC: Final = b"pyKVblk\x1a"
VERSION: Final = 1
_HEAD = struct.Struct("<8sHHHHQQQ68s")
_CRC = struct.Struct("<I")
_DIGEST_BYTES: Final = 32
_CRC_AT: Final = 512 - _CRC.size
FOOTER_USED_BYTES: Final = 512


@dataclass(frozen=True)
class Footer:
    """What the last 4 KiB of a block file say. Build new ones with make_footer()."""

    version: int
    algorithm: int
    key: bytes
    index: int  # position of the block in its request's chain, for verify and for people
    payload_bytes: int
    padded_bytes: int
    digest: bytes = bytes(_DIGEST_BYTES)


class FooterError(ValueError):
    """The last 4 KiB are not a footer that this version can trust.

    kind: ``absent`` (a foreign file), ``zero`` (all zero: space was allocated, the data never arrived),
    ``torn`` (ours, but its crc is wrong) or ``version`` (ours, from a newer writer).
    """

    _FAULTS: Final = {
        "absent": Fault.FOREIGN,
        "zero": Fault.CHECKSUM,
        "torn": Fault.CHECKSUM,
        "version": Fault.FOREIGN,
    }

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)

    @property
    def fault(self) -> Fault:
        """The block's fault; only ``zero`` and ``torn`` are proof of damage."""
        return self._FAULTS[self.kind]


def make_footer(key: bytes, index: int, payload_bytes: int, algorithm: int = ALGO_SUMS) -> Footer:
    """Footer of a new block, its digest still to come (``dataclasses.replace``)."""
    return Footer(VERSION, algorithm, bytes(key), index, payload_bytes, padded(payload_bytes))


def digest_header(footer: Footer) -> bytes:
    """The footer's bytes before the digest.

    The digest (see digest.py) is over the padded payload, then these bytes: so key, index and lengths are
    covered too, and a valid file under another block's name is not taken for that block.
    """
    size = len(footer.key)
    if size not in KEY_BYTES:
        raise ValueError(f"key of {size} bytes does not fit a footer")
    try:
        return _HEAD.pack(
            MAGIC, footer.version, footer.algorithm, size, 0,
            footer.index, footer.payload_bytes, footer.padded_bytes, footer.key,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"footer field out of range: {error}") from None


def pack_footer(footer: Footer) -> bytes:
    """The 4,096 bytes. Raises ValueError for fields that do not fit together."""
    if footer.padded_bytes != padded(footer.payload_bytes) or len(footer.digest) != _DIGEST_BYTES:
        raise ValueError(f"footer fields do not fit together: {footer}")
    covered = (digest_header(footer) + footer.digest).ljust(_CRC_AT, b"\0")
    return (covered + _CRC.pack(zlib.crc32(covered))).ljust(FOOTER_BYTES, b"\0")


def unpack_footer(buf: bytes | bytearray | memoryview) -> Footer:
    """Read the last 4,096 bytes of a file; raises FooterError."""
    raw = bytes(buf[:FOOTER_USED_BYTES])
    if len(buf) != FOOTER_BYTES:
        raise FooterError("absent", f"a footer has {FOOTER_BYTES} bytes, not {len(buf)}")
    crc_good = zlib.crc32(MAGIC + raw[len(MAGIC) : _CRC_AT]) == _CRC.unpack_from(raw, _CRC_AT)[0]
    if not raw.startswith(MAGIC):
        if crc_good:
            raise FooterError("torn", "the footer's magic is damaged")
        if not any(raw) and not any(buf):
            raise FooterError("zero", "the footer is all zero")
        raise FooterError("absent", "no footer of py-kvcache")
    if not crc_good:
        raise FooterError("torn", "the footer's crc is wrong")
    _, version, algorithm, size, _, index, payload_bytes, padded_bytes, key = _HEAD.unpack_from(raw)
    if version != VERSION or algorithm not in ALGORITHMS:
        raise FooterError("version", f"footer version {version}, algorithm {algorithm} is not known here")
    digest = raw[_HEAD.size : _HEAD.size + _DIGEST_BYTES]
    return Footer(version, algorithm, key[:size], index, payload_bytes, padded_bytes, digest)


def check_footer(footer: Footer, key: bytes, payload_bytes: int) -> Fault | None:
    """Does this footer belong to this block? None if so, else WRONG_KEY. Says nothing about the payload."""
    same_lengths = footer.payload_bytes == payload_bytes and footer.padded_bytes == padded(payload_bytes)
    return None if footer.key == key and same_lengths else Fault.WRONG_KEY
