"""What an engine pays for a connector that declines every hit, piece by piece: `--help`.

One engine after the other, each in a process of its own, its core in that process: vLLM alone (prefix caching
off, and on), and ours, whose gate says never. Milliseconds of each piece for a prompt and for a decode step,
means over `--times` requests. Prints one JSON object. Runs on a CPU engine, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# by-layer: ours, KV tensors as without a connector: layer by layer (up to vLLM 0.28 one slab has all), NHD.
WAYS = ("none", "prefix", "ours", "by-layer")
OURS = WAYS[2:]
PIECES = {
    "core": ("preprocess_add_request",),
    "scheduler": ("schedule", "update_from_output"),
    "model_executor": ("execute_model", "sample_tokens"),
}


def start(given: argparse.Namespace, root: str) -> Any:
    """The engine; ours with thresholds that say never."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from py_kvcache.scheduler.thresholds import CHECK_EVERY_S

    options: dict[str, Any] = {
        "model": given.model, "load_format": given.load_format, "skip_tokenizer_init": True,
        "enforce_eager": True, "dtype": given.dtype, "max_model_len": given.tokens + given.decode + 1,
        "max_num_batched_tokens": max(8192, given.tokens + 1), "seed": 0, "block_size": given.block_size,
        "num_gpu_blocks_override": 2 * (given.tokens + given.decode) // given.block_size + 8,
        "enable_prefix_caching": given.way == "prefix",
    }  # fmt: skip
    path = Path(root, "never.json")
    if given.way == "by-layer":
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        OffloadingConnector.prefer_cross_layer_blocks = property(lambda _: False)
        OffloadingConnector.get_required_kvcache_layout = classmethod(lambda *_: None)
    if given.way in OURS:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="PyKvCacheConnector",
            kv_connector_module_path="py_kvcache.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"root": root, "gate": "static", "thresholds": str(path)},
        )
    llm = LLM(**options)
    if given.way in OURS:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        # The engine's digest is known once its workers have reported: after a first step.
        sampling = SamplingParams(max_tokens=1, detokenize=False)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
        digest = scheduler.connector.manager._names._spaces.engine()
        if digest is None:
            raise SystemExit("the engine has no digest after its first step")
        never = {source: [[1, 10**9]] for source in ("disk", "memory")}
        content = {"schema": "py-kvcache/thresholds/1", "engine": digest, "thresholds": never}
        path.write_text(json.dumps(content), encoding="utf-8")
        time.sleep(CHECK_EVERY_S + 1.0)
    return llm


def watch(core: Any) -> dict[str, float]:
    """Seconds in each piece from now on."""
    spent: dict[str, float] = {}
    for owner, names in PIECES.items():
        found = core if owner == "core" else getattr(core, owner)
        for name in names:
            setattr(found, name, _timed(getattr(found, name), name, spent))
    return spent


def watch_hooks(core: Any) -> dict[str, float]:
    """Seconds in each public method of our connector's two instances, from now on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    spent: dict[str, float] = {}
    for role, owner in (("scheduler", core.scheduler.connector), ("worker", get_kv_transfer_group())):
        for name, kind in vars(KVConnectorBase_V1).items():
            if callable(kind) and not name.startswith("_"):
                setattr(owner, name, _timed(getattr(owner, name), f"{role}.{name}", spent))
    executor = get_kv_transfer_group().executor
    executor.submit_load = _timed(executor.submit_load, "submit_load", spent)
    return spent


def _timed(function: Any, name: str, spent: dict[str, float]) -> Any:
    def timed(*args: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    return timed


def measure(given: argparse.Namespace) -> None:
    """One way: prompts of their own, then decode steps."""
    from vllm import SamplingParams

    llm = start(given, given.root)
    choose = random.Random(given.seed)
    prompts = [[choose.randrange(5, 1_000) for _ in range(given.tokens)] for _ in range(4)]

    def ask(number: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate({"prompt_token_ids": prompts[number % 4]}, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    for number in range(8):
        ask(number, 1)
    time.sleep(2.0)  # what is stored behind the answers
    spent = watch(llm.llm_engine.engine_core.engine_core)
    hooks = watch_hooks(llm.llm_engine.engine_core.engine_core) if given.way in OURS else {}
    report, loaded = {}, False
    for what, tokens in (("prompt", 1), ("decode_step", given.decode)):
        spent.clear()
        hooks.clear()
        whole = sum(ask(number, tokens) for number in range(given.times))
        # Of the decoding requests the first step is the prompt's: told apart by what that cost.
        pieces = {"whole": whole, **spent, **hooks}
        loaded = loaded or "submit_load" in hooks
        if what == "decode_step":
            pieces = {k: (v - report["prompt"].get(k, 0.0) * given.times / 1e3) for k, v in pieces.items()}
        steps = given.times * max(1, tokens - 1)
        report[what] = {name: round(1e3 * seconds / steps, 4) for name, seconds in pieces.items()}
    if loaded:
        raise SystemExit("something was loaded: this is not what declining costs")
    print(json.dumps({"way": given.way, **report}), flush=True)
    os._exit(0)  # vLLM's own end takes long


def main() -> int:
    """One child for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--root", default="/dev/shm", help="folders of ours lie in it")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--decode", type=int, default=50)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS), help="these, one after the other")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    given = parser.parse_args()
    if given.way:
        measure(given)
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    reports = []
    for way in given.ways.split(","):
        with tempfile.TemporaryDirectory(dir=given.root) as root:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--root", root, "--way", way],
                env=environment, stdout=subprocess.PIPE, check=False, text=True,
            )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            print(f"{way} ended with exit code {done.returncode}", file=sys.stderr)
            return 1
        reports.append(json.loads(lines[-1]))
    print(json.dumps(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
