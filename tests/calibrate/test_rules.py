"""Both break-even rules against trying every prefix; bandwidth against figures worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_kvcache.calibrate.rules import bandwidth, exact_threshold, paper_threshold, tabulate
from py_kvcache.curves import Curve
from py_kvcache.errors import KvCacheError

LONGEST = 120


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Monotone, with few distinct values, so that both curves are often equal."""
    tokens = sorted(draw(st.sets(st.integers(0, LONGEST), min_size=2, max_size=6)))
    seconds = sorted(draw(st.lists(st.integers(0, 12), min_size=len(tokens), max_size=len(tokens))))
    return Curve.of(zip(tokens, seconds, strict=True))


def paper_by_trying(f: Curve, g: Curve, prompt: int, start: int) -> int | None:
    return next((p for p in range(start, prompt + 1) if g(p) + f(prompt - p) < f(prompt)), None)


def exact_by_trying(f: Curve, g: Curve, start: int, end: int) -> int | None:
    good = [p for p in range(start, end + 1) if all(g(q) < f(q) for q in range(p, end + 1))]
    return good[0] if good else None


@settings(deadline=None)
@given(curves(), curves(), st.integers(0, LONGEST), st.integers(0, LONGEST + 5))
def test_both_rules_find_what_trying_every_prefix_finds(f: Curve, g: Curve, prompt: int, start: int):
    f_table, g_table = tabulate(f, LONGEST), tabulate(g, LONGEST)
    assert paper_threshold(f_table, g_table, prompt, start) == paper_by_trying(f, g, prompt, start)
    assert exact_threshold(f_table, g_table, start, prompt).least == exact_by_trying(f, g, start, prompt)


def test_both_rules_are_exact_for_curves_as_they_are_measured():
    generator = random.Random(7)
    for _ in range(40):
        tokens = sorted(generator.sample(range(10, 1500), 6))
        f = Curve.of(zip(tokens, sorted(generator.uniform(0.01, 1) for _ in tokens), strict=True))
        g = Curve.of(zip(tokens, sorted(generator.uniform(0.01, 1) for _ in tokens), strict=True))
        last = tokens[-1]
        f_table, g_table = tabulate(f, last), tabulate(g, last)
        assert exact_threshold(f_table, g_table, 0, last).least == exact_by_trying_fast(f, g, last)
        for prompt in (0, 1, last // 3, last):
            assert paper_threshold(f_table, g_table, prompt) == paper_by_trying(f, g, prompt, 0)


def exact_by_trying_fast(f: Curve, g: Curve, end: int) -> int | None:
    least = None
    for prefix in range(end, -1, -1):
        if g(prefix) >= f(prefix):
            break
        least = prefix
    return least


@settings(deadline=None)
@given(curves(), st.integers(0, 3 * LONGEST))
def test_a_table_is_the_curve_at_every_token_to_the_last_bit(curve: Curve, longest: int):
    assert tabulate(curve, longest).tolist() == [curve(tokens) for tokens in range(longest + 1)]


def test_a_point_at_which_both_take_the_same_does_not_pay():
    f, g = np.array([0.0, 2, 3, 4, 5]), np.array([1.0, 1, 3, 1, 1])
    assert exact_threshold(f, g, 0, 4).least == 3
    assert exact_threshold(f, g, 0, 2).least is None
    # g(1) + f(2) = f(3): no gain; with 2 tokens there is one
    assert paper_threshold(f, np.array([0.0, 1, 1.5, 2, 2]), 3) == 2


def test_of_several_crossings_the_last_counts():
    f, g = np.array([1.0, 1, 1, 1, 1]), np.array([0.0, 2, 0, 2, 0])
    found = exact_threshold(f, g, 0, 4)
    assert (found.least, found.turns) == (4, 4)
    assert exact_threshold(f, g, 0, 3).least is None


def test_bandwidths_worked_out_by_hand():
    # 1,000,000 bytes; computed in 3 s; loaded in 1.5 s, 1 s of which is the transfer: 2.5 s may be spent.
    found = bandwidth(1000, 1_000_000, 3.0, 1.5, 1.0)
    assert (found.needed, found.had) == (400_000.0, 1_000_000.0)
    # Beside the transfer it takes 4 s: nothing helps.
    assert bandwidth(1000, 1_000_000, 3.0, 5.0, 1.0).needed is None
    assert bandwidth(1000, 1_000_000, 3.0, 4.0, 1.0).needed is None
    # 80,000 tokens of 114,688 bytes, f 2.61 s, g 0.5 s with a copy of 0.45 s
    found = bandwidth(80_000, 80_000 * 114_688, 2.61, 0.5, 0.45)
    assert found.needed == pytest.approx(3.584e9)
    assert found.had == pytest.approx(20.389e9, rel=1e-4)


def test_at_the_bandwidth_needed_loading_takes_as_long_as_computing():
    found = bandwidth(1000, 1_000_000, 3.0, 1.5, 1.0)
    assert found.needed is not None
    assert 1.5 - 1.0 + found.kv_bytes / found.needed == pytest.approx(3.0)


def test_no_bytes_are_no_bandwidth():
    with pytest.raises(KvCacheError, match="no bandwidth; measure prefixes of a block or more"):
        bandwidth(10, 0, 1.0, 1.0, 1.0)
