"""A root filled by hand, independent of the writer under connector/py_kvcache/worker."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from py_kvcache import layout
from py_kvcache.digest import digest_of
from py_kvcache.footer import ALGO_NONE, ALGO_SUMS, digest_header, make_footer, pack_footer


class Root:
    """A cache root and the means to fill and to spoil it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._random = random.Random(7)

    def namespace(
        self, model: str = "org/Tiny", digest: str = "0123456789abcdef", *, ours: bool = True
    ) -> str:
        name = layout.namespace_name(model, digest)
        if ours:
            layout.write_config(str(self.path), name, {"model": model, "block_tokens": 256})
        return name

    def block(
        self,
        namespace: str,
        part: int = 0,
        *,
        group: int = 0,
        payload_bytes: int = 10_000,
        index: int = 0,
        algorithm: int = ALGO_SUMS,
    ) -> Path:
        """Store one valid block of random bytes."""
        key = self._random.randbytes(32) + group.to_bytes(4, "big")
        path = Path(layout.block_path(layout.part_dir(str(self.path), namespace, part), key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content(key, payload_bytes, index, algorithm))
        return path

    def content(self, key: bytes, payload_bytes: int = 10_000, index: int = 0, algorithm: int = 1) -> bytes:
        payload = self._random.randbytes(payload_bytes).ljust(layout.padded(payload_bytes), b"\0")
        footer = make_footer(key, index, payload_bytes, algorithm)
        if algorithm != ALGO_NONE:
            footer = replace(footer, digest=digest_of(algorithm, payload, digest_header(footer)))
        return payload + pack_footer(footer)

    def temporary(self, beside: Path, *, age_s: float = 0.0) -> Path:
        path = Path(layout.temp_path(str(beside), hostname="node-1", pid=42, token=f"t{age_s:.0f}"))
        path.write_bytes(b"half")
        if age_s:
            now = path.stat().st_mtime - age_s
            os.utime(path, (now, now))
        return path


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    return flip_bit


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")
