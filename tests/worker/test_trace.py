"""The timeline can be opened whatever happened to its process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import py_kvcache
from py_kvcache.worker.trace import Trace


def load(path):
    return json.loads(Path(path).read_text())


def test_events_counters_and_lanes_come_out_as_they_went_in(tmp_path):
    trace = Trace(str(tmp_path / "t.json"), process="worker 0")
    trace.complete("read", "io", 10.5, 2.0, "slot 1", bytes=4096, path='a "quoted" name')
    trace.complete("read", "io", 11, 2.0, "slot 2")
    trace.complete("copy", "device", 13, 1.0, "slot 1")
    trace.instant("fallback", "io", 14, "slot 2", reason="EINVAL")
    trace.counter("slots", 12, free=3, load=1)
    trace.close()
    events = load(trace.path)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"worker 0"}
    reads = [event for event in events if event["name"] == "read"]
    assert [(event["ph"], event["ts"], event["dur"], lanes[event["tid"]]) for event in reads] == [
        ("X", 10.5, 2.0, "slot 1"),
        ("X", 11, 2.0, "slot 2"),
    ]
    assert reads[0]["args"] == {"bytes": 4096, "path": 'a "quoted" name'}
    assert sorted(lanes.values()) == ["slot 1", "slot 2"]
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("slots", {"free": 3, "load": 1})
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["args"], lanes[instant["tid"]]) == ({"reason": "EINVAL"}, "slot 2")
    assert {event["pid"] for event in events} == {os.getpid()}


def test_the_file_is_valid_json_after_every_flush(tmp_path):
    trace = Trace(str(tmp_path / "t.json"), flush_every=3)
    assert len(load(trace.path)) == 1
    sizes = []
    for number in range(10):
        trace.complete("x", "y", number, 1, "lane")
        sizes.append(sum(event["name"] == "x" for event in load(trace.path)))
    trace.flush()
    assert sizes[-1] in (8, 9)
    assert sizes[0] == 0  # buffered
    assert sum(event["name"] == "x" for event in load(trace.path)) == 10
    trace.close()


def test_a_killed_process_leaves_valid_json(tmp_path):
    path = tmp_path / "t.json"
    script = f"""
from py_kvcache.worker.trace import Trace
trace = Trace({str(path)!r}, flush_every=5)
print("ready", flush=True)
number = 0
while True:
    trace.complete("work", "test", number, 1.0, f"lane {{number % 7}}", number=number)
    number += 1
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(py_kvcache.__file__).parents[1])}
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        child.stdout.readline()
        while path.stat().st_size < 50_000:
            assert child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.communicate()
        numbers = [event["args"]["number"] for event in load(path) if event["name"] == "work"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 100
        # Names of the lanes come before their use, each once.
        names = [event["args"]["name"] for event in load(path) if event["name"] == "thread_name"]
        assert names == [f"lane {number}" for number in range(7)]


def test_processes_that_trace_to_the_same_name_do_not_mix(tmp_path):
    path = str(tmp_path / "t.json")
    one, two = Trace(path), Trace(path)
    one.complete("one", "", 0, 1, "a")
    two.complete("two", "", 0, 1, "a")
    one.close()
    two.close()
    assert one.path == path
    assert two.path == str(tmp_path / f"t.{os.getpid()}.json")
    assert {event["name"] for event in load(one.path)} == {"process_name", "thread_name", "one"}
    assert {event["name"] for event in load(two.path)} == {"process_name", "thread_name", "two"}
    again = Trace(path)  # a file of an earlier run is written anew
    again.close()
    assert again.path == path
    assert len(load(path)) == 1


def test_threads_may_trace_at_once(tmp_path):
    trace = Trace(str(tmp_path / "t.json"), flush_every=7)

    def work(lane):
        for number in range(200):
            trace.complete("x", "y", number, 1, f"lane {lane}")

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert sum(event["name"] == "x" for event in load(trace.path)) == 800


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, monkeypatch, caplog, short):
    trace = Trace(str(tmp_path / "t.json"), flush_every=1)
    trace.complete("good", "", 0, 1, "a")
    real = os.pwrite

    def pwrite(fd, data, offset):
        if len(data) < 10:
            return real(fd, data, offset)
        if short:
            return real(fd, data[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("py_kvcache.worker.trace.os.pwrite", pwrite)
    for _ in range(3):
        trace.complete("bad", "", 0, 1, "a")
    trace.counter("bad", 0, x=1)
    trace.close()
    assert [event["name"] for event in load(trace.path)] == ["process_name", "thread_name", "good"]
    assert len(caplog.records) == 1


def test_close_may_be_repeated_and_later_events_are_dropped(tmp_path):
    trace = Trace(str(tmp_path / "t.json"))
    trace.close()
    trace.complete("late", "", 0, 1, "a")
    trace.flush()
    trace.close()
    assert len(load(trace.path)) == 1
