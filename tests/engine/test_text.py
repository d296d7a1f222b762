"""Cached text equals computed text: greedy tokens in float32, and every loaded block byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import Session, engine_arguments, prompt

LENGTHS = [1, 255, 256, 257, 1000, 6000]
BLOCK = 256
SETTINGS = {"block_tokens": BLOCK}
MIXED = [prompt(n, seed=50 + n) for n in (300, 1, 2049, 700, 513)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    # What the first engine makes belongs to the test: a missing root below an existing parent.
    return folder / "root"


@pytest.fixture(scope="module")
def cold(tiny: str) -> dict[str, Any]:
    """What the engine says without any connector."""
    with engine(engine_arguments(tiny, None)) as session:
        return {
            "alone": [session.generate([prompt(n, seed=n)])["tokens"] for n in LENGTHS],
            "mixed": session.generate(MIXED)["tokens"],
            "two": session.generate([prompt(700, seed=9)], n=2)["tokens"],
        }


@pytest.fixture(scope="module")
def stored(tiny: str, root: Path) -> dict[str, Any]:
    """A first engine stores everything and ends."""
    with engine(engine_arguments(tiny, str(root), extra=SETTINGS)) as session:
        alone = [session.generate([prompt(n, seed=n)])["tokens"] for n in LENGTHS]
        mixed = session.generate(MIXED)["tokens"]
        two = session.generate([prompt(700, seed=9)], n=2)["tokens"]
        return {"alone": alone, "mixed": mixed, "two": two, **session.call("settle")}


@pytest.fixture(scope="module")
def again(tiny: str, root: Path, stored: dict[str, Any]) -> Iterator[Session]:
    """A second engine on the same root, with vLLM's own prefix cache on."""
    with engine(engine_arguments(tiny, str(root), extra=SETTINGS, enable_prefix_caching=True)) as session:
        yield session


def test_the_connector_changes_nothing_while_it_stores(cold: dict[str, Any], stored: dict[str, Any]) -> None:
    assert stored["alone"] == cold["alone"]
    assert stored["mixed"] == cold["mixed"]
    assert stored["two"] == cold["two"]


def test_whole_blocks_of_prompts_are_stored_and_every_slot_comes_back(
    stored: dict[str, Any], root: Path
) -> None:
    chains = {tuple(prompt(n, seed=n)[: k * BLOCK]) for n in LENGTHS for k in range(1, n // BLOCK + 1)}
    chains |= {tuple(p[: k * BLOCK]) for p in MIXED for k in range(1, len(p) // BLOCK + 1)}
    chains |= {tuple(prompt(700, seed=9)[: k * BLOCK]) for k in (1, 2)}
    files = list(root.rglob("*.bin"))
    assert len(files) == len(chains) == stored["stored_blocks"]
    assert {f.stat().st_size % 4096 for f in files} == {0} and len({f.stat().st_size for f in files}) == 1
    assert not list(root.rglob("*.tmp")), "a finished engine leaves no temporary file"
    assert stored["slots"]["load"] == stored["slots"]["store"] == 0 and stored["leaks"] == 0
    assert stored["jobs_left"] == 0 and stored["open_files"] == 0


@pytest.mark.parametrize(("number", "length"), list(enumerate(LENGTHS)))
def test_a_reloaded_prefix_gives_the_cold_text(
    again: Session, cold: dict[str, Any], number: int, length: int
) -> None:
    answer = again.generate([prompt(length, seed=length)])
    assert answer["tokens"] == cold["alone"][number]
    # vLLM computes at least the last prompt token itself.
    assert (
        answer["cached"][0] >= (length // BLOCK) * BLOCK - 1 if length >= BLOCK else answer["cached"] == [0]
    )


def test_a_batch_of_mixed_lengths_gives_the_cold_text(again: Session, cold: dict[str, Any]) -> None:
    answer = again.generate(MIXED)
    assert answer["tokens"] == cold["mixed"]
    assert answer["cached"][2] == 2048


def test_two_samples_of_one_reloaded_prompt_equal_the_cold_ones(again: Session, cold: dict[str, Any]) -> None:
    answer = again.generate([prompt(700, seed=9)], n=2)
    assert answer["tokens"] == cold["two"]
    assert answer["cached"][0] >= 512


def test_files_serve_again_after_the_engine_dropped_its_own_prefix_cache(
    again: Session, cold: dict[str, Any]
) -> None:
    before = again.call("stats")["loaded_blocks"]
    assert again.call("reset_prefix_cache")["ok"]
    assert again.generate([prompt(1000, seed=1000)])["tokens"] == cold["alone"][4]
    assert again.call("stats")["loaded_blocks"] == before + 3


def test_every_loaded_block_was_equal_to_its_file(again: Session) -> None:
    end = again.call("settle")
    assert end["checked"] > 30
    assert end["wrong"] == []
    assert end["slots"]["load"] == end["slots"]["store"] == 0 and end["leaks"] == 0 and end["open_files"] == 0


def test_another_salt_or_an_opted_out_request_loads_nothing(again: Session, cold: dict[str, Any]) -> None:
    again.call("reset_prefix_cache")
    salted = again.generate([prompt(1000, seed=1000)], cache_salt="someone else")
    assert (salted["tokens"], salted["cached"]) == (cold["alone"][4], [0])
    again.call("reset_prefix_cache")
    params = {"kv_transfer_params": {"py_kvcache": {"load": False, "store": False}}}
    alone = again.generate([prompt(1000, seed=1000)], extra_args=params)
    assert (alone["tokens"], alone["cached"]) == (cold["alone"][4], [0])


def test_a_request_that_may_not_store_stores_nothing(again: Session, root: Path) -> None:
    files = len(list(root.rglob("*.bin")))
    params = {"kv_transfer_params": {"py_kvcache": {"store": False}}}
    again.generate([prompt(600, seed=4711)], extra_args=params)
    again.call("settle")
    assert len(list(root.rglob("*.bin"))) == files


def test_after_a_reset_nothing_stored_before_is_found(again: Session, cold: dict[str, Any]) -> None:
    again.call("reset_connector")
    again.call("reset_prefix_cache")
    answer = again.generate([prompt(1000, seed=1000)])
    assert (answer["tokens"], answer["cached"]) == (cold["alone"][4], [0])
    again.call("settle")
    again.call("reset_prefix_cache")
    assert again.generate([prompt(1000, seed=1000)])["cached"] == [768]
