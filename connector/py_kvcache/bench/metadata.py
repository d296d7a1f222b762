"""`py-kvcache bench metadata`: look-ups and publications a second, by number of files and of processes."""

from __future__ import annotations

import contextlib
import os
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from json import loads
from typing import Any

from py_kvcache.bench.metadata_worker import CHAIN, Task, block_files, publish, unpublish
from py_kvcache.bench.workspace import (
    MOST_VALUES,
    Progress,
    Steps,
    block_key,
    check_passes,
    judged,
    machine,
    no_progress,
    part_of,
    workspace,
)
from py_kvcache.errors import ConfigError, KvCacheError
from py_kvcache.layout import block_path, temp_path
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import CHAIN_STEP_NS, FileSettings

SCHEMA = "py-kvcache.bench.metadata/1"
FILES = (10_000, 100_000, 1_000_000)
PROCESSES = (1, 4, 16)
MOST_FILES = 100_000_000
MOST_PROCESSES = 256  # each is an interpreter of some 20 MB

LOOKUPS_PER_S = 200_000  # one process
PUBLISH_VS_BARE = 0.80
FLAT = 0.80  # the slowest number of files by the fastest
SIXTEEN_VS_FOUR = 1.0

_CHUNK = 20_000  # files that one process makes before the bar moves
_MOST_PER_S = 60_000  # publications a process may get keys for
_PAIRS = 500  # publications in one of the alternating batches
_SPARE = 1 << 40  # file numbers from here on are removed again


def run(
    root: str,
    *,
    files: Sequence[int] = FILES,
    processes: Sequence[int] = PROCESSES,
    rounds: int = 5,
    seconds: float = 1.0,
    on_progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measure and return the report, ready for JSON. The files are empty: what is measured is names.

    Args:
        root: folder on the volume; a folder of ours is made in it and removed again.
        files: sizes of the cache at which to measure, ascending.
        seconds: of one measurement; each is repeated ``rounds`` times, the median counts.
    Raises:
        RootError: root cannot be used or has too little space or inodes; ConfigError for bad arguments.
    """
    if not files or list(files) != sorted(set(files)) or files[0] < 1 or not processes or min(processes) < 1:
        raise ConfigError("the numbers of files must be ascending, those of processes 1 or more")
    if files[-1] > MOST_FILES or max(processes) > MOST_PROCESSES:
        raise ConfigError(f"files must be {MOST_FILES:,} at most, processes {MOST_PROCESSES}")
    if len(files) > MOST_VALUES or len(processes) > MOST_VALUES:
        raise ConfigError(f"there must be {MOST_VALUES} numbers in a list at most")
    check_passes(rounds, seconds)
    # Most files lie alone in their folder, and a folder has a 4 KiB block of its own.
    spare = _MOST_PER_S * int(seconds + 1) + 100_000
    with workspace(root, files[-1] * 4096 + (256 << 20), 2 * files[-1] + spare) as folder:
        os.makedirs(part_of(folder), 0o755)
        parts = sum(-(-(high - low) // _CHUNK) for low, high in _ranges(files))
        steps = Steps(on_progress, parts + len(files) * (1 + 2 * len(processes) * rounds) + 1)
        rows = []
        for low, high in _ranges(files):
            _populate(folder, low, high, steps)
            rows.append(_measure(folder, high, processes, rounds, seconds, steps))
        steps(f"removing {files[-1]:,} files")
    report: dict[str, Any] = {"schema": SCHEMA, "machine": machine(root), "file_bytes": 0, "results": rows}
    return judged(report, below_target(report))


def _ranges(files: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *files], files, strict=False)


def _populate(folder: str, low: int, high: int, steps: Steps) -> None:
    """Make the files from number ``low`` up to ``high``, with as many processes as there are cores."""
    tasks = [Task("populate", folder, start, min(_CHUNK, high - start)) for start in range(low, high, _CHUNK)]
    width = len(os.sched_getaffinity(0))
    for start in range(0, len(tasks), width):
        for _ in tasks[start : start + width]:
            steps(f"making {high:,} files")
        together(tasks[start : start + width], 0.0)


def _measure(
    folder: str, count: int, processes: Sequence[int], rounds: int, seconds: float, steps: Steps
) -> dict[str, Any]:
    steps(f"{count:,} files: publications against bare calls")
    row: dict[str, Any] = {"files": count, **publish_vs_bare(folder, rounds), "processes": []}
    lookups: dict[int, list[float]] = {number: [] for number in processes}
    publications: dict[int, list[float]] = {number: [] for number in processes}
    # The numbers of processes take turns in each round: what the publications before left behind (ext4 passes
    # over inodes that were freed a minute ago) slows all of them alike then.
    for turn in range(rounds):
        for number in processes if turn % 2 == 0 else processes[::-1]:
            steps(f"{count:,} files: look-ups by {number}")
            lookups[number].append(together([Task("lookup", folder, 0, count)] * number, seconds))
            steps(f"{count:,} files: publications by {number}")
            most = int(_MOST_PER_S * seconds / number) + 64
            tasks = [Task("publish", folder, _SPARE + n * most, most) for n in range(number)]
            publications[number].append(together(tasks, seconds))
    for number in processes:
        row["processes"].append(
            {
                "processes": number,
                "lookups_per_s": round(statistics.median(lookups[number])),
                "lookups_per_s_each": round(statistics.median(lookups[number]) / number),
                "publications_per_s": round(statistics.median(publications[number])),
            }
        )
    return row


def together(tasks: Sequence[Task], seconds: float) -> float:
    """Run the tasks in processes of their own, all over the same time. Returns operations a second in all."""
    command = [sys.executable, "-m", "py_kvcache.bench.metadata_worker"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with contextlib.ExitStack() as stack:
        children: list[subprocess.Popen[str]] = []
        for task in tasks:
            child = subprocess.Popen(
                [*command, task.as_json()],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(stack.enter_context(child))
            stack.callback(_kill, child)
        for child in children:
            if _line(child) != "ready":
                raise KvCacheError("a process of the benchmark did not start")
        end = f"{time.monotonic() + seconds}\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write(end)
            child.stdin.flush()
        said = [loads(_line(child) or "{}") for child in children]
    if not all(said):
        raise KvCacheError("a process of the benchmark failed; its error is above")
    return sum(float(one["done"]) / float(one["seconds"]) for one in said)


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None and sys.exc_info()[0] is not None:
        child.kill()


def publish_vs_bare(folder: str, rounds: int, pairs: int = _PAIRS) -> dict[str, Any]:
    """Our publication and a bare loop of the same system calls, alternating; medians over the rounds."""
    part, files = part_of(folder), block_files(folder)
    calls = BareCalls(files.ops, files.settings)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(rounds):
        first = _SPARE + 2 * number * pairs
        mine = [block_key(first + i) for i in range(pairs)]
        theirs = [block_key(first + pairs + i) for i in range(pairs)]
        names = [_names(part, key, i) for i, key in enumerate(theirs, first)]
        work = [
            (ours, partial(publish, files, part, mine, first)),
            (bare, partial(calls.publish_all, names, first)),
        ]
        # They take turns to begin, since the first finds the emptier journal.
        for results, publish_them in work if number % 2 == 0 else work[::-1]:
            begin = time.perf_counter()
            publish_them()
            results.append(pairs / (time.perf_counter() - begin))
        unpublish(part, mine + theirs)
    return {
        "publish_vs_bare": round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 4),
        "publications_per_s": round(statistics.median(ours)),
        "bare_per_s": round(statistics.median(bare)),
    }


def _names(part: str, key: bytes, number: int) -> tuple[str, str]:
    final = block_path(part, key)
    return final, temp_path(final, hostname="bare", pid=os.getpid(), token=f"{number:x}")


class BareCalls:
    """The system calls of one publication of an empty block, and nothing else: no decisions, no errors."""

    def __init__(self, ops: FileOps, settings: FileSettings) -> None:
        self.ops, self.file_mode, self.dir_mode = ops, settings.file_mode, settings.dir_mode

    def publish_all(self, names: Sequence[tuple[str, str]], first: int) -> None:
        """One after the other; pairs of final and temporary name."""
        for number, (final, temp) in enumerate(names, first):
            self.publish(final, temp, number % CHAIN)

    def publish(self, final: str, temp: str, index: int) -> None:
        """All calls in the order in which BlockFiles makes them."""
        ops = self.ops
        with contextlib.suppress(FileNotFoundError):
            ops.lstat(final)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = ops.open(temp, flags, self.file_mode)
        except FileNotFoundError:
            self._folders(os.path.dirname(final))
            fd = ops.open(temp, flags, self.file_mode)
        ops.write(fd, b"")
        found = ops.fstat(fd)
        if stat.S_IMODE(found.st_mode) != self.file_mode:
            ops.fchmod(fd, self.file_mode)
        if index:
            ops.utime(fd, ns=(found.st_mtime_ns, found.st_mtime_ns - index * CHAIN_STEP_NS))
        ops.close(fd)
        ops.link(temp, final)
        ops.unlink(temp)

    def _folders(self, leaf: str) -> None:
        ops = self.ops
        try:
            ops.mkdir(leaf, self.dir_mode)
        except FileNotFoundError:
            top = os.path.dirname(leaf)
            ops.mkdir(top, self.dir_mode)
            ops.chmod(top, self.dir_mode)
            ops.mkdir(leaf, self.dir_mode)
        except FileExistsError:
            return
        ops.chmod(leaf, self.dir_mode)


def below_target(report: dict[str, Any]) -> list[str]:
    """One sentence for each figure that misses what names are held against."""
    found: list[str] = []
    alone: dict[str, list[int]] = {"lookups_per_s": [], "publications_per_s": []}
    for row in report["results"]:
        name, reached = f"{row['files']:,} files", row["publish_vs_bare"]
        if reached < PUBLISH_VS_BARE:
            found.append(f"{name}: publishing reaches {reached:.2f} of bare calls, not {PUBLISH_VS_BARE}")
        rates = {one["processes"]: one for one in row["processes"]}
        if 1 in rates:
            for what, values in alone.items():
                values.append(rates[1][what])
            if alone["lookups_per_s"][-1] < LOOKUPS_PER_S:
                found.append(f"{name}: {rates[1]['lookups_per_s']:,} lookups_per_s, not {LOOKUPS_PER_S:,}")
        if 4 in rates and 16 in rates:
            found += [
                f"{name}: {rates[16][what]:,} {what} by 16 processes, {rates[4][what]:,} by 4"
                for what in alone
                if rates[16][what] < SIXTEEN_VS_FOUR * rates[4][what]
            ]
    for what, values in alone.items():
        if values and min(values) < FLAT * max(values):
            found.append(f"{what} range from {min(values):,} to {max(values):,} over the numbers of files")
    return found
