"""What the reactor counts. Written by its thread only; read from any through ``copy``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Meter:
    """One kind of operation.

    ``seconds`` sums latencies; ``busy`` is the time in which at least one was in flight, so ``bytes / busy``
    is a transfer rate and ``seconds / count`` a mean latency.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    in_flight: int = 0
    _busy_since: float = 0.0

    def begin(self, now: float) -> None:
        """One more in flight."""
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1

    def end(self, now: float, since: float, nbytes: int) -> None:
        """One ended; ``nbytes`` is 0 if it failed."""
        self.in_flight -= 1
        if not self.in_flight:
            self.busy += now - self._busy_since
        self.count += 1
        self.bytes += nbytes
        self.seconds += now - since

    def copy(self, now: float) -> Meter:
        """An independent copy whose ``busy`` counts up to now."""
        running = now - self._busy_since if self.in_flight else 0.0
        return replace(self, busy=self.busy + running)


@dataclass(slots=True)
class Counters:
    """Counters since the start, then gauges. Blocks unless said otherwise."""

    reads: Meter = field(default_factory=Meter)
    writes: Meter = field(default_factory=Meter)
    copies_in: Meter = field(default_factory=Meter)  # slot to device
    copies_out: Meter = field(default_factory=Meter)
    jobs: dict[str, int] = field(default_factory=dict)  # finished, by kind
    job_seconds: dict[str, float] = field(default_factory=dict)
    loaded_blocks: int = 0
    loaded_bytes: int = 0  # payload
    stored_blocks: int = 0
    stored_bytes: int = 0  # payload, of blocks published by us
    without_read: dict[str, int] = field(
        default_factory=dict
    )  # loads whose file nobody read for them, by how
    preloads: dict[str, int] = field(default_factory=dict)  # blocks by what became of them
    preloads_lost: int = 0  # begun and not brought to an end: given up, or failed
    existed: int = 0  # stores that found another writer's file, before or at the end
    failures: dict[tuple[str, str, str, str], int] = field(default_factory=dict)  # kind, stage, fault, errno
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)  # kind, reason: not tried on purpose
    checksum_failures: int = 0
    retries: int = 0  # operations issued again: short, interrupted, refused as direct
    direct_refused: int = 0
    lost: int = 0  # given up while kernel or helper had them
    strays: int = 0  # completions that nobody waited for
    leaks: int = 0  # idle checks that failed: a defect of ours
    passes: int = 0
    # gauges
    slots: dict[str, int] = field(default_factory=dict)
    io_in_flight: int = 0
    queued: dict[str, int] = field(default_factory=dict)
    jobs_running: int = 0
    lost_now: int = 0
    open_files: int = 0
    direct: bool = False

    def failure(self, kind: str, stage: str, fault: str, errno_name: str) -> None:
        """Count one failed block."""
        key = (kind, stage, fault, errno_name)
        self.failures[key] = self.failures.get(key, 0) + 1

    def drop(self, kind: str, reason: str, blocks: int = 1) -> None:
        """Count blocks that were not tried, or given up, on purpose."""
        key = (kind, reason)
        self.dropped[key] = self.dropped.get(key, 0) + blocks

    def spare(self, how: str) -> None:
        """Count one block that another's read served: an earlier one (memory) or one under way (joined)."""
        self.without_read[how] = self.without_read.get(how, 0) + 1

    def finish(self, kind: str, seconds: float) -> None:
        """Count one finished job."""
        self.jobs[kind] = self.jobs.get(kind, 0) + 1
        self.job_seconds[kind] = self.job_seconds.get(kind, 0.0) + seconds

    def copy(self, now: float) -> Counters:
        """An independent copy; dict.copy() is one step under the GIL, so any thread may call this."""
        return replace(
            self,
            reads=self.reads.copy(now),
            writes=self.writes.copy(now),
            copies_in=self.copies_in.copy(now),
            copies_out=self.copies_out.copy(now),
            jobs=self.jobs.copy(),
            job_seconds=self.job_seconds.copy(),
            failures=self.failures.copy(),
            dropped=self.dropped.copy(),
            without_read=self.without_read.copy(),
        )
