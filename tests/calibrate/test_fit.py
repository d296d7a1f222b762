"""From samples to what is said: thresholds, unknown sources with their reasons, warnings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from py_kvcache.calibrate.fit import Fit, fit
from py_kvcache.calibrate.summary import record, sentences
from py_kvcache.calibrate.thin import to_thresholds
from py_kvcache.errors import ConfigError, KvCacheError


def tier(found: Fit, source: str) -> Any:
    return next(one for one in found.tiers if one.source == source)


def test_the_threshold_lies_where_the_curves_cross(made: Any):
    found = fit(made.calibration())
    # 2.4e-10 P^2 + (1e-5 - 114688 / 7e9) P - 0.002 = 0
    b = 114_688 / 7e9 - 1e-5
    crossing = (b + math.sqrt(b * b + 4 * 2.4e-10 * 0.002)) / (2 * 2.4e-10)
    assert tier(found, "disk").exact == pytest.approx(crossing, rel=0.02)
    assert tier(found, "memory").exact == 256
    assert found.warnings == ()


def test_by_the_papers_rule_the_share_falls_with_the_prompt(made: Any):
    shares = [
        least / prompt
        for prompt, least in tier(fit(made.calibration()), "disk").frontier
        if least is not None and least > 256
    ]
    assert len(shares) >= 2
    assert shares == sorted(shares, reverse=True)


def test_it_is_said_in_words(made: Any):
    disk, memory = sentences(fit(made.calibration()))
    assert disk.startswith("prefixes above ") and "are worth loading from disk here; below, recompute" in disk
    assert memory == "all prefixes measured, from 256 tokens on, are worth loading from memory here"


def test_a_disk_that_is_too_slow_never_pays(made: Any):
    samples = [*made.samples("compute", made.computing), *made.samples("disk", made.loading(1e9))]
    found = fit(made.calibration(samples))
    assert sentences(found)[0] == "loading from disk never pays up to 32,000 tokens"
    assert sentences(found)[1] == "memory: unknown: loading from memory was not measured"
    thresholds = to_thresholds(found).thresholds
    assert thresholds.exact == {"disk": 32_257}
    assert all(least > prompt for prompt, least in thresholds.thresholds["disk"])
    assert found.warnings == ()
    assert "longer ones count as not paying" in fit(made.calibration(samples, longest=131_072)).warnings[0]


def test_a_curve_that_falls_leaves_its_source_out(made: Any):
    def seconds(tokens: int) -> float:
        return 0.2 if tokens == 4096 else made.loading(7e9)(tokens)

    samples = [
        *made.samples("compute", made.computing),
        *made.samples("disk", seconds),
        *made.samples("memory", made.loading(50e9)),
    ]
    found = fit(made.calibration(samples))
    assert "falls from 0.2 s at 4,096 tokens" in tier(found, "disk").reason
    thresholds = to_thresholds(found).thresholds
    assert set(thresholds.exact) == set(thresholds.thresholds) == {"memory"}


def test_without_a_curve_of_computing_nothing_is_known(made: Any):
    samples = [
        *made.samples("compute", made.computing, lengths=(1024,)),
        *made.samples("disk", made.loading(7e9)),
    ]
    found = fit(made.calibration(samples))
    assert "two lengths" in tier(found, "disk").reason
    thresholds = to_thresholds(found).thresholds
    assert (thresholds.prefill, thresholds.exact, thresholds.thresholds) == ((), {}, {})
    assert record(found)["sources"]["disk"]["pays"] is None


def test_lengths_that_have_none_in_common_are_unknown(made: Any):
    samples = [
        *made.samples("compute", made.computing, lengths=(256, 512)),
        *made.samples("disk", made.loading(7e9), lengths=(8192, 16384)),
    ]
    assert "none in common" in tier(fit(made.calibration(samples)), "disk").reason


def test_of_several_crossings_the_last_counts_and_a_warning_says_so(made: Any):
    slow = {256: 0.5, 1024: 0.9, 4096: 4.5, 8192: 9.0, 16384: 12.0, 32000: 20.0}
    samples = [
        *made.samples("compute", lambda n: n / 1000),
        *made.samples("disk", slow.__getitem__),
    ]
    found = fit(made.calibration(samples))
    assert 8192 < tier(found, "disk").exact < 16384
    assert any("the last one counts" in text for text in found.warnings)


def test_where_loading_does_not_pay_at_the_end_no_crossing_counts(made: Any):
    samples = [*made.samples("compute", lambda n: 0.01 * n**0.5), *made.samples("disk", lambda n: n / 10_000)]
    found = fit(made.calibration(samples))
    assert tier(found, "disk").exact is None
    assert any("none counts" in text for text in found.warnings)


def test_lengths_beyond_the_last_are_warned_of(made: Any):
    warnings = fit(made.calibration(longest=131_072)).warnings
    assert "measured up to 32,000 tokens, the model takes 131,072" in warnings[0]
    samples = [
        *made.samples("compute", made.computing),
        *made.samples("disk", made.loading(7e9), lengths=(256, 8192)),
    ]
    assert any(
        "loading from disk was measured up to 8,192" in w for w in fit(made.calibration(samples)).warnings
    )


def test_bandwidth_needed_and_had_stand_beside_each_other(made: Any):
    rows = {one.tokens: one for one in tier(fit(made.calibration()), "disk").bandwidth}
    assert rows[8192].kv_bytes == 8192 * made.token_bytes
    assert rows[8192].had == pytest.approx(7e9)
    assert rows[8192].needed == pytest.approx(8192 * made.token_bytes / (made.computing(8192) - 0.012))
    assert rows[32000].needed < 7e9 < rows[8192].needed


def test_ranks_load_together(made: Any):
    rows = tier(fit(made.calibration(ranks=4)), "disk").bandwidth
    assert rows[-1].had == pytest.approx(28e9)


def test_a_load_of_less_than_a_block_is_one_clear_error(made: Any):
    samples = [
        *made.samples("compute", made.computing),
        *made.samples("disk", made.loading(7e9), lengths=(8, 1024), copy=lambda n: 1e-3),
    ]
    with pytest.raises(KvCacheError, match="a load of 8 tokens moved 0 bytes"):
        fit(made.calibration(samples))


def suffix(made: Any, factor: float) -> list[dict[str, Any]]:
    seconds = (made.computing(9192) - made.computing(8192)) * factor
    return [{"kind": "suffix", "tokens": 9192, "prefix": 8192, "seconds": seconds}]


def test_what_a_prefix_spares_is_checked_against_the_suffix(made: Any):
    samples = [*made.samples("compute", made.computing), *suffix(made, 1.0)]
    found = fit(made.calibration(samples))
    assert (found.checks[0].prefix, found.checks[0].suffix) == (8192, 1000)
    assert abs(found.largest_error or 1) < 0.01 and found.warnings == ()
    samples[-1]["seconds"] *= 3
    found = fit(made.calibration(samples))
    assert (found.largest_error or 0) < -0.2
    assert "what a cached prefix spares is off f(P)" in found.warnings[-1]


def test_a_concurrency_that_was_not_measured_names_those_that_were(made: Any):
    with pytest.raises(ConfigError, match="there is: 1"):
        fit(made.calibration(), 8)
