"""A simulated engine for the gate: one GPU, one storage, a queue before each, times from given curves.

The gate is the scheduler's own (scheduler/gate.py). It hears what it hears in vLLM: a report with each step,
and when a load ended. What it does not hear: the curve and the rate that the simulation goes by.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from py_kvcache.curves import Curve
from py_kvcache.models import THRESHOLDS_SCHEMA, Thresholds
from py_kvcache.plan import Pace
from py_kvcache.scheduler.gate import Gate, Hit
from py_kvcache.scheduler.policy import Decision, Mode

CHUNK: Final = 8192  # tokens that the engine computes in a step at most
_REPORT_S: Final = 0.02  # how old a rank's report may be when a request is looked up
_RANK: Final = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, its prompt, and how much of that the cache has."""

    at: float
    prompt_tokens: int
    hit_tokens: int


@dataclass(frozen=True)
class Machine:
    """What the simulation goes by.

    Attributes:
        prefill: seconds to compute a prompt from nothing.
        rates: (from when, bytes per second) of storage, ascending; the first from 0.
        latency_s: of a load, beside its bytes.
    """

    prefill: Curve
    rates: Sequence[tuple[float, float]]
    token_bytes: int
    latency_s: float = 0.004
    block_tokens: int = 256

    def rate(self, at: float) -> float:
        """Of storage at a time."""
        return self.rates[bisect_right(self.rates, (at, float("inf"))) - 1][1]

    def read_until(self, begin: float, nbytes: float) -> float:
        """When a read that begins then has ended, across changes of the rate."""
        at, left = begin, nbytes
        while True:
            nexts = [when for when, _ in self.rates if when > at]
            ends = at + left / self.rate(at)
            if not nexts or ends <= nexts[0]:
                return ends
            left -= (nexts[0] - at) * self.rate(at)
            at = nexts[0]


@dataclass(slots=True)
class _Job:
    number: int
    arrival: Arrival
    done: int = 0  # tokens that are on the GPU


@dataclass(slots=True)
class _Storage:
    """Loads one after the other, and what a rank would report of them at any time."""

    machine: Machine
    free_at: float = 0.0
    reads: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, bytes

    def load(self, now: float, nbytes: float) -> float:
        begin = max(now, self.free_at)
        end = self.machine.read_until(begin, nbytes)
        self.reads.append((begin, end, nbytes))
        self.free_at = end
        return end + self.machine.latency_s

    def pace(self, now: float) -> Pace:
        nbytes = busy = 0.0
        for begin, end, whole in self.reads:
            if begin >= now:
                break
            busy += min(end, now) - begin
            nbytes += whole if end <= now else whole * (now - begin) / (end - begin)
        block = self.machine.token_bytes * self.machine.block_tokens
        return Pace((int(nbytes), busy), (0, 0.0), block)


class Simulation:
    """One run; ``ttft`` afterwards has a time for each arrival, ``decisions`` what the gate said of it.

    Args:
        gate: None loads always (``always`` true) or never.
    """

    def __init__(self, machine: Machine, gate: Gate | None, *, always: bool = True) -> None:
        self._machine, self._gate, self._always = machine, gate, always
        self._storage = _Storage(machine)
        self._steps = 0
        self.decisions: list[Decision | None] = []
        self.ttft: list[float] = []

    def run(self, arrivals: Sequence[Arrival]) -> list[float]:
        """Seconds from arrival to first token, in order of arrival."""
        self.ttft = [0.0] * len(arrivals)
        self.decisions = [None] * len(arrivals)
        coming = deque(enumerate(arrivals))
        loading: list[tuple[float, int, _Job]] = []
        ready: deque[_Job] = deque()
        now = 0.0
        while coming or loading or ready:
            times = [coming[0][1].at] if coming else []
            times += [loading[0][0]] if loading else []
            if not ready and min(times) > now:
                now = min(times)
            while loading and loading[0][0] <= now:
                self._loaded(ready, heappop(loading))
            while coming and coming[0][1].at <= now:
                number, arrival = coming.popleft()
                self._admit(number, arrival, max(now, arrival.at), loading, ready)
            if ready:
                now = self._compute(ready, now)
        return self.ttft

    def _loaded(self, ready: deque[_Job], ended: tuple[float, int, _Job]) -> None:
        when, _, job = ended
        ready.append(job)
        if self._gate is not None:
            self._gate.pace.heard({_RANK: self._storage.pace(when)}, when)
            self._gate.pace.ended(str(job.number), when)

    def _admit(
        self,
        number: int,
        arrival: Arrival,
        now: float,
        loading: list[tuple[float, int, _Job]],
        ready: deque[_Job],
    ) -> None:
        job = _Job(number, arrival)
        if not arrival.hit_tokens or not self._choose(number, arrival, now):
            ready.append(job)
            return
        job.done = arrival.hit_tokens
        nbytes = arrival.hit_tokens * self._machine.token_bytes
        heappush(loading, (self._storage.load(now, nbytes), number, job))

    def _choose(self, number: int, arrival: Arrival, now: float) -> bool:
        gate = self._gate
        if gate is None:
            return self._always
        gate.pace.heard({_RANK: self._storage.pace(max(0.0, now - _REPORT_S))}, now)
        hit = Hit(arrival.prompt_tokens, 0, arrival.hit_tokens)
        decision = self.decisions[number] = gate.judge(hit, None, now)
        gate.counted(decision)
        if decision.load:
            gate.pace.planned(str(number), gate.load_bytes(hit), now)
        return decision.load

    def _compute(self, ready: deque[_Job], now: float) -> float:
        job, prefill = ready[0], self._machine.prefill
        end = min(job.done + CHUNK, job.arrival.prompt_tokens)
        self._steps += 1
        if self._gate is not None:
            self._gate.prefill.step_began(self._steps, [(job.done, end)], now)
        now += prefill(end) - prefill(job.done)
        if self._gate is not None:
            self._gate.prefill.step_ended(self._steps, now)
        job.done = end
        if end == job.arrival.prompt_tokens:
            ready.popleft()
            self.ttft[job.number] = now - job.arrival.at
        return now


def make_gate(machine: Machine, thresholds: Thresholds | None = None) -> Gate:
    """An adaptive one that knows the block's size, as after the first report, and what is calibrated."""
    gate = Gate(Mode.ADAPTIVE, machine.block_tokens, 0, lambda _: thresholds)
    gate.pace.block_bytes = machine.block_tokens * machine.token_bytes
    return gate


def make_arrivals(
    seed: int, *, count: int, every_s: float, lengths: Sequence[int] = (8_000, 20_000, 40_000, 80_000)
) -> list[Arrival]:
    """At random times, ``every_s`` apart on average; three of four find 0.75 of their prompt in the cache."""
    source, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += source.expovariate(1 / every_s)
        prompt = source.choice(lengths)
        hit = prompt * 3 // 4 // 256 * 256 if source.random() < 0.75 else 0
        made.append(Arrival(at, prompt, hit))
    return made


# An H200 with Llama 3.2 3B in fp16 (docs/performance.md): seconds to compute so many tokens.
MEASURED: Final = ((0.0, 0.0), (10_000.0, 0.126), (40_000.0, 0.81), (80_000.0, 2.2))
TOKEN_BYTES: Final = 114_688
FAST, SLOW = 12e9, 1.2e9
WAYS: Final = ("always", "never", "adaptive, calibrated", "adaptive, learning")
_LEFT_OUT: Final = 32  # requests at the begin, in which the learning one learns


@dataclass(frozen=True)
class Replay:
    """The same requests in each way; storage reads ``SLOW`` instead of ``FAST`` from ``drop_at`` on."""

    arrivals: Sequence[Arrival]
    drop_at: float
    ttft: dict[str, list[float]]
    loaded: dict[str, int]

    def records(self) -> list[dict[str, float | str | int]]:
        """A row for each way: mean TTFT in seconds before and after the drop, and of all."""
        half = len(self.arrivals) // 2
        rows: list[dict[str, float | str | int]] = []
        for way, times in self.ttft.items():
            parts = {
                "fast_storage": times[_LEFT_OUT:half],
                "slow_storage": times[half:],
                "whole": times[_LEFT_OUT:],
            }
            means = {f"mean_ttft_s_{name}": sum(part) / len(part) for name, part in parts.items()}
            rows.append({"gate": way, **means, "loaded_requests": self.loaded[way]})
        return rows


def replay(
    seed: int = 1,
    *,
    points: Sequence[tuple[float, float]] = MEASURED,
    token_bytes: int = TOKEN_BYTES,
    count: int = 600,
    every_s: float = 1.5,
) -> Replay:
    """Serve the same requests in each way."""
    arrivals = make_arrivals(seed, count=count, every_s=every_s)
    drop_at = arrivals[count // 2].at
    machine = Machine(Curve.of(points), [(0.0, FAST), (drop_at, SLOW)], token_bytes)
    calibrated = Thresholds.model_validate(
        {"schema": THRESHOLDS_SCHEMA, "engine": "0" * 16, "prefill": tuple(points)}
    )
    gates = {"adaptive, calibrated": calibrated, "adaptive, learning": None}
    ttft, loaded = {}, {}
    for way in WAYS:
        gate = make_gate(machine, gates[way]) if way in gates else None
        simulation = Simulation(machine, gate, always=way == "always")
        ttft[way] = simulation.run(arrivals)
        hits = sum(arrival.hit_tokens > 0 for arrival in arrivals)
        chosen = sum(decision is not None and decision.load for decision in simulation.decisions)
        loaded[way] = chosen if gate is not None else hits if way == "always" else 0
    return Replay(arrivals, drop_at, ttft, loaded)
