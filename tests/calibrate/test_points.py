"""Medians, their intervals, and curves that never fall."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_kvcache.calibrate.points import measure, median_of, pool


def test_the_interval_of_few_values_is_from_the_least_to_the_most():
    found = median_of([3.0, 1.0, 2.0])
    assert (found.seconds, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert median_of([1.0]).low == median_of([1.0]).high == 1.0


@pytest.mark.parametrize(("count", "cut"), [(5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (20, 5)])
def test_the_interval_of_many_values_is_that_of_the_sign_test(count: int, cut: int):
    found = median_of([float(n) for n in range(count)])
    assert (found.low, found.high) == (cut, count - 1 - cut)


def test_the_interval_holds_the_true_median_in_95_of_100_cases():
    generator = random.Random(5)
    held = 0
    for _ in range(2000):
        found = median_of([generator.expovariate(1.0) for _ in range(11)])
        held += found.low <= 0.6931 <= found.high
    assert held >= 0.95 * 2000


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_pooled_values_never_fall_and_keep_their_mean(values: list[float]):
    pooled = pool(values, [1.0] * len(values))
    assert all(b >= a for a, b in itertools.pairwise(pooled))
    assert statistics.fmean(pooled) == pytest.approx(statistics.fmean(values))


def test_values_that_never_fall_are_left_alone_and_weights_count():
    assert pool([1, 2, 2, 3], [1, 1, 1, 1]) == [1, 2, 2, 3]
    assert pool([2, 1], [3, 1]) == [1.75, 1.75]


def test_a_small_dip_is_pooled_and_said():
    found = measure("computing", [(100, 1.0), (200, 2.0), (300, 1.96), (400, 3.0)])
    assert found.curve is not None
    assert found.curve(200) == found.curve(300) == pytest.approx(1.98)
    assert "200, 300 tokens" in found.notes[0]


def test_a_dip_within_the_intervals_is_pooled():
    found = measure(
        "computing", [(100, 1.0), (200, 1.5), (200, 2.0), (200, 2.5), (300, 1.6), (300, 1.7), (300, 2.1)]
    )
    assert found.curve is not None and found.notes


def test_a_fall_beyond_the_intervals_is_unknown_and_says_where():
    found = measure("loading from disk", [(100, 1.0), (200, 2.0), (300, 1.5), (400, 3.0)])
    assert found.curve is None
    assert "loading from disk falls from 2 s at 200 tokens to 1.5 s at 300" in found.reason


def test_one_repeat_where_a_budget_ended_is_no_proof_of_a_fall():
    # As measured on a busy machine: three repeats at all lengths but the last that was begun.
    pairs = [
        (1025, 2.24),
        (1025, 2.489),
        (1025, 2.609),
        (1153, 2.215),
        (1281, 2.358),
        (1281, 2.565),
        (1281, 3.398),
    ]
    found = measure("computing", pairs)
    assert found.curve is not None and "1,025, 1,153 tokens" in found.notes[0]
    assert found.curve(1153) == pytest.approx((3 * 2.489 + 2.215) / 4)
    steady = [(100, 1.0), (100, 1.01), (100, 1.02), (200, 0.8), (300, 1.5), (300, 1.51), (300, 1.52)]
    assert measure("computing", steady).curve is None, "a fifth is more than these vary"


def test_a_fall_that_creeps_over_many_lengths_is_found():
    found = measure("computing", [(100 * (n + 1), 1.0 - 0.02 * n) for n in range(8)])
    assert found.curve is None


@pytest.mark.parametrize(
    ("pairs", "part"), [([], "was not measured"), ([(100, 1.0), (100, 1.1)], "at 100 tokens only")]
)
def test_fewer_than_two_lengths_are_unknown(pairs: list[tuple[int, float]], part: str):
    found = measure("computing", pairs)
    assert found.curve is None and part in found.reason
