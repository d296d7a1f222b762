"""Samples to medians with intervals, and these to a curve that never falls, or to why there is none."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from py_kvcache.curves import Curve

CONFIDENCE: Final = 0.95
# A fall of so little may be pooled whatever the intervals say: of three repeats they are too narrow often.
_SLIGHT: Final = 0.05
# Fewer repeats than that (a budget ends in the midst of a length) say nothing of how they vary.
_ENOUGH: Final = 3

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Median:
    """Of ``count`` values in seconds, with an interval that holds the true one.

    The interval is that of order statistics, 95 % or more from six values on; of fewer it is from the least
    to the most.
    """

    seconds: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Point:
    """Median at a length in tokens."""

    tokens: int
    median: Median


@dataclass(frozen=True)
class Measured:
    """What one curve rests on.

    Attributes:
        points: as measured, tokens ascending.
        curve: through them, pooled where they fall a little; None is unknown.
        reason: why there is no curve, in words.
        notes: what was pooled.
    """

    points: tuple[Point, ...] = ()
    curve: Curve | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()


def median_of(values: Sequence[float]) -> Median:
    """Of one value or more."""
    ordered, count = sorted(values), len(values)
    cut, below = 0, 0.5**count  # below: that at most `cut` values lie under the true median
    while below <= (1 - CONFIDENCE) / 2:
        cut += 1
        below += math.comb(count, cut) * 0.5**count
    cut = max(0, cut - 1)
    return Median(statistics.median(ordered), ordered[cut], ordered[count - 1 - cut], count)


def medians(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, Median]:
    """By key."""
    values: dict[_Key, list[float]] = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return {key: median_of(some) for key, some in values.items()}


def measure(name: str, pairs: Iterable[tuple[int, float]]) -> Measured:
    """A curve from (tokens, seconds), many a length.

    Args:
        name: of what was measured, for sentences.
    """
    points = tuple(Point(tokens, median) for tokens, median in sorted(medians(pairs).items()))
    if not points:
        return Measured(reason=f"{name} was not measured")
    if len(points) < 2:
        return Measured(
            points, reason=f"{name} was measured at {points[0].tokens:,} tokens only; two lengths are needed"
        )
    fall = _find_fall(points)
    if fall is not None:
        before, after = fall
        return Measured(
            points,
            reason=f"{name} falls from {before.median.seconds:.4g} s at {before.tokens:,} tokens to "
            f"{after.median.seconds:.4g} s at {after.tokens:,}, more than noise explains; measure again on a "
            "quiet machine",
        )
    pooled = pool([point.median.seconds for point in points], [point.median.count for point in points])
    changed = [f"{p.tokens:,}" for p, value in zip(points, pooled, strict=True) if value != p.median.seconds]
    notes = (
        (f"{name}: medians that fell a little were pooled, at {', '.join(changed)} tokens",)
        if changed
        else ()
    )
    curve = Curve(tuple((float(p.tokens), value) for p, value in zip(points, pooled, strict=True)))
    return Measured(points, curve, notes=notes)


def _find_fall(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """Two points of which the later one is lower than both intervals allow."""
    spreads = [
        (median.high - median.low) / median.seconds
        for median in (point.median for point in points)
        if median.count >= _ENOUGH and median.seconds > 0
    ]
    unknown = statistics.median(spreads) if spreads else 0.0

    def low(median: Median) -> float:
        return median.low if median.count >= _ENOUGH else median.low * (1 - unknown)

    def high(median: Median) -> float:
        return median.high if median.count >= _ENOUGH else median.high * (1 + unknown)

    for number, after in enumerate(points):
        for before in points[:number]:
            is_apart = high(after.median) < low(before.median)
            if is_apart and after.median.seconds < (1 - _SLIGHT) * before.median.seconds:
                return before, after
    return None


def pool(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values (weighted least squares) that never fall: pool adjacent violators."""
    groups: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        group = (value, weight, 1)
        while groups and groups[-1][0] > group[0]:
            mean, mass, members = groups.pop()
            total = mass + group[1]
            group = (mean + (group[0] - mean) * group[1] / total, total, members + group[2])
        groups.append(group)
    return [mean for mean, _, members in groups for _ in range(members)]
