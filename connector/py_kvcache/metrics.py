"""Every metric of the connector: name, kind, help and labels. Nothing else names a metric.

vLLM adds the labels ``model_name`` and ``engine`` and, to counters, the suffix ``_total``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

PREFIX = "vllm:py_kvcache_"


class Kind(Enum):
    """How values of several ranks and steps are joined."""

    COUNTER = "counter"  # summed
    GAUGE = "gauge"  # latest; summed over ranks
    FLAG = "flag"  # gauge 0/1; the largest over ranks


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``labels`` are our own, bounded ones (never a hash, path or request)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, Kind.COUNTER, text, labels)


LOOKUPS = _counter(
    "lookups", "Requests looked up, by result (hit, partial, miss, declined, timeout, opt_out).", "result"
)
GATE = _counter(
    "gate", "Hits by what the break-even gate decided (load, decline) and why.", "decision", "reason"
)
HIT_TOKENS = _counter("hit_tokens", "Prompt tokens loaded instead of computed, by tier.", "tier")
MISSED_TOKENS = _counter("missed_tokens", "Prompt tokens that neither the engine nor the cache had.")
LOAD_BYTES = _counter("load_bytes", "Bytes loaded into the KV cache, from files or from memory.")
LOAD_BLOCKS = _counter("load_blocks", "Storage blocks loaded.")
LOADS_WITHOUT_READ = _counter(
    "loads_without_read",
    "Storage blocks loaded without a read of their own, by how (memory: there already, kept or preloaded; "
    "joined: one read served several requests).",
    "how",
)
PRELOADS = _counter(
    "preloads",
    "Storage blocks read for waiting requests, by what became of them (claimed by a load, wasted: nobody "
    "wanted them after all, cancelled: the read was given up or failed).",
    "result",
)
LOAD_SECONDS = _counter("load_seconds", "Seconds from submission to completion, summed over load jobs.")
STORE_BYTES = _counter("store_bytes", "Bytes copied from the device and published as files.")
STORE_BLOCKS = _counter("store_blocks", "Storage blocks published.")
STORE_SECONDS = _counter("store_seconds", "Seconds from submission to completion, summed over store jobs.")
LOAD_FAILURES = _counter(
    "load_failures", "Storage blocks that failed to load, by fault and errno.", "fault", "errno"
)
STORE_FAILURES = _counter(
    "store_failures", "Storage blocks that failed to store, by fault and errno.", "fault", "errno"
)
CHECKSUM_FAILURES = _counter("checksum_failures", "Blocks whose bytes did not match their digest.")
RECOMPUTED_BLOCKS = _counter("recomputed_blocks", "Storage blocks computed again because their load failed.")
STORES_DROPPED = _counter("stores_dropped", "Storage blocks not stored on purpose, by reason.", "reason")
QUARANTINED = _counter("quarantined_files", "Files removed because their bytes were proved wrong.")
SLOT_LEAKS = _counter(
    "slot_leaks", "Times an idle worker found slots or descriptors missing (a defect of ours)."
)
SYSCALL_RETRIES = _counter(
    "io_retries", "Reads and writes issued again (short, interrupted or refused as direct)."
)
PROBE_ERRORS = _counter(
    "probe_errors", "Look-ups that the file system answered with an error, by errno.", "errno"
)

STAGING_SLOTS = Metric(
    PREFIX + "staging_slots",
    Kind.GAUGE,
    "Staging slots by use (free, load, store, kept: by the memory tier, stuck: given up but still owned by "
    "the kernel or a helper).",
    ("use",),
)
IO_IN_FLIGHT = Metric(PREFIX + "io_in_flight", Kind.GAUGE, "Reads and writes in flight.")
QUEUED_BLOCKS = Metric(
    PREFIX + "queued_blocks", Kind.GAUGE, "Storage blocks waiting, by direction.", ("direction",)
)
FALLBACK = Metric(
    PREFIX + "fallback", Kind.FLAG, "1 while a slower way is used (threads, buffered).", ("mode",)
)
STORES_PAUSED = Metric(
    PREFIX + "stores_paused",
    Kind.FLAG,
    "1 while stores are paused (volume full or read-only, daily budget spent).",
)
DISABLED = Metric(
    PREFIX + "disabled",
    Kind.FLAG,
    "1 if the connector serves without a cache (unsupported model or setting).",
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

Labels = tuple[str, ...]


@dataclass
class Samples:
    """Increments of counters and states of gauges since the last report; picklable, mergeable."""

    counters: dict[tuple[str, Labels], float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Increase a counter."""
        self.counters[metric.name, labels] += amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.gauges[metric.name, labels] = value

    def merge_step(self, later: Samples) -> None:
        """Join a later report of the same process."""
        for key, amount in later.counters.items():
            self.counters[key] = self.counters.get(key, 0) + amount
        self.gauges.update(later.gauges)

    def merge_rank(self, other: Samples) -> None:
        """Join another rank's report of the same step."""
        for key, amount in other.counters.items():
            self.counters[key] = self.counters.get(key, 0) + amount
        for key, value in other.gauges.items():
            mine = self.gauges.get(key, 0)
            self.gauges[key] = max(mine, value) if BY_NAME[key[0]].kind is Kind.FLAG else mine + value

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not self.counters and not self.gauges


BY_NAME: dict[str, Metric] = {metric.name: metric for metric in ALL}
