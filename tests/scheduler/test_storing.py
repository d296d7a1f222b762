"""Which computed blocks are stored: store_policy."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the manager is a subclass of vLLM's")

from scheduler_rig import Engine, keys

from py_kvcache import metrics
from py_kvcache.plan import Pace, WorkerReport
from py_kvcache.scheduler import storing


def test_all_is_stored_by_default():
    engine = Engine()
    chain = keys(4)
    assert engine.store(engine.admit("a", chain)) == chain


def test_second_touch_stores_what_a_second_request_has():
    engine = Engine(store_policy="second_touch")
    chain, other = keys(4), [*keys(2), *keys(3, chain=1)]
    first = engine.admit("a", chain)
    assert engine.store(first, chain[:2]) == [] and engine.store(first, chain[2:]) == []
    assert engine.counted(metrics.STORES_DROPPED, "first_touch") == 2, "the others are behind a hole"
    assert engine.store(engine.admit("b", other)) == other[:2]
    assert engine.store(engine.admit("c", chain)) == chain[2:], "the head is being stored by now"


def test_what_was_touched_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storing, "_MOST_TOUCHED", 3)
    engine = Engine(store_policy="second_touch")
    engine.store(engine.admit("a", keys(2)))
    engine.store(engine.admit("b", keys(2, chain=1)))
    assert engine.store(engine.admit("c", keys(2))) == []
    assert engine.store(engine.admit("d", keys(2))) == keys(2)


def test_break_even_stores_nothing_while_no_hit_can_pay():
    engine = Engine(store_policy="break_even")
    chain = keys(3)
    assert engine.store(engine.admit("a", chain)) == chain, "nothing is known yet"
    learner = engine.manager._gate.prefill
    for begin in range(0, 40_000, 8_000):
        learner.observe([(begin, begin + 8_000)], 0.1)
    engine.manager.note_report(WorkerReport(paces={0: Pace((10**6, 1.0), (0, 0.0), 10**6)}))
    engine.now += 10
    assert engine.store(engine.admit("b", keys(3, chain=1))) == []
    assert engine.counted(metrics.STORES_DROPPED, "never_pays") == 3
    engine.manager.note_report(WorkerReport(paces={0: Pace((10**12, 2.0), (0, 0.0), 10**6)}))
    engine.now += 10
    assert engine.store(engine.admit("c", keys(3, chain=2))) == keys(3, chain=2)
