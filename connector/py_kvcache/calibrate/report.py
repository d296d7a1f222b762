"""The report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from py_kvcache import __version__
from py_kvcache.calibrate.fit import Fit, Tier
from py_kvcache.calibrate.points import Point
from py_kvcache.calibrate.rules import Bandwidth
from py_kvcache.calibrate.summary import sentences, thinning_sentences
from py_kvcache.calibrate.thin import Compact
from py_kvcache.models import Calibration

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.2em .7em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}.warn{color:#a40000}"
    "pre{background:#f4f4f4;padding:.7em;overflow:auto}"
)


def page(
    calibration: Calibration,
    found: Fit,
    others: Sequence[Fit],
    compact: Compact,
    pictures: Mapping[str, bytes],
    notes: Sequence[str] = (),
) -> str:
    """All that is known, as HTML.

    Args:
        others: what was found for other numbers of requests at a time; only their verdicts are told.
        pictures: PNG files by name.
        notes: what could not be drawn.
    """
    title = f"Break-even of engine {found.engine}"
    warnings = [*found.warnings, *(f"skipped: {text}" for text in calibration.skipped), *notes]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _list(sentences(found)),
        _origin(calibration, found),
        *(_under_load(other) for other in others),
        f"<h2>Warnings</h2>{_list(warnings, 'warn')}" if warnings else "",
        *(_picture(name, content) for name, content in pictures.items()),
        "<h2>Times to first token</h2>",
        _points("computed", found.prefill.points),
        *(_points(f"loaded from {tier.source}", tier.measured.points) for tier in found.tiers),
        *(_tier(tier) for tier in found.tiers if not tier.reason),
        _checks(found),
        "<h2>thresholds.json</h2>",
        _list(thinning_sentences(compact)),
        f"<pre>{escape(compact.text)}</pre>",
        "<h2>Machine</h2>",
        _facts(calibration.machine),
        "<h2>Engine's arguments</h2>",
        _facts(calibration.arguments),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _origin(calibration: Calibration, found: Fit) -> str:
    return (
        f"<p>Measured {escape(calibration.created)} with {found.concurrency} requests at a time; "
        f"py-kvcache {escape(__version__)}.</p>"
    )


def _under_load(other: Fit) -> str:
    lines = [*sentences(other), *other.warnings]
    return f"<h3>With {other.concurrency} requests at a time</h3>{_list(lines)}"


def _list(texts: Iterable[str], kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<ul{mark}>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _picture(name: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return f'<p><img alt="{escape(name)}" src="data:image/png;base64,{data}"></p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _points(name: str, points: Sequence[Point]) -> str:
    rows = []
    for point in points:
        median = point.median
        interval = f"{median.low:.4g} to {median.high:.4g}"
        rows.append((f"{point.tokens:,}", f"{median.seconds:.4g}", interval, str(median.count)))
    return _table((f"tokens {name}", "median s", "interval", "samples"), rows) if rows else ""


def _tier(tier: Tier) -> str:
    least = "none" if tier.exact is None else f"{tier.exact:,} tokens"
    parts = [
        f"<h2>From {tier.source}</h2><p>Exact rule, g(P) &lt; f(P): least prefix {least}.</p>",
        "<p>The paper's rule, g(P) + f(D-P) &lt; f(D):</p>",
        _table(("prompt tokens", "least prefix", "share"), (_frontier(*entry) for entry in tier.frontier)),
    ]
    if tier.bandwidth:
        head = ("prefix tokens", "KV bytes", "needed GB/s", "had GB/s")
        parts.append("<p>Storage bandwidth to break even:</p>")
        parts.append(_table(head, (_bandwidth(one) for one in tier.bandwidth)))
    return "".join(parts)


def _frontier(prompt: int, least: int | None) -> tuple[str, str, str]:
    if least is None:
        return f"{prompt:,}", "none", ""
    return f"{prompt:,}", f"{least:,}", f"{least / prompt:.1%}"


def _bandwidth(one: Bandwidth) -> tuple[str, str, str, str]:
    needed = "no rate would do" if one.needed is None else f"{one.needed / 1e9:.4g}"
    return f"{one.tokens:,}", f"{one.kv_bytes:,}", needed, f"{one.had / 1e9:.4g}"


def _checks(found: Fit) -> str:
    rows = [
        (f"{c.prefix:,}", f"{c.suffix:,}", f"{c.saved_s:.4g}", f"{c.assumed_s:.4g}", f"{c.error:+.1%}")
        for c in found.checks
    ]
    head = ("prefix", "suffix", "f(P+S) - h(P,S), s", "f(P), s", "error")
    return f"<h2>What a cached prefix spares</h2>{_table(head, rows)}" if rows else ""


def _facts(facts: Mapping[str, Any]) -> str:
    return (
        _table(("", ""), ((str(key), _text(value)) for key, value in facts.items())) if facts else "<p>-</p>"
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
