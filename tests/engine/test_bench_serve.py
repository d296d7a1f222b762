"""`bench serve` with real engines: hits, equal answers, files, bytes and the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session import CONNECTOR

from py_kvcache.bench import serve
from py_kvcache.bench.serve_config import from_mapping

TOKENS, BLOCK, DOCUMENTS = 600, 64, 2
WHOLE = TOKENS // BLOCK
# 4 layers x keys and values x 2 heads x 64 x 4 bytes
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def report(tiny: str, folder: Path) -> dict[str, Any]:
    (folder / "root").mkdir()
    config = {
        "model": tiny,
        "root": str(folder / "root"),
        "out": str(folder / "out"),
        "systems": "recompute,py-kvcache,floor",
        "tokens": [TOKENS],
        "documents": DOCUMENTS,
        "rounds": 1,
        "prewarm": 1,
        "max_tokens": 4,
        "engine": {
            "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_batched_tokens": 2048,
        },
        "environment": {
            "PYTHONPATH": str(CONNECTOR),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            # The engine core is a process of its own here all the same, but it needs no third one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        # A busy machine must not turn hits into misses.
        "options": {"py-kvcache": {"block_tokens": BLOCK, "lookup_deadline_s": 30}},
    }  # fmt: skip
    made = serve.run(from_mapping(config))
    assert [run["error"] for run in made["runs"]] == [None, None, None], made["runs"]
    return made


def record(report: dict[str, Any], system: str, phase: str) -> dict[str, Any]:
    found = [r for r in report["results"] if (r["system"], r["phase"]) == (system, phase)]
    assert len(found) == 1
    return found[0]


def test_every_phase_of_every_system_is_in_the_report(report: dict[str, Any]) -> None:
    phases = ["cold", "warm", "warm2", "alone"]
    wanted = {(system, phase) for system in ("recompute", "py-kvcache") for phase in phases}
    wanted |= {("floor", phase) for phase in phases[1:]}
    assert {(r["system"], r["phase"]) for r in report["results"]} == wanted
    engine = next(run for run in report["runs"] if run["system"] == "py-kvcache")
    assert [phase["phase"] for phase in engine["phases"]] == ["prewarm", "prewarm", *phases]
    assert engine["started"]["startup_s"] > 0
    for phase in engine["phases"]:
        assert all(0 < request["ttft_s"] <= request["seconds"] for request in phase["requests"])
        assert {len(request["output_tokens"]) for request in phase["requests"]} == {4}
        assert {request["prompt_tokens"] for request in phase["requests"]} == {TOKENS}
        assert phase["settled"]


def test_warm_documents_come_from_files_and_cold_ones_do_not(report: dict[str, Any]) -> None:
    assert record(report, "py-kvcache", "cold")["hit_share"]["median"] == 0
    for phase in ("warm", "warm2", "alone"):
        assert record(report, "py-kvcache", phase)["hit_share"]["median"] == WHOLE * BLOCK / TOKENS
        assert record(report, "recompute", phase)["hit_share"]["median"] == 0


def test_bytes_are_those_of_the_blocks_by_the_connectors_own_counters(report: dict[str, Any]) -> None:
    moved = DOCUMENTS * WHOLE * BLOCK * TOKEN_BYTES
    cold, warm = record(report, "py-kvcache", "cold"), record(report, "py-kvcache", "warm")
    assert (cold["own_read_bytes"], cold["own_written_bytes"]) == (0, moved)
    assert (warm["own_read_bytes"], warm["own_written_bytes"]) == (moved, 0)
    assert record(report, "recompute", "warm")["own_read_bytes"] is None


def test_answers_are_those_of_recomputing(report: dict[str, Any]) -> None:
    for phase in ("cold", "warm", "warm2", "alone"):
        found = record(report, "py-kvcache", phase)
        assert found["same_tokens_as_recompute"] is True
        assert found["same_tokens_as_cold"] is True


def test_the_floor_reads_the_same_files(report: dict[str, Any]) -> None:
    floor = next(run for run in report["runs"] if run["system"] == "floor")
    warm = next(phase for phase in floor["phases"] if phase["phase"] == "warm")
    assert len(warm["requests"]) == DOCUMENTS
    assert warm["bytes"] == DOCUMENTS * WHOLE * (BLOCK * TOKEN_BYTES + 4096)
    assert record(report, "py-kvcache", "warm")["of_floor"]["median"] > 0


def test_results_stay_and_the_cache_goes(report: dict[str, Any], folder: Path) -> None:
    assert list((folder / "root").iterdir()) == []
    assert json.loads((folder / "out" / "serve.json").read_text())["results"] == report["results"]
    logs = {path.name for path in (folder / "out" / "logs").iterdir()}
    assert {"recompute-0.log", "py-kvcache-0.log", "floor-0.log"} <= logs
