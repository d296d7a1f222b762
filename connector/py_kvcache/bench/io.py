"""`py-kvcache bench io`: our data path against fio on one volume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py_kvcache.bench.compare import Setting, compare
from py_kvcache.bench.fio import JOBS, find_fio
from py_kvcache.bench.sidework import checksum_cost, reduced, second_thread_cost
from py_kvcache.bench.workspace import (
    MOST_VALUES,
    Progress,
    Steps,
    check_passes,
    judged,
    machine,
    no_progress,
    workspace,
)
from py_kvcache.errors import ConfigError
from py_kvcache.worker.probe import DirectProbe, probe_direct
from py_kvcache.worker.ring import make_ring

SCHEMA = "py-kvcache.bench.io/1"
MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 28 * MIB)
MOST_BYTES = 1024 * MIB
MOST_DEPTH = 1024

# What the data path is held against. No name here or in the report but read_ and write_ratio may contain
# "ratio": scripts look for that word.
AGAINST_FIO = 0.95
CPU_S_PER_GB = 0.1  # one core for 10 GB/s
SUBMIT_P99_MS = 1.0
SECOND_THREAD_LOSS = 0.10
_LARGE = 28 * MIB


def run(
    root: str,
    *,
    sizes: Sequence[int] = SIZES,
    depth: int = 16,
    rounds: int = 5,
    seconds: float = 1.0,
    ring: str = "auto",
    on_progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measure and return the report, ready for JSON. Takes about 20 * rounds * seconds for each size.

    Args:
        root: folder on the volume; a folder of ours is made in it and removed again.
        sizes: of files in bytes, multiples of 4,096 from 8,192 on.
        seconds: of one pass.
    Raises:
        RootError: root cannot be used or is too full.
        KvCacheError: no fio, or something failed; ConfigError for impossible arguments.
    """
    _check_arguments(sizes, depth, rounds, seconds)
    fio = find_fio()
    need = 4 * JOBS * max(sizes)
    with workspace(root, need) as folder:
        probe = probe_direct(folder)
        name, note = _ring_in_use(ring, folder)
        # Where O_DIRECT is accepted without being direct, the connector does not use it either.
        modes = [True, False] if probe.ok and probe.direct else [False]
        steps = Steps(on_progress, len(sizes) * (len(modes) * (2 * rounds + 1) + 1) + 2)

        def setting(scratch: str, size: int, direct: bool) -> Setting:
            # Where reads are copies by the CPU, fio needs as many processes as we have depth.
            engine = "io_uring" if direct and name == "io_uring" else "psync"
            free = shutil.disk_usage(folder).free
            return Setting(scratch, size, direct, engine, depth, rounds, seconds, ring, free)

        rows = []
        for size in sizes:
            for direct in modes:
                steps.about = f"{size / MIB:g} MiB {'direct' if direct else 'buffered'}: "
                with _scratch(folder) as scratch:
                    rows.append(compare(setting(scratch, size, direct), fio, steps))
        steps.about = ""
        with _scratch(folder) as scratch:
            largest = setting(scratch, max(sizes), modes[0])
            checksum = checksum_cost(reduced(largest, scratch, max(sizes)), steps)
        threads = []
        for size in sizes:
            with _scratch(folder) as scratch:
                threads.append(second_thread_cost(reduced(largest, scratch, size), steps))
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": {**machine(root), "fio": fio.version, "ring": name, "ring_note": note},
        "direct": _direct(probe),
        "passes": {"depth": depth, "rounds": rounds, "seconds": seconds},
        "results": rows,
        "checksum": checksum,
        "second_thread": threads,
    }
    return judged(report, below_target(report))


def _check_arguments(sizes: Sequence[int], depth: int, rounds: int, seconds: float) -> None:
    """Raise ConfigError for what cannot be measured here."""
    if not sizes or any(size % 4096 or size < 8192 for size in sizes):
        raise ConfigError("file sizes must be multiples of 4,096 bytes, 8,192 or more")
    if max(sizes) > MOST_BYTES or len(sizes) > MOST_VALUES:
        raise ConfigError(
            f"file sizes must be {MOST_BYTES // MIB} MiB at most, {MOST_VALUES} of them at most"
        )
    if not 2 <= depth <= MOST_DEPTH:
        raise ConfigError(f"depth must be from 2 to {MOST_DEPTH:,}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if depth * max(sizes) > memory // 2:
        raise ConfigError(
            f"depth times the largest file must be half of this machine's memory at most: {depth} times "
            f"{max(sizes) // MIB} MiB is more than {memory // 2 // MIB:,} MiB"
        )
    check_passes(rounds, seconds)


@contextmanager
def _scratch(folder: str) -> Iterator[str]:
    path = Path(folder, "scratch")
    path.mkdir()
    try:
        yield str(path)
    finally:
        shutil.rmtree(path)


def _ring_in_use(kind: str, folder: str) -> tuple[str, str | None]:
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        ring, note = make_ring(kind, 8, 1, wake, folder)
        ring.shutdown()
        return ring.name, note
    finally:
        os.close(wake)


def _direct(probe: DirectProbe) -> dict[str, Any]:
    return {"accepted": probe.ok, "bypasses_page_cache": probe.direct, "note": probe.reason or None}


def below_target(report: dict[str, Any]) -> list[str]:
    """One sentence for each figure that misses what the data path is held against."""
    found: list[str] = []
    say = found.append
    for row in report["results"]:
        name = _name(row)
        for way in ("read", "write"):
            if row[f"{way}_ratio"] < AGAINST_FIO:
                say(f"{name}: {way} reaches {row[f'{way}_ratio']:.3f} of fio, less than {AGAINST_FIO}")
        # Buffered, the copies of the kernel's workers take every core, so that the clock counts what they
        # took from the submitting thread. Whether a copy runs in a submit itself, its CPU time tells.
        how = "submit_p99_ms" if row["direct"] else "submit_cpu_p99_ms"
        if row[how] > SUBMIT_P99_MS:
            say(f"{name}: a submit takes {row[how]:.2f} ms (p99), not {SUBMIT_P99_MS:g}")
        if row["direct"] and row["file_bytes"] >= _LARGE:
            for way in ("read", "write"):
                cpu = row[f"{way}_cpu_s_per_gb"]
                if cpu > CPU_S_PER_GB:
                    say(f"{name}: {way} takes {cpu:.3f} core-seconds a GB, not {CPU_S_PER_GB}")
    for row in report["second_thread"]:
        # Buffered, the thread also takes a core from the copies; that is no fault of the interpreter's.
        if row["direct"] and row["file_bytes"] >= _LARGE and row["loss"] > SECOND_THREAD_LOSS:
            say(f"{_name(row)}: a second busy thread costs {row['loss']:.0%}, not {SECOND_THREAD_LOSS:.0%}")
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['file_bytes'] / MIB:g} MiB {'direct' if row['direct'] else 'buffered'}"
