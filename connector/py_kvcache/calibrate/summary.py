"""A fit and thresholds in sentences, and as records for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from py_kvcache.calibrate.fit import SOURCES, Fit, Tier
from py_kvcache.calibrate.thin import Compact
from py_kvcache.models import Source, Thresholds, UnderLoad


def sentences(found: Fit) -> list[str]:
    """One for each source."""
    return [_sentence(tier) for tier in found.tiers]


def _sentence(tier: Tier) -> str:
    if tier.reason:
        return f"{tier.source}: unknown: {tier.reason}"
    return _verdict(tier.source, tier.exact, tier.start, tier.reach)


def _verdict(source: Source, exact: int | None, start: int, reach: int) -> str:
    if exact is None:
        return f"loading from {source} never pays up to {reach:,} tokens"
    if exact <= start:
        return f"all prefixes measured, from {start:,} tokens on, are worth loading from {source} here"
    return f"prefixes above {exact:,} tokens are worth loading from {source} here; below, recompute"


def thresholds_sentences(thresholds: Thresholds) -> list[str]:
    """The same of what a file says, for each of its sets."""
    lines = []
    sets: tuple[Thresholds | UnderLoad, ...] = (thresholds, *thresholds.under_load)
    for one in sets:
        reach = int(one.prefill[-1][0]) if one.prefill else 0
        load = f" ({one.concurrency} requests at a time)" if one.concurrency > 1 else ""
        for source in SOURCES:
            if source not in one.exact:
                lines.append(f"{source}: unknown: it is not in this file; the adaptive gate decides{load}")
                continue
            exact = one.exact[source]
            lines.append(_verdict(source, exact if exact <= reach else None, 0, reach) + load)
    return lines


def thinning_sentences(compact: Compact) -> list[str]:
    """What making it small has cost."""
    size, off = len(compact.text.encode()), compact.prefill_error
    lines = [f"thresholds.json has {size} bytes; its f is off by {off:.1%} at most"]
    for source, error in compact.table_errors.items():
        lines.append(f"its frontier for {source} is off by {error:.1%} at most")
    if compact.left_out:
        levels = ", ".join(str(level) for level in compact.left_out)
        lines.append(f"no room was left for the sets of {levels} requests at a time")
    return lines


def record(found: Fit) -> dict[str, Any]:
    """All figures; None is unknown or none."""
    return {
        "concurrency": found.concurrency,
        "summary": sentences(found),
        "warnings": list(found.warnings),
        "compute": _points(found.prefill.points),
        "sources": {tier.source: _tier(tier) for tier in found.tiers},
        "suffix_checks": [{**asdict(check), "error": check.error} for check in found.checks],
        "largest_suffix_error": found.largest_error,
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {
        "known": not tier.reason,
        "unknown_because": tier.reason or None,
        "pays": None if tier.reason else tier.exact is not None,
        "exact": tier.exact,
        "frontier": [{"prompt": prompt, "least": least} for prompt, least in tier.frontier],
        "points": _points(tier.measured.points),
        "bandwidth": [asdict(one) for one in tier.bandwidth],
    }


def _points(points: Any) -> list[dict[str, Any]]:
    return [{"tokens": point.tokens, **asdict(point.median)} for point in points]
