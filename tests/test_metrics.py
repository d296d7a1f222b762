"""Names and arithmetic of metrics, without vLLM."""

from __future__ import annotations

import pickle
import re

from hypothesis import given
from hypothesis import strategies as st

from py_kvcache import metrics
from py_kvcache.metrics import ALL, BY_NAME, Kind, Samples


def test_names_are_unique_prefixed_and_fit_for_prometheus():
    assert len(BY_NAME) == len(ALL) > 20
    for metric in ALL:
        assert re.fullmatch(r"vllm:py_kvcache_[a-z][a-z0-9_]*[a-z]", metric.name)
        # vLLM's counter gets the suffix _total from the Prometheus client
        assert not metric.name.endswith("_total")
        assert metric.help.endswith(".")


def test_labels_are_bounded_words_and_never_vllms_own():
    for metric in ALL:
        assert set(metric.labels) <= {
            "result",
            "tier",
            "fault",
            "errno",
            "reason",
            "use",
            "direction",
            "mode",
            "how",
            "decision",
        }
        assert not {"model_name", "engine"} & set(metric.labels)


def test_steps_add_counters_and_replace_gauges():
    first, later = Samples(), Samples()
    first.add(metrics.LOAD_BYTES, 5)
    first.set(metrics.IO_IN_FLIGHT, 9)
    later.add(metrics.LOAD_BYTES, 2)
    later.add(metrics.LOOKUPS, 1, "hit")
    later.set(metrics.IO_IN_FLIGHT, 1)
    first.merge_step(later)
    assert first.counters == {(metrics.LOAD_BYTES.name, ()): 7, (metrics.LOOKUPS.name, ("hit",)): 1}
    assert first.gauges == {(metrics.IO_IN_FLIGHT.name, ()): 1}


def test_ranks_add_counters_and_gauges_but_a_flag_is_the_largest():
    mine, other = Samples(), Samples()
    for samples, flag in ((mine, 1), (other, 0)):
        samples.add(metrics.LOAD_BYTES, 3)
        samples.set(metrics.STAGING_SLOTS, 4, "free")
        samples.set(metrics.STORES_PAUSED, flag)
        samples.set(metrics.FALLBACK, 1, "threads")
    mine.merge_rank(other)
    assert mine.counters[metrics.LOAD_BYTES.name, ()] == 6
    assert mine.gauges == {
        (metrics.STAGING_SLOTS.name, ("free",)): 8,
        (metrics.STORES_PAUSED.name, ()): 1,
        (metrics.FALLBACK.name, ("threads",)): 1,
    }


def test_a_gauge_that_only_the_other_rank_reports_is_taken_over():
    mine, other = Samples(), Samples()
    other.set(metrics.IO_IN_FLIGHT, 2)
    other.set(metrics.DISABLED, 1)
    mine.merge_rank(other)
    assert sorted(mine.gauges.values()) == [1, 2]


def test_samples_are_empty_until_something_was_counted_even_if_it_is_zero():
    samples = Samples()
    assert samples.is_empty()
    samples.add(metrics.LOAD_BYTES, 0)
    assert not samples.is_empty()


def test_samples_survive_pickling():
    samples = Samples()
    samples.add(metrics.LOAD_FAILURES, 2, "io", "EIO")
    samples.set(metrics.DISABLED, 1)
    copy = pickle.loads(pickle.dumps(samples))
    assert copy == samples
    copy.add(metrics.LOAD_BYTES, 1)
    assert copy.counters[metrics.LOAD_BYTES.name, ()] == 1


AMOUNTS = st.dictionaries(
    st.sampled_from([m.name for m in ALL if m.kind is Kind.COUNTER]), st.integers(0, 2**40)
)


@given(st.lists(AMOUNTS, max_size=5))
def test_the_order_of_ranks_changes_no_counter(ranks: list[dict[str, int]]):
    def joined(order: list[dict[str, int]]) -> dict[tuple[str, metrics.Labels], float]:
        total = Samples()
        for rank in order:
            report = Samples()
            for name, amount in rank.items():
                report.add(BY_NAME[name], amount)
            total.merge_rank(report)
        return dict(total.counters)

    assert joined(ranks) == joined(ranks[::-1])
