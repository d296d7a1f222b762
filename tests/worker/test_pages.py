"""Where the bytes of a block lie: nothing overlaps, nothing is left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.worker.pages import Copies, PageMap, Region, split_chunks

PAGES = st.lists(st.integers(1, 5_000), min_size=1, max_size=6)


def page_map(pages: list[int], per_chunk: int, gap: int = 0, blocks: int = 64) -> PageMap:
    base, regions = 0, []
    for page in pages:
        regions.append(Region(base, page + gap, page))
        base += (page + gap) * blocks
    return PageMap(regions, per_chunk)


def spans(starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
    return sorted(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))


@given(PAGES, st.integers(1, 8))
def test_the_offsets_of_a_whole_chunk_are_disjoint_and_cover_the_payload(pages: list[int], per_chunk: int):
    mapping = page_map(pages, per_chunk)
    copies = mapping.copies(np.arange(per_chunk)[::-1], 0)
    assert mapping.payload_bytes == sum(pages) * per_chunk
    position = 0
    for begin, end in spans(copies.offsets, copies.lengths):
        assert begin == position
        position = end
    assert position == mapping.payload_bytes


@given(PAGES, st.integers(1, 6), st.integers(0, 300), st.data())
def test_the_addresses_of_different_blocks_never_overlap(pages: list[int], per_chunk: int, gap: int, data):
    ids = data.draw(st.lists(st.integers(0, 63), min_size=per_chunk, max_size=per_chunk, unique=True))
    copies = page_map(pages, per_chunk, gap).copies(np.array(ids), 0)
    found = spans(copies.addresses, copies.lengths)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    assert len(found) == len(pages) * per_chunk


@given(PAGES, st.integers(2, 8), st.data())
def test_a_partial_chunk_uses_the_places_that_it_has_in_the_whole_one(pages: list[int], per_chunk: int, data):
    first = data.draw(st.integers(0, per_chunk - 1))
    count = data.draw(st.integers(1, per_chunk - first))
    mapping, ids = page_map(pages, per_chunk), np.arange(per_chunk) + 3
    whole, part = mapping.copies(ids, 0), mapping.copies(ids[first : first + count], first)
    places = dict(zip(whole.addresses.tolist(), whole.offsets.tolist(), strict=True))
    assert [places[address] for address in part.addresses.tolist()] == part.offsets.tolist()


def test_three_layers_with_pages_of_1000_bytes_lie_layer_by_layer():
    copies = page_map([1000, 1000, 1000], per_chunk=2).copies(np.array([5, 9]), 0)
    assert copies.offsets.tolist() == [0, 1000, 2000, 3000, 4000, 5000]
    assert copies.addresses.tolist() == [5_000, 9_000, 69_000, 73_000, 133_000, 137_000]
    assert copies.lengths.tolist() == [1000] * 6


def test_ragged_layers_keep_their_own_page_sizes():
    copies = page_map([100, 7], per_chunk=3).copies(np.array([0, 1, 2]), 0)
    assert copies.lengths.tolist() == [100, 100, 100, 7, 7, 7]
    assert copies.offsets.tolist() == [0, 100, 200, 300, 307, 314]


def test_a_stride_beyond_the_page_is_stepped_over_and_not_copied():
    mapping = PageMap([Region(base=10_000, stride=500, page=100)], 2)
    copies = mapping.copies(np.array([1, 4]), 0)
    assert copies.addresses.tolist() == [10_500, 12_000]
    assert mapping.payload_bytes == 200


def test_addresses_beyond_32_bits_are_exact_whatever_the_type_of_the_block_ids():
    mapping = PageMap([Region(base=2**46, stride=2**31, page=8)], 1)
    copies = mapping.copies(np.array([70_000], np.int32), 0)
    assert copies.addresses.tolist() == [2**46 + 70_000 * 2**31]


@pytest.mark.parametrize(("count", "first"), [(3, 0), (1, 2), (2, 1), (1, -1)])
def test_blocks_beyond_the_chunk_are_refused(count: int, first: int):
    with pytest.raises(ValueError, match="do not fit 2"):
        page_map([8], 2).copies(np.arange(count), first)


@pytest.mark.parametrize(("regions", "per_chunk"), [([], 1), ([Region(0, 8, 8)], 0)])
def test_a_map_that_holds_nothing_is_refused(regions: list[Region], per_chunk: int):
    with pytest.raises(ValueError, match="hold nothing"):
        PageMap(regions, per_chunk)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 100), st.integers(1, 9))
def test_cutting_at_chunk_borders_keeps_every_block_and_its_place(ids: list[int], start: int, per_chunk: int):
    chunks = split_chunks(ids, start, per_chunk)
    position = start
    for number, chunk in enumerate(chunks):
        assert chunk.first == position % per_chunk
        assert number == 0 or chunk.first == 0
        assert 1 <= len(chunk.block_ids) <= per_chunk - chunk.first
        position += len(chunk.block_ids)
    assert [int(block) for chunk in chunks for block in chunk.block_ids] == ids
    assert all(chunk.first + len(chunk.block_ids) == per_chunk for chunk in chunks[:-1])


def test_a_load_that_begins_inside_a_chunk_is_cut_there():
    chunks = split_chunks([10, 11, 12, 13, 14], start=6, blocks_per_chunk=4)
    assert [(chunk.first, chunk.block_ids.tolist()) for chunk in chunks] == [(2, [10, 11]), (0, [12, 13, 14])]


@given(PAGES, st.integers(1, 9), st.integers(0, 1), st.data())
def test_runs_copy_the_same_bytes_in_as_few_entries_as_the_pool_allows(
    pages: list[int], per_chunk: int, gap: int, data
):
    first = data.draw(st.integers(0, per_chunk - 1))
    ids = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=per_chunk - first, unique=True))
    mapping = page_map(pages, per_chunk, gap)
    single, runs = mapping.copies(np.array(ids), first), mapping.runs(np.array(ids), first)

    def moved(copies: Copies) -> list[tuple[int, int]]:
        columns = (copies.addresses.tolist(), copies.offsets.tolist(), copies.lengths.tolist())
        return sorted((a + n, o + n) for a, o, length in zip(*columns, strict=True) for n in range(length))

    assert moved(runs) == moved(single)
    breaks = (
        sum(after != before + 1 for before, after in itertools.pairwise(ids)) if gap == 0 else len(ids) - 1
    )
    assert len(runs.lengths) == len(pages) * (breaks + 1)


def test_runs_beyond_the_chunk_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        page_map([100], per_chunk=3).runs(np.array([4, 5, 6]), 1)
