"""The gate's decision: a pure function, beside an oracle."""

from __future__ import annotations

import random

import pytest

from py_kvcache.curves import Curve
from py_kvcache.scheduler.policy import GateInputs, Mode, Reason, decide, threshold_for

PREFILL = Curve.of([(0, 0.0), (10_000, 0.13), (40_000, 0.81), (80_000, 2.2)])


def test_off_loads_every_hit():
    assert decide(Mode.OFF, GateInputs(10, 0, 5)).load


def oracle(table: list[tuple[int, int]], prompt: int, hit: int) -> bool:
    """Row by row: the first that is as long as the prompt, or the last."""
    for length, least in table:
        if length >= prompt:
            return hit >= least
    return hit >= table[-1][1]


def test_static_agrees_with_a_table_walked_row_by_row_for_ten_thousand_inputs():
    generator = random.Random(5)
    for _ in range(10_000):
        lengths = sorted(generator.sample(range(1, 200), generator.randint(1, 6)))
        table = [(length, generator.choice([0, generator.randint(0, 220)])) for length in lengths]
        prompt = generator.randint(1, 220)
        hit = generator.choice([generator.randint(0, prompt), threshold_for(table, prompt)])
        found = decide(Mode.STATIC, GateInputs(prompt, 0, hit, thresholds=table))
        assert found.load is oracle(table, prompt, hit), (table, prompt, hit)


def test_equality_loads_zero_is_off_and_without_a_table_all_is_loaded():
    table = [(8000, 6400)]
    assert decide(Mode.STATIC, GateInputs(8000, 0, 6400, thresholds=table)).load
    assert not decide(Mode.STATIC, GateInputs(8000, 0, 6399, thresholds=table)).load
    assert decide(Mode.STATIC, GateInputs(8000, 0, 1, thresholds=[(8000, 0)])).load
    assert decide(Mode.STATIC, GateInputs(8000, 0, 1)).reason is Reason.NO_THRESHOLDS


def inputs(hit: int, rate: float, **more) -> GateInputs:
    gpu = more.pop("gpu_tokens", 0)
    return GateInputs(
        80_000, gpu, hit, load_bytes=(hit - gpu) * 114_688, bytes_per_s=rate, prefill=PREFILL, **more
    )


def test_adaptive_loads_what_takes_less_than_it_saves():
    fast, slow = decide(Mode.ADAPTIVE, inputs(40_000, 15e9)), decide(Mode.ADAPTIVE, inputs(40_000, 2e9))
    assert (fast.load, fast.reason) == (True, Reason.FASTER)
    assert fast.saved_s == pytest.approx(0.81)
    assert fast.load_s == pytest.approx(40_000 * 114_688 / 15e9)
    assert (slow.load, slow.reason) == (False, Reason.SLOWER)


def test_what_the_gpu_has_is_not_saved_again():
    """Behind a long prefix a token costs more, so loading the same bytes pays there."""
    rate = 7e9
    assert not decide(Mode.ADAPTIVE, inputs(8_000, rate)).load
    late = decide(Mode.ADAPTIVE, inputs(68_000, rate, gpu_tokens=60_000))
    assert late.load
    assert late.saved_s == pytest.approx(PREFILL(68_000) - PREFILL(60_000))


def test_what_is_queued_before_counts_and_so_does_the_latency():
    rate = 15e9
    assert decide(Mode.ADAPTIVE, inputs(40_000, rate)).load
    assert not decide(Mode.ADAPTIVE, inputs(40_000, rate, queued_bytes=10 << 30)).load
    assert not decide(Mode.ADAPTIVE, inputs(40_000, rate, latency_s=1.0)).load


def test_what_is_not_known_is_declined_but_for_a_probe():
    for unknown in (GateInputs(9, 0, 5, prefill=PREFILL), GateInputs(9, 0, 5, load_bytes=1, bytes_per_s=1e9)):
        assert decide(Mode.ADAPTIVE, unknown).reason is Reason.UNKNOWN
        assert not decide(Mode.ADAPTIVE, unknown).load
    probe = decide(Mode.ADAPTIVE, GateInputs(9, 0, 5, probe=True))
    assert (probe.load, probe.reason) == (True, Reason.PROBE)
