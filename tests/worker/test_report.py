"""Counters become increments, once each."""

from __future__ import annotations

from py_kvcache import metrics
from py_kvcache.worker.counters import Counters
from py_kvcache.worker.report import Reporter, totals


def samples(reporter: Reporter, counters: Counters, **given) -> metrics.Samples:
    options = {"fallbacks": {}, "paused": False, "quarantined": 0, **given}
    return reporter.samples(counters, options["fallbacks"], options["paused"], options["quarantined"])


def value(found: metrics.Samples, metric: metrics.Metric, *labels: str) -> float | None:
    return found.counters.get((metric.name, labels))


def test_only_what_changed_since_the_last_report_is_reported():
    reporter, counters = Reporter(), Counters()
    counters.loaded_bytes, counters.loaded_blocks = 100, 2
    first = samples(reporter, counters)
    assert dict(first.counters) == {(metrics.LOAD_BYTES.name, ()): 100, (metrics.LOAD_BLOCKS.name, ()): 2}
    counters.loaded_bytes = 130
    assert dict(samples(reporter, counters).counters) == {(metrics.LOAD_BYTES.name, ()): 30}
    assert dict(samples(reporter, counters).counters) == {}


def test_every_counter_of_the_worker_arrives_under_its_name():
    counters = Counters(
        loaded_blocks=1,
        loaded_bytes=2,
        stored_blocks=3,
        stored_bytes=4,
        checksum_failures=5,
        retries=6,
        leaks=7,
    )
    counters.finish("load", 0.5)
    counters.finish("store", 0.25)
    found = samples(Reporter(), counters, quarantined=8)
    assert {key[0]: amount for key, amount in found.counters.items()} == {
        metrics.LOAD_BLOCKS.name: 1,
        metrics.LOAD_BYTES.name: 2,
        metrics.STORE_BLOCKS.name: 3,
        metrics.STORE_BYTES.name: 4,
        metrics.CHECKSUM_FAILURES.name: 5,
        metrics.SYSCALL_RETRIES.name: 6,
        metrics.SLOT_LEAKS.name: 7,
        metrics.QUARANTINED.name: 8,
        metrics.LOAD_SECONDS.name: 0.5,
        metrics.STORE_SECONDS.name: 0.25,
    }


def test_failures_are_summed_over_stages_and_told_by_direction_fault_and_errno():
    counters = Counters()
    for stage in ("open", "read"):
        counters.failure("load", stage, "io", "EIO")
    counters.failure("load", "read", "wrong_size", "none")
    counters.failure("store", "write", "no_space", "ENOSPC")
    found = samples(Reporter(), counters)
    assert value(found, metrics.LOAD_FAILURES, "io", "EIO") == 2
    assert value(found, metrics.LOAD_FAILURES, "wrong_size", "none") == 1
    assert value(found, metrics.STORE_FAILURES, "no_space", "ENOSPC") == 1


def test_stores_dropped_on_purpose_are_no_failures_and_loads_given_up_are():
    counters = Counters()
    counters.drop("store", "queue_full", 3)
    counters.drop("load", "timeout", 2)
    counters.failure("load", "read", "timeout", "none")
    found = samples(Reporter(), counters)
    assert value(found, metrics.STORES_DROPPED, "queue_full") == 3
    assert value(found, metrics.LOAD_FAILURES, "timeout", "none") == 3
    assert not any(name == metrics.STORE_FAILURES.name for name, _ in found.counters)


def test_all_labels_fit_the_declared_ones():
    counters = Counters(slots={"free": 1}, queued={"load": 1})
    counters.failure("load", "open", "io", "EIO")
    counters.drop("store", "paused")
    counters.drop("load", "cancelled")
    found = samples(Reporter(), counters, fallbacks={"threads": "why"})
    for name, labels in [*found.counters, *found.gauges]:
        assert len(metrics.BY_NAME[name].labels) == len(labels)
    assert {metrics.BY_NAME[name].kind for name, _ in found.counters} == {metrics.Kind.COUNTER}
    assert metrics.Kind.COUNTER not in {metrics.BY_NAME[name].kind for name, _ in found.gauges}


def test_gauges_are_reported_as_they_stand_each_time():
    reporter, counters = (
        Reporter(),
        Counters(slots={"free": 3, "load": 1}, io_in_flight=2, queued={"store": 9}),
    )
    for _ in range(2):
        gauges = samples(reporter, counters, paused=True).gauges
        assert gauges[metrics.STAGING_SLOTS.name, ("free",)] == 3
        assert gauges[metrics.IO_IN_FLIGHT.name, ()] == 2
        assert gauges[metrics.QUEUED_BLOCKS.name, ("store",)] == 9
        assert gauges[metrics.STORES_PAUSED.name, ()] == 1


def test_a_fallback_is_shown_as_long_as_it_is_used():
    reporter = Reporter()
    used = samples(reporter, Counters(), fallbacks={"buffered": "tmpfs"}).gauges
    assert (used[metrics.FALLBACK.name, ("buffered",)], used[metrics.FALLBACK.name, ("threads",)]) == (1, 0)
    assert samples(reporter, Counters()).gauges[metrics.FALLBACK.name, ("buffered",)] == 0


def test_totals_never_shrink_when_counters_grow():
    counters = Counters()
    before = totals(counters)
    counters.failure("load", "open", "io", "EIO")
    after = totals(counters)
    assert all(after[key] >= amount for key, amount in before.items())
