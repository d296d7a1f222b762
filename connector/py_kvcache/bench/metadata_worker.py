"""One process of `bench metadata`: get ready, wait for the word, work until a given time, say how fast.

Started as ``python -m py_kvcache.bench.metadata_worker TASK`` with the task as JSON. Prints ``ready``, reads
the end (seconds of CLOCK_MONOTONIC, which all processes share) from stdin, prints one JSON object.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from py_kvcache.bench.workspace import block_key, part_of
from py_kvcache.layout import block_path
from py_kvcache.worker.fileops import FileOps
from py_kvcache.worker.publication import BlockFiles, FileSettings

CHAIN = 64  # blocks of one prefix: the index decides whether a file's time is set
_LOOKUP_KEYS = 20_000


@dataclass(frozen=True)
class Task:
    """``kind`` is lookup (among ``count`` files numbered from 0), publish (``count`` at most, from number
    ``first`` on, until the end; removed afterwards) or populate (all ``count`` from ``first`` on; kept)."""

    kind: str
    folder: str
    first: int
    count: int

    def as_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def block_files(folder: str) -> BlockFiles:
    """The publisher's own steps, as the worker's threads run them."""
    return BlockFiles(FileOps(), FileSettings(folder))


def publish(files: BlockFiles, part: str, keys: Sequence[bytes], first: int) -> None:
    """Publish an empty block for each key; ``first`` is the number of the first, for its place in a chain."""
    for number, key in enumerate(keys, first):
        files.publish(block_path(part, key), b"", number % CHAIN)


def unpublish(part: str, keys: Sequence[bytes]) -> None:
    """Remove those files and the folders that only they needed."""
    for key in keys:
        path = Path(block_path(part, key))
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: others need it
            path.parent.rmdir()
            path.parent.parent.rmdir()


def look_up(part: str, keys: Sequence[bytes]) -> int:
    """How many blocks exist, asked as the scheduler's probe asks."""
    found = 0
    for key in keys:
        try:
            found += stat.S_ISREG(os.lstat(block_path(part, key)).st_mode)
        except OSError:
            continue
    return found


def lookup_keys(count: int) -> list[bytes]:
    """Half of them of the ``count`` files that exist, half of none, in no order."""
    half = min(count, _LOOKUP_KEYS // 2)
    choose = random.Random(0)
    numbers = choose.sample(range(count), half) + [-1 - n for n in range(half)]
    choose.shuffle(numbers)
    return [block_key(number % 2**63) for number in numbers]


def prepare(task: Task) -> Iterator[list[bytes]]:
    """The batches of keys to work on, made before the clock runs; without end for look-ups."""
    if task.kind == "lookup":
        keys = lookup_keys(task.count)
        return itertools.cycle(_batches(keys, 512))
    return iter(_batches([block_key(n) for n in range(task.first, task.first + task.count)], 64))


def _batches(keys: list[bytes], size: int) -> list[list[bytes]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def work(task: Task, batches: Iterator[list[bytes]], end: float) -> tuple[int, float]:
    """Do the task until ``end``, populate to its own end. Returns operations and seconds."""
    part, files = part_of(task.folder), block_files(task.folder)
    done, used = 0, []
    begin = time.monotonic()
    for batch in batches:
        if task.kind == "lookup":
            look_up(part, batch)
        else:
            publish(files, part, batch, task.first + done)
            used.append(batch)
        done += len(batch)
        if task.kind != "populate" and time.monotonic() >= end:
            break
    seconds = time.monotonic() - begin
    if task.kind == "publish":
        for batch in used:
            unpublish(part, batch)
    return done, seconds


def main(arguments: Sequence[str]) -> int:
    """See the module's text."""
    task = Task(**json.loads(arguments[0]))
    batches = prepare(task)
    try:
        print("ready", flush=True)
        word = sys.stdin.readline()
        if not word:
            return 1  # whoever started this has gone
        done, seconds = work(task, batches, float(word))
        print(json.dumps({"done": done, "seconds": seconds}), flush=True)
    except BrokenPipeError:
        # The same, noticed at the answer. Python flushes once more at its end: into nothing, then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; who started this ends it
    sys.exit(main(sys.argv[1:]))
