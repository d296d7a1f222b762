"""Curves: through their points, as scipy's PCHIP between them, straight on beyond."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_kvcache.curves import Curve

POINTS = st.lists(
    st.tuples(st.integers(0, 200_000), st.floats(0, 100, allow_nan=False)), min_size=2, max_size=12,
    unique_by=lambda point: point[0],
).map(sorted)  # fmt: skip


@settings(deadline=None)  # scipy is imported by the first
@given(POINTS, st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_between_the_points_it_is_scipys(points, places):
    interpolate = pytest.importorskip("scipy.interpolate")
    curve, theirs = Curve.of(points), interpolate.PchipInterpolator(*zip(*points, strict=True))
    first, last = points[0][0], points[-1][0]
    for place in places:
        at = first + place * (last - first)
        assert curve(at) == pytest.approx(max(0.0, float(theirs(at))), rel=1e-6, abs=1e-6)


@given(POINTS)
def test_it_goes_through_its_points_and_is_never_negative(points):
    curve = Curve.of(points)
    for tokens, seconds in points:
        assert curve(tokens) == pytest.approx(seconds, rel=1e-9, abs=1e-9)
    assert all(curve(at) >= 0 for at in (0, points[-1][0] * 3, points[-1][0] + 1))


def test_where_the_points_ascend_so_does_the_curve():
    curve = Curve.of([(1000, 0.05), (4000, 0.1), (8000, 0.3), (40000, 3.0)])
    values = [curve(at) for at in range(1000, 40001, 100)]
    assert values == sorted(values)


def test_beyond_the_last_point_the_line_goes_on():
    curve = Curve.of([(0, 0), (1000, 1), (2000, 2)])
    assert curve(5000) == pytest.approx(5.0)
    assert curve.reach == 2000


@pytest.mark.parametrize(
    ("points", "part"),
    [
        ([], "two points or more, not 0"),
        ([(1, 1)], "not 1"),
        ([(1, 1), (1, 2)], "must ascend"),
        ([(2, 1), (1, 2)], "must ascend"),
        ([(-1, 1), (1, 2)], "not negative"),
        ([(0, -1), (1, 2)], "not negative"),
        ([(0, math.nan), (1, 2)], "finite"),
        ([(0, 1), (math.inf, 2)], "finite"),
        ([(0, 1, 2), (1, 2, 3)], "pair"),
    ],
)
def test_points_that_make_no_curve_are_named(points, part):
    with pytest.raises(ValueError, match=part):
        Curve.of(points)
