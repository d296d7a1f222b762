"""What else costs throughput: checksums, and a second thread that keeps the interpreter busy."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from py_kvcache.bench.compare import TRIAL_BYTES, Setting, figure, make_read_set
from py_kvcache.bench.engine import Block, Engine, Pass
from py_kvcache.config import CHECKSUM_THREADS
from py_kvcache.worker.checksum import seal_block

TOLERATED_LOSS = 0.10
_DEEPER = (32, 64, 128)


@contextmanager
def busy_thread() -> Iterator[None]:
    """Keep one thread running Python code, as vLLM's own does."""
    over = False

    def spin() -> None:
        number = 0
        while not over:
            number += 1

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


def checksum_cost(setting: Setting, step: Callable[[str], None]) -> dict[str, Any]:
    """Reads and writes with and without digests, alternating; two parts."""
    read: dict[bool, list[Pass]] = {False: [], True: []}
    write: dict[bool, list[Pass]] = {False: [], True: []}
    step("checksums")
    engines = {on: _engine(setting, setting.depth, checksum=on) for on in (False, True)}
    try:
        # Sealed with a digest: an engine without checksums reads such files just as well.
        blocks = make_read_set(engines[True], setting)
        count = setting.count(TRIAL_BYTES)
        step("checksums")
        for number in range(2 * setting.rounds):
            on = number % 4 in (1, 2)  # off on, on off, ...
            read[on].append(engines[on].load(blocks, setting.seconds))
            start = (number + 1) << 32
            new = [engines[on].new_block(start + i) for i in range(count)]
            write[on].append(engines[on].store(new))
            for block in new:
                Path(block.path).unlink()
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "file_bytes": setting.size,
        "direct": setting.direct,
        "threads": CHECKSUM_THREADS,
        "one_thread_gb_s": figure(_digest_rate(setting.size) / 1e9),
        "read": _with_and_without(read),
        "write": _with_and_without(write),
    }


def _with_and_without(passes: dict[bool, list[Pass]]) -> dict[str, float]:
    rate = {on: statistics.median(p.rate for p in some) for on, some in passes.items()}
    cpu = {on: statistics.median(p.cpu_s_per_gb for p in some) for on, some in passes.items()}
    return {
        "without_gb_s": figure(rate[False] / 1e9),
        "with_gb_s": figure(rate[True] / 1e9),
        "extra_cpu_s_per_gb": figure(cpu[True] - cpu[False]),
    }


def _digest_rate(size: int) -> float:
    memory = memoryview(bytearray(size))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        seal_block(memory, bytes(36), 0, size - 4096, enabled=True)
        times.append(time.perf_counter() - begin)
    return size / statistics.median(times)


def second_thread_cost(setting: Setting, step: Callable[[str], None]) -> dict[str, Any]:
    """Reads beside a busy thread and alone, alternating; then the depth that makes up for it. One part."""
    step("a second thread")
    with closing(_engine(setting, setting.depth)) as engine:
        blocks = make_read_set(engine, setting)
        alone, beside = [], []
        for number in range(setting.rounds):
            for is_beside in (False, True) if number % 2 == 0 else (True, False):
                if is_beside:
                    beside.append(_beside(engine, blocks, setting.seconds))
                else:
                    alone.append(engine.load(blocks, setting.seconds).rate)
    quiet = statistics.median(alone)
    loss = 1 - statistics.median(b / a for a, b in zip(alone, beside, strict=True))
    found: dict[str, Any] = {
        "file_bytes": setting.size,
        "direct": setting.direct,
        "depth": setting.depth,
        "alone_gb_s": figure(quiet / 1e9),
        "beside_gb_s": figure(statistics.median(beside) / 1e9),
        "loss": figure(loss),
        "depth_that_restores": setting.depth if loss <= TOLERATED_LOSS else None,
        "deeper": [],
    }
    for depth in _DEEPER if loss > TOLERATED_LOSS else ():
        with closing(_engine(setting, depth)) as engine:
            rate = statistics.median(_beside(engine, blocks, setting.seconds) for _ in range(setting.rounds))
        found["deeper"].append({"depth": depth, "beside_gb_s": figure(rate / 1e9)})
        if rate >= (1 - TOLERATED_LOSS) * quiet:
            found["depth_that_restores"] = depth
            break
    return found


def _beside(engine: Engine, blocks: list[Block], seconds: float) -> float:
    with busy_thread():
        return engine.load(blocks, seconds).rate


def _engine(setting: Setting, depth: int, *, checksum: bool = False) -> Engine:
    return Engine(
        setting.scratch,
        setting.size,
        direct=setting.direct,
        depth=depth,
        ring=setting.ring,
        checksum=checksum,
    )


def reduced(setting: Setting, scratch: str, size: int) -> Setting:
    """The same measurement for another size, in another folder."""
    return replace(setting, scratch=scratch, size=size, rounds=setting.rounds)
