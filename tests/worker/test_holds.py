"""How long vLLM keeps the blocks of a request that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from py_kvcache.worker.holds import Holds


class Reactor:
    def __init__(self) -> None:
        self.asked: list[tuple[frozenset[int], bool]] = []
        self.over = False

    def ask(self, jobs: frozenset[int], pressed: bool) -> Any:
        self.asked.append((jobs, pressed))
        return SimpleNamespace(answered=SimpleNamespace(is_set=lambda: self.over))


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


@pytest.fixture
def holds(reactor: Reactor) -> Holds:
    made = Holds(reactor.ask)
    made.submitted(7)
    return made


JOBS = frozenset({6, 7})


@pytest.mark.parametrize("pressed", [False, True])
def test_blocks_go_when_their_jobs_have_been_copied(holds: Holds, reactor: Reactor, pressed: bool):
    holds.add({"r": JOBS}, pressed=pressed)
    assert holds.take_released() == set(), "the jobs of a step are handed in with the next"
    assert holds.take_released() == set()
    assert reactor.asked == [(JOBS, pressed)]
    reactor.over = True
    assert holds.take_released() == {"r"}
    assert holds.take_released() == set()


def test_once_memory_is_short_storage_gets_little_time_and_is_told_so_once(holds: Holds, reactor: Reactor):
    holds.add({"r": JOBS}, pressed=False)
    for _ in range(4):
        holds.take_released()
    for _ in range(3):
        holds.add({}, pressed=True)
        holds.take_released()
    assert reactor.asked == [(JOBS, False), (JOBS, True)]


def test_a_job_that_has_not_been_handed_in_is_waited_for(holds: Holds, reactor: Reactor):
    holds.add({"r": frozenset({8})}, pressed=True)
    for _ in range(3):
        holds.take_released()
    assert reactor.asked == []
    holds.submitted(8)
    holds.take_released()
    assert reactor.asked == [(frozenset({8}), True)]
