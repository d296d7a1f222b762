"""`bench pairs` with real engines: one that loads, and one whose gate says never."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import CONNECTOR, engine_arguments

from py_kvcache.bench import pairs
from py_kvcache.bench.serve_config import from_mapping
from py_kvcache.errors import ConfigError

TOKENS, BLOCK = 600, 64


def settings(tiny: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    (folder / "root").mkdir(exist_ok=True)
    return {
        "model": tiny, "root": str(folder / "root"), "out": str(folder / "out"),
        "systems": "recompute,py-kvcache", "tokens": [TOKENS], "documents": 2,
        "engine": {
            "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_batched_tokens": 2048,
        },
        "environment": {
            "PYTHONPATH": str(CONNECTOR), "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        "options": {"py-kvcache": {"block_tokens": BLOCK, "lookup_deadline_s": 30, **options}},
    }  # fmt: skip


def test_two_systems_are_asked_in_turn_and_told_apart(tiny: str, tmp_path: Path) -> None:
    report = pairs.run(from_mapping(settings(tiny, tmp_path, {"gate": "off"})), pairs=3)
    low, high = report["interval_95"]
    assert low <= report["ratio_of_means"] <= high and report["pairs"] == 3 and report["same_text"]
    ours = report["systems"][1]
    assert [system["cached_tokens"] for system in report["systems"]] == [0, 3 * (TOKENS // BLOCK * BLOCK)]
    assert ours["folder_bytes"] > 0 and len(ours["ttft_s"]) == 3
    assert json.loads((tmp_path / "out" / "pairs.json").read_text())["pairs"] == 3
    assert not list((tmp_path / "root").iterdir()), "nothing is left on the volume"


def test_a_gate_that_says_never_loads_and_stores_nothing(tiny: str, tmp_path: Path) -> None:
    never, root = tmp_path / "never.json", tmp_path / "other root"
    root.mkdir()
    options = {"gate": "static", "thresholds": str(never), "store_policy": "break_even"}
    config = from_mapping(settings(tiny, tmp_path, options))
    longest = config.engine_options()["max_model_len"]
    with engine(engine_arguments(tiny, str(root), max_model_len=longest)) as session:
        digest = session.call("digest")
    content = {"schema": "py-kvcache/thresholds/1", "engine": digest, "thresholds": {"disk": [[1, 10**9]]}}
    never.write_text(json.dumps(content))
    report = pairs.run(config, pairs=3)
    ours = report["systems"][1]
    assert ours["cached_tokens"] == 0 and report["same_text"]
    assert ours["folder_bytes"] < 4096, "what the folder is for, and no block"
    assert ours["counters"]["vllm:py_kvcache_stores_dropped{reason=never_pays}"] > 0


@pytest.mark.parametrize("systems", ["recompute", "recompute,prefix-cache,py-kvcache"])
def test_what_is_no_pair_is_refused(tiny: str, tmp_path: Path, systems: str) -> None:
    config = from_mapping({**settings(tiny, tmp_path, {}), "systems": systems})
    with pytest.raises(ConfigError, match="pair"):
        pairs.run(config, pairs=1)
