"""Which requests wait for a place on the GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.scheduler.waiting import Waiting


def test_who_has_come_and_has_no_blocks_waits():
    waiting = Waiting()
    for name in "abc":
        waiting.enter(name)
    waiting.admit("a")
    waiting.admit("a")  # vLLM says so twice of a request that is loaded
    assert (list(waiting), list(waiting.alive)) == (["b", "c"], ["a", "b", "c"])
    waiting.leave("b")
    assert (list(waiting), list(waiting.alive)) == (["c"], ["a", "c"])


def test_who_was_preempted_waits_again_and_goes_first():
    waiting = Waiting()
    for name in "abc":
        waiting.enter(name)
    waiting.admit("a")
    waiting.admit("b")
    waiting.preempt(["b", "gone"])
    assert list(waiting) == ["b", "c"]


@given(st.lists(st.tuples(st.sampled_from(["enter", "admit", "preempt", "leave"]), st.sampled_from("abcd"))))
def test_everybody_alive_waits_or_runs_once(steps: list[tuple[str, str]]):
    waiting, order, running = Waiting(), [], set()
    for what, name in steps:
        if what == "enter":
            waiting.enter(name)
            running.discard(name)
            order = [*(other for other in order if other != name), name]
        elif what == "admit":
            waiting.admit(name)
            if name in order:
                order.remove(name)
                running.add(name)
        elif what == "preempt":
            waiting.preempt([name])
            if name in order or name in running:
                running.discard(name)
                order = [name, *(other for other in order if other != name)]
        else:
            waiting.leave(name)
            running.discard(name)
            order = [other for other in order if other != name]
        assert list(waiting) == order and len(waiting) == len(order)
        assert set(waiting.alive) == running | set(order)
