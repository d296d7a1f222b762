"""Curves through measured points: time to first token over prompt length, seconds of a load over its length.

Between the points the interpolation is PCHIP (F. N. Fritsch, J. Butland, SIAM J. Sci. Stat. Comput. 5, 1984),
as scipy has it: it goes through every point and never bends where the points do not. Written out here, since
scipy is none of the packages that vLLM brings into a pod.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Seconds over tokens.

    Args:
        points: at least two, as (tokens, seconds), tokens strictly ascending and not negative, seconds not
            negative.
    Raises:
        ValueError: says which point is wrong.
    """

    points: tuple[tuple[float, float], ...]
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.points)
        object.__setattr__(self, "_slopes", tuple(_slopes(self.points)))

    @classmethod
    def of(cls, points: Iterable[Iterable[float]]) -> Curve:
        """From any pairs of numbers. Raises ValueError for what is no pair, too."""
        pairs = [tuple(float(number) for number in point) for point in points]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError("every point is a pair: tokens, seconds")
        return cls(tuple((pair[0], pair[1]) for pair in pairs))

    @property
    def reach(self) -> float:
        """Tokens of the last point; beyond it values are extrapolated in a straight line."""
        return self.points[-1][0]

    def __call__(self, tokens: float) -> float:
        """Seconds, never negative. Outside the points the line goes on with the slope that it has there."""
        return max(0.0, float(self.piece(bisect_right(self.points, (tokens, math.inf)), tokens)))

    def piece(self, number: int, tokens: Any) -> Any:
        """Seconds by the piece that ends at point ``number``; 0: before all, len(points): beyond all.

        Args:
            tokens: a number within that piece, or a numpy array of them.
        """
        points, slopes = self.points, self._slopes
        if number == 0:
            return points[0][1] + (tokens - points[0][0]) * slopes[0]
        left, slope = points[number - 1], slopes[number - 1]
        if number == len(points):
            return left[1] + (tokens - left[0]) * slope
        return _hermite(left, points[number], slope, slopes[number], tokens)


def _check(points: tuple[tuple[float, float], ...]) -> None:
    if len(points) < 2:
        raise ValueError(f"a curve needs two points or more, not {len(points)}")
    before = -1.0
    for tokens, seconds in points:
        if not (math.isfinite(tokens) and math.isfinite(seconds)) or tokens < 0 or seconds < 0:
            raise ValueError(f"point ({tokens}, {seconds}): both must be finite and not negative")
        if tokens <= before:
            raise ValueError(f"point ({tokens}, {seconds}): tokens must ascend, the one before has {before}")
        before = tokens


def _slopes(points: tuple[tuple[float, float], ...]) -> list[float]:
    """At each point: a weighted harmonic mean of its neighbours' secants, 0 where these change sign."""
    widths = [b[0] - a[0] for a, b in pairwise(points)]
    secants = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    if len(points) == 2:
        return [secants[0], secants[0]]
    inner = []
    for n in range(1, len(points) - 1):
        left, right = secants[n - 1], secants[n]
        if left * right <= 0:
            inner.append(0.0)
            continue
        first, second = 2 * widths[n] + widths[n - 1], widths[n] + 2 * widths[n - 1]
        inner.append((first + second) / (first / left + second / right))
    begin = _end_slope(widths[0], widths[1], secants[0], secants[1])
    end = _end_slope(widths[-1], widths[-2], secants[-1], secants[-2])
    return [begin, *inner, end]


def _end_slope(width: float, next_width: float, secant: float, next_secant: float) -> float:
    """Three-point estimate, cut so that the curve does not bend back."""
    slope = ((2 * width + next_width) * secant - width * next_secant) / (width + next_width)
    if slope * secant <= 0:
        return 0.0
    if secant * next_secant <= 0 and abs(slope) > 3 * abs(secant):
        return 3 * secant
    return slope


def _hermite(
    left: tuple[float, float], right: tuple[float, float], slope: float, next_slope: float, at: Any
) -> Any:
    width = right[0] - left[0]
    t = (at - left[0]) / width
    rest = 1 - t
    # Products only: a power may round otherwise for an array than for a number.
    return (
        left[1] * (1 + 2 * t) * (rest * rest)
        + right[1] * (t * t) * (3 - 2 * t)
        + width * (slope * t * (rest * rest) + next_slope * (t * t) * (t - 1))
    )
