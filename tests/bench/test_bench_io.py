"""The comparison with fio is fair, complete and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from py_kvcache.bench import compare, fio, io, workspace
from py_kvcache.bench.compare import Setting, Side, make_read_set, percentile
from py_kvcache.bench.engine import Block, Engine, Pass
from py_kvcache.bench.fio import FioPass, find_fio, run_fio
from py_kvcache.errors import ConfigError, KvCacheError, RootError
from py_kvcache.worker.checksum import verify_block
from py_kvcache.worker.probe import DirectProbe

KIB = 1024
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(compare, "READ_SET_BYTES", 2 << 20)
    monkeypatch.setattr(compare, "WRITE_BYTES", 2 << 20)
    monkeypatch.setattr(compare, "TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr("py_kvcache.bench.sidework.TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr("py_kvcache.bench.sidework._DEEPER", (32,))


@pytest.fixture
def disk_folder():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield made


def keys_of(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


@needs_fio
@pytest.mark.parametrize(
    ("base", "sizes", "rounds"),
    [("/var/tmp", [64 * KIB], 2), ("/dev/shm", [64 * KIB, 128 * KIB], 1)],
    ids=["disk", "tmpfs"],
)
def test_a_whole_run_reports_each_size_and_mode_and_cleans_up(base, sizes, rounds):
    seen = []
    with tempfile.TemporaryDirectory(dir=base) as root:
        report = io.run(
            root,
            sizes=sizes,
            rounds=rounds,
            seconds=0.05,
            on_progress=lambda done, total, text: seen.append((done, total, text)),
        )
        assert os.listdir(root) == []
    modes = [True, False] if report["direct"]["bypasses_page_cache"] else [False]
    wanted = [(size, mode) for size in sizes for mode in modes]
    assert [(row["file_bytes"], row["direct"]) for row in report["results"]] == wanted
    for row in report["results"]:
        assert row["read_ratio"] > 0
        assert row["write_ratio"] > 0
        assert row["submits"] > 0
        assert row["submit_p50_ms"] <= row["submit_p99_ms"]
        assert len(row["read_rounds"]) == len(row["write_rounds"]) == rounds
        assert row["fio"].startswith("io_uring, iodepth 16" if row["direct"] else "psync, 16 jobs")
    assert [row["file_bytes"] for row in report["second_thread"]] == sizes
    assert report["checksum"]["one_thread_gb_s"] > 0
    assert {key for key in keys_of(report) if "ratio" in key} == {"read_ratio", "write_ratio"}
    assert [done for done, _, _ in seen] == list(range(seen[0][1]))


def test_without_fio_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KvCacheError, match="apt-get install fio"):
        io.run(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [{"sizes": ()}, {"sizes": (4096,)}, {"sizes": (10_000,)}, {"depth": 1}, {"rounds": 0}, {"seconds": 0}],
)
def test_impossible_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="must be"):
        io.run(str(tmp_path), **wrong)


@needs_fio
def test_a_failure_in_the_middle_removes_the_files_too(monkeypatch, disk_folder):
    def fail(fio_, what):
        raise KvCacheError("fio failed")

    monkeypatch.setattr(compare, "run_fio", fail)
    with pytest.raises(KvCacheError, match="fio failed"):
        io.run(disk_folder, sizes=(64 * KIB,), rounds=1, seconds=0.05)
    assert os.listdir(disk_folder) == []


@needs_fio
def test_where_direct_io_is_refused_only_buffered_rows_are_made(monkeypatch, disk_folder):
    refused = DirectProbe(False, "O_DIRECT fails at open", 22, filesystem="odd")
    monkeypatch.setattr(io, "probe_direct", lambda folder: refused)
    report = io.run(disk_folder, sizes=(64 * KIB,), rounds=1, seconds=0.05)
    assert [row["direct"] for row in report["results"]] == [False]
    assert report["direct"] == {"accepted": False, "bypasses_page_cache": False, "note": refused.reason}
    assert report["results"][0]["fio"] == "psync, 16 jobs, direct=0"


def test_what_misses_a_target_is_said_in_a_sentence():
    row = {
        "file_bytes": 28 << 20, "direct": True, "read_ratio": 0.94, "write_ratio": 0.96, "submit_p99_ms": 1.5,
        "read_cpu_s_per_gb": 0.2, "write_cpu_s_per_gb": 0.05,
    }  # fmt: skip
    second = {"file_bytes": 28 << 20, "direct": True, "loss": 0.2}
    found = io.below_target({"results": [row], "second_thread": [second]})
    assert len(found) == 4
    assert "28 MiB direct: read reaches 0.940 of fio" in found[0]
    good = {**row, "read_ratio": 0.95, "submit_p99_ms": 1.0, "read_cpu_s_per_gb": 0.1}
    small_file = {**good, "file_bytes": 1 << 20, "read_cpu_s_per_gb": 0.3}
    fine = {"results": [good, small_file], "second_thread": [{**second, "loss": 0.1}]}
    assert io.below_target(fine) == []


def test_the_figure_is_the_median_of_the_rounds_and_who_begins_takes_turns():
    order = []
    side = Side()
    rates = iter([(100, 50.0), (100, 200.0), (300, 100.0)])
    for number in range(3):
        mine, theirs = next(rates)

        def ours(mine=mine):
            order.append("ours")
            return Pass(mine, 1.0, 0.5)

        def fios(theirs=theirs):
            order.append("fio")
            return theirs

        side.alternate(number, ours, fios)
    assert side.against_fio == 2.0
    assert order == ["ours", "fio", "fio", "ours", "ours", "fio"]
    assert side.figures("read")["read_cpu_s_per_gb"] == round(1.5 / 500 * 1e9, 4)


def test_percentiles_of_few_values_exist():
    assert percentile([], 0.99) == 0.0
    assert percentile([1.0], 0.99) == 1.0
    assert percentile(list(range(100)), 0.99) == 99


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ring", ["io_uring", "threads"])
def test_the_engine_writes_real_blocks_and_reads_them_back(disk_folder, direct, ring):
    size = 64 * KIB
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    engine = Engine(disk_folder, size, direct=direct, ring=ring, checksum=True)
    try:
        blocks = [engine.new_block(number) for number in range(50)]
        stored = engine.store(blocks)
        assert stored.bytes == 50 * size
        assert stored.cpu_s >= 0
        for block in blocks:
            content = memoryview(bytearray(Path(block.path).read_bytes()))
            assert len(content) == size
            assert verify_block(content, block.key, engine.payload, enabled=True) == (None, "")
        loaded = engine.load(blocks, 0.05)
        assert loaded.bytes >= 50 * size
        assert loaded.bytes % size == 0
        assert engine.ring.submits
    finally:
        engine.close()
    assert threading.active_count() == before[0]
    assert len(os.listdir("/proc/self/fd")) == before[1]


def test_a_load_that_fails_is_an_error_and_not_a_figure(disk_folder):
    engine = Engine(disk_folder, 64 * KIB, direct=False)
    try:
        absent = Block(bytes(36), f"{disk_folder}/absent")
        with pytest.raises(KvCacheError, match="missing"):
            engine.load([absent], 0.05)
    finally:
        engine.close()


@needs_fio
@pytest.mark.parametrize(("direct", "engine_name"), [(True, "io_uring"), (False, "psync")])
def test_fio_reads_our_very_files_and_changes_none(disk_folder, direct, engine_name):
    setting = Setting(disk_folder, 64 * KIB, direct, engine_name, 16, 1, 0.05, "auto", 1 << 30)
    engine = Engine(disk_folder, 64 * KIB, direct=direct)
    try:
        blocks = make_read_set(engine, setting)
    finally:
        engine.close()
    before = {block.path: Path(block.path).read_bytes() for block in blocks}
    assert len(before) == 32
    what = FioPass(f"{disk_folder}/set", 64 * KIB, len(blocks), direct, engine_name, 16, seconds=0.05)
    assert run_fio(find_fio(), what) > 0
    after = {str(path): path.read_bytes() for path in Path(disk_folder, "set").iterdir()}
    assert after == before
    Path(blocks[0].path).unlink()
    with pytest.raises(KvCacheError, match="fio"):
        run_fio(find_fio(), what)


@needs_fio
def test_fio_writes_as_many_new_files_of_the_size(tmp_path):
    what = FioPass(str(tmp_path), 64 * KIB, 48, False, "psync", 16, write=True)
    assert run_fio(find_fio(), what) > 0
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [64 * KIB] * 48


def test_fio_that_says_nothing_sensible_is_an_error(tmp_path):
    fake = tmp_path / "fio"
    fake.write_text("#!/bin/sh\necho it broke >&2\nexit 1\n")
    fake.chmod(0o755)
    what = FioPass(str(tmp_path), 64 * KIB, 16, False, "psync", 16)
    with pytest.raises(KvCacheError, match="it broke"):
        run_fio(fio.Fio(str(fake), "0"), what)


def test_too_little_space_or_no_folder_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(RootError, match="are free"), workspace.workspace(str(tmp_path), 1 << 60):
        pass
    with pytest.raises(RootError, match="inodes"), workspace.workspace(str(tmp_path), 0, 1 << 60):
        pass
    with pytest.raises(RootError, match="not a folder"), workspace.workspace(str(tmp_path / "no"), 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_file_counts_suit_fios_jobs_and_the_free_space():
    def count(free, wanted, size=1 << 20):
        return Setting("", size, True, "psync", 16, 1, 1.0, "auto", free).count(wanted)

    assert count(1 << 40, 100 << 20) == 96
    assert count(1 << 40, 1 << 40) == compare.MOST_FILES
    assert count(400 << 20, 1 << 30) == 96
    assert count(0, 1 << 30) == 16
