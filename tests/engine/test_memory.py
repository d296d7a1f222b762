"""Blocks that stay in memory: the same text, without a read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import Session, engine_arguments, prompt

BLOCK = 64
LENGTH = 20 * BLOCK + 7
SEEDS = range(4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cold(tiny: str) -> dict[int, Any]:
    with engine(engine_arguments(tiny, None)) as session:
        return {seed: session.generate([prompt(LENGTH, seed=seed)])["tokens"] for seed in SEEDS}


@pytest.fixture(scope="module", params=["none", "lirs"])
def warm(tiny: str, root: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    """The second engine finds the files of the first."""
    extra = {"memory_tier": request.param, "memory_bytes": 64 << 20, "preload": "off"}
    with engine(engine_arguments(tiny, str(root), extra=extra)) as session:
        session.policy = request.param  # type: ignore[attr-defined]
        yield session


def ask(session: Session, seeds: list[int]) -> tuple[Any, int, dict[str, int]]:
    """Answers, and how many reads and loads without one they took."""
    before = session.call("settle")
    tokens = session.generate([prompt(LENGTH, seed=seed) for seed in seeds])["tokens"]
    after = session.call("settle")
    assert after["wrong"] == [] and after["leaks"] == 0 and after["failures"] == {}
    spared = {how: count - before["without_read"].get(how, 0) for how, count in after["without_read"].items()}
    return tokens, after["reads"] - before["reads"], {how: count for how, count in spared.items() if count}


def test_what_is_in_memory_needs_no_read_and_gives_the_same_text(warm: Session, cold: dict[int, Any]) -> None:
    keeps = warm.policy != "none"  # type: ignore[attr-defined]
    for seed in (0, 1):
        assert ask(warm, [seed])[0] == cold[seed]  # stored, or read from the files of the engine before
    for seed in (0, 1):
        tokens, reads, spared = ask(warm, [seed])
        assert tokens == cold[seed]
        assert (reads, spared) == ((0, {"memory": 20}) if keeps else (20, {}))
    slots = warm.call("settle")["slots"]
    assert (slots["kept"] == 40) == keeps
    assert slots["free"] + slots["kept"] == sum(slots.values())


def test_two_requests_with_one_prefix_read_each_block_once(
    warm: Session, cold: dict[int, Any], root: Path, tiny: str
) -> None:
    with engine(engine_arguments(tiny, str(root))) as other:
        other.generate([prompt(LENGTH, seed=2)])
        other.call("settle")
    tokens, reads, spared = ask(warm, [2, 2])
    assert tokens == cold[2] * 2
    assert reads == 20
    assert sum(spared.values()) == 20
