"""What the gate rests on: learned prefill, measured rates, backlog, the thresholds file, probes."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.models import THRESHOLDS_SCHEMA, Thresholds
from py_kvcache.plan import Pace
from py_kvcache.scheduler import gate as gate_module
from py_kvcache.scheduler.gate import PROBE_EVERY, STALE_S, Gate, Hit
from py_kvcache.scheduler.pace import LoadPace
from py_kvcache.scheduler.policy import Mode, Reason
from py_kvcache.scheduler.prefill import PrefillLearner
from py_kvcache.scheduler.thresholds import CHECK_EVERY_S, ThresholdsFile

ENGINE = "0123456789abcdef"


def no_file(_: float) -> None:
    return None


# ---- prefill


def truth(tokens: float) -> float:
    return 1.1e-5 * tokens + 2.0e-10 * tokens * tokens


def steps_of(prompt: int, chunk: int = 8192) -> list[tuple[int, int]]:
    return [(begin, min(begin + chunk, prompt)) for begin in range(0, prompt, chunk)]


def test_the_time_of_a_prompt_is_learned_from_steps_of_other_lengths():
    learner, source = PrefillLearner(), random.Random(3)
    for prompt in [30_000, 12_000, 50_000, 20_000]:
        for begin, end in steps_of(prompt):
            learner.observe([(begin, end)], (truth(end) - truth(begin) + 0.001) * source.uniform(0.97, 1.03))
    model = learner.model()
    assert model is not None
    for tokens in (8_000, 40_000, 80_000):
        expected = truth(tokens) + 0.001 * tokens / 8192
        assert model(tokens) == pytest.approx(expected, rel=0.1), tokens
    assert model(0) == 0 and "50000" in str(model) and model.steps == 16


def test_the_slow_first_steps_of_a_process_are_not_believed():
    learner = PrefillLearner()
    for n, (begin, end) in enumerate(steps_of(40_000) * 4):
        learner.observe([(begin, end)], (truth(end) - truth(begin)) * (6 if n < 3 else 1))
    model = learner.model()
    assert model is not None and model(40_000) == pytest.approx(truth(40_000), rel=0.05)


def test_steps_without_a_prompt_teach_nothing_and_few_steps_not_enough():
    learner = PrefillLearner()
    for _ in range(50):
        learner.observe([(1000, 1001), (2000, 2001)], 0.01)
    learner.observe([(0, 4096)], 0.1)
    assert learner.model() is None


def test_a_step_that_was_put_together_early_counts_from_the_end_of_the_one_before():
    learner = PrefillLearner()
    for number in range(1, 6):
        # vLLM makes the next step while the GPU works on this one.
        learner.step_began(number, [(0, 1000)], 10.0 * (number - 2))
        learner.step_ended(number, 10.0 * number)
    assert learner.seconds == pytest.approx(5 * 10.0)


ROW = st.tuples(st.integers(0, 10**6), st.integers(64, 10**5), st.floats(1e-6, 100))


@given(st.lists(ROW, min_size=4, max_size=30))
def test_whatever_was_seen_more_tokens_never_take_less(rows: list[tuple[int, int, float]]):
    learner = PrefillLearner()
    for begin, count, seconds in rows:
        learner.observe([(begin, begin + count)], seconds)
    model = learner.model()
    assert model is not None
    times = [model(tokens) for tokens in (0, 1, 100, 10_000, 10**6)]
    assert times == sorted(times) and times[0] == 0 and times[-1] > 0


# ---- pace


def pace(reads: float, busy: float, writes: float = 0, write_busy: float = 0.0) -> Pace:
    return Pace((int(reads), busy), (int(writes), write_busy), 1000)


def test_the_slowest_rank_counts_and_before_reads_its_writes():
    known = LoadPace()
    assert known.rate == 0
    known.heard({0: pace(0, 0.0, 4e9, 1.0), 1: pace(0, 0.0, 2e9, 1.0)}, 1.0)
    assert known.rate == pytest.approx(2e9)
    known.heard({0: pace(3e9, 2.0, 4e9, 1.0), 1: pace(9e9, 1.0, 2e9, 1.0)}, 2.0)
    assert known.rate == pytest.approx(1.5e9)
    assert known.block_bytes == 1000 and known.measured_at == 2.0


def test_a_rate_that_drops_is_noticed_within_a_quarter_of_a_second_of_reading():
    known = LoadPace()
    read = busy = 0.0
    for _ in range(50):
        read, busy = read + 1e8, busy + 0.01
        known.heard({0: pace(read, busy)}, busy)
    assert known.rate == pytest.approx(1e10, rel=0.01)
    for _ in range(4):
        read, busy = read + 1e8, busy + 0.1
        known.heard({0: pace(read, busy)}, busy)
    assert known.rate == pytest.approx(1e9, rel=0.01)


def test_a_worker_that_starts_again_is_measured_again():
    known = LoadPace()
    known.heard({0: pace(5e9, 1.0)}, 1.0)
    known.heard({0: pace(1e9, 1.0)}, 2.0)
    assert known.rate == pytest.approx(1e9)


def test_a_limit_of_the_read_rate_is_not_exceeded():
    known = LoadPace(limit=5e8)
    known.heard({0: pace(5e9, 1.0)}, 1.0)
    assert known.rate == 5e8


def test_what_is_planned_queues_until_it_has_come():
    known = LoadPace()
    known.heard({0: pace(1e9, 1.0)}, 0.0)
    assert known.queued_bytes(0.0) == 0
    known.planned("a", 2 * 10**9, 10.0)
    known.planned("b", 10**9, 10.5)
    assert known.queued_bytes(10.5) == pytest.approx(2.5e9)
    assert known.queued_bytes(12.0) == pytest.approx(1e9)
    known.ended("a", 12.2)
    assert known.latency_s == pytest.approx(0.3 * 0.2)
    known.ended("b", 13.0)
    assert known.latency_s == pytest.approx(0.7 * 0.06)
    known.ended("b", 99.0)
    assert known.queued_bytes(13.0) == 0
    known.planned("c", 10**9, 13.0)
    known.forget("c")
    assert known.queued_bytes(13.0) == 0


# ---- gate


def make(mode: Mode = Mode.ADAPTIVE) -> Gate:
    gate = Gate(mode, 256, 0, no_file)
    gate.pace.block_bytes = 256 * 1000
    return gate


def taught(rate: float = 1e9) -> Gate:
    """f is truth(), storage reads at ``rate`` bytes a second."""
    gate = make()
    for begin, end in steps_of(40_000) * 10:
        gate.prefill.observe([(begin, end)], truth(end) - truth(begin))
    gate.pace.heard({0: Pace((int(rate), 1.0), (0, 0.0), 256 * 1000)}, 0.0)
    return gate


def test_a_load_counts_whole_blocks_also_where_the_engine_has_a_part_of_the_first():
    gate = make()
    assert gate.load_bytes(Hit(2000, 0, 1024)) == 4 * 256_000
    assert gate.load_bytes(Hit(2000, 300, 1024)) == 3 * 256_000


@pytest.mark.parametrize(("rate", "load"), [(1e9, True), (1e6, False)])
def test_adaptive_loads_what_comes_sooner_than_it_is_computed(rate: float, load: bool):
    decision = taught(rate).judge(Hit(40_000, 0, 20_480), None, 1.0)
    assert decision.load is load
    assert decision.saved_s == pytest.approx(truth(20_480), rel=0.05)
    assert decision.load_s == pytest.approx(20_480 * 1000 / rate)


def test_what_the_gpu_has_is_not_saved_and_what_is_planned_comes_first():
    gate = taught(1e8)
    assert gate.judge(Hit(40_000, 0, 20_480), None, 1.0).load
    assert not gate.judge(Hit(40_000, 20_224, 20_480), None, 1.0).load or truth(256) > 0.0026
    gate.pace.planned("other", 10**8, 1.0)
    late = gate.judge(Hit(40_000, 0, 20_480), None, 1.0)
    assert not late.load and late.reason is Reason.SLOWER


def test_while_nothing_is_known_one_request_in_twenty_is_loaded_and_keeps_its_answer():
    gate = make()
    hit = Hit(40_000, 0, 20_480)
    decisions = [gate.judge(hit, None, 0.0) for _ in range(3 * PROBE_EVERY)]
    assert [n for n, d in enumerate(decisions) if d.load] == [0, PROBE_EVERY, 2 * PROBE_EVERY]
    assert {d.reason for d in decisions} == {Reason.PROBE, Reason.UNKNOWN}
    for before in decisions[:2]:
        for _ in range(50):
            assert gate.judge(hit, before, 0.0).load is before.load
    assert gate.judge(hit, None, 0.0).load, "the 61st: asking again was no new request"


def test_slow_storage_is_tried_again_when_its_rate_is_old_and_that_costs_little():
    gate = taught(1e7)
    hit = Hit(40_000, 0, 1_024)  # 0.1 s to load, 0.012 to compute
    assert not gate.judge(hit, None, STALE_S - 1).load
    assert gate.prefill.seconds > 7
    tried = 0
    for n in range(100):
        decision = gate.judge(hit, None, STALE_S + n)
        tried += decision.load
        gate.counted(decision)
    assert tried == 0 or tried * 0.09 <= 0.01 * gate.prefill.seconds + 0.09
    for _ in range(300):
        gate.prefill.observe([(0, 8192)], truth(8192))
    assert gate.judge(hit, None, STALE_S + 200).reason is Reason.PROBE


def test_off_asks_nothing_and_static_without_a_file_loads():
    hit = Hit(1000, 0, 512)
    assert make(Mode.OFF).judge(hit, None, 0.0).reason is Reason.GATE_OFF
    assert make(Mode.STATIC).judge(hit, None, 0.0).reason is Reason.NO_THRESHOLDS


def test_nothing_can_pay_where_the_longest_prompt_is_computed_sooner(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, gate_module.log.name):
        assert make().can_pay(100_000, 0.0), "nobody knows"
        assert taught(1e9).can_pay(100_000, 0.0) and "prefix" not in caplog.text
        slow = taught(2e7)
        assert not slow.can_pay(40_000, 0.0) and "no prefix of up to 40000" in caplog.text
        # A long one would: squares grow faster than bytes.
        assert taught(3e7).can_pay(200_000, 0.0)
        slow.pace.heard({0: Pace((10**10, 1.5), (0, 0.0), 256_000)}, 1.0)
        assert not slow.can_pay(40_000, 4.9), "for five seconds"
        assert slow.can_pay(40_000, 5.1)


def test_a_backlog_that_passes_is_no_reason_to_store_nothing():
    gate = taught(1e9)
    gate.pace.planned("long", 10**12, 0.0)
    assert gate.judge(Hit(40_000, 0, 20_480), None, 0.0).reason is Reason.SLOWER
    assert gate.can_pay(40_000, 0.0)


def test_what_all_ranks_have_in_memory_has_thresholds_of_its_own():
    table = {"disk": ((1000, 10**9),), "memory": ((1000, 0),)}
    file = Thresholds.model_validate({"schema": THRESHOLDS_SCHEMA, "engine": ENGINE, "thresholds": table})
    gate = Gate(Mode.STATIC, 256, 0, lambda _: file)
    gate.pace.block_bytes = 1000
    assert not gate.judge(Hit(1000, 0, 768, 2), None, 0.0).load
    assert gate.judge(Hit(1000, 0, 768, 3), None, 0.0).load


@pytest.mark.parametrize(("least", "pays"), [(0, True), (39_000, True), (40_001, False)])
def test_with_thresholds_something_pays_if_a_prompt_can_be_that_long(least: int, pays: bool):
    table = {"disk": ((1000, least), (40_000, least))}
    file = Thresholds.model_validate({"schema": THRESHOLDS_SCHEMA, "engine": ENGINE, "thresholds": table})
    gate = Gate(Mode.STATIC, 256, 0, lambda _: file)
    assert gate.can_pay(40_000, 0.0) is pays


def test_every_number_of_a_decision_is_in_the_debug_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, gate_module.log.name):
        taught().judge(Hit(40_000, 256, 20_480), None, 1.0)
    text = caplog.text
    for part in (
        "load_s=",
        "saved_s=",
        "bytes_per_s=1000000000.0",
        "queued_bytes=0",
        "gpu_tokens=256",
        "latency_s=",
    ):
        assert part in text, part


# ---- the file


def write(path: Path, **changes: object) -> None:
    value = {"schema": "py-kvcache/thresholds/1", "engine": ENGINE, "thresholds": {"disk": [[1000, 500]]}}
    path.write_text(json.dumps({**value, **changes}))
    os.utime(path, ns=(0, random.getrandbits(50)))


def run_now(job: Callable[[], None]) -> None:
    job()


def test_the_file_is_read_again_when_it_changes(tmp_path: Path):
    path = tmp_path / "thresholds.json"
    write(path)
    file = ThresholdsFile(str(path), lambda: ENGINE, run_now)
    file.current(0.0)
    value = file.current(0.1)
    assert value is not None and value.thresholds == {"disk": ((1000, 500),)}
    write(path, thresholds={"disk": [[1000, 700]]})
    assert file.current(CHECK_EVERY_S - 0.1) is value, "not looked at each time"
    file.current(CHECK_EVERY_S)
    value = file.current(CHECK_EVERY_S)
    assert value is not None and value.thresholds == {"disk": ((1000, 700),)}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"schema": "other"}, "schema"),
        ({"engine": "f" * 16}, "calibrate for it"),
        ({"thresholds": {"disk": [[1000, -1]]}}, "thresholds"),
        ({"thresholds": {"disk": [[2000, 1], [1000, 1]]}}, "ascend"),
    ],
)
def test_a_file_that_is_no_good_is_complained_of_once_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], word: str
):
    path = tmp_path / "thresholds.json"
    write(path)
    file = ThresholdsFile(str(path), lambda: ENGINE, run_now)
    file.current(0.0)
    assert file.current(0.1) is not None
    write(path, **changes)
    with caplog.at_level(logging.WARNING):
        for n in range(1, 6):
            file.current(n * CHECK_EVERY_S)
    assert file.current(99.0) is None
    (record,) = caplog.records
    assert word in record.getMessage() and str(path) in record.getMessage()


def test_no_file_where_one_was_set_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = ThresholdsFile(str(tmp_path / "none.json"), lambda: ENGINE, run_now)
    file.current(0.0)
    assert "none.json" in caplog.text
    nothing = ThresholdsFile("", lambda: ENGINE, run_now)
    assert nothing.current(0.0) is None and len(caplog.records) == 1


def test_nothing_is_asked_before_the_engine_is_known_or_while_a_look_hangs(tmp_path: Path):
    jobs: list[Callable[[], None]] = []
    engine: list[str | None] = [None]
    write(tmp_path / "t.json")
    file = ThresholdsFile(str(tmp_path / "t.json"), lambda: engine[0], jobs.append)
    file.current(0.0)
    assert not jobs
    engine[0] = ENGINE
    for n in range(10):
        assert file.current(n * CHECK_EVERY_S) is None
    assert len(jobs) == 1
    jobs.pop()()
    assert file.current(100.0) is not None


def test_a_good_file_that_was_away_for_a_while_is_used_again(tmp_path: Path):
    path = tmp_path / "t.json"
    write(path)
    file = ThresholdsFile(str(path), lambda: ENGINE, run_now)
    file.current(0.0)
    path.rename(tmp_path / "away")
    file.current(10.0)
    assert file.current(11.0) is None
    (tmp_path / "away").rename(path)
    file.current(20.0)
    assert file.current(21.0) is not None


@pytest.mark.parametrize("kind", ["fifo", "folder", "binary", "large", "denormal"])
def test_whatever_lies_in_the_files_place_is_complained_of_and_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
):
    path = tmp_path / "t.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "large":
        path.write_bytes(b" " * (2 << 20))
    else:
        write(
            path, prefill=[[5e-324, 1.7e308], [1e-12, 1e300], [1e-3, 1e300], [0.075, 1.0], [1.7e308, 1e-12]]
        )
    file = ThresholdsFile(str(path), lambda: ENGINE, run_now)
    file.current(0.0)
    assert file.current(1.0) is None and len(caplog.records) == 1
    if kind != "folder":
        path.unlink()
        write(path)
        file.current(10.0)
        assert file.current(11.0) is not None
