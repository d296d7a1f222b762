"""One row of `bench io`: our passes and fio's over the same files, in turns within the same minutes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py_kvcache.bench.engine import Block, Engine, Pass
from py_kvcache.bench.fio import JOBS, Fio, FioPass, run_fio
from py_kvcache.bench.workspace import flush, remove_tree

READ_SET_BYTES = 1 << 30
WRITE_BYTES = 2 << 30  # of one pass at most
TRIAL_BYTES = 256 << 20  # of the pass that tells how many make a full one
MOST_FILES = 2048


@dataclass(frozen=True)
class Setting:
    """What a row is about; ``scratch`` is a folder for it, ``free`` the bytes it may use."""

    scratch: str
    size: int
    direct: bool
    engine: str  # fio's
    depth: int
    rounds: int
    seconds: float
    ring: str
    free: int

    def count(self, wanted: int) -> int:
        """Files that come to about that many bytes, a multiple of fio's jobs, in a quarter of the space."""
        files = min(wanted, self.free // 4) // self.size
        return max(JOBS, min(files, MOST_FILES) // JOBS * JOBS)


@dataclass
class Side:
    """Passes of one direction, in order; bytes per second of fio, ours whole."""

    ours: list[Pass] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    def alternate(self, number: int, ours: Callable[[], Pass], fio: Callable[[], float]) -> None:
        """One round, each once; they take turns to begin, since the second finds a busier device."""
        if number % 2:
            self.fio.append(fio())
            self.ours.append(ours())
        else:
            self.ours.append(ours())
            self.fio.append(fio())

    @property
    def against_fio(self) -> float:
        """Median over the rounds of ours by fio's."""
        return statistics.median(mine.rate / theirs for mine, theirs in zip(self.ours, self.fio, strict=True))

    def figures(self, name: str) -> dict[str, Any]:
        """For the report."""
        total = sum(mine.bytes for mine in self.ours)
        cpu = sum(mine.cpu_s for mine in self.ours) / total * 1e9
        return {
            f"{name}_ratio": figure(self.against_fio),
            f"{name}_gb_s": figure(statistics.median(mine.rate for mine in self.ours) / 1e9),
            f"{name}_fio_gb_s": figure(statistics.median(self.fio) / 1e9),
            f"{name}_cpu_s_per_gb": figure(cpu),
            f"{name}_rounds": [
                [figure(m.rate / 1e9), figure(t / 1e9)] for m, t in zip(self.ours, self.fio, strict=True)
            ],
        }


def compare(setting: Setting, fio: Fio, step: Callable[[str], None]) -> dict[str, Any]:
    """Measure one size and mode; ``step`` is called before each of ``2 * rounds + 1`` parts."""
    write, read = Side(), Side()
    with closing(
        Engine(setting.scratch, setting.size, direct=setting.direct, depth=setting.depth, ring=setting.ring)
    ) as engine:
        step("preparing")
        blocks = make_read_set(engine, setting)
        passes = FioPass(
            folder=os.path.join(setting.scratch, "set"),
            file_bytes=setting.size,
            files=len(blocks),
            direct=setting.direct,
            engine=setting.engine,
            depth=setting.depth,
            seconds=setting.seconds,
        )
        engine.load(blocks, setting.seconds / 4)  # warm: page cache, threads, kernel workers
        engine.ring.submits.clear()
        for number in range(setting.rounds):
            step("reading")
            read.alternate(number, lambda: engine.load(blocks, setting.seconds), lambda: run_fio(fio, passes))
        writer = _Writer(engine, setting, fio)
        for number in range(setting.rounds):
            step("writing")
            write.alternate(number, writer.ours, writer.fios)
        submits = sorted(clock for clock, _ in engine.ring.submits)
        of_cpu = sorted(cpu for _, cpu in engine.ring.submits)
    return {
        "file_bytes": setting.size,
        "direct": setting.direct,
        "depth": setting.depth,
        "ring": engine.ring.name,
        "fio": passes.summary,
        **read.figures("read"),
        **write.figures("write"),
        "submit_p50_ms": figure(percentile(submits, 0.50) * 1e3),
        "submit_p99_ms": figure(percentile(submits, 0.99) * 1e3),
        "submit_cpu_p99_ms": figure(percentile(of_cpu, 0.99) * 1e3),
        "submits": len(submits),
    }


def make_read_set(engine: Engine, setting: Setting) -> list[Block]:
    """Files stored through the engine, then named as fio finds them: ``set/<job>.<number>``."""
    count = setting.count(READ_SET_BYTES)
    stored = [engine.new_block(number) for number in range(count)]
    engine.store(stored)
    folder = Path(setting.scratch, "set")
    folder.mkdir()
    jobs = FioPass(str(folder), setting.size, count, setting.direct, setting.engine, setting.depth).jobs
    blocks = []
    for number, block in enumerate(stored):
        path = f"{folder}/{number % jobs}.{number // jobs}"
        os.rename(block.path, path)
        blocks.append(Block(block.key, path))
    flush(setting.scratch)
    return blocks


class _Writer:
    """Passes that write the same number of new files and remove them, both from an idle file system.

    The folders exist beforehand, as fio's does: what names cost is for `bench metadata` to say.
    """

    def __init__(self, engine: Engine, setting: Setting, fio: Fio) -> None:
        self._engine, self._setting, self._fio = engine, setting, fio
        self._number = 1 << 32  # beyond the read set's keys
        self._count = setting.count(TRIAL_BYTES)
        first = self.ours()
        # As many as take about the time of a read pass.
        self._count = setting.count(min(WRITE_BYTES, int(first.rate * setting.seconds)))

    def _prepare(self) -> None:
        """An idle file system and, for the page cache, memory that this machine really has."""
        flush(self._setting.scratch)
        if not self._setting.direct:
            touch_page_cache(self._setting.scratch, self._count * self._setting.size)

    def ours(self) -> Pass:
        start = self._number
        self._number += self._count
        blocks = [self._engine.new_block(number) for number in range(start, self._number)]
        for block in blocks:
            os.makedirs(os.path.dirname(block.path), exist_ok=True)
        self._prepare()
        measured = self._engine.store(blocks)
        for block in blocks:
            os.unlink(block.path)
        flush(self._setting.scratch)
        return measured

    def fios(self) -> float:
        setting = self._setting
        folder = os.path.join(setting.scratch, "fio")
        os.mkdir(folder)
        what = FioPass(
            folder, setting.size, self._count, setting.direct, setting.engine, setting.depth, write=True
        )
        self._prepare()
        try:
            return run_fio(self._fio, what)
        finally:
            remove_tree(folder)
            flush(setting.scratch)


def touch_page_cache(folder: str, nbytes: int) -> None:
    """Fill that much page cache and give it back at once.

    A virtual machine returns free memory to its host, and each page that comes back costs ten times the copy
    into it: whoever writes first would pay for that.
    """
    path, piece = Path(folder, "touch"), bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(piece))):
            file.write(piece)
    path.unlink()


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of an ascending sequence; 0.0 if it is empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def figure(value: float) -> float:
    """As many digits as a measurement deserves."""
    return round(value, 4)
