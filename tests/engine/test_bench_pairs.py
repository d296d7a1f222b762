"""`bench pairs` with two real engines: one that loads, and one whose gate says never."""

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


def test_two_systems_are_asked_in_turn_and_a_gate_that_says_never_loads_and_stores_nothing(
    tiny: str, tmp_path: Path
) -> None:
    never, root = tmp_path / "never.json", tmp_path / "other root"
    root.mkdir()
    ways = f"py-kvcache:gate=off,py-kvcache:gate=static+thresholds={never}+store_policy=break_even"
    config = from_mapping({**settings(tiny, tmp_path, {}), "systems": ways})
    longest = config.engine_options()["max_model_len"]
    with engine(engine_arguments(tiny, str(root), max_model_len=longest)) as session:
        digest = session.call("digest")
    content = {"schema": "py-kvcache/thresholds/1", "engine": digest, "thresholds": {"disk": [[1, 10**9]]}}
    never.write_text(json.dumps(content))
    report = pairs.run(config, pairs=3)
    low, high = report["interval_95"]
    assert low <= report["ratio_of_means"] <= high and report["pairs"] == 3 and report["same_text"]
    loads, computes = report["systems"]
    assert loads["cached_tokens"] == 3 * (TOKENS // BLOCK * BLOCK) and loads["folder_bytes"] > 1 << 20
    assert computes["cached_tokens"] == 0
    assert computes["folder_bytes"] < 4096, "what the folder is for, and no block"
    assert computes["counters"]["vllm:py_kvcache_stores_dropped{reason=never_pays}"] > 0
    assert all(len(system["ttft_s"]) == 3 for system in report["systems"])
    assert json.loads((tmp_path / "out" / "pairs.json").read_text())["pairs"] == 3
    assert not list((tmp_path / "root").iterdir()), "nothing is left on the volume"


@pytest.mark.parametrize("systems", ["recompute", "recompute,prefix-cache,py-kvcache"])
def test_what_is_no_pair_is_refused(tiny: str, tmp_path: Path, systems: str) -> None:
    config = from_mapping({**settings(tiny, tmp_path, {}), "systems": systems})
    with pytest.raises(ConfigError, match="pair"):
        pairs.run(config, pairs=1)
