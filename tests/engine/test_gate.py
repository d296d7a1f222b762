"""The gate in a real engine: whatever it decides, the text is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import Session, engine_arguments, prompt

BLOCK = 64
LENGTH = 30 * BLOCK + 5
SEEDS = range(3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stored(tiny: str, root: Path) -> tuple[list[Any], str]:
    """Cold answers, whose blocks are stored then, and the engine's digest."""
    with engine(engine_arguments(tiny, str(root))) as session:
        answers = [session.generate([prompt(LENGTH, seed=seed)])["tokens"] for seed in SEEDS]
        session.call("settle")
        return answers, session.call("digest")


def serve(tiny: str, root: Path, **extra: Any) -> Iterator[Session]:
    with engine(engine_arguments(tiny, str(root), extra=extra, disable_log_stats=True)) as session:
        yield session


def ask(session: Session) -> tuple[list[Any], list[int]]:
    """Answers and cached tokens, one request after the other."""
    replies = [session.generate([prompt(LENGTH, seed=seed)]) for seed in SEEDS]
    return [reply["tokens"] for reply in replies], [reply["cached"][0] for reply in replies]


@pytest.fixture(params=["never", "always", "other engine"])
def thresholds(request: pytest.FixtureRequest, stored: Any, tmp_path: Path) -> tuple[str, Path]:
    kind = request.param
    least = {"never": 10**9, "always": 0, "other engine": 10**9}[kind]
    path = tmp_path / "thresholds.json"
    digest = "0" * 16 if kind == "other engine" else stored[1]
    content = {"schema": "py-kvcache/thresholds/1", "engine": digest, "thresholds": {"disk": [[1000, least]]}}
    path.write_text(json.dumps(content))
    return kind, path


def test_static_loads_what_the_thresholds_allow(
    tiny: str, root: Path, stored: Any, thresholds: tuple[str, Path]
) -> None:
    kind, path = thresholds
    for session in serve(tiny, root, gate="static", thresholds=str(path)):
        # The file is read in the background from the first hit on.
        session.generate([prompt(LENGTH, seed=0)])
        tokens, cached = ask(session)
        end = session.call("settle")
        decisions = session.call("decisions")
    assert tokens == stored[0] and end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0
    if kind == "never":
        assert cached == [0, 0, 0] and decisions["decline/below_threshold"] >= 3
    else:
        assert cached == [30 * BLOCK] * 3
        assert decisions["load/above_threshold" if kind == "always" else "load/no_thresholds"] >= 3
    assert end["stored_blocks"] == 0, "what is there already is not stored again"


def test_adaptive_declines_what_comes_too_slowly(tiny: str, root: Path, stored: Any) -> None:
    # 30 blocks of 262,144 bytes: computed in a second or so, loaded in 16 at the limit (the disk is faster).
    slow = {"read_bytes_per_s": 500_000, "load_deadline_s": 600}
    for session in serve(tiny, root, gate="adaptive", **slow):
        for seed in range(100, 108):
            session.generate([prompt(LENGTH, seed=seed)])  # what computing takes, and writing
        session.call("settle")
        tokens, cached = ask(session)
        decisions = session.call("decisions")
        assert session.call("settle")["wrong"] == []
    assert tokens == stored[0]
    assert cached == [0, 0, 0] and decisions == {"decline/slower": 3.0}


def test_adaptive_loads_what_comes_soon(tiny: str, root: Path, stored: Any) -> None:
    for session in serve(tiny, root, gate="adaptive"):
        first = session.generate([prompt(LENGTH, seed=0)])
        assert first["cached"] == [30 * BLOCK], "the first of twenty of which nothing is known"
        for seed in range(200, 208):
            session.generate([prompt(LENGTH, seed=seed)])
        tokens, cached = ask(session)
        decisions = session.call("decisions")
        assert session.call("settle")["wrong"] == []
    assert first["tokens"] == stored[0][0] and tokens == stored[0]
    assert cached == [30 * BLOCK] * 3 and decisions == {"load/probe": 1.0, "load/faster": 3.0}


@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_requests_at_once_give_the_same_text_whatever_is_decided_for_each(
    tiny: str, root: Path, stored: Any, memory: int
) -> None:
    for session in serve(tiny, root, gate="adaptive", memory_bytes=memory):
        for _ in range(3):
            reply = session.generate([prompt(LENGTH, seed=seed) for seed in SEEDS])
            assert [[tokens] for tokens in reply["tokens"]] == stored[0]
        end = session.call("settle")
    assert end["wrong"] == [] and end["jobs_left"] == 0 and end["leaks"] == 0
