"""thresholds.json: read as written, and refused with the reason where it makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from py_kvcache.errors import ConfigError
from py_kvcache.models import THRESHOLDS_SCHEMA, read_thresholds, thresholds_path

GOOD: dict[str, Any] = {
    "schema": THRESHOLDS_SCHEMA,
    "engine": "0123456789abcdef",
    "thresholds": {"disk": [[8000, 6400], [80000, 6400]], "memory": [[8000, 512]]},
    "prefill": [[1024, 0.05], [8192, 0.4]],
    "load": {"disk": [[1024, 0.01], [8192, 0.1]]},
    "made": {"node": "n1"},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "thresholds.json"
    path.write_text(json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not None}))
    return str(path)


def test_what_was_written_is_read(tmp_path: Path):
    found = read_thresholds(write(tmp_path))
    assert found.thresholds["disk"] == ((8000, 6400), (80000, 6400))
    curve = found.curve()
    assert curve is not None and curve(8192) == pytest.approx(0.4)
    assert read_thresholds(write(tmp_path, prefill=None)).curve() is None


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"schema": "py-kvcache/thresholds/2"}, "schema"),
        ({"schema": None}, "schema"),
        ({"engine": "xyz"}, "engine"),
        ({"thresholds": {"tape": [[1, 1]]}}, "tape"),
        ({"thresholds": {"disk": [[8000, 1], [8000, 2]]}}, "must ascend"),
        ({"thresholds": {"disk": [[9000, 1], [8000, 2]]}}, "must ascend"),
        ({"thresholds": {"disk": [[8000, -1]]}}, "greater than or equal to 0"),
        ({"thresholds": {"disk": []}}, "empty"),
        ({"prefill": [[1, 1]]}, "two points"),
        ({"load": {"disk": [[2, 1], [1, 1]]}}, "must ascend"),
        ({"extra": 1}, "extra"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_with_the_reason_and_the_remedy(
    tmp_path: Path, changes: dict[str, Any], part: str
):
    with pytest.raises(ConfigError, match="calibrate again, or remove it") as caught:
        read_thresholds(write(tmp_path, **changes))
    assert part in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / "t").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_thresholds(str(tmp_path / "t"))


def test_a_folder_is_this_nodes_file_in_it(tmp_path: Path):
    assert thresholds_path(str(tmp_path), {"NODE_NAME": "n1"}) == str(tmp_path / "n1")
    assert thresholds_path(str(tmp_path), {}) == str(tmp_path)
    assert thresholds_path(str(tmp_path / "t.json"), {"NODE_NAME": "n1"}) == str(tmp_path / "t.json")
