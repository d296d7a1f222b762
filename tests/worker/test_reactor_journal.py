"""What the reactor says: few warnings, and a timeline if asked for."""

from __future__ import annotations

import errno

import pytest
from worker_doubles import HOLD


def test_a_thousand_failures_of_one_kind_are_one_warning_a_minute(rig, caplog):
    r = rig()
    r.world.rule("read", -errno.EIO)
    for job in range(100):
        r.load(job, 1)
    r.run(200)
    assert [record.message.count("EIO") for record in caplog.records] == [1]
    assert "/cache/0/0" in caplog.text
    r.clock.now += 61
    r.load(100, 1)
    r.run()
    assert len(caplog.records) == 2
    assert "99 more" in caplog.records[1].message


def test_a_missed_deadline_is_said(rig, caplog):
    r = rig()
    r.world.rule("read", HOLD)
    r.load(1, 3)
    r.run(5)
    r.step(31)
    assert "load given up: timeout: /cache/1/0" in caplog.text


class Recorder:
    def __init__(self) -> None:
        self.bars: list[tuple[str, str, float]] = []
        self.samples: list[dict[str, float]] = []
        self.spans: list[tuple[str, float, dict[str, object]]] = []

    def complete(self, name, cat, ts_us, dur_us, lane, **args):
        self.bars.append((name, lane, dur_us))

    def span(self, name, cat, ts_us, dur_us, ident, **args):
        self.spans.append((name, dur_us, args))

    def flush(self):
        self.flushed = len(self.spans)

    def counter(self, name, ts_us, **values):
        self.samples.append(values)


def test_the_timeline_has_every_operation_and_the_slots(rig):
    recorder = Recorder()
    r = rig(trace=recorder)
    r.world.rule("read", HOLD)
    r.load(1, 1)
    r.store(2, 1)
    r.run(10)
    r.clock.now += 0.25
    r.world.release()
    r.run()
    named = {name for name, _, _ in recorder.bars}
    assert named == {
        "read", "verify", "copy to device", "copy from device", "seal", "write", "publish", "submit",
    }  # fmt: skip
    (read,) = [bar for bar in recorder.bars if bar[0] == "read"]
    assert read[1].startswith("slot ")
    assert read[2] == pytest.approx(250_000)
    assert recorder.samples[0]["load"] + recorder.samples[0]["store"] >= 1
    assert recorder.samples[-1] == {"free": 6, "load": 0, "store": 0, "stuck": 0, "kept": 0}
    assert sorted((name, args["blocks"], args["done"]) for name, _, args in recorder.spans) == [
        ("load job", 1, 1), ("store job", 1, 1),
    ]  # fmt: skip
    assert max(took for _, took, _ in recorder.spans) == pytest.approx(250_000)
    assert recorder.flushed == 2, "an idle worker leaves nothing in memory"
