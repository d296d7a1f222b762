"""`calibrate measure` with a real engine, and its thresholds in the engine that they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import CONNECTOR, engine_arguments

from py_kvcache.bench.serve_config import from_mapping
from py_kvcache.calibrate import measure, outputs, verify
from py_kvcache.calibrate.asked import MeasureConfig
from py_kvcache.errors import ConfigError
from py_kvcache.models import Calibration, read_thresholds

BLOCK, LONGEST = 64, 1024
SETTINGS = {"block_tokens": BLOCK, "lookup_deadline_s": 30, "load_deadline_s": 120}


def config(tiny: str, folder: Path, settings: dict[str, Any] | None = None, **more: Any) -> MeasureConfig:
    (folder / "root").mkdir(exist_ok=True)
    serve = from_mapping(
        {
            "model": tiny, "root": str(folder / "root"), "out": str(folder / "out"), "systems": "py-kvcache",
            "engine": {
                "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_batched_tokens": 2048,
                "max_model_len": LONGEST,
            },
            "environment": {
                "PYTHONPATH": str(CONNECTOR), "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        }
    )  # fmt: skip
    return MeasureConfig(serve, {**SETTINGS, **(settings or {})}, **more)


@pytest.fixture(scope="module")
def measured(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    folder = tmp_path_factory.mktemp("calibration")
    return folder, measure.run(config(tiny, folder, {"memory_bytes": 64 << 20}, budget_s=120, longest=900))


def test_computing_and_both_sources_are_measured_at_several_lengths(
    measured: tuple[Path, Calibration],
) -> None:
    folder, calibration = measured
    (one,) = calibration.sets
    lengths = {
        kind: {sample.prefix or sample.tokens - 1 for sample in one.samples if sample.kind == kind}
        for kind in ("compute", "disk", "memory")
    }
    assert len(lengths["compute"]) >= 3 and lengths["compute"] == lengths["disk"]
    assert len(lengths["memory"]) >= 3
    assert all(prefix % BLOCK == 0 and prefix <= 900 for prefix in lengths["disk"])
    assert all(sample.copy_s for sample in one.samples if sample.kind == "disk")
    assert calibration.block_bytes == 262_144 and calibration.longest == LONGEST
    assert not list((folder / "root").iterdir()), "nothing is left on the volume"


def test_the_thresholds_are_good_for_the_engine_that_was_measured(
    tiny: str, measured: tuple[Path, Calibration], tmp_path: Path
) -> None:
    folder, calibration = measured
    outputs.run(str(folder / "out" / measure.FILE_NAME), str(tmp_path))
    path = tmp_path / "thresholds.json"
    assert path.stat().st_size <= 1024 and read_thresholds(str(path)).engine == calibration.engine
    root = tmp_path / "root"
    root.mkdir()
    extra = {**SETTINGS, "gate": "static", "thresholds": str(path)}
    with engine(engine_arguments(tiny, str(root), extra=extra, max_model_len=LONGEST)) as session:
        assert session.call("digest") == calibration.engine


def test_a_second_run_goes_on_and_one_of_another_engine_is_refused(
    tiny: str, measured: tuple[Path, Calibration]
) -> None:
    folder, before = measured
    with pytest.raises(ConfigError, match="other settings"):
        measure.run(config(tiny, folder, {"memory_bytes": 1 << 26, "checksum": "off"}, budget_s=60))
    after = json.loads((folder / "out" / measure.FILE_NAME).read_text())
    assert after["created"] == before.created, "nothing was lost"


def test_verify_measures_on_both_sides_of_a_threshold(tiny: str, tmp_path: Path, measured: Any) -> None:
    made = {
        "schema": "py-kvcache/thresholds/1", "engine": measured[1].engine, "exact": {"disk": 512}
    }  # fmt: skip
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps(made))
    report = verify.run(config(tiny, tmp_path), read_thresholds(str(path)), rounds=2)
    assert [(check["prefix"], check["expected"]) for check in report["checks"]] == [(448, False), (512, True)]
    assert all(check["compute_s"] > 0 and check["load_s"] > 0 for check in report["checks"])
