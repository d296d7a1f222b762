"""A fit to thresholds.json: fewer knots, until they fit into what a ConfigMap of a hundred nodes can hold."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from py_kvcache.calibrate.fit import Fit
from py_kvcache.curves import Curve
from py_kvcache.models import THRESHOLDS_SCHEMA, Source, Thresholds

MOST_BYTES: Final = 1024
# Knots of f and of a table, from the most on.
_SIZES: Final = ((12, 8), (11, 7), (10, 6), (9, 6), (8, 5), (7, 5), (6, 4), (5, 4), (4, 3), (3, 2), (2, 1))
_ENOUGH: Final = 9  # so many of these sizes are tried before a set under load is left out
_CACHED: Final = 256  # of what is asked again for each number of sets that may fit
_PLACES: Final = 256  # at which a thinned curve is compared

Table = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Compact:
    """thresholds.json, and what it cost to make it small.

    Attributes:
        text: one line of JSON, less than 1,024 bytes.
        prefill_error: largest relative error of f between its first and last knot.
        table_errors: by source, the largest relative error of a least prefix on the fit's grid.
        left_out: concurrencies that found no room.
    """

    thresholds: Thresholds
    text: str
    prefill_error: float
    table_errors: Mapping[Source, float]
    left_out: tuple[int, ...] = ()


def to_thresholds(found: Fit, others: Sequence[Fit] = (), made: Mapping[str, str] | None = None) -> Compact:
    """At most 12 knots of f and 8 of each table, fewer if need be; then fewer of the other sets."""
    for kept, sizes, notes in _attempts(len(others), made):
        content: dict[str, Any] = {
            "schema": THRESHOLDS_SCHEMA,
            "engine": found.engine,
            **_one_set(found, *sizes),
            "under_load": [
                {"concurrency": other.concurrency, **_one_set(other, *sizes)} for other in others[:kept]
            ],
            "made": notes,
        }
        text = json.dumps({key: value for key, value in content.items() if value}, separators=(",", ":"))
        if len(text.encode()) < MOST_BYTES:  # a line's end follows
            return _compact(found, text, content, tuple(other.concurrency for other in others[kept:]))
    raise AssertionError("two knots and one entry for each source need less than 1,024 bytes")


def _attempts(
    others: int, made: Mapping[str, str] | None
) -> Iterator[tuple[int, tuple[int, int], dict[str, str]]]:
    """Sets under load, numbers of knots and notes, from the most on."""
    for kept in range(others, -1, -1):
        for sizes in _SIZES[:_ENOUGH] if kept else _SIZES:
            for notes in (made or {}, {}):
                yield kept, sizes, dict(notes)


def _compact(found: Fit, text: str, content: Mapping[str, Any], left_out: tuple[int, ...]) -> Compact:
    thresholds = Thresholds.model_validate(content)
    thin = thresholds.curve()
    error = curve_error(found.prefill.curve, thin) if found.prefill.curve and thin else 0.0
    tables = {tier.source: _full_table(found, tier.frontier) for tier in found.tiers if not tier.reason}
    errors = {source: table_error(table, thresholds.thresholds[source]) for source, table in tables.items()}
    return Compact(thresholds, text, error, errors, left_out)


def _one_set(found: Fit, f_knots: int, table_knots: int) -> dict[str, Any]:
    known = [tier for tier in found.tiers if not tier.reason]
    content: dict[str, Any] = {} if found.concurrency == 1 else {"concurrency": found.concurrency}
    if known:
        content["exact"] = {tier.source: found.never if tier.exact is None else tier.exact for tier in known}
        content["thresholds"] = {
            tier.source: thin_table(_full_table(found, tier.frontier), table_knots) for tier in known
        }
    if found.prefill.curve is not None:
        content["prefill"] = thin_curve(found.prefill.curve, f_knots)
    return content


def _full_table(found: Fit, frontier: Sequence[tuple[int, int | None]]) -> Table:
    return tuple((prompt, found.never if least is None else least) for prompt, least in frontier)


@lru_cache(maxsize=_CACHED)
def thin_curve(curve: Curve, most: int) -> tuple[tuple[int, float], ...]:
    """Its ends and then, one by one, the knot that is farthest off; seconds with 4 digits."""
    knots = [(int(tokens), float(f"{seconds:.4g}")) for tokens, seconds in curve.points]
    chosen = [0, len(knots) - 1]
    while len(chosen) < min(most, len(knots)):
        thin = Curve.of(knots[n] for n in chosen)
        rest = [n for n in range(len(knots)) if n not in chosen]
        chosen = sorted([*chosen, max(rest, key=lambda n: _relative(thin(knots[n][0]), knots[n][1]))])
    return tuple(knots[n] for n in chosen)


def curve_error(curve: Curve, thin: Curve) -> float:
    """Largest relative difference between the first and the last knot."""
    first, width = curve.points[0][0], curve.reach - curve.points[0][0]
    places = [first + width * n / _PLACES for n in range(_PLACES + 1)]
    return max(_relative(thin(at), curve(at)) for at in (*places, *(tokens for tokens, _ in curve.points)))


@lru_cache(maxsize=_CACHED)
def thin_table(table: Table, most: int) -> Table:
    """The entries, so many at most, whose look-ups have the least largest relative error over the table.

    An entry answers for its prompt and the shorter ones down to the entry before; the last is always there.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {-1: (0.0, ())}  # by the last entry chosen
    answers = [best[-1]]
    for _ in range(min(most, len(table))):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for last in range(len(table)):
            error = 0.0
            for before in range(last - 1, -2, -1):
                if before in best:
                    whole = max(error, best[before][0])
                    if last not in after or whole < after[last][0]:
                        after[last] = whole, (*best[before][1], last)
                error = max(error, _relative(table[last][1], table[before][1]))
        best = after
        if len(table) - 1 in best:
            answers.append(best[len(table) - 1])
    # The first of equally good ones is the shortest.
    _, chosen = min(answers[1:], key=lambda answer: answer[0])
    return tuple(table[n] for n in chosen)


def table_error(table: Table, thin: Sequence[tuple[int, int]]) -> float:
    """Largest relative difference over the table's prompts."""
    return max(_relative(_look_up(thin, prompt), least) for prompt, least in table)


def _look_up(table: Sequence[tuple[int, int]], prompt: int) -> int:
    """As policy.threshold_for has it."""
    return table[min(bisect_left(table, (prompt, -1)), len(table) - 1)][1]


def _relative(value: float, true: float) -> float:
    return abs(value - true) / true if true else abs(value - true)
