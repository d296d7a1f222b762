"""Memory tier, preload and gate together: whatever each does, the text is the same.

Every pair of settings runs here; PY_KVCACHE_TEST_ALL=1 runs every triple.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import engine_arguments, prompt

BLOCK = 64
LENGTH = 30 * BLOCK + 5
SEEDS = range(5)
SLOT = 262_144 + 4096
# 64 blocks of 32 tokens each: two of the requests fit, three wait.
SMALL = {"num_gpu_blocks_override": 2 * 64 + 4, "max_model_len": 2048}

TIERS, PRELOADS, GATES = ("none", "lru", "arc", "lirs"), ("off", "on", "alone"), ("off", "static", "adaptive")
PAIRS = [
    (tier, preload, GATES[(i + j) % 3]) for i, tier in enumerate(TIERS) for j, preload in enumerate(PRELOADS)
]
ALL = list(itertools.product(TIERS, PRELOADS, GATES))
CASES = ALL if os.environ.get("PY_KVCACHE_TEST_ALL") else PAIRS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stored(tiny: str, root: Path) -> tuple[list[Any], Path]:
    """Cold answers, whose blocks are stored then, and thresholds that allow loads from memory only."""
    arguments = engine_arguments(tiny, str(root), extra={"preload": "off"}, max_model_len=2048)
    with engine(arguments) as session:
        answers = [
            session.generate([prompt(LENGTH, seed=seed)], max_tokens=24)["tokens"][0] for seed in SEEDS
        ]
        session.call("settle")
        digest = session.call("digest")
    least = {"disk": [[1000, 10**9]], "memory": [[1000, 0]]}
    path = root.parent / "thresholds.json"
    path.write_text(json.dumps({"schema": "py-kvcache/thresholds/1", "engine": digest, "thresholds": least}))
    return answers, path


def test_the_pairs_are_all_pairs() -> None:
    for first, second in itertools.combinations(range(3), 2):
        assert {(case[first], case[second]) for case in PAIRS} == {(c[first], c[second]) for c in ALL}


@pytest.mark.parametrize(("tier", "preload", "gate"), CASES)
def test_the_text_is_the_same(
    tiny: str, root: Path, stored: tuple[list[Any], Path], tier: str, preload: str, gate: str
) -> None:
    # Memory for three of the five, so that blocks are given up, too.
    extra = {"memory_bytes": 90 * SLOT, "memory_tier": tier, "preload": preload, "gate": gate}
    if gate == "static":
        extra["thresholds"] = str(stored[1])
    with engine(engine_arguments(tiny, str(root), extra=extra, **SMALL)) as session:
        for _ in range(2):
            reply = session.generate([prompt(LENGTH, seed=seed) for seed in SEEDS], max_tokens=24)
            assert reply["tokens"] == stored[0]
            session.call("reset_prefix_cache")
        end = session.call("settle")
    assert end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0 and end["failures"] == {}
    if gate == "off":
        assert reply["cached"] == [30 * BLOCK] * len(SEEDS)
