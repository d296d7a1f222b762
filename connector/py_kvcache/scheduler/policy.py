"""Whether to load a hit or to compute it: one decision for the whole prefix, a pure function of its inputs.

A causal model that is spared a prefix of P tokens, of which the GPU has G, saves f(P) - f(G) seconds, with
f(x) the time to compute x tokens from nothing; however long the prompt is, its rest has to attend to the
prefix anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

Prefill = Callable[[float], float]
Table = Sequence[tuple[int, int]]


class Mode(Enum):
    """The setting ``gate``."""

    OFF = "off"
    STATIC = "static"
    ADAPTIVE = "adaptive"


class Reason(Enum):
    """Why a hit is loaded or declined; the value is a metric label."""

    GATE_OFF = "gate_off"
    NO_THRESHOLDS = "no_thresholds"  # loaded: nobody measured that it does not pay
    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    FASTER = "faster"
    SLOWER = "slower"
    UNKNOWN = "unknown"  # adaptive, and no rate or no prefill is known yet
    PROBE = "probe"  # declined ones would never teach the rate


@dataclass(frozen=True, slots=True)
class GateInputs:
    """All that a decision looks at, so that it can be logged and repeated.

    Attributes:
        prompt_tokens, gpu_tokens, hit_tokens: of the prompt; of its prefix that the GPU has; of its prefix
            that GPU and cache have together.
        load_bytes: per rank, of what would be loaded.
        bytes_per_s: rate of the slowest rank from this source; 0 is unknown.
        queued_bytes: what the ranks have already planned to load before.
        latency_s: of a load, beside its bytes.
        prefill: f, in seconds over tokens; None is unknown.
        thresholds: pairs (prompt tokens, least hit) of this source, ascending; None are unknown.
        probe: whether this one may be loaded for the sake of knowing.
    """

    prompt_tokens: int
    gpu_tokens: int
    hit_tokens: int
    load_bytes: int = 0
    bytes_per_s: float = 0.0
    queued_bytes: int = 0
    latency_s: float = 0.0
    prefill: Prefill | None = None
    thresholds: Table | None = None
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, with the numbers it rests on; None where they were not needed or not known."""

    load: bool
    reason: Reason
    load_s: float | None = None
    saved_s: float | None = None
    threshold: int | None = None


def decide(mode: Mode, inputs: GateInputs) -> Decision:
    """All of the hit, or nothing."""
    if mode is Mode.OFF:
        return Decision(True, Reason.GATE_OFF)
    if mode is Mode.STATIC:
        return _by_threshold(inputs)
    return _by_time(inputs)


def _by_threshold(inputs: GateInputs) -> Decision:
    if not inputs.thresholds:
        return Decision(True, Reason.NO_THRESHOLDS)
    least = threshold_for(inputs.thresholds, inputs.prompt_tokens)
    load = inputs.hit_tokens >= least
    reason = Reason.ABOVE_THRESHOLD if load else Reason.BELOW_THRESHOLD
    return Decision(load, reason, threshold=least)


def threshold_for(table: Table, prompt_tokens: int) -> int:
    """Of the nearest measured prompt that is no shorter; beyond the last of that one."""
    place = bisect_right(table, (prompt_tokens - 1, 1 << 62))
    return table[min(place, len(table) - 1)][1]


def _by_time(inputs: GateInputs) -> Decision:
    prefill, rate = inputs.prefill, inputs.bytes_per_s
    saved = None if prefill is None else max(0.0, prefill(inputs.hit_tokens) - prefill(inputs.gpu_tokens))
    takes = (inputs.queued_bytes + inputs.load_bytes) / rate + inputs.latency_s if rate > 0 else None
    if inputs.probe:
        return Decision(True, Reason.PROBE, takes, saved)
    if takes is None or saved is None:
        return Decision(False, Reason.UNKNOWN, takes, saved)
    load = takes < saved
    return Decision(load, Reason.FASTER if load else Reason.SLOWER, takes, saved)
