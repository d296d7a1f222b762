"""Which requests wait for a place on the GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.scheduler.waiting import Waiting


def test_who_has_come_and_has_no_blocks_waits():
    waiting = Waiting()
    for name, tokens in (("a", 100), ("b", 20), ("c", 3)):
        waiting.enter(name, tokens)
    waiting.admit("a")
    waiting.admit("a")  # vLLM says so twice of a request that is loaded
    assert (list(waiting), waiting.tokens, waiting.known) == (["b", "c"], 23, 3)
    waiting.leave("b")
    assert (list(waiting), waiting.tokens, waiting.known) == (["c"], 3, 2)


def test_who_was_preempted_waits_again_and_goes_first():
    waiting = Waiting()
    for name in "abc":
        waiting.enter(name, 10)
    waiting.admit("a")
    waiting.admit("b")
    waiting.preempt(["b", "gone"])
    assert (list(waiting), waiting.tokens) == (["b", "c"], 20)


def test_an_id_that_comes_again_is_counted_once():
    waiting = Waiting()
    waiting.enter("a", 10)
    waiting.enter("a", 7)
    assert (waiting.tokens, waiting.known) == (7, 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "admit", "preempt", "leave"]),
            st.sampled_from("abcd"),
            st.integers(0, 9),
        )
    )
)
def test_the_sum_is_that_of_those_that_wait(steps: list[tuple[str, str, int]]):
    waiting, model, running = Waiting(), {}, {}
    for what, name, tokens in steps:
        if what == "enter":
            waiting.enter(name, tokens)
            model.pop(name, None)
            running.pop(name, None)
            model[name] = tokens
        elif what == "admit":
            waiting.admit(name)
            if name in model:
                running[name] = model.pop(name)
        elif what == "preempt":
            waiting.preempt([name])
            if name in running:
                model = {name: running.pop(name)} | model
            elif name in model:
                model = {name: model.pop(name)} | model
        else:
            waiting.leave(name)
            model.pop(name, None)
            running.pop(name, None)
        assert (list(waiting), waiting.tokens) == (list(model), sum(model.values()))
        assert waiting.known == len(model) + len(running)
