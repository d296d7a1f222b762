"""Two checkpoints of equal names, sizes, headers and times are told apart by their bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.weights import PAGE, sample_offsets, tensor_ranges, weights_mark

TENSORS = {"embed": 40_000, "norm": 64, "q": 100_000, "head": 30_000}


def checkpoint(path: Path, changed: str = "", at: int = 0) -> Any:
    """One file with every tensor of TENSORS, all times equal; one byte of one tensor may differ."""
    header, data, begin = {"__metadata__": {"format": "pt"}}, b"", 0
    for name, size in TENSORS.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}  # type: ignore[dict-item]
        content = bytearray(size)
        if name == changed:
            content[at] = 1
        data, begin = data + content, begin + size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.utime(path, ns=(1, 1))
    return weights_mark(str(path.parent))


@pytest.mark.parametrize("name", list(TENSORS))
@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_a_change_in_any_one_tensor_is_seen(tmp_path: Path, name: str, where: str):
    at = {"begin": 0, "middle": TENSORS[name] // 2, "end": TENSORS[name] - 1}[where]
    path = tmp_path / "model.safetensors"
    before = checkpoint(path)
    assert checkpoint(path) == before
    assert checkpoint(path, name, at) != before


def test_so_is_one_in_a_file_without_a_header(tmp_path: Path):
    path = tmp_path / "model.gguf"
    found = []
    for at in (None, 0, 1_500_000, 2_999_999):
        content = bytearray(3_000_000)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
        found.append(weights_mark(str(path)))
    assert len({json.dumps(mark) for mark in found}) == len(found)


def test_size_and_mtime_count_besides(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    before = checkpoint(path)
    os.utime(path, ns=(1, 2))
    later = weights_mark(str(tmp_path))
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(1, 2))
    assert before != later != weights_mark(str(tmp_path))


@pytest.mark.parametrize("content", [
    b"", b"\xff" * 8, b"\xff" * 20, b"abc", b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"null",
    b"\x09" + bytes(7) + b'{"a": {}}',
])  # fmt: skip
def test_a_broken_safetensors_file_has_a_mark_too(tmp_path: Path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert weights_mark(str(tmp_path))[0][:2] == ["model.safetensors", len(content)]


def test_what_is_no_weight_file_does_not_count(tmp_path: Path):
    before = checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    assert weights_mark(str(tmp_path)) == before


def test_a_file_that_cannot_be_read_says_which(tmp_path: Path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        weights_mark(str(tmp_path))


def header_of(ranges: list[tuple[int, int]]) -> bytes:
    text = json.dumps({str(n): {"data_offsets": pair} for n, pair in enumerate(ranges)}).encode()
    return len(text).to_bytes(8, "little") + text


@given(st.lists(st.tuples(st.integers(-9, 10_000), st.integers(-9, 10_000))), st.integers(0, 20_000))
def test_ranges_outside_the_file_are_left_out(ranges: list[tuple[int, int]], size: int):
    header = header_of(ranges)
    for begin, end in tensor_ranges(header, size):
        assert len(header) <= begin < end <= size
        assert (begin - len(header), end - len(header)) in ranges


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 30)), min_size=1), st.integers(1, 64))
def test_no_more_pages_are_read_than_asked_for_each_within_its_tensor(
    pairs: list[tuple[int, int]], most: int
):
    ranges = [(begin, begin + length) for begin, length in pairs]
    offsets = sample_offsets(ranges, most)
    assert 1 <= len(offsets) <= most
    assert offsets == sorted(set(offsets))
    for offset in offsets:
        assert any(begin <= offset < end for begin, end in ranges)


def test_few_tensors_have_three_pages_each():
    assert sample_offsets([(0, 10 * PAGE)], 100) == [0, (10 * PAGE - PAGE) // 2, 9 * PAGE]
    assert sample_offsets([(8, 16)], 100) == [8]
