"""One set of samples to curves, thresholds and what is to be said about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

import numpy as np

from py_kvcache.calibrate.points import Measured, measure, medians
from py_kvcache.calibrate.rules import (
    Bandwidth,
    Crossing,
    Seconds,
    bandwidth,
    exact_threshold,
    paper_threshold,
    tabulate,
)
from py_kvcache.curves import Curve
from py_kvcache.errors import ConfigError
from py_kvcache.models import Calibration, Sample, SampleSet, Source

SOURCES: Final[tuple[Source, ...]] = get_args(Source)
# A prompt is its prefix and a few tokens, and an answer needs room: no length is quite the model's longest.
_NEARLY: Final = 0.98
_GRID: Final = 32
_FAR_OFF: Final = 0.1


@dataclass(frozen=True)
class Tier:
    """One place from which prefixes are loaded.

    Attributes:
        measured: g, by prefix tokens.
        reason: why nothing can be said; empty if all below is known.
        start: the shortest prefix that was measured; thresholds are not looked for below.
        reach: the longest.
        exact: least prefix worth loading whatever the prompt; None: no prefix is.
        frontier: (prompt tokens, least prefix by the paper's rule, None for none), prompts ascending.
        bandwidth: by measured prefix; empty without times of transfers.
    """

    source: Source
    measured: Measured
    reason: str = ""
    start: int = 0
    reach: int = 0
    exact: int | None = None
    frontier: tuple[tuple[int, int | None], ...] = ()
    bandwidth: tuple[Bandwidth, ...] = ()


@dataclass(frozen=True, slots=True)
class SuffixCheck:
    """Whether a cached prefix spares what the exact rule takes for granted.

    Attributes:
        saved_s: f(prefix + suffix) - h(prefix, suffix), as measured.
        assumed_s: f(prefix).
    """

    prefix: int
    suffix: int
    saved_s: float
    assumed_s: float

    @property
    def error(self) -> float:
        """Relative to what is assumed; positive: more is saved."""
        return (self.saved_s - self.assumed_s) / self.assumed_s


@dataclass(frozen=True)
class Fit:
    """All that follows from one set.

    Attributes:
        longest: prompt that the model takes, in tokens.
        prefill: f.
        checks: against h; empty where it was not measured.
    """

    engine: str
    concurrency: int
    longest: int
    prefill: Measured
    tiers: tuple[Tier, ...]
    checks: tuple[SuffixCheck, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def largest_error(self) -> float | None:
        """Of the checks, by magnitude."""
        return max((check.error for check in self.checks), key=abs, default=None)

    @property
    def never(self) -> int:
        """A prefix longer than any: how "none pays" is written in thresholds.json."""
        reach = self.prefill.curve.reach if self.prefill.curve else 0
        return max(self.longest, int(reach)) + 1


def fit(calibration: Calibration, concurrency: int = 1) -> Fit:
    """Raises ConfigError if that concurrency was not measured, KvCacheError if a load moved nothing."""
    chosen = next((one for one in calibration.sets if one.concurrency == concurrency), None)
    if chosen is None:
        known = ", ".join(str(one.concurrency) for one in calibration.sets) or "none"
        raise ConfigError(f"nothing was measured with {concurrency} requests at a time; there is: {known}")
    samples = chosen.samples
    prefill = measure("computing", ((s.tokens, s.seconds) for s in samples if s.kind == "compute"))
    warnings = [*prefill.notes]
    f_table = tabulate(prefill.curve, int(prefill.curve.reach)) if prefill.curve else np.empty(0)
    tiers = tuple(_fit_tier(calibration, chosen, source, prefill, f_table, warnings) for source in SOURCES)
    checks: tuple[SuffixCheck, ...] = ()
    if prefill.curve is not None:
        if prefill.curve.reach < _NEARLY * calibration.longest:
            warnings.append(
                f"computing was measured up to {prefill.curve.reach:,.0f} tokens, the model takes "
                f"{calibration.longest:,}: beyond, the curve is a straight line"
            )
        checks = _check_suffixes(prefill.curve, samples)
    found = Fit(calibration.engine, concurrency, calibration.longest, prefill, tiers, checks, tuple(warnings))
    error = found.largest_error
    if error is not None and abs(error) > _FAR_OFF:
        told = f"what a cached prefix spares is off f(P) by up to {error:+.0%}; the exact rule rests on f(P)"
        return replace(found, warnings=(*warnings, told))
    return found


def _fit_tier(
    calibration: Calibration,
    chosen: SampleSet,
    source: Source,
    prefill: Measured,
    f_table: Seconds,
    warnings: list[str],
) -> Tier:
    """Adds to ``warnings``."""
    name = f"loading from {source}"
    samples = [s for s in chosen.samples if s.kind == source]
    loaded = measure(name, ((s.prefix, s.seconds) for s in samples))
    warnings.extend(loaded.notes)
    f, g = prefill.curve, loaded.curve
    if f is None or g is None:
        return Tier(source, loaded, loaded.reason or prefill.reason)
    start = math.ceil(max(f.points[0][0], g.points[0][0]))
    reach = int(min(f.reach, g.reach))
    if start > reach:
        return Tier(
            source, loaded, f"{name} and computing were measured at different lengths, with none in common"
        )
    g_table = tabulate(g, len(f_table) - 1)
    crossing = exact_threshold(f_table, g_table, start, reach)
    warnings.extend(_doubts(name, f, g, crossing, calibration.longest))
    frontier = tuple((p, paper_threshold(f_table, g_table, p, start)) for p in _prompts(f, start))
    return Tier(
        source, loaded, "", start, reach, crossing.least, frontier, _bandwidths(calibration, samples, f, g)
    )


def _doubts(name: str, f: Curve, g: Curve, crossing: Crossing, longest: int) -> Iterator[str]:
    reach = int(min(f.reach, g.reach))
    if g.reach < _NEARLY * f.reach:
        yield f"{name} was measured up to {g.reach:,.0f} tokens: beyond, its curve is straight"
    if crossing.least is not None and crossing.turns > 1:
        yield f"{name} and computing cross {crossing.turns} times up to {reach:,} tokens; the last one counts"
    if crossing.least is None and crossing.turns:
        yield (
            f"{name} and computing cross {crossing.turns} times up to {reach:,} tokens, where it "
            "does not pay; so none counts"
        )
    if crossing.least is None and reach < _NEARLY * longest:
        yield f"{name} does not pay up to {reach:,} tokens; longer ones count as not paying, unmeasured"


def _prompts(f: Curve, start: int) -> list[int]:
    """Lengths at which the frontier is told: those measured, and some between in equal ratios."""
    last = int(f.reach)
    between = (round(start * (last / start) ** (n / _GRID)) for n in range(_GRID + 1))
    return sorted({*between, *(int(tokens) for tokens, _ in f.points if tokens >= start)})


def _bandwidths(calibration: Calibration, samples: list[Sample], f: Curve, g: Curve) -> tuple[Bandwidth, ...]:
    copies = medians((s.prefix, s.copy_s) for s in samples if s.copy_s is not None)
    each = calibration.block_bytes * calibration.ranks
    return tuple(
        bandwidth(tokens, tokens // calibration.block_tokens * each, f(tokens), g(tokens), copy.seconds)
        for tokens, copy in sorted(copies.items())
    )


def _check_suffixes(f: Curve, samples: tuple[Sample, ...]) -> tuple[SuffixCheck, ...]:
    found = medians(((s.prefix, s.tokens), s.seconds) for s in samples if s.kind == "suffix")
    return tuple(
        SuffixCheck(prefix, tokens - prefix, f(tokens) - median.seconds, f(prefix))
        for (prefix, tokens), median in sorted(found.items())
        if f(prefix) > 0
    )
