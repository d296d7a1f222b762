"""The floor of a load: our ring, checks and copies on the same files, without vLLM around them.

Reads the block files that the connector stored under a root, in groups as large as documents, one job a
group and all handed in at once, into tensors of the shape that the engine had. Runs as a process of its own
(see serve_worker.py), since it takes the GPU's memory and staging memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from py_kvcache.bench.serve_worker import Emit, die_with_parent, open_events
from py_kvcache.config import Config, parse_config
from py_kvcache.errors import KvCacheError
from py_kvcache.footer import unpack_footer
from py_kvcache.layout import (
    FOOTER_BYTES,
    file_bytes,
    parse_block_path,
    parse_namespace_dir,
    read_config,
)
from py_kvcache.worker import assembly
from py_kvcache.worker.device import regions_of
from py_kvcache.worker.jobs import BlockWork, Job, JobResult, Kind
from py_kvcache.worker.pages import Chunk, PageMap

_MOST_TENSOR_BYTES = {"cuda": 16 << 30, "cpu": 1 << 30}
_POLL_S = 0.001
_DEADLINE_S = 600.0
_STOP_S = 10.0


@dataclass(frozen=True)
class Stored:
    """One namespace's files under a root, and the shape of its KV tensors.

    Args:
        paths: block files in order of their names; which document they belong to does not matter here.
        payload_bytes: KV bytes in one file.
        layers: tensors that an engine block's bytes are spread over.
        blocks_per_chunk: engine blocks in a file.
    """

    paths: tuple[str, ...]
    payload_bytes: int
    layers: int
    blocks_per_chunk: int
    block_tokens: int

    @property
    def page_bytes(self) -> int:
        """Of one engine block in one tensor."""
        return self.payload_bytes // (self.layers * self.blocks_per_chunk)


def find_stored(root: str) -> Stored:
    """Look at the root of one engine. Raises KvCacheError if it holds no blocks, OSError."""
    paths = sorted(
        path
        for folder, _, names in os.walk(root)
        for path in (os.path.join(folder, name) for name in names)
        if parse_block_path(path) is not None
    )
    spaces = [name for name in os.listdir(root) if _is_described(name)]
    if not paths or not spaces:
        raise KvCacheError(f"no blocks of py-kvcache are stored in {root}")
    with Path(paths[0]).open("rb") as file:
        file.seek(-FOOTER_BYTES, os.SEEK_END)
        payload = unpack_footer(file.read(FOOTER_BYTES)).payload_bytes
    fields = read_config(root, spaces[0])
    group, tokens = fields["groups"][0], fields["block_tokens"]
    is_slab = any(json.loads(layout)["slab"] for layout in fields["layouts"])
    layers = 1 if is_slab else len(group["layers"])
    return Stored(tuple(paths), payload, layers, tokens // group["block_size"], tokens)


def _is_described(name: str) -> bool:
    parsed = parse_namespace_dir(name)
    return parsed is not None and parsed.part is None


def make_tensors(stored: Stored, files: int) -> Any:
    """KV tensors for that many files, fewer where memory is short, as vLLM's CanonicalKVCaches has them."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fit = max(1, _MOST_TENSOR_BYTES[device] // stored.payload_bytes)
    blocks = min(files, fit) * stored.blocks_per_chunk
    tensors = [
        SimpleNamespace(tensor=torch.zeros((blocks, stored.page_bytes), dtype=torch.int8, device=device))
        for _ in range(stored.layers)
    ]
    refs = [SimpleNamespace(tensor_idx=n, page_size_bytes=stored.page_bytes) for n in range(stored.layers)]
    return SimpleNamespace(tensors=tensors, group_data_refs=[refs])


class Floor:
    """A worker's parts on dummy tensors. Close it, or threads and pinned memory stay."""

    def __init__(self, root: str, options: dict[str, Any], stored: Stored, most_files: int) -> None:
        config: Config = parse_config(
            {"root": root, "block_tokens": stored.block_tokens, **options}, environ={}
        )
        self._stored = stored
        # Held here: the device only keeps addresses.
        self._tensors = make_tensors(stored, most_files)
        self._places = int(self._tensors.tensors[0].tensor.shape[0]) // stored.blocks_per_chunk
        page_map = PageMap(regions_of(self._tensors, 0), stored.blocks_per_chunk)
        self._parts = assembly.build(config, self._tensors, page_map, 0)
        self._parts.reactor.start()
        self._jobs = 0

    def close(self) -> None:
        """End all threads."""
        self._parts.close(_STOP_S)

    def load(self, groups: Sequence[Sequence[str]]) -> list[float]:
        """Hand in one job a group, at once; seconds from then until each has been copied.

        Raises KvCacheError if a block cannot be loaded: the figures would be of something else.
        """
        per_chunk = self._stored.blocks_per_chunk
        jobs, number = [], 0
        for group in groups:
            works = []
            for path in group:
                parsed = parse_block_path(path)
                assert parsed is not None
                place = number % self._places
                ids = np.arange(place * per_chunk, (place + 1) * per_chunk, dtype=np.int64)
                works.append(BlockWork(path, parsed.key, number, Chunk(ids, 0)))
                number += 1
            jobs.append(tuple(works))
        begin = time.perf_counter()
        ended: dict[int, float] = {}
        first = self._jobs + 1
        for blocks in jobs:
            self._jobs += 1
            after = self._parts.device.record()
            job = Job(self._jobs, Kind.LOAD, blocks, after, time.monotonic() + _DEADLINE_S)
            self._parts.reactor.submit(job)
        while len(ended) < len(jobs):
            for result in self._parts.reactor.take_finished():
                _must_be_good(result)
                ended[result.job_id] = time.perf_counter() - begin
            time.sleep(_POLL_S)
        return [ended[first + n] for n in range(len(jobs))]


def _must_be_good(result: JobResult) -> None:
    if result.failed:
        raise KvCacheError(f"the floor's load failed: {result.failed[0][1]}")


def write_again(paths: Sequence[str]) -> None:
    """Replace files by copies, so that nobody has read them: as a warm round finds what a cold one wrote.

    In a page cache, and tmpfs is one, the first reading of a page moves it to another list of the kernel's;
    on 16 cores that makes it a quarter slower than the later ones.
    """

    def copy(path: str) -> None:
        fresh = f"{path}.copy"
        shutil.copyfile(path, fresh)
        os.replace(fresh, path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(copy, paths))


def _phases(floor: Floor, stored: Stored, shape: dict[str, Any], emit: Emit) -> None:
    for tokens in shape["tokens"]:
        each = tokens // stored.block_tokens
        wanted = each * shape["documents"]
        if not 0 < wanted <= len(stored.paths):
            emit({"event": "note", "text": f"{len(stored.paths)} files are too few for {wanted} of {tokens}"})
            continue
        groups = [stored.paths[n * each : (n + 1) * each] for n in range(shape["documents"])]
        # Once unmeasured: first touches of memory cost what an engine's prewarming paid for.
        for phase, some in (("prewarm", groups), ("warm", groups), ("warm2", groups), ("alone", groups[:1])):
            if phase == "warm":
                write_again([path for group in groups for path in group])
            emit({"event": "begin", "text": f"{tokens} tokens, {phase}"})
            begin = time.perf_counter()
            seconds = floor.load(some)
            emit(
                {
                    "event": "phase",
                    "tokens": tokens,
                    "phase": phase,
                    "seconds": time.perf_counter() - begin,
                    "requests": [
                        {
                            "document": n,
                            "submitted_s": 0.0,
                            "ttft_s": second,
                            "prompt_tokens": tokens,
                            "cached_tokens": each * stored.block_tokens,
                        }
                        for n, second in enumerate(seconds)
                    ],
                    "bytes": sum(file_bytes(stored.payload_bytes) * len(group) for group in some),
                }
            )


def main(arguments: Sequence[str]) -> int:
    """Measure what the task (JSON file) asks for."""
    die_with_parent()
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    emit = open_events(task["events"])
    begin = time.perf_counter()
    stored = find_stored(task["folder"])
    shape = task["shape"]
    most = shape["documents"] * max(shape["tokens"]) // stored.block_tokens
    floor = Floor(task["folder"], task["options"], stored, max(1, min(most, len(stored.paths))))
    try:
        emit({"event": "started", "startup_s": time.perf_counter() - begin})
        _phases(floor, stored, shape, emit)
        emit({"event": "done"})
    finally:
        floor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
