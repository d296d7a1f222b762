"""calibration.json: read as written, refused with the reason; schemas are those of the models."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import schemas
from py_kvcache.errors import ConfigError
from py_kvcache.models import read_calibration

SAMPLE = {"kind": "disk", "tokens": 100, "prefix": 90, "seconds": 0.1}


def test_what_was_written_is_read(made: Any):
    found = read_calibration(made.file())
    assert found.sets[0].samples[0].kind == "compute"
    assert found.model_dump(mode="json", by_alias=True)["schema"] == "py-kvcache/calibration/1"


@pytest.mark.parametrize(
    ("sample", "part"),
    [
        ({"seconds": 0}, "greater than 0"),
        ({"seconds": -1}, "greater than 0"),
        ({"seconds": math.nan}, "finite number"),
        ({"seconds": math.inf}, "finite number"),
        ({"copy_s": 0}, "greater than 0"),
        ({"copy_s": math.nan}, "finite number"),
        ({"tokens": 0}, "greater than 0"),
        ({"prefix": -1}, "greater than or equal to 0"),
        ({"prefix": 100}, "between 0 and the prompt's tokens"),
        ({"prefix": 0}, "between 0 and the prompt's tokens"),
        ({"kind": "compute"}, "prefix must be 0"),
        ({"kind": "tape"}, "kind"),
        ({"extra": 1}, "extra"),
    ],
    ids=str,
)
def test_a_sample_that_makes_no_sense_is_refused_with_the_reason(
    made: Any, sample: dict[str, Any], part: str
):
    path = made.file(sets=[{"concurrency": 1, "samples": [{**SAMPLE, **sample}]}])
    with pytest.raises(ConfigError, match="give the calibration.json of `calibrate measure`") as caught:
        read_calibration(path)
    assert part in str(caught.value) and "sets.0.samples.0" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"schema": "py-kvcache/calibration/2"}, "schema"),
        ({"engine": "0123"}, "engine"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"created": "yesterday"}, "created"),
        ({"sets": [{"concurrency": 0, "samples": []}]}, "concurrency"),
        ({"sets": [{"concurrency": 2, "samples": []}] * 2}, "more than one set"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(made: Any, changes: dict[str, Any], part: str):
    with pytest.raises(ConfigError) as caught:
        read_calibration(made.file(**changes))
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str):
    (tmp_path / "c").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="no JSON"):
        read_calibration(str(tmp_path / "c"))


def test_a_pipe_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(ConfigError, match="no ordinary file"):
        read_calibration(str(tmp_path / "p"))


@pytest.mark.parametrize("name", ["calibration.json", "thresholds.json"])
def test_the_schemas_in_docs_are_those_of_the_models(name: str):
    assert (schemas.FOLDER / name).read_text() == schemas.generate()[name], "run `make schemas`"


def test_models_need_neither_scipy_nor_matplotlib(run_python: Any):
    told = run_python(
        "import py_kvcache.models, py_kvcache.calibrate.fit, py_kvcache.calibrate.outputs; print('good')",
        vllm=False, blocked=("scipy", "matplotlib", "torch", "vllm"),
    )  # fmt: skip
    assert told.strip() == "good"


def test_the_schema_refuses_unknown_keys():
    assert json.loads(schemas.generate()["calibration.json"])["additionalProperties"] is False
