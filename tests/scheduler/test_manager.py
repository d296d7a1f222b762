"""The scheduler side as vLLM's stock scheduler calls it, without an engine."""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_rig import HIT, MISS, PENDING, RETRY, TOKENS, Engine, found, keys

pytest.importorskip("vllm", reason="the manager is a subclass of vLLM's")

from py_kvcache import metrics
from py_kvcache.plan import Adapter, Failures, Held, WorkerReport
from py_kvcache.scheduler import adapters as adapters_module
from py_kvcache.scheduler import names as names_module
from py_kvcache.scheduler.lookup import SEEN_FOR_S, SET_ASIDE_S
from py_kvcache.scheduler.lookups import ABSENT_FOR_S, HUNG_RETRY_S
from py_kvcache.scheduler.probe import Prober
from py_kvcache.scheduler.requests import complain, wanted

# ---- look-up


def test_a_request_waits_while_its_chain_is_probed_and_then_hits_what_exists():
    engine = Engine()
    request = engine.admit("a", keys(4))
    assert engine.ask(request) == [RETRY] * 4
    assert engine.ask(request) == [RETRY] * 4
    assert len(engine.prober.questions) == 1, "one question at a time"
    assert list(engine.prober.questions[0].keys) == request.keys
    engine.prober.reply(3)
    assert engine.ask(request) == [HIT, HIT, HIT, MISS]


def test_positives_are_cached_over_requests_and_expire():
    engine = Engine()
    assert found(engine, engine.admit("a", keys(3)), 3) == [HIT] * 3
    second = engine.admit("b", keys(3))
    assert engine.ask(second) == [HIT] * 3
    engine.now += SEEN_FOR_S
    assert engine.ask(engine.admit("c", keys(3))) == [RETRY] * 3


def test_negatives_are_asked_again_for_every_request():
    engine = Engine()
    assert found(engine, engine.admit("a", keys(3)), 0) == [MISS]
    assert found(engine, engine.admit("b", keys(3)), 2) == [HIT, HIT, MISS]


def test_a_request_that_waits_at_the_head_keeps_its_negative_answer_while_it_is_asked_again():
    engine = Engine()
    request = engine.admit("a", keys(2))
    assert found(engine, request, 0) == [MISS]
    assert engine.ask(request) == [MISS]
    assert engine.prober.questions == []
    engine.now += ABSENT_FOR_S
    assert engine.ask(request) == [MISS]
    assert len(engine.prober.questions) == 1
    engine.prober.reply(1)
    # The probe asked about one block, since the look-up ends at the first miss.
    assert engine.ask(request)[0] is HIT


def test_the_overall_deadline_of_a_look_up_makes_it_a_miss():
    engine = Engine(lookup_deadline_s=1.0)
    request = engine.admit("a", keys(2))
    assert engine.ask(request) == [RETRY, RETRY]
    engine.now += 0.99
    assert engine.ask(request) == [RETRY, RETRY]
    engine.now += 0.01
    assert engine.ask(request) == [MISS]
    engine.manager.allocated(request.request, 0)
    assert engine.counted(metrics.LOOKUPS, "timeout") == 1


def test_waiting_for_something_else_does_not_use_up_the_look_ups_deadline():
    engine = Engine(lookup_deadline_s=1.0)
    request = engine.admit("a", keys(1))
    assert found(engine, request, 1) == [HIT]
    for _ in range(5):
        # vLLM answers None itself while another request loads the same blocks.
        engine.manager.begin_lookup("a", 0)
        assert engine.manager.lookup(request.keys[0], request.context) is HIT
        engine.manager.end_lookup("a", None)
        engine.now += 1
    engine.now += SEEN_FOR_S
    assert engine.ask(request) == [RETRY], "the request has not given up"


def test_an_answer_that_comes_after_its_request_is_dropped():
    engine = Engine()
    request = engine.admit("a", keys(2))
    engine.ask(request)
    engine.finish(request)
    engine.prober.reply(2)
    second = engine.admit("b", keys(2))
    assert engine.ask(second) == [RETRY, RETRY]


def test_an_error_of_the_file_system_is_a_miss_and_counted_by_errno():
    engine = Engine()
    request = engine.admit("a", keys(2))
    engine.ask(request)
    engine.prober.reply(0, errno.ESTALE)
    assert engine.ask(request) == [MISS]
    assert engine.counted(metrics.PROBE_ERRORS, "ESTALE") == 1


def test_only_what_is_not_known_is_asked():
    engine = Engine()
    found(engine, engine.admit("a", keys(2)), 2)
    longer = engine.admit("b", keys(5))
    assert engine.ask(longer) == [HIT, HIT, RETRY, RETRY, RETRY]
    assert list(engine.prober.questions[0].keys) == keys(5)[2:]


@pytest.mark.parametrize(("params", "loads", "stores"), [
    (None, True, True),
    ({}, True, True),
    ({"py_kvcache": None}, True, True),
    ({"py_kvcache": {"load": False}}, False, True),
    ({"py_kvcache": {"store": False}}, True, False),
    ({"py_kvcache": {"load": False, "store": False}}, False, False),
    ({"py_kvcache": {"load": True, "other": 1}}, True, True),
    ("nonsense", True, True),
])  # fmt: skip
def test_a_request_may_opt_out_of_loading_and_of_storing(params: Any, loads: bool, stores: bool):
    engine = Engine()
    request = engine.admit("a", keys(2), params)
    assert engine.ask(request) == ([RETRY, RETRY] if loads else [MISS])
    assert len(engine.prober.questions) == int(loads)
    assert engine.store(request) == (request.keys if stores else [])
    engine.manager.allocated(request.request, 0)
    assert engine.counted(metrics.LOOKUPS, "miss" if loads else "opt_out") == 1
    assert engine.counted(metrics.STORES_DROPPED, "opt_out") == (0 if stores else 2)


def test_a_streaming_session_is_neither_loaded_nor_stored():
    engine = Engine()
    request = engine.admit("a", keys(2), resumable=True)
    assert engine.ask(request) == [MISS]
    assert engine.store(request) == []
    assert engine.counted(metrics.STORES_DROPPED, "opt_out") == 2


# ---- stores in flight


def test_a_block_being_stored_is_pending_and_a_hit_once_stored():
    engine = Engine()
    first, second = engine.admit("a", keys(2)), engine.admit("b", keys(2))
    assert engine.store(first) == first.keys
    assert engine.ask(second) == [PENDING, PENDING]
    assert engine.prober.questions == []
    engine.manager.complete_store(set(first.keys), first.context)
    assert engine.ask(second) == [HIT, HIT]


def test_a_store_that_never_ends_makes_the_second_request_compute_after_its_deadline():
    engine = Engine(store_deadline_s=60, lookup_deadline_s=500)
    first, second = engine.admit("a", keys(2)), engine.admit("b", keys(2))
    engine.store(first)
    engine.now += 59
    assert engine.ask(second) == [PENDING, PENDING]
    engine.now += 1
    assert found(engine, second, 0) == [MISS]
    engine.manager.get_stats()
    assert engine.manager._index.storing == 0


def test_a_store_that_never_ends_holds_up_a_request_no_longer_than_its_look_up_may_take():
    engine = Engine(store_deadline_s=60, lookup_deadline_s=1)
    first, second = engine.admit("a", keys(2)), engine.admit("b", keys(2))
    engine.store(first)
    assert engine.ask(second) == [PENDING, PENDING]
    engine.now += 1
    assert engine.ask(second) == [MISS]


def test_a_store_given_up_is_counted_and_its_late_completion_says_nothing():
    engine = Engine(store_deadline_s=60)
    request = engine.admit("a", keys(3))
    engine.store(request)
    engine.now += 60
    stats = engine.manager.get_stats()
    assert stats.data["data"][metrics.STORES_DROPPED.name] == {("deadline",): 3}
    engine.manager.complete_store(set(request.keys), request.context)
    assert engine.ask(engine.admit("b", keys(3))) == [RETRY] * 3


def test_a_block_that_a_rank_failed_to_store_is_no_hit():
    engine = Engine()
    request = engine.admit("a", keys(2))
    engine.store(request)
    space = engine.spaces.name(None)
    engine.manager.note_report(
        WorkerReport(failed_stores={1: Failures(space, {request.keys[1]: "no_space"})})
    )
    engine.manager.complete_store(set(request.keys), request.context)
    assert engine.ask(engine.admit("b", keys(2))) == [HIT, RETRY]


def test_a_store_that_ends_after_its_request_is_still_known():
    engine = Engine()
    request = engine.admit("a", keys(2))
    engine.store(request)
    engine.finish(request)
    engine.manager.complete_store(set(request.keys), request.context)
    assert engine.ask(engine.admit("b", keys(2))) == [HIT, HIT]


def test_what_exists_or_is_under_way_is_not_stored_again():
    engine = Engine()
    first = engine.admit("a", keys(3))
    found(engine, first, 1)
    assert engine.store(first) == first.keys[1:]
    assert engine.store(engine.admit("b", keys(4))) == [keys(4)[3]]


def test_the_store_queue_is_bounded_drops_are_counted_and_nothing_follows_a_hole():
    engine = Engine(max_queued_stores=3)
    first = engine.admit("a", keys(8))
    assert engine.store(first, first.keys[:5]) == first.keys[:3]
    assert engine.counted(metrics.STORES_DROPPED, "queue_full") == 2
    engine.manager.complete_store(set(first.keys[:3]), first.context)
    assert engine.store(first, first.keys[5:]) == [], "what follows the hole could never be found"
    assert engine.counted(metrics.STORES_DROPPED, "after_hole") == 3
    other = engine.admit("b", keys(2, chain=1))
    assert engine.store(other) == other.keys, "another chain has no hole"


def test_a_block_whose_store_failed_is_not_offered_again_at_once_and_nothing_behind_it():
    engine = Engine()
    first, second = engine.admit("a", keys(4)), engine.admit("b", keys(4))
    assert engine.store(first) == first.keys
    space = engine.spaces.name(None)
    engine.manager.note_report(WorkerReport(failed_stores={1: Failures(space, {first.keys[1]: "io"})}))
    engine.manager.complete_store(first.keys[:2], first.context)
    engine.manager.complete_store(first.keys[2:], first.context)
    engine.manager._index.forget((space, key) for key in first.keys)
    assert engine.store(second) == second.keys[:1]
    assert engine.counted(metrics.STORES_DROPPED, "failed_before") == 3
    engine.now += 5
    third = engine.admit("c", keys(4))
    assert engine.store(third) == third.keys[1:], "the one that is being stored already is left out"


def test_the_queue_never_grows_beyond_its_bound_whatever_is_offered():
    engine = Engine(max_queued_stores=5)
    for n in range(50):
        engine.store(engine.admit(f"r{n}", keys(4, chain=n)))
        assert engine.manager._index.storing <= 5


def test_a_later_request_fills_the_hole():
    engine = Engine(max_queued_stores=2)
    first = engine.admit("a", keys(4))
    assert engine.store(first) == first.keys[:2]
    engine.manager.complete_store(set(first.keys[:2]), first.context)
    second = engine.admit("b", keys(4))
    assert engine.store(second) == second.keys[2:]


def test_dropping_a_store_answers_with_an_empty_list_and_never_with_none():
    engine = Engine(known=False)
    output = engine.manager.prepare_store(keys(2), engine.admit("a", keys(2)).context)
    assert output.keys_to_store == []
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 2


def test_blocks_dropped_before_the_namespace_was_known_leave_a_hole_too():
    engine = Engine(known=False)
    request = engine.admit("a", keys(4))
    assert engine.store(request, request.keys[:2]) == []
    engine.manager.set_layouts([{}])
    assert engine.store(request, request.keys[2:]) == []


def test_the_last_blocks_of_a_request_can_be_stored_after_it_finished():
    # 0.26 finishes the request in one step and stores its last blocks in the next.
    engine = Engine()
    request = engine.admit("a", keys(2))
    engine.manager.on_request_finished(request.context)
    engine.manager.on_schedule_end(None)
    assert engine.store(request) == request.keys
    engine.manager.on_schedule_end(None)
    assert engine.manager._requests == {}


def test_a_new_request_under_the_id_of_a_finished_one_keeps_its_state():
    engine = Engine()
    engine.manager.on_request_finished(engine.admit("a", keys(2)).context)
    engine.manager.on_schedule_end(None)
    second = engine.admit("a", keys(2))
    engine.manager.on_schedule_end(None)
    assert engine.ask(second) == [RETRY, RETRY]


def test_a_request_that_was_never_admitted_comes_and_goes_without_a_trace():
    engine = Engine()
    context = SimpleNamespace(req_id="ghost", kv_transfer_params=None)
    engine.manager.on_new_request(context)
    engine.manager.on_request_finished(context)
    engine.manager.on_request_finished(SimpleNamespace(req_id="nobody"))
    engine.finish(engine.admit("a", keys(1)))
    assert engine.manager._requests == {}


def test_a_plan_names_the_space_and_the_place_of_each_block_in_its_chain():
    engine = Engine()
    request = engine.admit("a", keys(4))
    found(engine, request, 4)
    plan = engine.manager.prepare_load(request.keys[1:3], request.context)
    assert (plan.space, plan.keys, plan.indices) == (
        engine.spaces.name(None),
        tuple(request.keys[1:3]),
        (1, 2),
    )
    stored = engine.admit("b", keys(3, chain=1))
    assert engine.manager.prepare_store(stored.keys[2:], stored.context).store_spec.indices == (2,)


# ---- failed loads


def test_a_failed_load_is_a_miss_for_30_seconds_so_that_the_request_cannot_loop():
    engine = Engine()
    request = engine.admit("a", keys(3))
    found(engine, request, 3)
    engine.fail_load(request, {request.keys[1]: "io", request.keys[2]: "cancelled"})
    assert engine.ask(request) == [HIT, MISS]
    assert engine.prober.questions == []
    engine.now += 29
    assert engine.ask(engine.admit("b", keys(3))) == [HIT, MISS]
    engine.now += 1
    assert engine.ask(engine.admit("c", keys(3))) == [HIT, RETRY, RETRY]
    assert engine.counted(metrics.RECOMPUTED_BLOCKS) == 2


def test_a_block_that_fails_again_is_a_miss_for_twice_as_long():
    engine = Engine()
    request = engine.admit("a", keys(1))
    found(engine, request, 1)
    engine.fail_load(request, {request.keys[0]: "io"})
    engine.now += 30
    engine.fail_load(request, {request.keys[0]: "io"})
    engine.now += 59
    assert engine.ask(request) == [MISS]
    engine.now += 1
    assert engine.ask(request) == [RETRY]


@pytest.mark.parametrize(("fault", "healed"), [("missing", True), ("checksum", False), ("wrong_size", False),
                                               ("io", False), ("timeout", False)])  # fmt: skip
def test_a_store_heals_a_miss_for_absence_but_not_for_damage_or_a_sick_file_system(fault: str, healed: bool):
    engine = Engine()
    request = engine.admit("a", keys(1))
    found(engine, request, 1)
    engine.fail_load(request, {request.keys[0]: fault})
    assert engine.store(request) == request.keys, "the recomputed block is offered again"
    engine.manager.complete_store(set(request.keys), request.context)
    assert engine.ask(engine.admit("b", keys(1))) == ([HIT] if healed else [MISS])


def test_blocks_behind_a_failed_one_are_looked_at_again_and_not_held_against_them():
    engine = Engine()
    request = engine.admit("a", keys(3))
    found(engine, request, 3)
    engine.fail_load(request, {request.keys[0]: "missing", request.keys[1]: "cancelled"})
    engine.store(request, request.keys[:1])
    engine.manager.complete_store(set(request.keys[:1]), request.context)
    assert engine.ask(engine.admit("b", keys(3))) == [HIT, RETRY, HIT]


def test_a_load_that_was_wholly_cancelled_is_a_miss_too_or_it_would_be_tried_for_ever():
    engine = Engine()
    request = engine.admit("a", keys(2))
    found(engine, request, 2)
    engine.fail_load(request, dict.fromkeys(request.keys, "cancelled"))
    assert engine.ask(request) == [MISS]


def test_a_chain_that_is_bad_throughout_is_loaded_once_and_not_looked_up_again():
    engine = Engine()
    request = engine.admit("a", keys(20))
    assert found(engine, request, 20) == [HIT] * 20
    engine.fail_load(request, {request.keys[0]: "missing", **dict.fromkeys(request.keys[1:], "cancelled")})
    for _ in range(5):
        assert engine.ask(request) == [MISS]
        engine.now += 1
    # Stored again while it computes: the next one hits from the first block on.
    engine.store(request)
    engine.manager.complete_store(set(request.keys), request.context)
    assert engine.ask(engine.admit("b", keys(20))) == [HIT] * 20
    assert engine.prober.questions == []


def test_an_answer_on_its_way_does_not_lift_a_ban():
    engine = Engine()
    request = engine.admit("a", keys(2))
    found(engine, request, 2)
    engine.now += SEEN_FOR_S
    engine.ask(request)
    engine.fail_load(request, {request.keys[0]: "io"})
    engine.prober.reply(2)
    assert engine.ask(request) == [MISS]


# ---- namespaces


def test_until_the_workers_described_their_tensors_a_request_waits_and_then_misses():
    engine = Engine(known=False, lookup_deadline_s=1)
    request = engine.admit("a", keys(2))
    assert engine.ask(request) == [RETRY, RETRY]
    assert engine.prober.questions == []
    engine.now += 1
    assert engine.ask(request) == [MISS]


def test_the_first_report_of_the_workers_makes_names_known_and_later_ones_change_nothing():
    engine = Engine(known=False)
    request = engine.admit("a", keys(1))
    engine.ask(request)
    engine.manager.note_report(WorkerReport(layouts=({"slab": True},)))
    assert engine.spaces.known
    name = engine.spaces.name(None)
    engine.manager.note_report(WorkerReport(layouts=({"slab": False},)))
    assert engine.spaces.name(None) == name
    engine.ask(request)
    assert engine.prober.questions[0].space == name


def test_config_json_is_written_once_for_each_namespace_and_not_in_the_step(tmp_path: Path):
    engine = Engine(tmp_path)
    for name in ("a", "b"):
        engine.ask(engine.admit(name, keys(1)))
    assert len(engine.prober.jobs) == 1
    assert list(tmp_path.iterdir()) == []
    engine.prober.jobs[0]()
    assert (tmp_path / engine.spaces.name(None) / "config.json").is_file()


def test_a_namespace_removed_under_a_running_engine_is_described_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(names_module, "DESCRIBE_AGAIN_S", 0.0)
    engine = Engine(tmp_path)
    described = tmp_path / engine.spaces.name(None) / "config.json"
    for name in ("a", "b"):
        engine.ask(engine.admit(name, keys(1)))
        engine.prober.jobs.pop()()
        assert described.is_file()
        described.unlink()
        described.parent.rmdir()


@pytest.mark.parametrize("content", ["not JSON", "[]"])
def test_a_config_json_that_cannot_be_read_costs_a_warning_only(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
):
    engine = Engine(tmp_path)
    folder = tmp_path / engine.spaces.name(None)
    folder.mkdir()
    (folder / "config.json").write_text(content)
    for name in ("a", "b"):
        engine.ask(engine.admit(name, keys(1)))
        engine.prober.jobs[0]()
    assert "is unreadable, remove it" in caplog.text
    assert len(engine.prober.jobs) == 1


def test_a_read_only_root_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    engine = Engine(tmp_path / "gone")
    engine.ask(engine.admit("a", keys(1)))
    engine.prober.jobs[0]()
    assert "could not write config.json" in caplog.text


def test_a_reset_changes_the_namespace_and_forgets_everything():
    engine = Engine()
    request = engine.admit("a", keys(2))
    found(engine, request, 2)
    engine.store(engine.admit("b", keys(2, chain=1)))
    engine.fail_load(request, {request.keys[1]: "io"})
    waiting = engine.admit("c", keys(2, chain=2))
    engine.ask(waiting)
    before = engine.spaces.name(None)
    engine.manager.reset_cache()
    assert engine.spaces.name(None) != before
    assert engine.ask(request) == [RETRY, RETRY]
    assert engine.manager._index.storing == 0
    engine.prober.reply(2)
    assert engine.ask(waiting) == [RETRY, RETRY], "an answer about the old namespace counts no more"
    assert {question.space for question in engine.prober.questions} == {engine.spaces.name(None)}


def test_what_failed_or_ended_in_the_old_namespace_says_nothing_about_the_new_one():
    engine = Engine()
    request = engine.admit("a", keys(2))
    found(engine, request, 2)
    old = engine.spaces.name(None)
    engine.manager.reset_cache()
    faults = {request.keys[0]: "io"}
    engine.manager.note_report(WorkerReport(failed_loads={1: Failures(old, faults)}))
    engine.manager.note_report(WorkerReport(failed_stores={2: Failures(old, faults)}))
    assert engine.ask(request) == [RETRY, RETRY]


# ---- LoRA adapters


def lora(number: int = 1, name: str = "same", **more: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_path="/nowhere", lora_int_id=number, **more)


def say(engine: Engine, *ranks: dict[int, tuple[str, str]] | None) -> None:
    """One step: the workers' reports of it say what each rank has in memory (None: as before)."""
    step = engine.manager.next_step()
    held = {rank: Held(step, known) for rank, known in enumerate(ranks)}
    engine.manager.note_report(WorkerReport(adapters=held))


def space_of(engine: Engine, request: Any) -> str:
    assert engine.ask(request)[0] is RETRY
    return str(engine.prober.questions[-1].space)


ONE, TWO = {1: ("same", "one")}, {1: ("same", "two")}


def test_an_adapter_in_memory_is_known_at_once_and_has_a_namespace_of_its_own():
    engine = Engine()
    say(engine, ONE)
    request = engine.admit("a", keys(1), lora=lora())
    assert space_of(engine, request) == engine.spaces.name("one") != engine.spaces.name(None)
    assert engine.manager.prepare_load(request.keys, request.context).adapter == Adapter(1, "same", ("one",))


def test_an_unknown_adapter_is_waited_for_until_every_rank_has_spoken():
    engine = Engine(ranks=2)
    say(engine, {}, {})
    request = engine.admit("a", keys(1), lora=lora())
    assert engine.ask(request) == [RETRY], "that was said before the question"
    say(engine, {})
    assert engine.ask(request) == [RETRY], "the other rank has not spoken"
    say(engine, None, None)
    assert engine.ask(request) == [MISS], "it is not in memory: the request itself loads it"
    assert engine.prober.questions == []


def test_a_report_of_a_step_that_began_before_the_question_does_not_answer_it():
    engine = Engine()
    step = engine.manager.next_step()
    request = engine.admit("a", keys(1), lora=lora())
    engine.manager.note_report(WorkerReport(adapters={0: Held(step, {})}))
    assert engine.ask(request) == [RETRY]
    say(engine, ONE)
    assert space_of(engine, request) == engine.spaces.name("one")


def test_workers_that_say_nothing_hold_up_a_request_until_its_deadline_only():
    engine = Engine(lookup_deadline_s=1)
    request = engine.admit("a", keys(1), lora=lora())
    assert engine.ask(request) == [RETRY]
    engine.now += 1.0
    assert engine.ask(request) == [MISS]


def test_blocks_of_an_adapters_first_request_are_offered_again_once_it_is_known():
    engine = Engine()
    request = engine.admit("a", keys(3), lora=lora())
    say(engine, {})
    assert engine.ask(request) == [MISS]
    assert engine.store(request, request.keys[:2]) == engine.store(request, request.keys[2:]) == []
    assert engine.manager.take_postponed() == {}
    say(engine, ONE)
    assert engine.manager.take_postponed() == {"a": request.keys[0]}
    assert engine.manager.take_postponed() == {}
    plan = engine.manager.prepare_store(request.keys, request.context).store_spec
    assert (plan.space, plan.keys) == (engine.spaces.name("one"), tuple(request.keys))
    assert plan.adapter == Adapter(1, "same", ("one",))
    engine.finish(request)
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 0


def test_with_several_ranks_blocks_are_stored_once_all_have_said_what_they_computed_with():
    engine = Engine(ranks=2)
    say(engine, ONE, ONE)
    request = engine.admit("a", keys(4), lora=lora())
    space_of(engine, request)
    assert engine.store(request, request.keys[:2]) == []
    say(engine, None)
    assert engine.manager.take_postponed() == {}, "the other rank may have read other weights in that step"
    engine.manager.note_report(WorkerReport(adapters={1: Held(engine.manager._step, None)}))
    assert engine.manager.take_postponed() == {"a": request.keys[0]}
    assert engine.store(request, request.keys[:3]) == request.keys[:2], "the third is computed by this step"
    say(engine, None, None)
    assert engine.manager.take_postponed() == {"a": request.keys[2]}
    request.request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert engine.store(request, request.keys[2:]) == request.keys[2:], "vLLM has heard of its last step"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_read_other_weights_in_the_step_that_computed_blocks_spoils_them_on_all(rank: int):
    # The rank itself would store nothing, but what the others have computed rests on it.
    engine = Engine(ranks=2)
    say(engine, ONE, ONE)
    request = engine.admit("a", keys(2), lora=lora())
    space_of(engine, request)
    assert engine.store(request) == []
    said: list[dict[int, tuple[str, str]] | None] = [None, None]
    said[rank] = {1: ("same", "")}
    say(engine, *said)
    engine.manager.take_postponed()
    request.request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert engine.store(request) == []


def test_a_preempted_requests_blocks_wait_for_the_step_that_computes_them_again():
    engine = Engine(ranks=2)
    say(engine, ONE, ONE)
    request = engine.admit("a", keys(2), lora=lora())
    space_of(engine, request)
    assert engine.store(request) == []
    say(engine, None, None)
    assert engine.manager.take_postponed() == {"a": request.keys[0]}
    engine.ask(request)
    assert engine.store(request) == []
    say(engine, None, None)
    assert engine.manager.take_postponed() == {"a": request.keys[0]}
    assert engine.store(request) == request.keys


def test_blocks_of_an_adapter_that_is_never_known_are_counted_as_not_stored():
    engine = Engine()
    request = engine.admit("a", keys(3), lora=lora())
    assert engine.store(request) == []
    engine.finish(request)
    say(engine, ONE)
    assert engine.manager.take_postponed() == {}
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 3


def test_an_aborted_requests_blocks_are_not_stored_later():
    # vLLM may have given them to others: what it notes of a request that was preempted is old.
    engine = Engine()
    request = engine.admit("a", keys(3), lora=lora())
    assert engine.store(request) == []
    say(engine, ONE)
    assert engine.manager.take_postponed() == {"a": request.keys[0]}
    request.request.status = SimpleNamespace(name="FINISHED_ABORTED")
    assert engine.store(request) == []
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 3


def test_ranks_with_different_weights_have_a_namespace_for_their_mix():
    names = set()
    for ranks in ((ONE, ONE), (TWO, TWO), (ONE, TWO), (TWO, ONE)):
        engine = Engine(ranks=2)
        say(engine, *ranks)
        request = engine.admit("a", keys(1), lora=lora())
        names.add(space_of(engine, request))
        adapter = engine.manager.prepare_load(request.keys, request.context).adapter
        assert adapter.identities == tuple(known[1][1] for known in ranks)
    assert len(names) == 4
    assert {engine.spaces.name("one"), engine.spaces.name("two")} < names


def test_an_adapter_that_a_rank_lacks_is_not_known():
    engine = Engine(ranks=2)
    request = engine.admit("a", keys(1), lora=lora())
    say(engine, ONE, {})
    assert engine.ask(request) == [MISS]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_any_rank_does_not_trust_is_never_cached_again(rank: int):
    engine = Engine(ranks=2)
    say(engine, ONE, ONE)
    running = engine.admit("a", keys(2), lora=lora())
    space_of(engine, running)
    mixed = [ONE, ONE]
    mixed[rank] = {1: ("same", "")}
    say(engine, *mixed)
    say(engine, ONE, ONE)
    later = engine.admit("b", keys(2), lora=lora(number=2))
    for request in (running, later):
        assert engine.ask(request) == [MISS]
        assert engine.store(request) == []
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 4
    say(engine, {3: ("new", "one")}, {3: ("new", "one")})
    other = engine.admit("c", keys(2), lora=lora(3, "new"))
    assert space_of(engine, other) == engine.spaces.name("one"), "another name is as good as ever"


def test_a_number_with_two_names_spoils_both():
    # The worker has the first's weights in memory and reads nothing for the second.
    engine = Engine()
    say(engine, ONE)
    first = engine.admit("a", keys(1), lora=lora())
    second = engine.admit("b", keys(1), lora=lora(1, "other"))
    say(engine, {1: ("same", "one"), 2: ("other", "two")})
    third = engine.admit("c", keys(1), lora=lora(2, "other"))
    for request in (first, second, third):
        assert engine.ask(request) == [MISS]
        assert engine.store(request) == []


@pytest.mark.parametrize("field", ["load_inplace", "tensorizer_config_dict"])
def test_weights_that_are_read_again_in_each_step_or_lie_elsewhere_are_not_cached(field: str):
    engine = Engine()
    say(engine, ONE)
    request = engine.admit("a", keys(1), lora=lora(**{field: True}))
    assert engine.ask(request) == [MISS]
    assert engine.store(request) == []
    assert engine.counted(metrics.STORES_DROPPED, "not_ready") == 1
    plain = engine.admit("b", keys(1), lora=lora())
    assert engine.ask(plain) == [RETRY]


def test_an_adapter_that_left_memory_is_a_miss_until_it_was_read_again():
    engine = Engine()
    say(engine, ONE)
    say(engine, {2: ("other", "two")})
    request = engine.admit("a", keys(1), lora=lora())
    say(engine, None)
    assert engine.ask(request) == [MISS]
    say(engine, ONE)
    assert space_of(engine, request) == engine.spaces.name("one")


def test_a_load_that_came_too_late_for_its_adapter_sets_the_blocks_aside_for_a_moment():
    engine = Engine()
    say(engine, ONE)
    request = engine.admit("a", keys(1), lora=lora())
    found(engine, request, 1)
    for _ in range(3):
        engine.fail_load(request, {request.keys[0]: "adapter"})
    assert engine.ask(request) == [MISS], "or it would be found and loaded for ever"
    engine.now += SET_ASIDE_S
    assert engine.ask(engine.admit("b", keys(1), lora=lora())) == [RETRY], "the block's file is good"


def test_an_adapter_that_left_memory_while_its_request_waited_is_a_miss():
    engine = Engine()
    say(engine, ONE)
    request = engine.admit("a", keys(1), lora=lora())
    assert engine.ask(request) == [RETRY]
    engine.prober.reply(1)
    say(engine, {2: ("other", "two")})
    assert engine.ask(request) == [MISS]
    say(engine, ONE)
    assert engine.ask(request) == [HIT]


def test_a_plain_requests_plan_names_no_adapter():
    engine = Engine()
    request = engine.admit("a", keys(1))
    found(engine, request, 1)
    assert engine.manager.prepare_load(request.keys, request.context).adapter is None


def test_books_about_adapters_and_namespaces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(names_module, "_MOST_SPACES", 3)
    monkeypatch.setattr(adapters_module, "_MOST_NUMBERS", 3)
    monkeypatch.setattr(adapters_module, "_MOST_BANNED", 2)
    engine = Engine(tmp_path)
    for number in range(8):
        engine.manager.reset_cache()
        engine.ask(engine.admit(f"a{number}", keys(1)))
        for job in engine.prober.jobs:
            job()
        engine.prober.jobs.clear()
    assert len(engine.manager._names._describe_at) == 3
    book = engine.manager._adapters
    for number in range(1, 9):
        say(engine, {number: (f"n{number}", "one")})
        engine.admit(f"b{number}", keys(1), lora=lora(number, f"n{number}"))
    assert len(book._numbers) == 3 and len(book._banned) == 2
    last = engine.admit("z", keys(1), lora=lora(1, "n1"))
    assert engine.ask(last) == [MISS], "too much to remember: no adapter is cached any more"


# ---- counting


@pytest.mark.parametrize(
    ("loaded", "local", "result"),
    [(4, 0, "hit"), (2, 0, "partial"), (0, 0, "miss"), (0, 4, "miss"), (2, 2, "hit")],
)
def test_an_admitted_request_is_counted_once_with_what_it_got(loaded: int, local: int, result: str):
    engine = Engine()
    request = engine.admit("a", keys(4))
    engine.manager.begin_lookup("a", local * TOKENS)
    engine.manager.end_lookup("a", loaded * TOKENS)
    for _ in range(2):
        # vLLM calls it twice for asynchronous loads
        engine.manager.allocated(request.request, loaded * TOKENS)
    assert engine.counted(metrics.LOOKUPS, result) == 1
    assert engine.counted(metrics.HIT_TOKENS, "disk") == loaded * TOKENS
    assert engine.counted(metrics.MISSED_TOKENS) == 4 * TOKENS + 1 - (loaded + local) * TOKENS


def test_counters_without_labels_are_exported_from_the_start_and_reported_once():
    engine = Engine()
    first = engine.manager.get_stats().data["data"]
    assert first[metrics.LOAD_BYTES.name] == {(): 0}
    assert engine.manager.get_stats() is None
    report = WorkerReport()
    report.samples.add(metrics.LOAD_BYTES, 10)
    engine.manager.note_report(report)
    engine.manager.note_report(report)
    assert engine.manager.get_stats().data["data"] == {metrics.LOAD_BYTES.name: {(): 20}}


def test_the_rest_of_the_interface_answers_in_vllms_terms():
    engine = Engine()
    engine.manager.complete_load(set(keys(1)), SimpleNamespace(req_id="a"))
    engine.manager.on_reset_flushed()
    assert engine.manager.config_info() == [{}]
    engine.manager.begin_lookup("unknown", 0)
    engine.manager.end_lookup("unknown", None)
    engine.manager.allocated(SimpleNamespace(request_id="unknown"), 0)
    assert not type(engine.manager).__abstractmethods__
    engine.manager.shutdown()
    assert engine.prober.ended


# ---- the scheduler's step and the file system


class SlowDisk:
    """An lstat of 5 ms that notes who asked; the first ``present`` blocks exist."""

    def __init__(self, present: int) -> None:
        self.present, self.calls, self.threads = present, 0, set()

    def __call__(self, path: str) -> os.stat_result:
        self.calls += 1
        self.threads.add(threading.get_ident())
        time.sleep(0.005)
        number = int(os.path.basename(path).removesuffix(".bin")[-8:], 16)
        if number >= self.present:
            raise FileNotFoundError(errno.ENOENT, "absent", path)
        return os.stat_result((stat.S_IFREG | 0o644,) + (0,) * 9)


@pytest.mark.parametrize("present", [0, 1, 2_900, 4_095, 4_096])
def test_a_step_with_4096_blocks_asks_the_file_system_nothing_and_the_answer_needs_few_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: int
):
    here, forbidden = threading.get_ident(), []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            if threading.get_ident() == here:
                forbidden.append(name)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, watched)

    disk = SlowDisk(present)
    engine = Engine(tmp_path, prober=Prober(lstat=disk), lookup_deadline_s=60)
    request = engine.admit("a", keys(4_096))
    for name in (
        "stat",
        "lstat",
        "open",
        "mkdir",
        "scandir",
        "listdir",
        "access",
        "readlink",
        "link",
        "unlink",
    ):
        watch(os, name)
    watch(names_module, "write_config")
    monkeypatch.setattr("builtins.open", lambda *args, **named: forbidden.append("open") or 1 / 0)

    results = engine.ask(request)
    assert results == [RETRY] * 4_096
    for _ in range(2_000):
        results = engine.ask(request)
        if results[0] is not RETRY:
            break
        time.sleep(0.01)
    monkeypatch.undo()

    assert results == [HIT] * present + [MISS] * (present < 4_096)
    assert here not in disk.threads
    assert forbidden == []
    # 5 ms each, one after the other: within 0.2 s
    assert disk.calls <= 2 * math.log2(4_096) + 2
    engine.manager.shutdown()


def test_a_hung_file_system_holds_up_no_step_and_the_request_computes_at_its_deadline(tmp_path: Path):
    release = threading.Event()

    def lstat(path: str) -> os.stat_result:
        release.wait(30)
        raise OSError(errno.EIO, "gone", path)

    engine = Engine(tmp_path, prober=Prober(threads=1, lstat=lstat), lookup_deadline_s=1)
    request = engine.admit("a", keys(3))
    assert engine.ask(request) == [RETRY] * 3
    engine.now += 1
    assert engine.ask(request) == [MISS]
    release.set()
    engine.manager.shutdown()


def test_a_hung_file_system_makes_one_request_wait_and_the_others_miss_at_once_until_it_answers():
    engine = Engine()
    first = engine.admit("first", keys(2))
    assert engine.ask(first) == [RETRY, RETRY]
    engine.now += 1
    assert engine.ask(first) == [MISS]
    second = engine.admit("second", keys(2))
    assert engine.ask(second) == [MISS]
    assert len(engine.prober.questions) == 1, "nothing more is asked of a file system that owes an answer"
    engine.prober.reply(2)
    assert engine.ask(engine.admit("third", keys(2))) == [HIT, HIT]


def test_an_idle_step_waits_for_the_file_system_only_while_it_owes_an_answer_in_time():
    engine = Engine()
    engine.manager.wait_if_asking()
    assert engine.prober.waits == 0
    request = engine.admit("a", keys(2))
    engine.ask(request)
    engine.manager.wait_if_asking()
    assert engine.prober.waits == 1
    engine.now += 1  # longer than a look-up may take
    engine.ask(request)
    engine.manager.wait_if_asking()
    assert engine.prober.waits == 1
    engine.prober.reply(2)
    engine.ask(engine.admit("b", keys(2)))
    engine.manager.wait_if_asking()
    assert engine.prober.waits == 1


def test_while_one_look_up_hangs_another_is_tried_now_and_then_and_its_answer_opens_all_again():
    engine = Engine()
    first = engine.admit("first", keys(2))
    engine.ask(first)
    engine.now += 1
    assert engine.ask(first) == [MISS]
    engine.now += HUNG_RETRY_S
    second = engine.admit("second", keys(3))
    assert engine.ask(second) == [RETRY] * 3
    assert engine.ask(engine.admit("third", keys(1))) == [MISS], "one request at a time pays for the trial"
    hung = engine.prober.questions.pop(0)
    engine.prober.reply(3)
    assert engine.ask(second) == [HIT] * 3
    assert engine.ask(engine.admit("fourth", keys(4)))[-1] is RETRY, "look-ups are on again"
    assert hung.ticket != engine.prober.questions[-1].ticket


@pytest.mark.parametrize("no", [False, 0, "false", "off", "no", [], {}])
def test_whatever_is_not_plainly_a_yes_opts_out(no: Any):
    assert not wanted({"py_kvcache": {"load": no}}, "load")
    assert wanted({"py_kvcache": {"load": True}}, "load")
    assert wanted({"py_kvcache": {}}, "load")
    assert wanted(None, "load")


def test_a_misspelt_wish_is_said_once(caplog: pytest.LogCaptureFixture):
    for params in ({"load": False}, {"py_kvcache": {"load": "no", "store": 1}}, None, {}):
        complain(params)
    assert caplog.records == []
    for _ in range(3):
        complain({"py_kvcache": {"load": False, "stor": False}})
        complain({"py_kvcache": "off"})
    assert len(caplog.records) == 2
    assert "'stor'" in caplog.text and "known: load, store" in caplog.text


def test_how_long_vllm_takes_to_ask_again_is_no_wait_for_the_file_system():
    engine = Engine()
    request = engine.admit("a", keys(4))
    assert engine.ask(request) == [RETRY] * 4
    engine.prober.reply(0)
    engine.now += 100  # vLLM's steps were full with other requests
    assert engine.ask(request) == [MISS]
    engine.now += ABSENT_FOR_S
    assert engine.ask(request) == [MISS], "the old no stands while it is asked again"
    engine.prober.reply(4)
    engine.now += 100
    assert engine.ask(request)[0] is HIT, "a later yes still counts: the request never gave up"


def test_what_a_running_request_had_computed_before_a_reset_is_not_stored_as_new():
    engine = Engine()
    running, waiting = engine.admit("a", keys(2)), engine.admit("b", keys(2, chain=1))
    engine.manager.allocated(running.request, 0)
    engine.manager.reset_cache()
    assert engine.store(running) == []
    assert engine.store(waiting) == waiting.keys


def test_kv_memory_is_short_when_less_is_free_than_all_have_yet_to_compute():
    engine = Engine()
    first, second = (engine.admit(f"r{n}", keys(4, chain=n)).request for n in range(2))
    tokens = first.num_prompt_tokens
    need = engine.manager.needs_blocks

    def is_exactly(expected: int) -> bool:
        return need(expected - 1, 16) and not need(expected, 16)

    assert is_exactly(2 * tokens + 2 * 16)
    engine.manager.allocated(first, 0)
    first.num_computed_tokens = 30  # a chunk of its prompt
    assert is_exactly(tokens - 30 + tokens + 32)
    first.num_computed_tokens, first.num_tokens = tokens + 99, tokens + 100
    assert is_exactly(1 + tokens + 32)
    engine.manager.preempted(["r0"])
    first.num_computed_tokens = 0
    assert is_exactly(tokens + 100 + tokens + 32), "its answer is computed again, too"
    engine.manager.allocated(second, 4 * TOKENS)
    assert is_exactly(tokens + 100 + 32), "who loads has his blocks"
    engine.manager.on_request_finished(SimpleNamespace(req_id="r0"))
    engine.manager.on_request_finished(SimpleNamespace(req_id="r1"))
    assert not need(0, 16)


def test_all_workers_are_asked_for_gauges_in_the_same_step_every_fifty_milliseconds():
    engine = Engine()
    assert engine.manager.is_time_to_count(idle=False)
    assert not engine.manager.is_time_to_count(idle=False)
    assert engine.manager.is_time_to_count(idle=True), "it may be the last for long"
    engine.now += 0.06
    assert engine.manager.is_time_to_count(idle=False)
