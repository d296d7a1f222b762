"""`bench policy`: what each policy of the memory tier would have to read, and what the gate would load.

No file, no engine: the policies are the worker's own classes, the gate is the scheduler's, in a simulated
engine (gatesim.py). *optimum* is Belady's choice, which sees the whole future; *none* keeps nothing.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from py_kvcache import __version__
from py_kvcache.bench.gatesim import MEASURED, TOKEN_BYTES, Replay, replay
from py_kvcache.errors import KvCacheError
from py_kvcache.worker.retention import Key, Retention, make_retention

SCHEMA: Final = "py-kvcache/bench-policy/1"
POLICIES: Final = ("lru", "arc", "lirs")
_NEVER = 1 << 62
_MEAN_OF: Final = 25  # requests, for a line that can be read


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the blocks of its document, and what the requests queued behind it will use."""

    blocks: Sequence[Key]
    queue: Mapping[Key, int]


Trace = Sequence[Request]


def _document(number: int, blocks: int) -> list[Key]:
    return [f"{number}/{block}" for block in range(blocks)]


def _plain(documents: Iterator[list[Key]]) -> Trace:
    return [Request(blocks, {}) for blocks in documents]


def loop(capacity: int, _: random.Random) -> Trace:
    """Documents in turns, twice what the memory holds in all."""
    count, each = 20, max(1, capacity // 10)
    return _plain(_document(turn % count, each) for turn in range(count * 10))


def queued_loop(capacity: int, _: random.Random) -> Trace:
    """The same, with the next half of the round waiting in the scheduler's queue."""
    count, each = 20, max(1, capacity // 10)
    documents = [_document(number, each) for number in range(count)]
    trace = []
    for turn in range(count * 10):
        waiting = [documents[(turn + 1 + n) % count] for n in range(count // 2)]
        queue = {block: n for n, blocks in enumerate(waiting) for block in blocks}
        trace.append(Request(documents[turn % count], queue))
    return trace


def growing(capacity: int, _: random.Random) -> Trace:
    """Conversations in turns that get one block longer each round; at first they fill the memory."""
    count, each = 10, max(1, capacity // 10)
    return _plain(_document(turn % count, each + turn // count) for turn in range(count * 15))


def scan(capacity: int, generator: random.Random) -> Trace:
    """Documents used again and again (0.6 of the memory), and as many again that nobody asks for twice."""
    hot, each = 6, max(1, capacity // 10)
    return _plain(
        _document(generator.randrange(hot) if turn % 2 else 1000 + turn, each) for turn in range(600)
    )


def skewed(capacity: int, generator: random.Random) -> Trace:
    """Documents of different lengths by Zipf's law with exponent 1; in all ten times the memory."""
    lengths = [generator.randint(1, max(1, capacity // 5)) for _ in range(100)]
    weights = [1 / (rank + 1) for rank in range(len(lengths))]
    chosen = generator.choices(range(len(lengths)), weights, k=1500)
    return _plain(_document(number, lengths[number]) for number in chosen)


TRACES: Final[dict[str, Callable[[int, random.Random], Trace]]] = {
    "loop": loop, "loop, queue in sight": queued_loop, "growing conversations": growing,
    "hot documents and a scan": scan, "skewed": skewed,
}  # fmt: skip


def read_share(policy: Retention | None, trace: Trace) -> float:
    """Of the blocks used in the second half of a trace, the share that had to be read."""
    used = read = 0
    for number, request in enumerate(trace):
        if policy is not None:
            policy.expect(request.queue)
        for block in request.blocks:
            hit = policy is not None and _use(policy, block)
            if number >= len(trace) // 2:
                used, read = used + 1, read + (not hit)
    return read / used


def _use(policy: Retention, block: Key) -> bool:
    if policy.hit(block):
        return True
    if len(policy) >= policy.capacity:
        victim = policy.evict(block)
        if victim in (None, block):
            return False
    policy.admit(block)
    return False


class Optimum:
    """Belady's: gives up what is used again last of all, also the block that comes. For one given trace."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self.capacity = capacity
        uses = [block for request in trace for block in request.blocks]
        last: dict[Key, int] = {}
        self._next_use = [_NEVER] * len(uses)
        for at in range(len(uses) - 1, -1, -1):
            self._next_use[at] = last.get(uses[at], _NEVER)
            last[uses[at]] = at
        self._at = -1
        self._resident: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: object) -> bool:
        return key in self._resident

    def hit(self, key: Key) -> bool:
        """See Retention.hit; every use of the trace must be told in turn."""
        self._at += 1
        if key not in self._resident:
            return False
        self._resident[key] = self._next_use[self._at]
        return True

    def admit(self, key: Key) -> None:
        """See Retention.admit."""
        self._resident[key] = self._next_use[self._at]

    def evict(self, coming: Key | None = None, pinned: Any = ()) -> Key | None:
        """See Retention.evict."""
        last = max(self._resident, key=self._resident.__getitem__)
        if coming is not None and self._next_use[self._at] >= self._resident[last]:
            return coming
        del self._resident[last]
        return last

    def drop(self, key: Key) -> None:
        """See Retention.drop."""
        self._resident.pop(key, None)

    def expect(self, waiting: Mapping[Key, int]) -> None:
        """Knows more."""


def run(
    *,
    capacity: int = 200,
    seed: int = 1,
    prefill: Sequence[tuple[float, float]] = MEASURED,
    token_bytes: int = TOKEN_BYTES,
    picture: str | None = None,
    on_progress: Any = None,
) -> dict[str, Any]:
    """Replay all traces with all policies, and serve a simulated engine with each gate.

    Args:
        capacity: blocks that the memory holds; traces are as large in proportion.
        prefill: points (tokens, seconds) of computing a prompt, of the simulated engine.
        token_bytes: of KV cache, there.
        picture: PNG file to draw, None for none.
    Raises:
        KvCacheError: matplotlib is missing. OSError: the picture cannot be written.
    """
    if capacity < 20:
        raise KvCacheError(f"a memory of {capacity} blocks is too small to tell policies apart; 20 or more")
    results: list[dict[str, Any]] = []
    for number, (name, make) in enumerate(TRACES.items()):
        if on_progress is not None:
            on_progress(number, len(TRACES) + 1, name)
        trace = make(capacity, random.Random(seed))
        shares = {"none": 1.0, "optimum": read_share(Optimum(capacity, trace), trace)}
        shares |= {kind: read_share(make_retention(kind, capacity), trace) for kind in POLICIES}
        results.append({"trace": name, **{f"read_share_{kind}": share for kind, share in shares.items()}})
    means = {kind: sum(row[f"read_share_{kind}"] for row in results) / len(results) for kind in POLICIES}
    if on_progress is not None:
        on_progress(len(TRACES), len(TRACES) + 1, "gate")
    served = replay(seed, points=prefill, token_bytes=token_bytes)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "py_kvcache": __version__,
        "capacity_blocks": capacity,
        "seed": seed,
        "traces": results,
        "mean_read_share": means,
        "best": min(means, key=means.__getitem__),
        "gate": served.records(),
    }
    if picture is not None:
        draw(report, served, picture)
        report["picture"] = os.path.abspath(picture)
    return report


def draw(report: Mapping[str, Any], served: Replay, path: str) -> None:
    """Bars: the share of blocks read, by trace and policy. Lines: TTFT in the simulated engine."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvCacheError("a picture needs matplotlib: pip install 'py-kvcache[bench]'") from error
    kinds = (*POLICIES, "optimum")
    figure = Figure(figsize=(10.0, 8.0), layout="constrained")
    axes, lines = figure.subplots(2)
    for number, kind in enumerate(kinds):
        at = [row + (number - 1.5) * 0.2 for row in range(len(report["traces"]))]
        axes.bar(at, [row[f"read_share_{kind}"] for row in report["traces"]], 0.19, label=kind)
    axes.set_xticks(range(len(report["traces"])), [row["trace"] for row in report["traces"]])
    axes.set_ylabel("share of used blocks that had to be read")
    axes.set_title(f"Memory of {report['capacity_blocks']} blocks, second half of each trace")
    axes.legend()
    times = [arrival.at for arrival in served.arrivals]
    for way, ttft in served.ttft.items():
        lines.plot(times, _running_mean(ttft), label=way)
    lines.axvline(served.drop_at, color="black", linestyle=":", label="storage becomes ten times slower")
    lines.set_yscale("log")
    lines.set_xlabel("seconds")
    lines.set_ylabel(f"TTFT in s, mean of {_MEAN_OF}")
    lines.set_title("A simulated engine: which hits are loaded")
    lines.legend()
    figure.savefig(path, dpi=130)


def _running_mean(values: Sequence[float]) -> list[float]:
    sums = [0.0, *itertools.accumulate(values)]
    starts = [max(0, n - _MEAN_OF) for n in range(1, len(sums))]
    return [(sums[n + 1] - sums[start]) / (n + 1 - start) for n, start in enumerate(starts)]
