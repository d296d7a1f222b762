"""What the workers are told of waiting requests, and what that does to look-ups and gate."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the manager is a subclass of vLLM's")

from scheduler_rig import HIT, TOKENS, Engine, keys

from py_kvcache import metrics
from py_kvcache.plan import Moves, Pace, Want, WorkerReport

BLOCK_BYTES = 1_000_000
MIB = 1 << 20


def make(**extra: Any) -> Engine:
    engine = Engine(gate="off", memory_bytes=100 * MIB, **extra)
    report(engine)
    return engine


def report(engine: Engine, **came: list[bytes]) -> None:
    """Each rank with the keys that are in its memory now, too."""
    space = engine.manager._names.space_of(None)
    moves = {int(rank[1:]): Moves(tuple((space, key) for key in keys), ()) for rank, keys in came.items()}
    paces = {rank: Pace((0, 0.0), (0, 0.0), BLOCK_BYTES) for rank in (moves or {0: ()})}
    engine.manager.note_report(WorkerReport(paces=paces, moves=moves))


def answer(engine: Engine, present: int) -> None:
    engine.prober.reply(present)


def lengths(wants: tuple[Want, ...] | None) -> list[int]:
    return [len(want.keys) for want in wants or ()]


def test_waiting_requests_are_looked_up_and_what_is_stored_of_them_is_wanted_in_order():
    engine = make()
    first, second = keys(5), keys(4, chain=1)
    engine.admit("a", first)
    engine.admit("b", second)
    assert engine.manager.wants() is None
    assert [q.keys for q in engine.prober.questions] == [first, second]
    answer(engine, 3)
    answer(engine, 4)
    wants = engine.manager.wants()
    assert wants is not None and [want.keys for want in wants] == [tuple(first[:3]), tuple(second)]
    assert engine.manager.wants() is None, "told once"


def test_vllms_own_question_is_answered_by_then():
    engine = make()
    request = engine.admit("a", keys(3))
    engine.manager.wants()
    answer(engine, 3)
    assert engine.ask(request) == [HIT] * 3
    assert not engine.prober.questions


def test_who_is_admitted_stays_on_the_list_until_his_load_has_ended():
    engine = make()
    request = engine.admit("a", keys(3))
    engine.admit("b", keys(2, chain=1))
    engine.manager.wants()
    answer(engine, 3)
    answer(engine, 2)
    first = engine.manager.wants()
    engine.ask(request)
    engine.manager.allocated(request.request, 3 * TOKENS)
    assert first is not None
    engine.now += 1
    held = Want(first[0].space, first[0].keys, held=True)
    assert engine.manager.wants() == (held, first[1]), "nothing more is read for him"
    assert engine.manager.wants() is None
    engine.manager.complete_load(request.keys, request.context)
    assert engine.manager.wants() == first[1:]


def test_who_loads_takes_nothing_of_what_may_be_read_for_those_who_wait():
    engine = make(preload_bytes=5 * (BLOCK_BYTES + 8192))
    requests = [engine.admit(name, keys(4, chain=n)) for n, name in enumerate("abc")]
    engine.manager.wants()
    for _ in requests:
        answer(engine, 4)
    assert lengths(engine.manager.wants()) == [4, 1]
    for request in requests[:2]:
        engine.ask(request)
        engine.manager.allocated(request.request, 4 * TOKENS)
    wants = engine.manager.wants()
    assert wants is not None and [(len(w.keys), w.held) for w in wants] == [(4, True), (1, True), (4, False)]


def test_who_never_waited_holds_nothing():
    engine = make()
    request = engine.admit("a", keys(3))
    engine.ask(request)
    answer(engine, 3)
    engine.ask(request)
    engine.manager.allocated(request.request, 3 * TOKENS)
    engine.now += 1
    assert engine.manager.wants() is None


def test_who_is_gone_or_is_computed_is_wanted_no_more():
    engine = make()
    requests = [engine.admit(name, keys(2, chain=n)) for n, name in enumerate("abc")]
    engine.manager.wants()
    for _ in requests:
        answer(engine, 2)
    assert lengths(engine.manager.wants()) == [2, 2, 2]
    engine.finish(requests[0])
    engine.manager.allocated(requests[1].request, 0)
    assert lengths(engine.manager.wants()) == [2]
    engine.finish(requests[2])
    assert engine.manager.wants() == ()


def test_only_so_many_requests_and_blocks_as_may_be_read_ahead():
    engine = make(preload_requests=2, preload_bytes=5 * (BLOCK_BYTES + 8192))
    for n, name in enumerate("abc"):
        engine.admit(name, keys(4, chain=n))
    engine.manager.wants()
    assert len(engine.prober.questions) == 2
    for _ in range(2):
        answer(engine, 4)
    assert lengths(engine.manager.wants()) == [4, 1]


@pytest.mark.parametrize("extra", [{"preload": "off"}, {"memory_tier": "none"}, {"preload_bytes": 0}])
def test_where_nothing_may_be_preloaded_nobody_is_asked(extra: dict[str, Any]):
    engine = make(**extra)
    engine.admit("a", keys(3))
    assert engine.manager.wants() is None and not engine.prober.questions


def test_requests_that_opted_out_and_those_with_an_adapter_are_left_alone():
    engine = make()
    engine.admit("a", keys(3), params={"py_kvcache": {"load": False}})
    assert engine.manager.wants() is None and not engine.prober.questions


def test_what_is_in_memory_on_all_ranks_costs_the_gate_nothing():
    engine = make()
    request = engine.admit("a", keys(4))
    report(engine, r0=request.keys[:4], r1=request.keys[:3])
    engine.manager.wants()
    answer(engine, 4)
    state, foresight = engine.manager._requests["a"], engine.manager._foresight
    engine.ask(request)
    assert foresight.in_memory(state, 0, 4 * TOKENS) == 3
    assert foresight.in_memory(state, 2 * TOKENS + 1, 4 * TOKENS) == 1, "what the engine has is no matter"
    engine.manager.allocated(request.request, 4 * TOKENS)
    assert engine.manager._gate.pace._planned["a"][2] == 1 * BLOCK_BYTES
    assert engine.counted(metrics.HIT_TOKENS, "memory") == 3 * TOKENS
    assert engine.counted(metrics.HIT_TOKENS, "disk") == 1 * TOKENS


def test_who_never_waited_has_his_blocks_in_memory_all_the_same():
    engine = make(preload="off")
    request = engine.admit("a", keys(2))
    report(engine, r0=request.keys)
    engine.ask(request)
    answer(engine, 2)
    engine.ask(request)
    assert engine.manager.wants() is None
    engine.manager.allocated(request.request, 2 * TOKENS)
    assert engine.manager._gate.pace._planned["a"][2] == 0
    assert engine.counted(metrics.HIT_TOKENS, "memory") == 2 * TOKENS


def test_blocks_that_were_seen_long_ago_are_looked_for_again_and_meanwhile_stay():
    engine = make()
    engine.admit("a", keys(3))
    engine.manager.wants()
    answer(engine, 3)
    assert lengths(engine.manager.wants()) == [3]
    engine.now += 61
    assert engine.manager.wants() is None and len(engine.prober.questions) == 1
    answer(engine, 1)
    assert lengths(engine.manager.wants()) == [1]


def test_the_last_token_is_always_computed_so_a_block_that_it_ends_is_not_wanted():
    engine = make()
    request = engine.admit("a", keys(3))
    request.request.num_prompt_tokens = 3 * TOKENS
    engine.manager.wants()
    assert [len(q.keys) for q in engine.prober.questions] == [2]


def test_a_rank_that_has_said_nothing_of_it_has_nothing():
    engine = make()
    request = engine.admit("a", keys(3))
    engine.ask(request)
    answer(engine, 3)
    engine.ask(request)
    paces = {rank: Pace((0, 0.0), (0, 0.0), BLOCK_BYTES) for rank in (0, 1)}
    engine.manager.note_report(WorkerReport(paces=paces))
    report(engine, r0=request.keys)
    assert engine.manager._foresight.in_memory(engine.manager._requests["a"], 0, 3 * TOKENS) == 0


def test_who_loads_and_was_preempted_is_listed_once():
    engine = make()
    request = engine.admit("a", keys(3))
    engine.manager.wants()
    answer(engine, 3)
    engine.manager.wants()
    engine.ask(request)
    engine.manager.allocated(request.request, 3 * TOKENS)
    engine.manager.preempted(["a"])
    engine.manager._foresight._last = ()
    engine.now += 1
    assert lengths(engine.manager.wants()) == [3]


def test_a_long_chain_is_counted_once_and_cut_to_what_may_be_read(monkeypatch: pytest.MonkeyPatch):
    engine = make(preload_bytes=10 * (BLOCK_BYTES + 8192))
    engine.admit("a", keys(1000))
    engine.manager.wants()
    assert [len(question.keys) for question in engine.prober.questions] == [10]
    answer(engine, 10)
    asked = []
    index = engine.manager._index
    presence = index.presence
    monkeypatch.setattr(index, "presence", lambda block, now: (asked.append(block), presence(block, now))[1])
    assert lengths(engine.manager.wants()) == [10]
    engine.now += 1
    engine.manager.wants()
    assert len(asked) == 10


def test_a_defect_in_a_guess_costs_its_advantage_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = make()
    request = engine.admit("a", keys(3))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.manager._foresight, "wants", fail)
    monkeypatch.setattr(engine.manager._gate, "judge", fail)
    for _ in range(3):
        assert engine.manager.wants() is None
        assert engine.manager.pays(request.request, 0, TOKENS)
    assert sorted(record.getMessage().split()[2] for record in caplog.records) == ["gate", "preload"]


def gpu_has(engine: Engine, *chains: list[bytes]) -> None:
    cached = {key[:-4] for chain in chains for key in chain}
    engine.manager.know_cached(lambda block_hash: block_hash in cached)


def test_what_the_gpu_has_already_is_not_wanted():
    engine = make()
    first, second = keys(6), keys(4, chain=1)
    gpu_has(engine, first[:2], second)
    engine.admit("a", first)
    engine.admit("b", second)
    assert engine.manager.wants() is None
    (question,) = engine.prober.questions
    assert question.keys == first[2:], "whether that is stored, too, is all the same"
    answer(engine, 3)
    wants = engine.manager.wants()
    assert wants is not None and [want.keys for want in wants] == [tuple(first[2:5])]


def test_what_the_gpu_has_lost_is_looked_for_and_wanted():
    engine = make()
    chain = keys(5)
    gpu_has(engine, chain[:3])
    engine.admit("a", chain)
    engine.manager.wants()
    answer(engine, 2)
    assert lengths(engine.manager.wants()) == [2]
    gpu_has(engine, chain[:1])
    engine.now += 1
    engine.manager.wants()
    (question,) = engine.prober.questions
    assert question.keys == chain[1:], "from the first that is not certain"
    answer(engine, 4)
    wants = engine.manager.wants()
    assert wants is not None and [want.keys for want in wants] == [tuple(chain[1:])]


def test_what_the_gpu_has_takes_nothing_of_what_may_be_read_ahead():
    engine = make(preload_bytes=3 * (BLOCK_BYTES + 8192))
    chain = keys(9)
    gpu_has(engine, chain[:4])
    engine.admit("a", chain)
    engine.manager.wants()
    answer(engine, 9)
    wants = engine.manager.wants()
    assert wants is not None and [want.keys for want in wants] == [tuple(chain[4:7])]


def test_a_preempted_request_is_judged_by_what_the_gpu_has_now():
    engine = make()
    chain = keys(5)
    gpu_has(engine, chain[:4])
    request = engine.admit("a", chain)
    engine.manager.begin_lookup("a", 4 * TOKENS)
    engine.manager.end_lookup("a", 0)
    gpu_has(engine)
    judged: list[Any] = []
    engine.manager._gate.is_likely = lambda hit, now: bool(judged.append(hit)) or True  # type: ignore[method-assign]
    engine.manager.wants()
    answer(engine, 5)
    engine.manager.wants()
    assert request.keys and judged[-1].gpu_tokens == 0 and judged[-1].hit_tokens == 5 * TOKENS
