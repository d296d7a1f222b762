"""Waiting requests' blocks are read before it is their turn: claimed by them, and wasted by nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import engine_arguments, prompt

BLOCK = 64
LENGTH = 30 * BLOCK + 5
SEEDS = range(12)
SLOT = 262_144 + 4096
# 64 blocks of 32 tokens each: two of the requests fit.
SMALL = {"num_gpu_blocks_override": 2 * 64 + 4, "max_model_len": 2048}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stored(tiny: str, root: Path) -> list[Any]:
    """Cold answers, whose blocks are stored then."""
    # The longest request is part of what tells blocks apart.
    arguments = engine_arguments(tiny, str(root), extra={"preload": "off"}, max_model_len=2048)
    with engine(arguments) as session:
        answers = [
            session.generate([prompt(LENGTH, seed=seed)], max_tokens=24)["tokens"][0] for seed in SEEDS
        ]
        session.call("settle")
        return answers


def serve(tiny: str, root: Path, **extra: Any) -> tuple[list[Any], list[int], dict[str, Any]]:
    """All at once: answers, cached tokens, what became of blocks."""
    arguments = engine_arguments(tiny, str(root), extra={"memory_bytes": 400 * SLOT, **extra}, **SMALL)
    with engine(arguments) as session:
        reply = session.generate([prompt(LENGTH, seed=seed) for seed in SEEDS], max_tokens=24)
        end = session.call("settle")
    assert end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0 and end["failures"] == {}
    return reply["tokens"], reply["cached"], end


@pytest.mark.parametrize("preload", ["on", "alone"])
def test_a_queue_is_read_ahead_and_claims_what_was_read(
    tiny: str, root: Path, stored: list[Any], preload: str
) -> None:
    tokens, cached, end = serve(tiny, root, preload=preload)
    assert tokens == stored and cached == [30 * BLOCK] * 12
    fates = end["preloads"]
    read = sum(fates.values())
    assert fates["claimed"] >= 0.8 * read and fates["wasted"] + fates["cancelled"] <= 0.05 * read
    assert read >= (200 if preload == "on" else 60), "of 360 blocks; two requests do not wait"
    assert 360 <= end["reads"] <= 1.05 * 360, "each block once, but for what the queue changed its mind about"


def test_without_preload_or_memory_for_it_all_is_read_on_demand(
    tiny: str, root: Path, stored: list[Any]
) -> None:
    for extra in ({"preload": "off"}, {"preload_bytes": 0}, {"memory_bytes": 0}):
        tokens, cached, end = serve(tiny, root, **extra)
        assert tokens == stored and cached == [30 * BLOCK] * 12
        assert sum(end["preloads"].values()) == 0 and end["reads"] == 360


def test_what_vllms_own_prefix_cache_has_is_not_read_ahead(tiny: str, root: Path, stored: list[Any]) -> None:
    # One prompt for all: whoever waits finds it on the GPU, where two of them have it.
    extra = {"memory_bytes": 400 * SLOT}
    arguments = engine_arguments(
        tiny, str(root), extra=extra, enable_prefix_caching=True, max_num_seqs=2, **SMALL
    )
    with engine(arguments) as session:
        reply = session.generate([prompt(LENGTH, seed=SEEDS[0])] * 6, max_tokens=24)
        found, end = session.call("on_gpu"), session.call("settle")
    assert reply["tokens"] == [stored[0]] * 6
    assert found[-1] == 30, "all whole blocks"
    assert end["preloads"]["wasted"] == 0 and end["reads"] == 30
