"""A worker's parts from the settings, and what is said about slower ways."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the device module copies torch tensors")

import torch

from py_kvcache.config import Config, parse_config
from py_kvcache.errors import ConfigError
from py_kvcache.layout import block_path, file_bytes, part_dir
from py_kvcache.worker import assembly
from py_kvcache.worker import device as device_module
from py_kvcache.worker.device import as_bytes, regions_of
from py_kvcache.worker.jobs import BlockWork, Job, Kind
from py_kvcache.worker.pages import PageMap, split_chunks
from py_kvcache.worker.probe import DirectProbe
from py_kvcache.worker.threads import ThreadRing

SPACE = "model_0123456789abcdef"
PAGE, BLOCKS, PER_CHUNK = 1000, 16, 2
KEY = bytes(range(32)) + bytes(4)


def settings(root: Path | str = "/cache", **extra: Any) -> Config:
    return parse_config({"root": str(root), "ring": "threads", "direct_io": "off", **extra}, {})


def kv_caches() -> Any:
    memory = torch.arange(BLOCKS * PAGE, dtype=torch.int64).to(torch.int8).reshape(BLOCKS, PAGE)
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=memory)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
    )


def build(config: Config, kv: Any | None = None, rank: int = 0) -> assembly.Parts:
    kv = kv_caches() if kv is None else kv
    return assembly.build(config, kv, PageMap(regions_of(kv, 0), PER_CHUNK), rank)


GOOD = DirectProbe(True, "", 0, True)
ACCEPTED = DirectProbe(True, "tmpfs accepts it without being direct", 0, False)
REFUSED = DirectProbe(False, "open with O_DIRECT: Invalid argument", errno.EINVAL)
UNTRIED = DirectProbe(False, "read-only", errno.EROFS)


@pytest.mark.parametrize(("setting", "probe", "direct", "said"), [
    ("off", GOOD, False, False),
    ("auto", GOOD, True, False),
    ("on", GOOD, True, False),
    ("auto", ACCEPTED, False, True),
    ("on", ACCEPTED, True, False),
    ("auto", REFUSED, False, True),
    ("auto", UNTRIED, True, False),
    ("on", UNTRIED, True, False),
    ("off", REFUSED, False, False),
])  # fmt: skip
def test_o_direct_follows_the_setting_and_what_the_volume_really_does(
    setting: str, probe: DirectProbe, direct: bool, said: bool
):
    chosen, reason = assembly.use_direct(settings(direct_io=setting), probe)
    assert chosen is direct
    assert (reason is not None) is said
    assert reason in (None, probe.reason)


def test_demanding_o_direct_where_it_is_refused_stops_the_start_with_the_way_out():
    with pytest.raises(ConfigError, match="set direct_io to auto"):
        assembly.use_direct(settings(direct_io="on"), REFUSED)


def test_the_slower_ways_in_use_are_said_once_each_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(assembly, "probe_direct", lambda root: ACCEPTED)
    monkeypatch.setattr(
        assembly,
        "make_ring",
        lambda kind, entries, threads, fd, trial: (ThreadRing(threads, fd), "seccomp forbids it"),
    )
    with caplog.at_level(logging.WARNING):
        parts = build(settings(tmp_path, ring="auto", direct_io="auto"))
    assert parts.fallbacks == {"buffered": ACCEPTED.reason, "threads": "seccomp forbids it"}
    for reason in parts.fallbacks.values():
        assert sum(reason in record.getMessage() for record in caplog.records) == 1
    parts.close(5)


def test_chosen_ways_are_no_fallback(tmp_path: Path):
    parts = build(settings(tmp_path))
    assert parts.fallbacks == {}
    parts.close(5)


def test_staging_is_exactly_what_the_settings_come_to(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    slot = file_bytes(PAGE * PER_CHUNK)
    parts = build(settings(tmp_path, io_depth=5, copy_headroom=2))
    assert parts.reactor.snapshot().slots["free"] == 7
    parts.close(5)
    with caplog.at_level(logging.WARNING):
        parts = build(settings(tmp_path, io_depth=5, copy_headroom=2, staging_bytes=4 * slot + 1))
    assert parts.reactor.snapshot().slots["free"] == 4
    assert "staging memory holds 4 slots" in caplog.text
    parts.close(5)


def test_too_little_staging_is_refused_before_anything_is_started(tmp_path: Path):
    before = threading.active_count()
    with pytest.raises(ConfigError, match="at least 3 staging slots"):
        build(settings(tmp_path, staging_bytes=4096))
    assert threading.active_count() == before


def test_closing_twice_leaves_no_thread_and_no_descriptor(tmp_path: Path):
    descriptors = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    parts = build(settings(tmp_path))
    parts.reactor.start()
    parts.close(5)
    parts.close(5)
    ours = [t for t in threading.enumerate() if t not in threads and t.name.startswith("py-kvcache")]
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1, "listing the folder takes one itself"


def test_a_closed_worker_that_was_never_started_closes_too(tmp_path: Path):
    before, threads = threading.active_count(), set(threading.enumerate())
    parts = build(settings(tmp_path))
    parts.close(5)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert threading.active_count() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(parts.wake_fd)


def test_a_device_that_cannot_be_closed_keeps_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(assembly.TRACE_VARIABLE, str(tmp_path / "t.json"))
    parts = build(settings(tmp_path))
    close = parts.device.close
    monkeypatch.setattr(parts.device, "close", lambda: 1 / 0)
    parts.close(5)
    assert "the device could not be closed" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(parts.wake_fd)
    assert parts.trace is not None
    assert parts.trace._fd == -1
    close()


def test_work_set_aside_runs_in_a_thread_of_its_own(tmp_path: Path):
    parts, seen, done = build(settings(tmp_path)), [], threading.Event()
    parts.run_aside(lambda: (seen.append(threading.get_ident()), done.set()))
    assert done.wait(10)
    assert seen != [threading.get_ident()]
    parts.close(5)


def test_there_is_a_timeline_only_when_its_variable_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(assembly.TRACE_VARIABLE, raising=False)
    assert assembly.open_trace(0) is None
    monkeypatch.setenv(assembly.TRACE_VARIABLE, str(tmp_path / "t.json"))
    for rank, name in ((0, "t.json"), (2, "t.json.rank2")):
        trace = assembly.open_trace(rank)
        trace.complete("a", "b", 1, 2, "lane")
        trace.close()
        assert "worker" in (tmp_path / name).read_text()


def wait_for(parts: assembly.Parts, count: int) -> list[Any]:
    results, ends = [], time.monotonic() + 20
    while len(results) < count:
        assert time.monotonic() < ends, "the job never ended"
        results += parts.reactor.take_finished()
        time.sleep(0.002)
    return results


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_a_worker_built_from_settings_stores_blocks_and_loads_them_into_others(tmp_path: Path, direct: str):
    kv = kv_caches()
    memory = kv.tensors[0].tensor
    before = memory.clone()
    parts = build(settings(tmp_path, direct_io=direct, io_depth=2, copy_headroom=1), kv)
    parts.reactor.start()
    folder = part_dir(str(tmp_path), SPACE, 0)
    keys = [bytes([n]) * 32 + bytes(4) for n in range(3)]

    def job(number: int, kind: Kind, blocks: list[int]) -> Job:
        chunks = split_chunks(np.array(blocks), 0, PER_CHUNK)
        work = tuple(
            BlockWork(block_path(folder, key), key, n, c)
            for n, (key, c) in enumerate(zip(keys, chunks, strict=True))
        )
        return Job(number, kind, work, None, time.monotonic() + 20)

    parts.reactor.submit(job(1, Kind.STORE, [0, 1, 2, 3, 4, 5]))
    (stored,) = wait_for(parts, 1)
    assert stored.failed == ()
    assert stored.bytes == 3 * PAGE * PER_CHUNK
    sizes = {Path(block_path(folder, key)).stat().st_size for key in keys}
    assert sizes == {file_bytes(PAGE * PER_CHUNK)}

    parts.reactor.submit(job(2, Kind.LOAD, [15, 14, 13, 12, 11, 10]))
    (loaded,) = wait_for(parts, 1)
    assert loaded.failed == ()
    for source, target in zip(range(6), range(15, 9, -1), strict=True):
        assert torch.equal(memory[target], before[source])
    assert torch.equal(memory[:10], before[:10])
    assert parts.reactor.snapshot().leaks == 0
    parts.close(10)


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_three_layers_with_pages_of_1000_bytes_make_aligned_slots_and_files(tmp_path: Path, direct: str):
    tensors = [SimpleNamespace(tensor=layer) for layer in torch.randint(-128, 128, (3, BLOCKS, PAGE)).char()]
    refs = [SimpleNamespace(tensor_idx=n, page_size_bytes=PAGE) for n in range(3)]
    kv = SimpleNamespace(tensors=tensors, group_data_refs=[refs])
    parts = build(settings(tmp_path, direct_io=direct), kv)
    slots = parts.reactor._core.staging._slots
    starts = [as_bytes(slot.buffer).ctypes.data for slot in slots]
    assert {n % 4096 for slot in slots for n in (slot.offset, len(slot.buffer))} == {0}
    assert {start % 4096 for start in starts} == {0}

    path = block_path(part_dir(str(tmp_path), SPACE, 0), KEY)
    work = (BlockWork(path, KEY, 0, split_chunks(np.array([4, 1]), 0, PER_CHUNK)[0]),)
    parts.reactor.start()
    parts.reactor.submit(Job(1, Kind.STORE, work, None, time.monotonic() + 20))
    assert wait_for(parts, 1)[0].failed == ()
    content = Path(path).read_bytes()
    assert len(content) == file_bytes(3 * PAGE * PER_CHUNK) == 2 * 4096 + 4096
    assert content[:6000] == b"".join(t.tensor[b].numpy().tobytes() for t in tensors for b in (4, 1))
    parts.close(10)


def test_a_file_holds_what_was_there_at_submission_though_blocks_are_reused_after_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kv = kv_caches()
    memory = kv.tensors[0].tensor
    run = device_module._Batch.run
    # Copies that begin late, so that what does not wait for them is seen.
    monkeypatch.setattr(device_module._Batch, "run", lambda batch: (time.sleep(0.05), run(batch)))
    parts = build(settings(tmp_path), kv)
    parts.reactor.start()
    memory.fill_(1)
    memory[:6] = torch.arange(6, dtype=torch.int8)[:, None]  # what the step computes, just before
    folder = part_dir(str(tmp_path), SPACE, 0)
    keys = [bytes([n]) * 32 + bytes(4) for n in range(3)]
    chunks = split_chunks(np.arange(6), 0, PER_CHUNK)
    work = tuple(
        BlockWork(block_path(folder, k), k, n, c) for n, (k, c) in enumerate(zip(keys, chunks, strict=True))
    )
    parts.reactor.submit(Job(1, Kind.STORE, work, None, time.monotonic() + 20))
    parts.reactor.flush({1}, 20)
    memory.fill_(99)
    (result,) = wait_for(parts, 1)
    assert result.failed == ()
    for n, block in enumerate(work):
        expected = bytes([2 * n]) * PAGE + bytes([2 * n + 1]) * PAGE
        assert Path(block.path).read_bytes()[: 2 * PAGE] == expected
    parts.close(10)


def test_the_timeline_of_a_worker_is_readable_after_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trace.json"
    monkeypatch.setenv(assembly.TRACE_VARIABLE, str(path))
    root = tmp_path / "cache"
    root.mkdir()
    parts = build(settings(root))
    parts.reactor.start()
    parts.close(5)
    text = path.read_text().rstrip().rstrip(",")
    assert isinstance(json.loads(text if text.endswith("]") else text + "]"), list)


def test_all_parts_share_one_timeout_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts = build(settings(tmp_path))
    clock, given = [1000.0], []
    stop, shutdown = parts.reactor.stop, parts.publisher.shutdown
    monkeypatch.setattr(assembly, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow_stop(timeout_s: float) -> bool:
        clock[0] += 7
        return stop(timeout_s)

    def noted_shutdown(timeout_s: float) -> bool:
        given.append(timeout_s)
        return shutdown(timeout_s)

    monkeypatch.setattr(parts.reactor, "stop", slow_stop)
    monkeypatch.setattr(parts.publisher, "shutdown", noted_shutdown)
    parts.close(10)
    assert given == [3.0]
