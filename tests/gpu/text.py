"""Text with reloaded blocks against vLLM's own prefix caching at the same boundary: `--help`.

Prompts are one token longer than a number of whole blocks, so that both reuse the same tokens. Three engines
one after the other: vLLM's prefix caching (asked twice), ours cold, ours in a new process. Prints one JSON
object; exit code 1 if a text differs or nothing was reused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from session import Session


def ask(session: Session, prompts: list[list[int]], tokens: int) -> tuple[list[Any], list[int]]:
    """One after the other, so that every engine has the same batches."""
    answers = [session.generate([prompt], max_tokens=tokens) for prompt in prompts]
    return [answer["tokens"][0][0] for answer in answers], [answer["cached"][0] for answer in answers]


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All engines; the report."""
    choose, blocks = random.Random(given.seed), [int(n) for n in given.whole_blocks.split(",")]
    prompts = [[choose.randrange(100, 30_000) for _ in range(256 * n + 1)] for n in blocks]
    engine = {
        "model": given.model, "load_format": given.load_format, "skip_tokenizer_init": True,
        "enforce_eager": True, "dtype": given.dtype, "max_model_len": 256 * max(blocks) + 512, "seed": 0,
        "num_gpu_blocks_override": given.blocks, "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.4,  # so that soak.py can run beside it
    }  # fmt: skip
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def session(**more: Any) -> Session:
        found = Session(env, timeout=600)
        found.call("start", **engine, **more)
        return found

    theirs = session(enable_prefix_caching=True)
    cold, _ = ask(theirs, prompts, given.tokens)
    reused, theirs_cached = ask(theirs, prompts, given.tokens)
    theirs.close()
    with tempfile.TemporaryDirectory(dir=given.root) as root:
        ours = {
            "enable_prefix_caching": False,
            "kv_transfer_config": {
                "kv_connector": "PyKvCacheConnector", "kv_connector_module_path": "py_kvcache.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"root": root, "gate": "off", **json.loads(given.extra)},
            },
        }  # fmt: skip
        first = session(**ours)
        our_cold, _ = ask(first, prompts, given.tokens)
        first.call("settle")
        first.close()
        second = session(**ours)
        loaded, ours_cached = ask(second, prompts, given.tokens)
        second.close()
    report = {
        "schema": "py-kvcache.text/1",
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "cached_by_vllm": theirs_cached,
        "loaded_by_us": ours_cached,
        "cold_equal": [a == b for a, b in zip(cold, our_cold, strict=True)],
        "reused_equal": [a == b for a, b in zip(reused, loaded, strict=True)],
        "reused_equals_cold": [a == b for a, b in zip(reused, cold, strict=True)],
        "distinct_tokens": len({token for text in loaded for token in text}),
    }
    whole = [256 * n for n in blocks]
    report["good"] = bool(all(report["reused_equal"]) and ours_cached == whole and theirs_cached == whole)
    return report


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--root", required=True, help="folder for the cache")
    parser.add_argument(
        "--whole-blocks", default="1,4,24,100", help="lengths of the prompts in blocks of 256"
    )
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--blocks", type=int, default=8000, help="engine blocks in the pool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extra", default="{}", help="our settings, as JSON")
    report = run(parser.parse_args())
    print(json.dumps(report, indent=1))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
