"""Mixed load on a real engine for some minutes, every block checked: `python tests/gpu/soak.py --help`.

What a store takes is read back from the KV memory at its submission, and what a load brought at its end, both
by the driver's plain copy and not by our own; the two and the file must be the same bytes. Requests of mixed
lengths share prefixes, some are aborted at any time, and the pool is so small that others are preempted.
Prints one JSON object; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from driver import Driver, take_answers

BLOCK = 256


class CheckedDriver(Driver):
    """Compares pages at submission of a store, pages after a load, and the file."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self.stored: dict[bytes, set[bytes]] = {}
        self.without_origin = 0

    def _watch(self) -> None:
        super()._watch()
        executor = self.executor
        submit = executor.submit_store

        def submit_store(job_id: int, src: Any, dst: Any) -> bool:
            self._synchronize()
            for key, chunk in zip(dst.keys, executor._chunks(dst, src, _store_kind()), strict=True):
                # A set: computed again in another batch it may differ in its last bits; the first wins.
                self.stored.setdefault(key, set()).add(hashlib.blake2b(self._payload(chunk)).digest())
            return submit(job_id, src, dst)

        executor.submit_store = submit_store

    def _synchronize(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()

    def _payload(self, chunk: Any) -> bytes:
        entries = self.executor._parts.device._map.copies(chunk.block_ids, chunk.first)
        return b"".join(
            self.memory.read(address, length)
            for address, length in zip(entries.addresses.tolist(), entries.lengths.tolist(), strict=True)
        )

    def _compare(self, result: Any, submitted: Any) -> None:
        self._synchronize()
        failed = {ordinal for ordinal, _ in result.failed}
        per_chunk = self.executor._per_chunk
        for ordinal, (key, chunk) in enumerate(zip(submitted.plan.keys, submitted.chunks, strict=True)):
            if ordinal in failed:
                continue
            self.checked += 1
            with open(self._path(submitted.plan, ordinal), "rb") as file:
                content = file.read()
            entries = self.executor._parts.device._map.copies(chunk.block_ids, chunk.first)
            for address, offset, length in zip(
                entries.addresses.tolist(), entries.offsets.tolist(), entries.lengths.tolist(), strict=True
            ):
                if self.memory.read(address, length) != content[offset : offset + length]:
                    self.wrong.append(f"job {result.job_id} block {ordinal} offset {offset}: not the file's")
            if key not in self.stored:
                self.without_origin += 1
            # A part of a block was compared with the file above.
            elif len(chunk.block_ids) == per_chunk and (
                hashlib.blake2b(self._payload(chunk)).digest() not in self.stored[key]
            ):
                self.wrong.append(f"job {result.job_id} block {ordinal}: not what was stored")


def _store_kind() -> Any:
    from py_kvcache.worker.jobs import Kind

    return Kind.STORE


class Load:
    """Requests in flight; which come, end and are aborted is decided by one random generator."""

    def __init__(self, driver: CheckedDriver, seed: int, longest: int, width: int) -> None:
        self.driver, self.random, self.longest, self.width = driver, random.Random(seed), longest, width
        self.stems = [[self.random.randrange(100, 30_000) for _ in range(longest)] for _ in range(12)]
        self.alive: set[str] = set()
        self.counts = {"requests": 0, "aborted": 0, "finished": 0, "resets": 0}

    def step(self) -> None:
        """Add some, abort some, one step of the engine."""
        engine, choose = self.driver.llm.llm_engine, self.random
        if len(self.alive) < self.width and choose.random() < 0.5:
            self._add()
        if self.alive and choose.random() < 0.02:
            name = choose.choice(sorted(self.alive))
            engine.abort_request([name])
            self.alive.discard(name)
            self.counts["aborted"] += 1
        if choose.random() < 0.001 and not engine.has_unfinished_requests():
            self.driver.reset_prefix_cache()
            self.counts["resets"] += 1
        for output in engine.step():
            if output.finished:
                self.alive.discard(output.request_id)
                self.counts["finished"] += 1

    def _add(self) -> None:
        from vllm import SamplingParams

        stem = self.random.choice(self.stems)
        length = self.random.choice((1, BLOCK - 1, BLOCK, BLOCK + 1, self.random.randrange(2, self.longest)))
        tail = [self.random.randrange(100, 30_000) for _ in range(self.random.choice((0, 0, 1, 40)))]
        name = f"soak-{self.counts['requests']}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.random.choice((1, 4, 64)), ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": stem[:length] + tail}
        self.driver.llm.llm_engine.add_request(name, prompt, sampling)
        self.alive.add(name)
        self.counts["requests"] += 1


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; the report."""
    import torch

    on_gpu = torch.cuda.is_available()
    driver = CheckedDriver(on_gpu)
    with tempfile.TemporaryDirectory(dir=given.root) as root:
        extra = {"root": root, "gate": "off", **json.loads(given.extra)}  # what is known is loaded
        driver.start(
            model=given.model, load_format=given.load_format, skip_tokenizer_init=True, enforce_eager=True,
            dtype=given.dtype, max_model_len=given.longest + 256, enable_prefix_caching=True,
            num_gpu_blocks_override=given.blocks, max_num_batched_tokens=2048, seed=0,
            gpu_memory_utilization=0.4,  # so that text.py can run beside it
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "PyKvCacheConnector", "kv_connector_module_path": "py_kvcache.connector",
                "kv_role": "kv_both", "kv_connector_extra_config": extra,
            },
        )  # fmt: skip
        load = Load(driver, given.seed, given.longest, given.width)
        end, said = time.monotonic() + given.seconds, time.monotonic()
        while time.monotonic() < end:
            load.step()
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"soak: {load.counts}, {driver.checked} blocks checked", file=sys.stderr, flush=True)
        driver.llm.llm_engine.abort_request(sorted(load.alive))
        settled = driver.settle(60)
        metrics = driver.metrics()["values"]
        report = {
            "schema": "py-kvcache.soak/1",
            "seconds": given.seconds,
            "on_gpu": on_gpu,
            **load.counts,
            "preempted": metrics.get("vllm:num_preemptions"),
            "blocks_checked": driver.checked,
            "stored_keys": len(driver.stored),
            "without_origin": driver.without_origin,
            "wrong": driver.wrong[:20],
            "settled": settled,
        }
        driver.stop()
    idle = settled["slots"]
    good = not driver.wrong and driver.checked > 0 and settled["drained"] and settled["leaks"] == 0
    at_rest = idle.get("free", 0) + idle.get("kept", 0) == sum(idle.values())
    report["good"] = bool(good and settled["lost_now"] == 0 and at_rest)
    return report


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--root", required=True, help="folder for the cache")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of a prompt")
    parser.add_argument("--blocks", type=int, default=1200, help="engine blocks in the pool")
    parser.add_argument("--width", type=int, default=24, help="requests at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extra", default="{}", help="our settings, as JSON")
    given, out = parser.parse_args(), take_answers()
    faulthandler.dump_traceback_later(given.seconds + 120, exit=True)  # whatever hangs is then seen
    report = run(given)
    print(json.dumps(report, indent=1), file=out, flush=True)
    return 0 if report["good"] else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
