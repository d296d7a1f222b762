"""Two calibrations side by side: by length how much slower the second is, and where their machines differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from py_kvcache.calibrate.fit import Tier, fit
from py_kvcache.calibrate.points import Measured
from py_kvcache.errors import ConfigError
from py_kvcache.models import Calibration

SCHEMA: Final = "py-kvcache/calibrate-compare/1"


def compare(first: Calibration, second: Calibration) -> dict[str, Any]:
    """Ratios are second / first. Raises ConfigError without a concurrency that both have."""
    common = {one.concurrency for one in first.sets} & {one.concurrency for one in second.sets}
    if not common:
        raise ConfigError("they have no number of requests at a time in common; measure one again")
    concurrency = min(common)
    a, b = fit(first, concurrency), fit(second, concurrency)
    warnings = []
    if first.engine != second.engine:
        warnings.append(
            f"the engines differ ({first.engine}, {second.engine}): model, types, layout, versions, ranks"
        )
    if _blocks(first) != _blocks(second):
        warnings.append("blocks differ in tokens, bytes or ranks")
    pairs = list(zip(a.tiers, b.tiers, strict=True))
    return {
        "schema": SCHEMA,
        "good": True,
        "concurrency": concurrency,
        "engines": [first.engine, second.engine],
        "created": [first.created, second.created],
        "warnings": warnings,
        "compute": _ratios(a.prefill, b.prefill),
        **{tier.source: _ratios(tier.measured, other.measured) for tier, other in pairs},
        "thresholds": [_sides(tier, other) for tier, other in pairs],
        "machine": _differences(first.machine, second.machine),
        "arguments": _differences(first.arguments, second.arguments),
    }


def _blocks(one: Calibration) -> tuple[int, int, int]:
    return one.block_tokens, one.block_bytes, one.ranks


def _ratios(a: Measured, b: Measured) -> list[dict[str, Any]]:
    """At the lengths that either measured and both reach."""
    if a.curve is None or b.curve is None:
        return []
    first = max(a.curve.points[0][0], b.curve.points[0][0])
    last = min(a.curve.reach, b.curve.reach)
    lengths = sorted({point.tokens for point in (*a.points, *b.points) if first <= point.tokens <= last})
    return [
        {"tokens": at, "first_s": a.curve(at), "second_s": b.curve(at), "ratio": b.curve(at) / a.curve(at)}
        for at in lengths
    ]


def _sides(tier: Tier, other: Tier) -> dict[str, Any]:
    return {"source": tier.source, "first": _told(tier), "second": _told(other)}


def _told(tier: Tier) -> int | str:
    if tier.reason:
        return f"unknown: {tier.reason}"
    return f"never up to {tier.reach:,} tokens" if tier.exact is None else tier.exact


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = dict.fromkeys((*first, *second))
    return [
        {"name": name, "first": first.get(name), "second": second.get(name)}
        for name in names
        if first.get(name) != second.get(name)
    ]
