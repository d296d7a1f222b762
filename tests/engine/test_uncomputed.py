"""What was never computed is never stored, however its request ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import engine
from session import Session, engine_arguments, prompt

BLOCK = 64
# Steps that end within an engine block of 32 tokens, whose other tokens have a place then, and no bytes.
STEP = {"max_num_batched_tokens": 100, "max_num_seqs": 4}
ABORTED, LOST, LENGTH = range(6), range(100, 103), 10 * BLOCK


def first_turn(seed: int) -> list[int]:
    """With an answer of 24 tokens it fills a block to the last token, which is sampled and not computed."""
    return prompt(BLOCK - 24, seed=seed)


@pytest.fixture(scope="module")
def cold(tiny: str) -> dict[int, Any]:
    """Answers without a cache."""
    with engine(engine_arguments(tiny, None, **STEP)) as session:
        return {n: session.generate([prompt(LENGTH, seed=n)])["tokens"] for n in (*ABORTED, *LOST)} | {
            -1: session.generate([second_turn(session)])["tokens"]
        }


def second_turn(session: Session) -> list[int]:
    answer = session.generate([first_turn(500)], max_tokens=24)["tokens"][0][0]
    return [*first_turn(500), *answer, *prompt(BLOCK, seed=501)]


@pytest.fixture(scope="module")
def warm(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    extra = {"offload_prompt_only": False, "load_failure_policy": "fail"}
    root = tmp_path_factory.mktemp("cache")
    with engine(engine_arguments(tiny, str(root), extra=extra, **STEP)) as session:
        yield session


@pytest.mark.parametrize("number", ABORTED)
def test_a_request_aborted_in_its_prefill_leaves_only_blocks_that_were_computed(
    warm: Session, cold: dict[int, Any], number: int
) -> None:
    wanted = prompt(LENGTH, seed=number)
    assert warm.call("abort_after", prompts=[wanted], steps=number + 1)["drained"]
    warm.call("settle")
    answer = warm.generate([wanted])
    assert answer["tokens"] == cold[number]
    assert answer["cached"][0] <= 100 * (number + 1)


def test_a_conversation_goes_on_as_without_a_cache(warm: Session, cold: dict[int, Any]) -> None:
    following = second_turn(warm)
    warm.call("settle")
    assert warm.generate([following])["tokens"] == cold[-1]


@pytest.mark.parametrize("number", LOST)
def test_a_request_that_failed_with_its_load_stores_nothing_of_it(
    warm: Session, cold: dict[int, Any], tmp_path: Path, number: int
) -> None:
    wanted = prompt(LENGTH, seed=number)
    assert warm.generate([wanted])["tokens"] == cold[number]
    warm.call("settle")
    warm.call("break_next", how="delete", blocks=[2 * (number - LOST[0])])
    assert warm.generate([wanted])["tokens"] != cold[number], "the load failed, and with it the request"
    warm.call("settle")
    assert warm.generate([wanted])["tokens"] == cold[number]
    assert warm.call("settle")["wrong"] == []
