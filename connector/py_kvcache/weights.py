"""Which weights a local file holds: told by its bytes, since names, sizes and times can be equal.

Two fine-tunes of one base have the same file names, sizes and safetensors headers; reproducible images
and stores (SOURCE_DATE_EPOCH, Nix) give all files one mtime. A checkpoint is too large to be read twice at
each start, so pages from every tensor of it are; code is small and is read whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blake3 import blake3

SHARD_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

PAGE = 4096
# Over all files: what a network file system with 0.5 ms a read answers to THREADS readers within 2 s.
MOST_PAGES = 32_768
THREADS = 8
# Of a file without a header that we can read so much is hashed from its beginning (a GGUF's description).
_HEAD_BYTES = 1 << 20
_LONGEST_HEADER = 64 << 20
_CHUNK = 1 << 20


def content_mark(path: str) -> str:
    """Hash of a whole file. Raises OSError."""
    found = blake3()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return str(found.hexdigest())


def tensor_ranges(header: bytes, size: int) -> list[tuple[int, int]]:
    """Begin and end in the file of each tensor, by offset, as a safetensors header tells them.

    Args:
        header: length (8 bytes, little endian) and JSON, from the beginning of the file.
        size: bytes in the file; ranges that do not lie within it are left out.

    Returns:
        Nothing where this is no such header: vLLM will say so itself.
    """
    try:
        fields = json.loads(header[8:])
        ranges = [entry["data_offsets"] for name, entry in fields.items() if name != "__metadata__"]
        found = [(len(header) + int(begin), len(header) + int(end)) for begin, end in ranges]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return sorted((begin, end) for begin, end in found if len(header) <= begin < end <= size)


def sample_offsets(ranges: list[tuple[int, int]], most: int) -> list[int]:
    """Where pages are read: begin, middle and end of each range, evenly thinned out to ``most``."""
    offsets = sorted(
        {
            offset
            for begin, end in ranges
            for offset in (begin, max(begin, (begin + end - PAGE) // 2), max(begin, end - PAGE))
        }
    )
    if len(offsets) <= most:
        return offsets
    return [offsets[position * len(offsets) // most] for position in range(most)]


def _file_mark(path: str, most_pages: int, times: bool) -> list[Any]:
    """Name, size, perhaps mtime, and a hash of the header and of pages from all over the file."""
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        head = _read(file.fileno(), 0, 8)
        ranges: list[tuple[int, int]] = []
        if path.endswith(".safetensors") and len(head) == 8:
            head += _read(file.fileno(), 8, min(int.from_bytes(head, "little"), _LONGEST_HEADER))
            ranges = tensor_ranges(head, status.st_size)
        if not ranges:
            head = _read(file.fileno(), 0, _HEAD_BYTES)
            step = max(PAGE, status.st_size // max(1, most_pages))
            ranges = [(begin, begin + PAGE) for begin in range(len(head), status.st_size, step)]
            ranges.append((max(0, status.st_size - PAGE), status.st_size))
        found = hashlib.sha256(head)
        # Without this the kernel reads ahead of each page, 128 KiB and more.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in sample_offsets(ranges, most_pages):
            found.update(_read(file.fileno(), offset, PAGE))
    time = [status.st_mtime_ns] if times else []
    return [os.path.basename(path), status.st_size, *time, found.hexdigest()]


def _read(descriptor: int, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes; fewer at the end of the file only."""
    return b"".join(_pieces(descriptor, offset, length))


def _pieces(descriptor: int, offset: int, length: int) -> Iterator[bytes]:
    while length and (piece := os.pread(descriptor, length, offset)):
        yield piece
        offset, length = offset + len(piece), length - len(piece)


def weights_mark(folder: str, *, times: bool = True) -> list[list[Any]]:
    """What changes when the weights in a local folder (or one file) are replaced; empty if there are none.

    Args:
        folder: a folder or one file.
        times: mtimes count, too.

    Raises:
        OSError: the folder or a file in it cannot be read.
    """
    if os.path.isfile(folder):
        return [_file_mark(folder, MOST_PAGES, times)]
    names = [name for name in sorted(os.listdir(folder)) if name.endswith((*SHARD_ENDINGS, ".index.json"))]
    if not any(name.endswith(SHARD_ENDINGS) for name in names):
        return []  # a streaming loader leaves the index here, and the weights elsewhere
    most = max(64, MOST_PAGES // max(1, len(names)))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="pykv-weights") as threads:
        return list(threads.map(lambda name: _file_mark(os.path.join(folder, name), most, times), names))
