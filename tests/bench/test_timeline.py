"""A trace is told in bursts, each with what its stages took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from py_kvcache.bench import timeline
from py_kvcache.cli import app
from py_kvcache.errors import KvCacheError
from py_kvcache.worker.trace import Trace


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two bursts: a store job of one block at 10 s, two load jobs with three blocks in all at 20 s."""
    made = Trace(str(tmp_path / "t.json"))

    def bar(name: str, lane: str, begin: float, seconds: float) -> None:
        made.complete(name, "any", begin * 1e6, seconds * 1e6, lane)

    bar("copy from device", "slot 0", 10.0, 0.1)
    bar("write", "slot 0", 10.1, 0.3)
    bar("forward", "engine", 9.0, 0.5)  # before
    bar("forward", "engine", 9.9, 0.2)
    made.span("store job", "store", 10.0e6, 0.5e6, "store 1", blocks=1, done=1)
    for slot, begin, seconds in ((0, 20.0, 0.2), (1, 20.0, 0.4), (0, 20.3, 0.1)):
        bar("read", f"slot {slot}", begin, seconds)
    bar("copy to device", "slot 0", 20.4, 0.1)
    bar("submit", "reactor", 20.0, 0.001)
    # jobs that overlap, and a pause shorter than what ends a burst
    made.span("load job", "load", 20.0e6, 0.25e6, "load 2", blocks=2, done=2)
    made.span("load job", "load", 20.1e6, 0.1e6, "load 3", blocks=1, done=1)
    made.span("load job", "load", 20.3e6, 0.2e6, "load 4", blocks=1, done=1)
    made.close()
    return made.path


def test_bursts_are_what_no_pause_divides(trace: str) -> None:
    store, load = timeline.run(trace)["bursts"]
    assert (store["begin_s"], store["seconds"]) == pytest.approx((10.0, 0.5))
    assert (load["begin_s"], load["seconds"]) == pytest.approx((20.0, 0.5))
    assert [(job["name"], job["begin_s"], job["end_s"]) for job in load["jobs"]] == [
        ("load job", 0.0, pytest.approx(0.25)),
        ("load job", pytest.approx(0.1), pytest.approx(0.2)),
        ("load job", pytest.approx(0.3), pytest.approx(0.5)),
    ]


def test_stages_are_counted_and_timed(trace: str) -> None:
    store, load = timeline.run(trace)["bursts"]
    assert set(store["stages"]) == {"copy from device", "write"}
    assert (store["forwards"]["count"], store["forwards"]["sum_ms"]) == (1, pytest.approx(200))
    read = load["stages"]["read"]
    assert (read["count"], read["sum_ms"], read["most_ms"]) == (3, pytest.approx(700), pytest.approx(400))
    assert read["median_ms"] == pytest.approx(200)
    assert (read["first_s"], read["last_s"]) == pytest.approx((0.0, 0.4))
    assert read["mean_in_flight"] == pytest.approx(0.7 / 0.5)
    assert load["submits"]["count"] == 1
    assert load["forwards"] == {"count": 0}


def test_the_command_tells_bursts_to_people_and_scripts(trace: str) -> None:
    told = CliRunner().invoke(app, ["bench", "timeline", trace], env={"COLUMNS": "160"})
    assert told.exit_code == 0
    assert "3 x 200.0 ms (1.4)" in told.stdout
    told = CliRunner().invoke(app, ["bench", "timeline", trace, "--json"])
    assert json.loads(told.stdout)["schema"] == timeline.SCHEMA


def test_a_picture_is_of_the_burst_with_most_loads_or_of_the_one_named(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    assert timeline.run(trace, picture=str(picture))["drawn"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert timeline.run(trace, picture=str(picture), burst=-2)["drawn"] == 1


def test_a_burst_that_is_not_there_is_refused(trace: str, tmp_path: Path) -> None:
    for burst in (0, 3, -3):
        with pytest.raises(KvCacheError, match="has 2"):
            timeline.run(trace, picture=str(tmp_path / "p.png"), burst=burst)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"ph": "X"}]', '[{"name": "x", "ph": "e", "id": "1"}]'])
def test_what_is_no_trace_is_refused_with_the_way_to_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    told = CliRunner().invoke(app, ["bench", "timeline", str(path)])
    assert told.exit_code != 0
    assert "PY_KVCACHE_TRACE" in told.stderr or "holds no finished load" in told.stderr


def test_a_missing_trace_is_told_with_its_errno(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["bench", "timeline", str(tmp_path / "none.json")])
    assert told.exit_code != 0
    assert "none.json" in told.stderr
