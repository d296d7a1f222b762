"""The reactor's counters as metric samples: what changed since the last report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from py_kvcache import metrics
from py_kvcache.worker.counters import Counters


def totals(counters: Counters) -> dict[tuple[str, metrics.Labels], float]:
    """All counters since the start, by metric and labels."""
    out: dict[tuple[str, metrics.Labels], float] = {
        (metrics.LOAD_BYTES.name, ()): counters.loaded_bytes,
        (metrics.LOAD_BLOCKS.name, ()): counters.loaded_blocks,
        (metrics.LOAD_SECONDS.name, ()): counters.job_seconds.get("load", 0.0),
        (metrics.STORE_BYTES.name, ()): counters.stored_bytes,
        (metrics.STORE_BLOCKS.name, ()): counters.stored_blocks,
        (metrics.STORE_SECONDS.name, ()): counters.job_seconds.get("store", 0.0),
        (metrics.CHECKSUM_FAILURES.name, ()): counters.checksum_failures,
        (metrics.SLOT_LEAKS.name, ()): counters.leaks,
        (metrics.SYSCALL_RETRIES.name, ()): counters.retries,
    }
    for how, count in counters.without_read.items():
        out[metrics.LOADS_WITHOUT_READ.name, (how,)] = count
    failed = {"load": metrics.LOAD_FAILURES.name, "store": metrics.STORE_FAILURES.name}
    for what, count in counters.preloads.items():
        out[metrics.PRELOADS.name, (what,)] = count
    for (kind, _stage, fault, code), count in counters.failures.items():
        if kind not in failed:
            continue  # a preload: counted as cancelled, and whoever wants the block says what is wrong
        key: tuple[str, metrics.Labels] = (failed[kind], (fault, code))
        out[key] = out.get(key, 0) + count
    for (kind, reason), count in counters.dropped.items():
        if kind == "store":
            key = (metrics.STORES_DROPPED.name, (reason,))
        elif kind == "load":
            key = (metrics.LOAD_FAILURES.name, (reason, "none"))
        else:
            continue
        out[key] = out.get(key, 0) + count
    return out


class Reporter:
    """Turns snapshots into samples; one per worker."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, metrics.Labels], float] = {}

    def samples(
        self,
        counters: Counters,
        fallbacks: Mapping[str, Any],
        paused: bool,
        quarantined: int,
        *,
        gauges: bool = True,
    ) -> metrics.Samples:
        """Increments since the last call, and the gauges as they stand."""
        out = metrics.Samples()
        now = totals(counters)
        now[metrics.QUARANTINED.name, ()] = quarantined
        for key, value in now.items():
            if change := value - self._last.get(key, 0):
                out.counters[key] = change
        self._last = now
        if not gauges:
            return out
        for use, count in counters.slots.items():
            out.set(metrics.STAGING_SLOTS, count, use)
        out.set(metrics.IO_IN_FLIGHT, counters.io_in_flight)
        for kind, count in counters.queued.items():
            out.set(metrics.QUEUED_BLOCKS, count, kind)
        for mode in ("threads", "buffered"):
            out.set(metrics.FALLBACK, float(mode in fallbacks), mode)
        out.set(metrics.STORES_PAUSED, float(paused))
        return out
