"""Look-ups and publications are counted for what they are, and the bare loop is really the same."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from py_kvcache.bench import metadata
from py_kvcache.bench.metadata import BareCalls, below_target, publish_vs_bare, together
from py_kvcache.bench.metadata_worker import (
    Task,
    block_files,
    look_up,
    lookup_keys,
    publish,
    unpublish,
)
from py_kvcache.bench.workspace import block_key, part_of
from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.layout import block_path, parse_block_path, temp_path
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import BlockFiles, FileSettings


@pytest.fixture
def tmp_path():
    """On tmpfs: a thousand folders are quick to make and to remove there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def folder(tmp_path):
    os.makedirs(part_of(str(tmp_path)))
    return str(tmp_path)


def test_a_whole_run_reports_every_size_and_cleans_up(tmp_path):
    seen = []
    report = metadata.run(
        str(tmp_path),
        files=(50, 200),
        processes=(1, 2),
        rounds=1,
        seconds=0.05,
        on_progress=lambda done, total, text: seen.append((done, total)),
    )
    assert list(tmp_path.iterdir()) == []
    assert [row["files"] for row in report["results"]] == [50, 200]
    for row in report["results"]:
        assert row["publish_vs_bare"] > 0
        assert [one["processes"] for one in row["processes"]] == [1, 2]
        for one in row["processes"]:
            assert one["lookups_per_s"] >= one["lookups_per_s_each"] > 0
            assert one["publications_per_s"] > 0
    assert [done for done, _ in seen] == list(range(seen[0][1]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": ()},
        {"files": (2, 1)},
        {"files": (0,)},
        {"processes": ()},
        {"processes": (0,)},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seconds": 1e9},
        {"rounds": 0},
        {"rounds": 10**9},
        {"files": (10**12,)},
        {"files": range(1, 100)},
        {"processes": (257,)},
    ],
)
def test_impossible_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="must be"):
        metadata.run(str(tmp_path), **wrong)


def recorded(ops):
    """The same FileOps, and the list of the calls that go through it."""
    calls = []

    def record(name, call):
        def recording(path, *arguments, **keywords):
            calls.append(name)
            return call(path, *arguments, **keywords)

        return recording

    for name, call in vars(ops).copy().items():
        setattr(ops, name, record(name, call))
    return ops, calls


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
@pytest.mark.parametrize("there", [0, 1, 2], ids=["no folder", "first folder", "both folders"])
def test_the_bare_loop_makes_exactly_our_system_calls(folder, index, umask, there):
    key = block_key(1)
    before = os.umask(umask)
    sequences, modes = [], []
    try:
        for way in ("ours", "bare"):
            part = f"{folder}/{way}_000000000000_r0"
            final = block_path(part, key)
            os.makedirs([part, os.path.dirname(os.path.dirname(final)), os.path.dirname(final)][there])
            settings = FileSettings(folder)
            ops, calls = recorded(FileOps())
            if way == "ours":
                assert BlockFiles(ops, settings).publish(final, b"", index)
            else:
                temp = temp_path(final, hostname="h", pid=1, token="t")
                BareCalls(ops, settings).publish(final, temp, index)
            sequences.append(calls)
            found = os.stat(final)
            modes.append((found.st_mode, found.st_nlink, os.stat(os.path.dirname(final)).st_mode))
            assert os.listdir(os.path.dirname(final)) == [os.path.basename(final)]
    finally:
        os.umask(before)
    assert sequences[0] == sequences[1]
    assert modes[0] == modes[1]


def test_both_sides_publish_as_much_and_everything_is_removed(folder):
    result = publish_vs_bare(folder, rounds=2, pairs=20)
    assert result["publish_vs_bare"] > 0
    assert os.listdir(part_of(folder)) == []


def test_look_ups_find_what_is_there_and_only_that(folder):
    part = part_of(folder)
    keys = [block_key(number) for number in range(30)]
    publish(block_files(folder), part, keys, 0)
    assert look_up(part, keys) == 30
    assert look_up(part, lookup_keys(30)) == 30, "half of the questions are about files that exist"
    assert len(lookup_keys(30)) == 60
    unpublish(part, keys[:10])
    assert look_up(part, keys) == 20
    unpublish(part, keys)
    assert os.listdir(part) == []


def test_published_files_are_blocks_of_the_layout(folder):
    publish(block_files(folder), part_of(folder), [block_key(7)], 0)
    (path,) = (path for path in Path(folder).rglob("*") if path.is_file())
    parsed = parse_block_path(str(path))
    assert parsed is not None
    assert parsed.hash + parsed.group.to_bytes(4, "big") == block_key(7)


def test_processes_work_together_and_leave_what_they_should(folder):
    assert together([Task("populate", folder, 0, 30), Task("populate", folder, 30, 30)], 0.0) > 0
    part = part_of(folder)
    everything = [block_key(number) for number in range(60)]
    assert look_up(part, everything) == 60
    assert together([Task("lookup", folder, 0, 60)] * 2, 0.05) > 0
    assert together([Task("publish", folder, 1000, 500), Task("publish", folder, 2000, 500)], 0.05) > 0
    assert look_up(part, everything) == 60
    assert sum(path.is_file() for path in Path(folder).rglob("*")) == 60


def test_a_process_that_fails_is_an_error(folder, monkeypatch, capfd):
    with pytest.raises(KvCacheError, match="failed"):
        together([Task("populate", f"{folder}/absent", 0, 5)], 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(KvCacheError, match="did not start"):
        together([Task("lookup", folder, 0, 5)], 0.05)


def test_what_misses_a_target_is_said_in_a_sentence():
    def row(files, bare, one, four, sixteen):
        return {
            "files": files,
            "publish_vs_bare": bare,
            "processes": [
                {"processes": n, "lookups_per_s": rate, "publications_per_s": 1000}
                for n, rate in ((1, one), (4, four), (16, sixteen))
            ],
        }

    good = row(10, 0.8, 200_000, 400_000, 400_000)
    assert below_target({"results": [good, row(20, 0.9, 250_000, 400_000, 500_000)]}) == []
    bad = below_target({"results": [good, row(20, 0.7, 150_000, 400_000, 390_000)]})
    assert len(bad) == 4
    for part in ("0.70 of bare calls", "150,000 lookups_per_s", "390,000 lookups_per_s by 16", "range from"):
        assert any(part in sentence for sentence in bad)
